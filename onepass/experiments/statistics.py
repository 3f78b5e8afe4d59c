"""Averages over starts, as the paper takes them. Functions of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

BOOTSTRAPS = 1000


class Summary(NamedTuple):
    """Final losses of many starts. Those that are not finite count as ``diverged``, and for nothing else."""

    mean: float
    mean_se: float
    median: float
    median_se: float
    best: float
    worst: float
    diverged: int
    starts: int


def summary(values: Sequence[float] | Array, *, seed: int = 0) -> Summary:
    """Mean and median with standard errors from bootstrap samples of the finite values.

    >>> summary([1.0, 2.0, 3.0, float("nan")])[::2]
    (2.0, 2.0, 1.0, 1)
    """
    every = np.asarray(values, dtype=np.float64)
    finite = every[np.isfinite(every)]
    diverged = len(every) - len(finite)
    if not len(finite):
        nan = float("nan")
        return Summary(nan, nan, nan, nan, nan, nan, diverged, len(every))
    drawn = resampled(finite, seed)
    single = len(finite) == 1  # which says nothing about errors
    return Summary(
        mean=float(finite.mean()),
        mean_se=float("nan") if single else float(drawn.mean(1).std()),
        median=float(np.median(finite)),
        median_se=float("nan") if single else float(np.median(drawn, 1).std()),
        best=float(finite.min()),
        worst=float(finite.max()),
        diverged=diverged,
        starts=len(every),
    )


def resampled(values: Array, seed: int = 0) -> Array:
    """``(BOOTSTRAPS, len(values))``: as many values again, drawn from themselves."""
    index = np.random.default_rng(seed).integers(0, len(values), (BOOTSTRAPS, len(values)))
    return values[index]


def best_of(valid: Sequence[float] | Array, together: int) -> NDArray[np.int64]:
    """Of so many starts in a row, which has the lowest validation loss. What is left over at the end is dropped.

    >>> best_of([3.0, 1.0, 2.0, float("nan"), 5.0, float("nan"), 0.0], 3).tolist()
    [1, 4]
    """
    losses = np.asarray(valid, dtype=np.float64)
    groups = np.nan_to_num(losses[: len(losses) // together * together], nan=np.inf).reshape(-1, together)
    chosen: NDArray[np.int64] = groups.argmin(1) + together * np.arange(len(groups))
    return chosen


def apart(ours: float, ours_se: float, published: float, published_se: float) -> float:
    """The difference between two estimates, in their combined standard errors."""
    both = float(np.hypot(ours_se, published_se))
    return (ours - published) / both if both > 0 else float("nan")


def near_best(values: Sequence[float], errors: Sequence[float]) -> list[bool]:
    """Which estimates lie within the error bar of the lowest: what the paper prints in bold.

    >>> near_best([1.0, 1.05, 2.0], [0.1, 0.1, 0.1])
    [True, True, False]
    """
    known = [value if np.isfinite(value) else np.inf for value in values]
    if not known or np.isinf(min(known)):
        return [False] * len(known)
    lowest = int(np.argmin(known))
    bar = known[lowest] + np.nan_to_num(errors[lowest])
    return [bool(value <= bar) for value in known]
