"""From any start, digits end where a hand-tuned learning rate ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import onepass
from tests.problems import cross_entropy, digits, train_step

STEPS, BATCH = 1500, 64
Maker = Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer]

# Optimizer, and its best learning rate among 1, 0.3, 0.1, ... on this problem.
OPTIMIZERS: dict[str, tuple[Maker, float]] = {
    "SGD": (lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, weight_decay=1e-4), 0.3),
    "Adam": (lambda p, lr: torch.optim.Adam(p, lr=lr), 0.01),
    "AdamW": (lambda p, lr: torch.optim.AdamW(p, lr=lr), 0.01),
}

# What the tuner is told.
TUNERS: dict[str, dict[str, Any]] = {"tuned": {}, "lookback=5": {"lookback": 5}, "lookback=1": {"lookback": 1}}


def accuracy(make: Maker, lr: float, settings: dict[str, Any] | None = None) -> tuple[float, onepass.History | None]:
    (inputs, targets), valid, (test_inputs, test_targets) = digits()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = make(model.parameters(), lr)
    tuner = onepass.Tuner(model, optimizer, cross_entropy, [valid], **settings) if settings is not None else None
    for _ in range(STEPS):
        rows = torch.randint(0, len(inputs), (BATCH,))
        batch = inputs[rows], targets[rows]
        train_step(model, optimizer, batch, cross_entropy)
        if tuner is not None:
            tuner.step(batch)
    right = (model(test_inputs).argmax(1) == test_targets).float().mean().item()
    return right, tuner.history if tuner else None


@pytest.fixture(scope="module")
def by_hand() -> dict[str, float]:
    return {name: accuracy(make, lr)[0] for name, (make, lr) in OPTIMIZERS.items()}


@pytest.mark.filterwarnings("ignore:the run diverged:UserWarning")
@pytest.mark.parametrize("lr", [1e-6, 1.0])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("settings", TUNERS)
def test_any_start_ends_within_three_points_of_a_tuned_one(
    settings: str, name: str, lr: float, by_hand: dict[str, float]
) -> None:
    make, _ = OPTIMIZERS[name]
    found, history = accuracy(make, lr, TUNERS[settings])
    assert found > by_hand[name] - 0.03
    assert history is not None
    path = [record.values["lr"][0] for record in history]
    assert history.start["lr"] == [lr]
    if lr < 1e-3:
        assert max(path) > 1e-3  # climbed more than three decades
    else:
        assert path[-1] < lr / 3  # and the history says who brought it down
        assert any(record.guard for record in history) or path[0] < lr


if __name__ == "__main__":
    print("optimizer", "hand-tuned", *(f"{lr:g} {how}" for lr in (1e-6, 1) for how in ("plain", *TUNERS)), sep=" | ")
    for name, (make, lr) in OPTIMIZERS.items():
        starts = [accuracy(make, start, how)[0] for start in (1e-6, 1.0) for how in (None, *TUNERS.values())]
        print(name, f"{accuracy(make, lr)[0]:.1%} ({lr:g})", *(f"{found:.1%}" for found in starts), sep=" | ")
