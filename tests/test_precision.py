"""Finite differences of losses that round: it is seen, and steps are wide enough to be more than rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn, vmap
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import onepass
from onepass.curvature import exact, finite_difference, norm
from onepass.precision import Coarsest
from tests.problems import Batch, mlp, regression, train_step

# What torch says when oneDNN's switches are put back.
pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WORDS, POSITIONS = 20, 8


@pytest.fixture(autouse=True)
def without_onednn() -> Iterator[None]:
    """It has LSTMs of low precision on some CPUs only."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


def in_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", BF16):
        return (x @ x).float()


def narrow_layer(x: Tensor) -> Tensor:
    result: Tensor = nn.LSTM(4, 4).bfloat16()(x.bfloat16())[0].float()
    return result


WAYS: dict[str, tuple[Callable[[Tensor], Tensor], torch.dtype]] = {
    "not at all": (lambda x: x @ x, FP32),
    "a cast": (lambda x: x.half().float(), FP16),
    "autocast": (in_autocast, BF16),
    "autocast, decorated": (torch.autocast("cpu", FP16)(lambda x: (x @ x).float()), FP16),
    "autocast, for many at once": (lambda x: vmap(lambda row: in_autocast(row.outer(row)))(x), BF16),
    "a layer of low precision": (narrow_layer, BF16),
    "checkpointed": (lambda x: checkpoint(in_autocast, x, use_reentrant=False), BF16),
    "switched off inside": (torch.autocast("cpu", BF16)(torch.autocast("cpu", enabled=False)(lambda x: x @ x)), FP32),
}


@pytest.mark.parametrize("way", WAYS)
def test_rounding_is_seen(way: str) -> None:
    function, dtype = WAYS[way]
    x = torch.ones(4, 4)
    with Coarsest([x]) as seen:
        assert function(x).dtype == FP32
    assert seen.epsilon == torch.finfo(dtype).eps


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, 16), nn.Parameter(0.1 * torch.randn(POSITIONS, 16))
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True)
        self.out = nn.Linear(16, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        result: Tensor = self.out(self.layer(self.words(words) + self.positions))
        return result


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm, self.out = nn.Embedding(WORDS, 16), nn.LSTM(16, 16), nn.Linear(16, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        result: Tensor = self.out(self.lstm(self.words(words))[0])
        return result


def text(seed: int) -> Batch:
    start = torch.randint(WORDS, (16, 1), generator=torch.Generator().manual_seed(seed))
    words = (start * 3 ** torch.arange(POSITIONS + 1)) % WORDS
    return words[:, :-1], words[:, 1:]


SMOOTH: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "mlp": (lambda: mlp(3, 32, 32, 1, dtype=FP32), lambda seed: regression(64, FP32, seed)),
    "transformer": (Transformer, text),
    "lstm": (Recurrent, text),
}


def loss_in(dtype: torch.dtype | None) -> Callable[[Any, Batch], Tensor]:
    def loss(model: Any, batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            outputs = model(batch[0]).float()
        if batch[1].is_floating_point():
            return F.mse_loss(outputs, batch[1])
        return F.cross_entropy(outputs.flatten(0, 1), batch[1].flatten())

    return loss


def of_weights(model: nn.Module, batch: Batch, dtype: torch.dtype | None) -> Callable[[Sequence[Tensor]], Tensor]:
    names = [name for name, _ in model.named_parameters()]

    def loss(given: Sequence[Tensor]) -> Tensor:
        weights = dict(zip(names, given, strict=True))
        return loss_in(dtype)(lambda inputs: functional_call(model, weights, (inputs,)), batch)

    return loss


@pytest.mark.parametrize("kind", SMOOTH)
@pytest.mark.parametrize(("dtype", "close"), [(FP16, 0.05), (BF16, 0.2)], ids=["fp16", "bf16"])
def test_products_along_the_gradient(kind: str, dtype: torch.dtype, close: float) -> None:
    """In a step as wide as float32 asks for, they would be mostly rounding."""
    torch.manual_seed(0)
    make, data = SMOOTH[kind]
    model, batch = make(), data(1)
    weights = [p.detach().requires_grad_() for p in model.parameters()]
    with sdpa_kernel(SDPBackend.MATH):
        reference = exact(of_weights(model, batch, None), weights)
        expected = reference.hessian(reference.gradient)
        found = finite_difference(of_weights(model, batch, dtype), weights).hessian(reference.gradient)
    assert norm([f - e for f, e in zip(found, expected, strict=True)]) < close * norm(expected)


def test_hypergradients_of_a_transformer() -> None:
    """Attention has a bias whose gradient is all rounding: what AdamW makes of that is where noise hurts most."""

    def slopes(dtype: torch.dtype | None, curvature: str) -> Tensor:
        torch.manual_seed(0)
        model, loss, found = Transformer(), loss_in(dtype), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        tuner = onepass.Tuner(model, optimizer, loss, [text(2)], interval=2, lookback=5, curvature=curvature)
        for i in range(6):
            train_step(model, optimizer, text(10 + i), loss)
            record = tuner.step(text(10 + i))
            found += [slope for each in record.hypergradients.values() for slope in each] if record else []
        return torch.tensor(found)

    found, expected = slopes(BF16, "finite-difference"), slopes(None, "exact")
    assert (found - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize(("dtype", "gradients"), [(None, 2), (FP16, 3), (BF16, 3)], ids=str)
def test_both_ways_only_where_it_is_needed(dtype: torch.dtype | None, gradients: int) -> None:
    calls = []
    loss = of_weights(mlp(3, 4, 1, dtype=FP32), regression(8, FP32), dtype)

    def counted(given: Sequence[Tensor]) -> Tensor:
        calls.append(given)
        return loss(given)

    weights = [p.detach().requires_grad_() for p in mlp(3, 4, 1, dtype=FP32).parameters()]
    finite_difference(counted, weights).hessian([torch.ones_like(w) for w in weights])
    assert len(calls) == gradients


def test_dead_units_stay_dead() -> None:
    """Where Adam has seen no gradient, it divides by its eps: what wakes up in a wide step would outweigh all else."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    weights = [p.detach() for p in model.parameters()]
    weights[0][:4], weights[1][:4] = 0, -0.01
    weights = [w.requires_grad_() for w in weights]
    products = finite_difference(of_weights(model, regression(64, FP32), BF16), weights)
    found = products.hessian([torch.ones_like(w) for w in weights])
    dead, alive = found[0][:4], found[0][4:]
    assert not dead.any() and alive.any(1).all()


def test_many_replicas() -> None:
    values = []
    for dtype, curvature in ((None, "exact"), (BF16, "finite-difference")):
        population = onepass.Population(
            lambda: mlp(3, 32, 32, 1, dtype=FP32),
            loss_in(dtype),
            replicas=2,
            start={"lr": [0.01, 0.05], "momentum": 0.9},
            tune=("lr", "momentum"),
            lookback=5,
            interval=2,
            curvature=curvature,
            guard=None,
            seed=0,
        )
        population.run([regression(64, FP32, 1)], [regression(64, FP32, 2)], steps=12, progress=False)
        values.append(torch.stack([torch.as_tensor(each) for each in population.values().values()]))
    torch.testing.assert_close(values[1], values[0], rtol=0.05, atol=0)
