"""Replicas know nothing of each other, nor of the blocks they are worked on in; the same seed gives the same run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import onepass
from onepass.stack import Stack
from tests.populations import TRAIN, VALID, alone, assert_close, batches, network, population, trained, weights
from tests.problems import mse

pytestmark = pytest.mark.usefixtures("float64")

DRAWN: dict[str, Any] = {"lr": onepass.LogUniform(1e-3, 10.0), "momentum": onepass.Uniform(0.1, 0.9)}
LOST: dict[str, Any] = {"lr": [0.05, 0.01, 1e200]}


def test_starts_do_not_depend_on_how_many_there_are() -> None:
    few, many = population(replicas=3, start=DRAWN), population(replicas=8, start=DRAWN)
    assert torch.equal(weights(few), weights(many)[:3])
    for name, value in few.values().items():
        assert torch.equal(value, many.values()[name][:3])
        assert len(value.unique()) == 3
    assert len(weights(many)[:, 0].unique()) == 8


def test_another_seed_is_another_start() -> None:
    one, other = population(seed=1), population(seed=2)
    assert not torch.isin(weights(one), weights(other)).any()
    assert not torch.isin(one.values()["lr"], other.values()["lr"]).any()


def test_runs_do_not_depend_on_how_many_there_are_nor_on_blocks() -> None:
    """Some of these go back with the guard while others do not."""

    def found(replicas: int, block: int) -> onepass.Population:
        rates = [1e-3, 0.1, 2.0, 10.0, 5.0]
        start = {"lr": rates[:replicas]}
        return trained(16, batches(4), start=start, replicas=replicas, block=block, interval=5)

    whole = found(5, 5)
    assert (whole.history.returns > 0).tolist() == [False, False, True, True, True]
    for some in (found(5, 1), found(5, 2), found(3, 3)):
        n = some.replicas
        assert_close(weights(some), weights(whole)[:n], 1e-12)
        assert_close(some.values()["lr"], whole.values()["lr"][:n], 1e-12)
        assert_close(some.history.valid_loss, whole.history.valid_loss[:, :n], 1e-12)
        assert torch.equal(some.history.returns, whole.history.returns[:n])


def test_a_lost_replica_is_lost_alone() -> None:
    found = trained(35, start=LOST, guard=None)
    others = trained(35, start={"lr": LOST["lr"][:2]}, guard=None, replicas=2)
    assert found.diverged().tolist() == [False, False, True]
    assert not found.history.valid_loss[-1, 2].isfinite()
    assert_close(weights(found)[:2], weights(others), 1e-12)
    assert_close(found.values()["lr"][:2], others.values()["lr"], 1e-12)
    assert others.diverged().tolist() == [False, False]
    found.run([TRAIN], [VALID], steps=5)
    assert found.diverged().tolist() == [False, False, True]


def test_skipped_hyper_steps_of_a_lost_replica() -> None:
    tuner = alone(population(start=LOST), 2, [TRAIN], [VALID], 35, start=LOST, guard=None)[1]
    assert trained(35, start=LOST, guard=None).history.skipped.tolist() == [0, 0, tuner.skipped]


def test_a_lost_replica_beside_a_window_of_steps() -> None:
    found = trained(20, start=LOST, guard=None, unroll=15)
    assert found.diverged().tolist() == [False, False, True]


def test_a_restart_brings_a_lost_replica_back() -> None:
    found = trained(25, start=LOST, guard=None, restart=True)
    assert found.diverged().tolist() == [False, False, True]
    found.run([TRAIN], [VALID], steps=5)
    assert not found.diverged().any()


def test_with_a_guard_nobody_is_lost() -> None:
    found = trained(30, start={"lr": [0.05, 10.0, 100.0]})
    assert not found.diverged().any()
    assert found.history.returns[2] > found.history.returns[1] > 0
    assert found.values()["lr"][2] < 10


def test_the_same_run_twice_is_the_same() -> None:
    one, other = (trained(24, batches(4), start=DRAWN) for _ in range(2))
    assert torch.equal(weights(one), weights(other))
    assert repr(one.history.to_dict()) == repr(other.history.to_dict())


def noisy() -> nn.Module:
    """The same weights in every replica: whatever differs after training was in the masks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.5), nn.Linear(6, 1))


