"""The smaller studies: which cells they need, what they say of them, and whole commands."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from onepass.cli import main
from onepass.experiments.artefacts import ARTEFACTS, EVERYTHING
from onepass.experiments.methods import METHODS
from onepass.experiments.protocol import PROTOCOLS
from onepass.experiments.runs import Cell, Request, UsageError, compute, read
from onepass.experiments.studies import grids, illustrations, landscape, pictures, plans, proportions
from onepass.experiments.tables import known
from onepass.experiments.variants import Variant

ENERGY = Request("uci-energy", "one-pass-wd-lr-m", 200, 4000)
SMALL = ["--replicas", "4", "--steps", "20", "--device", "cpu"]
NAN = math.nan


def of(method: str, request: Request = ENERGY) -> Request:
    return replace(request, method=method)


def made(out: Path, request: Request, losses: list[float], **other: object) -> Cell:
    """A cell on disk that ends so; its test loss falls to there by half."""
    folder = out / request.variant.place / request.dataset / request.method
    folder.mkdir(parents=True)
    plain = [value if math.isfinite(value) else None for value in losses]
    starts = {name: np.geomspace(1e-5, 1e-1, len(losses)).tolist() for name in ("lr", "weight_decay", "momentum")}
    kept = {"metric": "test MSE", "seconds": 1.0, "device": "cpu", "resumed": False, "versions": {}, "start": starts}
    described = {**kept, "request": asdict(request), "values": plain, "test": plain, "valid": plain, "end": starts}
    (folder / "cell.json").write_text(json.dumps({**described, "returns": [0] * len(losses), **other}))
    steps = np.arange(1, 11) * max(1, request.steps // 10)
    curve = np.geomspace(2, 1, 10)[:, None] * np.array(losses)
    paths = {name: np.linspace(1, 0.5, 10)[:, None] * np.array(value) for name, value in starts.items()}
    np.savez(folder / "curves.npz", steps=steps, test=curve, seconds=np.ones(10), **paths)
    return read(folder)


# --- drawings of ideas ---


def test_the_series_tends_to_the_implicit_hypergradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(illustrations, "LOOKBACK", 300)
    for value in (-2.5, -1.0, 0.3):
        w = -math.sin(value)  # the best response, where a weight step goes nowhere
        assert illustrations.series(w, w, value) == pytest.approx(illustrations.implicit(w, w, value))


def test_one_term_of_the_series_is_the_derivative_through_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(illustrations, "LOOKBACK", 1)
    before, value = -2.0, torch.tensor(-1.3, dtype=torch.float64, requires_grad=True)
    w = before - illustrations.STEP * 2 * (before + value.sin())
    loss = (w - 1) ** 2 + (value - 1) ** 2
    loss.backward()
    assert value.grad is not None
    assert illustrations.series(before, w.item(), value.item()) == pytest.approx(value.grad.item())


def test_both_paths_begin_alike_and_lower_the_validation_loss() -> None:
    found = illustrations.toy()
    assert found.exact.shape == found.approximate.shape == (31, 2)
    assert (found.exact[:3] == found.approximate[:3]).all(), "weights move first"
    for path in found:
        losses = illustrations.validation_loss(*path.T)
        assert losses[-1] < 0.1 * losses[0]


def test_scaled_landscapes_give_the_same_steps() -> None:
    classical, ours = (illustrations.pseudo_losses(scaled=scaled) for scaled in (False, True))
    assert ours.ends == pytest.approx(classical.ends)
    assert ours.heights == pytest.approx(np.array(illustrations.RATES)[:, None] * classical.heights)


# --- which cells ---


def test_sensitivity_has_as_many_hyper_steps_everywhere() -> None:
    found = [one for method in ARTEFACTS["sensitivity"].methods for one in plans.sensitivity(of(method), None)]
    assert len(found) == 1 + 100 + 55 and {one.replicas for one in found} == {100}
    for one in found[1:]:
        interval, lookback = one.variant.interval, one.variant.lookback
        assert interval and lookback and one.steps == 400 * interval
        assert one.method != plans.EXACT or lookback <= interval
    assert plans.sensitivity(of(plans.UNTUNED), 7)[0].steps == 4000


def test_accuracy_ends_with_the_first_hyper_step() -> None:
    found = plans.hypergradient_accuracy(ENERGY, None)
    assert len(found) == 2 * 55 and {one.replicas for one in found} == {50}
    assert all(one.steps == one.variant.interval for one in found)


def test_short_horizons() -> None:
    def sizes(dataset: str, method: str) -> list[tuple[int, int]]:
        steps = PROTOCOLS[dataset].steps
        found = plans.short_horizon(Request(dataset, method, PROTOCOLS[dataset].replicas, steps), None)
        return [(one.replicas, one.steps) for one in found]

    assert sizes("uci-energy", "random") == [(60, 200), (200, 4000)]
    assert sizes("uci-energy", plans.LONG) == [(60, 200)]
    assert sizes("uci-energy", plans.FULL) == [(200, 4000)]  # or 36, unless somebody asks
    assert sizes("uci-energy", plans.MEDIUM) == []
    assert sizes("kin8nm", "random") == [(60, 200)] and sizes("kin8nm", "baydin") == []
    assert sizes("fashion-mnist", plans.MEDIUM) == [(100, 10_000)]
    assert sizes("fashion-mnist", plans.LONG) == [(60, 1000)]


def test_every_cell_has_a_place_of_its_own() -> None:
    for name, artefact in ARTEFACTS.items():
        places: dict[tuple[str, ...], Request] = {}
        for dataset in artefact.every:
            for method in artefact.methods:
                for one in artefact.plan(Request(dataset, method, 100, 4000), None):
                    place = (one.variant.place, dataset, method)
                    assert places.setdefault(place, one) == one, name
                    assert not one.variant.place or one.variant.place.split("/")[0] == name


def test_everything_is_each_artefact_once() -> None:
    assert sorted(EVERYTHING) == sorted(ARTEFACTS)


# --- the paper's numbers ---


@pytest.mark.parametrize(
    ("request_", "metric", "mean"),
    [
        (Request("uci-energy", plans.LONG, 60, 200, variant=Variant(plans.TRUNCATED)), "test MSE", 14),
        (Request("kin8nm", "random", 60, 200, variant=Variant(plans.TRUNCATED)), "test MSE", 56),
        (Request("fashion-mnist", plans.LONG, 60, 1000, variant=Variant(plans.TRUNCATED)), "test error", 0.19),
        (Request("fashion-mnist", plans.LONG, 60, 1000, variant=Variant(plans.TRUNCATED)), "test cross-entropy", 0.45),
        (Request("uci-energy", plans.FULL, 36, 4000), "test MSE", 5.2),
        (Request("fashion-mnist", plans.MEDIUM, 100, 10_000), "test error", 0.16),
        (
            Request(
                "uci-energy",
                "one-pass-wd-hdlr-m",
                200,
                4000,
                variant=Variant("validation-size/67.5-22.5-10", validation=0.225),
            ),
            "test MSE",
            0.35,
        ),
    ],
)
def test_published_numbers_stand_beside(request_: Request, metric: str, mean: float) -> None:
    found = known(request_, metric)
    assert found is not None and found.mean == mean
    assert known(replace(request_, steps=20), metric) is None
    assert known(replace(request_, split=3), metric) is None


def test_other_variants_have_none() -> None:
    variant = Variant("sensitivity/T10-i5", 10, 5)
    assert known(replace(ENERGY, variant=variant), "test MSE") is None


# --- what they say ---


def test_sensitivity_by_hand(tmp_path: Path) -> None:
    every = []
    for method, number in ((plans.SERIES, 0.5), (plans.EXACT, 0.25)):
        for one in plans.sensitivity(of(method), 3)[:12]:
            assert one.variant.interval and one.variant.lookback
            value = number * one.variant.interval + one.variant.lookback
            every.append(made(tmp_path, one, [value, 0.0, NAN, 2 * value]))
    every.append(made(tmp_path, plans.sensitivity(of(plans.UNTUNED), 3)[0], [2.0, 4.0, NAN]))
    (found,) = grids.sensitivity(every)
    untuned, series, exact = (one.numbers for one in found.maps)
    assert found.times == 1000 and "400 hyper steps" in found.note
    assert untuned.shape == (10, 1) and untuned[-1, 0] == pytest.approx(3000) and untuned[0, 0] == pytest.approx(6000)
    assert series.shape == (2, 10) and series[0, 4] == pytest.approx(5500)
    assert exact[1, 1] == pytest.approx(2500) and math.isnan(exact[0, 1])
    assert len(grids.tables([found])) == 3
    assert pictures.picture_of("sensitivity", every).get_axes()


def test_accuracy_by_hand(tmp_path: Path) -> None:
    one = plans.hypergradient_accuracy(ENERGY, 3)[0]
    near = made(tmp_path, one, [1.0] * 4, hypergradients={"lr": [1.0, 2.0, None, 3.0], "momentum": [1.0] * 4})
    exact = made(
        tmp_path, of(plans.EXACT, one), [1.0] * 4, hypergradients={"lr": [2.0, 2.0, 1.0, 0.0], "momentum": [1.0] * 4}
    )
    assert grids.errors(near, exact, "lr").tolist() == [0.5, 0.0], "of the others nothing can be said"
    mean, _ = grids.hypergradient_accuracy([near, exact])
    assert [round(float(one.numbers[0, 0]), 6) for one in mean.maps if "learning rate" in one.title] == [25.0]


def test_cells_of_an_older_version_have_no_hypergradients(tmp_path: Path) -> None:
    one = plans.hypergradient_accuracy(ENERGY, 3)[0]
    older = [made(tmp_path, of(method, one), [1.0]) for method in (plans.SERIES, plans.EXACT)]
    assert grids.hypergradient_accuracy(older) == []
    with pytest.raises(UsageError, match="no finished runs that hypergradient-accuracy could show"):
        pictures.picture_of("hypergradient-accuracy", older)


def test_a_landscape_goes_through_what_was_seen(tmp_path: Path) -> None:
    still = made(tmp_path, plans.trajectories(of(plans.UNTUNED), 6)[0], [1.0, 1.1, 1.2, 1.3, 1.4, 1e9, NAN])
    lr, decay, losses = landscape.interpolated(still)
    assert losses.shape == (len(decay), len(lr)) == (80, 80)
    assert losses[0, 0] == pytest.approx(1.0, rel=0.5)
    assert 20 < losses[-1, -1] < 300, "what is lost counts as 150"
    tuned = made(tmp_path, plans.trajectories(ENERGY, 6)[0], [1.0, NAN])
    (found,) = landscape.landscapes([still, tuned])
    assert found.trails[0].lr.shape == (11, 2)
    assert pictures.picture_of("trajectories", [still, tuned]).get_axes()
    with pytest.raises(UsageError, match="not both are there"):
        pictures.picture_of("trajectories", [still])


def test_sizes_of_the_validation_set(tmp_path: Path) -> None:
    every = [made(tmp_path, one, [1.0, 2.0]) for one in reversed(plans.validation_size(ENERGY, None))]
    ((shares,),) = (split.shares for split in proportions.splits(every))
    assert shares.share.tolist() == [0.1, 0.225, 0.3375, 0.45]
    assert shares.median.tolist() == [1.5] * 4 and shares.paper_median.tolist() == [0.30, 0.34, 0.47, 0.52]


# --- whole commands ---


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "LONGEST", 2)
    monkeypatch.setattr(plans, "WIDER", 2)
    for name in ("diabetes", "digits"):
        monkeypatch.setitem(PROTOCOLS, name, replace(PROTOCOLS[name], trainings=2))


FILES = {
    "toy": ["toy.png", "toy.pdf"],
    "pseudo-loss": ["pseudo-loss.png"],
    "hypergradient-accuracy": ["hypergradient-accuracy.png", "hypergradient-accuracy.md"],
    "sensitivity": ["sensitivity.png", "sensitivity.md"],
    "trajectories": ["trajectories.png"],
    "validation-size": ["validation-size.png", "validation-size.md"],
    "short-horizon": ["short-horizon.md", "short-horizon-truncated.png", "short-horizon-diabetes.pdf"],
}


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("name", FILES)
def test_reproduce(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = not ARTEFACTS[name].methods  # with nothing trained
    line = ["reproduce", name, *([] if drawn else [*SMALL, "--datasets", "diabetes"]), "--out", str(tmp_path)]
    if name == "short-horizon":
        line += ["--methods", "random", "long-diff-through-opt", "full-diff-through-opt"]
    assert main(line) == 0
    for file in FILES[name]:
        assert (tmp_path / file).stat().st_size > 200, file
    assert main(line) == 0
    assert drawn or " 0 to compute" in capsys.readouterr().err
    assert (tmp_path / "report.html").exists()


@pytest.mark.usefixtures("tiny")
def test_all_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    methods = ["random", "one-pass-wd-lr-m", "diff-through-opt"]
    line = ["reproduce", "all", *SMALL, "--datasets", "diabetes", "--methods", *methods, "--out", str(tmp_path)]
    assert main(line) == 0
    shown = capsys.readouterr()
    told = shown.err.splitlines()
    planned, first = (next(k for k, text in enumerate(told) if word in text) for word in ("  in all", "[1/"))
    drawn = next(k for k, text in enumerate(told) if "toy.png" in text)
    assert planned < drawn < first, "a plan, and something to see, before anything is trained"
    assert "H200" in told[1] and "hypergradient-accuracy" in told[4] and "GiB" in told[4]
    for name in (
        "uci.md",
        "sensitivity.png",
        "hypergradient-accuracy.png",
        "short-horizon-truncated.png",
        "report.html",
    ):
        assert (tmp_path / name).exists(), name
    assert not (tmp_path / "penn-treebank.md").exists()


@pytest.mark.usefixtures("tiny")
def test_what_is_wrong_with_a_cell_is_told_and_the_rest_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["reproduce", "validation-size", *SMALL, "--datasets", "diabetes", "--out", str(tmp_path)]
    assert main(line) == 0
    file = tmp_path / "validation-size" / "45-45-10" / "diabetes" / "one-pass-wd-hdlr-m" / "cell.json"
    whole = file.read_text()
    for harmed, told in (
        ("{", "holds no readable result"),
        ('{"something": "else"}', "holds no readable result"),
        (whole.replace('"replicas": 4', '"replicas": 9'), "a run with replicas 9"),
    ):
        file.write_text(harmed)
        capsys.readouterr()
        assert main([*line, "--methods", "one-pass-wd-lr-m"]) == 0
        (complaint,) = [text for text in capsys.readouterr().err.splitlines() if text.startswith("left out:")]
        assert told in complaint and "45-45-10" in complaint
        assert (tmp_path / "validation-size.md").read_text().count("Ours WD+HDLR+M") == 3
    assert main(line) == 2, "asked for, it cannot be left out"
    assert told in capsys.readouterr().err


def test_exact_methods_run_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "diabetes", "medium-diff-through-opt", *SMALL, "--json", "--quiet"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["values"]) == 4 and found["diverged"] == 0
    cell = compute(Request("diabetes", plans.MEDIUM, 2, 20), tmp_path)
    assert {*cell.hypergradients} == {*METHODS[plans.MEDIUM].options["tune"]}
