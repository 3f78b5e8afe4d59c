"""What Ray Tune calls: several Bayesian optimisations as one of its searchers, and somebody who watches the trials."""

from __future__ import annotations

import json
import math
import pickle
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray.tune import Callback
from ray.tune.experiment import Trial
from ray.tune.search import Searcher

from onepass.experiments.search.problem import Moment

OBJECTIVE = "objective"  # what trials are compared by: the validation loss, or a large number for what is lost
COURSE = "course.jsonl"


class Repetitions(Searcher):
    """Searches side by side that know nothing of each other: one trial at a time of each.

    They model the logarithm of the validation loss; a trial that is lost counts as the worst so far.
    """

    def __init__(self, searchers: Sequence[Searcher], trials: int) -> None:
        super().__init__(metric=OBJECTIVE, mode="min")
        self._searchers, self._trials = list(searchers), trials
        self._asked = [0 for _ in searchers]
        self._worst = [-math.inf for _ in searchers]
        self._running: dict[str, int] = {}

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:  # type: ignore[override]
        waiting = [r for r, asked in enumerate(self._asked) if asked < self._trials]
        free = [r for r in waiting if r not in self._running.values()]
        if not free:
            return None if waiting else Searcher.FINISHED
        repetition = min(free, key=lambda r: self._asked[r])
        start = self._searchers[repetition].suggest(trial_id)
        self._running[trial_id] = repetition
        self._asked[repetition] += 1
        return {"start": start, "repetition": repetition, "number": self._asked[repetition] - 1}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        repetition = self._running.pop(trial_id)
        valid = (result or {}).get("valid", math.nan)
        known = self._worst[repetition] if math.isfinite(self._worst[repetition]) else 0.0
        loss = math.log(valid) if 0 < valid < math.inf and not error else known
        self._worst[repetition] = max(self._worst[repetition], loss)
        self._searchers[repetition].on_trial_complete(trial_id, {OBJECTIVE: loss})

    def save(self, checkpoint_path: str) -> None:
        Path(checkpoint_path).write_bytes(pickle.dumps(self.__dict__))

    def restore(self, checkpoint_path: str) -> None:
        self.__dict__.update(pickle.loads(Path(checkpoint_path).read_bytes()))


class Watch(Callback):
    """Writes down when which test loss was reached, and shows how far trials are.

    Args:
        trials: how many there will be.
        last: whether only losses after so many steps count.
    """

    def __init__(self, folder: Path, trials: int, *, last: int | None, progress: bool) -> None:
        self._path, self._trials, self._last, self._progress = folder / COURSE, trials, last, progress
        self._lowest: dict[int, float] = {}
        self._best = math.inf
        self._before, self._began, self._shown = 0.0, 0.0, 0.0

    def setup(self, *arguments: Any, **named: Any) -> None:
        """When a search begins or goes on."""
        for seconds, repetition, _, test in lines(self._path):
            self._before = seconds
            self._lowest[repetition] = test
        self._began = time.perf_counter()

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        self._best = min(self._best, result["valid"])  # not if that is NaN
        repetition = trial.config.get("repetition", 0)
        if result["test"] < self._lowest.get(repetition, math.inf) and self._last in (None, result["step"]):
            self._lowest[repetition] = result["test"]
            seconds = round(self._before + time.perf_counter() - self._began, 3)
            with open(self._path, "a") as file:
                file.write(json.dumps([seconds, repetition, result["step"], result["test"]]) + "\n")
        self._show(trials)

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self._show(trials)

    def on_experiment_end(self, trials: list[Trial], **info: Any) -> None:
        self._show(trials, end=True)

    def _show(self, trials: list[Trial], *, end: bool = False) -> None:
        live = sys.stderr.isatty()
        if not self._progress or not (end or time.monotonic() - self._shown > (0.2 if live else 10.0)):
            return
        self._shown = time.monotonic()
        done = sum(trial.status in (Trial.TERMINATED, Trial.ERROR) for trial in trials)
        running = sum(trial.status == Trial.RUNNING for trial in trials)
        best = f", best validation loss {self._best:.4g}" if math.isfinite(self._best) else ""
        line = f"{done}/{self._trials} trials finished, {running} running{best}"
        width = shutil.get_terminal_size().columns - 1  # what wraps cannot be written over
        text = f"\r{line[:width]:{width}}" + "\n" * end if live else line + "\n"
        sys.stderr.write(text)
        sys.stderr.flush()


def course(folder: Path, repetitions: int) -> list[Moment]:
    """What ``Watch`` has written down: the lowest test losses after every change."""
    lowest, found = [math.inf] * repetitions, []
    for seconds, repetition, step, test in lines(folder / COURSE):
        lowest[repetition] = min(lowest[repetition], test)
        found.append(Moment(seconds, step, list(lowest)))
    return found


def lines(path: Path) -> list[tuple[float, int, int, float]]:
    """All but a last one that was cut off when the search was killed."""
    text = path.read_text() if path.exists() else ""
    return [tuple(json.loads(line)) for line in text.splitlines(keepends=True) if line.endswith("\n")]