def test_dropout_differs_between_replicas_and_is_the_same_for_a_seed() -> None:
    settings: dict[str, Any] = {"model": noisy, "start": {"lr": [0.05] * 3}, "interval": 4}
    found = trained(10, **settings)
    rows = weights(found)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert not torch.equal(rows[a], rows[b])
    assert torch.equal(weights(trained(10, **settings)), rows)
    assert not torch.isin(weights(trained(10, seed=2, **settings)), rows).any()


def test_dropout_draws_new_masks_at_every_step() -> None:
    """With the second layer left out, the first step has gradient exactly where the mask is not zero."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(64))
            self.dropout = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.dropout(self.weight)
            return result

    def loss(model: Any, batch: Tensor) -> Tensor:
        result: Tensor = model(batch).sum()
        return result

    found = population(model=Masked, loss=loss, tune=(), start={"lr": [1.0] * 3})
    seen = []
    for _ in range(3):
        before = weights(found)
        found.run([torch.zeros(1)], steps=1)
        seen.append(weights(found) != before)
    masks = torch.cat(seen)
    assert len(masks.unique(dim=0)) == 9
    assert 0.3 < masks.double().mean() < 0.7


@pytest.mark.parametrize("changes", [{"block": 1}, {"replicas": 2}, {"replicas": 11}], ids=str)
@pytest.mark.parametrize("guard", [None, onepass.Guard()], ids=["lost", "guarded"])
def test_dropout_does_not_depend_on_others(changes: dict[str, Any], guard: onepass.Guard | None) -> None:
    def twice() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 1))

    settings: dict[str, Any] = {"model": twice, "guard": guard, "start": {"lr": onepass.LogUniform(1e-2, 10)}}
    found, other = (
        trained(12, interval=4, **{**settings, **more}) for more in ({"replicas": 9}, {"replicas": 9, **changes})
    )
    few = min(found.replicas, other.replicas)
    assert weights(other).shape[0] == other.replicas
    assert torch.allclose(weights(found)[:few], weights(other)[:few], rtol=1e-9, atol=1e-12, equal_nan=True)


def test_validation_has_no_dropout() -> None:
    found = trained(4, model=noisy, interval=4)
    expected = torch.stack([mse(found.model(r).eval(), VALID) for r in range(3)])
    assert_close(found.history.valid_loss[-1], expected.detach(), 1e-12)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*VALID), batch_size=4, shuffle=True)


def test_a_run_leaves_the_random_state_alone() -> None:
    found = population(model=noisy)
    state = torch.get_rng_state()
    found.run(loader(), loader(), steps=12)
    found.evaluate(mse, VALID)
    found.model(0)
    assert torch.equal(torch.get_rng_state(), state)
    assert found.model(0).training and found.model(0)[1].training  # type: ignore[index]


def test_making_a_population_leaves_the_random_state_alone() -> None:
    state = torch.get_rng_state()
    population()
    assert torch.equal(torch.get_rng_state(), state)


def test_looking_for_the_best_leaves_the_random_state_alone() -> None:
    found = trained(4, valid=loader())
    state = torch.get_rng_state()
    found.best()
    assert torch.equal(torch.get_rng_state(), state)


class AlwaysNoisy(nn.Module):
    """Dropout that no mode switches off."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(F.dropout(x, 0.5))
        return result


def test_a_noisy_validation_loss_is_the_same_for_a_seed() -> None:
    one, other = (trained(4, model=AlwaysNoisy, interval=2) for _ in range(2))
    assert torch.equal(one.history.valid_loss, other.history.valid_loss)


def test_never_more_than_a_block_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def watched(kind: str) -> Any:
        original = getattr(Stack, kind)

        def losses(self: Stack, views: Any, *args: Any, **options: Any) -> Tensor:
            sizes.append(len(views[0]))
            result: Tensor = original(self, views, *args, **options)
            return result

        return losses

    for kind in ("losses", "valid_losses"):
        monkeypatch.setattr(Stack, kind, watched(kind))
    trained(4, replicas=8, block=2, interval=4)
    assert max(sizes) == 2


def test_loaders_give_every_replica_the_same_batches() -> None:
    """And another order in every pass, which the seed decides."""
    settings: dict[str, Any] = {"model": lambda: (torch.manual_seed(0), network())[1], "start": {"lr": [0.05] * 3}}
    found = trained(10, loader(), tune=(), **settings)
    assert_close(weights(found)[1:], weights(found)[:1].expand(2, -1), 1e-12)
    assert torch.equal(weights(trained(10, loader(), tune=(), **settings)), weights(found))
    assert not torch.equal(weights(trained(10, loader(), tune=(), seed=2, **settings)), weights(found))
