"""Searches with trials side by side: who goes on, with which values, and from where."""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onepass
from onepass.experiments.errors import UsageError
from onepass.experiments.search import Found, Plan, Problem, Where, bayesian, best, local, memory, search
from onepass.experiments.search.local import budgets, exploited, mutate, mutated
from onepass.experiments.search.replicas import ranked
from tests.populations import TRAIN, VALID, network
from tests.problems import mse, regression

TEST = regression(seed=5)
SPACE = {"lr": onepass.LogUniform(1e-3, 1.0), "momentum": onepass.Uniform(0.0, 0.9)}
FIXED: dict[str, Any] = {"tune": ()}
PLANS = {
    "random": Plan("random", 4, 30),
    "asha": Plan("asha", 16, 40),
    "pbt": Plan("pbt", 8, 80),
    "bayesian-optimisation": Plan("bayesian-optimisation", 7, 20, repetitions=2),
}

pytestmark = pytest.mark.usefixtures("float64")


def problem(**settings: Any) -> Problem:
    every: dict[str, Any] = {"judge": (mse, [VALID]), "test": (mse, [TEST]), "space": SPACE, **settings}
    return Problem(network, mse, [TRAIN], [VALID], **every)


def told(found: Found) -> str:
    """All but the time that it took."""
    return repr((found.trials, found.chosen, [(moment.steps, moment.test) for moment in found.course]))


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("options", [FIXED, {}], ids=["fixed", "tuned"])
def test_every_search_finds_something(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    found, plan = search(problem(options=options), PLANS[kind], Where(tmp_path)), PLANS[kind]
    chosen = [found.trials[place] for place in found.chosen]
    assert all(trial.steps == plan.steps and math.isfinite(trial.test) for trial in chosen)
    assert all(0 < trial.start["lr"] <= 1 for trial in chosen)
    if kind != "pbt":
        assert all((trial.start == trial.end) is (options == FIXED) for trial in chosen)
    assert len(chosen) == {"random": 4, "asha": 1, "pbt": 8, "bayesian-optimisation": 2}[kind]
    times, lowest = [m.seconds for m in found.course], [min(m.test) for m in found.course]
    assert times == sorted(times) and lowest == sorted(lowest, reverse=True) and min(lowest) <= chosen[0].test


@pytest.mark.parametrize("kind", PLANS)
def test_the_best_model_is_kept(kind: str, tmp_path: Path) -> None:
    task = problem()
    found = search(task, PLANS[kind], Where(tmp_path))
    lowest = min(trial.valid for trial in found.trials)
    kept = best(tmp_path)
    assert kept is not None and kept.valid == lowest
    model = network()
    model.load_state_dict(kept.model)
    assert float(mse(model, VALID)) == pytest.approx(lowest, rel=1e-12)
    assert kept.schedule["steps"][0] == 0 and {*kept.schedule["values"][0]} == {*SPACE}


# --- interrupted and started again ---


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("looks", [1, 4])
def test_what_was_interrupted_goes_on_and_ends_the_same(
    kind: str, looks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "PAUSE", 0.0)
    calls = itertools.count(1)

    def fails(model: Any, batch: Any) -> Tensor:
        if next(calls) > looks:
            raise Interrupted
        return mse(model, batch)

    with pytest.raises(Interrupted):
        search(problem(test=(fails, [TEST])), PLANS[kind], Where(tmp_path / "parts"))
    again = search(problem(), PLANS[kind], Where(tmp_path / "parts"))
    whole = search(problem(), PLANS[kind], Where(tmp_path / "whole"))
    assert told(again) == told(whole)
    assert again.resumed and not whole.resumed
    assert [m.seconds for m in again.course] == sorted(m.seconds for m in again.course)


def test_a_round_of_which_some_were_told_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bayesian optimisation: the others are not asked again, but get the loss of what they had been asked."""
    plan, calls, tell = PLANS["bayesian-optimisation"], itertools.count(1), bayesian._tell

    def fails(*arguments: Any) -> None:
        if next(calls) == 6:  # the second repetition of the third round
            raise Interrupted
        tell(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(bayesian, "_tell", fails)
        with pytest.raises(Interrupted):
            search(problem(), plan, Where(tmp_path / "parts"))
    again = search(problem(), plan, Where(tmp_path / "parts"))
    assert told(again) == told(search(problem(), plan, Where(tmp_path / "whole")))


def test_a_finished_search_is_not_done_again(tmp_path: Path) -> None:
    for kind, plan in PLANS.items():
        first = search(problem(), plan, Where(tmp_path / kind))

        def never(model: Any, batch: Any) -> Tensor:
            raise AssertionError("trained again")

        database = kind == "bayesian-optimisation"  # knows all losses; the others look at their models again
        task = problem(judge=(never, [VALID]), test=(never, [TEST])) if database else problem()
        assert told(search(task, plan, Where(tmp_path / kind))) == told(first)


@pytest.mark.parametrize("kind", PLANS)
def test_what_was_asked_differently_is_refused(kind: str, tmp_path: Path) -> None:
    search(problem(), PLANS[kind], Where(tmp_path))
    with pytest.raises(ValueError, match=r"configuration|same search"):
        search(problem(), replace(PLANS[kind], seed=1), Where(tmp_path))
    with pytest.raises(ValueError, match=r"configuration|same search"):
        search(problem(space={"lr": onepass.LogUniform(1e-4, 1.0)}), PLANS[kind], Where(tmp_path))


# --- successive halving ---


def test_halving_keeps_the_best_quarter(tmp_path: Path) -> None:
    """As if all had been trained to the end, and looked at on the way."""
    task, plan = problem(options=FIXED), Plan("asha", 64, 40)
    everybody = task.population(64, plan.seed, Where(tmp_path))
    left = torch.arange(64)
    for stop in budgets(40)[:-1]:
        task.run(everybody, stop)
        losses = task.valid_losses(everybody)[left]
        left = left[ranked(losses)[: max(1, len(left) // 4)]]
    task.run(everybody, 40)
    found = search(task, plan, Where(tmp_path))
    assert [trial.number for trial in found.trials] == left.tolist() and len(left) == 1
    assert found.trials[0].test == pytest.approx(float(task.test_losses(everybody)[left[0]]), rel=1e-9)


def test_lost_trials_do_not_go_on(tmp_path: Path) -> None:
    task = problem(options=FIXED, space={"lr": onepass.LogUniform(1e-2, 1e6)})
    found = search(task, Plan("asha", 64, 64), Where(tmp_path))
    assert all(math.isfinite(trial.valid) for trial in found.trials)


@pytest.mark.parametrize(
    ("steps", "expected"), [(1, [1]), (2, [1, 2]), (4, [1, 4]), (5, [1, 4, 5]), (64, [1, 4, 16, 64])]
)
def test_budgets(steps: int, expected: list[int]) -> None:
    assert budgets(steps) == expected


# --- population-based training ---


def test_the_worst_quarter_goes_on_from_the_best() -> None:
    losses = torch.tensor([3.0, math.nan, 1.0, 8.0, 2.0, 5.0, math.inf, 4.0])
    for seed in range(20):
        sources = exploited(losses, seed)
        assert sources[[0, 2, 3, 4, 5, 7]].tolist() == [0, 2, 3, 4, 5, 7]
        assert {*sources[[1, 6]].tolist()} <= {2, 4}
    assert exploited(torch.tensor([1.0]), 0).tolist() == [0]


def test_mutations_stay_inside_the_range() -> None:
    generator, draw = torch.Generator().manual_seed(0), onepass.LogUniform(1e-3, 1.0)
    values = [mutated(0.5, draw, generator) for _ in range(400)]
    assert 0.4 in values and 0.6 in values and all(1e-3 <= value <= 1 for value in values)
    assert 0.15 < sum(value not in (0.4, 0.6) for value in values) / 400 < 0.35
    ends = {mutated(1.0, onepass.Uniform(0.9, 1.0), generator) for _ in range(50)}
    assert {round(value, 6) for value in ends} >= {0.9, 1.0}
    assert all(0.9 < value < 1.0 for value in ends), "a momentum of 1 could not be tuned"


def test_a_mutation_multiplies_what_tuning_has_reached(tmp_path: Path) -> None:
    """By the ratio of the new value to the old one as the search sees it: the paper's rule."""
    task = problem()
    found = task.population(3, 0, Where(tmp_path))
    task.run(found, 30)
    seen = {name: value.clone() for name, value in found.history.start.items()}
    reached, began = found.values(), {name: value.clone() for name, value in seen.items()}
    sources = torch.tensor([0, 0, 2])
    found.copy(sources)
    mutate(task, found, sources, seen, seed=3)
    for name in SPACE:
        ratio = seen[name] / began[name][sources]
        assert ratio[[0, 2]].tolist() == [1, 1] and ratio[1] != 1
        now = found.values()[name]
        assert now[[0, 2]].tolist() == reached[name][[0, 2]].tolist()
        low, high = (1e-10, 1.0) if name == "lr" else (0.0, 0.95)
        assert float(now[1]) == pytest.approx(min(max(float(reached[name][0] * ratio[1]), low), high), rel=1e-9)


def test_paths_of_population_based_training_take_over_from_each_other(tmp_path: Path) -> None:
    found = search(problem(options=FIXED), Plan("pbt", 12, 80), Where(tmp_path))
    origins = {trial.start["lr"] for trial in found.trials}
    assert len(origins) < 12
    assert max(trial.test for trial in found.trials) < 10 * min(trial.test for trial in found.trials)
    assert any(trial.end != trial.start for trial in found.trials)


# --- Bayesian optimisation ---


def valley() -> nn.Module:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


def test_bayesian_optimisation_finds_the_valley(tmp_path: Path) -> None:
    """One step of gradient descent on w²/2 ends at (1 - lr) w: best at 1. Guided trials beat the five random ones."""
    batch = torch.ones(1, 1), torch.zeros(1, 1)

    def half(model: Any, batch: Any) -> Tensor:
        return mse(model, batch) / 2

    space = {"lr": onepass.LogUniform(1e-4, 1e2)}
    task = Problem(valley, half, [batch], [batch], space, judge=(half, [batch]), options=FIXED)
    found = search(task, Plan("bayesian-optimisation", 15, 1, repetitions=3), Where(tmp_path))
    for repetition in range(3):
        own = [trial for trial in found.trials if trial.repetition == repetition]
        assert [trial.number for trial in own] == list(range(15))
        assert min(t.valid for t in own) < 0.1  # lr from 0.55 to 1.45: a fifteenth of the range
        assert found.trials[found.chosen[repetition]].valid == min(t.valid for t in own)
        assert math.isnan(own[0].test)


def test_lost_trials_are_told_the_worst(tmp_path: Path) -> None:
    import optuna

    task = problem(options=FIXED, space={"lr": onepass.LogUniform(1e-2, 1e8)})
    found = search(task, Plan("bayesian-optimisation", 8, 20), Where(tmp_path))
    lost = {trial.number for trial in found.trials if math.isnan(trial.valid)}
    assert lost
    study = optuna.load_study(study_name="repetition 0", storage=f"sqlite:///{tmp_path / bayesian.STUDIES}")
    values = [trial.value for trial in study.trials if trial.value is not None]
    assert len(values) == 8 and all(map(math.isfinite, values))
    for number in lost - {0}:
        assert values[number] == max(values[:number])


def test_without_optuna(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UsageError, match=r"needs Optuna: pip install 'onepass\[search\]'"):
        search(problem(), PLANS["bayesian-optimisation"], Where(tmp_path))


BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"search": "luck"}, "search must be one of random, asha, pbt, bayesian-optimisation, but got 'luck'"),
    ({}, {"trials": 0}, "trials must be at least 1, but got 0"),
    ({}, {"steps": 0}, "steps must be at least 1, but got 0"),
    ({}, {"repetitions": 0}, "repetitions must be at least 1, but got 0"),
    ({"space": {"lr": 0.1}}, {}, "the space must have at least one range to search, but has only constants"),
]


@pytest.mark.parametrize(("task", "plan", "message"), BAD)
def test_bad_input(task: dict[str, Any], plan: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        search(problem(**task), Plan(**{"search": "asha", "trials": 4, "steps": 10, **plan}), Where(tmp_path))
    assert not any(tmp_path.iterdir())


def test_unknown_engine(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"engine must be one of local.*, but got 'spark'"):
        search(problem(), PLANS["random"], Where(tmp_path), engine="spark")


def test_tables_of_searches() -> None:
    assert {*local.SEARCHES} == {*PLANS}
