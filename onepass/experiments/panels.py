"""One panel of a figure. What to draw (functions of a cell, giving arrays) stands apart from drawing it.

Losses are in the units of the tables: Kin8nm's, for one, are shown times 1000, as in the paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable

from onepass.experiments.methods import METHODS
from onepass.experiments.protocol import PROTOCOLS
from onepass.experiments.runs import Cell
from onepass.experiments.runtimes import PLAIN, Runtimes
from onepass.experiments.statistics import Array, best_of, resampled

UNTUNED, TUNED = "random", "one-pass"  # what the demo compares
SAMPLE = 20  # paths in a panel: more cannot be told apart
HIGHEST = 90  # percentile of losses where colours and axes may end: a few lost starts must not flatten the rest
NAMES = {"lr": "learning rate", "weight_decay": "weight decay", "momentum": "momentum"}
INK = "#222222"
MEAN: dict[str, Any] = {"marker": "o", "markersize": 5, "label": "mean"}
MEDIAN: dict[str, Any] = {"marker": "|", "markersize": 13, "markeredgewidth": 2, "label": "median"}
ROUND = (1, 2, 5, 10)  # what ticks are multiples of
BANDS = 200  # bootstrap samples of a whole figure's bands

# Okabe and Ito's colours, which colour-blind people can tell apart; relatives share one and differ in their dashes.
STYLES: dict[str, dict[str, Any]] = {
    "random": {"color": "#999999", "linewidth": 2.6},  # Lorraine's often lies on top
    "random-x-lr": {"color": "#999999", "linestyle": "--"},
    "random-3-batched": {"color": "#333333", "linestyle": ":"},
    "lorraine": {"color": "#CC79A7"},
    "baydin": {"color": "#E69F00"},
    "one-pass-wd-lr": {"color": "#56B4E9"},
    "one-pass-wd-lr-m": {"color": "#0072B2", "linewidth": 2.2},  # and Diff-through-Opt's on this
    "one-pass-wd-hdlr-m": {"color": "#009E73"},
    "diff-through-opt": {"color": "#000000", "linestyle": "-."},
    "medium-diff-through-opt": {"color": "#000000", "linewidth": 2.2},
    "long-diff-through-opt": {"color": "#000000", "linestyle": "--", "linewidth": 2.2},
    "full-diff-through-opt": {"color": "#000000", "linestyle": ":", "linewidth": 2.2},
    "one-pass": {"color": "#D55E00", "linewidth": 2.6, "zorder": 4},
    "one-pass-lookback-1": {"color": "#D55E00", "linestyle": "--"},
    "one-pass-lookback-5": {"color": "#7A1F00", "linewidth": 2.2, "zorder": 3},
    "bayesian-optimisation": {"color": "#332288", "linewidth": 2.2},
    "asha-random": {"color": "#999999", "linestyle": ":", "linewidth": 2.2},  # in the colours of what is inside
    "asha-one-pass-wd-lr-m": {"color": "#0072B2", "linestyle": ":", "linewidth": 2.2},
    "asha-one-pass": {"color": "#D55E00", "linestyle": ":", "linewidth": 2.2},
    "pbt-random": {"color": "#999999", "linestyle": "-."},
    "pbt-one-pass-wd-lr-m": {"color": "#0072B2", "linestyle": "-."},
    "pbt-one-pass": {"color": "#D55E00", "linestyle": "-."},
}
SPARE = ("#882255", "#44AA99", "#DDCC77", "#999933", "#661100", "#6699CC", "#AA4466")  # for methods that join later
# The same where the page is dark: what would hardly be seen there is lighter.
ON_DARK = {
    "#000000": "#FFFFFF",
    "#333333": "#D6D6D6",
    "#7A1F00": "#F5BC9A",
    "#0072B2": "#3D9BE0",
    "#882255": "#D4749F",
    "#332288": "#9C8FF0",
    "#661100": "#CF8570",
    INK: "#E4E8EB",
}


class Curve(NamedTuple):
    """Median test loss over weight steps, ``(points,)`` each; ``error`` is one bootstrap standard error."""

    steps: Array
    median: Array
    error: Array


class Incumbent(NamedTuple):
    """The lowest test loss seen so far, over wall-clock time, ``(points,)`` each; ``error`` is one standard error."""

    seconds: Array
    lowest: Array
    error: Array


class Distribution(NamedTuple):
    """``share[k]`` of all starts end at ``losses[k]`` or lower; lost ones keep the last share below 1."""

    losses: Array
    share: Array


class Paths(NamedTuple):
    """One hyperparameter from its start on: ``values`` is ``(points, starts)``, ``losses`` the final ones."""

    steps: Array
    values: Array
    losses: Array


class Valley(NamedTuple):
    """Where untuned starts stand and what came of them, and where tuned ones went: ``(points, starts)``."""

    name: str
    lr: Array
    other: Array
    losses: Array
    tuned_lr: Array
    tuned_other: Array
    tuned_losses: Array


CURVES: dict[tuple[str, int], Curve] = {}  # a second each for 200 starts; pictures and charts ask for the same


def median_curve(cell: Cell) -> Curve:
    """Over the starts that count, leaving out at each step those that are lost by then."""
    key = str(cell.folder), (cell.folder / "curves.npz").stat().st_mtime_ns
    if key not in CURVES:
        CURVES[key] = _median_curve(cell)
    return CURVES[key]


def _median_curve(cell: Cell) -> Curve:
    curves = cell.curves()
    kept = best_of(cell.valid, METHODS[cell.request.method].best_of)
    points = [losses[np.isfinite(losses)] for losses in curves["test"][:, kept] * _times(cell)]
    median = [np.median(finite) if len(finite) else np.nan for finite in points]
    return Curve(curves["steps"], np.array(median), np.array([_median_error(finite) for finite in points]))


def _median_error(values: Array) -> float:
    """As in `statistics.summary`, but sorted: several times faster than ``np.median``, and there are many points."""
    count = len(values)
    if not count:
        return float("nan")
    drawn = np.sort(resampled(values), 1)
    return float(((drawn[:, (count - 1) // 2] + drawn[:, count // 2]) / 2).std())


def incumbent(cell: Cell) -> Incumbent:
    """Of all starts, with bootstrapped errors; of Bayesian optimisation, the median of its repetitions.

    Searches know their time; of many starts that were trained together, it is what training took.
    """
    curves, search = cell.curves(), METHODS[cell.request.method].search
    losses = np.where(np.isfinite(curves["test"]), curves["test"], np.inf) * _times(cell)
    lowest = np.minimum.accumulate(losses, 0)
    average = np.median if search is not None and search.trials is not None else np.min
    index = np.random.default_rng(0).integers(0, lowest.shape[1], (BANDS, lowest.shape[1]))
    drawn = _where_finite(average(lowest[:, index], 2))
    error = np.nan_to_num([values[np.isfinite(values)].std() if np.isfinite(values).any() else 0 for values in drawn])
    return Incumbent(np.cumsum(np.nan_to_num(curves["seconds"])), _where_finite(average(lowest, 1)), error)


def _where_finite(values: Array) -> Array:
    return np.where(np.isfinite(values), values, np.nan)


def distribution(cell: Cell) -> Distribution:
    values = np.array(cell.values) * _times(cell)
    losses = np.sort(values[np.isfinite(values)])
    return Distribution(losses, np.arange(1, len(losses) + 1) / max(len(values), 1))


def paths(cell: Cell, name: str = "lr", count: int | None = SAMPLE) -> Paths:
    """Of ``count`` starts, spread evenly over where they began; of all, in their own order, if it is ``None``."""
    curves, start = cell.curves(), np.array(cell.start[name])
    chosen = np.arange(len(start))
    if count is not None and len(start):
        spread = np.linspace(0, len(start) - 1, min(count, len(start))).round().astype(int)
        chosen = np.argsort(start, kind="stable")[spread]
    values = np.concatenate([start[None], curves[name]])[:, chosen]
    return Paths(np.concatenate([[0.0], curves["steps"]]), values, np.array(cell.test)[chosen] * _times(cell))


def valley(untuned: Cell, tuned: Cell, name: str) -> Valley:
    """In the plane of learning rate and ``name``."""
    rates, others = paths(tuned, "lr", count=None), paths(tuned, name, count=None)
    start = untuned.start
    losses = np.array(untuned.test) * _times(untuned)
    return Valley(name, np.array(start["lr"]), np.array(start[name]), losses, rates.values, others.values, rates.losses)


def violin(values: Array) -> tuple[Array, Array]:
    """Where, and how wide: a kernel density, by Silverman's rule, between the smallest and the largest value."""
    quarters = np.percentile(values, [25, 75])
    spread = min(values.std(), (quarters[1] - quarters[0]) / 1.34) or values.std()
    band = max(0.9 * spread * len(values) ** -0.2, 1e-3 * float(values.max()), 1e-12)
    at = np.unique(np.concatenate([np.linspace(values.min(), values.max(), 200), values]))
    dense = np.exp(-0.5 * ((at[:, None] - values) / band) ** 2).sum(1)
    return at, 0.4 * dense / dense.max()


