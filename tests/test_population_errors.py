"""Bad input gets one clear error with the value in it, and no file is written over."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onepass
from tests.populations import TRAIN, VALID, network, population, trained, weights
from tests.problems import mse, regression

pytestmark = pytest.mark.usefixtures("float64")

RANGE = onepass.LogUniform(1e-3, 1e-1)


def sgd_without_one(raw: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(raw[:1], lr=0.1)


def of_two_types() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1).float())


def never_the_same() -> Callable[[], nn.Module]:
    sizes = iter((3, 3, 4, 5))
    return lambda: nn.Linear(next(sizes), 1)


MAKING: list[tuple[dict[str, Any], str]] = [
    ({"replicas": 0}, r"replicas must be an integer of at least 1, but got 0"),
    ({"replicas": -3}, r"replicas must be an integer of at least 1, but got -3"),
    ({"replicas": 2.0}, r"replicas must be an integer of at least 1, but got 2.0"),
    ({"replicas": True}, r"replicas must be an integer of at least 1, but got True"),
    ({"interval": 0}, r"interval must be an integer of at least 1, but got 0"),
    ({"lookback": 0}, r"lookback must be an integer of at least 1, but got 0"),
    ({"unroll": 0}, r"unroll must be an integer of at least 1, but got 0"),
    ({"block": 0}, r"block must be an integer of at least 1, but got 0"),
    (
        {"rule": "lion"},
        r"rule must be one of \['adagrad'.*'sgd'\], a torch optimizer class or an onepass\.Rule, but got 'lion'",
    ),
    ({"rule": torch.optim.LBFGS}, r"rule must be one of .*but got <class .*LBFGS"),
    ({"start": {}}, r"start must have 'lr', but got \[\]; .*onepass\.LogUniform\(1e-6, 1e-1\)"),
    ({"start": {"momentum": 0.9}}, r"start must have 'lr', but got \['momentum'\]"),
    ({"start": [0.1]}, r"start must map names to values or distributions, but got list"),
    ({"start": {"lr": RANGE, "speed": 1.0}}, r"names in start must be among .*'lr'.*but got 'speed'"),
    ({"start": {"lr": [0.1, 0.2]}}, r"start\['lr'\] must be .* or 3 numbers, but got \[0.1, 0.2\]"),
    ({"start": {"lr": "fast"}}, r"start\['lr'\] must be a number, onepass\.LogUniform, .*but got 'fast'"),
    ({"start": {"lr": -0.1}}, r"start\['lr'\] must be finite and at least 0, but got -0.1"),
    ({"start": {"lr": float("nan")}}, r"start\['lr'\] must be finite and at least 0, but got nan"),
    ({"start": {"lr": [0.1, -0.2, 0.3]}}, r"start\['lr'\] must be finite and at least 0, but got -0.2"),
    ({"start": {"lr": 0.1, "momentum": -1}}, r"start\['momentum'\] must be finite and at least 0, but got -1"),
    ({"tune": ("lr", "speed")}, r"names in tune must be among .*'lr'.*but got 'speed'"),
    ({"tune": "lr"}, r"tune must be a tuple of names, but got the string 'lr'"),
    ({"tune": ("weight_decay",)}, r"weight_decay cannot be tuned from 0 in log10 space; .*such as 1e-6"),
    ({"tune": ("momentum",)}, r"momentum cannot be tuned from 0 in logit space; start strictly between 0 and 1"),
    (
        {"tune": ("momentum",), "start": {"lr": 0.1, "momentum": [0.9, 0.5, 0]}},
        r"momentum cannot be tuned from 0 in logit space",
    ),
    ({"per_element": ("momentum",)}, r"names in per_element must be among those tuned, \['lr'\], but got 'momentum'"),
    ({"bounds": {"momentum": (0.1, 0.9)}}, r"names in bounds must be among those tuned, \['lr'\], but got 'momentum'"),
    ({"bounds": {"lr": (0.2, 0.3)}}, r"bounds of lr must include its start .*but got \(0.2, 0.3\)"),
    ({"bounds": {"lr": (0.3, 0.2)}}, r"bounds of lr must be \(low, high\).*but got \(0.3, 0.2\)"),
    ({"scale": {"lr": onepass.Uniform(0.9, 1)}}, r"scale must not move what is tuned, but got 'lr' in both"),
    ({"scale": {"speed": onepass.Uniform(0.9, 1)}}, r"names in scale must be among .*but got 'speed'"),
    ({"guard": True}, r"guard must be an onepass\.Guard or None, but got True"),
    ({"unroll": 5}, r"guard must be None with unroll: it would undo the steps that are differentiated"),
    ({"curvature": "forward"}, r"curvature must be one of \['exact', 'finite-difference'\], but got 'forward'"),
    ({"clip_norm": 0}, r"clip_norm must be a finite number above 0, but got 0; None switches it off"),
    ({"clip_norm": True}, r"clip_norm must be a finite number above 0, but got True"),
    ({"clip_norm": float("inf")}, r"clip_norm must be a finite number above 0, but got inf"),
    ({"estimator": "exact"}, r"estimator must be one of \['product', 'series', 'whole-run'\], but got 'exact'"),
    (
        {"estimator": "product", "start": {"lr": 0.1, "momentum": 0.5}},
        r"'product' is for tune=\('lr',\).*got lr, momentum",
    ),
    ({"backend": "fast"}, r"backend must be 'auto' or one of \['compiled', .*'traced'\], but got 'fast'"),
    (
        {"rule": "adagrad", "start": {"lr": 0.1, "initial_accumulator_value": 0.5}},
        r"names in start must be among .*but got 'initial_accumulator_value'",
    ),
    ({"tune": (), "scale": {"nesterov": onepass.Uniform(0.9, 1)}}, r"names in scale must be among .*'nesterov'"),
    ({"device": "meta"}, r"device must be a CPU or a CUDA device, but got 'meta'"),
    ({"hyper_optimizer": torch.optim.LBFGS}, r"optimizer must be one of .*but got LBFGS"),
    (
        {"hyper_optimizer": sgd_without_one, "start": {"lr": 0.1, "momentum": 0.9}},
        r"hyper_optimizer must move all of \['lr', 'momentum'\], but it moves only \['lr'\]",
    ),
    ({"model": lambda: 3}, r"make_model must return a torch module, but got int"),
    ({"model": nn.Tanh}, r"make_model must return parameters of one floating point type, but got no parameters"),
    ({"model": of_two_types}, r"make_model must return parameters of one .*but got torch.float32, torch.float64"),
    ({"model": never_the_same()}, r"make_model must always return the same architecture, but replicas differ"),
    ({"loss": nn.MSELoss()}, r"loss must be a function of \(model, batch\), but got MSELoss; write def loss"),
    ({"loss": lambda b: b}, r"loss must be a function of \(model, batch\).*too many positional arguments"),
    ({"valid_loss": lambda b: b}, r"valid_loss must be a function of \(model, batch\).*too many positional arguments"),
]


def check(make: Callable[[], Any], message: str, kind: type[Exception] = ValueError) -> str:
    with pytest.raises(kind, match=message) as raised:
        make()
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(("settings", "message"), MAKING, ids=[message[:40] for _, message in MAKING])
def test_making(settings: dict[str, Any], message: str) -> None:
    check(lambda: population(**settings), message)


RUNNING: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"steps": 0}, r"steps must be an integer of at least 1, but got 0"),
    ({}, {"steps": 2.5}, r"steps must be an integer of at least 1, but got 2.5"),
    ({}, {"every": 0}, r"every must be an integer of at least 1, but got 0"),
    ({}, {"every": -1}, r"every must be an integer of at least 1, but got -1"),
    ({}, {"valid": None}, r"valid must be given to tune lr, but got None"),
    ({}, {"train": []}, r"train must yield at least one batch.*but it is empty"),
    ({}, {"valid": iter(())}, r"valid must yield at least one batch.*but it is empty"),
    ({}, {"train": TRAIN}, r"train must be .*got a tuple that looks like one batch; put it in a list"),
    ({}, {"valid": 3}, r"valid must be an iterable of batches, but got int; put one batch in a list"),
    (
        {},
        {"train": [regression(16), regression(15)]},
        r"batches of train must all have the same shapes, but after \[\(16, 3\), .* came \[\(15, 3\), .*drop_last=True",
    ),
    ({}, {"valid": [regression(16), regression(15)], "steps": 20}, r"batches of valid must all have the same shapes"),
    ({"loss": lambda m, b: m(b[0])}, {}, r"loss\(model, batch\) must return a scalar tensor, .*shape \(32, 1\)"),
    ({"loss": lambda m, b: 1.0}, {}, r"loss\(model, batch\) must return a scalar tensor, but got float"),
    ({"loss": lambda m, b: b[0].sum()}, {}, r"loss must depend on the parameters"),
    ({"valid_loss": lambda m, b: m(b[0])}, {}, r"valid_loss\(model, batch\) must return a scalar tensor"),
]


def running(settings: dict[str, Any], arguments: dict[str, Any]) -> None:
    population(**settings).run(**{"train": [TRAIN], "valid": [VALID], "steps": 4, **arguments})


@pytest.mark.parametrize(("settings", "arguments", "message"), RUNNING, ids=[message[:40] for *_, message in RUNNING])
def test_running(settings: dict[str, Any], arguments: dict[str, Any], message: str) -> None:
    check(lambda: running(settings, arguments), message)


class Fork(nn.Module):
    """Goes one way or the other, depending on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y if y.sum() > 0 else -y


