"""Searches by Ray Tune: every trial, or block of trials, is a worker of a cluster or of this machine.

What a search has to remember lies in Tune's own format in the folder ``tune``, on a disk that all machines of a cluster
share; Ray's tools can open it. Workers that are killed are replaced and go on from the last report of their trial.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from onepass.experiments.connection import connect
from onepass.experiments.errors import UsageError
from onepass.experiments.search import bayesian as optuna_search
from onepass.experiments.search.local import FACTOR, budgets
from onepass.experiments.search.problem import (
    Found,
    Plan,
    Problem,
    Trial,
    Where,
    configuration,
    inside,
    keep_if_best,
)
from onepass.experiments.search.ray_trial import load, population_of, train
from onepass.experiments.search.replicas import ranked, schedule_of
from onepass.starts import LogUniform, Uniform, seed_of

NAME = "tune"
MADE_BY = "search.json"
REPORTS = 10  # of a trial, unless its search says otherwise
FAILURES = 3  # of one trial, before it is given up

QUIET = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # files a trial that nobody here reads
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # else an interrupted search would look like one that has ended
    "RAY_AIR_NEW_OUTPUT": "0",
}


def random(problem: Problem, plan: Plan, where: Where) -> Found:
    """Independent trials, each trained to the end."""
    return _searched(problem, plan, where, _reports(plan), lambda tune: {"param_space": _numbers(tune, plan, where)})


def halving(problem: Problem, plan: Plan, where: Where) -> Found:
    """ASHA: after 1, 4, 16 ... steps, a trial goes on if it is among the best quarter of those that came so far."""

    def settings(tune: Any) -> dict[str, Any]:
        from ray.tune.schedulers import ASHAScheduler

        scheduler = ASHAScheduler(time_attr="step", max_t=plan.steps, grace_period=1, reduction_factor=FACTOR)
        return {"param_space": _numbers(tune, plan, where), "scheduler": scheduler}

    return _searched(problem, plan, where, budgets(plan.steps), settings)


def population_based(problem: Problem, plan: Plan, where: Where) -> Found:
    """Population-based training: now and then, the worst quarter goes on as mutated copies of the best.

    Where values are tuned meanwhile, a mutation multiplies what tuning has reached by the ratio of the new value to the
    old one as Ray sees it: that is the paper's rule.
    """
    pause = _pause(plan)

    def settings(tune: Any) -> dict[str, Any]:
        from ray.tune.schedulers import PopulationBasedTraining
        from ray.tune.search.basic_variant import BasicVariantGenerator

        ranges = problem.searched  # without the data, which would be saved with the scheduler
        space = {name: _domain(tune, draw) for name, draw in ranges.items()}
        scheduler = PopulationBasedTraining(
            time_attr="step",
            perturbation_interval=pause,
            hyperparam_mutations={"start": space},
            custom_explore_fn=lambda config: {**config, "start": _inside(ranges, config["start"])},
        )
        numbers = tune.grid_search(list(range(plan.trials)))
        return {
            "param_space": {"number": numbers, "start": space},
            "scheduler": scheduler,
            "search_alg": BasicVariantGenerator(random_state=seed_of(plan.seed, "starts") % 2**32),
            "keep": 4,  # others may be about to go on from them
        }

    return _searched(problem, plan, replace(where, block=1), _reports(plan, pause), settings)


def bayesian(problem: Problem, plan: Plan, where: Where) -> Found:
    """Optuna's Gaussian process through Ray's wrapper: repetitions side by side, one trial at a time of each."""
    optuna = optuna_search.optuna_or_told()

    def settings(tune: Any) -> dict[str, Any]:
        from ray.tune.search.optuna import OptunaSearch

        from onepass.experiments.search.ray_hooks import OBJECTIVE, Repetitions

        space = {name: _domain(tune, draw) for name, draw in problem.searched.items()}
        seeds = [seed_of(plan.seed, "sampler", r) % 2**32 for r in range(plan.repetitions)]
        samplers = [optuna.samplers.GPSampler(seed=seed, n_startup_trials=optuna_search.RANDOM) for seed in seeds]
        searchers = [OptunaSearch(dict(space), metric=OBJECTIVE, mode="min", sampler=sampler) for sampler in samplers]
        return {
            "search_alg": Repetitions(searchers, plan.trials),
            "num_samples": plan.trials * plan.repetitions,
            "max_concurrent_trials": plan.repetitions,
        }

    return _searched(problem, plan, replace(where, block=1), _reports(plan), settings)


def _pause(plan: Plan) -> int:
    """Steps between two mutations: the paper's 100."""
    return 100 if plan.steps >= 1000 else max(1, plan.steps // 10)


def _reports(plan: Plan, pause: int | None = None) -> list[int]:
    """After how many steps a trial reports."""
    pause = pause or max(1, plan.steps // REPORTS)
    return [*range(pause, plan.steps, pause), plan.steps]


def _numbers(tune: Any, plan: Plan, where: Where) -> dict[str, Any]:
    """Trials draw their starts themselves."""
    return {"number": tune.grid_search(list(range(-(-plan.trials // where.block))))}


def _domain(tune: Any, draw: LogUniform | Uniform) -> Any:
    return (tune.loguniform if isinstance(draw, LogUniform) else tune.uniform)(draw.low, draw.high)


def _inside(ranges: Mapping[str, LogUniform | Uniform], start: Mapping[str, float]) -> dict[str, float]:
    """Mutations stay in the ranges that are searched."""
    return {name: inside(start[name], draw) for name, draw in ranges.items()}


# --- the search, where it was asked for ---


def _searched(
    problem: Problem, plan: Plan, where: Where, reports: Sequence[int], settings: Callable[[Any], dict[str, Any]]
) -> Found:
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    where = replace(where, folder=where.folder.absolute())
    resumed = _claim(problem, plan, where)
    with connect(where.address):
        results, failed = _fitted(problem, plan, where, reports, settings, resumed)
    if failed:
        raise _told(failed)
    return _found(problem, plan, where, results, resumed)


def _told(failed: Sequence[Exception]) -> Exception:
    """What went wrong: in a trial, with its traceback there, or with Ray."""
    from ray.exceptions import RayTaskError

    if isinstance(failed[0], RayTaskError):
        return RuntimeError(f"{len(failed)} trials failed, the first with\n{failed[0]}")
    again = "what is finished stays, and the same command goes on from there"
    return UsageError(f"{len(failed)} trials were lost with their workers ({type(failed[0]).__name__}); {again}")


def _claim(problem: Problem, plan: Plan, where: Where) -> bool:
    """Whether the folder has a search to go on with, which must be this one."""
    asked, path = {**configuration(problem, plan), "block": where.block}, where.folder / MADE_BY
    if path.exists() and (made_by := json.loads(path.read_text())) != asked:
        raise ValueError(f"{where.folder} must be of the same search, but is of {made_by}, not {asked}")
    if any((where.folder / NAME).glob("experiment_state-*.json")):
        return True
    shutil.rmtree(where.folder / NAME, ignore_errors=True)  # killed before anything was written down
    where.folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asked) + "\n")
    return False


def _fitted(
    problem: Problem,
    plan: Plan,
    where: Where,
    reports: Sequence[int],
    settings: Callable[[Any], dict[str, Any]],
    resumed: bool,
) -> tuple[list[Any], list[Exception]]:
    from ray import tune

    resources: dict[str, float] = {"cpu": 1, "gpu": int(torch.device(where.device).type == "cuda")}
    bound = tune.with_parameters(train, problem=problem, plan=plan, where=where, reports=reports)
    trainable = tune.with_resources(bound, resources)
    if resumed:
        path = str(where.folder / NAME)
        tuner = tune.Tuner.restore(path, trainable, resume_unfinished=True, resume_errored=True)
    else:
        tuner = _new(tune, trainable, plan, where, settings(tune))
    found = tuner.fit()
    return [found[i] for i in range(len(found))], list(found.errors)


def _new(tune: Any, trainable: Any, plan: Plan, where: Where, settings: dict[str, Any]) -> Any:
    from onepass.experiments.search.ray_hooks import OBJECTIVE, Watch

    space, keep = settings.pop("param_space", {}), settings.pop("keep", 1)
    last = plan.steps if plan.search == "bayesian-optimisation" else None
    trials = settings.get("num_samples", -(-plan.trials // where.block))
    return tune.Tuner(
        trainable,
        param_space=space,
        tune_config=tune.TuneConfig(metric=OBJECTIVE, mode="min", reuse_actors=True, **settings),
        run_config=tune.RunConfig(
            name=NAME,
            storage_path=str(where.folder),
            stop={"step": plan.steps},
            failure_config=tune.FailureConfig(max_failures=FAILURES),
            checkpoint_config=tune.CheckpointConfig(num_to_keep=keep),
            callbacks=[Watch(where.folder, trials, last=last, progress=where.progress)],
            verbose=0,
        ),
    )


def _found(problem: Problem, plan: Plan, where: Where, results: Sequence[Any], resumed: bool) -> Found:
    from onepass.experiments.search.ray_hooks import course

    ended = [result for result in results if (result.metrics or {}).get("step") == plan.steps]
    both = [(_trial(plan, where, result), result) for result in ended]
    both.sort(key=lambda each: (each[0].number, each[0].repetition))  # one that went on has changed places
    trials = [trial for trial, _ in both]
    best = _best(trials, range(len(trials)))
    _keep(problem, plan, where, both[best][1], trials[best].valid)
    chosen, repetitions = list(range(len(trials))), 1
    if plan.search == "bayesian-optimisation":
        repetitions = plan.repetitions
        chosen = [_best(trials, [i for i in chosen if trials[i].repetition == r]) for r in range(repetitions)]
    return Found(trials, chosen, course(where.folder, repetitions), resumed)


def _best(trials: Sequence[Trial], of: Sequence[int]) -> int:
    return of[int(ranked(torch.tensor([trials[i].valid for i in of]))[0])]


def _trial(plan: Plan, where: Where, result: Any) -> Trial:
    """A path that goes on from another has the configuration of that one, but a name of its own."""
    seen, config = result.metrics, result.config
    own = int(seen["trial_id"].split("_")[-1]) if plan.search == "pbt" else config["number"]
    number = own * where.block + seen["replica"]
    known = {name: seen[name] for name in ("valid", "test", "start", "end", "returns")}
    return Trial(number=number, repetition=config.get("repetition", 0), steps=seen["step"], **known)


def _keep(problem: Problem, plan: Plan, where: Where, result: Any, valid: float) -> None:
    """The best model, from the last report of its trial."""
    here = replace(where, device="cpu", backend="eager")
    population = population_of(problem, plan, here, result.config)
    with result.checkpoint.as_directory() as folder:
        load(population, Path(folder))
    replica = result.metrics["replica"]
    keep_if_best(where.folder, valid, lambda: population.model(replica), lambda: schedule_of(population, replica))


SEARCHES: dict[str, Callable[[Problem, Plan, Where], Found]] = {
    "random": random,
    "asha": halving,
    "pbt": population_based,
    "bayesian-optimisation": bayesian,
}
