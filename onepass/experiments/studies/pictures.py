"""Pictures of the studies: what each shows (in the modules beside), and how it is drawn (here)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from onepass.experiments.errors import UsageError
from onepass.experiments.methods import METHODS
from onepass.experiments.panels import (
    INK,
    NAMES,
    distribution,
    draw_distributions,
    draw_median_curves,
    log_axis,
    loss_label,
    median_curve,
    span,
    style_of,
    ticks,
)
from onepass.experiments.protocol import title_of
from onepass.experiments.runs import Cell
from onepass.experiments.studies import grids, illustrations, landscape, proportions
from onepass.experiments.studies.grids import HeatMap, HeatMaps
from onepass.experiments.studies.illustrations import PseudoLoss, Toy
from onepass.experiments.studies.landscape import Landscape
from onepass.experiments.studies.proportions import Split

BLUE, ORANGE, GREEN, PINK, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#777777"
HEAT = "viridis"


def picture_of(name: str, cells: Sequence[Cell]) -> Figure:
    """The picture of that name in `PICTURES`, of these cells.

    >>> picture_of("toy", []).get_suptitle()
    ''
    """
    figure = PICTURES[name](cells)
    if figure is None:
        raise UsageError(f"there are no finished runs that {name} could show")
    return figure


# --- ideas ---


def draw_toy(found: Toy) -> Figure:
    figure = Figure(figsize=(10, 4.9), layout="constrained")
    both = figure.subplots(1, 2, sharey=True)
    for axes, loss, title in zip(
        both,
        (illustrations.training_loss, illustrations.validation_loss),
        ("training loss", "validation loss"),
        strict=True,
    ):
        _draw_surface(axes, loss)
        _draw_trajectories(axes, found)
        axes.set(title=title, xlabel="weight $w$")
    both[0].set_ylabel("hyperparameter $λ$")
    figure.legend(*both[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure


def _draw_surface(axes: Axes, loss: Callable[[Any, Any], Any]) -> None:
    w, value = np.meshgrid(np.linspace(-3.7, 1.6, 200), np.linspace(-3.2, 1.25, 200))
    heights = loss(w, value)
    axes.contourf(w, value, np.sqrt(heights), levels=18, cmap="Greys", alpha=0.55)
    axes.contour(w, value, np.sqrt(heights), levels=18, colors="white", linewidths=0.5)
    response = np.linspace(-3.2, 1.25, 200)
    axes.plot(-np.sin(response), response, color="#E69F00", linewidth=2, label="best response $w^*(λ) = -\\sin λ$")
    axes.plot(-np.sin(-2.0), -2.0, "o", color=PINK, markersize=9, label="lowest training loss")
    axes.plot(1, 1, "o", color=GREEN, markersize=9, label="lowest validation loss")


def _draw_trajectories(axes: Axes, found: Toy) -> None:
    for path, colour, label in (
        (found.exact, BLUE, "exact: implicit function theorem"),
        (found.approximate, ORANGE, f"approximate: look-back series, i = {illustrations.LOOKBACK}"),
    ):
        axes.plot(*path.T, color=colour, linewidth=1.6, marker="o", markersize=2.8, label=label)
    axes.plot(*illustrations.BEGIN, "s", color=INK, markersize=6)


def draw_pseudo_loss(classical: PseudoLoss, ours: PseudoLoss) -> Figure:
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_descent(left, classical, "$w ← w - η_k ∇L$: the rate scales the step")
    _draw_descent(right, ours, "$w ← w - ∇\\overline{L}_k$, $\\overline{L}_k = η_k L$: it scales the landscape")
    handles = [Line2D([], [], color=INK, label="loss"), *_step_handles()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    return figure


def _step_handles() -> list[Line2D]:
    return [
        Line2D([], [], color=BLUE, linewidth=2, label="weight step"),
        Line2D([], [], color=ORANGE, linewidth=2, label="the same on the loss"),
    ]


def _draw_descent(axes: Axes, found: PseudoLoss, title: str) -> None:
    scaled = len(found.scales) > 1
    for k, heights in enumerate(found.heights):
        axes.plot(found.at, heights, color=INK, linewidth=1.4)
        name = f"$\\overline{{L}}_{k + 1} = {illustrations.RATES[k]} L$" if scaled else "$L$"
        axes.text(found.at[-1] + 0.1, heights[-1], name, va="center")
    for k, (rate, end) in enumerate(zip(illustrations.RATES, found.ends, strict=True)):
        scale = found.scales[k] if scaled else 1.0
        high, low = scale * illustrations.parabola(np.array([illustrations.FROM, end]))
        level = high if scaled else high + 1.5 * (2 - k)  # three steps from one point would hide each other
        axes.annotate("", (end, level), (illustrations.FROM, level), arrowprops=_arrow(BLUE))
        axes.annotate("", (end, low), (illustrations.FROM, high), arrowprops=_arrow(ORANGE))
        axes.plot([end, end], [level, low], color=GREY, linewidth=1, linestyle=":")
        if not scaled:
            axes.text(end + 0.12, level, f"$η_{k + 1} = {rate}$", va="center", color=BLUE, fontsize="small")
    axes.set(title=title, xlabel="weight $w$", xlim=(-3.2, 7.9), ylim=(-0.8, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_yticks([])


def _arrow(colour: str) -> dict[str, Any]:
    return {"arrowstyle": "-|>", "color": colour, "linewidth": 1.8, "shrinkA": 0, "shrinkB": 0}


# --- grids over intervals and look-backs ---


def draw_heat_maps(every: Sequence[HeatMaps], *, shared: bool = True) -> Figure | None:
    """A row of panels for each group. ``shared``: in the same colours, so that they can be compared."""
    every = [found for found in every if any(np.isfinite(one.numbers).any() for one in found.maps)]
    if not every:
        return None
    columns = 3
    rows = [-(-len(found.maps) // columns) for found in every]
    heights = [3.4 * count + 0.5 for count in rows]
    figure = Figure(figsize=(4.2 * columns, sum(heights)), layout="constrained")
    blocks = figure.subfigures(len(every), 1, squeeze=False, height_ratios=heights).flat
    for block, found, count in zip(blocks, every, rows, strict=True):
        times = f" × {found.times:,}".replace(",", " ") if found.times > 1 else ""
        block.suptitle(f"{found.title}{times}\n{found.note}", fontsize="medium")
        across = min(columns, len(found.maps))
        widths = [max(1.5, one.numbers.shape[1]) for one in found.maps[:across]]
        panels = list(block.subplots(count, across, squeeze=False, width_ratios=widths).flat)
        common = span([one.numbers for one in found.maps], highest=100)
        for axes, one in zip(panels, found.maps, strict=False):
            _draw_heat_map(axes, one, common if shared else span([one.numbers], highest=100))
        for axes in panels[len(found.maps) :]:
            axes.remove()
    return figure


def _draw_heat_map(axes: Axes, one: HeatMap, between: tuple[float, float]) -> None:
    rows, columns = one.numbers.shape
    norm = LogNorm(*between)
    axes.imshow(one.numbers, norm=norm, cmap=HEAT, aspect="auto", origin="lower")
    for row, column in np.ndindex(rows, columns):
        number = float(one.numbers[row, column])
        colour = "white" if number > 0 and float(norm(number)) < 0.6 else INK
        axes.text(column, row, grids.written(number), ha="center", va="center", fontsize=6.5, color=colour)
    axes.set_xticks(range(columns), [str(i + 1) for i in range(columns)] if columns > 1 else ["any"])
    axes.set_yticks(range(rows), [str(row + 1) for row in range(rows)])
    axes.set(title=one.title, xlabel="look-back $i$", ylabel="update interval $T$")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


# --- trajectories ---


def draw_landscapes(every: Sequence[Landscape]) -> Figure:
    columns = min(2, max(len(found.trails) for found in every))
    heights = [3.8 * -(-len(found.trails) // columns) + 0.6 for found in every]
    figure = Figure(figsize=(5.2 * columns + 1, sum(heights)), layout="constrained")
    blocks = figure.subfigures(len(every), 1, squeeze=False, height_ratios=heights).flat
    for block, found in zip(blocks, every, strict=True):
        colours = ScalarMappable(LogNorm(*span([found.losses], highest=100)), HEAT)
        panels = block.subplots(-(-len(found.trails) // columns), columns, squeeze=False)
        for axes, one in zip(panels.flat, found.trails, strict=False):
            axes.pcolormesh(found.lr, found.weight_decay, found.losses, norm=colours.norm, cmap=HEAT, rasterized=True)
            _draw_trail(axes, one)
            log_axis(axes, "x", found.lr[0], found.lr[-1])
            log_axis(axes, "y", found.weight_decay[0], found.weight_decay[-1])
            axes.set(title=one.title, xlabel=NAMES["lr"], ylabel=NAMES["weight_decay"])
        for axes in list(panels.flat)[len(found.trails) :]:
            axes.remove()
        block.suptitle(f"{found.title}\n{found.note}", fontsize="medium")
        locator, formatter = ticks(*colours.get_clim())
        bar = block.colorbar(
            colours, ax=list(panels.flat), label="expected final test loss", ticks=locator, format=formatter
        )
        bar.minorticks_off()
    figure.legend(handles=_trail_handles(), loc="outside lower center", ncols=3, frameon=False)
    return figure


def _draw_trail(axes: Axes, one: Any) -> None:
    colours = [ORANGE, "#56B4E9", "#F0E442", "#CC79A7", "#FFFFFF"]
    for k, (lr, decay) in enumerate(zip(one.lr.T, one.weight_decay.T, strict=True)):
        colour, seen = colours[k % len(colours)], np.isfinite(lr) & np.isfinite(decay)
        axes.plot(lr[seen], decay[seen], color=colour, linewidth=0.9, alpha=0.9)
        axes.plot(lr[0], decay[0], "o", color=colour, markersize=3.2, markeredgecolor=INK, markeredgewidth=0.4)
        end = "s" if np.isfinite(one.losses[k]) else "X"
        axes.plot(
            lr[seen][-1:], decay[seen][-1:], end, color=colour, markersize=4.6, markeredgecolor=INK, markeredgewidth=0.5
        )


def _trail_handles() -> list[Line2D]:
    look: dict[str, Any] = {"color": ORANGE, "markeredgecolor": INK}
    return [
        Line2D([], [], marker="o", linestyle="", label="start", **look),
        Line2D([], [], marker="s", label="path, end", **look),
        Line2D([], [], marker="X", linestyle="", label="lost", **look),
    ]


# --- short horizons ---


def draw_horizons(cells: Sequence[Cell]) -> Figure | None:
    """Of each data set, the distribution of final losses and the median over time."""
    datasets = list(dict.fromkeys(cell.request.dataset for cell in cells))
    if not datasets:
        return None
    figure = Figure(figsize=(max(3.5 * len(datasets), 7), 6.4), layout="constrained")
    panels = figure.subplots(2, len(datasets), squeeze=False)
    for (above, below), dataset in zip(panels.T, datasets, strict=True):
        own = {cell.request.method: cell for cell in cells if cell.request.dataset == dataset}
        draw_distributions(above, {m: distribution(cell) for m, cell in own.items()}, loss_label(dataset))
        draw_median_curves(below, {m: median_curve(cell) for m, cell in own.items()}, loss_label(dataset))
        above.set_title(title_of(dataset))
        for axes in (above, below):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(color="#DDDDDD", linewidth=0.5)
    methods = [name for name in METHODS if any(cell.request.method == name for cell in cells)]
    handles = [Line2D([], [], label=METHODS[name].label, **style_of(name)) for name in methods]
    columns = max(2, int(figure.get_figwidth() / 2.4))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
    return figure


# --- sizes of the validation set ---


def draw_splits(every: Sequence[Split]) -> Figure | None:
    if not every:
        return None
    figure = Figure(figsize=(9, 3.6 * len(every) + 0.6), layout="constrained")
    panels = figure.subplots(len(every), 2, squeeze=False)
    for row, found in zip(panels, every, strict=True):
        for axes, average in zip(row, ("mean", "median"), strict=True):
            _draw_shares(axes, found, average)
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return figure


def _draw_shares(axes: Axes, found: Split, average: str) -> None:
    for k, one in enumerate(found.shares):
        colour, ours, paper = style_of(one.method)["color"], getattr(one, average), getattr(one, f"paper_{average}")
        at = 100 * one.share + 0.4 * (k - (len(found.shares) - 1) / 2)  # beside each other
        error = np.nan_to_num(getattr(one, f"{average}_se"))
        axes.errorbar(at, ours, error, color=colour, marker="o", capsize=3, label=one.title)
        if np.isfinite(paper).any():
            axes.plot(at, paper, "x--", color=colour, linewidth=0.9, alpha=0.8, label=f"{one.title}, the paper")
    axes.set(title=found.title, xlabel="validation rows, per cent of all", ylabel=f"{average} {found.label}")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#DDDDDD", linewidth=0.5)


def _pseudo_loss(cells: Sequence[Cell]) -> Figure:
    return draw_pseudo_loss(*(illustrations.pseudo_losses(scaled=scaled) for scaled in (False, True)))


PICTURES: dict[str, Callable[[Sequence[Cell]], Figure | None]] = {
    "toy": lambda cells: draw_toy(illustrations.toy()),
    "pseudo-loss": _pseudo_loss,
    "sensitivity": lambda cells: draw_heat_maps(grids.sensitivity(cells)),
    "hypergradient-accuracy": lambda cells: draw_heat_maps(grids.hypergradient_accuracy(cells), shared=False),
    "trajectories": lambda cells: draw_landscapes(landscape.landscapes(cells)),
    "short-horizon": draw_horizons,
    "validation-size": lambda cells: draw_splits(proportions.splits(cells)),
}
