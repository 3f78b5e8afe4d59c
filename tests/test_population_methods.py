"""The other ways to train a population: nothing tuned, exact hypergradients, restarts, rates that are scaled."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import onepass
from tests.populations import TRAIN, VALID, assert_close, batches, flat, population, torch_optimizer, trained, weights
from tests.problems import Batch, mse, train_step

pytestmark = pytest.mark.usefixtures("float64")

START: dict[str, Any] = {"lr": [0.02, 0.2, 0.05], "momentum": [0.9, 0.3, 0.6]}


def plainly_trained(
    rule: str, before: nn.Module, steps: int, *, clip_norm: float | None = None, **values: Any
) -> Tensor:
    optimizer = torch_optimizer(rule)(before.parameters(), **values)
    data = batches(3)
    for step in range(steps):
        train_step(before, optimizer, data[step % 3], clip_norm=clip_norm)
    return flat(before)


@pytest.mark.parametrize("rule", ["sgd", "adamw", "nadam"])
def test_nothing_tuned_is_plain_training(rule: str) -> None:
    rates = [1e-3, 1e-2, 1e-1]
    before = population(rule=rule, tune=(), start={"lr": rates})
    found = population(rule=rule, tune=(), start={"lr": rates})
    found.run(batches(3), steps=25)  # no validation data: nothing to tune
    expected = [plainly_trained(rule, before.model(r), 25, lr=rate) for r, rate in enumerate(rates)]
    assert_close(weights(found), torch.stack(expected), 1e-12)
    assert found.values()["lr"].tolist() == rates
    assert found.history.valid_loss.isnan().all()


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_nothing_tuned_with_one_rate_for_all(clip_norm: float | None) -> None:
    before = population(tune=(), start={"lr": 0.1})
    found = trained(25, batches(3), tune=(), start={"lr": 0.1}, clip_norm=clip_norm)
    expected = [plainly_trained("sgd", before.model(r), 25, lr=0.1, clip_norm=clip_norm) for r in range(3)]
    assert_close(weights(found), torch.stack(expected), 1e-12)


# --- exact hypergradients ---


def sgd(raw: list[Tensor]) -> torch.optim.Optimizer:
    """A hyper step as long as its hypergradient: Adam's would show only the sign."""
    return torch.optim.SGD(raw, lr=0.02)


def slopes_through_steps(
    model: nn.Module, data: list[Batch], used: list[dict[str, float]], through: int, clip_norm: float | None
) -> list[float]:
    """Raw hypergradients of learning rate and momentum, by autograd through the last steps, written out by hand."""
    now = {name: p.detach() for name, p in model.named_parameters()}
    speed = {name: torch.zeros_like(p) for name, p in now.items()}
    shift = torch.zeros(2, requires_grad=True)  # the same for every step that is differentiated
    for step, values in enumerate(used):
        if step == len(used) - through:
            now, speed = ({name: x.detach() for name, x in tensors.items()} for tensors in (now, speed))
        inside = step >= len(used) - through
        lr, momentum = (values[name] + (shift[i] if inside else 0.0) for i, name in enumerate(("lr", "momentum")))
        leaves = {name: x.requires_grad_() for name, x in now.items()}
        loss = mse(lambda x, leaves=leaves: functional_call(model, leaves, (x,)), data[step % len(data)])
        gradient = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
        if clip_norm is not None:
            length = torch.cat([g.flatten() for g in gradient]).norm()
            gradient = tuple(g * (clip_norm / (length + 1e-6)).clamp(max=1) for g in gradient)
        speed = {name: momentum * speed[name] + g for name, g in zip(leaves, gradient, strict=True)}
        now = {name: now[name] - lr * speed[name] for name in now}
    valid = mse(lambda x: functional_call(model, now, (x,)), VALID)
    by_lr, by_momentum = torch.autograd.grad(valid, shift)[0].tolist()
    last = used[-1]
    return [by_lr * math.log(10) * last["lr"], by_momentum * last["momentum"] * (1 - last["momentum"])]


