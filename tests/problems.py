"""Small problems that many tests share."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]


def mse(model: Any, batch: Batch) -> Tensor:
    difference: Tensor = model(batch[0]) - batch[1]
    return difference.square().mean()


def cross_entropy(model: Any, batch: Batch) -> Tensor:
    outputs = model(batch[0])
    return F.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), batch[1].reshape(-1))


def mlp(*sizes: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Sequential:
    """Tanh between the layers: smooth, so that finite differences can be trusted."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for i, o in pairwise(sizes):
        layers += [nn.Linear(i, o, dtype=dtype), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def regression(n: int = 16, dtype: torch.dtype = torch.float64, seed: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, 3, dtype=dtype, generator=generator)
    noise = torch.randn(n, 1, dtype=dtype, generator=generator)
    return inputs, inputs.sin().sum(1, keepdim=True) + 0.1 * noise


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    loss: Any = mse,
    *,
    clip_norm: float | None = None,
) -> None:
    optimizer.zero_grad()
    loss(model, batch).backward()
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()


def digits() -> tuple[Batch, Batch, Batch]:
    """scikit-learn's 8 x 8 digits: 1 200 for training, 300 for validation, 297 for the test."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.data), generator=torch.Generator().manual_seed(0))
    inputs = torch.tensor(data.data, dtype=torch.float32)[order] / 16
    targets = torch.tensor(data.target)[order]
    return (
        (inputs[:1200], targets[:1200]),
        (inputs[1200:1500], targets[1200:1500]),
        (inputs[1500:], targets[1500:]),
    )
