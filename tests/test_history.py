"""What a history tells, and that its schedule replays a run without a tuner."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import onepass
from tests.problems import mlp, mse, regression, train_step


def tuned(steps: int = 30) -> tuple[nn.Module, onepass.Tuner]:
    model = mlp(3, 8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tuner = onepass.Tuner(model, optimizer, mse, [regression(seed=2)], interval=3)
    for _ in range(steps):
        train_step(model, optimizer, regression())
        tuner.step(regression())
    return model, tuner


def test_schedule_replays_the_run_without_a_tuner(tmp_path: Path) -> None:
    model, tuner = tuned()
    tuner.history.schedule().to_json(tmp_path / "schedule.json")
    again = mlp(3, 8, 1)
    optimizer = torch.optim.AdamW(again.parameters(), lr=0.5)  # the schedule knows better
    schedule = onepass.Schedule.from_json(tmp_path / "schedule.json").attach(optimizer)
    for _ in range(30):
        train_step(again, optimizer, regression())
        schedule.step()
    for mine, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_schedule_checks_the_groups() -> None:
    _, tuner = tuned(3)
    model = mlp(3, 8, 1)
    with pytest.raises(ValueError, match="must have 1 param groups, but got 4"):
        tuner.history.schedule().attach(torch.optim.AdamW(onepass.per_tensor(model.parameters())))


def test_dict_is_json() -> None:
    _, tuner = tuned()
    found = json.loads(json.dumps(tuner.history.to_dict()))
    assert found["start"]["lr"] == [1e-4]
    assert [record["step"] for record in found["records"]] == list(range(3, 31, 3))


def test_csv_has_a_row_a_hyper_step(tmp_path: Path) -> None:
    _, tuner = tuned()
    tuner.history.to_csv(tmp_path / "history.csv")
    rows = list(csv.DictReader((tmp_path / "history.csv").open()))
    assert len(rows) == 11
    assert float(rows[0]["lr[0]"]) == 1e-4
    assert float(rows[-1]["lr[0]"]) == tuner.values()["lr"][0]
    assert float(rows[-1]["hypergradient of lr[0]"]) == tuner.history[-1].hypergradients["lr"][0]


def test_plot_draws_every_value(tmp_path: Path) -> None:
    _, tuner = tuned()
    curves = tuner.history.curves()
    assert set(curves) == {"validation loss", *tuner.values()}
    assert curves["lr"][""][0][:3] == [0, 3, 6]
    assert curves["lr"][""][1][-1] == tuner.values()["lr"][0]
    tuner.history.plot(tmp_path / "history.png")
    assert (tmp_path / "history.png").read_bytes().startswith(b"\x89PNG")


def test_per_element_values_are_summed_up(tmp_path: Path) -> None:
    model = mlp(3, 8, 1)
    optimizer = onepass.optim.SGD(onepass.per_element(model.parameters(), lr=1e-2))
    tuner = onepass.Tuner(model, optimizer, mse, [regression(seed=2)], interval=1)
    for _ in range(2):
        train_step(model, optimizer, regression())
        record = tuner.step(regression())
    assert record is not None
    assert record.values["lr"][0].shape == (8, 3)  # the record at hand has all; the history a summary
    assert set(tuner.history[-1].values["lr"][0]) == {"min", "median", "max"}
    tuner.history.to_csv(tmp_path / "history.csv")
    tuner.history.plot(tmp_path / "history.png")
    with pytest.raises(ValueError, match="only one value a group can be replayed, but 'lr' has one per element"):
        tuner.history.schedule()
