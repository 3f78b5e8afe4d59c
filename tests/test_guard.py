"""The guard: notices divergence, goes back, and says so."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onepass
from onepass.guard import Health, on_probation, probation_step
from tests.problems import Batch, mlp, mse, regression, train_step


def judged(losses: list[float], guard: onepass.Guard) -> list[str]:
    """By plain numbers, after checking that tensors tell the same."""
    health, tensors = guard.start(losses[0]), guard.start(torch.tensor(losses[:1], dtype=torch.float64))
    verdicts = []
    for loss in losses[1:]:
        health, verdict = guard.judge(health, loss)
        tensors, verdict_of_tensors = guard.judge(tensors, torch.tensor([loss], dtype=torch.float64))
        assert [truth.item() for truth in verdict_of_tensors] == list(verdict)
        assert [number.item() for number in tensors] == pytest.approx(list(health), nan_ok=True)
        verdicts.append("safe" if verdict.safe else "wait" if verdict.healthy else "sick")
    return verdicts


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([1.0, 0.9, 0.8, 0.7], ["safe", "safe", "safe"]),
        ([1.0, 0.9, math.nan], ["safe", "sick"]),
        ([1.0, math.inf], ["sick"]),
        ([1.0, 3.0], ["sick"]),  # on probation, every loss counts
        ([1.0, 0.5, 1.2, 0.5], ["safe", "wait", "safe"]),  # later, one outlier does not
        ([1.0, 0.5, 30.0], ["safe", "sick"]),  # unless it is far out
        ([math.nan, 5.0, 4.0], ["safe", "safe"]),  # no standard to fall below
        ([-1.0, -1.1, -1.05], ["safe", "safe"]),  # a negative loss is as good as any
    ],
)
def test_verdicts(losses: list[float], expected: list[str]) -> None:
    assert judged(losses, onepass.Guard()) == expected


def test_slow_rise_is_no_divergence() -> None:
    assert "sick" not in judged([1.0, *(0.1 * 1.015**i for i in range(300))], onepass.Guard())


def test_noise_is_no_divergence() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(500, generator=generator).mul(0.4).exp()
    assert "sick" not in judged([2.3, *(0.35 * noise).tolist()], onepass.Guard())


def test_a_run_that_stays_bad_is_let_go_in_the_end() -> None:
    assert judged([1.0, 0.1, *([0.6] * 200)], onepass.Guard(smoothing=0.0))[-1] != "sick"


def test_a_batch_that_was_as_bad_before_says_nothing() -> None:
    """With everything learnt but a few examples, those who meet one of them in a small batch have not diverged."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 3, generator=generator, dtype=torch.float64)
    y = (x[:, :1] > 0).double()
    y[::64] = 1 - y[::64]

    def loss(model: Any, batch: Batch) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(model(batch[0]), batch[1])

    torch.manual_seed(0)
    model = nn.Linear(3, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    valid = list(zip(x.split(8), y.split(8), strict=True))
    kept = y.clone()
    kept[::64] = 1 - kept[::64]
    tuner = onepass.Tuner(model, optimizer, loss, valid, tune=("lr",), interval=5)
    for _ in range(600):
        optimizer.zero_grad()
        loss(model, (x, kept)).backward()
        optimizer.step()
        tuner.step((x, kept))
    best = min(record.valid_loss for record in tuner.history)
    assert max(record.valid_loss for record in tuner.history) > 20 * best  # such batches have been met
    assert not any(record.guard for record in tuner.history)


@pytest.mark.parametrize(
    ("loss", "there", "tells"),
    [
        (3.0, 0.4, True),
        (3.0, 2.5, False),  # as bad as it was
        (math.nan, 2.5, True),
        (math.inf, 0.4, True),
        (math.nan, math.nan, False),  # the batch is broken
        (3.0, math.inf, False),
    ],
)
def test_what_a_batch_can_tell(loss: float, there: float, tells: bool) -> None:
    guard, health = onepass.Guard(), Health(1.0, 0.5, 0.5)
    assert guard.trusts(health, loss, there) == tells
    tensors = [torch.tensor([number]) for number in (*health, loss, there)]
    assert guard.trusts(Health(*tensors[:3]), *tensors[3:]).tolist() == [tells]


def test_replicas_are_judged_apart() -> None:
    guard = onepass.Guard()
    health = guard.start(torch.tensor([1.0, 1.0, 1.0]))
    health, verdict = guard.judge(health, torch.tensor([0.5, math.nan, 100.0]))
    assert verdict.healthy.tolist() == [True, False, False]
    assert on_probation(health).tolist() == [False, True, True]


def test_probation_looks_at_powers_of_two() -> None:
    assert [step for step in range(20) if probation_step(step)] == [1, 2, 4, 8, 16]


def diverging(momentum: float = 0.0, lr: float = 0.9) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = mlp(3, 16, 1)
    return model, torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def test_goes_back_reports_and_warns_once() -> None:
    model, optimizer = diverging(momentum=0.95)
    tuner = onepass.Tuner(model, optimizer, mse, [regression(seed=2)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(300):
            train_step(model, optimizer, regression())
            tuner.step(regression())
    acted = [record for record in tuner.history if record.guard]
    assert acted
    assert acted[0].guard is not None
    assert "went back to step 0, lr x 0.316" in acted[0].guard
    assert sum("diverged" in str(warning.message) for warning in caught) == 1
    assert mse(model, regression(seed=2)).item() < 1.0


def test_going_back_restores_weights_state_buffers_and_values() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.norm = mlp(3, 4), nn.BatchNorm1d(4, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.norm(self.net(x)).sum(1, keepdim=True)
            return result

    broken: list[Tensor] = []

    def valid_loss(net: Any, batch: Batch) -> Tensor:
        bad = any(torch.equal(weight, next(net.parameters())) for weight in broken)
        return mse(net, batch) * (1e6 if bad else 1.0)

    torch.manual_seed(0)
    model = Scaled()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    tuner = onepass.Tuner(model, optimizer, mse, [regression()], interval=4, valid_loss=valid_loss)
    seen = {}
    for step in range(1, 9):
        if step == 4:  # a healthy hyper step keeps the point before its weight step
            seen = {name: tensor.clone() for name, tensor in model.named_parameters()}
            moments = [optimizer.state[p]["exp_avg_sq"].clone() for p in model.parameters()]
        if step == 5:
            values, running = tuner.history.start, model.norm.running_mean.clone()  # type: ignore[union-attr]
        train_step(model, optimizer, regression())
        if step == 8:
            broken.append(next(model.parameters()).detach().clone())
            with pytest.warns(UserWarning, match="diverged"):
                record = tuner.step(regression())
        else:
            record = tuner.step(regression())
    assert record is not None
    assert record.guard is not None
    assert all(torch.equal(p, seen[name]) for name, p in model.named_parameters())
    for p, moment in zip(model.parameters(), moments, strict=True):
        assert torch.equal(optimizer.state[p]["exp_avg_sq"], moment)
        assert optimizer.state[p]["exp_avg"].abs().max() == 0
        assert float(optimizer.state[p]["step"]) == 3
    assert torch.equal(model.norm.running_mean, running)  # type: ignore[arg-type]
    assert record.values["lr"][0] == pytest.approx(values["lr"][0] * 10**-0.5)
    assert record.values["beta1"] == pytest.approx(values["beta1"])


def test_off_means_off() -> None:
    model, optimizer = diverging(lr=0.99, momentum=0.98)
    tuner = onepass.Tuner(model, optimizer, mse, [regression()], guard=None, tune=("momentum",))
    for _ in range(30):
        train_step(model, optimizer, regression())
        tuner.step(regression())
    assert not any(record.guard for record in tuner.history)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ratio": 0.5}, "ratio must lie in"),
        ({"smoothing": 1.0}, "smoothing must lie in"),
        ({"backoff": 0}, "backoff must"),
    ],
)
def test_bad_settings(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        onepass.Guard(**settings)
