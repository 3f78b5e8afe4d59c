"""The networks of the paper: their size, and a step of training."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onepass
from onepass.experiments.models import ResNet18, mlp


def weights(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("batch_norm", "count"), [(False, 39_760), (True, 39_860)])
def test_mlp(batch_norm: bool, count: int) -> None:
    model = mlp(784, 50, 10, batch_norm=batch_norm)
    assert weights(model) == count
    assert model(torch.randn(4, 784)).shape == (4, 10)


def test_resnet_has_the_published_number_of_weights() -> None:
    assert weights(ResNet18(10)) == 11_181_642
    assert weights(ResNet18(1000)) == 11_689_512  # as everybody counts it
    assert len([m for m in ResNet18(10).modules() if isinstance(m, (nn.Conv2d, nn.Linear))]) == 18 + 3  # and 3 around


def test_a_tuned_step_of_the_resnet() -> None:
    torch.manual_seed(0)
    model, batch = ResNet18(10), (torch.randn(8, 3, 32, 32), torch.arange(8))

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=1e-4)
    tuner = onepass.Tuner(model, optimizer, loss, [batch], interval=2, lookback=2)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        found = loss(model, batch)
        found.backward()
        optimizer.step()
        record = tuner.step(batch)
        losses.append(float(found.detach()))
    assert record is not None and record.skipped is None
    assert losses[1] < losses[0]
    assert tuner.values()["lr"][0] != 1e-2
