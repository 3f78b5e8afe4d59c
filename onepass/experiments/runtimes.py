"""What a run costs, by the clock: how it is taken apart, and the table of it.

All starts are trained together, so that a single one has no time of its own. But each part of a run, from one look at
the test loss to the next, tells how long a whole run would take at its pace; that, divided by the starts, is what
averages and distributions are of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from onepass.experiments import writing
from onepass.experiments.methods import ALONE, METHODS
from onepass.experiments.protocol import title_of
from onepass.experiments.runs import Cell, UsageError
from onepass.experiments.statistics import Array
from onepass.experiments.tables import note, number, settings
from onepass.experiments.writing import Grid, Text

PLAIN = "random"  # what the others are compared with
ONE_START = tuple(name for name in ALONE if METHODS[name].best_of == 1)  # of the rest, several make one result


class Runtimes(NamedTuple):
    """Of one data set, by one size of runs and one device.

    Attributes:
        seconds: method -> of a whole run, for each start; one a part of the run.
    """

    dataset: str
    note: str
    seconds: dict[str, Array]

    def ratio(self, method: str, average: Any = np.median) -> float:
        """How much longer than `PLAIN` it takes."""
        if PLAIN not in self.seconds:
            return float("nan")
        return float(average(self.seconds[method]) / average(self.seconds[PLAIN]))

    @property
    def unit(self) -> tuple[str, float]:
        """In which the numbers are easily read: its name, and how many are a second."""
        slowest = max(float(np.median(seconds)) for seconds in self.seconds.values())
        return ("seconds", 1.0) if slowest >= 1 else ("milliseconds", 1000.0)


def results(cells: Sequence[Cell]) -> list[Runtimes]:
    """Of what can be compared: the same data, size of runs and device."""
    groups: dict[Any, dict[str, Array]] = {}
    for cell in _timed(cells):
        seconds = cell.runtimes()
        if len(seconds):
            key = cell.request.dataset, settings(cell.request), note(cell.request, cell.device)
            groups.setdefault(key, {})[cell.request.method] = seconds
    return [Runtimes(dataset, about, seconds) for (dataset, _, about), seconds in groups.items()]


def _timed(cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell.request.method in ONE_START]


def grid(found: Runtimes, narrow: bool = False) -> Grid:
    """All there is; in a narrow terminal, one ratio alone."""
    unit, times = found.unit
    head = ["method", "mean", "x Random", "median", "x Random", "parts"]
    body = [
        [
            Text(METHODS[method].label),
            Text(number(times * float(seconds.mean()))),
            Text(_ratio(found.ratio(method, np.mean))),
            Text(number(times * float(np.median(seconds)))),
            Text(_ratio(found.ratio(method))),
            Text(str(len(seconds))),
        ]
        for method, seconds in found.seconds.items()
    ]
    if narrow:
        few = (0, 1, 3, 4)
        head, body = [head[i] for i in few], [[row[i] for i in few] for row in body]
    return Grid(f"{title_of(found.dataset)}: {unit} per start, whole run", found.note, head, body)


def _ratio(value: float) -> str:
    return f"{value:.2f}" if np.isfinite(value) else ""


LEGEND = (
    "Starts are trained together: a run's time is divided by their number. Averages are over its parts, each taken for "
    "the whole; the first has the preparation in it, which a median does not see. Looks at the test loss, and "
    "checkpoints, are not counted."
)


def legend(cells: Sequence[Cell]) -> str:
    """What to know to read these tables, and which cells they lack."""
    return f"{LEGEND} {missing}" if (missing := left_out(cells)) else LEGEND


def left_out(cells: Sequence[Cell]) -> str:
    """
    >>> left_out([])
    ''
    """
    timeless = [f"{c.request.dataset}, {c.request.method}" for c in _timed(cells) if not len(c.runtimes())]
    if not timeless:
        return ""
    shown = "; ".join(timeless[:3]) + (f" and {len(timeless) - 3} more" if len(timeless) > 3 else "")
    return f"Left out, as an older version computed them and kept no times: {shown}."


def some(cells: Sequence[Cell]) -> list[Runtimes]:
    """The same as `results`, but there must be some."""
    found = results(cells)
    if not found:
        raise UsageError(
            f"{left_out(cells) or 'There are no finished runs.'} Nothing is left; give another --out to compute anew"
        )
    return found


def show(cells: Sequence[Cell], console: Any = None) -> None:
    """On a terminal."""
    found = some(cells)
    writing.show(lambda narrow: [grid(one, narrow) for one in found], legend(cells), console)
