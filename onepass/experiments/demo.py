"""``onepass demo``: the library's main job, on data that comes with scikit-learn."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onepass.experiments.protocol import PROTOCOLS, STARTS, title_of
from onepass.experiments.runs import Cell, Request, compute, finished
from onepass.experiments.tables import number

ABOUT = (
    "Two small data sets from random starts, many of them terrible: trained plainly, and tuned in one pass. "
    "Takes about a minute on 2 cores; nothing is downloaded."
)
DEMO_SETS = ("diabetes", "digits")
DEMO_METHODS = ("random", "one-pass")


def run(out: Path, replicas: int) -> list[Cell]:
    """Train, show a table, draw the picture, write the report."""
    from onepass.experiments import figures, report
    from onepass.experiments.writing import terminal

    console = terminal()
    ranges = ", ".join(f"{name} in {draw.low:g} .. {draw.high:g}" for name, draw in STARTS.items())
    console.print(f"{replicas} random starts each: {ranges}", highlight=False)
    found = []
    for dataset in DEMO_SETS:
        for method in DEMO_METHODS:
            request = Request(dataset, method, replicas, PROTOCOLS[dataset].steps)
            known = f" (finished before, in {out})" if finished(request, out) else ""
            print(f"{title_of(dataset)}, {method}{known}", file=sys.stderr)
            found.append(compute(request, out, progress=True))
    console.print(_table(found))
    picture = figures.save(figures.figure_of("demo", found), out / "demo")[0]
    console.print(f"how hyperparameters were drawn towards the good valley: {picture}", soft_wrap=True)
    console.print(f"report: {report.write(out)}", soft_wrap=True)
    return found


def _table(cells: Sequence[Cell]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table("", "", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("median", "mean", "worst", "diverged", "time"):
        table.add_column(name, justify="right")
    for plain, tuned in zip(cells[::2], cells[1::2], strict=True):
        for cell, label in ((plain, "plain"), (tuned, "one-pass")):
            found = cell.summary
            losses = [number(value) for value in (found.median, found.mean, found.worst)]
            ratio = "1" if cell is plain else f"x {tuned.seconds / plain.seconds:.1f}"
            title = title_of(plain.request.dataset) if cell is plain else f"[not bold]{cell.metric}[/]"
            style = "" if cell is plain else "bold"
            table.add_row(title, label, *losses, f"{found.diverged} of {found.starts}", ratio, style=style)
    return table
