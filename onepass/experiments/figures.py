"""Figures of finished cells: panels put together, as files."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure, FigureBase, SubFigure
from matplotlib.lines import Line2D
from PIL import Image

from onepass.experiments import runtimes
from onepass.experiments.methods import METHODS
from onepass.experiments.panels import (
    INK,
    MEAN,
    MEDIAN,
    NAMES,
    TUNED,
    UNTUNED,
    distribution,
    draw_distributions,
    draw_incumbents,
    draw_median_curves,
    draw_paths,
    draw_runtimes,
    draw_valley,
    incumbent,
    log_axis,
    loss_label,
    median_curve,
    paths,
    span,
    style_of,
    ticks,
    valley,
)
from onepass.experiments.protocol import title_of
from onepass.experiments.runs import Cell, UsageError
from onepass.experiments.statistics import Array

Grouped = Mapping[str, Mapping[str, Cell]]  # data set -> method -> cell

SEARCHING = "search-curves"
LOSSES = "viridis"  # dark for low losses: on white, bad starts fade


def figure_of(name: str, cells: Iterable[Cell]) -> Figure:
    """The figure of that name in `FIGURES`, of all these cells.

    >>> figure_of("nonsense", [])
    Traceback (most recent call last):
    ValueError: figure must be one of curves, cdfs, learning-rates, search-curves, runtimes, demo, but got 'nonsense'
    """
    if name not in FIGURES:
        raise ValueError(f"figure must be one of {', '.join(FIGURES)}, but got {name!r}")
    groups = grouped(name, cells)
    figure = FIGURES[name](groups) if groups else None
    if figure is None:
        raise UsageError(f"there are no finished runs that the figure {name} could show")
    return figure


def grouped(name: str, cells: Iterable[Cell]) -> Grouped:
    """Those that the figure of that name is for."""
    groups: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        if METHODS[cell.request.method].search is not None and name != SEARCHING:
            continue  # they have no curves of single starts
        groups.setdefault(cell.request.dataset, {})[cell.request.method] = cell
    return groups


def save(figure: Figure, path: Path) -> list[Path]:
    """As PATH.png and PATH.pdf: each under another name first, so that a file that is there is whole."""
    saved = []
    for kind in ("png", "pdf"):
        target = path.with_name(f"{path.name}.{kind}")
        beside = path.with_name(f".{path.name}.{kind}.partial")
        beside.write_bytes(rendered(figure, kind))
        os.replace(beside, target)
        saved.append(target)
    return saved


def rendered(figure: Figure, kind: str) -> bytes:
    """A file of that kind: "png", "pdf" or "svg". The same figure gives the same bytes."""
    undated: dict[str, dict[str, Any]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": "onepass"}):
        figure.savefig(buffer, format=kind, dpi=150, metadata=undated.get(kind))
    if kind != "png":
        return buffer.getvalue()
    smaller = io.BytesIO()
    Image.open(buffer).convert("RGB").quantize(256).save(smaller, "png", optimize=True)  # to a third of its size
    return smaller.getvalue()


def _panel_a_dataset(of: Callable[[Cell], Any], draw: Callable[[Axes, Any, str], None], groups: Grouped) -> Figure:
    rows, columns = _shape(len(groups))
    figure = Figure(figsize=(max(3.6 * columns, 6), 3.0 * rows + 0.9), layout="constrained")
    for axes, (dataset, cells) in zip(_panels(figure, rows, columns, len(groups)), groups.items(), strict=True):
        draw(axes, {method: of(cell) for method, cell in cells.items()}, loss_label(dataset))
        axes.set_title(title_of(dataset))
    methods = [method for method in METHODS if any(method in cells for cells in groups.values())]
    handles = [Line2D([], [], label=METHODS[method].label, **style_of(method)) for method in methods]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=max(2, int(figure.get_figwidth() / 2.4)), frameon=False
    )
    return figure


def _searches_figure(groups: Grouped) -> Figure | None:
    found = followed(groups)
    return _panel_a_dataset(incumbent, draw_incumbents, found) if found else None


def followed(groups: Grouped) -> Grouped:
    """Whatever can be followed over time, where there is a search among it. Cells of older versions have no times."""
    timed = {
        dataset: {m: cell for m, cell in cells.items() if METHODS[m].best_of == 1 and "seconds" in cell.curves()}
        for dataset, cells in groups.items()
    }
    return {
        dataset: cells
        for dataset, cells in timed.items()
        if any(METHODS[method].search is not None for method in cells)
    }


def _learning_rates_figure(groups: Grouped) -> Figure | None:
    """A block of panels a data set, one panel a method that tunes the learning rate."""
    found = {
        dataset: {method: paths(cell) for method, cell in cells.items() if METHODS[method].tunes("lr")}
        for dataset, cells in groups.items()
    }
    found = {dataset: panels for dataset, panels in found.items() if panels}
    if not found:
        return None
    common = span([path.values for panels in found.values() for path in panels.values()], highest=100)
    _, columns = _shape(max(len(panels) for panels in found.values()))
    heights = [-(-len(panels) // columns) for panels in found.values()]
    size = 2.9 * columns + 1, sum(2.1 * rows + 0.6 for rows in heights)
    figure = Figure(figsize=size, layout="constrained")
    blocks = figure.subfigures(len(found), 1, squeeze=False, height_ratios=[2.1 * rows + 0.6 for rows in heights]).flat
    for block, rows, (dataset, panels) in zip(blocks, heights, found.items(), strict=True):
        colours = _colours([path.losses for path in panels.values()])
        every = _panels(block, rows, columns, len(panels))
        for axes, (method, path) in zip(every, panels.items(), strict=True):
            draw_paths(axes, path, colours)
            log_axis(axes, "y", *common)
            axes.set_title(METHODS[method].label)
        block.supxlabel("weight steps")
        block.supylabel(NAMES["lr"])
        _colour_bar(block, colours, every, dataset)
    return figure


def _runtimes_figure(groups: Grouped) -> Figure | None:
    """A panel a data set, a row a method."""
    found = runtimes.results([cell for cells in groups.values() for cell in cells.values()])
    if not found:
        return None
    methods = [method for method in METHODS if any(method in one.seconds for one in found)]
    rows, columns = len(found) if len(found) < 2 else -(-len(found) // 2), min(len(found), 2)
    figure = Figure(figsize=(1.8 + 4.2 * columns, (0.34 * len(methods) + 1.3) * rows), layout="constrained")
    for place, (axes, one) in enumerate(zip(_panels(figure, rows, columns, len(found)), found, strict=True)):
        draw_runtimes(axes, one, methods)
        axes.set_title(f"{title_of(one.dataset)}\n")
        axes.text(0.5, 1.02, one.note, transform=axes.transAxes, ha="center", va="bottom", fontsize="small")
        axes.tick_params(axis="y", length=0, labelleft=place % columns == 0)
    handles = [Line2D([], [], color=INK, linestyle="", **look) for look in (MEAN, MEDIAN)]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    return figure


def _demo_figure(groups: Grouped) -> Figure | None:
    """A row of two panels a data set."""
    found = {dataset: cells for dataset, cells in groups.items() if UNTUNED in cells and TUNED in cells}
    if not found:
        return None
    figure = Figure(figsize=(10, 4.2 * len(found) + 0.5), layout="constrained")
    blocks = figure.subfigures(len(found), 1, squeeze=False).flat
    for block, (dataset, cells) in zip(blocks, found.items(), strict=True):
        valleys = [valley(cells[UNTUNED], cells[TUNED], name) for name in ("weight_decay", "momentum")]
        colours = _colours([valleys[0].losses, valleys[0].tuned_losses])
        panels = _panels(block, 1, 2, 2)
        for axes, one in zip(panels, valleys, strict=True):
            draw_valley(axes, one, colours)
        _colour_bar(block, colours, panels, dataset)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    return figure


def _shape(panels: int) -> tuple[int, int]:
    """Rows and columns: at most four of these, and as few holes as can be."""
    columns = panels if panels <= 4 else 4 if panels in (7, 8) or panels > 9 else 3
    return -(-panels // columns), columns


def _panels(figure: FigureBase, rows: int, columns: int, wanted: int) -> list[Axes]:
    every = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in every[wanted:]:
        axes.remove()
    for axes in every[:wanted]:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#DDDDDD", linewidth=0.5)
        axes.set_axisbelow(True)
    return every[:wanted]


def _colours(losses: Sequence[Array]) -> ScalarMappable:
    return ScalarMappable(LogNorm(*span(losses), clip=True), LOSSES)


def _colour_bar(block: SubFigure, colours: ScalarMappable, panels: list[Axes], dataset: str) -> None:
    block.suptitle(title_of(dataset), fontweight="bold")
    locator, formatter = ticks(*colours.get_clim())
    label = f"final {loss_label(dataset)}"
    bar = block.colorbar(colours, ax=panels, label=label, extend="max", ticks=locator, format=formatter)
    bar.minorticks_off()


FIGURES: dict[str, Callable[[Grouped], Figure | None]] = {
    "curves": partial(_panel_a_dataset, median_curve, draw_median_curves),
    "cdfs": partial(_panel_a_dataset, distribution, draw_distributions),
    "learning-rates": _learning_rates_figure,
    SEARCHING: _searches_figure,
    "runtimes": _runtimes_figure,
    "demo": _demo_figure,
}
