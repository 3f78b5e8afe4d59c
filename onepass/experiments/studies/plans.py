"""Which cells a study needs for one data set and one method.

A plan takes the usual request, and how many starts somebody has asked for, if anybody did. Cells that change something
have a folder of their own below the study's; whatever is as usual is shared with the other artefacts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from onepass.experiments.protocol import PROTOCOLS
from onepass.experiments.runs import Request
from onepass.experiments.variants import Variant

Plan = Callable[[Request, int | None], list[Request]]

LONGEST = 10  # intervals and look-backs go from 1 to this
EXACT, SERIES, UNTUNED = "diff-through-opt", "one-pass-wd-lr-m", "random"
PRECISIONS = {"float32": False, "float64": True}
MEDIUM, LONG, FULL = "medium-diff-through-opt", "long-diff-through-opt", "full-diff-through-opt"
TRUNCATED = "short-horizon/truncated"
ON_SHORT_PROBLEMS = (UNTUNED, SERIES, EXACT, LONG, "one-pass")
FAR = {"uci-energy": FULL, "fashion-mnist": MEDIUM, "diabetes": FULL, "digits": MEDIUM}  # at the usual length
SHARES = {"67.5-22.5-10": 0.225, "56.25-33.75-10": 0.3375, "45-45-10": 0.45}  # beside the usual one
WIDER = 10  # times as many starts that are not tuned, for the landscape behind those that are


class Cross(NamedTuple):
    """One point of a grid."""

    interval: int
    lookback: int

    @property
    def folder(self) -> str:
        return f"T{self.interval}-i{self.lookback}"


def usual(request: Request, asked: int | None) -> list[Request]:
    return [request]


def grid(*, full: bool) -> list[Cross]:
    """All look-backs, or those that lie within an interval."""
    every = range(1, LONGEST + 1)
    return [Cross(interval, lookback) for interval in every for lookback in every if full or lookback <= interval]


def sensitivity(request: Request, asked: int | None) -> list[Request]:
    """As many hyper steps at every interval: ``steps`` is the number of weight steps at the longest.

    Values that are not tuned have no hyper steps: one run passes through the ends of all. Exact hypergradients end at
    the hyper step before, so that longer look-backs would change nothing.
    """
    request, hyper_steps = replace(request, replicas=asked or 100), max(1, request.steps // LONGEST)
    if request.method == UNTUNED:
        variant = Variant("sensitivity/untuned", interval=min(10, hyper_steps))
        return [replace(request, steps=LONGEST * hyper_steps, variant=variant)]
    return [
        replace(
            request,
            steps=hyper_steps * cross.interval,
            variant=Variant(f"sensitivity/{cross.folder}", *cross, ends_alone=True),
        )
        for cross in grid(full=request.method != EXACT)
    ]


def hypergradient_accuracy(request: Request, asked: int | None) -> list[Request]:
    """To the first hyper step, whatever the number of steps."""
    return [
        replace(
            request,
            replicas=asked or 50,
            steps=cross.interval,
            variant=Variant(f"hypergradient-accuracy/{name}/{cross.folder}", *cross, double=double, ends_alone=True),
        )
        for name, double in PRECISIONS.items()
        for cross in grid(full=False)
    ]


def trajectories(request: Request, asked: int | None) -> list[Request]:
    replicas = asked or 50
    if request.method == UNTUNED:
        variant = Variant("trajectories/background", start="far and wide, without momentum")
        return [replace(request, replicas=WIDER * replicas, variant=variant)]
    return [replace(request, replicas=replicas, variant=Variant("trajectories/runs", start="without momentum"))]


def short_horizon(request: Request, asked: int | None) -> list[Request]:
    """A short problem, where hypergradients can look through all of it; and the usual one, where it has one that looks
    farther than five steps.
    """
    found = []
    if request.method in ON_SHORT_PROBLEMS:
        steps = min(PROTOCOLS[request.dataset].short_steps, request.steps)
        found.append(replace(request, steps=steps, replicas=asked or 60, variant=Variant(TRUNCATED)))
    far = FAR.get(request.dataset)
    if far is not None and request.method in {MEDIUM, LONG, FULL} - {far}:
        return found
    return [*found, request] if far is not None else found


def validation_size(request: Request, asked: int | None) -> list[Request]:
    others = [Variant(f"validation-size/{name}", validation=share) for name, share in SHARES.items()]
    return [request, *(replace(request, variant=variant) for variant in others)]
