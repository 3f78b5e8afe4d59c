"""What a population tells: values, history, metrics, its best replicas, and how far it is."""

from __future__ import annotations

import io
import itertools
import json
import math
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onepass
from onepass.journal import LARGEST, PopulationHistory
from onepass.progress import Progress, summary
from onepass.replicas import Record
from tests.populations import TRAIN, VALID, alone, assert_close, batches, flat, population, trained, weights
from tests.problems import Batch, cross_entropy, mse, regression

pytestmark = pytest.mark.usefixtures("float64")

LOST: dict[str, Any] = {"lr": [0.05, 1e200, 0.01]}


# --- values and history ---


def test_values_have_one_number_a_replica() -> None:
    found = trained(10, start={"lr": onepass.LogUniform(1e-3, 1e-1), "momentum": 0.9, "weight_decay": [1e-3, 1e-4, 0]})
    values = found.values()
    assert {name: tuple(value.shape) for name, value in values.items()} == dict.fromkeys(values, (3,))
    assert set(values) == {"lr", "momentum", "weight_decay"}
    assert values["weight_decay"].tolist() == [1e-3, 1e-4, 0]  # one of them is outside the domain: not tuned
    values["lr"].fill_(0.0)
    assert (found.values()["lr"] > 0).all()
    assert repr(found) == "Population of 3 after 10 steps, tuning lr, momentum"


def test_values_per_element_are_laid_out_like_the_weights() -> None:
    found = trained(10, start={"lr": [1e-3, 1e-2, 1e-1], "momentum": 0.5}, per_element=("lr",))
    rates = found.values()["lr"]
    assert rates.shape == weights(found).shape
    assert len(rates[0].unique()) > 1
    assert found.values()["momentum"].shape == (3,)
    assert torch.equal(found.history.values["lr"][-1], rates.median(1).values)


def test_history_has_one_column_a_replica() -> None:
    before = population()
    found = trained(25)
    history = found.history
    assert len(history) == 3 and history.steps == [10, 20, 25]
    assert history.valid_loss.shape == history.values["lr"].shape == history.hypergradients["lr"].shape == (3, 3)
    assert torch.equal(history.start["lr"], before.values()["lr"])
    assert torch.equal(history.values["lr"][-1], found.values()["lr"])
    assert history.hypergradients["lr"][:2].isfinite().all()
    assert history.hypergradients["lr"][2].isnan().all()  # no hyper step at the end of this run
    assert_close(history.valid_loss[-1], found.evaluate(mse, VALID), 1e-12)
    assert repr(history) == "PopulationHistory of 3 records of lr"
    plain = json.loads(json.dumps(history.to_dict()))
    assert plain["steps"] == [10, 20, 25]
    assert plain["values"]["lr"] == history.values["lr"].tolist()


def test_history_is_that_of_the_tuner() -> None:
    settings: dict[str, Any] = {"start": {"lr": [0.02, 0.05, 0.1], "momentum": 0.9}}
    found = trained(20, batches(3), batches(2), **settings)
    for r in range(3):
        records = alone(population(**settings), r, batches(3), batches(2), 20, **settings)[1].history
        for i, record in enumerate(records):
            assert found.history.valid_loss[i, r].item() == pytest.approx(record.valid_loss, rel=1e-9)
            for name, (slope,) in record.hypergradients.items():
                assert found.history.hypergradients[name][i, r].item() == pytest.approx(slope, rel=1e-9)


def test_history_before_a_run() -> None:
    history = population().history
    assert len(history) == 0
    assert history.valid_loss.numel() == 0 and history.values == {}
    assert history.returns.tolist() == history.skipped.tolist() == [0, 0, 0]


def entry(step: int) -> Record:
    value, count = torch.tensor([float(step), -float(step)]), torch.tensor([1, 0])
    return Record(value, {"lr": value}, {"lr": value}, count, 1 - count, value)


@pytest.mark.parametrize("count", [LARGEST - 1, LARGEST, LARGEST + 1, 2 * LARGEST, 5 * LARGEST + 7])
def test_history_is_thinned(count: int) -> None:
    history = PopulationHistory({"lr": torch.ones(2)}, 2)
    for step in range(1, count + 1):
        history.append(step, entry(step))
    gaps = {b - a for a, b in itertools.pairwise(history.steps)}
    (gap,) = gaps
    assert gap == (1 if count < LARGEST else 2 if count < 1.5 * LARGEST else 4 if count < 2.5 * LARGEST else 8)
    assert len(history) < LARGEST and count - history.steps[-1] < gap
    assert history.values["lr"][:, 0].tolist() == history.steps
    assert history.valid_loss[:, 1].tolist() == [-step for step in history.steps]
    assert history.returns.tolist() == [count, 0] and history.skipped.tolist() == [0, count]


