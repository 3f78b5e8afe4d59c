"""Averages over starts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from onepass.experiments.statistics import apart, best_of, near_best, resampled, summary

NAN = float("nan")


def test_averages_leave_out_what_diverged() -> None:
    found = summary([3.0, NAN, 1.0, math.inf, 2.0, 10.0])
    assert (found.mean, found.median, found.best, found.worst) == (4.0, 2.5, 1.0, 10.0)
    assert (found.diverged, found.starts) == (2, 6)


def test_nothing_left() -> None:
    found = summary([NAN, NAN])
    assert math.isnan(found.mean) and math.isnan(found.best)
    assert (found.diverged, found.starts) == (2, 2)


def test_standard_errors_are_those_of_theory() -> None:
    values = np.random.default_rng(1).normal(5.0, 2.0, 400)
    found = summary(values)
    assert found.mean_se == pytest.approx(2.0 / 20, rel=0.15)
    assert found.median_se == pytest.approx(math.sqrt(math.pi / 2) * 2.0 / 20, rel=0.25)


def test_the_same_every_time_but_not_for_another_seed() -> None:
    values = np.arange(30.0)
    assert summary(values) == summary(values)
    assert summary(values).mean_se != summary(values, seed=1).mean_se
    assert set(resampled(values).ravel()) <= set(values)


@pytest.mark.parametrize(
    ("valid", "together", "expected"),
    [
        ([3.0, 1.0, 2.0, 5.0, 4.0, 6.0], 3, [1, 4]),
        ([3.0, 1.0, 2.0, 5.0, 4.0], 3, [1]),  # what is left over is dropped
        ([NAN, 7.0, math.inf], 3, [1]),
        ([NAN, NAN, NAN], 3, [0]),  # lost either way
        ([2.0, 1.0], 1, [0, 1]),
        ([2.0, 1.0], 3, []),
    ],
)
def test_best_of_every_few(valid: list[float], together: int, expected: list[int]) -> None:
    assert best_of(valid, together).tolist() == expected


def test_apart_in_combined_standard_errors() -> None:
    assert apart(5.0, 3.0, 0.0, 4.0) == pytest.approx(1.0)
    assert apart(1.0, 0.0, 2.0, 1.0) == pytest.approx(-1.0)
    assert math.isnan(apart(1.0, 0.0, 2.0, 0.0))


@pytest.mark.parametrize(
    ("values", "errors", "expected"),
    [
        ([1.0, 1.09, 1.2], [0.1, 0.5, 0.5], [True, True, False]),  # the error bar of the best counts
        ([NAN, 2.0], [NAN, NAN], [False, True]),
        ([NAN, NAN], [NAN, NAN], [False, False]),
        ([], [], []),
    ],
)
def test_bold_within_the_error_bar_of_the_best(values: list[float], errors: list[float], expected: list[bool]) -> None:
    assert near_best(values, errors) == expected


@pytest.mark.parametrize("starts", [2, 11, 60, 200])
def test_standard_errors_are_those_of_another_bootstrap(starts: int) -> None:
    """SciPy's, of the same samples, with many more of them: what is left is the noise of a thousand."""
    values = np.random.default_rng(starts).lognormal(size=starts)
    found = summary([*values, NAN])
    for statistic, ours in ((np.mean, found.mean_se), (np.median, found.median_se)):
        theirs = stats.bootstrap((values,), statistic, n_resamples=9999, method="percentile", rng=0).standard_error
        assert ours == pytest.approx(theirs, rel=0.1)


def test_the_very_same_samples_give_the_very_same_errors() -> None:
    """Of SciPy's own resamples: only its divisor differs, by one in their number."""
    values = np.random.default_rng(1).lognormal(size=40)
    drawn = resampled(values)
    for statistic, ours in ((np.mean, summary(values).mean_se), (np.median, summary(values).median_se)):
        theirs = stats.bootstrap(
            (values,), statistic, n_resamples=0, bootstrap_result=_Drawn(statistic(drawn, axis=1)), method="percentile"
        )
        assert ours == pytest.approx(theirs.standard_error * math.sqrt(1 - 1 / len(drawn)), rel=1e-12)


class _Drawn:
    """What SciPy goes on from, if some samples have been taken before."""

    def __init__(self, distribution: np.ndarray) -> None:
        self.bootstrap_distribution = distribution
