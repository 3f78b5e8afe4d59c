"""How many rows should be for validation? Averages by method, over the share of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from onepass.experiments.methods import METHODS
from onepass.experiments.protocol import PROTOCOLS, title_of
from onepass.experiments.runs import Cell
from onepass.experiments.statistics import Array
from onepass.experiments.tables import known

USUAL_SHARE = 0.10


class Shares(NamedTuple):
    """One method: ``(shares,)`` each; what the paper prints is NaN where it prints nothing."""

    method: str
    title: str
    share: Array
    mean: Array
    mean_se: Array
    median: Array
    median_se: Array
    paper_mean: Array
    paper_median: Array


class Split(NamedTuple):
    title: str
    label: str
    shares: list[Shares]


def splits(cells: Sequence[Cell]) -> list[Split]:
    found = []
    for dataset in dict.fromkeys(cell.request.dataset for cell in cells):
        own = [cell for cell in cells if cell.request.dataset == dataset]
        methods = [name for name in METHODS if any(cell.request.method == name for cell in own)]
        shares = [_of(name, [cell for cell in own if cell.request.method == name]) for name in methods]
        found.append(Split(title_of(dataset), own[0].metric, shares))
    return found


def _of(method: str, cells: Sequence[Cell]) -> Shares:
    every = sorted(cells, key=_share)
    times = PROTOCOLS[cells[0].request.dataset].shown_times
    ours = [cell.summary for cell in every]
    papers = [known(cell.request, cell.metric) for cell in every]
    columns = {
        name: times * np.array([getattr(one, name) for one in ours])
        for name in ("mean", "mean_se", "median", "median_se")
    }
    paper = {
        f"paper_{name}": np.array([np.nan if one is None else getattr(one, name) for one in papers])
        for name in ("mean", "median")
    }
    return Shares(method, METHODS[method].label, np.array([_share(cell) for cell in every]), **columns, **paper)


def _share(cell: Cell) -> float:
    return cell.request.variant.validation or USUAL_SHARE
