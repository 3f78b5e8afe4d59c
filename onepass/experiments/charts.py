"""The figures as charts that a browser draws: for plotly, panel by panel, of the same data as the pictures.

A panel is plain data, in the colours of a white page; ``plotly.graph_objects.Figure(data=panel.data,
layout=panel.layout)`` is the same chart in a notebook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import to_hex

from onepass.experiments import panels, runtimes
from onepass.experiments.figures import LOSSES, SEARCHING, Grouped, followed, grouped
from onepass.experiments.methods import METHODS
from onepass.experiments.panels import INK, NAMES, TUNED, UNTUNED, loss_label, span, style_of
from onepass.experiments.protocol import title_of
from onepass.experiments.runs import Cell
from onepass.experiments.statistics import Array

Trace = dict[str, Any]

POINTS = 200  # of a line: a panel is some 300 pixels wide
LOOKS = 60  # of a path among many
STARTS = 64  # in a plane: more hide each other
DASHES = {"-": "solid", "--": "dash", ":": "dot", "-.": "dashdot"}
LOST = "#D55E00"

LEVELS = [to_hex(colormaps[LOSSES](k / 31)).upper() for k in range(32)]
# Every colour on a white page -> the same on a dark one. There, low losses have to be light to be seen.
ON_DARK = {**panels.ON_DARK, **dict(zip(LEVELS, reversed(LEVELS), strict=True))}


class Panel(NamedTuple):
    """One chart. Each trace that belongs to a method names it in ``meta``."""

    title: str
    data: list[Trace]
    layout: dict[str, Any]


class Chart(NamedTuple):
    """What stands under one heading.

    Attributes:
        choices: methods of which a reader chooses one, if all were too much.
        height: pixels of a panel, if not as usual.
        wide: at most two panels in a row.
    """

    panels: list[Panel]
    choices: Sequence[str] = ()
    height: int | None = None
    wide: bool = False


def chart_of(name: str, cells: Iterable[Cell]) -> Chart | None:
    """That of the same name in `figures.FIGURES`, if it has one and there is something to show."""
    if name not in CHARTS or not (groups := grouped(name, cells)):
        return None
    chart = CHARTS[name](groups)
    return chart if chart.panels else None


def _curves(groups: Grouped) -> Chart:
    return _panel_a_dataset(groups, _curve_panel)


def _curve_panel(cells: Mapping[str, Cell], label: str) -> tuple[list[Trace], dict[str, Any]]:
    found = {method: panels.median_curve(cell) for method, cell in cells.items()}
    low, high = span([curve.median for curve in found.values()])
    hover = "%{fullData.name}<br>step %{x}: %{y:.4g} ± %{customdata:.2g}<extra></extra>"
    traces = [
        trace
        for method, curve in found.items()
        for trace in _line_in_a_band(method, curve.steps, curve.median, curve.error, low, hover)
    ]
    return traces, {"xaxis": {"title": {"text": "weight steps"}}, "yaxis": log_axis(label, low, high)}


def _searches(groups: Grouped) -> Chart:
    return _panel_a_dataset(followed(groups), _incumbent_panel)


def _incumbent_panel(cells: Mapping[str, Cell], label: str) -> tuple[list[Trace], dict[str, Any]]:
    found = {method: panels.incumbent(cell) for method, cell in cells.items()}
    low, high = span([one.lowest for one in found.values()])
    first, last = span([one.seconds for one in found.values()], highest=100)
    hover = "%{fullData.name}<br>%{x:.3g} s: %{y:.4g} ± %{customdata:.2g}<extra></extra>"
    traces = [
        trace
        for method, one in found.items()
        for trace in _line_in_a_band(method, one.seconds, one.lowest, one.error, low, hover)
    ]
    return traces, {"xaxis": log_axis("seconds", first, last), "yaxis": log_axis(f"lowest {label} so far", low, high)}


def _distributions(groups: Grouped) -> Chart:
    return _panel_a_dataset(groups, _distribution_panel)


def _distribution_panel(cells: Mapping[str, Cell], label: str) -> tuple[list[Trace], dict[str, Any]]:
    found = {method: panels.distribution(cell) for method, cell in cells.items()}
    low, high = span([one.losses for one in found.values()])
    hover = "%{fullData.name}<br>%{y:.0%} of starts end at %{x:.4g} or below<extra></extra>"
    traces = []
    for method, one in found.items():
        if len(one.losses):
            losses = np.concatenate([one.losses[:1], one.losses, [max(high, one.losses[-1])]])
            share = np.concatenate([[0.0], one.share, one.share[-1:]])
            x, y = thinned(POINTS, losses, share)
            traces.append(_line(method, x, y, hovertemplate=hover, shape="hv"))
    shares = {"title": {"text": "share of starts"}, "range": [0, 1.02], "tickformat": ".0%"}
    return traces, {"xaxis": log_axis(f"final {label}", low, high), "yaxis": shares}


def _panel_a_dataset(groups: Grouped, of: Callable[[Mapping[str, Cell], str], tuple[list[Trace], Any]]) -> Chart:
    return Chart([Panel(title_of(name), *of(cells, loss_label(name))) for name, cells in groups.items()])


def _learning_rates(groups: Grouped) -> Chart:
    """A panel a data set; all methods would be too many lines, so that one of them is chosen."""
    found = {
        dataset: {method: panels.paths(cell) for method, cell in cells.items() if METHODS[method].tunes("lr")}
        for dataset, cells in groups.items()
    }
    found = {dataset: methods for dataset, methods in found.items() if methods}
    low, high = span([path.values for methods in found.values() for path in methods.values()], highest=100)
    every = []
    for dataset, methods in found.items():
        bounds = span([path.losses for path in methods.values()])
        traces = [trace for method, path in methods.items() for trace in _paths(method, path, bounds)]
        layout = {"xaxis": {"title": {"text": "weight steps"}}, "yaxis": log_axis(NAMES["lr"], low, high)}
        every.append(Panel(title_of(dataset), [*traces, _colour_bar(bounds, dataset)], layout))
    choices = [method for method in METHODS if any(method in methods for methods in found.values())]
    return Chart(every, choices, height=340)


def _paths(method: str, found: panels.Paths, bounds: tuple[float, float]) -> list[Trace]:
    steps, values = thinned(LOOKS, found.steps, found.values)
    traces = []
    for path, loss in zip(values.T, found.losses, strict=True):
        lost = not np.isfinite(loss)
        look = {"color": LOST, "dash": "dot"} if lost else {"color": shade(loss, bounds)}
        end = "lost" if lost else f"ends at {loss:.4g}"
        about = f"step %{{x}}: %{{y:.3g}}<br>{end}<extra></extra>"
        traces.append(_trace(method, steps, path, mode="lines", line={"width": 1.3, **look}, hovertemplate=about))
    return traces


def _demo(groups: Grouped) -> Chart:
    found = []
    for dataset, cells in groups.items():
        if UNTUNED in cells and TUNED in cells:
            for name in ("weight_decay", "momentum"):
                found.append(_plane(dataset, panels.valley(cells[UNTUNED], cells[TUNED], name)))
    return Chart(found, height=400, wide=True)


def _plane(dataset: str, found: panels.Valley) -> Panel:
    """Where untuned starts stand, and where tuned ones went."""
    bounds = span([found.losses, found.tuned_losses])
    names = NAMES["lr"], NAMES[found.name]
    colour = style_of(TUNED)["color"]
    chosen = np.linspace(0, len(found.lr) - 1, min(STARTS, len(found.lr))).round().astype(int)
    some = np.linspace(0, len(found.tuned_losses) - 1, min(STARTS, len(found.tuned_losses))).round().astype(int)
    lr, other = thinned(LOOKS, found.tuned_lr[:, some], found.tuned_other[:, some])
    ends = panels._last_finite(found.tuned_lr[:, some]), panels._last_finite(found.tuned_other[:, some])
    gap = np.full((1, len(some)), np.nan)
    x, y = (np.concatenate([values, gap]).T.ravel() for values in (lr, other))
    traces = [
        _dots(UNTUNED, found.lr[chosen], found.other[chosen], found.losses[chosen], bounds, 10, names),
        _trace(TUNED, x, y, mode="lines", line={"width": 1, "color": colour}, opacity=0.45, hoverinfo="skip"),
        _trace(TUNED, lr[0], other[0], mode="markers", marker=_ring(colour), hoverinfo="skip"),
        _dots(TUNED, *ends, found.tuned_losses[some], bounds, 7, names, {"color": colour, "width": 1}),
        _colour_bar(bounds, dataset),
    ]
    across = log_axis(names[0], *span([found.lr, found.tuned_lr], highest=100))
    up: dict[str, Any] = {"title": {"text": names[1]}}
    if found.name != "momentum":
        up = log_axis(names[1], *span([found.other, found.tuned_other], highest=100))
    return Panel(f"{title_of(dataset)}: {names[1]}", traces, {"xaxis": across, "yaxis": up})


def _ring(colour: str) -> dict[str, Any]:
    return {"symbol": "circle-open", "size": 5, "color": colour, "line": {"width": 1}}


def _dots(
    method: str,
    x: Array,
    y: Array,
    losses: Array,
    bounds: tuple[float, float],
    size: int,
    names: tuple[str, str],
    line: dict[str, Any] | None = None,
) -> Trace:
    lost = ~np.isfinite(losses)
    marker = {
        "color": [LOST if bad else shade(loss, bounds) for bad, loss in zip(lost, losses, strict=True)],
        "symbol": ["x-thin-open" if bad else "circle" for bad in lost],
        "size": size,
        "opacity": 1,
        "line": line or {"width": 0},
    }
    about = ["lost" if bad else f"{loss:.4g}" for bad, loss in zip(lost, losses, strict=True)]
    what = "starts here" if method == UNTUNED else "ends here"
    hover = f"{METHODS[method].label} {what}: %{{text}}<br>{names[0]} %{{x:.3g}}, {names[1]} %{{y:.3g}}<extra></extra>"
    return _trace(method, x, y, mode="markers", marker=marker, text=about, hovertemplate=hover)


def _runtimes(groups: Grouped) -> Chart:
    found = runtimes.results([cell for cells in groups.values() for cell in cells.values()])
    methods = [method for method in METHODS if any(method in one.seconds for one in found)]
    every = [_runtime_panel(one, [m for m in methods if m in one.seconds]) for one in found]
    return Chart(every, height=110 + 30 * len(methods), wide=True)


def _runtime_panel(found: runtimes.Runtimes, methods: Sequence[str]) -> Panel:
    """A row a method; at the right, how many times Random's its median is."""
    unit, times = found.unit
    traces = [trace for row, method in enumerate(methods) for trace in _violin(row, method, found)]
    ratios = [(row, found.ratio(method)) for row, method in enumerate(methods)]
    beside = {"xref": "paper", "x": 1.01, "xanchor": "left", "showarrow": False}
    every = found.seconds.values()
    widest = 1.08 * times * max(max(np.percentile(seconds, 97), seconds.mean()) for seconds in every)
    rows = {"tickvals": list(range(len(methods))), "ticktext": [METHODS[method].label for method in methods]}
    layout = {
        "xaxis": {"title": {"text": f"{unit} per start, whole run"}, "range": [0, rounded(np.array([widest]))[0]]},
        "yaxis": {**rows, "range": [len(methods) - 0.4, -0.6], "showgrid": False, "automargin": True},
        "annotations": [
            {**beside, "y": row, "text": f"{ratio:.2f}" if np.isfinite(ratio) else "–"} for row, ratio in ratios
        ],
        "margin": {"r": 48},
    }
    return Panel(f"{title_of(found.dataset)} ({found.note})", traces, layout)


