"""Ordinary ways to use a tuner that could each give a plausible but wrong number."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import onepass
from onepass.rules import OPTIMIZERS
from tests.problems import Batch, cross_entropy, mlp, mse, regression, train_step


def slope_of_lr(model: nn.Module, optimizer: torch.optim.Optimizer, **settings: Any) -> float:
    tuner = onepass.Tuner(model, optimizer, mse, [regression(seed=2)], interval=1, lookback=1, **settings)
    train_step(model, optimizer, regression())
    record = tuner.step(regression())
    assert record is not None
    return float(record.hypergradients["lr"][0])


def test_an_optimizer_that_writes_into_gradients() -> None:
    """torch's foreach Nesterov does: what counts is the gradient before the step."""
    model = mlp(3, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True)
    for _ in range(3):
        train_step(model, optimizer, regression())
    losses = []
    for sign in (1, -1):
        twin, twin_optimizer = copy.deepcopy((model, optimizer))
        twin_optimizer.param_groups[0]["lr"] *= 10 ** (sign * 1e-5)
        train_step(twin, twin_optimizer, regression())
        losses.append(mse(twin, regression(seed=2)).item())
    assert slope_of_lr(model, optimizer) == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-5)


def test_one_tensor_as_lr_of_several_groups() -> None:
    model = mlp(3, 8, 1)
    optimizer = torch.optim.SGD(onepass.per_tensor(model.parameters()), lr=torch.tensor(0.05))
    tuner = onepass.Tuner(model, optimizer, mse, [regression(seed=2)], interval=1)
    for _ in range(5):
        train_step(model, optimizer, regression())
        tuner.step(regression())
    found = [float(group["lr"]) for group in optimizer.param_groups]
    assert found == pytest.approx(tuner.values()["lr"])
    assert len(set(found)) > 1


def test_momentum_survives_zeroed_gradients() -> None:
    weights = []
    for kind in (torch.optim.SGD, onepass.optim.SGD):
        model = mlp(3, 4, 1)
        optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            mse(model, regression()).backward()
            optimizer.step()
        weights.append(next(model.parameters()).detach())
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-12, atol=1e-12)


