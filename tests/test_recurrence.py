"""LSTMs written out time step by time step: torch's own, with derivatives of any order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onepass
from onepass.curvature import CURVATURES, exact
from onepass.recurrence import lstms_written_out, recurrence, written_out

pytestmark = pytest.mark.usefixtures("float64")

KINDS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "two layers, batch first": {"num_layers": 2, "batch_first": True},
    "both ways": {"num_layers": 2, "bidirectional": True},
    "no bias": {"bias": False},
    "dropout": {"num_layers": 3, "dropout": 0.4},
}
every_kind = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)


def found_of(module: nn.LSTM, outputs: Any) -> Tensor:
    """Something that depends on all outputs, and on none of them linearly."""
    x, (hidden, cell) = outputs
    found: Tensor = x.square().mean() + hidden.sin().sum() + cell.square().sum()
    return found


@every_kind
@pytest.mark.parametrize("given", [False, True], ids=["from nothing", "from a state"])
def test_equal_to_torch(options: dict[str, Any], given: bool) -> None:
    """Outputs, gradients and products with the Hessian, by the weights."""
    torch.manual_seed(0)
    module, x = nn.LSTM(3, 4, **options), torch.randn(5, 6, 3)
    rows = 5 if options.get("batch_first") else 6
    layers = len(module.all_weights)
    state = (torch.randn(layers, rows, 4), torch.randn(layers, rows, 4)) if given else None
    weights = list(module.parameters())

    def loss_by(forward: Any) -> Any:
        def loss(_: Any) -> Tensor:
            torch.manual_seed(1)
            return found_of(module, forward(x, state))

        return loss

    direction = [torch.randn_like(w) for w in weights]
    theirs = exact(loss_by(module), weights)
    ours = exact(loss_by(lambda *inputs: written_out(module, *inputs)), weights)
    for mine, expected in zip(
        [*ours.gradient, *ours.hessian(direction)], [*theirs.gradient, *theirs.hessian(direction)], strict=True
    ):
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-11)


def test_differentiable_again() -> None:
    inputs = [torch.randn(2, 3, 2, 12), torch.randn(2, 12, 3), torch.randn(2, 2, 3), torch.randn(2, 2, 3)]
    for tensor in inputs:
        tensor.requires_grad_()
    assert torch.autograd.gradcheck(recurrence, inputs)
    assert torch.autograd.gradgradcheck(recurrence, inputs)


def test_what_is_left_to_torch() -> None:
    torch.manual_seed(0)
    module, x = nn.LSTM(3, 4), torch.randn(5, 6, 3)
    packed = nn.utils.rnn.pack_padded_sequence(x, [5, 5, 4, 4, 2, 1])
    assert torch.equal(written_out(module, packed)[0].data, module(packed)[0].data)
    assert torch.equal(written_out(module, x[:, 0])[0], module(x[:, 0])[0])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(written_out(module.float(), x.float())[0], module(x.float())[0])


def test_models_get_their_own_back() -> None:
    model = nn.Sequential(nn.LSTM(3, 4), nn.Identity())
    with pytest.raises(RuntimeError, match="shapes"), lstms_written_out(model):
        model[0](torch.randn(5, 6, 9))
    assert "forward" not in vars(model[0]) and model[0](torch.randn(5, 6, 3))[0].shape == (5, 6, 4)


@pytest.mark.parametrize("curvature", sorted({*CURVATURES} - {"gauss-newton"}))
def test_in_a_tuner(curvature: str) -> None:
    """The same hypergradients whichever way the products are made; the Gauss-Newton matrix is another."""

    def second(curvature: str) -> dict[str, list[float]]:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 1)])
        batch = torch.randn(8, 5, 3), torch.randn(8, 5, 1)

        def loss(model: Any, batch: Any) -> Tensor:
            found: Tensor = (model[1](model[0](batch[0])[0]) - batch[1]).square().mean()
            return found

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        still: Any = {"interval": 1, "hyper_optimizer": lambda raw: torch.optim.SGD(raw, lr=0.0), "tune": ("lr",)}
        tuner = onepass.Tuner(model, optimizer, loss, [batch], curvature=curvature, **still)
        for _ in range(4):
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
            tuner.step(batch)
        return dict(tuner.history[-1].hypergradients)

    assert second(curvature)["lr"] == pytest.approx(second("exact")["lr"], rel=1e-5)
