"""Searches as methods of the paper: cells on disk, tables, artefacts, whole commands."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from onepass.cli import main
from onepass.experiments import runs, tables
from onepass.experiments.artefacts import ARTEFACTS
from onepass.experiments.methods import METHODS, SEARCHES
from onepass.experiments.published import TABLES_OF_SEARCHES, published
from onepass.experiments.runs import Request, UsageError, compute, finished, read
from tests.experiments.test_tables import cell

REQUEST = Request("diabetes", "asha-one-pass", replicas=64, steps=40)


def test_a_search_is_a_cell(tmp_path: Path) -> None:
    found = compute(REQUEST, tmp_path)
    assert found.request == REQUEST and len(found.values) == len(found.start["lr"]) == 1
    assert found.summary.median == found.test[0] and math.isnan(found.summary.median_se)
    curves = found.curves()
    assert curves["steps"].tolist()[:4] == [1, 2, 3, 4] and curves["steps"][-1] == 40
    assert curves["test"].shape == (len(curves["steps"]), 1) and (curves["seconds"] > 0).all()
    assert found.seconds == pytest.approx(curves["seconds"].sum(), abs=2e-3)
    assert found.runtimes().tolist() == []
    assert [path.name for path in (tmp_path / "diabetes").iterdir()] == ["asha-one-pass"]
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["engine"] == "local"
    assert compute(REQUEST, tmp_path) == found


def test_repetitions_of_bayesian_optimisation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = METHODS["bayesian-optimisation"]
    assert row.search is not None
    monkeypatch.setitem(METHODS, "bayesian-optimisation", replace(row, search=replace(row.search, trials=6)))
    found = compute(Request("diabetes", "bayesian-optimisation", replicas=3, steps=20), tmp_path)
    assert len(found.values) == 3 and found.curves()["test"].shape == (6, 3)
    assert found.curves()["steps"].tolist() == [20, 40, 60, 80, 100, 120]


def test_what_was_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compute(REQUEST, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(runs, "_save", interrupt)
        with pytest.raises(KeyboardInterrupt):
            compute(REQUEST, tmp_path / "parts")
    assert finished(REQUEST, tmp_path / "parts") is None
    with pytest.raises(UsageError, match=r"unfinished run of asha-one-pass with 40 steps, but now steps is 50"):
        compute(replace(REQUEST, steps=50), tmp_path / "parts")
    with pytest.raises(UsageError, match=r"cannot go on .*its trials is 64 and here it is 32.*give another --out"):
        compute(replace(REQUEST, replicas=32), tmp_path / "parts")
    again = compute(REQUEST, tmp_path / "parts")
    assert again.values == whole.values and again.end == whole.end and again.resumed


def interrupt(*args: object) -> None:
    raise KeyboardInterrupt


def test_another_engine_is_another_configuration(tmp_path: Path) -> None:
    compute(REQUEST, tmp_path)
    with pytest.raises(UsageError, match="holds a run with engine local, but now engine is ray; give another --out"):
        compute(replace(REQUEST, engine="ray"), tmp_path)


def test_cells_of_older_versions_have_the_usual_engine(tmp_path: Path) -> None:
    folder = compute(replace(REQUEST, method="random", replicas=2), tmp_path).folder
    saved = json.loads((folder / "cell.json").read_text())
    assert saved["request"].pop("engine") == "local"
    (folder / "cell.json").write_text(json.dumps(saved))
    assert read(folder).request.engine == "local"


# --- tables ---


def test_the_paper_s_numbers_stand_beside_the_same_search() -> None:
    row = METHODS["asha-random"].search
    assert row is not None
    done = cell("asha-random", [0.2, 0.3, 0.25])
    same = replace(done, request=replace(done.request, replicas=row.replicas))
    (table,) = tables.results([same, cell("pbt-one-pass", [0.1, 0.2])])
    assert [line.label for line in table.rows] == ["ASHA + Random (114 286)", "PBT + one-pass (61)"]
    assert table.rows[0].median.paper == 0.191 and table.rows[1].median.paper is None
    assert table.note == "searches (of so many starts, or repetitions x trainings), 4000 steps on cpu, 2 threads"
    (table,) = tables.results([done])
    assert table.rows[0].median.paper is None, "another number of starts is another search"
    on_ray = replace(same, request=replace(same.request, engine="ray"))
    assert tables.results([on_ray])[0].rows[0].label.endswith("(114 286, Ray)")


def test_searches_and_single_starts_have_tables_of_their_own() -> None:
    found = tables.results([cell("random", [1.0, 2.0]), cell("bayesian-optimisation", [0.3, 0.4])])
    assert [len(table.rows) for table in found] == [1, 1]
    assert found[1].rows[0].label == "Bayesian Optimisation (61 x 30)"


@pytest.mark.parametrize("method", [name for name in SEARCHES if METHODS[name].title[-10:] != "+ one-pass"])
def test_the_paper_has_numbers_for_its_searches(method: str) -> None:
    row = METHODS[method]
    assert row.search is not None
    every = TABLES_OF_SEARCHES[row.search.name]
    assert any(published(table, "uci-energy", row.title) is not None for table in every)


# --- whole commands ---


def test_reproduce_searches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["asha", "pbt", "search-curves"]
    methods = ["random", "one-pass", "asha-random", "asha-one-pass", "pbt-random"]
    size = ["--replicas", "8", "--steps", "40", "--device", "cpu", "--quiet", "--datasets", "diabetes"]
    assert main(["reproduce", *names, *size, "--methods", *methods, "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert shown.out.count("ASHA + one-pass (8)") == 1 and shown.err == ""
    for name in ("asha.md", "asha.tex", "pbt.html", "search-curves.png", "search-curves.pdf"):
        assert (tmp_path / name).stat().st_size > 200, name
    page = (tmp_path / "report.html").read_text()
    assert "Searches over time" in page and "PBT + Random" in page


def test_which_data_sets_a_search_is_for() -> None:
    figure = ARTEFACTS["search-curves"]
    assert figure.takes("kin8nm", "bayesian-optimisation") and figure.takes("uci-energy", "asha-random")
    assert not figure.takes("kin8nm", "asha-random") and figure.takes("diabetes", "asha-random")
    assert not figure.takes("uci-energy", "random-3-batched")


def test_run_has_the_paper_s_size_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Request] = []

    def note(request: Request, *others: object, **more: object) -> None:
        asked.append(request)
        raise UsageError("seen")

    monkeypatch.setattr("onepass.cli.compute", note)
    for method in ("bayesian-optimisation", "asha-random", "pbt-random", "random"):
        assert main(["run", "uci-energy", method]) == 2
    assert [request.replicas for request in asked] == [32, 114_286, 200, 200]
