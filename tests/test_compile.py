"""Compiled models, losses and optimizer steps are tuned to the values of the same loop as written."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import onepass
import onepass.evaluation
from tests.problems import Batch, cross_entropy, mlp, mse, regression, train_step
from tests.test_compatibility import VOCABULARY, tokens

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Profiler record function:UserWarning")


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Block(nn.Module):
    """One layer of a small transformer, with scaled dot product attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(8), nn.LayerNorm(8)
        self.project, self.mix = nn.Linear(8, 24), nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.project(self.first(x)).chunk(3, dim=-1))
        q, k, v = heads
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + attended.transpose(1, 2).flatten(2)
        result: Tensor = x + self.mix(self.second(x))
        return result


def transformer() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCABULARY, 8), Block(), nn.Linear(8, VOCABULARY))


def network() -> nn.Sequential:
    return mlp(3, 8, 1, dtype=torch.float32)


def points(seed: int) -> Batch:
    return regression(16, torch.float32, seed)


PROBLEMS: dict[str, tuple[Callable[[], nn.Sequential], Any, Callable[[int], Batch]]] = {
    "mlp": (network, mse, points),
    "transformer": (transformer, cross_entropy, tokens),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "look-back 1": {"lookback": 1},
    "finite differences": {"lookback": 3, "curvature": "finite-difference"},
    "whole run": {},
}


def compiled_whole(model: Any, loss: Any, backend: str) -> tuple[Any, Any]:
    return torch.compile(model, backend=backend), loss


def compiled_in_place(model: Any, loss: Any, backend: str) -> tuple[Any, Any]:
    model.compile(backend=backend)
    return model, loss


def compiled_in_part(model: Any, loss: Any, backend: str) -> tuple[Any, Any]:
    model[1] = torch.compile(model[1], backend=backend)
    return model, loss


def compiled_loss(model: Any, loss: Any, backend: str) -> tuple[Any, Any]:
    return model, torch.compile(loss, backend=backend)


def as_written(model: Any, loss: Any, backend: str) -> tuple[Any, Any]:
    return model, loss


WAYS = [compiled_whole, compiled_in_place, compiled_in_part, compiled_loss]


def tuned(name: str, way: Any, settings: dict[str, Any], backend: str = "aot_eager") -> onepass.Tuner:
    make, loss, data = PROBLEMS[name]
    model, loss = way(make(), loss, backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.5)
    tuner = onepass.Tuner(model, optimizer, loss, [data(9)], interval=2, **settings)
    for i in range(6):
        train_step(model, optimizer, data(i), loss)
        tuner.step(data(i))
    return tuner


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_compiled_equals_as_written(name: str, way: Any, settings: str) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = tuned(name, way, SETTINGS[settings]).values()
    assert not [one for one in told if "onepass" in str(one.message)], "there is nothing to fall back from"
    expected = tuned(name, as_written, SETTINGS[settings]).values()
    for key, values in expected.items():
        assert found[key] == pytest.approx(values, rel=1e-5)


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_compiled_to_machine_code() -> None:
    found = tuned("transformer", compiled_whole, {"lookback": 1}, "inductor").values()
    for key, values in tuned("transformer", as_written, {"lookback": 1}).values().items():
        assert found[key] == pytest.approx(values, rel=1e-5)


@pytest.mark.parametrize("way", [compiled_in_part, compiled_loss])
def test_without_a_way_to_run_as_written_auto_falls_back(way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with torch before 2.6."""

    def compiled_as_it_is() -> AbstractContextManager[None]:
        return nullcontext()

    monkeypatch.setattr(onepass.evaluation, "eagerly", compiled_as_it_is)
    with pytest.warns(UserWarning, match=r"double backward.*takes finite differences instead") as told:
        found = tuned("mlp", way, {"lookback": 3}).values()
    assert [one.category for one in told if "finite differences" in str(one.message)] == [UserWarning]
    expected = tuned("mlp", as_written, {"lookback": 3, "curvature": "finite-difference"}).values()
    for key, values in expected.items():
        assert found[key] == pytest.approx(values, rel=1e-5)


def compiled_method(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    return torch.compile(optimizer.step, backend="aot_eager")


def compiled_function(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    @torch.compile(backend="aot_eager")
    def step() -> None:
        optimizer.step()

    return step


def plain_method(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    return optimizer.step


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=torch.tensor(1e-2), momentum=0.5),
    "adam": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2)),
}


def stepped_by(make: Callable[[torch.optim.Optimizer], Callable[[], Any]], name: str) -> tuple[onepass.Tuner, int]:
    """The tuner after some steps, and how many graphs have been compiled for them."""
    from torch._dynamo.utils import counters

    counters.clear()
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    tuner = onepass.Tuner(model, optimizer, mse, [points(9)], interval=1, tune=("lr",), lookback=2)
    step = make(optimizer)
    for i in range(8):
        optimizer.zero_grad()
        mse(model, points(i)).backward()
        step()
        tuner.step(points(i))
    return tuner, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("way", [compiled_method, compiled_function])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_compiled_optimizer_step(name: str, way: Any) -> None:
    tuner, graphs = stepped_by(way, name)
    expected, _ = stepped_by(plain_method, name)
    assert tuner.values()["lr"] == pytest.approx(expected.values()["lr"], rel=1e-5)
    assert len(tuner.history) == 8
    assert graphs <= 2, "a learning rate that is a tensor is not compiled into the graph"
