"""What studies change about a training, and methods that look far: each against the same by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import onepass
from onepass.experiments.datasets import load
from onepass.experiments.methods import FAR_SIGHTED, METHODS
from onepass.experiments.protocol import PROTOCOLS, STARTS, squared_error
from onepass.experiments.runs import Request, compute, read
from onepass.experiments.training import train
from onepass.experiments.variants import USUAL, Variant, divided, varied

DATA = load("diabetes")
PROTOCOL = replace(PROTOCOLS["diabetes"], trainings=3)


def by_hand(start: Any = None, **options: Any) -> onepass.Population:
    return onepass.Population(
        lambda: PROTOCOL.make_model(DATA), squared_error, replicas=3, start=start or STARTS, **options
    )


def varied_training(variant: Variant, method: str, steps: int) -> Any:
    return train(*varied(variant, PROTOCOL, METHODS[method], DATA), replicas=3, steps=steps)


@pytest.mark.parametrize(("method", "name"), [("one-pass-wd-lr-m", "lookback"), ("diff-through-opt", "unroll")])
def test_interval_and_look_back(method: str, name: str) -> None:
    found = varied_training(Variant("somewhere", interval=3, lookback=2), method, 12)
    population = by_hand(**{**METHODS[method].options, "interval": 3, name: 2})
    population.run([DATA.train], [DATA.valid], steps=12)
    for tuned, values in population.values().items():
        assert torch.equal(found.end[tuned], values)
    for tuned, slopes in found.hypergradients.items():
        assert torch.equal(slopes, population.history.hypergradients[tuned][-1])


def test_double_precision_begins_from_the_same_weights() -> None:
    single, double = (
        varied_training(Variant(interval=2, double=each), "one-pass-wd-lr-m", 2).hypergradients
        for each in (False, True)
    )
    for name in single:
        assert single[name].tolist() == pytest.approx(double[name].tolist(), rel=1e-3)
        assert not torch.equal(single[name], double[name])


def test_other_starts() -> None:
    wide = varied_training(Variant(start="far and wide, without momentum"), "random", 1)
    assert wide.start.keys() == {"lr", "weight_decay"} and (wide.end["momentum"] == 0).all()
    _, _, data = varied(USUAL, PROTOCOL, METHODS["random"], DATA)
    assert data is DATA


def test_a_larger_validation_set_has_the_same_rows_in_all() -> None:
    found = divided(DATA, 0.45)
    for k in (0, 1):
        before, after = (torch.cat([data.train[k], data.valid[k]]) for data in (DATA, found))
        assert torch.equal(before, after) and torch.equal(found.test[k], DATA.test[k])
    assert len(found.valid[0]) == round(0.45 * 442)
    for share in (0.0, 0.95):
        with pytest.raises(ValueError, match="must leave rows for both parts, but got"):
            divided(DATA, share)


def test_through_a_whole_training_again_and_again() -> None:
    """Two trainings with a hyper step at their end, through all of their steps; and the one that counts."""
    found = train(PROTOCOL, METHODS["full-diff-through-opt"], DATA, replicas=3, steps=12)
    tuner = by_hand(**{**METHODS["diff-through-opt"].options, "interval": 12, "unroll": 12}, restart=True)
    tuner.run([DATA.train], [DATA.valid], steps=24)
    last = by_hand({**STARTS, **tuner.values()}, tune=())
    last.run([DATA.train], steps=12)
    assert torch.equal(found.test, last.evaluate(squared_error, DATA.test).double() * DATA.target_scale**2)
    assert torch.equal(found.start["lr"], tuner.history.start["lr"])
    assert torch.equal(found.end["lr"].float(), tuner.values()["lr"].float())
    assert found.curve_steps[-1] == 12


@pytest.mark.parametrize(("steps", "horizon"), [(400, 200), (30, 30)])
def test_a_horizon_is_at_most_a_whole_training(steps: int, horizon: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def note(*args: Any, **options: Any) -> None:
        made.append((options["interval"], options["unroll"], options.get("restart", False)))
        raise KeyError

    monkeypatch.setattr("onepass.experiments.training.Population", note)
    for name in FAR_SIGHTED:
        with pytest.raises(KeyError):
            train(PROTOCOL, METHODS[name], DATA, replicas=3, steps=steps)
    assert made == [(horizon, horizon, False), (steps, steps, True), (steps, steps, True)]


def test_interrupted_between_two_trainings_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request("diabetes", "long-diff-through-opt", 2, 8)
    monkeypatch.setitem(PROTOCOLS, "diabetes", PROTOCOL)
    whole = compute(request, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr("onepass.experiments.runs._save", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            compute(request, tmp_path / "parts")
    again = compute(request, tmp_path / "parts")
    assert again.values == whole.values and again.start == whole.start and again.resumed


def _interrupt(*args: object) -> None:
    raise KeyboardInterrupt


def test_a_variant_is_kept_with_its_cell(tmp_path: Path) -> None:
    variant = Variant("sensitivity/T2-i2", 2, 2, ends_alone=True)
    cell = compute(Request("diabetes", "one-pass-wd-lr-m", 2, 4, variant=variant), tmp_path)
    assert cell.folder == tmp_path / "sensitivity" / "T2-i2" / "diabetes" / "one-pass-wd-lr-m"
    assert read(cell.folder).request.variant == variant
    assert cell.to_json()["variant"]["interval"] == 2
    assert "variant" not in compute(Request("diabetes", "random", 2, 4), tmp_path).to_json()
