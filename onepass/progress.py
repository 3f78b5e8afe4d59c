"""A progress bar for long runs, in one line of a terminal, or a line now and then in a log."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

import torch
from torch import Tensor

WIDTH = 12


class Progress:
    """Shows where a run is, how well its replicas do, and how long it will still take."""

    def __init__(self, begin: int, end: int, stream: TextIO | None = None) -> None:
        self._begin, self._end = begin, end
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._started = self._shown = time.monotonic()
        self._length = 0

    def due(self, step: int) -> bool:
        """Looking at losses costs a little: not more often than an eye follows."""
        pause = 0.2 if self._live else 10.0
        return step == self._end or time.monotonic() - self._shown > pause

    def show(self, step: int, losses: Tensor | None) -> None:
        self._shown = time.monotonic()
        news = "" if losses is None else f", {summary(losses)}"
        line = f"{step}/{self._end} steps {self._bar(step)} {self._left(step)}{news}"
        if self._live:
            line = line[: shutil.get_terminal_size().columns - 1]  # what wraps cannot be written over
            self._stream.write("\r" + line.ljust(self._length))
            self._length = len(line)
        else:
            self._stream.write(line + "\n")
        self._stream.flush()

    def close(self) -> None:
        if self._live and self._length:
            self._stream.write("\n")
            self._stream.flush()

    def _bar(self, step: int) -> str:
        done = round(WIDTH * (step - self._begin) / max(1, self._end - self._begin))
        return "█" * done + "░" * (WIDTH - done)

    def _left(self, step: int) -> str:
        passed = time.monotonic() - self._started
        if step >= self._end:
            return f"{_time(passed)} in all"
        done = step - self._begin
        return f"{_time(passed * (self._end - step) / done)} left" if done else "starting"


def summary(losses: Tensor) -> str:
    """``validation loss 0.12 | 0.15 | 0.4 (10 | 50 | 90 %), 3 diverged``"""
    losses = losses.detach().double().cpu()
    finite = losses[losses.isfinite()]
    lost = len(losses) - len(finite)
    diverged = f", {lost} diverged" if lost else ""
    if not len(finite):
        return f"no finite loss{diverged}"
    levels = torch.quantile(finite, torch.tensor([0.1, 0.5, 0.9], dtype=finite.dtype)).tolist()
    return f"validation loss {' | '.join(f'{level:.3g}' for level in levels)} (10 | 50 | 90 %){diverged}"


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
