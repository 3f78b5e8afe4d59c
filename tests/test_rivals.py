"""The benchmarks behind docs/results/default.md: one-pass against its rivals, and the newcomer's check. Tiny cases."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import beginner_tasks
import newcomer
import numpy as np
import pytest
import rivals
import torch
from contenders import RIVALS
from trainings import computed, timed

from onepass.experiments.datasets import load
from onepass.experiments.methods import METHODS
from onepass.experiments.protocol import PROTOCOLS
from onepass.experiments.training import train

ROOT = Path(__file__).parents[1]


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    whole = [sys.executable, *map(str, command), "--workers", "1"]
    return subprocess.run(whole, check=True, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("name", RIVALS)
def test_every_rival_trains(name: str) -> None:
    if (package := RIVALS[name].package) is not None:
        pytest.importorskip(package)
    part = "training" if RIVALS[name].validates else "all"
    found = rivals.block("digits", name, part, steps=20, seed=0, first=1, count=1)
    before = rivals.new_model(PROTOCOLS["digits"], load("digits"), 0, 1)
    untrained = rivals.measured(PROTOCOLS["digits"], load("digits"), before)
    (test,), (ratio,) = found["test"], found["ratio"]
    assert test != untrained and not abs(test) > 100 and ratio > 0


@pytest.mark.parametrize(("rival", "method"), [("one-pass", "one-pass"), ("paper", "one-pass-wd-lr-m")])
def test_starts_are_those_of_the_command(rival: str, method: str) -> None:
    """Weights, hyperparameters, batches of training and of validation: replicas of a population end alike."""
    protocol, data = PROTOCOLS["digits"], load("digits")
    many = train(protocol, METHODS[method], data, replicas=3, steps=40)
    alone = rivals.block("digits", rival, "training", steps=40, seed=0, first=1, count=2)
    torch.testing.assert_close(torch.tensor(alone["test"]), many.test[1:].float(), rtol=1e-4, atol=0.0)
    lrs = torch.tensor([one["lr"] for one in alone["values"]])
    torch.testing.assert_close(lrs, many.end["lr"][1:].float(), rtol=1e-3, atol=0.0)


def test_rivals_go_on_where_they_were(tmp_path: Path) -> None:
    command = ("benchmarks/rivals.py", "digits", "--rivals", "sgd", "adam", "--steps", "20", "--out", tmp_path / "out")
    run(*command, "--seeds", "4")
    (kept,) = (tmp_path / "out").glob("digits/sgd-all-*")
    changed = kept.stat().st_mtime_ns
    said = run(*command, "--seeds", "5", "--json", tmp_path / "all.json")
    assert "4 of 4: " in said.stderr and kept.stat().st_mtime_ns == changed
    rows = json.loads((tmp_path / "all.json").read_text())
    assert [len(row["test"]) for row in rows] == [5] * 4
    assert "\n".join(rivals.to_tables(rows)) == said.stdout
    assert "(5 starts x 20 steps)" in said.stdout and "| SGD, 0.1 / 0.9, on all | " in said.stdout
    asked = {**json.loads(kept.read_text())["asked"], "seed": 1}
    with pytest.raises(SystemExit, match="give another --out"):
        computed(rivals.block, {f"digits/{kept.stem}": asked}, tmp_path / "out", 1)


def test_a_rival_without_its_package_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    table = {**RIVALS, "other": rivals.Rival("Other", None, "sgd", "no_such_package")}
    assert rivals.present(["sgd", "other"], table) == ["sgd"]
    assert "other is left out: it needs the package no_such_package" in capsys.readouterr().err


def test_lost_starts_are_counted_and_left_out() -> None:
    row = {
        "dataset": "digits",
        "rival": "sgd",
        "part": "all",
        "steps": 20,
        "test": [1.0, None, 3.0],
        "ratio": [1.0] * 3,
    }
    (table,) = rivals.to_tables([row])
    assert "| 2.0 ± 0.7 | 2.0 ± 0.7 | 2.90 | 1 of 3 | x 1 |" in table


def test_newcomer(tmp_path: Path) -> None:
    result = tmp_path / "all.json"
    command = ("benchmarks/newcomer.py", "two-moons", "--seeds", "1", "--steps", "20", "--out", tmp_path / "out")
    said = run(*command, "--json", result)
    cells = json.loads(result.read_text())
    assert [cell["asked"]["optimizer"] for cell in cells] == ["SGD", "Adam", "AdamW"]
    for cell in cells:
        assert [run["lr"] for run in cell["tuned"]] == [1e-6, 1e-3, 1.0] and len(cell["fixed"]) == 10
        assert all(run["steps"][-1] == 20 for run in cell["tuned"]) and cell["tuned"][0]["end"]["lr"] > 1e-6
    assert newcomer.to_table(cells) == said.stdout


@pytest.mark.parametrize(
    ("found", "short"),
    [([1.3, 1.0], True), ([1.05, 1.05], False), ([0.5, 0.5], False), ([math.nan, 0.5], True)],
    ids=["worse", "hardly", "better", "lost"],
)
def test_what_falls_short(found: list[float], short: bool) -> None:
    assert newcomer.falls_short(found, [1.0, 1.0]) is short


@pytest.mark.parametrize("name", beginner_tasks.TASKS)
def test_tasks_have_three_parts_and_a_model_for_them(name: str) -> None:
    pytest.importorskip("PIL")
    task = beginner_tasks.TASKS[name]
    parts = task.load(0)
    assert len(parts.train[0]) > len(parts.valid[0]) > 0 and len(parts.test[0]) > 0
    model = newcomer.new_model(task, 0)
    batch = next(iter(task.batches(parts.train)))
    assert task.loss(model, batch).isfinite() and (task.measure or task.loss)(model.eval(), parts.test) >= 0
    assert not all(torch.equal(a, b) for a, b in zip(parts.train, task.load(1).train, strict=True))


def test_times_are_taken_in_turns() -> None:
    taken = []
    seconds, ratio = timed(lambda: taken.append("step"), lambda: taken.append("plain"), steps=45)
    assert taken.count("step") == 45 and taken.count("plain") == 14 and taken[10] == "plain"
    assert seconds > 0 and np.isfinite(ratio)
