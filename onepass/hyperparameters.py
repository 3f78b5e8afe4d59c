"""One tuned value: where it is stored, and the space it is tuned in.

A hyperparameter has two forms. *Natural* is what everyone writes (``lr = 0.1``). *Raw* is the unconstrained number that
gradient descent moves: the logarithm of a rate, the logit of a momentum. ``TRANSFORMS`` is the table of raw spaces.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

LN10 = math.log(10.0)


class Transform(NamedTuple):
    """A raw space. ``slope`` is d natural / d raw, written as a function of the natural value."""

    to_raw: Callable[[Tensor], Tensor]
    to_natural: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    domain: tuple[float, float]
    cure: str


TRANSFORMS = {
    "log10": Transform(
        to_raw=torch.log10,
        to_natural=lambda raw: 10.0**raw,
        slope=lambda natural: LN10 * natural,
        domain=(0.0, math.inf),
        cure="start from a small positive value such as 1e-6",
    ),
    "logit": Transform(
        to_raw=torch.logit,
        to_natural=torch.sigmoid,
        slope=lambda natural: natural * (1 - natural),
        domain=(0.0, 1.0),
        cure="start strictly between 0 and 1, for example from 0.1",
    ),
    "log10-of-one-minus": Transform(
        to_raw=lambda natural: torch.log10(1 - natural),
        to_natural=lambda raw: 1 - 10.0**raw,
        slope=lambda natural: LN10 * (natural - 1),
        domain=(0.0, 1.0),
        cure="start strictly between 0 and 1, for example from 0.9",
    ),
    "identity": Transform(
        to_raw=lambda natural: natural.clone(),
        to_natural=lambda raw: raw.clone(),
        slope=torch.ones_like,
        domain=(-math.inf, math.inf),
        cure="start from a finite value",
    ),
}

# Where the default search stops, in natural units. The learning rate's range is the paper's. The others end where more
# no longer helps and only the way back gets longer; and Adam is unstable where beta1 exceeds the root of beta2, which a
# greedy search from a tiny learning rate would do.
DEFAULT_BOUNDS = {
    "lr": (1e-10, 1.0),
    "weight_decay": (1e-8, 1e-2),
    "momentum": (0.01, 0.95),
    "beta1": (0.01, 0.95),
    "beta2": (0.97, 0.99999),
    "alpha": (0.9, 0.99999),
    "eps": (1e-12, 1e-2),
}
TRANSFORM_BOUNDS = {
    "log10": (1e-12, 1.0),
    "logit": (1e-6, 1 - 1e-6),
    "log10-of-one-minus": (1e-6, 1 - 1e-6),
    "identity": (-math.inf, math.inf),
}


class Hyperparameter:
    """One tuned value, scalar or tensor, with its raw space and its bounds.

    Use it directly for a hyperparameter that lives inside the loss, and hand it to ``Tuner(..., extra={"l2": l2})``:

    >>> l2 = Hyperparameter(1e-4)
    >>> float(l2.value)
    9.999999747378752e-05
    >>> Hyperparameter(0.9, transform="logit", bounds=(0.5, 0.99)).raw
    tensor(2.1972, dtype=torch.float64)

    Args:
        value: the start, in natural units.
        transform: a name from ``TRANSFORMS``.
        bounds: ``(lowest, highest)`` in natural units; by default those of the tables above, widened to hold the start.
        name: how error messages call it.

    Attributes:
        value: the natural value, a tensor that stays the same object for life and is updated in place.
        raw: the tensor that the hyper-optimizer moves. Scalars are kept in float64: 1 - 0.9999 needs the digits.
    """

    def __init__(
        self,
        value: float | Tensor,
        transform: str = "log10",
        bounds: tuple[float, float] | None = None,
        *,
        name: str = "value",
    ) -> None:
        if transform not in TRANSFORMS:
            raise ValueError(f"transform must be one of {sorted(TRANSFORMS)}, but got {transform!r}")
        self.name = name
        self.transform = transform
        start = value.detach().clone() if isinstance(value, Tensor) else torch.tensor(float(value))
        if not start.is_floating_point():
            raise ValueError(f"{name} must be a floating point number, but got {value!r}")
        if not in_domain(start, transform):
            low, high = TRANSFORMS[transform].domain
            raise ValueError(
                f"{name} must lie strictly inside ({low:g}, {high:g}) to be tuned in {transform} space, "
                f"but got {_show(start)}; {TRANSFORMS[transform].cure}"
            )
        self.value = start
        self.start = start.clone()
        self._exact = torch.float64 if start.numel() == 1 and start.device.type != "mps" else start.dtype
        exact = start.to(self._exact) if isinstance(value, Tensor) else torch.tensor(float(value), dtype=self._exact)
        self._set_bounds(checked_bounds(name, start if isinstance(value, Tensor) else exact, transform, bounds))
        self.raw = TRANSFORMS[transform].to_raw(exact)

    def pull_back(self, natural_gradient: Tensor) -> Tensor:
        """The gradient in raw space, from the gradient in natural space (chain rule)."""
        return natural_gradient.to(self._exact) * TRANSFORMS[self.transform].slope(self.value.to(self._exact))

    def refresh(self) -> None:
        """Put ``raw`` back inside the bounds and bring ``value`` up to date with it."""
        self.raw.clamp_(*self._raw_bounds)
        self.value.copy_(TRANSFORMS[self.transform].to_natural(self.raw).clamp_(*self.bounds))

    def set(self, natural: float | Tensor) -> None:
        """Move to a natural value; one outside the bounds ends up on the nearest."""
        target = torch.as_tensor(natural, dtype=self._exact, device=self.raw.device).clamp(*self.bounds)
        self.raw.copy_(TRANSFORMS[self.transform].to_raw(target.expand_as(self.raw)))
        self.value.copy_(target)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the way of the value so far has left its mark on."""
        return {"raw": self.raw.clone(), "value": self.value.clone(), "start": self.start, "bounds": self.bounds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken."""
        self.raw.copy_(state["raw"])
        self.value.copy_(state["value"])
        self.start.copy_(state["start"])
        self._set_bounds(state["bounds"])

    def _set_bounds(self, bounds: tuple[float, float]) -> None:
        self.bounds = bounds
        ends = TRANSFORMS[self.transform].to_raw(torch.tensor(bounds, dtype=torch.float64))
        self._raw_bounds = sorted(ends.tolist())  # log10-of-one-minus falls: its lower end is the upper bound

    def __repr__(self) -> str:
        return f"Hyperparameter({_show(self.value)}, transform={self.transform!r}, bounds={self.bounds})"


def in_domain(value: Tensor | float, transform: str) -> bool:
    """Whether a start can be expressed in this raw space."""
    low, high = TRANSFORMS[transform].domain
    value = torch.as_tensor(value)
    return bool(((value > low) & (value < high)).all())


def default_bounds(name: str, transform: str) -> tuple[float, float]:
    return DEFAULT_BOUNDS.get(name, TRANSFORM_BOUNDS[transform])


def checked_bounds(name: str, start: Tensor, transform: str, bounds: tuple[float, float] | None) -> tuple[float, float]:
    low, high = float(start.min()), float(start.max())
    if bounds is None:
        default = default_bounds(name, transform)
        return min(default[0], low), max(default[1], high)
    edges = TRANSFORMS[transform].domain
    if len(bounds) != 2 or not edges[0] <= bounds[0] < bounds[1] <= edges[1]:
        raise ValueError(f"bounds of {name} must be (low, high) inside {edges}, but got {bounds}")
    ends = torch.tensor(bounds, dtype=start.dtype)  # a float32 start of 0.1 lies on a bound of 0.1
    if not (float(ends[0]) <= low and high <= float(ends[1])):
        raise ValueError(f"bounds of {name} must include its start {_show(start)}, but got {bounds}")
    return float(bounds[0]), float(bounds[1])


def _show(value: Tensor) -> str:
    return f"{float(value):g}" if value.numel() == 1 else f"values in [{float(value.min()):g}, {float(value.max()):g}]"
