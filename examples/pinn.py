"""A physics-informed network: a sum of losses whose weights are found while it trains.

A damped spring, u'' + 3 u' + 64 u = 0, let go at u = 1. The network is punished where it breaks the equation, and where
it does not start at 1, at rest. With all weights 1 it settles for u = 0, which breaks the equation nowhere. The tuner
finds the weights of the two starting conditions from eight noisy measurements, which alone tell much less.
"""

import argparse
from typing import Any

import torch
from torch import Tensor, nn

import onepass

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=2000)
args = parser.parse_args()


def spring(t: Tensor) -> Tensor:
    return (-1.5 * t).exp().mul((7.858 * t).cos() + 0.1909 * (7.858 * t).sin())


torch.manual_seed(0)
times, moments = torch.linspace(0, 1, 64)[:, None], torch.rand(8, 1)
measured = moments, spring(moments) + 0.01 * torch.randn(8, 1)
weights = onepass.Hyperparameter(torch.ones(2), bounds=(1e-6, 1e6))


def slope(values: Tensor, t: Tensor) -> Tensor:
    return torch.autograd.grad(values.sum(), t, create_graph=True)[0]


def physics(model: nn.Module, batch: Any) -> Any:
    t = batch.clone().requires_grad_()
    u = model(t)
    speed = slope(u, t)
    start = torch.stack([u[0, 0] - 1, speed[0, 0]]).square()
    return (slope(speed, t) + 3 * speed + 64 * u).square().mean() + weights.value @ start


def misfit(model: nn.Module, batch: Any) -> Any:
    return (model(batch[0]) - batch[1]).square().mean()


for name, loss, batch in [("measured", misfit, measured), ("plain", physics, times), ("tuned", physics, times)]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer, extra = torch.optim.Adam(model.parameters(), lr=0.003), {"weights": weights}
    tuner = onepass.Tuner(model, optimizer, loss, [measured], tune=(), extra=extra, valid_loss=misfit)
    for _ in range(args.steps):
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
        if name == "tuned":
            tuner.step(batch)
    print(f"{name}: off by {misfit(model, (times, spring(times))).sqrt():.4f}")
print("weights of place and speed at the start: {:.0f} and {:.0f}".format(*weights.value))