@pytest.mark.parametrize(
    ("interval", "unroll", "clip_norm"),
    [(4, 1, None), (4, 3, None), (4, 4, None), (3, 5, None), (3, 20, None), (4, 3, 0.5), (3, 5, 2.0)],
)
def test_unrolling_is_autograd_through_real_steps(interval: int, unroll: int, clip_norm: float | None) -> None:
    """Through clipping too: with 0.5 nearly all gradients are clipped, with 2 about half."""
    settings: dict[str, Any] = {"interval": interval, "unroll": unroll, "guard": None, "hyper_optimizer": sgd}
    settings["clip_norm"] = clip_norm
    before, data = population(start=START), batches(5)
    found = trained(2 * interval, data, start=START, **settings)
    values = [before.values(), *({n: v[i] for n, v in found.history.values.items()} for i in (0, 1))]
    for r in range(3):
        used: list[dict[str, float]] = []
        for i in (0, 1):
            at = {name: float(value[r]) for name, value in values[i].items()}
            used += [at] * interval
            expected = slopes_through_steps(before.model(r), data, used, min(unroll, len(used)), clip_norm)
            seen = [float(found.history.hypergradients[name][i, r]) for name in ("lr", "momentum")]
            assert seen == pytest.approx(expected, rel=1e-9)
            after = float(values[i + 1]["lr"][r]), float(values[i + 1]["momentum"][r])
            raw = math.log10(at["lr"]) - 0.02 * expected[0], math.log(1 / at["momentum"] - 1) + 0.02 * expected[1]
            assert after == pytest.approx((10 ** raw[0], 1 / (1 + math.exp(raw[1]))), rel=1e-9)


def test_unrolling_through_a_run_in_two_parts() -> None:
    """The steps before the first pause are not forgotten."""
    whole, halves = (trained(steps, start=START, unroll=8, interval=5, guard=None) for steps in (15, 7))
    halves.run([TRAIN], [VALID], steps=8)
    assert torch.equal(weights(halves), weights(whole))
    assert torch.equal(halves.values()["lr"], whole.values()["lr"])


# --- the product of two gradients ---


@pytest.mark.parametrize(("momentum", "clip_norm"), [(0.0, None), (0.8, None), (0.8, 0.5)])
def test_product_of_gradients(momentum: float, clip_norm: float | None) -> None:
    """Baydin et al. by hand: log10 of the rate moves by the product of the new gradient and the last, after every step.

    Momentum moves the weights, but not the rate. The last gradient is the one that moved the weights, clipped or not;
    the new one is the slope of the loss.
    """
    rates, beta = [0.02, 0.2, 0.05], 0.003
    settings: dict[str, Any] = {"start": {"lr": rates, "momentum": momentum}, "tune": ("lr",), "guard": None}
    settings["clip_norm"] = clip_norm
    before = population(**settings)
    found = population(
        estimator="product", interval=1, hyper_optimizer=lambda raw: torch.optim.SGD(raw, lr=beta), **settings
    )
    found.run([TRAIN], [TRAIN], steps=12)
    for r, rate in enumerate(rates):
        model, log_rate = before.model(r), math.log10(rate)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
        for _ in range(12):
            train_step(model, optimizer, TRAIN, clip_norm=clip_norm)
            last = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            new = torch.cat([g.flatten() for g in torch.autograd.grad(mse(model, TRAIN), list(model.parameters()))])
            log_rate += beta * float(last @ new)
            optimizer.param_groups[0]["lr"] = 10**log_rate
        assert_close(weights(found)[r], flat(model), 1e-12)
        assert float(found.values()["lr"][r]) == pytest.approx(10**log_rate, rel=1e-12)


# --- restarts ---


def test_restart_brings_the_first_weights_back() -> None:
    before = population(start=START)
    found = trained(10, start=START, restart=True, interval=5)
    assert torch.equal(weights(found), weights(before))
    assert not torch.isin(found.values()["lr"], before.values()["lr"]).any()
    found.run([TRAIN], [VALID], steps=2)
    assert not torch.equal(weights(found), weights(before))


