"""A search as a method of the paper: its problem, its plan, and what it found as the outcome of one cell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise

import torch
from torch import Tensor

from onepass.experiments.datasets import Data
from onepass.experiments.methods import Method
from onepass.experiments.protocol import Protocol
from onepass.experiments.search import Found, Plan, Problem, Trial, Where, search
from onepass.experiments.training import Outcome, in_tf32


def searched(
    protocol: Protocol,
    method: Method,
    data: Data,
    where: Where,
    *,
    replicas: int,
    steps: int,
    seed: int = 0,
    engine: str = "local",
) -> Outcome:
    """Go on with a search, or begin it. ``replicas``: trials, or repetitions of Bayesian optimisation."""
    assert method.search is not None
    repeated = method.search.trials is not None
    plan = Plan(
        method.search.name,
        trials=method.search.trials or replicas,
        steps=steps,
        repetitions=replicas if repeated else 1,
        seed=seed,
    )
    with in_tf32() if protocol.tf32 else nullcontext():
        return outcome_of(search(problem_of(protocol, method, data), plan, where, engine))


def problem_of(protocol: Protocol, method: Method, data: Data) -> Problem:
    """Trials train on the training data alone: it is by the validation data that they are compared, tuned or not."""
    metric = protocol.measure or protocol.loss
    return Problem(
        lambda: protocol.make_model(data),
        protocol.loss,
        protocol.batches(data.train),
        protocol.batches(data.valid),
        protocol.start,
        judge=(metric, [data.valid]),
        test=(metric, [data.test]),
        options={**protocol.options, **method.options},
        times=data.target_scale**2,
        lost_above=protocol.lost_above,
    )


def outcome_of(found: Found) -> Outcome:
    """Of the trials that a search hands out. ``curve_test``: the lowest test loss of all that it has seen by then."""
    chosen = [found.trials[place] for place in found.chosen]
    seconds = [0.0, *(moment.seconds for moment in found.course)]
    return Outcome(
        test=_column([trial.test for trial in chosen]),
        valid=_column([trial.valid for trial in chosen]),
        others={},
        start=_named(chosen, "start"),
        end=_named(chosen, "end"),
        curve_steps=[moment.steps for moment in found.course],
        curve_seconds=[now - before for before, now in pairwise(seconds)],
        curve_test=torch.tensor([[_finite(loss) for loss in moment.test] for moment in found.course]),
        curve_values={},
        returns=torch.tensor([trial.returns for trial in chosen]),
        seconds=seconds[-1],
    )


def _named(chosen: Sequence[Trial], which: str) -> dict[str, Tensor]:
    every: list[dict[str, float]] = [getattr(trial, which) for trial in chosen]
    return {name: _column([values[name] for values in every]) for name in every[0]}


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _finite(loss: float) -> float:
    return loss if math.isfinite(loss) else math.nan
