"""One learning rate a layer: every tensor of weights gets its own, all from the same start, all in one run.

`onepass.per_tensor` makes one param group a tensor; the optimizer is torch's own. Beside it, the same with one learning
rate for all, tuned as well.
"""

import argparse
import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onepass

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=1500)
args = parser.parse_args()

torch.manual_seed(0)
x = torch.rand(600, 2) * 6 - 3
y = (x[:, :1] * 2).sin() * x[:, 1:].cos() + 0.05 * torch.randn(600, 1)
train, valid = (x[:400], y[:400]), (x[400:], y[400:])
start = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def train_tuned(per_layer: bool) -> tuple[onepass.Tuner, float]:
    model = copy.deepcopy(start)
    groups = onepass.per_tensor(model.parameters(), lr=1e-3) if per_layer else model.parameters()
    optimizer = torch.optim.SGD(groups, lr=1e-3)
    tuner = onepass.Tuner(model, optimizer, loss, [valid], tune=("lr",))
    for _ in range(args.steps):
        optimizer.zero_grad()
        loss(model, train).backward()
        optimizer.step()
        tuner.step(train)
    return tuner, loss(model, valid).item()


(one, one_loss), (each, each_loss) = train_tuned(per_layer=False), train_tuned(per_layer=True)
print(f"before training: validation loss {loss(start, valid).item():.4f}, lr 0.001")
print(f"one for all:     validation loss {one_loss:.4f}, lr {one.values()['lr'][0]:.2g}")
print(f"one a layer:     validation loss {each_loss:.4f}, lr")
for (name, parameter), lr in zip(start.named_parameters(), each.values()["lr"], strict=True):
    print(f"  {name:<10} {tuple(parameter.shape)!s:<10} {lr:.2g}")
