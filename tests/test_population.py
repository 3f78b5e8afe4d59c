"""A replica is what a ``Tuner`` makes of the same model alone: same start, same batches, same weights and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onepass
from onepass.rules import RULES
from tests.populations import TRAIN, VALID, assert_close, assert_like_the_tuner, batches, population, trained, weights
from tests.problems import Batch, cross_entropy, mse, regression

pytestmark = pytest.mark.usefixtures("float64")  # also for torch's NAdam, which keeps a number in the default type

WARM: dict[str, Any] = {"lr": [1e-3, 0.2], "momentum": 0.8, "weight_decay": 1e-3}
HOT: dict[str, Any] = {"lr": [0.5, 10.0], "momentum": [0.9, 0.7], "weight_decay": 1e-3}

# Settings, and whether the guard is meant to have something to do.
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "sgd without a guard": ({"start": WARM, "guard": None}, False),
    "sgd, far too fast": ({"start": HOT}, True),
    "adamw, far too fast": ({"rule": "adamw", "start": {"lr": [0.5, 10.0]}}, True),
    "adamw without a guard": ({"rule": "adamw", "start": {"lr": [1e-3, 0.1]}, "guard": None}, False),
    "sgd per element": ({"start": HOT, "per_element": ("lr",)}, True),
    "adamw per element": ({"rule": "adamw", "start": {"lr": [1e-3, 0.1]}, "per_element": ("lr",)}, False),
}


@pytest.mark.parametrize("case", CASES)
def test_two_hundred_steps(case: str) -> None:
    settings, guarded = CASES[case]
    found = assert_like_the_tuner(200, replicas=2, **{"seed": 3, **settings})
    assert bool(found.history.returns.any()) == guarded


@pytest.mark.parametrize("rule", RULES)
def test_every_rule(rule: str) -> None:
    """With an interval that does not divide the number of steps."""
    found = assert_like_the_tuner(14, rule=rule, replicas=2, start={"lr": [3e-2, 2.0]}, interval=4)
    assert found.history.steps == [4, 8, 12, 14]


def test_mini_batches() -> None:
    start = {"lr": [1e-3, 0.05, 5.0], "momentum": 0.8}
    found = assert_like_the_tuner(60, batches(5), batches(3), start=start)
    assert found.history.returns.tolist()[:2] == [0, 0] and found.history.returns[2] > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"lookback": 1, "interval": 3},
        {"through_state": False, "lookback": 3},
        {"tune": ("lr",), "bounds": {"lr": (0.04, 0.06)}},
        {"tune": ("momentum",)},
        {"valid_loss": lambda model, batch: (model(batch[0]) - batch[1]).abs().mean()},
        {"guard": onepass.Guard(ratio=1.01, slack=0.0, smoothing=0.0)},
        {"hyper_optimizer": lambda raw: torch.optim.SGD(raw, lr=0.05, momentum=0.5)},
    ],
    ids=lambda settings: ", ".join(settings),
)
def test_every_argument(settings: dict[str, Any]) -> None:
    assert_like_the_tuner(25, start={"lr": 0.05, "momentum": [0.5, 0.9]}, replicas=2, **settings)


def test_recorded_operations() -> None:
    """With mini-batches, running statistics, a guard at work, and an end inside an interval."""
    start = {"lr": [0.05, 3.0], "momentum": 0.9}
    guard = onepass.Guard(ratio=1.2, slack=0.0, relax=0.0, smoothing=0.0)
    settings: dict[str, Any] = {"model": normalised, "start": start, "guard": guard, "replicas": 2, "lookback": 2}
    assert assert_like_the_tuner(22, batches(3), backend="traced", **settings).history.returns.any()


@pytest.mark.parametrize(
    ("rule", "switches"),
    [("sgd", {"momentum": 0.9, "nesterov": True}), ("adamw", {"amsgrad": True}), ("rmsprop", {"centered": True})],
)
def test_switches(rule: str, switches: dict[str, Any]) -> None:
    assert_like_the_tuner(22, rule=rule, start={"lr": [1e-3, 1e-2], **switches}, replicas=2)


@pytest.mark.parametrize("clip_norm", [0.3, 1.0, 1e3])
def test_clipped_gradients(clip_norm: float) -> None:
    """The loop around the ``Tuner`` calls ``clip_grad_norm_``: always, at times, never.

    The ``Tuner`` sees the clipped gradient alone, and takes the derivative of a scaling to the norm without torch's
    epsilon of 1e-6: a relative difference of 1e-6 divided by the length of a clipped gradient.
    """
    start = {"lr": [0.05, 0.3], "momentum": 0.5, "weight_decay": 1e-3}
    settings: dict[str, Any] = {"start": start, "replicas": 2, "clip_norm": clip_norm, "lookback": 4}
    assert_like_the_tuner(40, batches(4), tolerance=1e-9 if clip_norm == 1e3 else 1e-6, **settings)


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


def test_batch_norm() -> None:
    """Each replica has running statistics of its own, which also go back with the guard."""
    start = {"lr": [1e-2, 0.1, 0.3], "momentum": 0.9}
    guard = onepass.Guard(ratio=1.2, slack=0.0, relax=0.0, smoothing=0.0)
    found = assert_like_the_tuner(40, batches(3), model=normalised, start=start, guard=guard)
    assert found.history.returns.any()
    one, other = (found.model(r)[1] for r in (0, 1))  # type: ignore[index]
    assert not torch.equal(one.running_mean, other.running_mean)
    assert int(one.num_batches_tracked) > 20


def test_batch_norm_after_a_return_to_the_first_step() -> None:
    found = assert_like_the_tuner(1, batches(1), model=normalised, start={"lr": [50.0]}, replicas=1)
    assert found.history.returns.any()


def half_frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    return model


def test_frozen_parameters() -> None:
    before = population(model=half_frozen)
    found = assert_like_the_tuner(22, model=half_frozen, start={"lr": [1e-2, 0.1, 0.2]})
    for r in range(3):
        layers = before.model(r)[0], found.model(r)[0]  # type: ignore[index]
        assert torch.equal(layers[0].weight, layers[1].weight)
        assert not layers[1].weight.requires_grad
    assert not torch.equal(before.model(0)[0].weight, before.model(1)[0].weight)  # type: ignore[index]


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 1))
    model[2].weight = model[0].weight
    return model


def test_tied_weights() -> None:
    found = assert_like_the_tuner(22, model=tied, start={"lr": [1e-2, 0.1, 0.2]})
    one: Any = found.model(0)
    assert one[0].weight is one[2].weight


def test_a_parameter_that_is_not_used() -> None:
    """It has no gradient: the optimizer leaves it alone, and weight decay does not reach it."""

    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(3, 1), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.used(x)
            return result

    assert_like_the_tuner(22, model=Idle, start={"lr": [1e-2, 0.1], "weight_decay": 0.01}, replicas=2)


def test_classification_and_a_dictionary_as_batch() -> None:
    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return cross_entropy(model, (batch["x"], batch["y"]))

    def data(seed: int) -> dict[str, Tensor]:
        inputs = regression(24, seed=seed)[0]
        return {"x": inputs, "y": inputs.argmax(1)}

    assert_like_the_tuner(
        22, [data(1), data(2)], [data(3)], model=lambda: nn.Linear(3, 3), loss=loss, start={"lr": [0.1, 1.0, 5.0]}
    )


def test_two_runs_are_one() -> None:
    """Also where the first ends inside an interval."""
    halves = trained(15, start={"lr": [0.01, 0.1, 5.0], "momentum": 0.9})
    halves.run([TRAIN], [VALID], steps=15)
    whole = trained(30, start={"lr": [0.01, 0.1, 5.0], "momentum": 0.9})
    assert halves.steps == whole.steps == 30
    assert torch.equal(weights(halves), weights(whole))
    for name, value in whole.values().items():
        assert torch.equal(halves.values()[name], value)
    assert torch.equal(halves.history.returns, whole.history.returns)
    assert halves.history.steps == [10, 15, 20, 30]


@pytest.mark.parametrize("kind", ["list", "minibatches"])
def test_two_runs_are_one_with_mini_batches(kind: str) -> None:
    data = batches(4) if kind == "list" else onepass.Minibatches(TRAIN, 8)
    halves = trained(15, data)
    halves.run(data, [VALID], steps=15)
    assert torch.equal(weights(halves), weights(trained(30, data)))


@pytest.mark.parametrize("rule", [torch.optim.SGD, RULES["sgd"]], ids=["class", "rule"])
def test_ways_to_name_a_rule(rule: Any) -> None:
    start: dict[str, Any] = {"lr": onepass.LogUniform(1e-3, 1e-1)}
    if rule is RULES["sgd"]:
        start |= {"momentum": 0.0}
    assert torch.equal(weights(trained(rule=rule, start=start)), weights(trained(start=start)))


def test_a_rule_of_ones_own() -> None:
    def signed(h: Any, w: Tensor, g: Tensor, s: Any) -> tuple[Tensor, dict[str, Any]]:
        return h["lr"] * g.sign(), {}

    before = population(tune=(), rule=onepass.Rule(signed, {"lr": "log10"}))
    found = trained(1, tune=(), rule=onepass.Rule(signed, {"lr": "log10"}))
    moved = (weights(before) - weights(found)).abs()
    assert_close(moved, found.values()["lr"].unsqueeze(1).expand_as(moved), 1e-15)


def test_both_betas_as_torch_writes_them() -> None:
    found = population(rule="adam", start={"lr": 1e-3, "betas": (0.5, 0.98)})
    assert found.values()["beta1"].tolist() == pytest.approx([0.5] * 3, rel=1e-12)
    assert found.values()["beta2"].tolist() == pytest.approx([0.98] * 3, rel=1e-12)


def test_single_precision() -> None:
    """Rounding apart, what double precision gives."""

    def single() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).float()

    def to_single(batch: Batch) -> Batch:
        return batch[0].float(), batch[1].float()

    found = trained(20, [to_single(TRAIN)], [to_single(VALID)], model=single)
    assert weights(found).dtype == torch.float32
    assert_close(weights(found), weights(trained(20)), 1e-4)
    assert found.evaluate(mse, to_single(VALID)).dtype == torch.float32


def test_attention() -> None:
    """Fused kernels have no second derivative, and their fast path not even a first: neither must be taken."""

    class Attentive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            tokens = torch.stack([x, x.square(), x.sin(), x.cos()], dim=-1)
            outputs: Tensor = self.layer(tokens)
            return outputs[:, 0, :1]

    assert_like_the_tuner(12, model=Attentive, lookback=3, start={"lr": [1e-2, 1e-3]}, replicas=2)
