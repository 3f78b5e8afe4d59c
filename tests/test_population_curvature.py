"""Finite differences for many replicas: each its own, from the same masks and buffers as the step itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onepass.interval import linearised
from onepass.method import Taken
from onepass.replicas import Weights
from tests.populations import TRAIN, assert_close, batches, population, trained, weights

pytestmark = pytest.mark.usefixtures("float64")

START: dict[str, Any] = {"lr": [0.02, 0.1, 0.05], "momentum": 0.8}
FINITE: dict[str, Any] = {"curvature": "finite-difference"}


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1))


def noisy() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 1))


def product(v: Tensor, now: Weights | None = None, **settings: Any) -> tuple[Tensor, Weights]:
    """Rows times the Hessians of three replicas that have not begun; and what these are."""
    found = population(start=START, **settings)
    now = now or found._state.now
    hessian = linearised(found._method, now, found._method.values(found._state), Taken(0, TRAIN))[1]
    assert hessian is not None
    return hessian.back([v])[0], now


def rows(scale: float = 1.0) -> Tensor:
    return scale * torch.randn(3, weights(population()).shape[1])


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_a_product_is_the_exact_one(scale: float) -> None:
    v = rows(scale)
    exact, finite = product(v)[0], product(v, **FINITE)[0]
    assert float(exact.norm()) > 1e-2 * scale  # a comparison of zeros would prove nothing
    for one, other in zip(finite, exact, strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-6


def test_along_nothing_it_is_nothing() -> None:
    v = rows()
    v[1] = 0
    found = product(v, **FINITE)[0]
    assert torch.equal(found[1], torch.zeros_like(found[1]))
    assert found[0].abs().max() > 0


def test_a_product_does_not_depend_on_other_replicas() -> None:
    v = rows()
    before, now = product(v, **FINITE)
    v[2], other = 1e8, now.weights.clone()
    other[1:] = torch.tensor([[torch.nan], [1e5]])
    found = product(v, now._replace(weights=other), **FINITE)[0]
    assert_close(found[0], before[0], 1e-12)
    assert found[1].isnan().all()


@pytest.mark.parametrize("model", [normalised, noisy, None])
@pytest.mark.parametrize("method", [{}, {"unroll": 3, "guard": None}, {"clip_norm": 0.5}], ids=str)
def test_runs_like_exact_ones(model: Any, method: dict[str, Any]) -> None:
    """Dropout has the same masks in every evaluation of a step, batch norm moves its statistics once."""
    settings = {"start": START, "interval": 4, **method, **({} if model is None else {"model": model})}
    exact, finite = (
        trained(12, batches(3), curvature=curvature, **settings) for curvature in ("exact", *FINITE.values())
    )
    for name, value in exact.history.hypergradients.items():
        torch.testing.assert_close(finite.history.hypergradients[name], value, rtol=1e-4, atol=1e-7, msg=name)
    for r in range(3):
        for name, buffer in exact.model(r).named_buffers():
            assert_close(dict(finite.model(r).named_buffers())[name], buffer, 1e-6, name)


def test_blocks_do_not_matter() -> None:
    whole, single = (trained(20, batches(3), start=START, block=block, **FINITE) for block in (3, 1))
    assert_close(weights(whole), weights(single), 1e-9)


def test_a_checkpoint_of_other_curvature_or_clipping_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "population.pt"
    first = population(start=START, clip_norm=0.5, **FINITE)
    first.run([TRAIN], [TRAIN], steps=10, checkpoint=path)
    for other, name in (({"clip_norm": 0.5}, "curvature"), ({"clip_norm": 1.0, **FINITE}, "clip_norm")):
        with pytest.raises(ValueError, match=f"same configuration, but its {name} is"):
            population(start=START, **other).run([TRAIN], [TRAIN], steps=20, checkpoint=path)
