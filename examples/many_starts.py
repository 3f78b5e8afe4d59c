"""Sixty-four starts of a small model in one process, most of them bad; tuned, and the best of them kept.

python examples/many_starts.py [--replicas 64] [--steps 1500]
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import onepass

Batch = tuple[Tensor, Tensor]


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def accuracy(model: nn.Module, batch: Batch) -> Tensor:
    right: Tensor = model(batch[0]).argmax(-1) == batch[1]
    return right.float().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1500)
    args = parser.parse_args()

    data = load_digits()
    order = torch.randperm(len(data.data), generator=torch.Generator().manual_seed(0))
    inputs, targets = torch.tensor(data.data, dtype=torch.float32)[order] / 16, torch.tensor(data.target)[order]
    train, valid, test = ((inputs[rows], targets[rows]) for rows in (slice(1200), slice(1200, 1500), slice(1500, None)))

    start = {"lr": onepass.LogUniform(1e-6, 1.0), "momentum": onepass.Uniform(0.0, 1.0), "weight_decay": 1e-4}
    for tune in ((), ("lr", "momentum", "weight_decay")):
        population = onepass.Population(make_model, loss, replicas=args.replicas, start=start, tune=tune)
        batches = onepass.Minibatches(train, size=100, per_replica=True)
        population.run(batches, [valid], steps=args.steps, progress=True)
        found = population.evaluate(accuracy, test).sort().values
        worst, median, best = (f"{found[i]:.1%}" for i in (0, len(found) // 2, -1))
        print(f"{'tuned' if tune else 'plain'}: test accuracy worst {worst}, median {median}, best {best}")

    with torch.no_grad():
        model = population.best()[0].eval()
        print(f"best on validation: {accuracy(model, test):.1%}")


if __name__ == "__main__":
    main()
