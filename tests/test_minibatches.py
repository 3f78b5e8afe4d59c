"""Mini-batches of data in memory: in a plain loop, and with an order of its own for every replica."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import onepass
from onepass.batches import Cycle
from tests.populations import TRAIN, assert_like_the_tuner, population, weights
from tests.problems import Batch, mse, train_step

pytestmark = pytest.mark.usefixtures("float64")

ROWS: Batch = (torch.arange(10.0).unsqueeze(1), torch.arange(10))


def orders(batches: Any) -> list[int]:
    return [int(row) for batch in batches for row in batch[1]]


def test_shapes() -> None:
    minibatches = onepass.Minibatches(ROWS, 4)
    assert len(minibatches) == 2
    assert [(tuple(x.shape), tuple(y.shape)) for x, y in minibatches] == [((4, 1), (4,))] * 2
    x, y = minibatches.at(0, replicas=3)
    assert x.shape == (3, 4, 1) and y.shape == (3, 4)


def test_rows_stay_together() -> None:
    for x, y in onepass.Minibatches(ROWS, 3):
        assert torch.equal(x[:, 0], y.double())
    x, y = onepass.Minibatches(ROWS, 3).at(1, replicas=2)
    assert torch.equal(x[..., 0], y.double())


def test_every_pass_has_each_row_once_in_another_order() -> None:
    minibatches = onepass.Minibatches(ROWS, 5)
    passes = [orders(minibatches) for _ in range(4)]
    assert all(sorted(one) == list(range(10)) for one in passes)
    assert len({tuple(one) for one in passes}) == 4
    again = onepass.Minibatches(ROWS, 5)
    assert [orders(again) for _ in range(4)] == passes
    assert orders(onepass.Minibatches(ROWS, 5, seed=1)) != passes[0]


def test_what_is_left_of_a_pass_is_dropped_and_comes_another_time() -> None:
    minibatches = onepass.Minibatches(ROWS, 4)
    passes = [orders(minibatches) for _ in range(8)]
    assert all(len(set(one)) == 8 for one in passes)
    assert set().union(*passes) == set(range(10))


def test_a_plain_loop_and_steps_by_number_are_the_same() -> None:
    minibatches = onepass.Minibatches(ROWS, 4)
    looped = [batch[1].tolist() for _ in range(3) for batch in minibatches]
    fresh = onepass.Minibatches(ROWS, 4)
    assert [fresh.at(step)[1].tolist() for step in range(6)] == looped
    assert fresh.at(0)[1].tolist() == looped[0]  # any step at any time


def test_one_ahead() -> None:
    ahead, batches = onepass.Minibatches(ROWS, 5, skip=1), onepass.Minibatches(ROWS, 5)
    for replicas in (None, 2):
        for step in range(6):
            assert torch.equal(ahead.at(step, replicas)[1], batches.at(step + 1, replicas)[1])


def test_replicas_have_orders_of_their_own_that_do_not_depend_on_how_many_there_are() -> None:
    minibatches = onepass.Minibatches(ROWS, 5, per_replica=True)
    for step in range(3):
        few, many = (minibatches.at(step, replicas=n)[1] for n in (3, 7))
        assert torch.equal(few, many[:3])
        assert len({tuple(row.tolist()) for row in many}) == 7
    whole = torch.cat([minibatches.at(step, replicas=4)[1] for step in (0, 1)], 1)
    assert torch.equal(whole.sort(1).values, torch.arange(10).expand(4, -1))


def test_any_nest_of_tensors() -> None:
    data: dict[str, Any] = {"x": torch.randn(6, 2), "more": [torch.arange(6)], "name": "kept"}
    (batch,) = onepass.Minibatches(data, 6)
    assert batch["x"].shape == (6, 2) and batch["name"] == "kept"
    assert torch.equal(batch["x"], data["x"][batch["more"][0]])


def test_in_a_loop_with_a_tuner() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    tuner = onepass.Tuner(model, optimizer, mse, onepass.Minibatches(TRAIN, 8, seed=1), interval=3)
    state = torch.get_rng_state()
    for _ in range(2):
        for batch in onepass.Minibatches(TRAIN, 8):
            train_step(model, optimizer, batch)
            tuner.step(batch)
    assert len(tuner.history) == 2
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("per_replica", [False, True], ids=["shared", "per replica"])
def test_a_population_is_fed_like_a_tuner(per_replica: bool) -> None:
    minibatches = onepass.Minibatches(TRAIN, 8, seed=5, per_replica=per_replica)

    def own(r: int) -> list[Any]:
        steps = range(26)
        if not per_replica:
            return [minibatches.at(step) for step in steps]
        return [tuple(part[r] for part in minibatches.at(step, replicas=3)) for step in steps]

    assert_like_the_tuner(26, minibatches, own_batches=own, start={"lr": [0.01, 0.1, 4.0], "momentum": 0.5}, block=2)


def test_validation_batches_of_ones_own() -> None:
    """Replicas that are alike in all else have different validation losses, and one best."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    found = population(model=lambda: model, start={"lr": 0.05}, interval=2, replicas=4, block=3)
    found.run([TRAIN], onepass.Minibatches(TRAIN, 8, per_replica=True), steps=4)
    assert len(found.history.valid_loss[0].unique()) == 4
    assert len(found.best(4)) == 4


def test_runs_do_not_depend_on_how_many_replicas_share_the_data() -> None:
    def found(replicas: int) -> Tensor:
        few = population(replicas=replicas, start={"lr": [0.01, 0.05, 0.1][:replicas]})
        few.run(onepass.Minibatches(TRAIN, 8, per_replica=True), [TRAIN], steps=12)
        return weights(few)

    assert (found(2) - found(3)[:2]).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("data", "size", "message"),
    [
        (ROWS, 0, "size must be an integer from 1 to 10, but got 0"),
        (ROWS, 11, "size must be an integer from 1 to 10, but got 11"),
        (ROWS, 2.5, "size must be an integer from 1 to 10, but got 2.5"),
        ((ROWS[0], torch.arange(9)), 3, r"data must be tensors of one length, but got lengths \[9, 10\]"),
        ("nothing", 3, r"data must be tensors of one length, but got lengths \[\]"),
    ],
)
def test_bad_input(data: Any, size: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        onepass.Minibatches(data, size)


def test_a_loader_with_a_generator_of_its_own_finds_its_place() -> None:
    def cycle() -> Cycle:
        generator = torch.Generator().manual_seed(3)
        return Cycle(DataLoader(TensorDataset(torch.arange(10)), batch_size=2, shuffle=True, generator=generator))

    whole = cycle()
    [next(whole) for _ in range(8)]
    state = whole.state_dict()
    expected = [next(whole)[0].tolist() for _ in range(9)]
    taken_up = cycle()
    taken_up.load_state_dict(state)
    assert [next(taken_up)[0].tolist() for _ in range(9)] == expected
