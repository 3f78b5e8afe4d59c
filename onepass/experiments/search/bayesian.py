"""Bayesian optimisation: repetitions of it side by side, a training of each in every round.

Trials are suggested by Optuna's Gaussian process and stored in its own database, which its dashboard can open. The
library that the paper used has no such database and no logarithmic ranges, and asks for one trial after the other.

*Departs from the paper*: what is modelled is the logarithm of the validation loss, since losses spread over decades; a
trial that is lost counts as the worst so far.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from typing import Any

import torch

from onepass.experiments.errors import UsageError
from onepass.experiments.search.problem import Found, Moment, Plan, Problem, Trial, Where, configuration
from onepass.experiments.search.replicas import keep_best_of, trials_of
from onepass.progress import Progress
from onepass.starts import LogUniform, Uniform, seed_of

STUDIES = "studies.db"
RANDOM = 5  # trials of each repetition before the process is asked; so too in the paper
MADE_BY, TRIAL = "onepass", "trial"  # what studies and trials carry of ours


def bayesian(problem: Problem, plan: Plan, where: Where) -> Found:
    """Each round trains the next suggestion of every repetition; what is told already is not trained again."""
    studies = [_study(problem, plan, where, repetition) for repetition in range(plan.repetitions)]
    done = min(len(_told(study)) for study in studies)
    bar = Progress(done * plan.steps, plan.trials * plan.steps) if where.progress else None
    for number in range(done, plan.trials):
        began = time.perf_counter()
        for trial in _round(problem, plan, where, studies, number):
            _tell(studies[trial.repetition], trial, time.perf_counter() - began)
        if bar is not None and bar.due((number + 1) * plan.steps):
            bar.show((number + 1) * plan.steps, torch.tensor([study.best_value for study in studies]).exp())
    if bar is not None:
        bar.close()
    return _found(plan, studies, resumed=done > 0)


def _round(problem: Problem, plan: Plan, where: Where, studies: Sequence[Any], number: int) -> list[Trial]:
    """The trials of this number that still have to be told. All are trained, so that nothing depends on how many."""
    asked = [_asked(study, problem, plan, repetition, number) for repetition, study in enumerate(studies)]
    start = {name: [params[name] for params, _ in asked] for name in problem.searched}
    population = problem.population(len(asked), seed_of(plan.seed, "round", number), where, start)
    problem.run(population, plan.steps)
    trials = [
        trial._replace(number=number, repetition=repetition)
        for repetition, trial in enumerate(trials_of(problem, population, range(len(asked))))
    ]
    keep_best_of(population, trials, where)
    return [trial for trial, (_, waiting) in zip(trials, asked, strict=True) if waiting]


def _found(plan: Plan, studies: Sequence[Any], *, resumed: bool) -> Found:
    trials, seconds = [], [0.0] * plan.trials
    for study in studies:
        for place, told in enumerate(_told(study)):
            trials.append(Trial(**told.user_attrs[TRIAL]))
            seconds[place] = max(seconds[place], told.user_attrs["seconds"])
    trials = [t._replace(valid=_number(t.valid), test=_number(t.test)) for t in trials]
    chosen, course, lowest = [], [], [math.inf] * plan.repetitions
    for number in range(plan.trials):
        for trial in trials:
            if trial.number == number and trial.test < lowest[trial.repetition]:
                lowest[trial.repetition] = trial.test
        course.append(Moment(sum(seconds[: number + 1]), (number + 1) * plan.steps, list(lowest)))
    for repetition in range(plan.repetitions):
        own = [place for place, trial in enumerate(trials) if trial.repetition == repetition]
        chosen.append(min(own, key=lambda place: _or_worst(trials[place].valid)))
    return Found(trials, chosen, course, resumed)


# --- Optuna ---


def optuna_or_told() -> Any:
    try:
        import optuna
    except ModuleNotFoundError as missing:
        raise UsageError("Bayesian optimisation needs Optuna: pip install 'onepass[search]'") from missing
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _study(problem: Problem, plan: Plan, where: Where, repetition: int) -> Any:
    optuna = optuna_or_told()
    where.folder.mkdir(parents=True, exist_ok=True)
    storage = f"sqlite:///{where.folder.absolute() / STUDIES}"
    study = optuna.create_study(storage=storage, study_name=f"repetition {repetition}", load_if_exists=True)
    asked, made_by = json.dumps(configuration(problem, plan)), study.user_attrs.get(MADE_BY)
    if made_by is None:
        study.set_user_attr(MADE_BY, asked)
    elif made_by != asked:
        raise ValueError(f"{where.folder / STUDIES} must be of the same search, but is of {made_by}, not {asked}")
    return study


def _asked(study: Any, problem: Problem, plan: Plan, repetition: int, number: int) -> tuple[dict[str, float], bool]:
    """What trial ``number`` starts from, and whether it waits for its loss.

    A sampler of its own for each trial: suggestions do not depend on whether the search was interrupted.
    """
    known = study.get_trials(deepcopy=False)
    if number < len(known):  # told, or asked for when the search was interrupted
        return known[number].params, not known[number].state.is_finished()
    seed = seed_of(plan.seed, "sampler", repetition, number) % 2**32
    study.sampler = optuna_or_told().samplers.GPSampler(seed=seed, n_startup_trials=RANDOM)
    return study.ask({name: _distribution(draw) for name, draw in problem.searched.items()}).params, True


def _distribution(draw: LogUniform | Uniform) -> Any:
    return optuna_or_told().distributions.FloatDistribution(draw.low, draw.high, log=isinstance(draw, LogUniform))


def _tell(study: Any, trial: Trial, seconds: float) -> None:
    optuna = optuna_or_told()
    loss = _objective(trial.valid)
    if not math.isfinite(loss):
        loss = max((told.value for told in _told(study)), default=0.0)
    frozen = study.get_trials(deepcopy=False)[trial.number]
    running = optuna.trial.Trial(study, frozen._trial_id)
    running.set_user_attr(TRIAL, {**trial._asdict(), "valid": _plain(trial.valid), "test": _plain(trial.test)})
    running.set_user_attr("seconds", seconds)
    study.tell(trial.number, loss)


def _told(study: Any) -> list[Any]:
    return [trial for trial in study.get_trials(deepcopy=False) if trial.state.is_finished()]


def _objective(loss: float) -> float:
    return math.log(loss) if 0 < loss < math.inf else math.nan if loss != 0 else -math.inf


def _plain(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _or_worst(value: float) -> float:
    return value if math.isfinite(value) else math.inf
