"""Raw spaces: there and back, their slopes, and what keeps a value inside its bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from onepass.hyperparameters import DEFAULT_BOUNDS, TRANSFORM_BOUNDS, TRANSFORMS, Hyperparameter, in_domain

# Natural values that each space must be able to hold, its difficult corners included.
STARTS = {
    "log10": [1e-8, 1e-3, 0.5, 1.0, 30.0],
    "logit": [1e-5, 0.1, 0.5, 0.9, 0.9999],
    "log10-of-one-minus": [1e-5, 0.5, 0.9, 0.999, 0.99999],
    "identity": [-3.0, -1e-3, 0.0, 0.25, 1e4],
}
every_transform = pytest.mark.parametrize("transform", TRANSFORMS)


def starts(transform: str) -> Tensor:
    return torch.tensor(STARTS[transform], dtype=torch.float64)


def test_every_transform_has_starts_and_default_bounds() -> None:
    assert set(TRANSFORMS) == set(STARTS) == set(TRANSFORM_BOUNDS)


@every_transform
def test_transform_round_trips(transform: str) -> None:
    space, natural = TRANSFORMS[transform], starts(transform)
    raw = space.to_raw(natural)
    torch.testing.assert_close(space.to_natural(raw), natural, rtol=1e-10, atol=0)
    torch.testing.assert_close(space.to_raw(space.to_natural(raw)), raw, rtol=1e-10, atol=0)


@every_transform
def test_slope_is_the_derivative_of_to_natural(transform: str) -> None:
    space, natural = TRANSFORMS[transform], starts(transform)
    raw = space.to_raw(natural).requires_grad_()
    (by_autograd,) = torch.autograd.grad(space.to_natural(raw).sum(), raw)
    torch.testing.assert_close(space.slope(natural), by_autograd, rtol=1e-9, atol=0)
    size = 1e-5
    difference = (space.to_natural(raw + size) - space.to_natural(raw - size)) / (2 * size)
    torch.testing.assert_close(space.slope(natural), difference.detach(), rtol=1e-4, atol=0)


@every_transform
def test_domain_is_open(transform: str) -> None:
    low, high = TRANSFORMS[transform].domain
    assert all(in_domain(start, transform) for start in STARTS[transform])
    assert not any(in_domain(edge, transform) for edge in (low, high, math.nan))
    assert not in_domain(torch.tensor([STARTS[transform][1], math.nan]), transform)


@every_transform
def test_pull_back_is_the_chain_rule(transform: str) -> None:
    for start in STARTS[transform]:
        h = Hyperparameter(torch.tensor(start, dtype=torch.float64), transform)
        raw = h.raw.clone().requires_grad_()
        loss = torch.sin(3 * TRANSFORMS[transform].to_natural(raw))
        (expected,) = torch.autograd.grad(loss, raw)
        pulled = h.pull_back(3 * torch.cos(3 * h.value))
        torch.testing.assert_close(pulled, expected, rtol=1e-9, atol=1e-12)


@every_transform
@pytest.mark.parametrize("shift", [1e6, -1e6])
def test_refresh_clamps_to_the_bounds(transform: str, shift: float) -> None:
    low, high = sorted(STARTS[transform][1:4:2])
    h = Hyperparameter(STARTS[transform][2], transform, bounds=(low, high))
    h.raw.add_(shift)
    h.refresh()
    ends = [float(TRANSFORMS[transform].to_raw(torch.tensor(b, dtype=torch.float64))) for b in (low, high)]
    # Raw itself stops there: what has wandered far outside would need as many steps to come back.
    reached = (high, ends[1]) if (shift > 0) == (ends[0] < ends[1]) else (low, ends[0])
    assert (float(h.value), float(h.raw)) == pytest.approx(reached)


@every_transform
def test_refresh_follows_raw_and_keeps_the_tensor(transform: str) -> None:
    h = Hyperparameter(STARTS[transform][2], transform)
    value, raw = h.value, h.raw
    h.raw.copy_(TRANSFORMS[transform].to_raw(starts(transform)[3]))
    h.refresh()
    assert h.value is value and h.raw is raw  # the loss and the hyper-optimizer hold on to these
    assert float(h.value) == pytest.approx(STARTS[transform][3])


@every_transform
def test_set_moves_value_and_raw_together(transform: str) -> None:
    low, target, high = sorted(STARTS[transform][1:4])
    h = Hyperparameter(target, transform, bounds=(low, high))
    value, raw = h.value, h.raw
    for asked, reached in ((low, low), (high + 0.5, high), (low - 5, low), (target, target)):
        h.set(asked)
        assert float(h.value) == pytest.approx(reached)
        assert float(TRANSFORMS[transform].to_natural(h.raw)) == pytest.approx(reached)
    assert h.value is value and h.raw is raw


@every_transform
def test_tensors_keep_their_shape_and_are_clamped_element_by_element(transform: str) -> None:
    start = starts(transform)[1:4]
    h = Hyperparameter(start, transform)
    assert h.value is not start and torch.equal(h.value, start)
    h.raw[0] += 1e6
    h.refresh()
    torch.testing.assert_close(h.value[1:], start[1:])
    assert h.value.shape == h.raw.shape == start.shape
    h.set(start[1].item())
    torch.testing.assert_close(h.value, start[1].expand(3))


def test_scalars_keep_the_digits_of_one_minus() -> None:
    """In float32, 1 - 0.99999 is wrong in its third digit."""
    h = Hyperparameter(0.99999, "log10-of-one-minus")
    assert float(h.raw) == pytest.approx(-5, rel=1e-9)


def test_default_bounds_depend_on_the_name_and_hold_the_start() -> None:
    assert Hyperparameter(0.1, name="lr").bounds == DEFAULT_BOUNDS["lr"]
    assert Hyperparameter(0.1, name="decay").bounds == TRANSFORM_BOUNDS["log10"]
    assert Hyperparameter(5.0, name="lr").bounds == (DEFAULT_BOUNDS["lr"][0], 5.0)
    assert Hyperparameter(1e-14).bounds == (1e-14, TRANSFORM_BOUNDS["log10"][1])


@pytest.mark.parametrize(("value", "bounds"), [(0.1, (0.1, 1.0)), (0.1, (0.01, 0.1)), (torch.tensor(0.5), (0.5, 1.0))])
def test_a_start_may_lie_on_its_bound(value: float | Tensor, bounds: tuple[float, float]) -> None:
    h = Hyperparameter(value, bounds=bounds)
    h.refresh()
    assert float(h.value) == pytest.approx(float(value))


def test_start_is_copied_and_carries_no_graph() -> None:
    start = torch.tensor(0.1, requires_grad=True)
    h = Hyperparameter(start)
    h.set(0.2)
    assert start.item() == pytest.approx(0.1)
    assert not h.value.requires_grad and not h.raw.requires_grad


def test_repr_shows_the_natural_value() -> None:
    assert repr(Hyperparameter(0.25, "logit", (0.1, 0.5))) == (
        "Hyperparameter(0.25, transform='logit', bounds=(0.1, 0.5))"
    )


def made(*args: Any, **kwargs: Any) -> Callable[[], Hyperparameter]:
    return lambda: Hyperparameter(*args, **kwargs)


ERRORS = [
    (made(0.1, "log"), "transform must be one of ['identity', 'log10', 'log10-of-one-minus', 'logit'], but got 'log'"),
    (made(torch.tensor(1)), "value must be a floating point number, but got tensor(1)"),
    (made(0.0, name="weight_decay"), "weight_decay must lie strictly inside (0, inf) to be tuned in log10 space"),
    (made(0.0), "but got 0; start from a small positive value such as 1e-6"),
    (made(1.0, "logit"), "inside (0, 1) to be tuned in logit space, but got 1; start strictly between 0 and 1"),
    (made(1.0, "log10-of-one-minus"), "but got 1; start strictly between 0 and 1, for example from 0.9"),
    (made(math.inf, "identity"), "but got inf; start from a finite value"),
    (made(math.nan), "but got nan"),
    (made(torch.tensor([0.1, -2.0])), "but got values in [-2, 0.1]"),
    (made(0.1, bounds=(1.0, 0.01)), "bounds of value must be (low, high) inside (0.0, inf), but got (1.0, 0.01)"),
    (made(0.1, bounds=(-1.0, 1.0)), "bounds of value must be (low, high) inside (0.0, inf), but got (-1.0, 1.0)"),
    (made(0.1, "logit", (0.0, 1.5)), "inside (0.0, 1.0), but got (0.0, 1.5)"),
    (made(0.1, bounds=(0.01, 0.1, 1.0)), "bounds of value must be (low, high)"),
    (made(0.1, bounds=(0.2, 1.0), name="lr"), "bounds of lr must include its start 0.1, but got (0.2, 1.0)"),
    (made(torch.tensor([0.1, 2.0]), bounds=(0.01, 1.0)), "must include its start values in [0.1, 2]"),
]


@pytest.mark.parametrize(("make", "message"), ERRORS, ids=[message for _, message in ERRORS])
def test_errors_say_what_is_wrong(make: Callable[[], Hyperparameter], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        make()
    assert message in str(raised.value)
