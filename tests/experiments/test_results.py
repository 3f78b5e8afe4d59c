"""What the documentation says is what the results on file say: every page NAME.md of a NAME.json beside it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import newcomer
import numpy as np
import pytest
import rivals

from onepass.experiments import runtimes, tables, writing
from onepass.experiments.artefacts import ARTEFACTS, UCI
from onepass.experiments.methods import ALONE
from onepass.experiments.runs import Cell, Request, compute
from onepass.experiments.statistics import Array

RESULTS = Path(__file__).parents[2] / "docs" / "results"


PAGES = sorted(path.stem for path in RESULTS.glob("*.json"))
TABLE = re.compile(r"^\*\*[^\n]*\*\* \([^\n]*\)\n\n(?:\|[^\n]*\n)+", re.MULTILINE)


def cells(name: str) -> list[Cell]:
    return [cell(one) for one in json.loads((RESULTS / name).read_text())]


@dataclass(frozen=True)
class FromJson(Cell):
    """A cell as ``onepass reproduce --json`` describes it."""

    times: tuple[float, ...] = ()

    def runtimes(self) -> Array:
        return np.array(self.times)


def cell(saved: dict[str, Any]) -> Cell:
    names = ("dataset", "method", "replicas", "steps", "seed", "split", "engine")
    request = Request(**{name: saved[name] for name in names if name in saved})
    values = numbers(saved["values"])
    kept = {"metric": saved["metric"], "seconds": saved["seconds"], "device": saved["device"]}
    kept["others"] = {name: numbers(some) for name, some in saved.get("others", {}).items()}
    kept["times"] = saved.get("runtimes", ())
    unknown: dict[str, Any] = {"resumed": False, "versions": {}, "start": {}, "end": {}, "returns": []}
    return FromJson(request=request, values=values, test=values, valid=[], folder=Path(), **kept, **unknown)


def numbers(values: list[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def check(name: str, page: str, every: list[Cell]) -> None:
    """A page has all tables of its results and no other; those of runtimes if it likes, or if it is about them."""
    losses = {writing.to_markdown(tables.grid(table)) for table in tables.results(every)}
    times = {writing.to_markdown(runtimes.grid(table)) for table in runtimes.results(every)}
    found = TABLE.findall(page)
    assert len(found) == len(set(found)), "a table stands twice"
    missing = (times if name == "runtimes" else losses) - set(found)
    assert not missing, f"not in {name}.md: {missing}"
    assert set(found) <= losses | times, f"not of {name}.json: {set(found) - losses - times}"


@pytest.mark.parametrize("name", PAGES)
def test_every_table_is_made_from_the_results_on_file(name: str) -> None:
    check(name, (RESULTS / f"{name}.md").read_text(), cells(f"{name}.json"))


def test_pages_are_found() -> None:
    assert "uci" in PAGES
    assert len(TABLE.findall((RESULTS / "uci.md").read_text())) == len(UCI)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], list[Cell]]:
    """What the command writes of a small case with two metrics, and its results through JSON."""
    out = tmp_path_factory.mktemp("out")
    every = [compute(Request("digits", method, 3, 30), out) for method in ("random", "one-pass")]
    for name in ("fashion-mnist", "runtimes"):
        ARTEFACTS[name].make(every, out / name)
    pages = {name: (out / f"{name}.md").read_text() for name in ("fashion-mnist", "runtimes")}
    return pages, [cell(one) for one in json.loads(json.dumps([one.to_json() for one in every], allow_nan=False))]


@pytest.mark.parametrize("name", ["fashion-mnist", "runtimes"])
def test_what_the_command_writes_is_such_a_page(name: str, tiny: tuple[dict[str, str], list[Cell]]) -> None:
    pages, every = tiny
    check(name, f"# Some results\n\n{pages[name]}\n| another | table |\n| --- | --- |\n", every)
    assert ("test error" in pages[name]) is (name == "fashion-mnist")


def test_runtimes_may_stand_beside_losses(tiny: tuple[dict[str, str], list[Cell]]) -> None:
    pages, every = tiny
    check("fashion-mnist", pages["fashion-mnist"] + pages["runtimes"], every)


@pytest.mark.parametrize(
    ("pattern", "other", "told"),
    [
        (r"(\d) ±", r"\g<1>7 ±", "not in"),
        (r"\*\*Digits: test error(.|\n)*", "", "not in"),
        (r"3 starts", "4 starts", "not in"),
        (r"\Z", "\n**Digits: test speed** (3 starts)\n\n| method |\n| --- |\n| Random |\n", "not of"),
        (r"\A((.|\n)*)\Z", r"\1\n\1", "twice"),
    ],
    ids=["number", "metric", "note", "another", "twice"],
)
def test_what_is_wrong_in_a_page_is_found(
    pattern: str, other: str, told: str, tiny: tuple[dict[str, str], list[Cell]]
) -> None:
    pages, every = tiny
    wrong = re.sub(pattern, other, pages["fashion-mnist"], count=1)
    assert wrong != pages["fashion-mnist"]
    with pytest.raises(AssertionError, match=told):
        check("fashion-mnist", wrong, every)


def test_all_methods_at_the_paper_s_size() -> None:
    every = cells("uci.json")
    assert [(c.request.dataset, c.request.method) for c in every] == [(d, m) for d in UCI for m in ALONE]
    assert {(c.request.replicas, c.request.steps) for c in every} == {(200, 4000)}


def test_medians_agree_with_the_paper() -> None:
    """Within three combined standard errors, and no farther apart than the text says."""
    rows = [row for table in tables.results(cells("uci.json")) for row in table.rows if row.median.paper is not None]
    assert len(rows) == 27
    worst = max(abs(row.median.apart) for row in rows)
    assert worst < 3
    said = re.search(r"farthest from the published is ([\d.]+)", (RESULTS / "uci.md").read_text())
    assert said is not None and float(said[1]) == pytest.approx(worst, abs=0.05)


def test_medians_of_fashion_mnist_agree_with_the_paper() -> None:
    rows = [row for table in tables.results(cells("fashion-mnist.json")) for row in table.rows]
    apart = [abs(row.median.apart) for row in rows if row.median.paper is not None]
    assert len(apart) == 27  # of cross-entropy twice, of errors once
    said = re.search(r"none is farther than ([\d.]+)", (RESULTS / "fashion-mnist.md").read_text())
    assert said is not None and max(apart) < 3 and float(said[1]) == pytest.approx(max(apart), abs=0.05)


def test_several_searches_with_mutations() -> None:
    """Medians of population-based training by seed, their average, and that of means, with standard errors."""
    every = cells("searches/pbt-seeds.json")
    page, methods = (RESULTS / "search.md").read_text(), dict.fromkeys(cell.request.method for cell in every)
    assert len(methods) == 3
    for method in methods:
        found = [cell.summary for cell in every if cell.request.method == method]
        medians, means = np.array([(one.median, one.mean) for one in found]).T
        averages = [f"{x.mean():.3f} ± {x.std(ddof=1) / len(found) ** 0.5:.3f}" for x in (medians, means)]
        assert len(found) == 7 and " | ".join([*(f"{median:.3f}" for median in medians), *averages]) in page


@pytest.mark.parametrize("method", ["one-pass", "one-pass-lookback-5", "one-pass-lookback-1"])
def test_one_pass_never_diverges(method: str) -> None:
    assert sum(c.summary.diverged for c in cells("uci.json") if c.request.method == method) == 0


def test_the_page_of_the_default_is_made_from_its_results() -> None:
    page, folder = (RESULTS / "default.md").read_text(), RESULTS / "default"
    rows, found = json.loads((folder / "rivals.json").read_text()), TABLE.findall(page)
    made = [newcomer.to_table(json.loads((folder / "newcomer.json").read_text())), *rivals.to_tables(rows)]
    assert sorted(found) == sorted(made)
    assert {row["dataset"] for row in rows} <= {*rivals.CHOOSING}, "the other sets are for one look, at the end"
