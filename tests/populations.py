"""Small populations, and the same replicas trained one by one, for the tests of ``Population``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch._dynamo  # what the first run brings with it
from torch import Tensor, nn

import onepass
from onepass.batches import Cycle
from onepass.rules import OPTIMIZERS, RULES
from tests.problems import Batch, mse, regression, train_step

TRAIN, VALID = regression(32), regression(seed=2)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6, dtype=torch.float64), nn.Tanh(), nn.Linear(6, 1, dtype=torch.float64))


def population(**settings: Any) -> onepass.Population:
    """Three replicas of ``network`` on a regression problem, unless told otherwise."""
    every: dict[str, Any] = {"replicas": 3, "start": {"lr": onepass.LogUniform(1e-3, 1e-1)}, "seed": 1, **settings}
    model, loss, rule = every.pop("model", network), every.pop("loss", mse), every.pop("rule", "sgd")
    return onepass.Population(model, loss, rule, **every)


def trained(steps: int = 20, train: Any = None, valid: Any = None, **settings: Any) -> onepass.Population:
    found = population(**settings)
    found.run([TRAIN] if train is None else train, [VALID] if valid is None else valid, steps=steps)
    return found


def flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def weights(found: onepass.Population) -> Tensor:
    """``(replicas, weights)``"""
    return torch.stack([flat(found.model(r)) for r in range(found.replicas)])


def batches(count: int) -> list[Batch]:
    return [regression(8, seed=seed) for seed in range(10, 10 + count)]


def torch_optimizer(rule: str) -> Any:
    return next(kind for kind, known in OPTIMIZERS.items() if known is RULES[rule])


def optimizer_at(model: nn.Module, rule: str, values: dict[str, Any], per_element: Sequence[str]) -> Any:
    """The torch optimizer of a rule, or its twin in ``onepass.optim``, with the values of one replica."""
    if "beta1" in values:
        values["betas"] = values.pop("beta1"), values.pop("beta2")
    if not per_element:
        return torch_optimizer(rule)(model.parameters(), **values)
    spread = {name: values.pop(name) for name in per_element}
    kind = getattr(onepass.optim, torch_optimizer(rule).__name__)
    return kind(onepass.per_element(model.parameters(), **spread), **values)


def alone(
    before: onepass.Population, r: int, train: Iterable[Any], valid: Iterable[Any], steps: int, **settings: Any
) -> tuple[nn.Module, onepass.Tuner]:
    """Replica ``r`` of a population that has not begun, trained in a loop of its own with a ``Tuner``."""
    rule, start, per_element = settings.pop("rule", "sgd"), settings.pop("start"), settings.pop("per_element", ())
    loss, clip_norm = settings.pop("loss", mse), settings.pop("clip_norm", None)
    for name in ("model", "replicas", "seed", "block", "backend"):
        settings.pop(name, None)
    begin = {name: float(value[r].flatten()[0]) for name, value in before.values().items()}
    constants = {name: value for name, value in start.items() if isinstance(value, (int, float))}
    model = before.model(r)
    optimizer = optimizer_at(model, rule, {**constants, **begin}, per_element)
    if per_element:
        settings["tied"] = [name for name in begin if name not in per_element]
    tuner = onepass.Tuner(model, optimizer, loss, valid, **settings)
    cycle = Cycle(train)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the run diverged")
        for _ in range(steps):
            batch = next(cycle)
            train_step(model, optimizer, batch, loss, clip_norm=clip_norm)
            tuner.step(batch)
    return model, tuner


def assert_like_the_tuner(
    steps: int,
    train: Any = None,
    valid: Any = None,
    *,
    own_batches: Callable[[int], list[Any]] | None = None,
    tolerance: float = 1e-9,
    **settings: Any,
) -> onepass.Population:
    """Every replica ends with the weights, the buffers and the values that a ``Tuner`` alone ends with.

    ``own_batches``: what the loop of one replica is fed with, if not the same as the population.
    """
    train, valid = train or [TRAIN], valid or [VALID]
    before, together = population(**settings), trained(steps, train, valid, **settings)
    for r in range(together.replicas):
        model, tuner = alone(before, r, own_batches(r) if own_batches else train, valid, steps, **settings)
        for name, tensor in together.model(r).state_dict().items():
            assert_close(tensor, model.state_dict()[name], tolerance, f"{name} of replica {r}")
        for name, found in tuner.values().items():
            value, parts = together.values()[name], [torch.as_tensor(part).reshape(-1) for part in found]
            expected = torch.cat(parts) if value.dim() == 2 else parts[0]
            assert_close(value[r].reshape(-1), expected, tolerance, f"{name} of replica {r}")
        assert int(together.history.returns[r]) == sum(record.guard is not None for record in tuner.history)
    return together


def assert_close(found: Tensor, expected: Tensor, tolerance: float, what: str = "") -> None:
    assert found.shape == expected.shape, what
    worst = float((found.double() - expected.double()).abs().max())
    assert worst <= tolerance, f"{what} off by {worst:.2g}"
