"""What a search is about: a problem, a plan, a place to go on from; and what it finds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onepass import checkpoint
from onepass.evaluation import LossFunction
from onepass.population import Population
from onepass.starts import LogUniform, Uniform

Space = Mapping[str, LogUniform | Uniform | float]

OPEN = 1e-6  # an even range ends this share of itself before its bounds: a momentum of 1 cannot be tuned


def inside(value: float, draw: LogUniform | Uniform) -> float:
    """The nearest value that could have been drawn.

    >>> inside(1.2, Uniform(0.0, 1.0)), inside(1.2, LogUniform(1e-6, 1e-1))
    (0.999999, 0.1)
    """
    margin = OPEN * (draw.high - draw.low) if isinstance(draw, Uniform) else 0.0
    return min(max(value, draw.low + margin), draw.high - margin)


@dataclass(frozen=True)
class Problem:
    """What trials train, from where, and what they are compared by.

    Attributes:
        train, valid: batches to train on and to tune by, as for ``Population.run``.
        space: where trials start: ranges that are searched, and constants.
        judge: the validation loss that trials are compared by: a metric, and batches to average it over.
        test: likewise, what is only looked at, or ``None``.
        options: further arguments of ``Population``: ``tune=()`` for trials with fixed values, nothing for tuned ones.
        times: losses are shown times this number.
        lost_above: a larger test loss counts as diverged.
    """

    make_model: Callable[[], nn.Module]
    loss: LossFunction
    train: Any
    valid: Any
    space: Space
    judge: tuple[LossFunction, Sequence[Any]]
    test: tuple[LossFunction, Sequence[Any]] | None = None
    rule: Any = "sgd"
    options: Mapping[str, Any] = field(default_factory=dict)
    times: float = 1.0
    lost_above: float = math.inf

    @property
    def searched(self) -> dict[str, LogUniform | Uniform]:
        """The ranges alone."""
        return {name: draw for name, draw in self.space.items() if isinstance(draw, (LogUniform, Uniform))}

    def population(
        self, replicas: int, seed: int, where: Where, start: Mapping[str, Sequence[float]] | None = None
    ) -> Population:
        """Trials side by side, from random starts or from given ones."""
        return Population(
            self.make_model,
            self.loss,
            self.rule,
            replicas=replicas,
            start={**self.space, **(start or {})},
            seed=seed,
            device=where.device,
            backend=where.backend,
            **self.options,
        )

    def run(self, population: Population, steps: int, **options: Any) -> None:
        """Until so many steps are taken in all."""
        if population.steps < steps:
            population.run(self.train, self.valid, steps=steps - population.steps, **options)

    def valid_losses(self, population: Population) -> Tensor:
        """One a trial; NaN where it is lost."""
        return self._losses(population, self.judge)

    def test_losses(self, population: Population) -> Tensor:
        """One a trial; NaN where it is lost, or where there is no test."""
        if self.test is None:
            return torch.full((population.replicas,), math.nan, dtype=torch.float64)
        found = self._losses(population, self.test)
        return found.masked_fill(found > self.lost_above, math.nan)

    def _losses(self, population: Population, of: tuple[LossFunction, Sequence[Any]]) -> Tensor:
        metric, batches = of
        return torch.stack([population.evaluate(metric, batch).double() for batch in batches]).mean(0) * self.times


@dataclass(frozen=True)
class Plan:
    """How it is searched.

    Attributes:
        search: a name from ``SEARCHES``.
        trials: starts, or paths of population-based training, or trainings of each Bayesian optimisation.
        steps: weight steps of a whole training.
        repetitions: of Bayesian optimisation, side by side.
        seed: of starts, weights and every choice.
    """

    search: str
    trials: int
    steps: int
    repetitions: int = 1
    seed: int = 0


def configuration(problem: Problem, plan: Plan) -> dict[str, Any]:
    """What has to be the same to go on, in words that an error message can show."""
    return {
        "search": plan.search,
        "space": ", ".join(f"{name} {value}" for name, value in sorted(problem.space.items())),
        "trials": plan.trials,
        "repetitions": plan.repetitions,
        "steps": plan.steps,
        "seed": plan.seed,
    }


@dataclass(frozen=True)
class Where:
    """Where it is computed, and where it is kept so that it can go on.

    Attributes:
        folder: all that a search has to remember lies here, and its best model.
        progress: show what is going on, on stderr.
        address: of a Ray cluster; ``None`` for one of its own on this machine.
        block: starts that one trial of a Ray search trains together.
    """

    folder: Path
    device: str = "cpu"
    backend: str = "auto"
    progress: bool = False
    address: str | None = None
    block: int = 1


class Trial(NamedTuple):
    """One training. ``valid`` and ``test`` are NaN where it was lost.

    Attributes:
        steps: how far it came.
        start, end: values that it began and ended with.
        returns: how often the guard went back.
    """

    number: int
    repetition: int
    steps: int
    valid: float
    test: float
    start: dict[str, float]
    end: dict[str, float]
    returns: int = 0


class Moment(NamedTuple):
    """How well a search did at some time.

    Attributes:
        seconds: since it began, without the time that it did not run.
        steps: the weight steps of one path, up to here.
        test: the lowest test losses seen so far: one a repetition, a path, or one in all.
    """

    seconds: float
    steps: int
    test: list[float]


class Found(NamedTuple):
    """Trials that were trained to the end, and how the search went.

    ``chosen``: places in ``trials`` of those that the search hands out: the best of each repetition of Bayesian
    optimisation, all that are left of the others.
    """

    trials: list[Trial]
    chosen: list[int]
    course: list[Moment]
    resumed: bool = False


class Best(NamedTuple):
    """The best model of a search so far, as it lies on disk."""

    valid: float
    model: dict[str, Tensor]
    schedule: dict[str, Any]


BEST = "best.pt"


def keep_if_best(folder: Path, valid: float, model: Callable[[], nn.Module], schedule: Callable[[], Any]) -> None:
    """Whole or not there, like all files of a search."""
    known = best(folder)
    if math.isfinite(valid) and (known is None or valid < known.valid):
        state = {name: tensor.detach().cpu() for name, tensor in model().state_dict().items()}
        checkpoint.save(folder / BEST, {"made_by": {}, "valid": valid, "model": state, "schedule": schedule()})


def best(folder: Path) -> Best | None:
    if not (folder / BEST).exists():
        return None
    saved = checkpoint.load(folder / BEST, {})
    return Best(saved["valid"], saved["model"], saved["schedule"])
