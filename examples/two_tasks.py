"""The balance between two tasks that share a network, found while it trains.

From the picture of a digit: which one it is, and where the centre of its ink lies. The second loss comes in units that
make it 10 000 times too small, and their sum forgets it. The tuner finds what to multiply it by. The validation loss is
the sum of both logarithms, where a tenth less of either is worth the same in any units.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import onepass

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=2000)
args = parser.parse_args()

torch.manual_seed(0)
images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
images = images.float() / 16
pixels = torch.cartesian_prod(torch.arange(8.0), torch.arange(8.0))
centres = images @ pixels / images.sum(1, keepdim=True)
centres = (centres - centres.mean(0)) / centres.std(0)
train, valid, test = torch.randperm(1797).split([1000, 300, 497])
balance = onepass.Hyperparameter(1.0, bounds=(1e-6, 1e6))


def both(model: nn.Module, rows: Tensor) -> tuple[Tensor, Tensor]:
    outputs = model(images[rows])
    return F.cross_entropy(outputs[:, :10], labels[rows]), F.mse_loss(outputs[:, 10:], centres[rows]) / 10_000


def total(model: nn.Module, rows: Tensor) -> Tensor:
    digit, centre = both(model, rows)
    return digit + balance.value * centre


def logarithms(model: nn.Module, rows: Tensor) -> Tensor:
    digit, centre = both(model, rows)
    return digit.log() + centre.log()


for name in ("plain", "tuned"):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 12))
    optimizer, extra = torch.optim.Adam(model.parameters(), lr=0.003), {"balance": balance}
    tuner = onepass.Tuner(model, optimizer, total, [valid], tune=(), extra=extra, valid_loss=logarithms)
    for _ in range(args.steps):
        optimizer.zero_grad()
        total(model, train).backward()
        optimizer.step()
        if name == "tuned":
            tuner.step(train)
    right = (model(images[test])[:, :10].argmax(1) == labels[test]).float().mean()
    error = (10_000 * both(model, test)[1]).sqrt()
    print(f"{name}: balance {balance.value:.3g}, digits {right:.1%} right, centres off by {error:.1%} of their spread")
