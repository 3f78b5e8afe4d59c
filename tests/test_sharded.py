"""A model spread over ranks by ``fully_shard`` is tuned as by one process that has all of it."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

import onepass
from onepass.curvature import relative_size
from onepass.distributed import local
from onepass.sharded import ShardedEvaluation, evaluation_of
from tests.problems import Batch, mlp, mse, regression, train_step
from tests.ranks import on_ranks
from tests.test_distributed import Model, adamw, largest_difference, part, sgd, train, validation

pytest.importorskip("torch.distributed.fsdp", reason="needs torch 2.6")
pytestmark = pytest.mark.filterwarnings("ignore:a sharded model has no second derivatives:UserWarning")


def sharded(model: Model) -> Model:
    """Layer by layer, and the rest. A bias of one element has its only part on the first rank."""
    from torch.distributed.fsdp import fully_shard

    if distributed.is_initialized():
        for layer in model.children():
            if list(layer.parameters()):
                fully_shard(layer)
        fully_shard(model)
    return model


def diverging(model: Model) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)


FINITE: dict[str, Any] = {"curvature": "finite-difference"}
SHARDED: dict[str, tuple[Callable[[Model], torch.optim.Optimizer], dict[str, Any], float]] = {
    "whole run": (sgd, FINITE, 1e-8),
    "look-back 1": (sgd, {"lookback": 1}, 1e-12),
    "AdamW, whole run": (adamw, FINITE, 1e-8),
    "AdamW, look-back 1": (adamw, {"lookback": 1}, 1e-12),
    "AdamW, look-back 5": (adamw, {"lookback": 5, **FINITE}, 1e-8),
    "diverging at first": (diverging, {"lookback": 1}, 1e-12),
}


def train_sharded() -> dict[str, Any]:
    return {name: train(sharded, make, settings, steps=9) for name, (make, settings, _) in SHARDED.items()}


@pytest.mark.filterwarnings("ignore:the run diverged:UserWarning")
def test_half_the_batch_and_half_the_model_on_each_of_two_ranks() -> None:
    first, second = on_ranks(train_sharded)
    for name, expected in train_sharded().items():
        assert largest_difference(first[name], expected) < SHARDED[name][2], name
        assert repr(first[name]) == repr(second[name]), name
    assert any(record["guard"] for record in first["diverging at first"]["history"]["records"])


def tuner_of(model: Model, make: Callable[[Model], torch.optim.Optimizer] = sgd, **settings: Any) -> onepass.Tuner:
    return onepass.Tuner(model, make(model), mse, validation(torch.float64), **settings)


def leave_a_trace() -> list[str]:
    """Names of all that a hyper step has changed."""
    torch.manual_seed(0)
    parts = [nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)]
    model = sharded(nn.Sequential(*parts).double())
    optimizer = sgd(model)
    tuner = onepass.Tuner(model, optimizer, mse, validation(torch.float64), interval=1)
    train_step(model, optimizer, part(regression()))

    def everything() -> dict[str, Tensor]:
        gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {name: local(tensor).clone() for name, tensor in {**model.state_dict(), **gradients}.items()}

    before = everything()
    assert tuner.step(part(regression())) is not None
    return [name for name, tensor in everything().items() if not torch.equal(tensor, before[name])]


def slopes_of_a_narrow_model() -> list[float]:
    """``fully_shard`` itself casts to bf16. In a single process, all is float32, and exact."""
    model = mlp(3, 32, 32, 1, dtype=torch.float32)
    if distributed.is_initialized():
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in [*(layer for layer in model if list(layer.parameters())), model]:
            fully_shard(layer, mp_policy=policy)
    optimizer, valid = sgd(model), [part(regression(64, torch.float32, seed=2))]
    curvature = "finite-difference" if distributed.is_initialized() else "exact"
    tuner = onepass.Tuner(model, optimizer, narrow_mse, valid, interval=2, lookback=5, curvature=curvature)
    found: list[float] = []
    for step in range(8):
        batch = part(regression(64, torch.float32, seed=10 + step))
        train_step(model, optimizer, batch, narrow_mse)
        record = tuner.step(batch)
        found += [slope for each in record.hypergradients.values() for slope in each] if record else []
    return found


def narrow_mse(model: Model, batch: Batch) -> Tensor:
    difference: Tensor = model(batch[0]).float() - batch[1]
    return difference.square().mean()


def train_with_a_hyperparameter_inside_the_loss() -> dict[str, Any]:
    model, l2 = sharded(mlp(3, 8, 1)), onepass.Hyperparameter(torch.tensor(0.1, dtype=torch.float64))
    optimizer = sgd(model)

    def loss(model: Model, batch: Batch) -> Tensor:
        outputs: Tensor = model(batch[0])
        return (outputs - batch[1]).square().mean() + l2.value * outputs.square().mean()

    tuner = onepass.Tuner(
        model, optimizer, loss, validation(torch.float64), valid_loss=mse, extra={"l2": l2}, interval=2, **FINITE
    )
    for step in range(8):
        train_step(model, optimizer, part(regression(seed=10 + step)), loss)
        tuner.step(part(regression(seed=10 + step)))
    return {"values": tuner.values(), "history": tuner.history.to_dict()}


def warned(**settings: Any) -> list[str]:
    """What making a tuner and two hyper steps say."""
    model = sharded(mlp(3, 8, 1))
    optimizer = sgd(model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        tuner = onepass.Tuner(model, optimizer, mse, validation(torch.float64), interval=1, **settings)
        for _ in range(2):
            train_step(model, optimizer, part(regression()))
            tuner.step(part(regression()))
    return [str(one.message) for one in told if issubclass(one.category, UserWarning)]


def train_resumed(saved_at: int) -> str:
    """Every rank goes on from its own state; the whole history, to be compared bit for bit."""
    parts: list[Any] = []
    for begin, end in ((0, saved_at), (saved_at, 8)):
        states = [copy.deepcopy(p.state_dict()) for p in parts]
        model = sharded(mlp(3, 8, 5, 1))
        optimizer = sgd(model)
        tuner = onepass.Tuner(model, optimizer, mse, validation(torch.float64), interval=2)
        parts = [model, optimizer, tuner]
        for thing, state in zip(parts, states, strict=False):
            thing.load_state_dict(state)
        for step in range(begin, end):
            train_step(model, optimizer, part(regression(seed=10 + step)))
            tuner.step(part(regression(seed=10 + step)))
    return repr(tuner.history.to_dict())


def size_of_a_direction() -> float:
    """By parts of the weights, beside the same by all of them."""
    model, other = mlp(3, 8, 5, 1), mlp(3, 8, 5, 1, seed=1)
    weights, direction = ([p.detach().clone() for p in m.parameters()] for m in (model, other))
    spread, along = sharded(model), sharded(other)
    evaluation = evaluation_of(spread, mse, None)
    assert isinstance(evaluation, ShardedEvaluation)
    parts = [[local(p.detach()) for p in m.parameters()] for m in (along, spread)]
    return evaluation.relative_size(*parts) / relative_size(direction, weights)


def by_exact_curvature() -> None:
    tuner_of(sharded(mlp(3, 8, 1)), curvature="exact")


def with_values_of_a_shape() -> None:
    def make(model: Model) -> torch.optim.Optimizer:
        return onepass.optim.SGD(onepass.per_element(model.parameters(), lr=0.1))

    tuner_of(sharded(mlp(3, 8, 1)), make)


def sharded_in_part() -> None:
    tuner_of(nn.Sequential(sharded(mlp(3, 8)), mlp(8, 1)))


BAD: list[tuple[Callable[[], None], str]] = [
    (by_exact_curvature, r"curvature must be 'auto' or 'finite-difference' for a sharded model, but got 'exact'"),
    (with_values_of_a_shape, r"a sharded model must have one value a param group"),
    (sharded_in_part, r"model must be sharded as a whole by fully_shard"),
]


def many_things() -> dict[str, Any]:
    refusals = []
    for do, _ in BAD:
        with pytest.raises(ValueError) as told:
            do()
        refusals.append(str(told.value))
    return {
        "trace": leave_a_trace(),
        "narrow": slopes_of_a_narrow_model(),
        "extra": train_with_a_hyperparameter_inside_the_loss(),
        "warned": [warned(), warned(lookback=1)],
        "resumed": [train_resumed(saved_at) for saved_at in (0, 4)],
        "size": size_of_a_direction(),
        "refusals": refusals,
    }


def test_what_else_goes_with_a_sharded_model() -> None:
    found, _ = on_ranks(many_things)
    assert found["trace"] == []
    assert found["resumed"][0] == found["resumed"][1]
    assert largest_difference(found["extra"], train_with_a_hyperparameter_inside_the_loss()) < 1e-8
    narrow, wide = torch.tensor(found["narrow"]), torch.tensor(slopes_of_a_narrow_model())
    assert (narrow - wide).norm() < 0.02 * wide.norm()
    assert [len(told) for told in found["warned"]] == [1, 0]
    assert "a sharded model has no second derivatives" in found["warned"][0][0]
    assert found["size"] == pytest.approx(1, rel=1e-12)
    for told, (_, message) in zip(found["refusals"], BAD, strict=True):
        assert re.search(message, told)
