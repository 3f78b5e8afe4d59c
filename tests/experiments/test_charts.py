"""Charts say what the pictures say, in a form that plotly takes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest

from onepass.experiments import charts, panels
from onepass.experiments.charts import CHARTS, ON_DARK, chart_of
from onepass.experiments.figures import FIGURES
from onepass.experiments.methods import METHODS
from onepass.experiments.panels import style_of
from tests.experiments.test_figures import NAN, made, made_many


def test_each_chart_has_its_picture() -> None:
    assert set(CHARTS) <= set(FIGURES)


@pytest.mark.parametrize("name", CHARTS)
def test_plotly_takes_every_chart(name: str, tmp_path: Path) -> None:
    chart = chart_of(name, made_many(tmp_path, ["kin8nm"]))
    assert chart is not None
    for panel in chart.panels:
        go.Figure(data=panel.data, layout=panel.layout)
        json.dumps(panel, allow_nan=False)
        for trace in panel.data:
            method = trace.get("meta")
            if method and name not in ("learning-rates", "demo"):
                colour = trace["line"]["color"] if "line" in trace and "color" in trace["line"] else None
                assert colour in (None, style_of(method)["color"])


@pytest.mark.parametrize("name", CHARTS)
@pytest.mark.parametrize("curve", [[[NAN, NAN]], [[3.0]], [[0.0, 1e38]]], ids=["lost", "single", "extreme"])
def test_odd_cells(name: str, curve: list[list[float]], tmp_path: Path) -> None:
    cells = [made(tmp_path, method, curve) for method in ("random", "random-3-batched", "one-pass", "pbt-random")]
    chart = chart_of(name, cells)
    assert chart is not None
    for panel in chart.panels:
        json.dumps(panel, allow_nan=False)


def test_the_data_is_that_of_the_picture(tmp_path: Path) -> None:
    cells = made_many(tmp_path, ["uci-energy"])
    chart = chart_of("curves", cells)
    assert chart is not None
    lines = {trace["meta"]: trace for trace in chart.panels[0].data if "fill" not in trace}
    for cell in cells:
        if (method := cell.request.method) in lines:
            found = panels.median_curve(cell)
            assert lines[method]["x"] == found.steps.tolist()
            assert lines[method]["y"] == pytest.approx(found.median, rel=1e-3)
            assert lines[method]["name"] == METHODS[method].label
    assert METHODS.keys() - lines.keys() == {name for name, row in METHODS.items() if row.search}


def test_lost_starts_keep_a_distribution_below_one(tmp_path: Path) -> None:
    chart = chart_of("cdfs", [made(tmp_path, curve=[[3, NAN, 1, 2]])])
    assert chart is not None
    (line,) = chart.panels[0].data
    assert line["x"] == [1, 1, 2, 3, pytest.approx(3, rel=0.2)]
    assert line["y"] == [0, 0.25, 0.5, 0.75, 0.75]


def test_long_lines_are_thinned(tmp_path: Path) -> None:
    chart = chart_of("cdfs", [made(tmp_path, curve=[np.geomspace(1, 10, 5000).tolist()])])
    assert chart is not None
    (line,) = chart.panels[0].data
    assert len(line["x"]) == charts.POINTS
    assert (line["y"][0], line["y"][-1]) == (0, 1)


def test_colours_on_dark_can_be_seen() -> None:
    """By WCAG's ratio against the page's dark background."""
    for method in METHODS:
        colour = style_of(method)["color"]
        assert luminance(ON_DARK.get(colour, colour)) + 0.05 > 3 * (luminance("#14181B") + 0.05), method
    assert ON_DARK[charts.LEVELS[0]] == charts.LEVELS[-1]
    assert all(colour == colour.upper() for colour in ON_DARK)


def luminance(colour: str) -> float:
    parts = (int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5))
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return float(np.dot((0.2126, 0.7152, 0.0722), linear))
