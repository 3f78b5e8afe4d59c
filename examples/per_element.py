"""One learning rate a weight: `onepass.optim` takes tensors where torch takes numbers.

Ten inputs on ten different scales, as when nobody normalised them. One learning rate for all must suit the largest and
starves the smallest; one for each weight finds what each input needs.
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
scales = torch.logspace(-1, 1, 10)
x = torch.randn(600, 10) * scales
y = x @ (1 / scales)[:, None] + 0.1 * torch.randn(600, 1)
train, valid = (x[:400], y[:400]), (x[400:], y[400:])


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def train_tuned(spread: bool) -> tuple[onepass.Tuner, float]:
    model = nn.Linear(10, 1)
    groups = onepass.per_element(model.parameters(), lr=1e-4) if spread else model.parameters()
    optimizer = onepass.optim.SGD(groups, lr=1e-4)
    tuner = onepass.Tuner(model, optimizer, loss, [valid])
    for _ in range(args.steps):
        optimizer.zero_grad()
        loss(model, train).backward()
        optimizer.step()
        tuner.step(train)
    return tuner, loss(model, valid).item()


(one, one_loss), (each, each_loss) = train_tuned(spread=False), train_tuned(spread=True)
print(f"one for all:  validation loss {one_loss:.4f} (0.01 is noise), lr {one.values()['lr'][0]:.2g}")
print(f"one for each: validation loss {each_loss:.4f}")
for scale, lr in zip(scales, each.values()["lr"][0].flatten(), strict=True):
    print(f"  input of size {scale:5.2f}: lr {lr:.2g}")
