"""An LR scheduler on the same optimizer: the scheduler multiplies, the tuner owns the base value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

import onepass
from tests.problems import mlp, mse, regression, train_step

Factory = Callable[[torch.optim.Optimizer], Any]

# Some multiply what they find in the group, others overwrite it with a function of the start: both must only multiply.
SCHEDULERS: dict[str, Factory] = {
    "step": lambda o: schedulers.StepLR(o, step_size=7, gamma=0.5),
    "exponential": lambda o: schedulers.ExponentialLR(o, gamma=0.97),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, T_max=60),
    "lambda": lambda o: schedulers.LambdaLR(o, lambda step: 1 / (1 + 0.1 * step)),
    "warm-up from zero": lambda o: schedulers.LambdaLR(o, lambda step: min(1.0, step / 10)),
    "one cycle": lambda o: schedulers.OneCycleLR(o, max_lr=0.2, total_steps=60, cycle_momentum=False),
    "warm restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, T_0=10),
    "in sequence": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=10), schedulers.CosineAnnealingLR(o, T_max=40)], [10]
    ),
}


def nominal(make: Factory, steps: int) -> list[float]:
    """What the scheduler alone would do."""
    model = mlp(3, 4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    scheduler = make(optimizer)
    found = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        found.append(float(optimizer.param_groups[0]["lr"]))
    return found


@pytest.mark.filterwarnings("ignore:.*epoch parameter.*:UserWarning")
@pytest.mark.parametrize("tuner_first", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler_multiplies_and_tuner_owns_the_base(name: str, tuner_first: bool) -> None:
    make, steps = SCHEDULERS[name], 40
    expected = nominal(make, steps)
    model = mlp(3, 4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    if tuner_first:
        tuner = onepass.Tuner(model, optimizer, mse, [regression(seed=2)], interval=5)
        scheduler = make(optimizer)
    else:
        scheduler = make(optimizer)
        tuner = onepass.Tuner(model, optimizer, mse, [regression(seed=2)], interval=5)
    start = float(optimizer.param_groups[0]["initial_lr"])
    own = 0.02 if tuner_first else start
    for step in range(steps):
        train_step(model, optimizer, regression())
        tuner.step(regression())
        scheduler.step()
        factor = expected[step] / own
        assert optimizer.param_groups[0]["lr"] == pytest.approx(tuner.values()["lr"][0] * factor, rel=1e-9), step
    assert tuner.values()["lr"][0] != pytest.approx(own, rel=0.1)


def test_factor_is_part_of_the_derivative() -> None:
    """Half the learning rate by a scheduler, or by hand: the same raw hypergradient."""

    def slope(scheduled: bool) -> float:
        model = mlp(3, 4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2 if scheduled else 0.1)
        if scheduled:
            schedulers.LambdaLR(optimizer, lambda step: 0.5)
        tuner = onepass.Tuner(model, optimizer, mse, [regression(seed=2)], interval=1)
        train_step(model, optimizer, regression())
        record = tuner.step(regression())
        assert record is not None
        return float(record.hypergradients["lr"][0])

    assert slope(True) == pytest.approx(slope(False), rel=1e-12)


def test_scheduler_state_stays_plain() -> None:
    """The view that a scheduler gets of its optimizer must not leak into checkpoints."""
    model = mlp(3, 4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    scheduler = schedulers.StepLR(optimizer, 7)
    tuner = onepass.Tuner(model, optimizer, mse, [regression()], interval=1)
    for _ in range(3):
        train_step(model, optimizer, regression())
        tuner.step(regression())
        scheduler.step()
    assert "optimizer" not in scheduler.state_dict()
    assert all(isinstance(value, (int, float, bool, list)) for value in scheduler.state_dict().values())
    assert isinstance(optimizer.param_groups[0], dict)
