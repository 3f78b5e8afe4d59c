"""What a history tells, and that its schedule replays a run without a tuner."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onepass
from tests.problems import mlp, mse, regression, train_step

DOCS = Path(__file__).parents[1] / "docs" / "schedulers.md"


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


def test_schedule_resumes_where_it_was() -> None:
    _, tuner = tuned()
    found = tuner.history.schedule()
    optimizers = [torch.optim.AdamW(mlp(3, 8, 1).parameters(), lr=0.5) for _ in range(2)]
    first, second = (onepass.Schedule(found.steps, found.values).attach(optimizer) for optimizer in optimizers)
    for _ in range(7):
        first.step()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for _ in range(7):
        first.step()
        second.step()
    assert optimizers[0].param_groups[0]["betas"] == optimizers[1].param_groups[0]["betas"]
    assert first.get_last_lr() == second.get_last_lr() == [tuner.history[3].values["lr"][0]]


@pytest.mark.parametrize("place", [0, 1])
def test_the_json_is_replayed_without_onepass(place: int, tmp_path: Path) -> None:
    """By the two recipes of docs/schedulers.md: all values in a plain loop, or the learning rate by ``LambdaLR``."""
    _, tuner = tuned()
    tuner.history.schedule().to_json(tmp_path / "schedule.json")
    recipe = re.findall(r"```python\n(import json.*?)```", DOCS.read_text(), re.S)[place]
    assert "onepass" not in recipe
    model = mlp(3, 8, 1)
    seen: list[tuple[float, float]] = []

    class Watched(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            seen.append((self.param_groups[0]["lr"], self.param_groups[0]["betas"][0]))
            super().step()

    recipe = recipe.replace("schedule.json", str(tmp_path / "schedule.json")).replace("torch.optim.AdamW", "AdamW")
    batches = [regression()] * 30
    exec(recipe, {"torch": torch, "AdamW": Watched, "model": model, "train_loader": batches, "loss": mse})
    records = [tuner.history.start, *(record.values for record in tuner.history)]
    wanted = [(records[step // 3]["lr"][0], records[step // 3]["beta1"][0]) for step in range(30)]
    if place == 1:
        wanted = [(lr, 0.9) for lr, _ in wanted]
    assert seen == wanted


def test_schedule_checks_the_groups() -> None:
    _, tuner = tuned(3)
    model = mlp(3, 8, 1)
    with pytest.raises(ValueError, match="must have 1 param groups, but got 4"):
        tuner.history.schedule().attach(torch.optim.AdamW(onepass.per_tensor(model.parameters())))


def test_schedule_leaves_out_what_the_guard_undid() -> None:
    record = onepass.TunerStep
    lrs = [(10, 0.2, None), (20, 0.4, None), (25, 0.1, 9), (30, 0.2, None), (40, 0.3, None)]
    history = onepass.History({"lr": [0.1], "l2": [1.0]}, extra=("l2",))
    for step, lr, back in lrs:
        history.append(record(step, {"lr": [lr], "l2": [1.0]}, {}, 1.0, guard="back" if back else None, back_to=back))
    schedule = history.schedule()
    assert schedule.steps == [0, 9, 14, 24]
    assert [values["lr"][0] for values in schedule.values] == [0.1, 0.1, 0.2, 0.3]
    assert "l2" not in schedule.values[0]


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda s: s.step(), r"call schedule\.attach\(optimizer\)"),
        (
            lambda s: s.attach(torch.optim.SGD(mlp(3, 1).parameters())),
            r"must have 'beta1' in its param groups, but SGD has",
        ),
    ],
)
def test_schedule_misused(use: Callable[[onepass.Schedule], Any], message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        use(tuned(3)[1].history.schedule())


def test_values_found_beside_a_scheduler_are_not_replayed() -> None:
    model = mlp(3, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    tuner = onepass.Tuner(model, optimizer, mse, [regression()], interval=1)
    for _ in range(3):
        train_step(model, optimizer, regression())
        tuner.step(regression())
        scheduler.step()
    with pytest.raises(ValueError, match="beside an LR scheduler cannot be replayed"):
        tuner.history.schedule()


def test_representations_are_short() -> None:
    _, tuner = tuned()
    for thing in (tuner, tuner.history, tuner.history.schedule()):
        assert "lr" in repr(thing)
        assert len(repr(thing)) < 100


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
