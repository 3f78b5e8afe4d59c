"""What can be reproduced: one table. An artefact needs some cells, and makes files of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from onepass.experiments import tables
from onepass.experiments.methods import METHODS
from onepass.experiments.runs import Cell

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
TUNING_LR = tuple(name for name, row in METHODS.items() if row.tunes("lr"))


@dataclass(frozen=True)
class Artefact:
    """A table or a figure.

    Attributes:
        about: one line for people.
        datasets: unless somebody wants others; ``every`` of them for ``--datasets all``.
        make: writes files called by the first path plus a suffix, and says which.
    """

    about: str
    make: Callable[[Sequence[Cell], Path], list[Path]]
    datasets: tuple[str, ...]
    every: tuple[str, ...]
    methods: tuple[str, ...] = tuple(METHODS)


def table_files(cells: Sequence[Cell], path: Path) -> list[Path]:
    found = tables.results(cells)
    written = {
        ".md": "\n".join(map(tables.to_markdown, found)) + f"\n{tables.legend(found)}\n",
        ".tex": "\n".join(map(tables.to_latex, found)),
        ".html": "\n".join(map(tables.to_html, found)),
    }
    for suffix, text in written.items():
        path.with_suffix(suffix).write_text(text)
    return [path.with_suffix(suffix) for suffix in written]


def figure_files(name: str) -> Callable[[Sequence[Cell], Path], list[Path]]:
    def make(cells: Sequence[Cell], path: Path) -> list[Path]:
        from onepass.experiments import figures  # needs matplotlib

        return figures.save(figures.figure_of(name, cells), path)

    return make


ARTEFACTS: dict[str, Artefact] = {
    "uci": Artefact("Table 1: final test losses of all methods", table_files, IN_THE_PAPER, UCI),
    "uci-curves": Artefact("median test loss over time", figure_files("uci-curves"), IN_THE_PAPER, UCI),
    "uci-cdfs": Artefact("distributions of final test losses", figure_files("uci-cdfs"), IN_THE_PAPER, UCI),
    "uci-learning-rates": Artefact(
        "sample paths of learning rates", figure_files("uci-learning-rates"), IN_THE_PAPER, UCI, TUNING_LR
    ),
}
