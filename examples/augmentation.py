"""Data augmentation as a number to tune: how far to turn the training pictures.

The training digits are upright; those in use, for validation and test, are turned by up to 45 degrees either way. The
tuner finds how far to turn, since turning is differentiable by the angle. It looks 20 steps back: what too much of it
costs shows late, and with the usual 5 it first goes beyond 100 degrees.
"""

import argparse
import math

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import onepass

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=2000)
args = parser.parse_args()


def turned(images: Tensor, degrees: Tensor) -> Tensor:
    cos, sin, zero = (degrees * math.pi / 180).cos(), (degrees * math.pi / 180).sin(), torch.zeros_like(degrees)
    maps = torch.stack([cos, -sin, zero, sin, cos, zero], 1).view(-1, 2, 3)
    return F.grid_sample(images, F.affine_grid(maps, list(images.shape), align_corners=False), align_corners=False)


def plain_loss(model: nn.Module, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(images[rows]), labels[rows])


def turned_loss(model: nn.Module, rows: Tensor) -> Tensor:
    angles = degrees.value * (2 * torch.rand(len(rows)) - 1)
    return F.cross_entropy(model(turned(images[rows], angles)), labels[rows])


torch.manual_seed(0)
images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
images = images.float().view(-1, 1, 8, 8) / 16
train, valid, test = torch.randperm(1797).split([1000, 300, 497])
in_use = torch.cat([valid, test])
images[in_use] = turned(images[in_use], torch.rand(797) * 90 - 45)
degrees = onepass.Hyperparameter(2.0, bounds=(0.1, 180.0))
for name in ("plain", "tuned"):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer, extra = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), {"degrees": degrees}
    tuner = onepass.Tuner(
        model, optimizer, turned_loss, [valid], valid_loss=plain_loss, tune=(), extra=extra, lookback=20
    )
    for batch in train[torch.randint(1000, (args.steps, 100))]:
        optimizer.zero_grad()
        turned_loss(model, batch).backward()
        optimizer.step()
        if name == "tuned":
            tuner.step(batch)
    right = (model(images[test]).argmax(1) == labels[test]).float().mean()
    print(f"{name}: turned by up to {degrees.value:.0f} degrees, test accuracy {right:.1%}")
