"""The tuner around an ordinary training loop: what it finds, and what it leaves alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onepass
from tests.problems import Batch, mlp, mse, regression, train_step

Step = Callable[[nn.Module, torch.optim.Optimizer], None]


def sgd(model: nn.Module, **changes: Any) -> torch.optim.SGD:
    settings: dict[str, Any] = {"lr": 0.05, "momentum": 0.8, "weight_decay": 1e-2}
    return torch.optim.SGD(model.parameters(), **{**settings, **changes})


def test_api_to_the_letter() -> None:
    model, train, valid = mlp(3, 8, 1), regression(), regression(seed=2)
    optimizer = sgd(model)
    tuner = onepass.Tuner(model, optimizer, mse, [valid], interval=3)
    records = []
    for _ in range(7):
        train_step(model, optimizer, train)
        records.append(tuner.step(train))
    assert [record is None for record in records] == [True, True, False, True, True, False, True]
    last = records[5]
    assert last is not None
    assert last.step == 6
    assert set(last.values) == set(last.hypergradients) == {"lr", "momentum", "weight_decay"}
    assert last.values == tuner.values()
    assert last.guard is None
    assert math.isfinite(last.valid_loss)
    assert len(tuner.history) == 2
    for name, (value,) in tuner.values().items():
        assert optimizer.param_groups[0][name] == value
        assert isinstance(optimizer.param_groups[0][name], float)
    assert tuner.values()["lr"] != [0.05]


def test_first_values_are_the_users_own() -> None:
    model = mlp(3, 4, 1)
    tuner = onepass.Tuner(model, sgd(model), mse, [regression()])
    assert tuner.values() == {"lr": [0.05], "momentum": [0.8], "weight_decay": [0.01]}
    assert tuner.history.start == tuner.values()


def finite_difference(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer, name: str, valid: Batch) -> float:
    """Of the validation loss after one more real step, by a raw value: log10, or logit for momentum."""
    losses = []
    for sign in (1, -1):
        twin, twin_optimizer = copy.deepcopy((model, optimizer))
        group = twin_optimizer.param_groups[0]
        if name == "momentum":
            group[name] = float(
                torch.sigmoid(torch.logit(torch.tensor(group[name], dtype=torch.float64)) + sign * 1e-5)
            )
        else:
            group[name] *= 10 ** (sign * 1e-5)
        step(twin, twin_optimizer)
        losses.append(mse(twin, valid).item())
    return (losses[0] - losses[1]) / 2e-5


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    for seed in (1, 5, 6):
        (mse(model, regression(seed=seed)) / 3).backward()
    optimizer.step()


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    mse(model, regression()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()


def closed(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        loss = mse(model, regression())
        loss.backward()
        return loss.item()

    optimizer.step(closure)


def wiped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    train_step(model, optimizer, regression())
    optimizer.zero_grad(set_to_none=False)


STEPS: dict[str, Step] = {
    "plain": lambda model, optimizer: train_step(model, optimizer, regression()),
    "accumulated": accumulated,
    "clipped": clipped,
    "closure": closed,
    "zeroed at once": wiped,
}


@pytest.mark.parametrize("kind", STEPS)
def test_hypergradient_is_that_of_the_step_really_taken(kind: str) -> None:
    model, valid = mlp(3, 8, 1), regression(seed=2)
    optimizer, step = sgd(model), STEPS[kind]
    for _ in range(3):
        step(model, optimizer)
    tuner = onepass.Tuner(model, optimizer, mse, [valid], interval=1, lookback=1)
    expected = {name: finite_difference(step, model, optimizer, name, valid) for name in tuner.values()}
    step(model, optimizer)
    record = tuner.step(regression())
    assert record is not None
    for name, slope in expected.items():
        assert record.hypergradients[name] == pytest.approx([slope], rel=1e-5)


def test_overshooting_learning_rate_comes_down() -> None:
    """The update at the old weights, the validation gradient at the new: anywhere else, this one would grow."""
    weights = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.ones_(weights.weight)
    batch = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(weights.parameters(), lr=0.9)  # mse = w², so 0.5 is right and 1.0 diverges
    tuner = onepass.Tuner(
        weights, optimizer, mse, [batch], interval=1, lookback=1, guard=None, bounds={"lr": (1e-10, 9)}
    )
    for _ in range(5):
        before = tuner.values()["lr"][0]
        train_step(weights, optimizer, batch)
        record = tuner.step(batch)
        assert record is not None
        if before > 0.5:
            assert record.hypergradients["lr"][0] > 0
            assert tuner.values()["lr"][0] < before


@pytest.mark.parametrize("curvature", ["exact", "forward", "gauss-newton", "finite-difference"])
@pytest.mark.parametrize("lookback", [1, 4])
def test_extra_by_finite_difference(curvature: str, lookback: int) -> None:
    """A hyperparameter inside the loss, with its path through the weights and its direct one, on a linear model.

    One step from the start: ``lookback`` terms of the series are that many steps along the same gradient field, which
    for a quadratic loss and plain SGD can be taken for real, backwards from the new weights.
    """
    train, valid = regression(), regression(seed=2)
    scale = onepass.Hyperparameter(torch.tensor(0.3, dtype=torch.float64), transform="identity")

    def loss(model: Any, batch: Batch) -> Tensor:
        return mse(model, (batch[0], scale.value * batch[1])) + 0.1 * scale.value**2

    torch.manual_seed(0)
    model = nn.Linear(3, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tuner = onepass.Tuner(
        model, optimizer, loss, [valid], extra={"scale": scale}, interval=1, lookback=lookback, curvature=curvature
    )
    old = copy.deepcopy(model)
    train_step(model, optimizer, train, loss)
    new = copy.deepcopy(model)
    record = tuner.step(train)
    assert record is not None
    expected = _extra_reference(loss, scale, old, new, train, valid, lookback)
    assert record.hypergradients["scale"][0] == pytest.approx(expected, rel=1e-5)
    assert scale.value.requires_grad is False


def _extra_reference(
    loss: Any, scale: onepass.Hyperparameter, old: nn.Module, new: nn.Module, train: Batch, valid: Batch, lookback: int
) -> float:
    """Dense: ``-v (I + M + M² + ...) lr ∂g/∂λ`` with ``M = I - lr H``, plus the direct derivative."""
    value = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    scale.value, kept = value, scale.value
    old_weights, new_weights = list(old.parameters()), list(new.parameters())
    g = torch.autograd.grad(loss(old, train), old_weights, create_graph=True)
    flat = torch.cat([x.reshape(-1) for x in g])
    rows = [torch.autograd.grad(x, [*old_weights, value], retain_graph=True) for x in flat]
    hessian = torch.stack([torch.cat([r.reshape(-1) for r in row[:-1]]) for row in rows])
    mixed = torch.stack([row[-1] for row in rows])
    *v, direct = torch.autograd.grad(loss(new, valid), [*new_weights, value])
    scale.value = kept
    a = torch.cat([x.reshape(-1) for x in v])
    total = torch.zeros_like(a)
    for _ in range(lookback):
        total += a
        a = a - 0.1 * hessian @ a
    return float(direct - 0.1 * total @ mixed)


def test_groups_have_values_of_their_own_unless_tied() -> None:
    model, train = mlp(3, 4, 1), regression()
    groups: list[dict[str, Any]] = [
        {"params": model[0].parameters(), "weight_decay": 0.0},
        {"params": model[2].parameters(), "weight_decay": 1e-3},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.5)
    tuner = onepass.Tuner(model, optimizer, mse, [regression(seed=2)], interval=1, tied=("momentum",))
    for _ in range(3):
        train_step(model, optimizer, train)
        tuner.step(train)
    values = tuner.values()
    assert values["lr"][0] != values["lr"][1]
    assert values["momentum"][0] == values["momentum"][1] != 0.5
    assert values["weight_decay"][0] == 0.0  # cannot be tuned from zero: left alone, not refused
    assert values["weight_decay"][1] != 1e-3
    assert [group["momentum"] for group in optimizer.param_groups] == values["momentum"]


def test_tied_derivative_is_the_sum_over_groups() -> None:
    def slopes(tied: tuple[str, ...]) -> list[float]:
        model = mlp(3, 4, 1)
        optimizer = torch.optim.SGD(onepass.per_tensor(model.parameters()), lr=0.05)
        tuner = onepass.Tuner(model, optimizer, mse, [regression(seed=2)], interval=1, tied=tied)
        train_step(model, optimizer, regression())
        record = tuner.step(regression())
        assert record is not None
        return record.hypergradients["lr"]

    assert slopes(("lr",))[0] == pytest.approx(sum(slopes(())), rel=1e-12)


def test_per_element_learning_rates_sum_to_the_scalar_one() -> None:
    def record_of(optimizer_of: Callable[[nn.Module], torch.optim.Optimizer]) -> onepass.TunerStep:
        model = mlp(3, 4, 1)
        optimizer = optimizer_of(model)
        tuner = onepass.Tuner(model, optimizer, mse, [regression(seed=2)], interval=2, tune=("lr",), lookback=5)
        for _ in range(2):
            train_step(model, optimizer, regression())
            record = tuner.step(regression())
        assert record is not None
        return record

    scalar = record_of(lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5))
    element = record_of(lambda m: onepass.optim.SGD(onepass.per_element(m.parameters(), lr=0.05), momentum=0.5))
    shapes = [tuple(slope.shape) for slope in element.hypergradients["lr"]]
    assert shapes == [(4, 3), (4,), (1, 4), (1,)]
    total = sum(float(slope.sum()) for slope in element.hypergradients["lr"])
    assert total == pytest.approx(scalar.hypergradients["lr"][0], rel=1e-12)
    assert element.values["lr"][0].unique().numel() > 1


def test_large_models_are_done_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the weights are many, the step is evaluated anew for each product, a few tensors at a time: same result."""

    def slopes() -> dict[str, list[float]]:
        model = mlp(3, 8, 8, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        tuner = onepass.Tuner(model, optimizer, mse, [regression(seed=2)], interval=4)
        for _ in range(4):
            train_step(model, optimizer, regression())
            record = tuner.step(regression())
        assert record is not None
        return record.hypergradients

    whole = slopes()
    monkeypatch.setattr("onepass.linearise.KEPT", 0)
    monkeypatch.setattr("onepass.snapshot.LARGEST", 30)
    for name, slope in slopes().items():
        assert slope == pytest.approx(whole[name], rel=1e-12)


def test_not_finite_leaves_the_values_alone_and_is_counted() -> None:
    model, train = mlp(3, 4, 1), regression()
    optimizer = sgd(model)
    broken = [False]

    def valid_loss(model: Any, batch: Batch) -> Tensor:
        return mse(model, batch) * (math.nan if broken[0] else 1.0)

    tuner = onepass.Tuner(model, optimizer, mse, [train], interval=1, valid_loss=valid_loss, guard=None)
    before = tuner.values()
    broken[0] = True
    train_step(model, optimizer, train)
    record = tuner.step(train)
    assert record is not None
    assert record.skipped is not None
    assert "not finite" in record.skipped
    assert tuner.skipped == 1
    assert tuner.values() == before
    broken[0] = False
    train_step(model, optimizer, train)
    tuner.step(train)
    assert tuner.skipped == 1
    assert tuner.values() != before


def test_user_may_change_a_value_by_hand() -> None:
    model, train = mlp(3, 4, 1), regression()
    optimizer = sgd(model)
    tuner = onepass.Tuner(model, optimizer, mse, [train], interval=1)
    optimizer.param_groups[0]["momentum"] = 0.3
    train_step(model, optimizer, train)
    tuner.step(train)
    assert tuner.values()["momentum"][0] == pytest.approx(0.3, abs=0.05)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam])
def test_usual_starts_have_room_on_both_sides(kind: Any) -> None:
    model = mlp(3, 4, 1)
    state = onepass.Tuner(model, kind(model.parameters(), lr=1e-3), mse, [regression()]).state_dict()
    for label, saved in zip(state["labels"], state["hyperparameters"], strict=True):
        low, high = saved["bounds"]
        assert low < float(saved["start"]) < high, label


def test_detach_sets_the_optimizer_free() -> None:
    model = mlp(3, 4, 1)
    optimizer = sgd(model)
    onepass.Tuner(model, optimizer, mse, [regression()]).detach()
    onepass.Tuner(model, optimizer, mse, [regression()])
