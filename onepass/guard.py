"""Notices a run that diverges, so that it can go back to its last healthy point.

Everything here is elementwise, on plain numbers or on tensors: a tuner guards one run, a population each replica.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

Number = Any  # a float, or a tensor of them
Truth = Any  # a bool, or a tensor of them


class Health(NamedTuple):
    """What the guard remembers of the validation loss: the first, the lowest (slowly forgotten), and a running mean.

    The mean is infinite while the run is on probation, after its start and after each return: then every single loss
    counts, and is looked at more often.
    """

    first: Number
    best: Number
    smooth: Number


class Verdict(NamedTuple):
    """Not ``healthy``: go back. ``safe``: a point worth going back to. In between, wait and see."""

    healthy: Truth
    safe: Truth


@dataclass(frozen=True)
class Guard:
    """When a run counts as diverged, and how far its learning rate goes down then.

    A run is healthy while its validation loss is finite and the smoothed one within ``ratio * best + slack * first``.

    Attributes:
        ratio: how far above the best loss so far is still normal.
        slack: the same, as a share of the loss at the start; it matters once ``best`` is near zero.
        relax: how fast ``best`` is forgotten, a hyper step. A slow rise (overfitting) must not look like divergence.
        smoothing: weight of the past in the running mean, which hides the noise of mini-batches.
        backoff: decades that the learning rate goes down when the run goes back.
    """

    ratio: float = 2.0
    slack: float = 0.05
    relax: float = 0.02
    smoothing: float = 0.9
    backoff: float = 0.5

    def __post_init__(self) -> None:
        for name, low, high in (("ratio", 1, 1e6), ("slack", 0, 1e6), ("relax", 0, 1), ("smoothing", 0, 0.999)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} must lie in [{low}, {high}], but got {value}")
        if not self.backoff > 0:
            raise ValueError(f"backoff must be above 0, but got {self.backoff}")

    def start(self, loss: Number) -> Health:
        """Health of a run that has not begun. A start that is not finite sets no standard."""
        first = _where(_finite(loss), loss, math.inf)
        return Health(first, first, abs(first) + math.inf)

    def judge(self, health: Health, loss: Number) -> tuple[Health, Verdict]:
        """The health after one more loss, and what to make of it."""
        smooth = _where(on_probation(health), loss, self.smoothing * health.smooth + (1 - self.smoothing) * loss)
        best, limit = self._limit(health)
        healthy = _finite(loss) & (smooth <= limit)
        safe = healthy & (loss <= (best + limit) / 2)  # a point at the brink is no place to go back to
        after = Health(
            first=_where(_finite(health.first), health.first, _where(healthy, loss, math.inf)),
            # A sick run's best relaxes too, or one that can never be as good again would go back for ever.
            best=_where(healthy & (smooth < best), smooth, best),
            smooth=_where(healthy, smooth, math.inf),
        )
        return after, Verdict(healthy, safe)

    def trusts(self, health: Health, loss: Number, there: Number) -> Truth:
        """Whether a batch that looks sick can tell, with this loss at the last healthy point: that it would not there.

        Of small batches, some are much harder than others, the more so once most examples are learnt. A loss that is
        not finite tells, unless it is not finite there either.
        """
        return _finite(there) & _where(_finite(loss), there <= self._limit(health)[1], _finite(there))

    def _limit(self, health: Health) -> tuple[Number, Number]:
        """The best loss, a little forgotten, and the largest that is still normal."""
        # Size, not sign: losses such as a negative log-likelihood may pass through zero.
        best = health.best + self.relax * abs(health.best)
        limit = best + (self.ratio - 1) * abs(best) + self.slack * abs(health.first)
        return best, _where(_finite(health.first), limit, math.inf)


def on_probation(health: Health) -> Truth:
    return health.smooth == math.inf


def probation_step(step: int) -> bool:
    """Whether a run on probation is looked at after this many steps since the last hyper step: 1, 2, 4, 8, ...

    A learning rate far too high can ruin a network in one step (dead units), at a loss that later looks harmless.
    """
    return step > 0 and step & (step - 1) == 0


def _finite(number: Number) -> Truth:
    return abs(number) < math.inf  # false for NaN as well


def _where(truth: Truth, then: Number, otherwise: Number) -> Number:
    if isinstance(truth, Tensor):
        return torch.where(truth, then, otherwise)
    return then if truth else otherwise
