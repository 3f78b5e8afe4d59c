"""Studies over intervals ``T`` and look-backs ``i``: one number for each pair, by one method after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from onepass.experiments.methods import METHODS
from onepass.experiments.protocol import title_of
from onepass.experiments.runs import Cell
from onepass.experiments.statistics import Array
from onepass.experiments.studies.plans import EXACT, PRECISIONS, SERIES, UNTUNED
from onepass.experiments.variants import Variant
from onepass.experiments.writing import Grid, Text

NAMES = {"lr": "learning rate", "weight_decay": "weight decay", "momentum": "momentum"}


class HeatMap(NamedTuple):
    """``numbers[T - 1, i - 1]``, NaN where there is none; one column where nothing looks back."""

    title: str
    numbers: Array


class HeatMaps(NamedTuple):
    """Some that belong together: of the same data and the same quantity.

    Attributes:
        note: how many starts, where.
        times: what the numbers that are shown have been multiplied by.
    """

    title: str
    note: str
    maps: list[HeatMap]
    times: int = 1


def sensitivity(cells: Sequence[Cell]) -> list[HeatMaps]:
    """Median final test losses of a data set by a method, after the same number of hyper steps everywhere."""
    found = []
    for dataset in _datasets(cells):
        own = [cell for cell in cells if cell.request.dataset == dataset]
        untuned = [cell for cell in own if cell.request.method == UNTUNED]
        maps = [HeatMap(METHODS[UNTUNED].label, _along(cell)) for cell in untuned]
        for method in (SERIES, EXACT):
            some = [cell for cell in own if cell.request.method == method]
            if some:
                maps.append(HeatMap(METHODS[method].label, _crossed(some, lambda cell: cell.summary.median)))
        times = 1000 if min(np.nanmin(one.numbers, initial=np.inf) for one in maps) < 10 else 1  # as in the paper
        maps = [HeatMap(one.title, times * one.numbers) for one in maps]
        found.append(HeatMaps(f"{title_of(dataset)}: median {own[0].metric}", _note(own), maps, times))
    return found


def _along(cell: Cell) -> Array:
    """One run that is not tuned, where the intervals end: a column."""
    curves = cell.curves()
    ends = cell.request.steps // 10 * np.arange(1, 11)
    rows = np.searchsorted(curves["steps"], ends).clip(max=len(curves["steps"]) - 1)
    return np.array([[_median(losses)] for losses in curves["test"][rows]])


def _crossed(cells: Sequence[Cell], number: Callable[[Any], float]) -> Array:
    longest = max(cell.request.variant.interval or 1 for cell in cells)
    farthest = max(cell.request.variant.lookback or 1 for cell in cells)
    numbers = np.full((longest, farthest), np.nan)
    for cell in cells:
        variant = cell.request.variant
        assert variant.interval and variant.lookback
        numbers[variant.interval - 1, variant.lookback - 1] = number(cell)
    return numbers


# --- accuracy of hypergradients ---


def errors(near: Cell, exact: Cell, name: str) -> Array:
    """Of the series, as a share of the exact hypergradient; one a start whose hypergradients can be compared."""
    found, true = np.array(near.hypergradients.get(name, [])), np.array(exact.hypergradients.get(name, []))
    if found.shape != true.shape:
        return np.empty(0)
    with np.errstate(all="ignore"):
        error = np.abs(found - true) / np.abs(true)
    return np.asarray(error[np.isfinite(error)])


def hypergradient_accuracy(cells: Sequence[Cell]) -> list[HeatMaps]:
    """Per cent of error, mean and median over starts, by precision and hyperparameter."""
    found = []
    for dataset in _datasets(cells):
        own = [cell for cell in cells if cell.request.dataset == dataset]
        for average, of in (("mean", _mean), ("median", _median)):
            maps = [
                HeatMap(f"{words}, {precision}", 100 * numbers)
                for precision, double in PRECISIONS.items()
                for name, words in NAMES.items()
                if (numbers := _errors_crossed(own, double, name, of)) is not None
            ]
            title = f"{title_of(dataset)}: {average} error of first hypergradients in per cent of the exact ones"
            found.append(HeatMaps(title, _note(own, steps=False), maps))
    return [one for one in found if one.maps]


def _errors_crossed(cells: Sequence[Cell], double: bool, name: str, of: Callable[[Array], float]) -> Array | None:
    some = [cell for cell in cells if cell.request.variant.double == double and cell.hypergradients]
    true = {cell.request.variant: cell for cell in some if cell.request.method == EXACT}
    near = [cell for cell in some if cell.request.method == SERIES and cell.request.variant in true]
    return _crossed(near, lambda cell: of(errors(cell, true[cell.request.variant], name))) if near else None


def precision(cells: Sequence[Cell]) -> list[Grid]:
    """How far hypergradients in single precision are from the same ones in double."""
    return [_precision(dataset, cells) for dataset in _datasets(cells)]


def _precision(dataset: str, cells: Sequence[Cell]) -> Grid:
    own = [cell for cell in cells if cell.request.dataset == dataset and cell.hypergradients]
    body = []
    for method in (SERIES, EXACT):
        some = {cell.request.variant: cell for cell in own if cell.request.method == method}
        pairs = [
            (single, some[double])
            for variant, single in some.items()
            if (double := _in_double(variant)) in some and not variant.double
        ]
        for name, words in NAMES.items():
            apart = np.concatenate([np.empty(0), *(errors(single, double, name) for single, double in pairs)])
            if len(apart):
                numbers = [np.median(apart), np.percentile(apart, 99), apart.max()]
                body.append([Text(f"{METHODS[method].label}, {words}"), *(Text(f"{100 * x:.1g}") for x in numbers)])
    title = f"{title_of(dataset)}: first hypergradients in float32, per cent apart from those in float64"
    return Grid(title, "over all starts, T and i", ["method", "median", "99th percentile", "largest"], body)


def _in_double(variant: Variant) -> Variant:
    single, double = PRECISIONS
    return replace(variant, place=variant.place.replace(single, double), double=True)


def _mean(values: Array) -> float:
    return float(values.mean()) if len(values) else float("nan")


def _median(values: Array) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else float("nan")


# --- as tables ---


def tables(every: Sequence[HeatMaps]) -> list[Grid]:
    return [_table(found, one) for found in every for one in found.maps]


def _table(found: HeatMaps, one: HeatMap) -> Grid:
    rows, columns = one.numbers.shape
    head = ["T", *([f"i = {i}" for i in range(1, columns + 1)] if columns > 1 else ["any i"])]
    body = [[Text(str(row + 1)), *(Text(written(x)) for x in one.numbers[row])] for row in range(rows)]
    times = f" x {found.times:,}".replace(",", " ") if found.times > 1 else ""
    return Grid(f"{found.title}{times}, {one.title}", found.note, head, body)


def written(number: float) -> str:
    """
    >>> written(1234.5), written(12.34), written(1.234), written(0.01234), written(float("nan"))
    ('1234', '12', '1.2', '0.012', '')
    """
    if not np.isfinite(number):
        return ""
    return f"{number:.0f}" if abs(number) >= 10 else f"{number:.2g}"


def _datasets(cells: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(cell.request.dataset for cell in cells))


def _note(cells: Sequence[Cell], steps: bool = True) -> str:
    request, devices = cells[-1].request, ", ".join(dict.fromkeys(cell.device for cell in cells))
    interval = request.variant.interval or 1
    length = f" x {request.steps // interval} hyper steps" if steps else ""
    return f"{request.replicas} starts{length} on {devices}"
