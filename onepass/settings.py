"""A population's arguments, checked when it is made: one clear error each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from onepass.backends import BACKENDS
from onepass.guard import Guard
from onepass.interval import PRODUCTS
from onepass.method import ESTIMATORS


def check_method(
    *,
    estimator: str | None,
    curvature: str,
    clip_norm: float | None,
    guard: Any,
    unroll: int | None,
    restart: bool,
    per_element: Sequence[str],
) -> None:
    """How hypergradients are taken; what goes together."""
    if estimator is not None and estimator not in ESTIMATORS:
        raise ValueError(f"estimator must be one of {sorted(ESTIMATORS)}, but got {estimator!r}")
    if curvature not in PRODUCTS:
        raise ValueError(f"curvature must be one of {sorted(PRODUCTS)}, but got {curvature!r}")
    if clip_norm is not None:
        _check_positive("clip_norm", clip_norm)
    if guard is not None and not isinstance(guard, Guard):
        raise ValueError(f"guard must be an onepass.Guard or None, but got {guard!r}")
    if estimator == "whole-run" and (unroll is not None or restart or per_element):
        raise ValueError(
            "estimator 'whole-run' is for one value a replica, without unroll and restart; use 'series' with these"
        )
    if unroll is not None and guard is not None:
        raise ValueError("guard must be None with unroll: it would undo the steps that are differentiated")


def check_backend(backend: str, device: torch.device, *, recordable: bool) -> None:
    """``recordable``: whether every interval does the same."""
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"backend must be 'auto' or one of {sorted(BACKENDS)}, but got {backend!r}")
    if not recordable and backend not in ("auto", "eager"):
        raise ValueError(
            f"backend must be 'auto' or 'eager' with restarts or unroll beyond an interval, but got {backend!r}"
        )
    if backend == "graphs" and device.type != "cuda":
        raise ValueError(f"backend 'graphs' needs a CUDA device, but got '{device}'; use 'traced' or 'compiled'")


def checked_device(device: str | torch.device) -> torch.device:
    found = torch.device(device)
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be a CPU or a CUDA device, but got {device!r}")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device must be there, but got {device!r} and torch sees no CUDA device")
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def check_count(name: str, number: Any) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(f"{name} must be an integer of at least 1, but got {number!r}")


def _check_positive(name: str, number: Any) -> None:
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 < number < math.inf:
        raise ValueError(f"{name} must be a finite number above 0, but got {number!r}; None switches it off")
