"""Tables of results, the paper's number beside ours: what is in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from onepass.experiments import writing
from onepass.experiments.methods import METHODS
from onepass.experiments.protocol import PROTOCOLS, title_of
from onepass.experiments.published import (
    TABLES_OF_FAR_SIGHTED,
    TABLES_OF_SEARCHES,
    TABLES_OF_STUDIES,
    Published,
    published,
)
from onepass.experiments.runs import Cell, Request
from onepass.experiments.statistics import Summary, apart, near_best, summary
from onepass.experiments.variants import USUAL
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
    """Only results of the same can be compared. Searches differ in what they try, and say so in each row; a method with
    a number of starts of its own does so too, and stands beside the usual number of the others.
    """
    tried: Any = request.replicas
    if METHODS[request.method].search is not None:
        tried = "as many as each search tries"
    elif _has_its_own_number(request):
        tried = PROTOCOLS[request.dataset].replicas
    return tried, request.steps, request.seed, request.split, request.variant


def _has_its_own_number(request: Request) -> bool:
    row = METHODS[request.method]
    return row.search is not None or row.replicas == request.replicas


def note(request: Request, devices: str) -> str:
    split = "" if request.split is None else f", clean split {request.split}"
    split += f", {request.variant.about}" if request.variant.about else ""
    if METHODS[request.method].search is not None:
        return f"searches (of so many starts, or repetitions x trainings), {request.steps} steps on {devices}{split}"
    return f"{request.replicas} starts x {request.steps} steps on {devices}{split}"


def row_label(request: Request) -> str:
    """The method; of a search, also what it tries, and on which engine if not the usual one."""
    row = METHODS[request.method]
    if not _has_its_own_number(request):
        return row.label
    count = f"{request.replicas:,}".replace(",", " ")
    tried = f"{count} x {row.search.trials}" if row.search and row.search.trials else count
    return f"{row.label} ({tried}{', Ray' if request.engine == 'ray' else ''})"


def _table(dataset: str, metric: str, cells: list[Cell]) -> Table:
    protocol = PROTOCOLS[dataset]
    times = protocol.shown_times if metric == protocol.metric else 1
    request = cells[0].request
    papers = [known(cell.request, metric) for cell in cells]
    summaries = [cell.summary if metric == cell.metric else summary(cell.others[metric]) for cell in cells]
    columns = {name: _column(summaries, papers, name, times) for name in ("mean", "median", "best")}
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


def known(request: Request, metric: str) -> Published | None:
    """What the paper prints, where it has the same."""
    title = METHODS[request.method].title
    every = (published(table, name, title, metric) for table, name in _where_published(request, metric))
    return next((one for one in every if one is not None), None)


def _where_published(request: Request, metric: str) -> list[tuple[str, str]]:
    """Tables of the paper, and what the data set is called there."""
    protocol, row, dataset = PROTOCOLS[request.dataset], METHODS[request.method], request.dataset
    if request.split is not None:
        return []
    if request.variant != USUAL:
        return _where_studied(request, metric)
    if request.steps != protocol.steps or metric not in protocol.published:
        return []
    if row.search is None:
        return [(table, dataset) for table in (protocol.published[metric], *TABLES_OF_FAR_SIGHTED)]
    if metric != protocol.metric or request.replicas != row.search.replicas:
        return []
    return [(table, dataset) for table in TABLES_OF_SEARCHES[row.search.name]]


def _where_studied(request: Request, metric: str) -> list[tuple[str, str]]:
    protocol, (study, _, part) = PROTOCOLS[request.dataset], request.variant.place.partition("/")
    table = TABLES_OF_STUDIES.get(study, {}).get(metric)
    usual_steps, name = {
        "short-horizon": (protocol.short_steps, f"{request.steps} steps"),
        "validation-size": (protocol.steps, part.replace("-", "/")),
    }.get(study, (0, ""))
    return [(table, f"{request.dataset} {name}")] if table and request.steps == usual_steps else []


def _column(found: list[Summary], papers: list[Published | None], name: str, times: int) -> list[Estimate]:
    ours = [one._asdict() for one in found]
    values = [times * one[name] for one in ours]
    errors = [times * one.get(f"{name}_se", math.nan) for one in ours]
    printed = [one._asdict() if one is not None else {} for one in papers]
    bold = near_best(values, errors)
    return [
        Estimate(value, se, is_bold, paper.get(name), paper.get(f"{name}_se", math.nan))
        for value, se, is_bold, paper in zip(values, errors, bold, printed, strict=True)
    ]


# --- numbers as text ---

HUGE = 1e7  # from here on, nobody counts digits


def number(value: float, se: float = math.nan) -> str:
    """As many digits as the standard error allows: one of the error's own; three without one.

    >>> number(0.9634, 0.0812), number(23.4, 2.1), number(4712.0, 300.0), number(0.1236), number(4.2e17, 3e16)
    ('0.96 ± 0.08', '23 ± 2', '4700 ± 300', '0.124', '4e+17 ± 3e+16')
    """
    if not math.isfinite(value):
        return "–"
    if abs(value) >= HUGE:
        return f"{value:.0e} ± {se:.0e}" if math.isfinite(se) else f"{value:.0e}"
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
