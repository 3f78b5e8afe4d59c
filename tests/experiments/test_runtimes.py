"""What a run costs: averages over its parts, beside Random's."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from onepass.experiments import panels, runtimes, writing
from onepass.experiments.methods import ALONE, METHODS
from onepass.experiments.runs import Cell, UsageError
from tests.experiments.test_figures import made


def timed(out: Path, method: str, seconds: Sequence[float], **other: Any) -> Cell:
    """A cell of three starts, with a part of its steps in each of these times."""
    cell = made(out, method, [[1.0, 2.0, 3.0]] * len(seconds), **other)
    with np.load(cell.folder / "curves.npz") as saved:
        arrays = {**saved, "seconds": np.array(seconds)}
    np.savez(cell.folder / "curves.npz", **arrays)
    return cell


def texts(found: runtimes.Runtimes) -> list[list[str]]:
    return [[field.text for field in row] for row in runtimes.grid(found).body]


def test_averages_and_their_ratio_to_random(tmp_path: Path) -> None:
    random = timed(tmp_path, "random", [7.0, 3.0, 3.0, 3.0])  # the first with the preparation in it
    ours = timed(tmp_path, "one-pass", [16.0, 6.0, math.nan, 6.0])
    (found,) = runtimes.results([random, ours])
    assert found.seconds["random"].tolist() == pytest.approx([28 / 3, 4, 4, 4])
    assert found.seconds["one-pass"].tolist() == pytest.approx([64 / 3, 8, 8])
    assert texts(found) == [
        ["Random", "5.33", "1.00", "4.00", "1.00", "4"],
        ["one-pass", "12.4", "2.33", "8.00", "2.00", "3"],
    ]
    written = writing.to_markdown(runtimes.grid(found))
    assert written.startswith("**UCI Energy: seconds per start, whole run** (3 starts x 40 steps on cpu, 1 threads)")


def test_without_random_there_is_no_ratio(tmp_path: Path) -> None:
    (found,) = runtimes.results([timed(tmp_path, "one-pass", [0.003])])
    assert texts(found) == [["one-pass", "1.00", "", "1.00", "", "1"]]
    assert runtimes.grid(found).title == "UCI Energy: milliseconds per start, whole run"


def test_only_the_same_machine_and_size_is_compared(tmp_path: Path) -> None:
    cells = [
        timed(tmp_path, "random", [1.0, 1.0]),
        timed(tmp_path, "one-pass", [2.0, 2.0], device="another"),
        timed(tmp_path, "baydin", [2.0, 2.0, 2.0]),
        timed(tmp_path, "random", [2.0, 2.0], dataset="kin8nm"),
    ]
    found = runtimes.results(cells)
    assert [(one.dataset, *one.seconds) for one in found] == [
        ("uci-energy", "random"),
        ("uci-energy", "one-pass"),
        ("uci-energy", "baydin"),
        ("kin8nm", "random"),
    ]


def test_starts_that_only_count_together_are_not_timed(tmp_path: Path) -> None:
    assert runtimes.results([timed(tmp_path, "random-3-batched", [1.0])]) == []
    assert {"random-3-batched"} == {*ALONE} - {*runtimes.ONE_START}


def test_many_that_are_left_out_are_counted(tmp_path: Path) -> None:
    methods = runtimes.ONE_START[:5]
    cells = [timed(tmp_path, method, [math.nan]) for method in methods]
    named = "; ".join(f"uci-energy, {method}" for method in methods[:3])
    assert runtimes.left_out(cells).endswith(f"kept no times: {named} and 2 more.")
    assert runtimes.legend([timed(tmp_path / "new", "random", [1.0])]) == runtimes.LEGEND
    with pytest.raises(UsageError, match=r"and 2 more\. Nothing is left; give another --out"):
        runtimes.show(cells)


@pytest.mark.parametrize("width", [60, 100])
def test_terminal(width: int, tmp_path: Path) -> None:
    stream = io.StringIO()
    runtimes.show([timed(tmp_path, m, [1.0, 2.0]) for m in METHODS], Console(file=stream, width=width))
    shown = stream.getvalue()
    assert "Ours WD+HDLR+M" in shown and "x Random" in shown
    assert max(map(len, shown.splitlines())) <= width


@pytest.mark.parametrize("values", [[2.0], [2.0] * 9, [1.0, 2.0, 2.1, 1000.0], [0.0, 0.0]])
def test_a_violin_reaches_from_end_to_end(values: list[float]) -> None:
    at, width = panels.violin(np.array(values))
    assert (at[0], at[-1]) == (min(values), max(values))
    assert np.isfinite(width).all() and width.max() == pytest.approx(0.4) and width.min() >= 0


def test_a_violin_is_widest_where_most_values_are() -> None:
    values = np.concatenate([np.random.default_rng(0).normal(5.0, 0.1, 99), [60.0]])
    at, width = panels.violin(values)
    assert at[width.argmax()] == pytest.approx(5.0, abs=0.1)
    assert width[(at > 6) & (at < 50)].max() < 1e-3, "one that lies far away does not make it wide"