def reading_loss(model: Any, batch: Any) -> Tensor:
    return mse(model, batch) / mse(model, batch).item()


def test_control_flow_that_depends_on_data() -> None:
    message = r"module '1' \(Fork\) cannot be evaluated for many replicas at once: .*control flow.* with onepass\.Tuner"
    check(
        lambda: running({"model": lambda: nn.Sequential(nn.Linear(3, 3), Fork(), nn.Linear(3, 1))}, {}),
        message,
        RuntimeError,
    )
    check(lambda: running({"model": Fork}, {}), r"module 'model' \(Fork\) cannot be evaluated", RuntimeError)
    check(lambda: running({"loss": reading_loss}, {}), r"loss cannot be evaluated for many replicas", RuntimeError)


def test_best() -> None:
    found = trained(4)
    check(lambda: found.best(0), r"k must be an integer of at least 1, but got 0")
    check(lambda: found.best(4), r"k must be at most the 3 replicas there are, but got 4")
    check(lambda: population().best(), r"best needs a validation loss, but there was no run\(", RuntimeError)


def test_evaluate() -> None:
    found = population()
    check(lambda: found.evaluate(lambda m, b: m(b[0]), VALID), r"metric\(model, batch\) must return a scalar tensor")
    check(lambda: found.evaluate(nn.MSELoss(), VALID), r"metric must be a function of \(model, batch\)")


