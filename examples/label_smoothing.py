"""A hyperparameter inside the loss: how much to smooth the labels, found while the network trains.

The training labels come from someone who is always sure; in the world, one case in five ends otherwise. The right
smoothing is then 0.2, and the tuner has to find it from validation cases. It needs the number as an
`onepass.Hyperparameter`, used in the training loss by its `.value`, and a validation loss without it: smoothing makes
any loss look different, not better.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onepass

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=2000)
args = parser.parse_args()

torch.manual_seed(0)
points = torch.randn(2000, 4)
labels = points.argmax(1)
outcomes = torch.where(torch.rand(2000) < 0.2, torch.randint(4, (2000,)), labels)
train, valid = (points[:1000], labels[:1000]), (points[1000:], outcomes[1000:])
smoothing = onepass.Hyperparameter(0.01, transform="logit")


def smoothed_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    logits = model(batch[0])
    everywhere: Tensor = -logits.log_softmax(1).mean()
    return (1 - smoothing.value) * F.cross_entropy(logits, batch[1]) + smoothing.value * everywhere


def plain_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
tuner = onepass.Tuner(
    model, optimizer, smoothed_loss, [valid], tune=(), extra={"smoothing": smoothing}, valid_loss=plain_loss
)
print(f"start: smoothing {smoothing.value.item():.3f} (0.2 is right)")
for _ in range(args.steps):
    rows = torch.randint(1000, (100,))
    batch = train[0][rows], train[1][rows]
    optimizer.zero_grad()
    smoothed_loss(model, batch).backward()
    optimizer.step()
    tuner.step(batch)
print(f"found: smoothing {smoothing.value.item():.3f}, validation loss {plain_loss(model, valid).item():.4f}")