def test_scheduler_stepped_before_the_tuner() -> None:
    slopes = []
    for scheduler_first in (False, True):
        model = mlp(3, 4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = StepLR(optimizer, step_size=1, gamma=0.1)
        tuner = onepass.Tuner(model, optimizer, mse, [regression(seed=2)], interval=1)
        train_step(model, optimizer, regression())
        if scheduler_first:
            scheduler.step()
        record = tuner.step(regression())
        assert record is not None
        slopes.append(record.hypergradients["lr"][0])
    assert slopes[0] == pytest.approx(slopes[1], rel=1e-12)


def test_scheduler_made_late_and_given_back() -> None:
    model = mlp(3, 4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tuner = onepass.Tuner(model, optimizer, mse, [regression(seed=2)], interval=1)
    for _ in range(3):
        train_step(model, optimizer, regression())
        tuner.step(regression())
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    for step in range(1, 4):
        train_step(model, optimizer, regression())
        tuner.step(regression())
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(tuner.values()["lr"][0] * 0.5**step)
    copy.deepcopy(scheduler)
    tuner.detach()
    assert scheduler.optimizer is optimizer


def test_switching_an_entry_off_is_respected() -> None:
    model = mlp(3, 4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-3)
    tuner = onepass.Tuner(model, optimizer, mse, [regression(seed=2)], interval=1)
    for i in range(6):
        if i == 3:
            optimizer.param_groups[0]["weight_decay"] = 0.0
        train_step(model, optimizer, regression())
        tuner.step(regression())
    assert optimizer.param_groups[0]["weight_decay"] == 0.0
    assert tuner.values()["weight_decay"] == [0.0]


def test_maximize_needs_a_loss_to_minimise() -> None:
    model = mlp(3, 4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, maximize=True)
    with pytest.raises(ValueError, match="valid_loss must be given for an optimizer with maximize=True"):
        onepass.Tuner(model, optimizer, lambda m, b: -mse(m, b), [regression()])


@pytest.mark.parametrize("lookback", [1, 3])
def test_clipping_to_a_norm_hides_the_size_of_the_gradient(lookback: int) -> None:
    """A factor on the whole loss cannot matter when its gradient is then cut to a fixed length."""
    gain = onepass.Hyperparameter(torch.tensor(2.0, dtype=torch.float64))

    def loss(model: Any, batch: Batch) -> Tensor:
        return gain.value * mse(model, batch)

    model = mlp(3, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings: dict[str, Any] = {"extra": {"gain": gain}, "valid_loss": mse, "lookback": lookback, "interval": 1}
    tuner = onepass.Tuner(model, optimizer, loss, [regression(seed=2)], **settings)
    optimizer.zero_grad()
    loss(model, regression()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    record = tuner.step(regression())
    assert record is not None
    assert abs(record.hypergradients["gain"][0]) < 1e-3 * abs(record.hypergradients["lr"][0])


def test_validation_data_that_is_not_finite_is_not_divergence() -> None:
    model = mlp(3, 4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    bad = regression()[0] * math.nan, regression()[1]
    tuner = onepass.Tuner(model, optimizer, mse, [bad, regression(seed=2)], interval=1)
    for _ in range(6):
        train_step(model, optimizer, regression())
        tuner.step(regression())
    assert tuner.skipped == 3
    assert not any(record.guard for record in tuner.history)
    assert tuner.values()["lr"][0] > 0.01  # moved by the batches that are finite


def test_a_validation_batch_of_one_sample_with_batch_norm() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    data = regression(9, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(*data), batch_size=4)  # 4, 4 and 1
    tuner = onepass.Tuner(model, optimizer, mse, loader, interval=1)
    for _ in range(4):
        train_step(model, optimizer, data)
        assert tuner.step(data) is not None


def test_shuffled_validation_takes_a_new_order_in_every_pass() -> None:
    seen: list[float] = []

    def valid_loss(model: Any, batch: list[Tensor]) -> Tensor:
        seen.append(batch[0].item())
        return model(batch[0].view(1, 1)).sum() ** 2  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    train = torch.ones(2, 1), torch.ones(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.arange(6.0)), shuffle=True)
    tuner = onepass.Tuner(model, optimizer, mse, loader, interval=1, valid_loss=valid_loss, guard=None, lookback=1)
    seen.clear()
    for _ in range(18):
        train_step(model, optimizer, train)
        tuner.step(train)
    passes = [tuple(seen[i : i + 6]) for i in (0, 6, 12)]
    assert all(sorted(order) == list(range(6)) for order in passes)
    assert len(set(passes)) == 3


def test_a_rule_that_is_not_the_optimizers_own_is_noticed() -> None:
    class Mine(torch.optim.SGD):
        pass

    model = mlp(3, 4, 1)
    optimizer = Mine(model.parameters(), lr=0.1)
    onepass.register(Mine, onepass.Rule(lambda h, w, g, s: (3 * h["lr"] * g.sin(), {}), {"lr": "log10"}))
    try:
        with pytest.warns(UserWarning, match="the rule does not reproduce the optimizer's step"):
            slope_of_lr(model, optimizer)
    finally:
        del OPTIMIZERS[Mine]


def test_right_rules_are_not_accused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.RAdam, torch.optim.Adagrad):
            model = mlp(3, 4, 1, dtype=torch.float32)
            batch = regression(dtype=torch.float32)
            optimizer = kind(model.parameters(), lr=1e-6)
            tuner = onepass.Tuner(model, optimizer, mse, [batch], interval=3)
            for _ in range(3):
                train_step(model, optimizer, batch)
                tuner.step(batch)


class Checkpointed(nn.Module):
    """Runs its first half again on the way back, when asked to save memory."""

    def __init__(self, save: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh()).double()
        self.last, self.save = nn.Linear(8, 1, dtype=torch.float64), save

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.first, x, use_reentrant=False) if self.save else self.first(x)
        result: Tensor = self.last(hidden)
        return result


@pytest.mark.parametrize("curvature", ["exact", "gauss-newton", "finite-difference"])
def test_activation_checkpointing(curvature: str) -> None:
    found = []
    for save in (False, True):
        model = Checkpointed(save)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        tuner = onepass.Tuner(model, optimizer, mse, [regression(seed=2)], interval=2, curvature=curvature)
        for _ in range(4):
            train_step(model, optimizer, regression())
            before = {name: buffer.clone() for name, buffer in model.named_buffers()}
            record = tuner.step(regression())
            assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
        assert record is not None
        found.append(record.hypergradients)
    for name, slope in found[0].items():
        assert found[1][name] == pytest.approx(slope, rel=1e-9)


def test_extra_that_the_loss_does_not_use() -> None:
    model = mlp(3, 4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tuner = onepass.Tuner(
        model, optimizer, mse, [regression()], extra={"unused": onepass.Hyperparameter(0.1)}, interval=1
    )
    train_step(model, optimizer, regression())
    with pytest.warns(UserWarning, match=r"extra\['unused'\] does not influence loss"):
        tuner.step(regression())


def test_layer_frozen_in_mid_run() -> None:
    model = mlp(3, 4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tuner = onepass.Tuner(model, optimizer, mse, [regression()], interval=1)
    for i in range(4):
        model[0].requires_grad_(i < 2)
        optimizer.zero_grad(set_to_none=False)
        mse(model, regression()).backward()
        optimizer.step()
        assert tuner.step(regression()) is not None


def test_group_added_later_is_reported() -> None:
    model, late = mlp(3, 4, 1), mlp(3, 4, 1, seed=1)
    both = nn.ModuleList([model, late])

    def loss(models: Any, batch: Batch) -> Tensor:
        return mse(models[0], batch) + mse(models[1], batch)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tuner = onepass.Tuner(both, optimizer, loss, [regression()], interval=1)
    optimizer.add_param_group({"params": list(late.parameters())})
    train_step(both, optimizer, regression(), loss)
    with pytest.warns(UserWarning, match="a param group was added after the tuner was made"):
        tuner.step(regression())
    assert len(tuner.values()["lr"]) == 2


def test_two_dtypes_in_one_model() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.narrow, self.wide = mlp(3, 4, dtype=torch.float32), mlp(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.wide(self.narrow(x.float()).double())
            return result

    slopes = []
    for curvature in ("exact", "finite-difference"):
        model = Mixed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tuner = onepass.Tuner(model, optimizer, mse, [regression(seed=2)], interval=1, curvature=curvature)
        train_step(model, optimizer, regression())
        record = tuner.step(regression())
        assert record is not None
        slopes.append(record.hypergradients["lr"][0])
    assert slopes[0] == pytest.approx(slopes[1], rel=1e-2)


def test_one_dict_is_a_batch_and_not_a_list_of_them() -> None:
    model = nn.Linear(3, 2)
    batch = {"x": torch.randn(4, 3), "y": torch.tensor([0, 1, 0, 1])}

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return cross_entropy(model, (batch["x"], batch["y"]))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"looks like one batch; put it in a list"):
        onepass.Tuner(model, optimizer, loss, batch)
    onepass.Tuner(model, optimizer, loss, [batch])
