"""What figures show, by hand; and that each of them draws."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from onepass.experiments import figures, panels
from onepass.experiments.figures import FIGURES, figure_of
from onepass.experiments.methods import ALONE, METHODS
from onepass.experiments.panels import STYLES, style_of
from onepass.experiments.protocol import title_of
from onepass.experiments.runs import Cell, Request, UsageError, compute, read
from onepass.experiments.statistics import best_of, summary

NAN = math.nan
NAMES = ("lr", "weight_decay", "momentum")


def made(
    out: Path,
    method: str = "one-pass",
    curve: Sequence[Sequence[float]] = ((4.0, 5.0, 6.0), (1.0, 2.0, 3.0)),
    *,
    dataset: str = "uci-energy",
    valid: Sequence[float] | None = None,
    start: Sequence[float] | None = None,
    seconds_between: Sequence[float] | None = None,
    **other: Any,
) -> Cell:
    """A cell on disk with that test loss at steps 10, 20, ...; hyperparameters are halved at each of them."""
    test = np.array(curve, dtype=np.float64)
    steps, count = 10 * np.arange(1, len(test) + 1), test.shape[1]
    begin = np.array(start if start is not None else np.geomspace(1e-5, 1e-1, count))
    path = begin * 0.5 ** np.arange(1, len(test) + 1)[:, None]
    valid = list(test[-1]) if valid is None else list(valid)
    folder = out / dataset / method
    folder.mkdir(parents=True)
    described = {
        "request": asdict(Request(dataset, method, count, int(steps[-1]))),
        "metric": "test MSE",
        "values": [_plain(test[-1, k]) for k in best_of(valid, METHODS[method].best_of)],
        "test": [_plain(value) for value in test[-1]],
        "valid": [_plain(value) for value in valid],
        "start": dict.fromkeys(NAMES, begin.tolist()),
        "end": dict.fromkeys(NAMES, path[-1].tolist()),
        "seconds": 1.5,
        "device": "cpu, 1 threads",
        "resumed": False,
        "versions": {"onepass": "0"},
        "returns": [0] * count,
        **other,
    }
    (folder / "cell.json").write_text(json.dumps(described, allow_nan=False))
    seconds = np.array(seconds_between or np.linspace(1.0, 2.0, len(test)) * (1 + len(method)))
    np.savez(folder / "curves.npz", steps=steps, test=test, seconds=seconds, **dict.fromkeys(NAMES, path))
    return read(folder)


def _plain(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def made_many(out: Path, datasets: Sequence[str] = ("uci-energy", "kin8nm")) -> list[Cell]:
    """Falling losses of all methods; the third start is lost half-way."""
    cells = []
    for dataset in datasets:
        for place, method in enumerate(METHODS):
            losses = np.geomspace(100, 1 + place, 8)[:, None] * np.linspace(1, 2, 6)
            losses[4:, 2] = NAN
            cells.append(made(out, method, losses.tolist(), dataset=dataset))
    return cells


# --- what to draw ---


def test_median_curve_leaves_out_what_is_lost(tmp_path: Path) -> None:
    curve = panels.median_curve(made(tmp_path, curve=[[1, 2, 6], [1, NAN, 3], [math.inf, NAN, 5], [NAN, NAN, NAN]]))
    assert curve.steps.tolist() == [10, 20, 30, 40]
    np.testing.assert_array_equal(curve.median, [2, 2, 5, NAN])
    assert curve.error[0] > 0
    assert curve.error[2] == 0  # of a single start
    assert math.isnan(curve.error[3])


@pytest.mark.parametrize("count", [2, 7, 20])
def test_error_of_the_median_is_that_of_the_tables(tmp_path: Path, count: int) -> None:
    values = np.random.default_rng(1).lognormal(size=count)
    cell = made(tmp_path, curve=[values.tolist()])
    curve = panels.median_curve(cell)
    assert curve.median[0] == pytest.approx(cell.summary.median)
    assert curve.error[0] == pytest.approx(summary(values).median_se)


def test_median_curve_of_the_starts_that_are_kept(tmp_path: Path) -> None:
    losses = [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0]]
    curve = panels.median_curve(made(tmp_path, "random-3-batched", losses, valid=[2, 1, 2, 2, NAN, 1, 0]))
    assert curve.median.tolist() == [4.0]  # of 2 and 6
    none = panels.median_curve(made(tmp_path / "too-few", "random-3-batched", [[1.0, 2.0]]))
    np.testing.assert_array_equal(none.median, [NAN])


def test_losses_are_shown_as_in_the_tables(tmp_path: Path) -> None:
    cell = made(tmp_path, curve=[[0.01, 0.02, 0.03]], dataset="kin8nm")
    assert panels.median_curve(cell).median == pytest.approx([20])
    assert panels.distribution(cell).losses == pytest.approx([10, 20, 30])
    assert panels.paths(cell).losses == pytest.approx([10, 20, 30])
    assert panels.valley(cell, cell, "momentum").losses == pytest.approx([10, 20, 30])
    assert panels.loss_label("kin8nm") == "test MSE × 1 000"
    assert panels.loss_label("uci-energy") == "test MSE"


def test_distribution(tmp_path: Path) -> None:
    found = panels.distribution(made(tmp_path, curve=[[3, NAN, 1, 2]]))
    assert found.losses.tolist() == [1, 2, 3]
    assert found.share.tolist() == [0.25, 0.5, 0.75]


def test_distribution_of_nothing(tmp_path: Path) -> None:
    for name, cell in {
        "lost": made(tmp_path / "a", curve=[[NAN, NAN]]),
        "too few": made(tmp_path / "b", "random-3-batched", [[1.0]]),
    }.items():
        found = panels.distribution(cell)
        assert len(found.losses) == len(found.share) == 0, name


def test_distribution_of_one(tmp_path: Path) -> None:
    found = panels.distribution(made(tmp_path, curve=[[3]]))
    assert (found.losses.tolist(), found.share.tolist()) == ([3], [1])


def test_paths_begin_at_the_start(tmp_path: Path) -> None:
    cell = made(tmp_path, start=[0.4, 0.1, 0.2])
    found = panels.paths(cell, "momentum")
    assert found.steps.tolist() == [0, 10, 20]
    assert found.values == pytest.approx(np.array([[0.1, 0.2, 0.4], [0.05, 0.1, 0.2], [0.025, 0.05, 0.1]]))
    assert found.losses.tolist() == [2, 3, 1]
    assert panels.paths(cell, "lr", count=None).values[0].tolist() == [0.4, 0.1, 0.2]


def test_a_sample_of_paths_reaches_from_end_to_end(tmp_path: Path) -> None:
    cell = made(tmp_path, curve=[[1.0] * 101], start=list(range(101)))
    assert panels.paths(cell, count=5).values[0].tolist() == [0, 25, 50, 75, 100]


def test_valley(tmp_path: Path) -> None:
    untuned = made(tmp_path, "random", [[1, NAN]], start=[0.1, 0.2])
    tuned = made(tmp_path, "one-pass", [[7, 8], [5, 6]], start=[0.4, 0.8])
    found = panels.valley(untuned, tuned, "weight_decay")
    assert found.lr.tolist() == found.other.tolist() == [0.1, 0.2]
    np.testing.assert_array_equal(found.losses, [1, NAN])
    assert found.tuned_lr == pytest.approx(np.array([[0.4, 0.8], [0.2, 0.4], [0.1, 0.2]]))
    assert found.tuned_losses.tolist() == [5, 6]


def test_a_path_ends_where_it_was_last_seen() -> None:
    values = np.array([[1.0, 2.0, 3.0], [4.0, NAN, NAN], [5.0, 6.0, NAN]])
    assert panels._last_finite(values).tolist() == [5, 6, 3]


def test_few_huge_losses_do_not_stretch_an_axis() -> None:
    low, high = panels.span([np.array([1.0] * 99 + [1e30, NAN, 0.0, -1.0])])
    assert 0.5 < low < 1 < high < 20
    assert panels.span([np.array([NAN])]) == panels.span([]) == (0.1, 1.0)


# --- drawn ---


def lines(figure: Figure) -> int:
    return sum(len(axes.lines) for axes in figure.axes)


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_draws(name: str, tmp_path: Path) -> None:
    figure = figure_of(name, made_many(tmp_path))
    saved = figures.save(figure, tmp_path / "a.figure")
    assert saved == [tmp_path / "a.figure.png", tmp_path / "a.figure.pdf"]
    assert [path.read_bytes()[:4] for path in saved] == [b"\x89PNG", b"%PDF"]
    assert not list(tmp_path.glob(".*"))
    assert lines(figure) > 0


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("curve", [[[NAN, NAN]], [[3.0]], [[0.0, 1e38]]], ids=["lost", "single", "extreme"])
def test_every_figure_draws_odd_cells(name: str, curve: list[list[float]], tmp_path: Path) -> None:
    cells = [made(tmp_path, method, curve) for method in ("random", "random-3-batched", "one-pass", "pbt-random")]
    figures.save(figure_of(name, cells), tmp_path / name)


def test_every_figure_draws_a_real_run(tmp_path: Path) -> None:
    cells = [
        compute(Request("diabetes", method, 4, 30), tmp_path)
        for method in ("random", "one-pass-wd-hdlr-m", "one-pass", "pbt-random")
    ]
    for name in FIGURES:
        figures.save(figure_of(name, cells), tmp_path / name)


@pytest.mark.parametrize("count", range(1, 9))
def test_one_panel_a_data_set(count: int, tmp_path: Path) -> None:
    datasets = [name for name in panels.PROTOCOLS if name not in ("digits", "diabetes")][:count]
    figure = figure_of("cdfs", [made(tmp_path, dataset=dataset) for dataset in datasets])
    assert [axes.get_title() for axes in figure.axes] == [title_of(dataset) for dataset in datasets]
    assert figures._shape(count)[1] <= 4


def test_one_panel_a_method_that_tunes_the_learning_rate(tmp_path: Path) -> None:
    figure = figure_of("learning-rates", made_many(tmp_path, ["uci-energy"]))
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert titles == [row.label for row in METHODS.values() if row.search is None and row.tunes("lr")]
    assert METHODS["random"].label not in titles and METHODS["lorraine"].label not in titles


def test_methods_look_the_same_everywhere_and_different_from_each_other() -> None:
    looks = {(style["color"], style.get("linestyle", "-")) for style in map(style_of, METHODS)}
    assert len(looks) == len(METHODS)
    assert set(STYLES) <= set(METHODS)


def test_nothing_to_show(tmp_path: Path) -> None:
    for name in FIGURES:
        with pytest.raises(UsageError, match=f"no finished runs that the figure {name}"):
            figure_of(name, [])
    with pytest.raises(UsageError):
        figure_of("demo", [made(tmp_path)])
    with pytest.raises(UsageError):
        figure_of("learning-rates", [made(tmp_path, "random")])


# --- searches ---


def test_the_lowest_loss_so_far_over_time(tmp_path: Path) -> None:
    curve = [[5.0, 9.0, NAN], [6.0, 3.0, 8.0], [1.0, 4.0, NAN]]
    found = panels.incumbent(made(tmp_path, curve=curve, seconds_between=[1.0, 2.0, 4.0]))
    assert found.seconds.tolist() == [1, 3, 7]
    assert found.lowest.tolist() == [5, 3, 1]
    assert (found.error > 0).all()


def test_of_bayesian_optimisation_it_is_the_median_of_repetitions(tmp_path: Path) -> None:
    curve = [[5.0, 9.0, 2.0], [6.0, 3.0, 1.0]]
    found = panels.incumbent(made(tmp_path, "bayesian-optimisation", curve, seconds_between=[10.0, 10.0]))
    assert found.lowest.tolist() == [5, 3]


def test_searches_are_shown_where_they_belong(tmp_path: Path) -> None:
    cells = made_many(tmp_path, ["uci-energy"])
    for name in ("curves", "cdfs"):
        labels = [text.get_text() for text in figure_of(name, cells).legends[0].get_texts()]
        assert labels == [row.label for row in METHODS.values() if row.search is None]
    labels = [text.get_text() for text in figure_of("search-curves", cells).legends[0].get_texts()]
    assert labels == [row.label for row in METHODS.values() if row.best_of == 1]
    with pytest.raises(UsageError, match="no finished runs that the figure search-curves could show"):
        figure_of("search-curves", [cell for cell in cells if cell.request.method in ALONE])
