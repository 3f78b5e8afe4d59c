"""Every cell of the table of what works with what, and the page that shows it."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from onepass.curvature import CURVATURES
from onepass.rules import RULES
from tests.matrix import ELSEWHERE, FEATURES, HARMLESS, hypergradients, refused, table, tolerance

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "compatibility.md"


@pytest.fixture(autouse=True)
def quiet_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # such as a fall back to other products
        yield
    torch.set_default_dtype(torch.float32)


@functools.cache
def found(feature: str, optimizer: str, curvature: str) -> dict[str, Tensor]:
    slopes = hypergradients(feature, optimizer, curvature)
    return {name: torch.cat([torch.as_tensor(v).double().reshape(-1) for v in each]) for name, each in slopes.items()}


@pytest.mark.parametrize(("feature", "optimizer", "curvature"), [*itertools.product(FEATURES, RULES, CURVATURES)])
def test_cell(feature: str, optimizer: str, curvature: str) -> None:
    """What works agrees with the exact product; what does not says so."""
    exception = refused(feature, optimizer, curvature)
    if exception:
        with pytest.raises(TypeError, match=exception.error):
            found(feature, optimizer, curvature)
        return
    slopes, reference = found(feature, optimizer, curvature), found(feature, optimizer, "exact")
    assert reference["lr"].isfinite().all() and reference["lr"].any()
    rtol, atol = tolerance(feature, curvature)
    for name, slope in slopes.items():
        torch.testing.assert_close(slope, reference[name], rtol=rtol, atol=atol)


@pytest.mark.parametrize(("feature", "optimizer"), [*itertools.product(HARMLESS, RULES)])
def test_what_should_change_nothing(feature: str, optimizer: str) -> None:
    expected = found("nothing else", optimizer, "exact")
    for name, slope in found(feature, optimizer, "exact").items():
        torch.testing.assert_close(slope, expected[name], rtol=1e-9, atol=1e-14)


def test_the_page_says_what_the_tests_say() -> None:
    assert table() in PAGE.read_text(), "python -m tests.matrix prints the table for docs/compatibility.md"


@pytest.mark.parametrize("row", ELSEWHERE)
def test_the_page_names_tests_that_are_there(row: str) -> None:
    path, name = ELSEWHERE[row][1].split("::")
    assert f"def {name}(" in (ROOT / path).read_text()
