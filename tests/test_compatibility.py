"""Models and loops of every kind: the three added lines work there too."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import onepass
from onepass.evaluation import trains_by_cudnn
from tests.problems import cross_entropy, mlp, mse, regression, train_step

Maker = Callable[[], nn.Module]
VOCABULARY = 12


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.cell = nn.LSTM(6, 8, num_layers=2, dropout=0.1)
        self.read = nn.Linear(8, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.read(self.cell(self.embed(x))[0])
        return result


class Attentive(nn.Module):
    """Scaled dot product attention, with the input embedding tied to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.project = nn.Linear(8, 24)
        self.read = nn.Linear(8, VOCABULARY, bias=False)
        self.read.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(self.embed(x)).chunk(3, dim=-1)
        result: Tensor = self.read(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return result


class Sample(NamedTuple):
    make: Maker
    data: Callable[[int], Any]


def tokens(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sequence = torch.randint(0, VOCABULARY, (4, 10), generator=generator)
    return sequence[:, :-1], sequence[:, 1:]


def features(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(16, 5, generator=generator), torch.randint(0, 3, (16,), generator=generator)


SAMPLES = {
    "lstm": Sample(Recurrent, tokens),
    "attention with tied weights": Sample(Attentive, tokens),
    "batch norm": Sample(
        lambda: nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)), features
    ),
    "weight norm": Sample(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)), features),
}


@pytest.mark.parametrize("curvature", ["auto", "gauss-newton", "finite-difference"])
@pytest.mark.parametrize("name", SAMPLES)
def test_kind_of_model(name: str, curvature: str) -> None:
    torch.manual_seed(0)
    model, data = SAMPLES[name].make(), SAMPLES[name].data
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tuner = onepass.Tuner(model, optimizer, cross_entropy, [data(9)], interval=2, curvature=curvature)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # nothing to fall back from
        for i in range(6):
            train_step(model, optimizer, data(i), cross_entropy)
            record = tuner.step(data(i))
    assert record is not None
    assert record.skipped is None
    assert all(math.isfinite(slope) and slope != 0 for (slope,) in record.hypergradients.values())


def test_tied_weights_equal_the_same_model_written_with_one() -> None:
    """Hypergradient of a tied model against the finite difference of its real step, in float64."""
    torch.manual_seed(0)
    model = Attentive().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tuner = onepass.Tuner(model, optimizer, cross_entropy, [tokens(9)], interval=1, lookback=1)
    losses = []
    for sign in (1, -1):
        twin = copy.deepcopy(model)
        twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1 * 10 ** (sign * 1e-5))
        train_step(twin, twin_optimizer, tokens(0), cross_entropy)
        losses.append(cross_entropy(twin, tokens(9)).item())
    train_step(model, optimizer, tokens(0), cross_entropy)
    record = tuner.step(tokens(0))
    assert record is not None
    assert record.hypergradients["lr"][0] == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-5)