@pytest.mark.parametrize("unroll", [None, 5])
def test_every_interval_after_a_restart_is_a_first_one(unroll: int | None) -> None:
    """At rest, too: as if begun anew with the values found so far. Statistics of batch norm begin anew as well."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    settings: dict[str, Any] = {"interval": 5, "lookback": 5, "unroll": unroll, "guard": None, "model": model}
    found = trained(10, start=START, restart=True, **settings)
    between = {name: value[0] for name, value in found.history.values.items()}
    anew = trained(5, start=between, **settings)
    assert_close(found.history.valid_loss[1], anew.history.valid_loss[0], 1e-12)
    for name, slope in anew.history.hypergradients.items():
        assert_close(found.history.hypergradients[name][1], slope[0], 1e-12)
    assert int(found.model(0)[1].num_batches_tracked) == 0  # type: ignore[index]


# --- values that are scaled ---


def test_scaled_once_an_interval() -> None:
    found = population(tune=(), interval=4, scale={"lr": onepass.Uniform(0.95, 1.01)}, replicas=6)
    start, seen = found.values()["lr"], {}
    for steps in (3, 1, 5, 5):
        found.run([TRAIN], steps=steps)
        seen[found.steps] = found.values()["lr"] / start
    factors = seen[4]
    assert ((factors >= 0.95) & (factors <= 1.01)).all()
    assert len(factors.unique()) == 6
    for step, ratio in seen.items():
        assert_close(ratio, factors ** (step // 4), 1e-12)


def test_factors_do_not_depend_on_how_many_there_are() -> None:
    few, many = (
        trained(4, tune=(), interval=4, scale={"lr": onepass.Uniform(0.9, 1.1)}, replicas=n).values() for n in (2, 5)
    )
    assert torch.equal(few["lr"], many["lr"][:2])


def test_scaled_within_bounds() -> None:
    settings: dict[str, Any] = {"start": {"lr": 0.1}, "bounds": {"lr": (0.05, 0.2)}, "tune": (), "interval": 1}
    found = trained(8, scale={"lr": [0.5, 1.0, 2.0]}, **settings)
    assert found.values()["lr"].tolist() == pytest.approx([0.05, 0.1, 0.2])


def test_a_scaled_rate_is_the_one_that_trains() -> None:
    start, factors = [0.1, 0.05, 0.02], [0.5, 0.9, 1.5]
    before = population(start={"lr": start}, tune=())
    found = trained(6, start={"lr": start}, tune=(), interval=2, scale={"lr": factors})
    for r in range(3):
        model = before.model(r)
        optimizer = torch.optim.SGD(model.parameters(), lr=start[r])
        for step in range(6):
            optimizer.param_groups[0]["lr"] = start[r] * factors[r] ** (step // 2)
            train_step(model, optimizer, TRAIN)
        assert_close(weights(found)[r], flat(model), 1e-12)


def test_scaled_beside_what_is_tuned() -> None:
    start = {"lr": 0.1, "weight_decay": 1e-3}
    found = trained(4, start=start, tune=("weight_decay",), scale={"lr": [0.5, 0.9, 1.0]}, interval=2)
    assert found.values()["lr"].tolist() == pytest.approx([0.025, 0.081, 0.1])


def test_scaled_by_one_number_for_all() -> None:
    found = trained(4, tune=(), scale={"lr": 0.5}, interval=2, start={"lr": [0.1, 0.2, 0.4]})
    assert found.values()["lr"].tolist() == pytest.approx([0.025, 0.05, 0.1])


# --- the hyper-optimizer ---


def test_another_hyper_optimizer() -> None:
    """Momentum carries from one hyper step to the next: the values follow from the hypergradients on record."""
    settings: dict[str, Any] = {"start": {"lr": [0.02, 0.01, 0.05]}, "interval": 2, "guard": None}
    before = population(**settings).values()["lr"]
    found = trained(8, hyper_optimizer=lambda raw: torch.optim.SGD(raw, lr=0.01, momentum=0.9), **settings)
    raw, speed = before.log10(), torch.zeros(3)
    for slope, value in zip(found.history.hypergradients["lr"], found.history.values["lr"], strict=True):
        speed = 0.9 * speed + slope
        raw = raw - 0.01 * speed
        assert_close(value.log10(), raw, 1e-12)


def test_groups_of_a_hyper_optimizer() -> None:
    """Each tuned value by its own settings; one that is not moved stays where it is."""

    def halves(raw: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": raw[:1], "lr": 0.0}, {"params": raw[1:], "lr": 0.05}])

    found = trained(4, start=START, interval=2, hyper_optimizer=halves)
    assert_close(found.values()["lr"], torch.tensor(START["lr"]), 1e-15)
    assert (found.values()["momentum"] != torch.tensor(START["momentum"])).all()