def _times(cell: Cell) -> float:
    return float(PROTOCOLS[cell.request.dataset].shown_times)


def draw_median_curves(axes: Axes, curves: Mapping[str, Curve], label: str) -> None:
    low, high = span([curve.median for curve in curves.values()])
    for method, curve in curves.items():
        style = style_of(method)
        axes.plot(curve.steps, curve.median, **style)
        # A logarithm has no room for an error larger than the median.
        below, above = np.maximum(curve.median - curve.error, low), curve.median + curve.error
        axes.fill_between(curve.steps, below, above, color=style["color"], alpha=0.12, linewidth=0)
    log_axis(axes, "y", low, high)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(4, steps=ROUND))
    axes.margins(x=0)
    axes.set(xlabel="weight steps", ylabel=label)


def draw_incumbents(axes: Axes, found: Mapping[str, Incumbent], label: str) -> None:
    low, high = span([one.lowest for one in found.values()])
    for method, one in found.items():
        style = style_of(method)
        axes.plot(one.seconds, one.lowest, **style)
        below, above = np.maximum(one.lowest - one.error, low), one.lowest + one.error
        axes.fill_between(one.seconds, below, above, color=style["color"], alpha=0.12, linewidth=0)
    log_axis(axes, "y", low, high)
    log_axis(axes, "x", *span([one.seconds for one in found.values()], highest=100))
    axes.set(xlabel="seconds", ylabel=f"lowest {label} so far")


