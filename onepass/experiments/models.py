"""The networks of the paper."""

from __future__ import annotations

from torch import nn


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Module:
    """One hidden layer of ReLUs, with torch's own initialisation."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))
