"""What the documentation says is what the results on file say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from onepass.experiments import tables
from onepass.experiments.artefacts import UCI
from onepass.experiments.methods import METHODS
from onepass.experiments.runs import Cell, Request

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def cells(name: str) -> list[Cell]:
    return [cell(one) for one in json.loads((RESULTS / name).read_text())]


def cell(saved: dict[str, Any]) -> Cell:
    request = Request(**{name: saved[name] for name in ("dataset", "method", "replicas", "steps", "seed", "split")})
    values = [float("nan") if value is None else value for value in saved["values"]]
    kept = {"metric": saved["metric"], "seconds": saved["seconds"], "device": saved["device"]}
    unknown: dict[str, Any] = {"others": {}, "resumed": False, "versions": {}, "start": {}, "end": {}, "returns": []}
    return Cell(request=request, values=values, test=values, valid=[], folder=Path(), **kept, **unknown)


def test_every_table_is_made_from_the_results_on_file() -> None:
    text = (RESULTS / "uci.md").read_text()
    found = tables.results(cells("uci.json"))
    assert len(found) == len(UCI)
    for table in found:
        assert tables.to_markdown(table) in text, table.title


def test_all_methods_at_the_paper_s_size() -> None:
    every = cells("uci.json")
    assert [(c.request.dataset, c.request.method) for c in every] == [(d, m) for d in UCI for m in METHODS]
    assert {(c.request.replicas, c.request.steps) for c in every} == {(200, 4000)}


def test_medians_agree_with_the_paper() -> None:
    """Within three combined standard errors, and no farther apart than the text says."""
    rows = [row for table in tables.results(cells("uci.json")) for row in table.rows if row.median.paper is not None]
    assert len(rows) == 27
    worst = max(abs(row.median.apart) for row in rows)
    assert worst < 3
    said = re.search(r"farthest from the published is ([\d.]+)", (RESULTS / "uci.md").read_text())
    assert said is not None and float(said[1]) == pytest.approx(worst, abs=0.05)


def test_one_pass_never_diverges() -> None:
    assert sum(c.summary.diverged for c in cells("uci.json") if c.request.method.startswith("one-pass-look")) == 0
    assert sum(c.summary.diverged for c in cells("uci.json") if c.request.method == "one-pass") == 0
