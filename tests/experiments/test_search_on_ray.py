"""Searches by Ray Tune, on a Ray of this machine: that they search, and that what is killed goes on."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("ray", reason="Ray is not installed: pip install 'onepass[ray]'")

from onepass.cli import main
from onepass.experiments.connection import connect
from onepass.experiments.search import on_ray
from onepass.experiments.search.problem import Found, Plan, Problem, Space, Where, best
from onepass.experiments.search.ray_trial import SAVED, follow, load, population_of
from onepass.starts import LogUniform, Uniform

SPACE: Space = {"lr": LogUniform(1e-5, 1e-1), "momentum": Uniform(0.1, 0.9)}
Batch = tuple[Tensor, Tensor]


def squared(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def rows(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(32, 3, generator=generator)
    return x, x @ torch.tensor([[1.0], [2.0], [-1.0]]) + 0.1 * torch.randn(32, 1, generator=generator)


def linear(judge: Any = squared, **options: Any) -> Problem:
    """A regression that is trained in no time."""
    options = options or {"tune": ()}
    losses = (judge, [rows(1)]), (squared, [rows(2)])
    return Problem(lambda: nn.Linear(3, 1), squared, [rows(0)], [rows(1)], SPACE, *losses, options=options)


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[Any]:
    """Once for all tests here, with two workers."""
    with connect("local", workers=2) as started:
        yield started


def search(problem: Problem, folder: Path, name: str, trials: int, steps: int, **more: Any) -> Found:
    """A whole search, of which these hold whatever it is."""
    block = more.pop("block", 1)
    plan, where = Plan(name, trials, steps, **more), Where(folder, block=block)
    found = on_ray.SEARCHES[name](problem, plan, where)
    kept, valid = best(folder), [trial.valid for trial in found.trials]
    assert {trial.steps for trial in found.trials} == {steps}
    assert kept is not None and kept.valid == pytest.approx(min(v for v in valid if not math.isnan(v)))
    model = problem.make_model()
    model.load_state_dict(kept.model)
    assert float(squared(model, rows(1)).detach()) == pytest.approx(kept.valid, rel=1e-5), (
        "the model is the one that was judged"
    )
    assert kept.schedule["steps"][0] == 0 and "lr" in kept.schedule["values"][0]
    tests = [min(moment.test) for moment in found.course]
    assert tests == sorted(tests, reverse=True) and [m.seconds for m in found.course] == sorted(
        m.seconds for m in found.course
    )
    return found


def test_halving(tmp_path: Path) -> None:
    """In blocks of starts, each as good as the best of them."""
    found = search(ordered(), tmp_path, "asha", 40, 16, block=4)
    assert 1 <= len(found.trials) <= 6, "of ten blocks, the most are stopped on the way"
    for trial in found.trials:
        losses = trained(ordered(), trial.number // 4, 16, block=4)
        assert int(losses.argmin()) == trial.number % 4 and float(losses.min()) == pytest.approx(trial.valid, rel=1e-5)
    everyone = [float(trained(ordered(), number, 16, block=4).min()) for number in range(10)]
    assert min(trial.valid for trial in found.trials) == pytest.approx(min(everyone), rel=1e-5)
    again = search(ordered(), tmp_path, "asha", 40, 16, block=4)
    assert again.resumed and again.trials == found.trials
    with pytest.raises(ValueError, match="must be of the same search"):
        search(ordered(), tmp_path, "asha", 44, 16, block=4)


def ordered() -> Problem:
    """The larger the learning rate, the better after any number of steps: all begin at the same weights."""

    def zero() -> nn.Module:
        model = nn.Linear(3, 1)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        return model

    return replace(linear(), make_model=zero, space={"lr": LogUniform(1e-5, 1e-2), "momentum": 0.5})


def trained(problem: Problem, number: int, steps: int, block: int = 1) -> Tensor:
    """Where the same starts end without Ray."""
    population = population_of(problem, Plan("random", 1, 1), Where(Path(), block=block), {"number": number})
    problem.run(population, steps)
    return problem.valid_losses(population)


def test_population_based_training(tmp_path: Path) -> None:
    """With tuning: paths go on from others, and values stand where tuning times mutations have brought them."""
    found = search(linear(interval=1), tmp_path, "pbt", 3, 6)
    assert [trial.number for trial in found.trials] == [0, 1, 2]
    policies = (tmp_path / "tune" / "pbt_global.txt").read_text().splitlines()
    assert policies, "somebody went on from another"
    assert all(trial.end["lr"] != trial.start["lr"] for trial in found.trials)


def test_a_mutation_can_be_trained(tmp_path: Path) -> None:
    """However far Ray has gone."""
    ranges: dict[str, LogUniform | Uniform] = {"lr": LogUniform(1e-5, 1e-1), "momentum": Uniform(0.0, 1.0)}
    start = on_ray._inside(ranges, {"lr": 9.0, "momentum": 1.1})
    problem = replace(linear(interval=1), space=dict(ranges))
    trial = population_of(problem, Plan("pbt", 4, 100), Where(tmp_path), {"number": 0, "start": start})
    assert float(trial.values()["momentum"]) == pytest.approx(1.0, abs=1e-5)


def test_a_mutation_multiplies_what_tuning_has_reached(tmp_path: Path) -> None:
    problem, config = linear(interval=1), {"number": 0, "start": {"lr": 1e-3, "momentum": 0.5}}
    donor = population_of(problem, Plan("pbt", 4, 100), Where(tmp_path), config)
    problem.run(donor, 20)
    torch.save({"population": donor.state_dict(), "config": config}, tmp_path / SAVED)
    heir = population_of(problem, Plan("pbt", 4, 100), Where(tmp_path), config)
    saved = load(heir, tmp_path)
    follow(heir, saved["start"], {"lr": 1.2e-3, "momentum": 0.5})
    then, now = donor.values(), heir.values()
    assert float(then["lr"]) != pytest.approx(1e-3), "tuned meanwhile"
    assert float(now["lr"]) == pytest.approx(1.2 * float(then["lr"]))
    assert float(now["momentum"]) == float(then["momentum"])
    assert torch.equal(donor.model(0).weight, heir.model(0).weight)  # type: ignore[arg-type]


def test_bayesian_optimisation(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    problem = linear(judge=hardly_learned_is_lost)
    found = search(problem, tmp_path, "bayesian-optimisation", 6, 20, repetitions=2)
    assert [(trial.number, trial.repetition) for trial in found.trials] == [(n, r) for n in range(6) for r in range(2)]
    for repetition, place in enumerate(found.chosen):
        own = [t.valid for t in found.trials if t.repetition == repetition and not math.isnan(t.valid)]
        assert found.trials[place].repetition == repetition and found.trials[place].valid == min(own)
    assert len({trial.start["lr"] for trial in found.trials}) == 12
    assert all(len(moment.test) == 2 for moment in found.course)


def hardly_learned_is_lost(model: nn.Module, batch: Batch) -> Tensor:
    loss = squared(model, batch)
    return torch.where(loss < 4.0, loss, torch.nan)


# --- killed ---


def test_a_trial_that_always_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray, "FAILURES", 0)

    def judge(model: nn.Module, batch: Batch) -> Tensor:
        raise RuntimeError("no such loss")

    with pytest.raises(RuntimeError, match=r"(?s)1 trials failed, the first with.*RuntimeError: no such loss"):
        search(linear(judge=judge), tmp_path, "random", 1, 20)


INTERRUPTED = """
import os, sys
from pathlib import Path
os.environ["TUNE_GLOBAL_CHECKPOINT_S"] = "0"
from tests.experiments.test_search_on_ray import Plan, Where, linear, on_ray, slowly
on_ray.SEARCHES["random"](linear(judge=slowly), Plan("random", 3, 20), Where(Path(sys.argv[1])))
"""


def slowly(model: nn.Module, batch: Batch) -> Tensor:
    time.sleep(0.3)
    return squared(model, batch)


def interrupted(folder: Path, address: str) -> None:
    """A search in a process of its own, which is killed as soon as some trial has reported four times."""
    line = [sys.executable, "-c", INTERRUPTED, str(folder)]
    begun = subprocess.Popen(line, env={**os.environ, "RAY_ADDRESS": address}, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 300  # however busy the machine is
    while not list(folder.glob("tune/train*/checkpoint_000003")) and begun.poll() is None:
        assert time.monotonic() < until, "nothing was reported"
        time.sleep(0.05)
    time.sleep(0.5)
    begun.kill()
    begun.wait()


def test_whoever_is_killed_it_goes_on(ray: Any, tmp_path: Path) -> None:
    """The one who asked, on the way; then a worker."""
    out, marker, seen = tmp_path / "out", tmp_path / "killed", tmp_path / "seen"
    seen.mkdir()

    def judge(model: nn.Module, batch: Batch) -> Tensor:
        (seen / str(time.time_ns())).touch()
        if not marker.exists() and len(list(seen.iterdir())) > 2:
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return squared(model, batch)

    interrupted(out, ray.get_runtime_context().gcs_address)
    before = {path.name for path in out.glob("tune/train*")}
    found = search(linear(judge=judge), out, "random", 3, 20)
    assert found.resumed and marker.exists()
    assert [trial.number for trial in found.trials] == found.chosen == [0, 1, 2]
    for trial in found.trials:
        assert trial.valid == pytest.approx(float(trained(linear(), trial.number, 20)), rel=1e-5), (
            "as if nothing had happened"
        )
    assert before <= {path.name for path in out.glob("tune/train*")}
    assert len(list(seen.iterdir())) <= 29, "of 30 reports, four were there, and one or two were lost with the worker"


FILE = """
import os, signal
from pathlib import Path
import torch

begun_by, marker = os.getpid(), Path("MARKER")
inputs = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
train, valid = ([(inputs[i : i + 24], inputs[i : i + 24].sum(1, keepdim=True))] for i in (0, 24))

def make_model():
    return torch.nn.Linear(3, 1)

def loss(model, batch):
    return ((model(batch[0]) - batch[1]) ** 2).mean()

def metric(model, batch):
    if os.getpid() != begun_by and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return loss(model, batch)
"""


def test_through_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A user's file, which kills the first worker that judges by it."""
    file, marker = tmp_path / "mine.py", tmp_path / "killed"
    file.write_text(FILE.replace("MARKER", str(marker)))
    line = ["search", str(file), "--engine", "ray", "--out", str(tmp_path / "out"), "--quiet", "--json"]
    assert main([*line, "--budget", "3", "--steps", "16", "--block", "4"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert marker.exists() and found["engine"] == "ray" and found["starts"] == 16
    saved = torch.load(found["files"]["model"], weights_only=True)
    assert saved.keys() == {"weight", "bias"} and found["trials"][0]["valid"] < 3.0
