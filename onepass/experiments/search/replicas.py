"""Replicas of a population as trials of a search."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onepass.experiments.search.problem import Problem, Trial, Where, keep_if_best
from onepass.population import Population


def ranked(losses: Tensor) -> Tensor:
    """Lowest first; those that are lost come last."""
    return losses.nan_to_num(math.inf, posinf=math.inf).argsort(stable=True)


def trials_of(problem: Problem, population: Population, numbers: Sequence[int], repetition: int = 0) -> list[Trial]:
    """All replicas as they are now."""
    valid, test = problem.valid_losses(population).tolist(), problem.test_losses(population).tolist()
    starts, ends = (_columns(found) for found in (population.history.start, population.values()))
    returns = population.history.returns.tolist()
    return [
        Trial(
            number,
            repetition,
            population.steps,
            valid[i],
            test[i],
            {name: column[i] for name, column in starts.items()},
            {name: column[i] for name, column in ends.items()},
            returns[i],
        )
        for i, number in enumerate(numbers)
    ]


def keep_best_of(population: Population, trials: Sequence[Trial], where: Where) -> None:
    best = int(ranked(torch.tensor([trial.valid for trial in trials]))[0])
    keep_if_best(
        where.folder, trials[best].valid, lambda: population.model(best), lambda: schedule_of(population, best)
    )


def schedule_of(population: Population, replica: int) -> dict[str, Any]:
    """Empty where every weight has a value of its own: these cannot be replayed."""
    try:
        schedule = population.history.schedule(replica)
    except ValueError:
        return {}
    return {"steps": schedule.steps, "values": schedule.values}


def _columns(values: dict[str, Tensor]) -> dict[str, list[float]]:
    return {name: (v if v.dim() == 1 else v.median(1).values).tolist() for name, v in values.items()}