def draw_distributions(axes: Axes, distributions: Mapping[str, Distribution], label: str) -> None:
    low, high = span([found.losses for found in distributions.values()])
    for method, found in distributions.items():
        losses = np.concatenate([found.losses[:1], found.losses, [max([high, *found.losses[-1:]])]])
        share = np.concatenate([[0.0], found.share, found.share[-1:]]) if len(found.share) else np.zeros(1)
        axes.plot(losses, share, drawstyle="steps-post", **style_of(method))
    log_axis(axes, "x", low, high)
    axes.set(ylim=(0, 1.02), xlabel=f"final {label}", ylabel="share of starts")


def draw_paths(axes: Axes, found: Paths, colours: ScalarMappable) -> None:
    for values, loss in zip(found.values.T, found.losses, strict=True):
        lost = not np.isfinite(loss)
        look = {"color": "#D55E00", "linestyle": ":"} if lost else {"color": colours.to_rgba(loss)}
        axes.plot(found.steps, values, linewidth=1, **look)
    log_axis(axes, "y", *span([found.values], highest=100))
    axes.xaxis.set_major_locator(ticker.MaxNLocator(3, steps=ROUND))
    axes.margins(x=0)


def draw_valley(axes: Axes, found: Valley, colours: ScalarMappable) -> None:
    """Large dots are untuned starts. With the same seed, a tuned one begins inside each."""
    colour = style_of(TUNED)["color"]
    lost, tuned_lost = ~np.isfinite(found.losses), ~np.isfinite(found.tuned_losses)
    look: dict[str, Any] = {"c": colours.to_rgba(found.losses[~lost]), "s": 70, "linewidths": 0}
    axes.scatter(found.lr[~lost], found.other[~lost], label="not tuned: start", **look)
    axes.scatter(found.lr[lost], found.other[lost], c="#777777", marker="x", s=50, label="not tuned: lost")
    axes.plot(found.tuned_lr, found.tuned_other, color=colour, linewidth=0.8, alpha=0.5)
    look = {"mfc": "white", "mec": colour, "mew": 0.8, "ms": 3.2}
    axes.plot(found.tuned_lr[0], found.tuned_other[0], "o", label="tuned: start", **look)
    x, y = _last_finite(found.tuned_lr), _last_finite(found.tuned_other)
    look = {"c": colours.to_rgba(found.tuned_losses[~tuned_lost]), "s": 40, "edgecolors": colour, "linewidths": 0.9}
    axes.scatter(x[~tuned_lost], y[~tuned_lost], zorder=3, label="tuned: end", **look)
    axes.plot(x[tuned_lost], y[tuned_lost], "x", color=colour, zorder=3, label="tuned: lost")
    log_axis(axes, "x", *span([found.lr, found.tuned_lr], highest=100))
    if found.name != "momentum":
        log_axis(axes, "y", *span([found.other, found.tuned_other], highest=100))
    axes.set(xlabel=NAMES["lr"], ylabel=NAMES[found.name])


