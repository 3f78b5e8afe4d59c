"""One hyper step leaves the model, the gradients and the random state as it found them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import onepass
from tests.problems import cross_entropy, train_step

Images = tuple[Tensor, Tensor]


class Noisy(nn.Module):
    """Batch norm, dropout, a frozen layer, one without gradient: all that an extra evaluation could disturb."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten())
        self.head = nn.Linear(4 * 16, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.masks: list[Tensor] = []
        self.body[3].register_forward_hook(lambda module, args, output: self.masks.append((output != 0).detach()))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.frozen(self.head(self.body(x)))
        return result


def images(seed: int) -> Images:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 1, 6, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)


def after_one_step(**settings: Any) -> tuple[Noisy, onepass.Tuner]:
    torch.manual_seed(0)
    model = Noisy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    tuner = onepass.Tuner(model, optimizer, cross_entropy, [images(1)], interval=1, **settings)
    train_step(model, optimizer, images(0), cross_entropy)
    return model, tuner


@pytest.mark.parametrize("curvature", ["exact", "gauss-newton", "finite-difference"])
def test_hyper_step_leaves_no_trace(curvature: str) -> None:
    model, tuner = after_one_step(curvature=curvature)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    modes = {name: module.training for name, module in model.named_modules()}
    random_state = torch.get_rng_state()
    assert tuner.step(images(0)) is not None
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    for name, p in model.named_parameters():
        kept = gradients[name]
        assert (p.grad is None) == (kept is None), name
        assert kept is None or (p.grad is not None and torch.equal(p.grad, kept)), name
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert torch.equal(torch.get_rng_state(), random_state)


def test_making_a_tuner_leaves_no_trace() -> None:
    torch.manual_seed(0)
    model = Noisy()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random_state = torch.get_rng_state()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(*images(1)), batch_size=4, shuffle=True)
    onepass.Tuner(model, optimizer, cross_entropy, loader)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_dropout_draws_the_same_mask_in_every_evaluation() -> None:
    model, tuner = after_one_step(curvature="finite-difference", lookback=4)
    model.masks.clear()
    tuner.step(images(0))
    # The first is the validation loss, where dropout is off; then the gradient here and the three at moved weights.
    validation, *replays = model.masks
    assert len(replays) == 4
    shared = replays[0]
    for mask in replays[1:]:
        # A unit that ReLU switches off at one of the weights says nothing about its mask: allow those few.
        assert (mask == shared).float().mean() > 0.99
    assert validation.float().mean() > 1.5 * shared.float().mean()


def test_validation_keeps_batch_statistics_and_drops_dropout() -> None:
    """With running statistics, the loss would seem to depend on the scale of weights that batch norm cancels."""
    model, tuner = after_one_step(lookback=1)
    record = tuner.step(images(0))
    assert record is not None
    model.body[3].eval()
    assert record.valid_loss == pytest.approx(cross_entropy(model, images(1)).item(), rel=1e-6)


def test_gradients_of_a_frozen_model_part_stay_none() -> None:
    model, tuner = after_one_step()
    tuner.step(images(0))
    assert model.frozen.weight.grad is None
    assert model.unused.weight.grad is None
