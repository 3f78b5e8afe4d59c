"""Replicas dropped, copied, given other values and taken up elsewhere, between two runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import onepass
from tests.populations import TRAIN, VALID, alone, assert_close, population, trained, weights
from tests.problems import mse, train_step

ORDERS = onepass.Minibatches(TRAIN, 8, seed=4, per_replica=True)
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"start": {"lr": [0.02, 0.05, 30.0], "momentum": 0.9, "weight_decay": 1e-4}},
    "adamw": {"rule": "adamw", "start": {"lr": [1e-3, 1e-2, 3e-2]}},
    "fixed": {"tune": (), "start": {"lr": [0.02, 0.05, 0.1], "momentum": [0.1, 0.5, 0.9]}},
    "unroll": {"unroll": 5, "guard": None, "start": {"lr": [0.02, 0.05, 0.1], "momentum": 0.5}},
    "batch norm": {"model": lambda: normalised(), "start": {"lr": [0.02, 0.05, 0.1]}, "block": 2},
}

pytestmark = pytest.mark.usefixtures("float64")


def normalised() -> torch.nn.Module:
    nn = torch.nn
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)).double()


def on(found: onepass.Population, steps: int = 20) -> onepass.Population:
    found.run(ORDERS, [VALID], steps=steps)
    return found


@pytest.mark.parametrize("kind", SETTINGS)
def test_who_is_kept_goes_on_as_if_nothing_had_happened(kind: str) -> None:
    whole = on(on(population(**SETTINGS[kind])))
    some = on(population(**SETTINGS[kind]))
    some.keep([2, 0])
    assert some.replicas == len(some.values()["lr"]) == 2
    on(some)
    assert_close(weights(some), weights(whole)[[2, 0]], 1e-11)
    for name, value in whole.values().items():
        assert_close(some.values()[name], value[[2, 0]], 1e-11)
    assert_close(some.history.valid_loss, whole.history.valid_loss[:, [2, 0]], 1e-11)
    assert some.history.returns.tolist() == whole.history.returns[[2, 0]].tolist()
    assert_close(some.evaluate(mse, VALID), whole.evaluate(mse, VALID)[[2, 0]], 1e-11)
    assert len(some.best(2)) == 2


def test_keep_one_after_the_other() -> None:
    whole, some = on(on(population(replicas=5))), on(population(replicas=5))
    some.keep([4, 1, 3])
    some.keep(torch.tensor([2, 0]))
    assert_close(weights(on(some)), weights(whole)[[3, 4]], 1e-11)


def test_copies_go_the_same_way() -> None:
    found = trained(20, **SETTINGS["default"])
    found.copy([1, 1, 0])
    found.run([TRAIN], [VALID], steps=20)
    whole = trained(40, **SETTINGS["default"])
    assert_close(weights(found), weights(whole)[[1, 1, 0]], 1e-11)
    assert_close(found.history.values["lr"], whole.history.values["lr"][:, [1, 1, 0]], 1e-11)
    assert found.history.start["lr"].tolist() == [0.05, 0.05, 0.02]


def test_copies_see_batches_of_their_own() -> None:
    found = on(population(**SETTINGS["fixed"]))
    found.copy([0, 0, 2])
    assert torch.equal(weights(found)[0], weights(found)[1])
    on(found)
    assert not torch.allclose(weights(found)[0], weights(found)[1])


def test_values_that_are_set_are_used_and_recorded() -> None:
    found = trained(20, **SETTINGS["fixed"])
    found.set_values({"lr": [0.01, 0.03, 0.2], "momentum": 0.3})
    assert found.values()["momentum"].tolist() == [0.3] * 3
    found.run([TRAIN], [VALID], steps=10)
    assert found.values()["lr"].tolist() == [0.01, 0.03, 0.2]
    assert found.history.values["lr"][:, 2].tolist() == [0.1, 0.2, 0.2]


def test_tuned_values_are_set_within_their_bounds_and_tuned_on() -> None:
    found = trained(20, **SETTINGS["default"])
    found.set_values({"lr": 1e3, "momentum": found.values()["momentum"] * 0.5})
    assert found.values()["lr"].tolist() == pytest.approx([1.0, 1.0, 30.0])
    before = found.values()["momentum"]
    found.run([TRAIN], [VALID], steps=50)
    assert not torch.equal(found.values()["momentum"], before)


def test_values_set_before_the_first_step_are_the_start() -> None:
    found = population(**SETTINGS["default"])
    found.set_values({"lr": [0.3, 0.2, 0.1]})
    found.run([TRAIN], [VALID], steps=10)
    other = trained(10, start={"lr": [0.3, 0.2, 0.1], "momentum": 0.9, "weight_decay": 1e-4})
    assert found.history.schedule(0).values[0]["lr"] == pytest.approx([0.3])
    assert_close(weights(found)[:2], weights(other)[:2], 1e-12)


def pair(kind: str) -> onepass.Population:
    """Two replicas of the kind, that begin elsewhere."""
    start = {name: [0.3, 0.4] if isinstance(value, list) else value for name, value in SETTINGS[kind]["start"].items()}
    return population(**{**SETTINGS[kind], "start": start, "replicas": 2, "seed": 9})


@pytest.mark.parametrize("kind", SETTINGS)
def test_another_population_goes_on_where_one_was(kind: str) -> None:
    first, second, third = on(population(**SETTINGS[kind]), 25), pair(kind), pair(kind)
    first.keep([1, 2])
    second.load_state_dict(first.state_dict())
    third.load_state_dict(second.state_dict())  # which has seen no batches yet
    every = [on(found, 15) for found in (first, second, third)]
    for other in every[1:]:
        assert torch.equal(weights(other), weights(first))
        assert other.steps == 40
        assert repr(other.history.to_dict()) == repr(first.history.to_dict())  # of NaNs, too


def test_a_schedule_can_be_replayed() -> None:
    settings: dict[str, Any] = {
        "start": {"lr": [0.02, 0.05, 0.1], "momentum": 0.5, "weight_decay": 1e-4},
        "interval": 5,
    }
    before, found = population(**settings), trained(30, **settings)
    found.copy([1, 1, 1])
    found.set_values({"lr": 0.01})
    found.run([TRAIN], [VALID], steps=25)
    model = before.model(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5, weight_decay=1.0)
    schedule = found.history.schedule(2).attach(optimizer)
    for _ in range(55):
        train_step(model, optimizer, TRAIN, mse)
        schedule.step()
    assert_close(torch.nn.utils.parameters_to_vector(model.parameters()).detach(), weights(found)[2], 1e-11)


@pytest.mark.filterwarnings("ignore:the run diverged")
def test_a_schedule_leaves_out_what_the_guard_has_undone() -> None:
    settings: dict[str, Any] = {"start": {"lr": [0.05, 3.0, 30.0], "momentum": 0.9}}
    found = trained(60, **settings)
    assert found.history.returns[2] > 0
    for r in range(3):
        expected = alone(population(**settings), r, [TRAIN], [VALID], 60, **settings)[1].history.schedule()
        schedule = found.history.schedule(r)
        # The Tuner has records of returns in between, too; what both have to agree on is what holds at each step.
        assert schedule.steps[-1] == expected.steps[-1]
        ends = [one.values[-1]["lr"][0] for one in (schedule, expected)]
        assert ends[0] == pytest.approx(ends[1], rel=1e-9)
        assert all(a < b for a, b in zip(schedule.steps, schedule.steps[1:], strict=False))


BAD: list[tuple[str, Any, str]] = [
    ("keep", [], "replicas must be one or more numbers of replicas, but got []"),
    ("keep", [0.5], r"replicas must be one or more numbers of replicas, but got \[0.5\]"),
    ("keep", [0, 0], r"replicas must differ from each other; population.copy\(sources\) makes copies"),
    ("keep", [0, 3], "replicas must be from 0 to 2, but got 0 to 3"),
    ("copy", [0, 1], "sources must be 3 numbers, one a replica, but got 2"),
    ("copy", [0, -1, 1], "sources must be from 0 to 2, but got -1 to 1"),
    ("set_values", {"speed": 1.0}, "values must be of lr, which replicas have of their own, but got 'speed'"),
    ("set_values", {"momentum": 1.0}, "got 'momentum'; a start of one number each makes it so"),
    ("set_values", {"lr": -1.0}, r"values\['lr'\] must be finite and at least 0, but got -1.0"),
    ("set_values", {"lr": [1.0, 2.0]}, r"values\['lr'\] must be a number or 3 numbers, but got \(2, 1\)"),
]


@pytest.mark.parametrize(("method", "argument", "told"), BAD)
def test_bad_input_is_told_and_changes_nothing(method: str, argument: Any, told: str) -> None:
    found = trained(10, tune=("lr",), start={"lr": [0.1, 0.2, 0.3], "momentum": 0.5})
    before = weights(found), found.values()["lr"]
    with pytest.raises(ValueError, match=told.replace("[]", r"\[\]")):
        getattr(found, method)(argument)
    assert torch.equal(weights(found), before[0]) and torch.equal(found.values()["lr"], before[1])
    found.run([TRAIN], [VALID], steps=10)


def test_states_of_others_are_refused() -> None:
    first = trained(10)
    with pytest.raises(ValueError, match="the state must be of 2 replicas, but is of 3"):
        population(replicas=2).load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match=r"the same model and tuned values, \['lr'\], but is of 31 weights and \[\]"):
        population(tune=("lr",)).load_state_dict(trained(10, tune=()).state_dict())


def test_one_value_a_weight_cannot_be_replayed() -> None:
    found = trained(10, tune=("lr",), per_element=("lr",))
    with pytest.raises(ValueError, match="only one value a replica can be replayed, but 'lr' has one a weight"):
        found.history.schedule(0)
