"""Cells on disk: whole or not there, never computed twice, never mixed up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onepass.experiments import runs
from onepass.experiments.methods import METHODS
from onepass.experiments.runs import Request, UsageError, cells, compute, finished, read
from onepass.experiments.statistics import best_of

REQUEST = Request("diabetes", "one-pass", replicas=4, steps=30)


def test_a_cell_says_what_it_is(tmp_path: Path) -> None:
    cell = compute(REQUEST, tmp_path)
    assert cell.request == REQUEST
    assert len(cell.values) == len(cell.test) == len(cell.start["lr"]) == 4
    assert cell.metric == "test MSE" and cell.seconds > 0 and cell.device.startswith("cpu")
    assert {"onepass", "torch", "python"} <= set(cell.versions)
    curves = cell.curves()
    assert curves["steps"].tolist() == [10, 20, 30]
    assert curves["seconds"].shape == (3,) and (curves["seconds"] > 0).all()
    assert curves["test"].shape == curves["lr"].shape == (3, 4)
    assert curves["test"][-1].tolist() == pytest.approx(cell.test, rel=1e-6)
    assert [path.name for path in (tmp_path / "diabetes").iterdir()] == ["one-pass"]


def test_a_cell_cut_into_parts_of_whole_runs(tmp_path: Path) -> None:
    cell = compute(replace(REQUEST, steps=25), tmp_path)
    curves = dict(np.load(cell.folder / "curves.npz"))
    assert curves["steps"].tolist() == [10, 20, 25]
    for seconds, expected in (([4.0, 8.0, 1.0], [2.5, 5.0, 1.25]), ([4.0, np.nan, 1.0], [2.5, 1.25])):
        np.savez(cell.folder / "curves.npz", **{**curves, "seconds": np.array(seconds)})
        assert cell.runtimes().tolist() == expected  # 4 starts
    del curves["seconds"]
    np.savez(cell.folder / "curves.npz", **curves)
    assert cell.runtimes().tolist() == cell.to_json()["runtimes"] == []


def test_json_has_what_was_promised(tmp_path: Path) -> None:
    found = json.loads(json.dumps(compute(REQUEST, tmp_path).to_json(), allow_nan=False))
    promised = (
        "dataset method replicas steps seed device metric mean mean_se median median_se best diverged seconds values"
    )
    assert set(promised.split()) <= set(found)
    assert found["values"] == pytest.approx(read(tmp_path / "diabetes" / "one-pass").values, rel=1e-6)


def test_finished_cells_are_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compute(REQUEST, tmp_path)
    monkeypatch.setattr(runs, "train", None)
    assert compute(REQUEST, tmp_path) == first


@pytest.mark.parametrize(("name", "value"), [("replicas", 5), ("steps", 40), ("seed", 1), ("split", 2)])
def test_another_configuration_is_refused(tmp_path: Path, name: str, value: int) -> None:
    compute(REQUEST, tmp_path)
    before = (tmp_path / "diabetes" / "one-pass" / "cell.json").read_bytes()
    change: dict[str, Any] = {name: value}
    with pytest.raises(UsageError, match=rf"holds a run with {name} .*, but now {name} is {value}; give another --out"):
        compute(replace(REQUEST, **change), tmp_path)
    assert (tmp_path / "diabetes" / "one-pass" / "cell.json").read_bytes() == before


def test_a_checkpoint_of_another_configuration_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compute(REQUEST, tmp_path)
    with pytest.raises(UsageError, match=r"unfinished run of diabetes, one-pass .* its seed is 0 .*give another --out"):
        compute(replace(REQUEST, seed=1), tmp_path)


def interrupt(*args: object) -> None:
    raise KeyboardInterrupt


def test_what_was_interrupted_goes_on_and_ends_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compute(REQUEST, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(runs, "_save", interrupt)
        with pytest.raises(KeyboardInterrupt):
            compute(REQUEST, tmp_path / "parts")
    assert finished(REQUEST, tmp_path / "parts") is None
    again = compute(REQUEST, tmp_path / "parts")
    assert again.values == whole.values and again.end == whole.end
    assert again.resumed and not whole.resumed
    curves, others = whole.curves(), again.curves()
    assert curves.keys() == others.keys() and curves.pop("seconds").shape == others.pop("seconds").shape == (3,)
    for name, curve in curves.items():
        assert np.array_equal(curve, others[name])


def test_half_written_cells_do_not_count(tmp_path: Path) -> None:
    left = tmp_path / "diabetes" / ".one-pass.partial"
    left.mkdir(parents=True)
    (left / "cell.json").write_text("{")
    assert finished(REQUEST, tmp_path) is None and list(cells(tmp_path)) == []
    assert compute(REQUEST, tmp_path).values


def test_an_unreadable_cell_is_named(tmp_path: Path) -> None:
    compute(REQUEST, tmp_path)
    (tmp_path / "diabetes" / "one-pass" / "cell.json").write_text("{")
    with pytest.raises(UsageError, match=r"one-pass holds no readable result .*; move it away"):
        list(cells(tmp_path))


def test_two_processes_do_not_compute_one_cell(tmp_path: Path) -> None:
    with (
        runs.alone(REQUEST, tmp_path),
        pytest.raises(UsageError, match=r"another process is computing .*one-pass; wait for it"),
    ):
        compute(REQUEST, tmp_path)
    assert compute(REQUEST, tmp_path).values
    assert [path.name for path in (tmp_path / "diabetes").iterdir()] == ["one-pass"]


@pytest.mark.parametrize("content", [None, b"", b"nonsense"])
def test_unreadable_curves_are_named(tmp_path: Path, content: bytes | None) -> None:
    cell = compute(replace(REQUEST, steps=10), tmp_path)
    path = cell.folder / "curves.npz"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(UsageError, match=r"one-pass has no readable curves.npz; move the folder away"):
        cell.curves()


def test_diverged_starts_are_null_on_disk_and_nan_in_memory(tmp_path: Path) -> None:
    cell = compute(replace(REQUEST, method="random"), tmp_path)
    path = cell.folder / "cell.json"
    saved = json.loads(path.read_text())
    saved["values"][1] = None
    path.write_text(json.dumps(saved))
    again = read(cell.folder)
    assert np.isnan(again.values[1]) and again.summary.diverged == 1
    assert again.to_json()["values"][1] is None


def test_best_of_three_keeps_a_third(tmp_path: Path) -> None:
    cell = compute(Request("diabetes", "random-3-batched", 8, 10), tmp_path)
    kept = best_of(cell.valid, METHODS["random-3-batched"].best_of)
    assert cell.values == [cell.test[i] for i in kept] and len(cell.values) == 2


def test_cells_come_in_the_order_of_the_tables(tmp_path: Path) -> None:
    for method in ("one-pass", "random"):
        compute(replace(REQUEST, method=method, steps=10), tmp_path)
    assert [cell.request.method for cell in cells(tmp_path)] == ["random", "one-pass"]
