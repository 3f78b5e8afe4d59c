"""float16 training with a ``GradScaler``: its scale, and the steps it leaves out.

An optimizer steps inside of the scaler's own ``step``, on gradients that have been unscaled, or does not step at all if
they overflowed.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from onepass.distributed import local

# Of the scale in use: room for derivatives that are larger than the training gradient, such as Hessian products.
HEADROOM = 64.0
# From here on nobody clips to so little as an ordinary norm divided by the scale.
LARGE_SCALE = 1024.0


def scaler_at_work() -> GradScaler | None:
    """The scaler inside of whose ``step`` this is called. An optimizer does not know it, but the stack does."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is GradScaler.step.__code__:
            scaler: GradScaler = frame.f_locals["self"]
            return scaler
        frame = frame.f_back  # type: ignore[assignment]
    return None


def scale_of(scaler: GradScaler | None) -> float:
    return scaler.get_scale() if scaler is not None else 1.0


def evaluation_scale(scale: float) -> float:
    """For losses evaluated beside the training step.

    >>> evaluation_scale(65536.0), evaluation_scale(1.0)
    (1024.0, 1.0)
    """
    return max(scale / HEADROOM, 1.0)


def overflowed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a fused step, which finds that out by itself, has changed nothing."""
    found: Any = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def left_out(parameters: Iterable[Tensor], seen: GradScaler | None) -> bool:
    """Whether a scaler has left out a step that did not happen, so that it was not forgotten.

    Then gradients are not finite; or, where they are gone already, some scaler must be about.
    """
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    if any(bool(gradient.any()) for gradient in gradients):
        return not all(bool(gradient.isfinite().all()) for gradient in gradients)
    return seen is not None or any(
        issubclass(type(thing), GradScaler) and thing.is_enabled() for thing in gc.get_objects()
    )


def suspiciously_short(gradient: float, scale: float) -> bool:
    """Whether a gradient of this norm may have been clipped while it was still scaled: to 1, it then became 1 / scale.

    >>> suspiciously_short(1 / 65536, 65536.0), suspiciously_short(1.0, 65536.0)
    (True, False)
    """
    return scale >= LARGE_SCALE and gradient * scale < 10
