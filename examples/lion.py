"""Teaching the tuner an optimizer it does not know: Lion (Chen et al., 2023), by its rule and one line."""

import argparse
from typing import Any

import torch
from torch import Tensor, nn

import onepass

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=1500)
args = parser.parse_args()


class Lion(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - lr * group["weight_decay"]).sub_(lr * torch.lerp(p.grad, m, beta1).sign())
                m.lerp_(p.grad, 1 - beta2)


def lion(h: Any, w: Tensor, g: Tensor, s: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The same step as a pure function: `w` moves to `w - u`."""
    m = s.get("exp_avg", torch.zeros_like(w))
    u = h["lr"] * ((h["beta1"] * m + (1 - h["beta1"]) * g).sign() + h["weight_decay"] * w)
    return u, {"exp_avg": h["beta2"] * m + (1 - h["beta2"]) * g}


# A sign has no slope, so the betas cannot be tuned by gradients; the other two can.
onepass.register(Lion, onepass.Rule(lion, {"lr": "log10", "weight_decay": "log10"}))

torch.manual_seed(0)
x = torch.rand(600, 2) * 6 - 3
y = (x[:, :1] * 2).sin() * x[:, 1:].cos() + 0.05 * torch.randn(600, 1)
train, valid = (x[:400], y[:400]), (x[400:], y[400:])
model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = Lion(model.parameters(), lr=1e-6, weight_decay=1e-2)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


tuner = onepass.Tuner(model, optimizer, loss, [valid])
print(f"start: validation loss {loss(model, valid).item():.4f}, values {tuner.values()}")
for _ in range(args.steps):
    optimizer.zero_grad()
    loss(model, train).backward()
    optimizer.step()
    tuner.step(train)
print(f"found: validation loss {loss(model, valid).item():.4f}, values {tuner.values()}")
