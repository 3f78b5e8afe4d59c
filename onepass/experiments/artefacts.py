"""What can be reproduced: one table. An artefact needs some cells, and makes files of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from onepass.experiments import runtimes, tables, writing
from onepass.experiments.methods import ALONE, METHODS, SEARCHES
from onepass.experiments.runs import Cell
from onepass.experiments.writing import Grid

Files = Callable[[Sequence[Cell], Path], list[Path]]
Names = tuple[str, ...]

UCI = (
    "uci-boston",
    "uci-concrete",
    "uci-energy",
    "kin8nm",
    "uci-naval",
    "uci-power",
    "uci-wine",
    "uci-yacht",
)
IN_THE_PAPER = ("uci-energy", "kin8nm", "uci-power")
ENERGY = ("uci-energy",)
FASHION = ("fashion-mnist", "fashion-mnist-batchnorm")
LARGER = (*FASHION, "penn-treebank")  # those whose runtimes the paper shows
REGRESSION, CLASSIFICATION = ("diabetes",), ("digits",)  # they need no download
BAYESIAN = ("bayesian-optimisation",)
ASHA = tuple(name for name in SEARCHES if name.startswith("asha"))
PBT = tuple(name for name in SEARCHES if name.startswith("pbt"))
IN_TIME = tuple(name for name in METHODS if METHODS[name].best_of == 1)  # whose best can be followed over time
TUNING_LR = tuple(name for name, row in METHODS.items() if row.tunes("lr"))


@dataclass(frozen=True)
class Artefact:
    """A table or a figure.

    Attributes:
        about: one line for people.
        make: writes files called by the first path plus a suffix, and says which.
        datasets: unless somebody wants others; ``every`` of them for ``--datasets all``.
        trial: other data sets that it takes if asked for, to try it out.
        only: method -> the data sets that it is for, if not for all.
        show: prints a table on a terminal.
        figure: the one of `figures.FIGURES` that it draws, if it is one of them.
    """

    about: str
    make: Files
    datasets: Names
    every: Names
    methods: Names = ALONE
    trial: Names = ()
    only: Mapping[str, Names] = field(default_factory=dict)
    show: Callable[[Sequence[Cell]], None] | None = None
    figure: str | None = None

    def takes(self, dataset: str, method: str) -> bool:
        fits = dataset in self.only.get(method, (dataset,)) or dataset in self.trial
        return method in self.methods and fits


def results(about: str, datasets: Names, every: Names = (), trial: Names = (), methods: Names = ALONE) -> Artefact:
    """Tables of final losses."""
    return Artefact(about, _result_files, datasets, every or datasets, methods, trial, show=_show_results)


def figure(kind: str, datasets: Names, every: Names = (), trial: Names = (), methods: Names = ALONE) -> Artefact:
    """One of `figures.FIGURES`."""
    return Artefact(ABOUT[kind], _figure_files(kind), datasets, every or datasets, methods, trial, figure=kind)


def _show_results(cells: Sequence[Cell]) -> None:
    tables.show(tables.results(cells))


def _result_files(cells: Sequence[Cell], path: Path) -> list[Path]:
    found = tables.results(cells)
    return _table_files(list(map(tables.grid, found)), tables.legend(found), path)


def _runtime_files(cells: Sequence[Cell], path: Path) -> list[Path]:
    written = _table_files(list(map(runtimes.grid, runtimes.some(cells))), runtimes.legend(cells), path)
    return written + _figure_files("runtimes")(cells, path)


def _table_files(grids: Sequence[Grid], legend: str, path: Path) -> list[Path]:
    written = {
        ".md": "\n".join(map(writing.to_markdown, grids)) + f"\n{legend}\n",
        ".tex": "\n".join(map(writing.to_latex, grids)),
        ".html": "\n".join(map(writing.to_html, grids)),
    }
    for suffix, text in written.items():
        path.with_suffix(suffix).write_text(text)
    return [path.with_suffix(suffix) for suffix in written]


def _figure_files(kind: str) -> Files:
    def make(cells: Sequence[Cell], path: Path) -> list[Path]:
        from onepass.experiments import figures  # needs matplotlib

        return figures.save(figures.figure_of(kind, cells), path)

    return make


ABOUT = {
    "curves": "median test loss over time",
    "cdfs": "distributions of final test losses",
    "learning-rates": "sample paths of learning rates",
    "search-curves": "the best of many starts, and of searches, over wall-clock time",
}

ARTEFACTS: dict[str, Artefact] = {
    "uci": results("Table 1: final test losses of all methods", IN_THE_PAPER, UCI, REGRESSION),
    "uci-curves": figure("curves", IN_THE_PAPER, UCI, REGRESSION),
    "uci-cdfs": figure("cdfs", IN_THE_PAPER, UCI, REGRESSION),
    "uci-learning-rates": figure("learning-rates", IN_THE_PAPER, UCI, REGRESSION, TUNING_LR),
    "fashion-mnist": results("Table 2: final test losses and errors", ("fashion-mnist",), trial=CLASSIFICATION),
    "fashion-mnist-batchnorm": results("the same with batch norm", ("fashion-mnist-batchnorm",), trial=CLASSIFICATION),
    "fashion-mnist-curves": figure("curves", FASHION, trial=CLASSIFICATION),
    "fashion-mnist-cdfs": figure("cdfs", FASHION, trial=CLASSIFICATION),
    "penn-treebank": results("Table 2: final test perplexities", ("penn-treebank",)),
    "penn-treebank-curves": figure("curves", ("penn-treebank",)),
    "penn-treebank-cdfs": figure("cdfs", ("penn-treebank",)),
    "bayesian-optimisation": results(
        "Bayesian optimisation: 32 repetitions of 30 trainings",
        IN_THE_PAPER,
        (*UCI, "fashion-mnist"),
        REGRESSION,
        BAYESIAN,
    ),
    "asha": results("successive halving, with fixed and with tuned values inside", ENERGY, UCI, REGRESSION, ASHA),
    "pbt": results("population-based training, likewise", ENERGY, UCI, REGRESSION, PBT),
    "search-curves": Artefact(
        ABOUT["search-curves"],
        _figure_files("search-curves"),
        IN_THE_PAPER,
        (*UCI, "fashion-mnist"),
        IN_TIME,
        REGRESSION,
        only=dict.fromkeys((*ASHA, *PBT), ENERGY),
        figure="search-curves",
    ),
    "runtimes": Artefact(
        "what a run costs: distributions of its time, and how it compares with Random's",
        _runtime_files,
        LARGER,
        (*UCI, *LARGER),
        runtimes.ONE_START,
        (*REGRESSION, *CLASSIFICATION),
        show=runtimes.show,
        figure="runtimes",
    ),
}