def test_history_goes_on_where_it_was_saved() -> None:
    whole, saved = (PopulationHistory({"lr": torch.ones(2)}, 2) for _ in range(2))
    for step in range(1, LARGEST + 100):
        whole.append(step, entry(step))
        if step == LARGEST + 3:
            saved.load_state_dict(whole.state_dict())
        if step > LARGEST + 3:
            saved.append(step, entry(step))
    assert saved.to_dict() == whole.to_dict()


# --- metrics and models ---


def labelled(seed: int) -> Batch:
    inputs = regression(40, seed=seed)[0]
    return inputs, inputs.argmax(1)


def accuracy(model: Any, batch: Batch) -> Tensor:
    right: Tensor = model(batch[0]).argmax(-1) == batch[1]
    return right.double().mean()


def test_evaluate() -> None:
    """In evaluation mode: no dropout, running statistics."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))

    found = population(model=model, loss=cross_entropy, replicas=5, block=2, start={"lr": [1e-4, 1e-3, 1e-2, 0.1, 1]})
    first = found.evaluate(accuracy, labelled(2))
    found.run([labelled(1)], [labelled(2)], steps=40)
    for metric in (accuracy, cross_entropy):
        expected = [metric(found.model(r).eval(), labelled(2)) for r in range(5)]
        assert_close(found.evaluate(metric, labelled(2)), torch.stack(expected).detach(), 1e-12)
    assert found.evaluate(accuracy, labelled(2)).mean() > first.mean() + 0.2
    assert found.model(0).training


def test_evaluate_says_who_is_lost() -> None:
    assert trained(20, start=LOST, guard=None).evaluate(mse, VALID).isfinite().tolist() == [True, False, True]


def test_a_lost_replica_has_no_accuracy() -> None:
    settings: dict[str, Any] = {"model": lambda: nn.Linear(3, 3), "loss": cross_entropy, "guard": None}
    found = trained(20, [labelled(1)], [labelled(2)], start={**LOST, "weight_decay": [0, 1e200, 0]}, **settings)
    assert found.diverged().tolist() == [False, True, False]
    assert found.evaluate(accuracy, labelled(2)).isnan().tolist() == [False, True, False]


def test_values_of_what_is_one_number_for_all() -> None:
    assert population(tune=(), start={"lr": 0.1}).values()["lr"].tolist() == [0.1] * 3


def test_a_lost_replica_is_not_counted() -> None:
    found = trained(20, guard=None, start={"lr": [0.05, 1e200, 0.01]})
    assert found.evaluate(lambda model, batch: (model(batch[0]) > 0).sum(), VALID).isnan().tolist() == [
        False,
        True,
        False,
    ]


def test_best_are_ordinary_modules_in_order() -> None:
    found = trained(20, valid=batches(3), replicas=5, start={"lr": [1e-4, 0.1, 1e-3, 0.05, 1e-2]})
    losses = torch.stack([found.evaluate(mse, batch) for batch in batches(3)]).mean(0)
    best = found.best(5)
    assert [flat(model).tolist() for model in best] == [flat(found.model(int(r))).tolist() for r in losses.argsort()]
    assert torch.equal(flat(found.best()[0]), flat(best[0]))
    before = weights(found)
    mse(best[0], TRAIN).backward()  # a module like any other, whose weights are its own
    with torch.no_grad():
        for p in best[0].parameters():
            assert p.grad is not None
            p.zero_()
    assert torch.equal(weights(found), before)


def test_best_leaves_the_lost_for_last() -> None:
    found = trained(20, start=LOST, guard=None)
    assert not flat(found.best(3)[2]).isfinite().all()
    assert flat(found.best(2)[1]).isfinite().all()


def test_best_by_the_validation_loss_that_was_given() -> None:
    found = trained(10, valid_loss=lambda model, batch: -mse(model, batch), tune=())
    worst = int(found.evaluate(mse, VALID).argmax())
    assert torch.equal(flat(found.best()[0]), flat(found.model(worst)))


# --- progress ---


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


LINE = r"validation loss [\d.e-]+ \| [\d.e-]+ \| [\d.e-]+ \(10 \| 50 \| 90 %\)"


def clock(monkeypatch: pytest.MonkeyPatch, pace: float) -> None:
    """Time passes as often as somebody looks."""
    ticks = itertools.count(0.0, pace)
    monkeypatch.setattr("onepass.progress.time", SimpleNamespace(monotonic=lambda: next(ticks)))


def test_progress_in_a_log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock(monkeypatch, 11.0)
    found = population()
    found.run([TRAIN], [VALID], steps=30, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    first, second, last = err.splitlines()
    assert_matches(rf"10/30 steps █{{4}}░{{8}} [\d.]+ (s|min \d\d s) left, {LINE}", first)
    assert_matches(rf"20/30 steps █{{8}}░{{4}} [\d.]+ (s|min \d\d s) left, {LINE}", second)
    assert_matches(rf"30/30 steps █{{12}} [\d.]+ (s|min \d\d s) in all, {LINE}", last)


def assert_matches(pattern: str, line: str) -> None:
    assert re.fullmatch(pattern, line), line


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line that is written over, without a rest of a longer one before it."""
    clock(monkeypatch, 0.5)
    monkeypatch.setenv("COLUMNS", "120")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    population().run([TRAIN], [VALID], steps=30, progress=True)
    assert terminal.getvalue().count("\n") == 1 and "in all, " in terminal.getvalue()
    shown = terminal.getvalue().rstrip("\n").split("\r")[1:]
    assert [line.split()[0] for line in shown] == ["10/30", "20/30", "30/30"]
    assert_matches(rf"10/30 steps █+░+ [\d.]+ s left, {LINE} *", shown[0])
    assert all(len(after) >= len(before) for before, after in itertools.pairwise(shown))