# --- checkpoints ---

OTHERS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "seed": ({"seed": 2}, [TRAIN], r"its seed is 1 and here it is 2"),
    "lookback": ({"lookback": 3}, [TRAIN], r"its lookback is 1 and here it is 3"),
    "replicas": ({"replicas": 4}, [TRAIN], r"its replicas is 3 and here it is 4"),
    "rule": ({"rule": "adagrad"}, [TRAIN], r"its rule is sgd and here it is adagrad"),
    "guard": ({"guard": None}, [TRAIN], r"its guard is Guard\(.*and here it is None"),
    "start": ({"start": {"lr": [0.1, 0.2, 0.3]}}, [TRAIN], r"its starts is \w+ and here it is \w+"),
    "model": ({"model": lambda: nn.Linear(3, 1)}, [TRAIN], r"its model is .*'0.weight': \(6, 3\).* and here it is"),
    "data": (
        {},
        [regression(32, seed=7)],
        r"its train is \(32, 3\), \(32, 1\) #\w+ and here it is \(32, 3\), \(32, 1\)",
    ),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of four steps, which no test may change."""
    found = tmp_path_factory.mktemp("checkpoint") / "population.pt"
    population().run([TRAIN], [VALID], steps=4, checkpoint=found)
    return found


@pytest.mark.parametrize("other", OTHERS)
def test_checkpoint_of_another_configuration(other: str, path: Path) -> None:
    settings, train, message = OTHERS[other]
    before = path.read_bytes()
    found = population(**settings)
    first = weights(found)
    check(
        lambda: found.run(train, [VALID], steps=8, checkpoint=path),
        rf"checkpoint {re.escape(str(path))} must be of the same configuration, but {message}.*give another path",
    )
    assert path.read_bytes() == before
    assert found.steps == 0 and torch.equal(weights(found), first)


def test_checkpoint_of_another_run(path: Path) -> None:
    """Longer than asked for, or from another beginning."""
    before = path.read_bytes()
    too_far, later = "must not have come further than step 2, but it is at 4", "its first step is 0 and here it is 4"
    check(lambda: population().run([TRAIN], [VALID], steps=2, checkpoint=path), too_far)
    check(lambda: trained(4).run([TRAIN], [VALID], steps=4, checkpoint=path), later)
    assert path.read_bytes() == before


def test_checkpoint_of_another_loss_or_network(path: Path) -> None:
    """The same shapes, but other numbers come out: noticed by the first losses."""
    before = path.read_bytes()

    def absolute(model: nn.Module, batch: Any) -> Tensor:
        error: Tensor = model(batch[0]) - batch[1]
        return error.abs().mean()

    def rectified() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 6, dtype=torch.float64), nn.ReLU(), nn.Linear(6, 1, dtype=torch.float64))

    for change in ({"loss": absolute}, {"valid_loss": absolute}, {"model": rectified}):
        with pytest.raises(ValueError, match="its first losses is"):
            population(**change).run([TRAIN], [VALID], steps=8, checkpoint=path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("kind", ["cut in half", "of something else"])
def test_checkpoint_that_cannot_be_read(kind: str, path: Path, tmp_path: Path) -> None:
    whole, path = path.read_bytes(), tmp_path / "population.pt"
    if kind == "cut in half":
        path.write_bytes(whole[: len(whole) // 2])
    else:
        torch.save(network().state_dict(), path)
    before = path.read_bytes()
    message = rf"checkpoint {re.escape(str(path))} cannot be read .*move it away to begin anew"
    check(lambda: population().run([TRAIN], [VALID], steps=4, checkpoint=path), message)
    assert path.read_bytes() == before


def test_checkpoint_that_is_no_file_of_torch(tmp_path: Path) -> None:
    path = tmp_path / "population.pt"
    path.write_bytes(b"nonsense")
    check(lambda: population().run([TRAIN], [VALID], steps=4, checkpoint=path), r"cannot be read")
    assert path.read_bytes() == b"nonsense"


# --- memory ---


def free(monkeypatch: pytest.MonkeyPatch, amount: float) -> None:
    monkeypatch.setattr("onepass.blocks.available", lambda device: int(amount))


def test_more_than_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """From far too little, over enough for some of the replicas at a time, to plenty."""
    free(monkeypatch, 10)
    told = check(
        lambda: trained(4, replicas=16),
        r"16 replicas need \S+ GiB even in blocks of one, but \S+ GiB are free on cpu; use fewer replicas",
        MemoryError,
    )
    free(monkeypatch, 1.5 * float(told.split()[3]) * 2**30)
    told = check(
        lambda: trained(4, replicas=16, block=16),
        r"block=16 needs \S+ GiB, but \S+ GiB are free on cpu; use block=\d+$",
        MemoryError,
    )
    fits = int(told.rsplit("=")[-1])
    assert 1 <= fits < 16
    within, chosen = trained(4, replicas=16, block=fits), trained(4, replicas=16)
    assert chosen._size == within._size == fits
    free(monkeypatch, 2**40)
    assert trained(4, replicas=16)._size == 16
    assert (weights(chosen) - weights(trained(4, replicas=16, block=16))).abs().max() < 1e-12


def test_a_model_in_place_of_a_function_that_makes_one() -> None:
    check(lambda: population(model=nn.Linear(3, 1)), "make_model must be a function that makes a model, but got Linear")


def test_several_batches_for_evaluate() -> None:
    found = population()
    check(lambda: found.evaluate(mse, [TRAIN, VALID]), "evaluate takes one batch, but got several")
    check(
        lambda: found.evaluate(mse, iter([TRAIN])),
        "evaluate takes one batch, with tensors in it, but got list_iterator",
    )


def test_a_metric_that_cannot_be_batched() -> None:
    with pytest.raises(RuntimeError, match=r"metric cannot be .*; evaluate population\.model\(r\), one by one$"):
        population().evaluate(lambda model, batch: torch.tensor(mse(model, batch).item()), TRAIN)


def test_a_kernel_that_cannot_be_batched() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.LSTM(3, 2, batch_first=True, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            outputs: Tensor = self.cells(x.unsqueeze(1))[0]
            return outputs[:, 0, :1]

    with pytest.raises(RuntimeError, match=r"module 'cells' \(LSTM\) cannot be .* with onepass\.Tuner$"):
        population(model=Recurrent).run([TRAIN], [VALID], steps=2)
