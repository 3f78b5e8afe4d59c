"""How long the work itself takes: a clock that can be stopped for everything else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Seconds of work since the last lap. A GPU finishes what it was given before the clock is read.

    Args:
        device: where the work is done.
        whole: nothing of the first lap was done before: otherwise, it has no time.
    """

    def __init__(self, device: torch.device, *, whole: bool) -> None:
        self._device, self._passed = device, 0.0 if whole else float("nan")
        self._began = self._now()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self._passed += self._now() - self._began
        try:
            yield
        finally:
            self._began = self._now()

    def lap(self) -> float:
        """While it is stopped: the seconds of this lap; the next begins at 0."""
        passed, self._passed = self._passed, 0.0
        return passed

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
