"""One trial of Ray Tune, or block of trials, on its worker."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onepass.experiments.search.problem import Plan, Problem, Where
from onepass.experiments.search.replicas import ranked
from onepass.population import Population
from onepass.starts import seed_of

SAVED = "population.pt"
LOST = 1e30  # stands for the loss of a trial that is lost, which schedulers could not compare otherwise


def train(config: dict[str, Any], problem: Problem, plan: Plan, where: Where, reports: Sequence[int]) -> None:
    """From its beginning, or from a checkpoint: its own, or in population-based training one of another trial."""
    from ray import tune

    torch.set_num_threads(1)  # the CPU that it has asked for
    os.environ.setdefault("RAY_AIR_FULL_TRACEBACKS", "1")  # to shorten them, Ray may loop for ever
    population = population_of(problem, plan, where, config)
    if (checkpoint := tune.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            before = load(population, Path(folder))
        follow(population, before.get("start", {}), config.get("start", {}))
    for stop in reports:
        if stop > population.steps:
            problem.run(population, stop)
            with tempfile.TemporaryDirectory() as folder:
                torch.save({"population": population.state_dict(), "config": config}, Path(folder) / SAVED)
                tune.report(result(problem, population), checkpoint=tune.Checkpoint.from_directory(folder))


def population_of(problem: Problem, plan: Plan, where: Where, config: Mapping[str, Any]) -> Population:
    start = {name: [value] for name, value in config.get("start", {}).items()}
    seed = seed_of(plan.seed, "trial", config.get("repetition", 0), config["number"])
    return problem.population(where.block, seed, where, start)


def load(population: Population, folder: Path) -> dict[str, Any]:
    """Yields the configuration that it was saved with."""
    saved = torch.load(folder / SAVED, map_location="cpu", weights_only=True)
    population.load_state_dict(saved["population"])
    config: dict[str, Any] = saved["config"]
    return config


def follow(population: Population, old: Mapping[str, float], new: Mapping[str, float]) -> None:
    """A mutation: by the ratio that Ray has changed a value, whatever tuning has made of it."""
    now = population.values()
    changed = {name for name in new if name in old and new[name] != old[name]}
    population.set_values({n: now[n] * (new[n] / old[n]) if old[n] else now[n] * 0 + new[n] for n in changed})


def result(problem: Problem, population: Population) -> dict[str, Any]:
    """What Ray sees of a trial: of a block, its best."""
    valid, test = problem.valid_losses(population), problem.test_losses(population)
    best = int(ranked(valid)[0])
    loss = float(valid[best])
    return {
        "step": population.steps,
        "objective": min(loss, LOST) if math.isfinite(loss) else LOST,
        "valid": loss,
        "test": float(test[best]),
        "replica": best,
        "start": _plain(population.history.start, best),
        "end": _plain(population.values(), best),
        "returns": int(population.history.returns[best]),
    }


def _plain(values: Mapping[str, Tensor], replica: int) -> dict[str, float]:
    """The median where every weight has a value of its own."""
    return {name: float(value[replica].median()) for name, value in values.items()}
