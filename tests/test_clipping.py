"""Clipping is torch's, row by row, and its derivative is what autograd finds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from onepass.clipping import clipped, through_clipping
from tests.populations import assert_close

pytestmark = pytest.mark.usefixtures("float64")


def rows() -> Tensor:
    """One far beyond a norm of 1, one a little beyond, one within, one of zeros, and one within the epsilon of it."""
    made = torch.randn(5, 7)
    lengths = torch.tensor([30.0, 1.2, 0.5, 0.0, 1 - 5e-7])
    return nn.functional.normalize(made) * lengths.unsqueeze(1)


def test_each_row_as_torch_clips_it() -> None:
    given = rows()
    for row, found in zip(given, clipped(given, 1.0), strict=True):
        parts = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4))]
        for p, g in zip(parts, row.split([3, 4]), strict=True):
            p.grad = g.clone()
        nn.utils.clip_grad_norm_(parts, 1.0)
        assert_close(found, torch.cat([p.grad for p in parts if p.grad is not None]), 1e-15)


def test_what_is_short_enough_stays_bit_for_bit() -> None:
    given = rows()
    assert torch.equal(clipped(given, 31.0), given)


@pytest.mark.parametrize("norm", [1.0, 0.25, 100.0])
def test_its_derivative_is_that_of_autograd(norm: float) -> None:
    given = rows()
    given = given[given.norm(dim=1) > 0].requires_grad_()
    cotangents = torch.randn_like(given)
    (expected,) = torch.autograd.grad(clipped(given, norm), given, cotangents)
    assert_close(through_clipping(cotangents, given.detach(), norm), expected, 1e-13)


def test_a_row_of_zeros_or_of_nan_is_alone() -> None:
    given = torch.stack([torch.zeros(4), torch.full((4,), torch.nan), torch.full((4,), 5.0)])
    cotangents = torch.randn(3, 4)
    found = through_clipping(cotangents, given, 1.0)
    assert torch.equal(found[0], cotangents[0]) and found[2].isfinite().all()
    assert torch.equal(clipped(given, 1.0)[0], given[0]) and clipped(given, 1.0)[1].isnan().all()
