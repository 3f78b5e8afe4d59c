"""The paper's own numbers, from its tables (``published.csv``)."""

from __future__ import annotations

import csv
from functools import cache
from importlib.resources import files
from typing import NamedTuple


class Published(NamedTuple):
    """One row of a table of the paper, in the units that it prints."""

    mean: float
    mean_se: float
    median: float
    median_se: float
    best: float


@cache
def _rows() -> list[dict[str, str]]:
    text = (files("onepass.experiments") / "published.csv").read_text()
    return list(csv.DictReader(text.splitlines()))


# Search -> the tables of the paper that have it.
TABLES_OF_SEARCHES = {
    "bayesian-optimisation": ("AverageResults_UCI_BayesOpt", "AverageResults_Fashion-MNIST_BayesOpt"),
    "asha": ("AverageResults_ASHA",),
    "pbt": ("AverageResults_PBT",),
}


# Study -> metric -> the table that has it, under the name of the data set and something behind it.
TABLES_OF_STUDIES = {
    "short-horizon": {
        "test MSE": "AverageResults_UCI_LongDiffThroughOpt_Standalone",
        "test cross-entropy": "AverageMixed_Fashion-MNIST_LongDiffThroughOpt_Standalone",
        "test error": "AverageMixed_Fashion-MNIST_LongDiffThroughOpt_Standalone",
    },
    "validation-size": {"test MSE": "AverageResults_UCI_Energy_ValidationProportions"},
}
# Those that have further methods beside all that the first tables have.
TABLES_OF_FAR_SIGHTED = (
    "AverageMixed_Fashion-MNIST_LongDiffThroughOpt_Medium",
    "AverageResults_UCI_Energy_LongDiffThroughOpt_Full",
)


def published(table: str, dataset: str, title: str, metric: str = "") -> Published | None:
    """What the paper prints for a data set and a method, called as the paper calls it.

    ``metric`` says which, where a table has several.

    >>> published("AverageResults_UCI", "uci-energy", "Ours_WD+LR+M").median
    0.3
    """
    for row in _rows():
        named = (row["table"], row["dataset"], row["method"]) == (table, dataset, title)
        if named and row["metric"].startswith(metric):
            return Published(*(float(row[name]) for name in Published._fields))
    return None