def draw_runtimes(axes: Axes, found: Runtimes, methods: Sequence[str]) -> None:
    """A violin a method, from top to bottom, on an axis from 0, and at its right the ratio to Random."""
    unit, times = found.unit
    axes.set(ylim=(len(methods) - 0.4, -0.6), xlabel=f"{unit} per start, whole run")
    axes.set_yticks(range(len(methods)), [METHODS[method].label for method in methods])
    axes.grid(visible=False, axis="y")
    right = axes.get_yaxis_transform()
    axes.text(1.02, -0.75, f"× {METHODS[PLAIN].label}", transform=right, va="bottom", fontsize="small")
    for place, method in enumerate(methods):
        if method not in found.seconds:
            continue
        seconds, colour = times * found.seconds[method], style_of(method)["color"]
        at, width = violin(seconds)
        axes.fill_between(at, place - width, place + width, color=colour, alpha=0.45, linewidth=0)
        axes.plot([at[0], at[-1]], [place, place], color=colour, linewidth=1)
        axes.plot(np.median(seconds), place, color=INK, **MEDIAN)
        axes.plot(np.mean(seconds), place, color=INK, **MEAN)
        ratio = found.ratio(method)
        axes.text(1.02, place, f"{ratio:.2f}" if np.isfinite(ratio) else "–", transform=right, va="center")
    every = found.seconds.values()
    axes.set_xlim(0, 1.08 * times * max(max(np.percentile(seconds, 97), seconds.mean()) for seconds in every))
    axes.xaxis.set_major_locator(ticker.MaxNLocator(5, steps=ROUND))


def style_of(method: str) -> dict[str, Any]:
    """The same in every figure."""
    spare = {"color": SPARE[list(METHODS).index(method) % len(SPARE)]}
    return {"linewidth": 1.4, **STYLES.get(method, spare)}


def _last_finite(values: Array) -> Array:
    """Of each column: where a path ends, also if its start was lost on the way."""
    seen = np.where(np.isfinite(values), np.arange(len(values))[:, None], 0).max(0)
    ends: Array = values[seen, np.arange(values.shape[1])]
    return ends


def span(arrays: Sequence[Array], highest: float = HIGHEST) -> tuple[float, float]:
    """The range of all values that a logarithm has, with some air around."""
    values = np.concatenate([np.ravel(array) for array in arrays] or [np.empty(0)])
    values = values[np.isfinite(values) & (values > 0)]
    if not len(values):
        return 0.1, 1.0
    low, high = values.min(), min(values.max(), 10 * np.percentile(values, highest))
    air = max((high / low) ** 0.05, 1.01)
    return float(low / air), float(high * air)


def log_axis(axes: Axes, letter: str, low: float, high: float) -> None:
    axes.set(**{f"{letter}scale": "log", f"{letter}lim": (low, high)})
    axis = {"x": axes.xaxis, "y": axes.yaxis}[letter]
    locator, formatter = ticks(low, high)
    axis.set_major_locator(locator)
    axis.set_major_formatter(formatter)
    axis.set_minor_locator(ticker.NullLocator())


def ticks(low: float, high: float) -> tuple[ticker.Locator, ticker.Formatter]:
    """Few: powers of ten over many decades, plain numbers over few."""
    if high / low > 100:
        return ticker.LogLocator(numticks=6), ticker.LogFormatterSciNotation()
    locator = ticker.LogLocator(subs=(1, 2, 5)) if high / low > 5 else ticker.MaxNLocator(4, steps=ROUND)
    return locator, ticker.FuncFormatter(lambda value, _: f"{value:g}")


def loss_label(dataset: str) -> str:
    protocol = PROTOCOLS[dataset]
    times = f" × {protocol.shown_times:,}".replace(",", " ") if protocol.shown_times > 1 else ""
    return f"{protocol.metric}{times}"