def _violin(row: int, method: str, found: runtimes.Runtimes) -> list[Trace]:
    unit, times = found.unit
    seconds, colour = times * found.seconds[method], style_of(method)["color"]
    at, width = thinned(POINTS // 2, *panels.violin(seconds))
    outline = _trace(method, np.concatenate([at, at[::-1]]), np.concatenate([row - width, row + width[::-1]]))
    outline |= {"mode": "lines", "fill": "toself", "fillcolor": f"{colour}73", "hoverinfo": "skip"}
    outline["line"] = {"width": 1, "color": colour}
    ratio = found.ratio(method)
    about = f"<br>{ratio:.2f} × {METHODS[runtimes.PLAIN].label}" if np.isfinite(ratio) else ""
    median, mean = np.array([np.median(seconds)]), np.array([seconds.mean()])
    marks = {"median": (median, "line-ns-open", 14), "mean": (mean, "circle", 6)}
    return [outline] + [
        _trace(
            method,
            value,
            np.array([row]),
            mode="markers",
            marker={"symbol": symbol, "size": size, "color": INK, "line": {"width": 2, "color": INK}},
            hovertemplate=f"{METHODS[method].label}<br>{name} %{{x:.3g}} {unit}{about}<extra></extra>",
        )
        for name, (value, symbol, size) in marks.items()
    ]


# --- parts ---


def _line_in_a_band(method: str, x: Array, y: Array, error: Array, low: float, hover: str) -> list[Trace]:
    x, y, error = thinned(POINTS, x, y, error)
    line = _line(method, x, y, customdata=rounded(error), hovertemplate=hover)
    known = np.isfinite(y) & np.isfinite(error)
    x, above, below = x[known], (y + error)[known], np.maximum(y - error, low)[known]
    band = _trace(method, np.concatenate([x, x[::-1]]), np.concatenate([above, below[::-1]]))
    look = {"fill": "toself", "fillcolor": f"{style_of(method)['color']}22", "hoverinfo": "skip", "mode": "lines"}
    return [{**band, **look, "line": {"width": 0}}, line]


def _line(method: str, x: Array, y: Array, shape: str = "linear", **more: Any) -> Trace:
    style = style_of(method)
    dash = DASHES[style.get("linestyle", "-")]
    line = {"color": style["color"], "width": style["linewidth"] + 0.3, "dash": dash, "shape": shape}
    return _trace(method, x, y, mode="lines", line=line, **more)


def _trace(method: str, x: Array, y: Array, **more: Any) -> Trace:
    named = {"type": "scatter", "name": METHODS[method].label, "meta": method, "showlegend": False}
    return {**named, "x": rounded(x), "y": rounded(y), **more}


def _colour_bar(bounds: tuple[float, float], dataset: str) -> Trace:
    """A trace that shows nothing but the scale of final losses."""
    low, high = np.log10(bounds)
    values = [value for value in _round_values(*bounds) if bounds[0] <= value <= bounds[1]]
    bar = {
        "orientation": "h",
        "thickness": 8,
        "len": 1,
        "y": 1.0,
        "yanchor": "bottom",
        "ypad": 0,
        "outlinewidth": 0,
        "tickvals": np.log10(values).tolist(),
        "ticktext": [f"{value:g}" for value in values],
        "title": {"text": f"final {loss_label(dataset)}", "side": "top"},
    }
    scale = [[k / 31, LEVELS[k]] for k in range(32)]
    marker = {"color": [low], "cmin": low, "cmax": high, "colorscale": scale, "showscale": True, "colorbar": bar}
    nothing = {"type": "scatter", "x": [None], "y": [None], "mode": "markers", "hoverinfo": "skip"}
    return {**nothing, "showlegend": False, "marker": marker}


def _round_values(low: float, high: float) -> list[float]:
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    subs = (1,) if high / low > 300 else (1, 2, 5) if high / low > 4 else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)
    found = [float(f"{sub * 10.0**power:.3g}") for power in powers for sub in subs]
    every = -(-len(powers) // 6) if len(subs) == 1 else 1
    return found[::every]


def shade(loss: float, bounds: tuple[float, float]) -> str:
    """
    >>> shade(1.0, (1.0, 100.0)), shade(1e9, (1.0, 100.0)) == LEVELS[-1]
    ('#440154', True)
    """
    low, high = np.log10(bounds)
    place = (np.log10(max(loss, bounds[0])) - low) / (high - low)
    return LEVELS[round(31 * float(np.clip(place, 0, 1)))]


def log_axis(title: str, low: float, high: float) -> dict[str, Any]:
    """Powers of ten over many decades, plain numbers over few."""
    decades = float(np.log10(high / low))
    look: dict[str, Any] = {"exponentformat": "power", "nticks": 4}
    if decades < 2.8:
        look = {"tickformat": "~g", "nticks": 3 if decades < 2 else 4}
    return {"title": {"text": title}, "type": "log", "range": rounded(np.log10([low, high])), **look}


def thinned(count: int, *arrays: Array) -> list[Array]:
    """At most about so many, the first and the last among them.

    >>> thinned(3, np.arange(10.0))[0].tolist()
    [0.0, 4.0, 9.0]
    """
    have = len(arrays[0])
    kept = np.linspace(0, have - 1, min(count, have)).round().astype(int)
    return [array[kept] for array in arrays]


def rounded(values: Array) -> list[float | int | None]:
    """To four digits, whole numbers in full; ``None`` where there is none.

    >>> rounded(np.array([0.123456, 12345.0, np.nan]))
    [0.1235, 12345, None]
    """
    return [_short(float(value)) for value in values]


def _short(value: float) -> float | int | None:
    if not np.isfinite(value):
        return None
    return int(value) if value.is_integer() and abs(value) < 1e9 else float(f"{value:.4g}")


CHARTS: dict[str, Callable[[Grouped], Chart]] = {
    "curves": _curves,
    "cdfs": _distributions,
    "learning-rates": _learning_rates,
    SEARCHING: _searches,
    "runtimes": _runtimes,
    "demo": _demo,
}
