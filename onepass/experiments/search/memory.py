"""What a search remembers, so that it goes on where it was interrupted and ends as if it had not been."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from onepass import checkpoint
from onepass.experiments.search.problem import Moment, Plan, Problem, Where, configuration
from onepass.population import Population

FILE = "search.pt"
PAUSE = 20.0  # seconds between two savings


@dataclass
class Memory:
    """Of one search.

    Attributes:
        numbers: of the trials that are left.
        population: its state, or ``None`` before the first step.
        seen: name -> one value a trial, as the search knows them.
        course: how well it did over time.
        work: weight steps of all trials together.
        made_by: ``configuration``.
    """

    path: Path
    made_by: dict[str, Any]
    numbers: list[int]
    population: dict[str, Any] | None = None
    seen: dict[str, Tensor] = field(default_factory=dict)
    course: list[Moment] = field(default_factory=list)
    work: int = 0
    resumed: bool = False
    _since: float = field(default_factory=time.perf_counter)
    _before: float = 0.0
    _saved: float = 0.0

    @classmethod
    def of(cls, problem: Problem, plan: Plan, where: Where) -> Memory:
        """From disk, if this search was interrupted."""
        memory = cls(where.folder / FILE, configuration(problem, plan), list(range(plan.trials)))
        if memory.path.exists():
            saved = checkpoint.load(memory.path, memory.made_by)
            memory.numbers, memory.population, memory.seen = saved["numbers"], saved["population"], saved["seen"]
            memory.course, memory.work = [Moment(*moment) for moment in saved["course"]], saved["work"]
            memory._before = memory._saved = saved["seconds"]
            memory.resumed = True
        return memory

    @property
    def seconds(self) -> float:
        """That the search has run, here and before it was interrupted."""
        return self._before + time.perf_counter() - self._since

    def looked_at(self, steps: int, test: Tensor) -> None:
        """The lowest test loss of all so far: what could be had by now."""
        found = test.nan_to_num(float("inf"), posinf=float("inf"))
        lowest = min([float(found.min()), *(min(moment.test) for moment in self.course[-1:])])
        self.course.append(Moment(self.seconds, steps, [lowest]))

    def save(self, population: Population, *, last: bool) -> None:
        """Not too often: a hundred thousand trials are gigabytes."""
        if self.seconds - self._saved < PAUSE and not last:
            return
        self._saved = self.seconds
        checkpoint.save(
            self.path,
            {
                "made_by": self.made_by,
                "numbers": self.numbers,
                "population": population.state_dict(),
                "seen": self.seen,
                "course": [tuple(moment) for moment in self.course],
                "work": self.work,
                "seconds": self.seconds,
            },
        )
