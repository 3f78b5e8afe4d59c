"""Tables of results, the paper's number beside ours: what is in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from onepass.experiments import writing
from onepass.experiments.methods import METHODS
from onepass.experiments.protocol import PROTOCOLS, title_of
from onepass.experiments.published import TABLES_OF_SEARCHES, Published, published
from onepass.experiments.runs import Cell, Request
from onepass.experiments.statistics import Summary, apart, near_best, summary
from onepass.experiments.writing import Grid, Text


class Estimate(NamedTuple):
    """A number with its standard error, and the paper's. ``bold``: within the error bar of the best method."""

    value: float
    se: float
    bold: bool = False
    paper: float | None = None
    paper_se: float = math.nan

    @property
    def apart(self) -> float:
        """The difference from the paper's, in combined standard errors."""
        return math.nan if self.paper is None else apart(self.value, self.se, self.paper, self.paper_se)


class Row(NamedTuple):
    label: str
    mean: Estimate
    median: Estimate
    best: Estimate
    diverged: str
    seconds: float
    method: str


class Table(NamedTuple):
    title: str
    rows: list[Row]
    note: str


def results(cells: Sequence[Cell]) -> list[Table]:
    """One table a data set, metric and size of runs; one row a method."""
    alike: dict[Any, list[Cell]] = {}
    for cell in cells:
        alike.setdefault((cell.request.dataset, settings(cell.request)), []).append(cell)
    return [
        _table(dataset, metric, some)
        for (dataset, _), some in alike.items()
        for metric in (some[0].metric, *some[0].others)
    ]


def settings(request: Request) -> tuple[Any, ...]:
    """Only results of the same can be compared. Searches differ in what they try, and say so in each row."""
    tried = request.replicas if METHODS[request.method].search is None else "as many as each search tries"
    return tried, request.steps, request.seed, request.split


def note(request: Request, devices: str) -> str:
    split = "" if request.split is None else f", clean split {request.split}"
    if METHODS[request.method].search is not None:
        return f"searches (of so many starts, or repetitions x trainings), {request.steps} steps on {devices}{split}"
    return f"{request.replicas} starts x {request.steps} steps on {devices}{split}"


def row_label(request: Request) -> str:
    """The method; of a search, also what it tries, and on which engine if not the usual one."""
    row = METHODS[request.method]
    if row.search is None:
        return row.label
    count = f"{request.replicas:,}".replace(",", " ")
    tried = f"{count} x {row.search.trials}" if row.search.trials else count
    return f"{row.label} ({tried}{', Ray' if request.engine == 'ray' else ''})"


def _table(dataset: str, metric: str, cells: list[Cell]) -> Table:
    protocol = PROTOCOLS[dataset]
    times = protocol.shown_times if metric == protocol.metric else 1
    request = cells[0].request
    known = [_published(cell.request, metric) for cell in cells]
    summaries = [cell.summary if metric == cell.metric else summary(cell.others[metric]) for cell in cells]
    columns = {name: _column(summaries, known, name, times) for name in ("mean", "median", "best")}
    rows = [
        Row(
            row_label(cell.request),
            columns["mean"][i],
            columns["median"][i],
            columns["best"][i],
            f"{found.diverged} of {found.starts}",
            cell.seconds,
            cell.request.method,
        )
        for i, (cell, found) in enumerate(zip(cells, summaries, strict=True))
    ]
    shown = f" x {times:,}".replace(",", " ") if times > 1 else ""
    title = f"{title_of(dataset)}: {metric}{shown}"
    devices = ", ".join(dict.fromkeys(cell.device for cell in cells))
    return Table(title, rows, note(request, devices))


def _published(request: Request, metric: str) -> Published | None:
    """Where the same was done in the paper."""
    protocol, row = PROTOCOLS[request.dataset], METHODS[request.method]
    if request.steps != protocol.steps or request.split is not None or metric not in protocol.published:
        return None
    if row.search is None:
        return published(protocol.published[metric], request.dataset, row.title)
    if metric != protocol.metric or request.replicas != row.search.replicas:
        return None
    every = (published(table, request.dataset, row.title) for table in TABLES_OF_SEARCHES[row.search.name])
    return next((one for one in every if one is not None), None)


