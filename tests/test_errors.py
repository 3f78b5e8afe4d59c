"""Bad input gets one clear error, when the tuner is made where that is possible, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import onepass
from tests.problems import mlp, mse, regression, train_step


def sgd(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **settings})


def tuner(optimizer_settings: dict[str, Any] | None = None, **settings: Any) -> onepass.Tuner:
    model = settings.pop("model", None) or mlp(3, 4, 1)
    optimizer = settings.pop("optimizer", None) or sgd(model, **(optimizer_settings or {}))
    loss, valid = settings.pop("loss", mse), settings.pop("valid", [regression()])
    return onepass.Tuner(model, optimizer, loss, valid, **settings)


def of_another_model() -> onepass.Tuner:
    return tuner(optimizer=sgd(mlp(3, 5, 1)))


def with_unknown_optimizer() -> onepass.Tuner:
    model = mlp(3, 4, 1)
    return tuner(model=model, optimizer=torch.optim.LBFGS(model.parameters()))


def on_an_optimizer_with_a_tuner() -> onepass.Tuner:
    model = mlp(3, 4, 1)
    optimizer = sgd(model)
    tuner(model=model, optimizer=optimizer)
    return tuner(model=model, optimizer=optimizer)


def swapped() -> onepass.Tuner:
    model: Any = mlp(3, 4, 1)
    optimizer: Any = sgd(model)
    return onepass.Tuner(optimizer, model, mse, [regression()])


def tied_from_two_values() -> onepass.Tuner:
    model = mlp(3, 4, 1)
    groups: list[dict[str, Any]] = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.2}]
    return tuner(model=model, optimizer=torch.optim.SGD(groups, lr=0.1), tied=("lr",))


BAD: list[tuple[Callable[[], Any], str]] = [
    (
        with_unknown_optimizer,
        r"optimizer must be one of Adagrad, Adam.*SGD.*got LBFGS.*onepass\.register\(LBFGS, rule\)",
    ),
    (of_another_model, r"optimizer must hold parameters of model, but got one of shape"),
    (on_an_optimizer_with_a_tuner, r"must have one tuner, but it already has another.*detach"),
    (tied_from_two_values, r"tied lr must start from one value in all groups, but got \[0.1, 0.2\]"),
    (lambda: tuner(tune=("lr", "speed")), r"names in tune must be among .*'lr'.*but got 'speed'"),
    (lambda: tuner(tune="lr"), r"must be tuples of names, but got the string 'lr'"),
    (lambda: tuner(tied=("speed",)), r"names in tied must be among"),
    (
        lambda: tuner(tune=("weight_decay",)),
        r"weight_decay cannot be tuned from 0.*log10.*small positive value such as",
    ),
    (lambda: tuner(tune=("momentum",)), r"momentum cannot be tuned from 0.*logit.*strictly between 0 and 1"),
    (lambda: tuner(lookback=0), r"lookback must be an integer of at least 1, but got 0"),
    (lambda: tuner(lookback=2.5), r"lookback must be an integer of at least 1, but got 2.5"),
    (lambda: tuner(interval=0), r"interval must be an integer of at least 1, but got 0"),
    (lambda: tuner(curvature="hessian"), r"curvature must be 'auto' or one of \['exact'.*but got 'hessian'"),
    (lambda: tuner(guard=True), r"guard must be an onepass\.Guard or None, but got True"),
    (lambda: tuner(valid=[]), r"valid must yield at least one batch.*but it is empty"),
    (lambda: tuner(valid=iter(())), r"valid must yield at least one batch"),
    (lambda: tuner(valid=3), r"valid must be an iterable of batches, but got int; put one batch in a list"),
    (lambda: tuner(valid=regression()), r"valid must be .*got a tuple that looks like one batch; put it in a list"),
    (lambda: tuner(loss=nn.MSELoss()), r"loss must be a function of \(model, batch\), but got MSELoss; write def loss"),
    (lambda: tuner(loss=lambda b: b), r"loss must be a function of \(model, batch\).*too many positional arguments"),
    (lambda: tuner(hyper_optimizer=0.05), r"hyper_optimizer must be a function from tensors to an optimizer, .*0.05"),
    (lambda: tuner(extra=[1]), r"extra must map names to hyperparameters, but got list"),
    (lambda: onepass.per_element(mlp(3, 4, 1).parameters()), r"per_element must be given a value to spread"),
    (swapped, r"model and optimizer must be .*got SGD and Sequential"),
    (lambda: tuner().load_state_dict({"state": {}}), r"state must come from Tuner.state_dict\(\)"),
    (lambda: tuner().load_state_dict(tuner(guard=None).state_dict()), r"one has a guard and the other has none"),
    (lambda: tuner(loss=lambda m, b: m(b[0])), r"loss\(model, batch\) must return a scalar tensor, .*shape \(16, 1\)"),
    (lambda: tuner(loss=lambda m, b: 1.0), r"loss\(model, batch\) must return a scalar tensor, but got float"),
    (lambda: tuner(loss=lambda m, b: b[0].sum()), r"loss must depend on the parameters"),
    (lambda: tuner(valid_loss=lambda m, b: mse(m, b).detach()), r"valid_loss must depend on the parameters"),
    (lambda: tuner(bounds={"lr": (0.2, 0.3)}), r"bounds of lr must include its start 0.1, but got \(0.2, 0.3\)"),
    (lambda: tuner(bounds={"lr": (0.3, 0.2)}), r"bounds of lr must be \(low, high\)"),
    (lambda: tuner(bounds={"speed": (0.2, 0.3)}), r"names in bounds must be among"),
    (lambda: tuner(extra={"l2": 0.1}), r"extra\['l2'\] must be an onepass\.Hyperparameter, but got float"),
    (lambda: tuner(extra={"lr": onepass.Hyperparameter(0.1)}), r"must not reuse the optimizer's names, but got 'lr'"),
    (lambda: tuner(tune=()), r"there must be something to tune"),
]


@pytest.mark.parametrize(("make", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_bad_input(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        make()
    assert "\n" not in str(raised.value)


def test_bad_input_changes_nothing() -> None:
    model = mlp(3, 4, 1)
    optimizer = sgd(model)
    groups = [{**group, "params": None} for group in optimizer.param_groups]
    bad: list[dict[str, Any]] = [
        {"lookback": 0},
        {"valid": []},
        {"loss": lambda m, b: m(b[0])},
        {"bounds": {"lr": (0.2, 0.3)}},
    ]
    for settings in bad:
        with pytest.raises(ValueError):
            tuner(model=model, optimizer=optimizer, **settings)
    assert [{**group, "params": None} for group in optimizer.param_groups] == groups
    assert not optimizer._optimizer_step_pre_hooks
    tuner(model=model, optimizer=optimizer)  # still free


def test_order_of_calls() -> None:
    model = mlp(3, 4, 1)
    optimizer = sgd(model)
    found = tuner(model=model, optimizer=optimizer)
    with pytest.raises(RuntimeError, match=r"must follow an optimizer\.step"):
        found.step(regression())
    train_step(model, optimizer, regression())
    found.step(regression())
    with pytest.raises(RuntimeError, match="once each, but there was none since the last"):
        found.step(regression())


def test_a_step_without_gradients() -> None:
    model = mlp(3, 4, 1)
    optimizer = sgd(model)
    found = tuner(model=model, optimizer=optimizer, interval=1)
    with pytest.raises(ValueError, match=r"must be taken with gradients, but there are none; call backward\(\)"):
        optimizer.step()
    assert found.values() == {"lr": [0.1]}


def test_a_generator_that_runs_dry() -> None:
    model = mlp(3, 4, 1)
    optimizer = sgd(model)
    found = tuner(model=model, optimizer=optimizer, valid=(regression(seed=s) for s in (2, 3)), interval=1)
    for _ in range(2):
        train_step(model, optimizer, regression())
        found.step(regression())
    train_step(model, optimizer, regression())
    with pytest.raises(ValueError, match="used up only once: give a list or a DataLoader"):
        found.step(regression())


def test_state_of_another_shape() -> None:
    source, target = tuner({"momentum": 0.9}), tuner()
    before = target.values()
    with pytest.raises(ValueError, match=r"state must be of a tuner of \['lr\[0\] \(\)'\], but it is of .*momentum"):
        target.load_state_dict(source.state_dict())
    assert target.values() == before


def test_state_of_other_ties() -> None:
    def of_two_groups(**settings: Any) -> onepass.Tuner:
        model = mlp(3, 4, 1)
        groups = onepass.per_tensor(model.parameters(), lr=0.1)
        return tuner(model=model, optimizer=torch.optim.SGD(groups), **settings)

    for source, target in (
        (of_two_groups(), of_two_groups(tied=("lr",))),
        (of_two_groups(tied=("lr",)), of_two_groups()),
    ):
        before = target.values()
        with pytest.raises(ValueError, match="must be of a tuner with the same tied"):
            target.load_state_dict(source.state_dict())
        assert target.values() == before
