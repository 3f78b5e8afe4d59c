"""What can be reproduced: one table. An artefact needs some cells, and makes files of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onepass.experiments import runtimes, tables, writing
from onepass.experiments.methods import ALONE, FAR_SIGHTED, METHODS, SEARCHES
from onepass.experiments.runs import Cell
from onepass.experiments.studies import grids, plans
from onepass.experiments.studies.plans import Plan
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
IN_TIME = tuple(name for name in (*ALONE, *SEARCHES) if METHODS[name].best_of == 1)  # whose best can be followed
TUNING_LR = tuple(name for name in ALONE if METHODS[name].tunes("lr"))
WITHOUT_MOMENTUM = ("random", "lorraine", "baydin", "one-pass-wd-lr", "one-pass")  # those that do not need one


@dataclass(frozen=True)
class Artefact:
    """A table or a figure.

    Attributes:
        about: one line for people.
        make: writes files called by the first path plus a suffix, and says which.
        datasets: unless somebody wants others; ``every`` of them for ``--datasets all``.
        trial: other data sets that it takes if asked for, to try it out.
        only: method -> the data sets that it is for, if not for all.
        plan: the cells that it needs for one data set and one method.
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
    plan: Plan = plans.usual
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


def study(name: str, about: str, plan: Plan, methods: Names, make: Files | None = None, **others: Any) -> Artefact:
    """One of `studies.pictures.PICTURES`."""
    settings = {"datasets": ENERGY, "every": ENERGY, "trial": REGRESSION, **others}
    return Artefact(about, make or _picture_files(name), methods=methods, plan=plan, **settings)


def idea(name: str, about: str) -> Artefact:
    """A picture for which nothing is trained."""
    return Artefact(about, _picture_files(name), (), (), ())


def _show_results(cells: Sequence[Cell]) -> None:
    tables.show(tables.results(cells))


def _result_files(cells: Sequence[Cell], path: Path) -> list[Path]:
    found = tables.results(cells)
    return _table_files(list(map(tables.grid, found)), tables.legend(found), path)


def _runtime_files(cells: Sequence[Cell], path: Path) -> list[Path]:
    written = _table_files(list(map(runtimes.grid, runtimes.some(cells))), runtimes.legend(cells), path)
    return written + _figure_files("runtimes")(cells, path)


def _table_files(every: Sequence[Grid], legend: str, path: Path) -> list[Path]:
    written = {
        ".md": "\n".join(map(writing.to_markdown, every)) + f"\n{legend}\n",
        ".tex": "\n".join(map(writing.to_latex, every)),
        ".html": "\n".join(map(writing.to_html, every)),
    }
    for suffix, text in written.items():
        path.with_suffix(suffix).write_text(text)
    return [path.with_suffix(suffix) for suffix in written]


def _figure_files(kind: str) -> Files:
    def make(cells: Sequence[Cell], path: Path) -> list[Path]:
        from onepass.experiments import figures  # needs matplotlib

        return figures.save(figures.figure_of(kind, cells), path)

    return make


def _picture_files(name: str) -> Files:
    def make(cells: Sequence[Cell], path: Path) -> list[Path]:
        from onepass.experiments import figures
        from onepass.experiments.studies import pictures  # needs matplotlib

        return figures.save(pictures.picture_of(name, cells), path)

    return make


def _sensitivity_tables(cells: Sequence[Cell]) -> list[Grid]:
    return grids.tables(grids.sensitivity(cells))


def _accuracy_tables(cells: Sequence[Cell]) -> list[Grid]:
    return [*grids.precision(cells), *grids.tables(grids.hypergradient_accuracy(cells))]


def _grid_files(name: str, of: Callable[[Sequence[Cell]], list[Grid]]) -> Files:
    def make(cells: Sequence[Cell], path: Path) -> list[Path]:
        return _table_files(of(cells), "", path) + _picture_files(name)(cells, path)

    return make


def _validation_files(cells: Sequence[Cell], path: Path) -> list[Path]:
    return _result_files(cells, path) + _picture_files("validation-size")(cells, path)


def _horizon_files(cells: Sequence[Cell], path: Path) -> list[Path]:
    """All tables in one file; a picture of the short problems, and one of each data set at its usual length."""
    written, parts = _result_files(cells, path), dict[str, list[Cell]]()
    for cell in cells:
        truncated = cell.request.variant.place == plans.TRUNCATED
        parts.setdefault("truncated" if truncated else cell.request.dataset, []).append(cell)
    for part, some in parts.items():
        written += _picture_files("short-horizon")(some, path.with_name(f"{path.name}-{part}"))
    return written


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
    "toy": idea("toy", "the method on two losses of one weight and one hyperparameter"),
    "pseudo-loss": idea("pseudo-loss", "the learning rate scales the landscape, and not the step"),
    "hypergradient-accuracy": study(
        "hypergradient-accuracy",
        "error of the first hypergradient over T and i, in single and double precision; 50 starts, 220 short cells",
        plans.hypergradient_accuracy,
        (plans.SERIES, plans.EXACT),
        _grid_files("hypergradient-accuracy", _accuracy_tables),
    ),
    "validation-size": study(
        "validation-size",
        "four sizes of the validation set, with one learning rate and with one a weight",
        plans.validation_size,
        ("one-pass-wd-lr-m", "one-pass-wd-hdlr-m"),
        _validation_files,
        show=_show_results,
    ),
    "trajectories": study(
        "trajectories",
        "where tuned starts go, over a landscape of those that are not; 50 and 500 starts, no momentum",
        plans.trajectories,
        WITHOUT_MOMENTUM,
    ),
    "short-horizon": study(
        "short-horizon",
        "exact hypergradients through 200 steps, and through all of them, on short problems and on the usual ones",
        plans.short_horizon,
        (*(name for name in ALONE if "lookback" not in name), *FAR_SIGHTED),
        _horizon_files,
        datasets=(*IN_THE_PAPER, "fashion-mnist"),
        every=(*IN_THE_PAPER, "fashion-mnist"),
        trial=(*REGRESSION, *CLASSIFICATION),
        only={plans.MEDIUM: ("fashion-mnist", "digits"), plans.FULL: ("uci-energy", "diabetes")},
        show=_show_results,
    ),
    "sensitivity": study(
        "sensitivity",
        "median final loss over T and i, from 1 to 10; 400 hyper steps, 100 starts, 156 cells",
        plans.sensitivity,
        (plans.UNTUNED, plans.SERIES, plans.EXACT),
        _grid_files("sensitivity", _sensitivity_tables),
    ),
}

ABOUT_ALL = "every one of these, in an order that shows something early"
# All of them, for whoever wants to see something early: cheap ones first, and searches and larger networks last.
EVERYTHING: Names = (
    "toy",
    "pseudo-loss",
    "hypergradient-accuracy",
    "uci",
    "uci-curves",
    "uci-cdfs",
    "uci-learning-rates",
    "validation-size",
    "trajectories",
    "sensitivity",
    "bayesian-optimisation",
    "asha",
    "pbt",
    "search-curves",
    "fashion-mnist",
    "fashion-mnist-curves",
    "fashion-mnist-cdfs",
    "fashion-mnist-batchnorm",
    "short-horizon",
    "penn-treebank",
    "penn-treebank-curves",
    "penn-treebank-cdfs",
    "runtimes",
)