def _column(found: list[Summary], known: list[Published | None], name: str, times: int) -> list[Estimate]:
    ours = [one._asdict() for one in found]
    values = [times * one[name] for one in ours]
    errors = [times * one.get(f"{name}_se", math.nan) for one in ours]
    papers = [one._asdict() if one is not None else {} for one in known]
    bold = near_best(values, errors)
    return [
        Estimate(value, se, is_bold, paper.get(name), paper.get(f"{name}_se", math.nan))
        for value, se, is_bold, paper in zip(values, errors, bold, papers, strict=True)
    ]


# --- numbers as text ---


def number(value: float, se: float = math.nan) -> str:
    """As many digits as the standard error allows: one of the error's own; three without one.

    >>> number(0.9634, 0.0812), number(23.4, 2.1), number(4712.0, 300.0), number(0.1236)
    ('0.96 ± 0.08', '23 ± 2', '4700 ± 300', '0.124')
    """
    if not math.isfinite(value):
        return "–"
    if not se > 1e-9 * abs(value):  # of a single start there is none, but for rounding
        digits = 2 - math.floor(math.log10(abs(value))) if value else 0
        return f"{round(value, digits):.{max(0, digits)}f}"
    digits = -math.floor(math.log10(se))
    if round(se, digits) >= 10 ** (1 - digits):  # 0.096 becomes 0.1
        digits -= 1
    value, se = round(value, digits), round(se, digits)
    return f"{value:.{max(0, digits)}f} ± {se:.{max(0, digits)}f}"


def _difference(estimate: Estimate) -> str:
    return f"{estimate.apart:+.1f}" if math.isfinite(estimate.apart) else ""


def _paper(estimate: Estimate) -> str:
    return "" if estimate.paper is None else number(estimate.paper, estimate.paper_se)


def grid(table: Table) -> Grid:
    """All there is. The paper's columns are left out where the paper has no such table."""
    beside = compared(table)
    head, body = ["method"], [[Text(row.label, look=f"key-{row.method}")] for row in table.rows]
    for name in ("mean", "median", "best"):
        estimates: list[Estimate] = [getattr(row, name) for row in table.rows]
        head.append(name)
        _append(body, [Text(number(one.value, one.se), one.bold) for one in estimates])
        if beside:
            head.append("paper")
            _append(body, [Text(_paper(one)) for one in estimates])
        if beside and name != "best":
            head.append("apart")
            _append(body, [Text(_difference(one)) for one in estimates])
    head += ["diverged", "seconds"]
    _append(body, [Text(row.diverged) for row in table.rows])
    _append(body, [Text(f"{row.seconds:.1f}") for row in table.rows])
    return Grid(table.title, table.note, head, body)


def brief(table: Table, narrow: bool = False) -> Grid:
    """For a terminal, the paper's numbers under ours; averages alone for a narrow one."""

    def field(one: Estimate) -> Text:
        return Text(number(one.value, one.se), one.bold, None if one.paper is None else _paper(one))

    beside = compared(table)
    head = ["method", "mean", "median", *(["apart"] if beside else []), *([] if narrow else ["best", "lost", "s"])]
    body = []
    for row in table.rows:
        apart_from_paper = [Text("", under=_difference(row.median))] if beside else []
        rest = [field(row.best), Text(row.diverged.replace(" of ", "/")), Text(f"{row.seconds:.1f}")]
        averages = [Text(row.label), field(row.mean), field(row.median)]
        body.append([*averages, *apart_from_paper, *([] if narrow else rest)])
    return Grid(table.title, table.note, head, body)


def _append(body: list[list[Text]], column: list[Text]) -> None:
    for row, text in zip(body, column, strict=True):
        row.append(text)


LEGEND = "± standard error of 1 000 bootstrap samples; bold: within the error bar of the best; diverged runs left out."
COMPARED = "The paper's numbers stand with ours; apart: the difference in combined standard errors."


def compared(table: Table) -> bool:
    return any(row.mean.paper is not None for row in table.rows)


def legend(found: Sequence[Table]) -> str:
    """What to know to read these tables."""
    return f"{LEGEND} {COMPARED}" if any(map(compared, found)) else LEGEND


def show(found: Sequence[Table], console: Any = None) -> None:
    """On a terminal."""
    writing.show(lambda narrow: [brief(table, narrow) for table in found], legend(found), console)
