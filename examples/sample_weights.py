"""A weight for every training example: with wrong labels among them, the tuned weights tell which.

Three training labels in ten are wrong; the hundred validation digits are right. All weights begin at one half, each is
tuned, and those of examples that make the validation loss worse go down. More use of the hundred than training on them.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import onepass

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=1000)
args = parser.parse_args()

torch.manual_seed(0)
images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
order = torch.randperm(1797)
images, labels = images[order].float() / 16, labels[order]
train, valid, test = torch.arange(1797).split([1000, 100, 697])
wrong = torch.rand(1000) < 0.3
labels[:1000] = torch.where(wrong, (labels[:1000] + torch.randint(1, 10, (1000,))) % 10, labels[:1000])
weights = onepass.Hyperparameter(torch.full((1000,), 0.5), transform="logit")


def plain_loss(model: nn.Module, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(images[rows]), labels[rows])


def weighted_loss(model: nn.Module, rows: Tensor) -> Tensor:
    w = weights.value[rows]
    return w @ F.cross_entropy(model(images[rows]), labels[rows], reduction="none") / w.sum()


for name, rows in (("plain", train), ("validation digits alone", valid), ("tuned", train)):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer, extra = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), {"weights": weights}
    loss = weighted_loss if name == "tuned" else plain_loss
    tuner = onepass.Tuner(model, optimizer, loss, [valid], tune=(), extra=extra, valid_loss=plain_loss)
    for _ in range(args.steps):
        optimizer.zero_grad()
        loss(model, rows).backward()
        optimizer.step()
        if name == "tuned":
            tuner.step(rows)
    print(f"{name}: test accuracy {(model(images[test]).argmax(1) == labels[test]).float().mean():.1%}")

for name, which in (("right", ~wrong), ("wrong", wrong)):
    median, lost = weights.value[which].median(), (weights.value[which] < 0.5).float().mean()
    print(f"{int(which.sum())} {name} labels: median weight {median:.3f}, {lost:.0%} below one half")
