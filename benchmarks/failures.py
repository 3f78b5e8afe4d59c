"""How a tuned run goes wrong, on purpose: the small runs behind docs/when-it-fails.md.

python benchmarks/failures.py [NAME ...] [--steps 1500] [--seeds 3]      each takes some seconds
"""

from __future__ import annotations

import argparse
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import onepass
from onepass.curvature import exact, finite_difference

Batch = tuple[Tensor, Tensor]

images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
images, labels = images[order].float() / 16, labels[order]
noisy = torch.where(order % 5 == 0, (order * 7) % 10, labels)  # a wrong label in about every sixth
valid, test = (images[1200:1500], labels[1200:1500]), (images[1500:], labels[1500:])


def cross_entropy(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def first(rows: int, targets: Tensor = labels) -> Batch:
    return images[:rows], targets[:rows]


def tuned(
    train: Batch,
    by: Batch,
    *,
    steps: int,
    seed: int,
    size: int | None = 50,
    shuffled: bool = True,
    weight_decay: float = 1e-3,
    **settings: Any,
) -> tuple[onepass.Tuner, float]:
    """A small network on digits by SGD from lr 0.01; the tuner, and the test loss in the end."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=weight_decay)
    settings = {"loss": cross_entropy, **settings}
    tuner = onepass.Tuner(model, optimizer, valid=[by], **settings)
    rows = len(train[0])
    for step in range(steps):
        if size is None:
            chosen = torch.arange(rows)
        else:
            chosen = torch.randint(rows, (size,)) if shuffled else (step * size + torch.arange(size)) % rows
        batch = train[0][chosen], train[1][chosen]
        optimizer.zero_grad()
        settings["loss"](model, batch).backward()
        optimizer.step()
        tuner.step(batch)
    with torch.no_grad():
        return tuner, float(cross_entropy(model, test))


def told(name: str, found: tuple[onepass.Tuner, float]) -> str:
    tuner, test_loss = found
    lrs = [record.values["lr"][0] for record in tuner.history]
    decays = [record.values.get("weight_decay", [0.0])[0] for record in tuner.history]
    seen = tuner.history[-1].valid_loss
    return (
        f"{name}: lr at most {max(lrs):.2g}, in the end {lrs[-1]:.2g}; weight decay {min(decays):.2g} to "
        f"{max(decays):.2g}; validation loss {seen:.3f}, test loss {test_loss:.3f}"
    )


def validation_is_training(steps: int, seed: int) -> list[str]:
    train = first(200, noisy)
    cases = {"the training batch as validation": train, "validation data": valid}
    return [told(name, tuned(train, by, steps=steps, seed=seed, size=None)) for name, by in cases.items()]


def few_validation_examples(steps: int, seed: int) -> list[str]:
    cases = {rows: (valid[0][:rows], valid[1][:rows]) for rows in (10, 300)}
    return [
        told(f"{rows} validation examples", tuned(first(600, noisy), by, steps=steps, seed=seed))
        for rows, by in cases.items()
    ]


def penalty_in_the_validation_loss(steps: int, seed: int) -> list[str]:
    lines = []
    for name in ("loss", "valid_loss without it"):
        penalty = onepass.Hyperparameter(1e-3)

        def loss(model: Any, batch: Batch, penalty: onepass.Hyperparameter = penalty) -> Tensor:
            squares = torch.stack([p.square().sum() for p in model.parameters()])
            return cross_entropy(model, batch) + penalty.value * squares.sum()

        settings: dict[str, Any] = {"loss": loss, "extra": {"penalty": penalty}}
        if name != "loss":
            settings["valid_loss"] = cross_entropy
        found = tuned(first(200, noisy), valid, steps=steps, seed=seed, size=None, tune=("weight_decay",), **settings)
        lines.append(f"validated by {name}: penalty {float(penalty.value):.2g}, test loss {found[1]:.3f}")
    return lines


def short_intervals(steps: int, seed: int) -> list[str]:
    cases = (1, 2, 10)
    return [told(f"interval {n}", tuned(first(1200), valid, steps=steps, seed=seed, interval=n)) for n in cases]


def batches_in_order(steps: int, seed: int) -> list[str]:
    cases = {"always in the same order": False, "shuffled": True}
    return [
        told(name, tuned(first(500, noisy), valid, steps=steps, seed=seed, shuffled=shuffled))
        for name, shuffled in cases.items()
    ]


def long_after_convergence(steps: int, seed: int) -> list[str]:
    return [told(f"{n} steps", tuned(first(1200), valid, steps=n, seed=seed)) for n in (steps, 3 * steps)]


def learnt_by_heart(steps: int, seed: int) -> list[str]:
    return [
        told(
            f"50 digits, weight decay from {decay:g}",
            tuned(first(50), valid, steps=steps, seed=seed, size=None, weight_decay=decay),
        )
        for decay in (0.0, 1e-3)
    ]


def kinks(steps: int, seed: int) -> list[str]:
    """Of the product with the gradient: the cosine of the finite difference with the exact one."""
    lines = []
    networks: dict[str, list[nn.Module]] = {"tanh": [nn.Tanh()], "ReLU and batch norm": [nn.BatchNorm1d(64), nn.ReLU()]}
    for name, narrow in itertools.product(networks, (False, True)):
        between = networks[name]
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 64), *between, nn.Linear(64, 64), *between, nn.Linear(64, 10))
        names = [name for name, _ in model.named_parameters()]
        weights = [p.detach().requires_grad_() for p in model.parameters()]

        def loss(given: Any, model: nn.Module = model, names: list[str] = names, narrow: bool = narrow) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
                outputs = torch.func.functional_call(model, dict(zip(names, given, strict=True)), (images[:64],))
            return F.cross_entropy(outputs.float(), labels[:64])

        along = exact(loss, weights).gradient
        right, quick = (
            torch.cat([x.flatten() for x in kind(loss, weights).hessian(along)]) for kind in (exact, finite_difference)
        )
        precision = "bf16" if narrow else "float32"
        lines.append(f"{name}, {precision}: cosine {float(F.cosine_similarity(right, quick, dim=0)):.3f}")
    return lines


def wide_steps(steps: int, seed: int) -> list[str]:
    """In bf16, with AdamW: hypergradients by finite differences beside the exact ones, over 30 steps."""

    def slopes(curvature: str, between: type[nn.Module], settings: dict[str, Any]) -> Tensor:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 64), between(), nn.Linear(64, 64), between(), nn.Linear(64, 10))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        tuner = onepass.Tuner(model, optimizer, in_bf16, valid=[valid], interval=2, curvature=curvature, **settings)
        for i in range(30):
            batch = images[40 * i : 40 * i + 40], labels[40 * i : 40 * i + 40]
            optimizer.zero_grad()
            in_bf16(model, batch).backward()
            optimizer.step()
            tuner.step(batch)
        return torch.tensor([slope for r in tuner.history for each in r.hypergradients.values() for slope in each])

    lines = []
    for title, between, settings in (
        ("tanh, lookback=5", nn.Tanh, {"lookback": 5}),
        ("ReLU, lookback=5", nn.ReLU, {"lookback": 5}),
        ("tanh, whole run", nn.Tanh, {}),
        ("ReLU, whole run", nn.ReLU, {}),
    ):
        right, quick = (slopes(curvature, between, settings) for curvature in ("exact", "finite-difference"))
        lines.append(f"{title}: off by {float((quick - right).norm() / right.norm()):.1%}")
    return lines


def in_bf16(model: Any, batch: Batch) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(batch[0])
    return F.cross_entropy(outputs.float(), batch[1])


FAILURES: dict[str, Callable[[int, int], list[str]]] = {
    "validation-is-training": validation_is_training,
    "few-validation-examples": few_validation_examples,
    "penalty-in-the-validation-loss": penalty_in_the_validation_loss,
    "short-intervals": short_intervals,
    "batches-in-order": batches_in_order,
    "long-after-convergence": long_after_convergence,
    "learnt-by-heart": learnt_by_heart,
    "kinks": kinks,
    "wide-steps": wide_steps,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FAILURES)}; by default all")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    if unknown := set(args.names) - set(FAILURES):
        parser.error(f"names must be among {', '.join(FAILURES)}, but got {', '.join(sorted(unknown))}")
    warnings.simplefilter("ignore")  # a guard that goes back is what is wanted here
    torch.set_num_threads(1)
    for name in args.names or FAILURES:
        print(name)
        for seed in range(args.seeds):
            for line in FAILURES[name](args.steps, seed):
                print(f"  {line}", flush=True)


if __name__ == "__main__":
    main()
