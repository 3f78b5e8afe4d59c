"""Plans: the sizes that they reckon with are those of the networks, and nothing counts twice."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from onepass.experiments import costs
from onepass.experiments.costs import UNITS, bytes_of, plan, seconds_of, steps_of
from onepass.experiments.datasets import load
from onepass.experiments.methods import METHODS
from onepass.experiments.protocol import PROTOCOLS
from onepass.experiments.runs import Request

ENERGY = Request("uci-energy", "random", 200, 4000)


def check(name: str, data_dir: Path | None) -> None:
    protocol = PROTOCOLS[name]
    data = load(protocol.data or name, data_dir=data_dir)
    assert UNITS[name].weights == sum(p.numel() for p in protocol.make_model(data).parameters())
    assert UNITS[name].rows == (50 if protocol.others else len(data.train[0]))


@pytest.mark.parametrize("name", ["diabetes", "digits"])
def test_sizes(name: str) -> None:
    check(name, None)


@pytest.mark.parametrize("name", [name for name in UNITS if name.startswith(("uci", "kin", "fashion"))])
def test_sizes_of_real_data(name: str, real_data: Path) -> None:
    check(name, real_data)


def test_every_data_set_has_a_cost() -> None:
    assert {*UNITS} == {*PROTOCOLS}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_more_takes_longer(method: str, device: str) -> None:
    one = replace(ENERGY, method=method)
    assert steps_of(one) >= 4000 or METHODS[method].search is not None
    longer = replace(one, steps=16_000)
    assert 0 < seconds_of(one, device) < seconds_of(longer, device)
    assert bytes_of(one, device) < bytes_of(replace(one, replicas=1000), device)


def test_a_cell_that_several_need_is_counted_once() -> None:
    wanted = {"uci": [ENERGY], "uci-curves": [ENERGY], "toy": list[Request]()}
    lines = plan(wanted, [], "cpu")
    assert "1 cell," in lines[1] and "nothing more" in lines[2] and "nothing more" in lines[3] and len(lines) == 4
    assert plan(wanted, [ENERGY], "cpu") == []


def test_what_nobody_has_measured_is_not_made_up() -> None:
    text = replace(ENERGY, dataset="penn-treebank")
    assert math.isnan(seconds_of(text, "cpu"))
    lines = plan({"uci": [ENERGY], "penn-treebank": [text]}, [], "cpu")
    assert "unknown" in lines[-1] and "in all" in lines[-1] and "H200" in lines[0]


def test_estimates_agree_with_results_on_record() -> None:
    """Those that they come from: whole cells on an H200."""
    for dataset, method, replicas, steps, seconds in (
        ("uci-energy", "one-pass-wd-lr-m", 200, 4000, 2.0),
        ("kin8nm", "diff-through-opt", 200, 4000, 13.1),
        ("uci-power", "random", 200, 4000, 7.8),
        ("uci-wine", "lorraine", 200, 4000, 2.8),
        ("fashion-mnist", "baydin", 100, 10_000, 25.3),
        ("fashion-mnist", "one-pass-wd-lr-m", 100, 10_000, 13.4),
        ("fashion-mnist-batchnorm", "random", 100, 10_000, 7.7),
    ):
        found = seconds_of(Request(dataset, method, replicas, steps), "cuda")
        assert 0.5 < found / seconds < 2, dataset
    assert costs.MEASURED