def test_progress_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that wraps could not be written over."""
    monkeypatch.setenv("COLUMNS", "40")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    population().run([TRAIN], [VALID], steps=10, progress=True)
    assert max(len(line) for line in terminal.getvalue().rstrip("\n").split("\r")) == 39


def test_no_progress_unless_asked(capsys: pytest.CaptureFixture[str]) -> None:
    trained(5)
    assert capsys.readouterr() == ("", "")


def test_progress_is_not_shown_all_the_time() -> None:
    log = Progress(0, 100, io.StringIO())
    assert not log.due(50)
    assert log.due(100)


def test_summary_counts_the_lost() -> None:
    losses = torch.tensor([math.nan, 3.0, 1.0, 2.0, math.inf])
    assert summary(losses) == "validation loss 1.2 | 2 | 2.8 (10 | 50 | 90 %), 2 diverged"
    assert summary(torch.full((2,), math.nan)) == "no finite loss, 2 diverged"


def test_progress_without_validation(capsys: pytest.CaptureFixture[str]) -> None:
    population(tune=()).run([TRAIN], steps=10, progress=True)
    assert "diverged" not in capsys.readouterr().err


# --- metrics along the way ---


def test_measured_along_the_way() -> None:
    """At every record, what ``evaluate`` would say then; a run that is resumed or goes on keeps it."""
    found = population()
    for _ in range(2):
        found.run([TRAIN], [VALID], steps=10, measure={"test": (mse, VALID)})
    assert found.history.measured["test"].shape == (2, 3)
    assert torch.equal(found.history.measured["test"][-1], found.evaluate(mse, VALID))
    found.run([TRAIN], [VALID], steps=10)  # not asked for
    assert found.history.measured_steps == [10, 20]
    found.run([TRAIN], [VALID], steps=10, measure={"other": (mse, VALID)})
    assert found.history.measured["test"][-1].isnan().all()
    assert len(found.history.measured_seconds) == 3
    copy = population().history
    copy.load_state_dict(found.history.state_dict())
    assert torch.equal(copy.measured["test"][:2], found.history.measured["test"][:2])


def test_seconds_are_those_of_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time that passes at 1 s a weight step, and at 1000 s a look."""
    passed = 0.0

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        nonlocal passed
        passed += 1.0
        return mse(model, batch)

    def slow(model: nn.Module, batch: Batch) -> Tensor:
        nonlocal passed
        passed += 1000.0
        return mse(model, batch)

    monkeypatch.setattr("onepass.stopwatch.time", SimpleNamespace(perf_counter=lambda: passed))
    found = population(loss=loss, tune=(), backend="eager")
    found.run([TRAIN], steps=25, measure={"test": (slow, VALID)})
    assert found.history.measured_seconds == [10.0, 10.0, 5.0]
    found.run([TRAIN], steps=5)  # not looked at
    found.run([TRAIN], steps=20, measure={"test": (slow, VALID)})
    assert found.history.measured_steps == [10, 20, 25, 40, 50]
    assert math.isnan(found.history.measured_seconds[3]) and found.history.measured_seconds[4:] == [10.0]
    assert "measured_seconds" not in found.history.to_dict()


@pytest.mark.parametrize(("every", "at"), [(None, [10, 20, 30, 40, 45]), (20, [20, 40, 45]), (15, [20, 30, 45])])
def test_measured_now_and_then(every: int | None, at: list[int]) -> None:
    """At the first end of an interval after so many steps, and at the end of the run."""
    found = population()
    found.run([TRAIN], [VALID], steps=45, measure={"test": (mse, VALID)}, measure_every=every)
    assert found.history.measured_steps == at


def test_measured_in_blocks_and_of_the_lost() -> None:
    found = population(start=LOST, tune=(), block=2)
    found.run([TRAIN], steps=20, measure={"test": (right, VALID)})
    assert found.history.measured["test"].isnan().tolist()[-1] == [False, True, False]


def right(model: nn.Module, batch: Batch) -> Tensor:
    above: Tensor = model(batch[0]) > batch[1]
    return above.sum()