def test_sparse_gradients_get_a_clear_error() -> None:
    model = nn.Sequential(nn.Embedding(VOCABULARY, VOCABULARY, sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tuner = onepass.Tuner(model, optimizer, cross_entropy, [tokens(9)], interval=1)
    with pytest.raises(ValueError, match=r"must be dense.*sparse=False"):
        train_step(model, optimizer, tokens(0), cross_entropy)
    assert tuner.values()["lr"] == [0.1]


def test_gradient_that_comes_and_goes() -> None:
    """A part of the model that only some batches use: its optimizer state has another age."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes = mlp(3, 4, 1), mlp(3, 4, 1)
            self.use = False

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.always(x) + (self.sometimes(x) if self.use else 0)
            return result

    model = Branching()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    tuner = onepass.Tuner(model, optimizer, mse, [regression(seed=2)], interval=1)
    for i in range(6):
        model.use = i % 3 == 2
        train_step(model, optimizer, regression())
        record = tuner.step(regression())
        assert record is not None
        assert record.skipped is None


def test_bfloat16_autocast() -> None:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.mse_loss(model(batch[0]).float(), batch[1])

    model, train = mlp(3, 16, 1, dtype=torch.float32), regression(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tuner = onepass.Tuner(model, optimizer, loss, [train], interval=1)
    for _ in range(20):
        train_step(model, optimizer, train, loss)
        record = tuner.step(train)
    assert record is not None
    assert record.values["lr"][0] > 1e-2


def test_bfloat16_weights() -> None:
    model, batch = mlp(3, 16, 1, dtype=torch.bfloat16), regression(dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tuner = onepass.Tuner(model, optimizer, mse, [batch], interval=1)
    train_step(model, optimizer, batch)
    record = tuner.step(batch)
    assert record is not None
    assert record.skipped is None


def test_compiled_model_is_tuned_by_its_original() -> None:
    """The eager backend compiles nothing but wraps like any other: what matters here is whose module runs."""
    values = []
    for compiled in (False, True):
        model = mlp(3, 8, 1)
        trained: Any = torch.compile(model, backend="eager") if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.5)
        tuner = onepass.Tuner(trained, optimizer, mse, [regression(seed=2)], interval=2)
        for _ in range(8):
            train_step(trained, optimizer, regression())
            tuner.step(regression())
        values.append(tuner.values())
    assert values[0] == values[1]


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        result: Tensor = gradient * (1 - x.tanh() ** 2)
        return result


class FirstOrder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(3, 8, dtype=torch.float64), nn.Linear(8, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.outer(Once.apply(self.inner(x)))  # type: ignore[no-untyped-call]
        return result


def test_auto_falls_back_with_one_warning() -> None:
    model = FirstOrder()
    twin = nn.Sequential(copy.deepcopy(model.inner), nn.Tanh(), copy.deepcopy(model.outer))
    slopes = []
    for candidate, expectation in ((model, pytest.warns(UserWarning, match="no second derivative")), (twin, None)):
        optimizer = torch.optim.SGD(candidate.parameters(), lr=0.1, momentum=0.5)
        tuner = onepass.Tuner(candidate, optimizer, mse, [regression(seed=2)], interval=1, lookback=5)
        for i in range(3):
            train_step(candidate, optimizer, regression())
            if expectation is not None and i == 0:
                with expectation:
                    record = tuner.step(regression())
            else:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    record = tuner.step(regression())
        assert record is not None
        slopes.append(record.hypergradients["lr"][0])
    assert slopes[0] == pytest.approx(slopes[1], rel=1e-5)


class Slope(torch.autograd.Function):
    """Refuses only when its own derivative is taken, in the middle of the series."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, x: Tensor) -> Tensor:
        return gradient * (1 - x.tanh() ** 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError("derivative of the slope")


class Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return Slope.apply(*gradients, *ctx.saved_tensors)  # type: ignore[no-untyped-call]


class LateFirstOrder(FirstOrder):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.outer(Late.apply(self.inner(x)))  # type: ignore[no-untyped-call]
        return result


def test_a_late_fall_back_is_as_if_asked_for() -> None:
    records = []
    for curvature in ("auto", "finite-difference"):
        model = LateFirstOrder()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        tuner = onepass.Tuner(model, optimizer, mse, [regression(seed=2)], interval=1, curvature=curvature)
        train_step(model, optimizer, regression())
        warned = pytest.warns(UserWarning, match="derivative of the slope")
        with warned if curvature == "auto" else nullcontext():
            records.append(tuner.step(regression()))
    assert records[0] == records[1]


def test_exact_on_a_first_order_kernel_is_an_error() -> None:
    model = FirstOrder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tuner = onepass.Tuner(model, optimizer, mse, [regression()], interval=1, curvature="exact")
    train_step(model, optimizer, regression())
    with pytest.raises(
        RuntimeError, match=r"curvature='exact' needs second derivatives.*finite-difference.*lookback=1"
    ):
        tuner.step(regression())
    assert tuner.values() == {"lr": [0.1]}


def recurrent(dropout: float = 0.0) -> Recurrent:
    model = Recurrent()
    model.cell.dropout = dropout
    return model


def tuned_recurrent(device: str = "cpu", **settings: Any) -> onepass.Tuner:
    torch.manual_seed(0)
    inputs, targets = tokens(0)
    model, batch = recurrent().to(device), (inputs.to(device), targets.to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    tuner = onepass.Tuner(model, optimizer, next_token, [batch], interval=1, **settings)
    for _ in range(3):
        train_step(model, optimizer, batch, next_token)
        tuner.step(batch)
    return tuner


def next_token(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


@pytest.mark.parametrize("settings", [{}, {"lookback": 1, "estimator": "whole-run"}], ids=str)
def test_recurrent_kernels_of_cudnn_are_kept(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning, and then finite differences: switching cuDNN off costs many times more."""
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda tensor: True)
    with pytest.warns(UserWarning, match="cuDNN's recurrent networks") as told:
        found = tuned_recurrent(**settings).history
    assert [one.category for one in told if issubclass(one.category, UserWarning)] == [UserWarning]
    expected = tuned_recurrent(curvature="finite-difference", **settings).history
    assert found.to_dict() == expected.to_dict()


def test_where_cudnn_may_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda tensor: True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuned_recurrent(lookback=1)
        tuned_recurrent(curvature="exact")
    assert trains_by_cudnn(recurrent())
    assert not trains_by_cudnn(recurrent(dropout=0.1)), "its masks cannot be repeated"
    assert not trains_by_cudnn(mlp(3, 4, 2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_recurrent_kernels_on_a_gpu() -> None:
    with pytest.warns(UserWarning, match="cuDNN's recurrent networks"):
        quick = tuned_recurrent("cuda").history
    exact = tuned_recurrent("cuda", curvature="exact").history
    for found, expected in zip(quick, exact, strict=True):
        assert found.hypergradients["lr"] == pytest.approx(expected.hypergradients["lr"], rel=2e-2)
