"""What a folder holds: whatever is wrong with one result, the others are there, and a line says so."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import onepass
from onepass.experiments import charts, figures
from onepass.experiments.contents import contents, in_words, state
from onepass.experiments.runs import Cell
from onepass.version import __version__
from tests.experiments.test_figures import NAMES, made

NOW: dict[str, Any] = {"versions": {"onepass": __version__}}


def rewritten(cell: Cell, **changed: object) -> None:
    file = cell.folder / "cell.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))


def without(cell: Cell, *names: str) -> None:
    curves: dict[str, Any] = {name: values for name, values in cell.curves().items() if name not in names}
    np.savez(cell.folder / "curves.npz", **curves)


def test_nothing_to_say(tmp_path: Path) -> None:
    made(tmp_path, **NOW)
    made(tmp_path, "random-3-batched", **NOW)
    found = contents(tmp_path)
    assert len(found.cells) == len(found.drawn) == 2
    assert not found.notes and not found.unfinished


BROKEN: dict[str, tuple[Callable[[Cell], object], str]] = {
    "half written": (lambda cell: (cell.folder / "cell.json").write_text('{"reque'), "no readable result"),
    "no object": (lambda cell: (cell.folder / "cell.json").write_text("3"), "no readable result"),
    "no UTF-8": (lambda cell: (cell.folder / "cell.json").write_bytes(b"\xff\xfe\x00"), "no readable result"),
    "of a newer version": (lambda cell: rewritten(cell, colour="red"), "no readable result .*colour"),
    "moved here": (
        lambda cell: rewritten(cell, request={**asdict(cell.request), "method": "random"}),
        "energy, random",
    ),
    "text for numbers": (lambda cell: rewritten(cell, values=["a"]), "in values that is no number"),
    "a list for names": (lambda cell: rewritten(cell, start=[1.0]), "start in another form"),
    "too few": (lambda cell: rewritten(cell, valid=[1.0]), "1 of valid and 3 of test"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_broken_is_left_out(kind: str, tmp_path: Path) -> None:
    damage, told = BROKEN[kind]
    made(tmp_path, "random", **NOW)
    damage(made(tmp_path, **NOW))
    found = contents(tmp_path)
    assert [cell.request.method for cell in found.cells] == ["random"]
    (note,) = found.notes
    assert note.startswith("Left out: ") and str(tmp_path / "uci-energy" / "one-pass") in note
    assert re.search(told, note), note


FLAT: dict[str, Any] = dict.fromkeys(("steps", "test", *NAMES), np.ones(2))
CURVELESS: dict[str, tuple[Callable[[Cell], object], str]] = {
    "gone": (lambda cell: (cell.folder / "curves.npz").unlink(), "no readable curves.npz"),
    "half written": (lambda cell: (cell.folder / "curves.npz").write_bytes(b"PK\x03\x04"), "no readable curves.npz"),
    "without a value": (lambda cell: without(cell, "lr"), "has no lr"),
    "of another size": (lambda cell: np.savez(cell.folder / "curves.npz", **FLAT), "does not fit"),
}


@pytest.mark.parametrize("kind", CURVELESS)
def test_without_curves_it_is_in_tables_alone(kind: str, tmp_path: Path) -> None:
    damage, told = CURVELESS[kind]
    damage(made(tmp_path, **NOW))
    found = contents(tmp_path)
    assert len(found.cells) == 1 and not found.drawn
    assert found.notes[0].startswith("In tables alone: UCI Energy, one-pass: ") and told in found.notes[0]


def test_a_search_has_curves_of_its_own_form(tmp_path: Path) -> None:
    cell = made(tmp_path, "pbt-random", **NOW)
    np.savez(cell.folder / "curves.npz", steps=np.arange(2), test=np.ones((2, 1)), seconds=np.ones(2))
    found = contents(tmp_path)
    assert len(found.drawn) == 1 and not found.notes


def test_what_is_not_known(tmp_path: Path) -> None:
    made(tmp_path, **NOW)
    shutil.copytree(tmp_path / "uci-energy" / "one-pass", tmp_path / "uci-mars" / "alien")
    (tmp_path / "notes.txt").write_text("mine")
    found = contents(tmp_path)
    assert len(found.cells) == 1
    assert len(found.notes) == 1 and "uci-mars/alien holds a result" in found.notes[0]


def test_different_settings_in_one_data_set(tmp_path: Path) -> None:
    made(tmp_path, "random", [[1.0] * 4], **NOW)
    made(tmp_path, "one-pass", [[1.0] * 3], **NOW)
    made(tmp_path, "random", [[1.0] * 5], dataset="kin8nm", **NOW)
    (note,) = contents(tmp_path).notes
    assert note.startswith("UCI Energy has runs of different settings")
    assert "4 starts x 10 steps, seed 0 (Random); 3 starts x 10 steps, seed 0 (one-pass)" in note


def test_results_of_an_older_version(tmp_path: Path) -> None:
    cell = made(tmp_path, versions={"onepass": "0.0.1"})
    made(tmp_path, "pbt-random", **NOW)
    without(cell, "seconds")
    found = contents(tmp_path)
    assert len(found.drawn) == 2
    assert "kept no times: UCI Energy, one-pass" in found.notes[0]
    assert "Computed by onepass 0.0.1" in found.notes[1] and "UCI Energy, one-pass" in found.notes[1]
    figures.figure_of("search-curves", found.drawn)
    chart = charts.chart_of("search-curves", found.drawn)
    assert chart is not None
    assert {trace["meta"] for trace in chart.panels[0].data} == {"pbt-random"}


# --- what is not finished ---


def squared(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    loss: Tensor = (model(batch[0]) - batch[1]).square().mean()
    return loss


def test_how_far_a_run_is(tmp_path: Path) -> None:
    """By the checkpoint that it writes."""
    batch = torch.ones(4, 2), torch.ones(4, 1)
    population = onepass.Population(lambda: nn.Linear(2, 1), squared, replicas=2, start={"lr": 0.01}, tune=())
    population.run([batch], steps=30, checkpoint=tmp_path / "uci-energy" / ".random.40.pt")
    (tmp_path / "uci-energy" / ".random.lock").touch()
    (one,) = contents(tmp_path).unfinished
    assert (one.dataset, one.method, one.steps, one.step) == ("uci-energy", "random", 40, 30)
    assert in_words(one).startswith("at step 30 of 40 steps, begun ") and "saved" in in_words(one)
    (tmp_path / "uci-energy" / ".random.lock").unlink()
    (one,) = contents(tmp_path).unfinished
    assert in_words(one).endswith("interrupted: the same command goes on from there")


def test_a_checkpoint_that_says_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "uci-energy"
    (folder / ".asha-random.400.local").mkdir(parents=True)
    (folder / ".random.400.pt").write_bytes(b"PK\x03\x04 half")
    assert [(one.method, one.steps, one.step) for one in contents(tmp_path).unfinished] == [
        ("random", 400, None),
        ("asha-random", 400, None),
    ]


def test_state_differs_when_something_comes(tmp_path: Path) -> None:
    seen = {state(tmp_path)}
    made(tmp_path)
    seen.add(state(tmp_path))
    (tmp_path / "uci-energy" / ".random.lock").touch()
    seen.add(state(tmp_path))
    assert len(seen) == 3
    assert state(tmp_path) in seen
