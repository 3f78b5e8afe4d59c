"""Where runs begin: drawn from a range, each number from a random state of its own."""

from __future__ import annotations

import math

import pytest
import torch

import onepass
from onepass.starts import draw, seed_of


def drawn(distribution: onepass.Uniform | onepass.LogUniform, seed: int = 0) -> torch.Tensor:
    return draw(distribution, seed, "lr", 400)[:, 0]


def test_uniform_fills_its_range() -> None:
    found = drawn(onepass.Uniform(-2.0, 6.0))
    assert ((found > -2) & (found < 6)).all()
    assert found.mean() == pytest.approx(2.0, abs=0.5)
    assert found.dtype == torch.float64 and len(found.unique()) == 400


def test_log_uniform_has_as_many_in_every_decade() -> None:
    found = drawn(onepass.LogUniform(1e-6, 1e-2)).log10()
    assert torch.histc(found, 4, -6, -2).tolist() == pytest.approx([100] * 4, abs=35)


def test_columns_do_not_depend_on_their_length() -> None:
    some = onepass.LogUniform(1e-6, 1e-2)
    assert torch.equal(draw(some, 3, "lr", 5), draw(some, 3, "lr", 9)[:5])
    assert draw(some, 3, "lr", 5).shape == (5, 1)


def test_names_and_seeds_draw_apart() -> None:
    some = onepass.Uniform(0.0, 1.0)
    columns = [draw(some, seed, name, 5) for seed in (0, 1) for name in ("lr", "momentum")]
    assert len(torch.cat(columns).unique()) == 20


def test_drawing_leaves_the_random_state_alone() -> None:
    state = torch.get_rng_state()
    drawn(onepass.Uniform(0.0, 1.0))
    assert torch.equal(torch.get_rng_state(), state)


def test_seeds_are_for_one_purpose_each() -> None:
    seeds = {seed_of(seed, name, r) for seed in range(5) for name in ("weights", "lr") for r in range(50)}
    assert len(seeds) == 500
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of(1, 23) != seed_of(12, 3)
    assert seed_of(0, "weights", 7) == seed_of(0, "weights", 7)


@pytest.mark.parametrize("bad", [(1, 1), (2, 1), (0, math.inf), (math.nan, 1)])
@pytest.mark.parametrize("kind", [onepass.Uniform, onepass.LogUniform])
def test_ranges_that_are_empty(kind: type[onepass.Uniform | onepass.LogUniform], bad: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=r"the range must be .* not empty, but got \(") as raised:
        kind(*bad)
    assert str(raised.value).endswith(f"({bad[0]}, {bad[1]})")


@pytest.mark.parametrize("low", [0.0, -1.0])
def test_logarithms_need_numbers_above_zero(low: float) -> None:
    with pytest.raises(ValueError, match=rf"the range must be above 0 and not empty, but got \({low}, 1.0\)"):
        onepass.LogUniform(low, 1.0)
