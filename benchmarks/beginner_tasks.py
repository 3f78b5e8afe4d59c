"""Five small tasks as a newcomer might try first; benchmarks/newcomer.py runs them. No other page or test uses them."""

from __future__ import annotations

import argparse as a_text
import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from sklearn import datasets
from torch import Tensor, nn

from onepass.batches import Minibatches

Batch = tuple[Tensor, Tensor]
Loss = Callable[[Any, Batch], Tensor]

WINDOW, PATCH, NOISE = 32, 12, 0.2  # characters; pixels; standard deviation where pixels are between 0 and 1


class Parts(NamedTuple):
    train: Batch
    valid: Batch
    test: Batch


@dataclass(frozen=True)
class Task:
    """What is trained, on what, and what is reported of the test set: always the lower the better.

    Attributes:
        size: of a batch, for training and validation alike; ``None`` for all rows in every step.
        measure: of a model and the test set, if not the loss.
        shown_times: what tables multiply the metric with.
    """

    title: str
    metric: str
    load: Callable[[int], Parts]
    model: Callable[[], nn.Module]
    loss: Loss
    size: int | None
    steps: int
    measure: Loss | None = None
    shown_times: float = 1.0

    def batches(self, part: Batch) -> Iterable[Batch]:
        return [part] if self.size is None else Minibatches(part, self.size)


def cross_entropy(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def squared_error(model: Any, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def error(model: Any, batch: Batch) -> Tensor:
    """The share that is classified wrongly."""
    wrong: Tensor = model(batch[0]).argmax(1) != batch[1]
    return wrong.double().mean()


def next_character(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def divided(inputs: Tensor, targets: Tensor, sizes: tuple[int, int], seed: int) -> Parts:
    """Shuffled: so many rows for training and for validation, the rest for the test."""
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
    rows = order.split([*sizes, len(inputs) - sum(sizes)])
    return Parts(*((inputs[part], targets[part]) for part in rows))


def breast_cancer(seed: int) -> Parts:
    inputs, labels = datasets.load_breast_cancer(return_X_y=True)
    return divided(_normalised(inputs), torch.tensor(labels), (300, 100), seed)


def two_moons(seed: int) -> Parts:
    inputs, labels = datasets.make_moons(2600, noise=0.25, random_state=seed)
    return divided(torch.tensor(inputs).float(), torch.tensor(labels), (400, 200), seed)


def friedman(seed: int) -> Parts:
    """Its noise has a variance of 1; the targets are not normalised, as a newcomer would leave them."""
    inputs, targets = datasets.make_friedman1(1800, n_features=10, noise=1.0, random_state=seed)
    return divided(_normalised(inputs), torch.tensor(targets).float().unsqueeze(1), (600, 200), seed)


def _normalised(inputs: Any) -> Tensor:
    return torch.tensor((inputs - inputs.mean(0)) / inputs.std(0)).float()


@functools.cache
def source_text() -> tuple[Tensor, int]:
    """A module of Python's own library in windows of characters, each beside the characters that follow; how many."""
    text = Path(a_text.__file__).read_text()
    letters = {letter: i for i, letter in enumerate(sorted(set(text)))}
    numbers = torch.tensor([letters[letter] for letter in text])
    count = (len(numbers) - 1) // WINDOW
    sides = [numbers[i : i + count * WINDOW].view(count, WINDOW) for i in (0, 1)]
    return torch.stack(sides), len(letters)


def windows(seed: int) -> Parts:
    (inputs, targets), _ = source_text()
    some = len(inputs) // 10
    return divided(inputs, targets, (8 * some, some), seed)


@functools.cache
def patches() -> Tensor:
    """Of two photographs, squares that do not overlap: ``(patches, colours, PATCH, PATCH)``."""
    images = torch.tensor(np.stack(datasets.load_sample_images().images)).permute(0, 3, 1, 2).float() / 255
    squares = images.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH)
    return squares.permute(0, 2, 3, 1, 4, 5).flatten(0, 2).contiguous()


def noisy_patches(seed: int) -> Parts:
    clean = patches()
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(seed))
    return divided(clean + NOISE * noise, clean, (2400, 400), seed)


class Letters(nn.Module):
    """An LSTM that scores every next character."""

    def __init__(self) -> None:
        super().__init__()
        letters = source_text()[1]
        self.embedding, self.lstm = nn.Embedding(letters, 32), nn.LSTM(32, 64, batch_first=True)
        self.scores = nn.Linear(64, letters)

    def forward(self, letters: Tensor) -> Tensor:
        found: Tensor = self.scores(self.lstm(self.embedding(letters))[0])
        return found


class Denoiser(nn.Module):
    """Three convolutions, with batch norm between, that say what to take away."""

    def __init__(self) -> None:
        super().__init__()
        inside = [nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
        self.layers = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), *inside, nn.Conv2d(16, 3, 3, padding=1))

    def forward(self, images: Tensor) -> Tensor:
        cleaned: Tensor = images - self.layers(images)
        return cleaned


def layers(*widths: int) -> nn.Module:
    """Linear ones with ReLUs between."""
    linear = [nn.Linear(*pair) for pair in itertools.pairwise(widths)]
    return nn.Sequential(linear[0], *(part for layer in linear[1:] for part in (nn.ReLU(), layer)))


TASKS: dict[str, Task] = {
    "breast-cancer": Task(
        "breast cancer, MLP", "test error, %", breast_cancer, lambda: layers(30, 32, 2), cross_entropy, 32, 1500,
        error, 100.0,
    ),
    "two-moons": Task(
        "two moons, deeper MLP", "test error, %", two_moons, lambda: layers(2, 32, 32, 2), cross_entropy, 32, 1500,
        error, 100.0,
    ),
    "friedman": Task(
        "Friedman #1, MLP, all rows in a step", "test MSE", friedman, lambda: layers(10, 64, 1), squared_error, None,
        2000,
    ),
    "text": Task(
        "Python's argparse, LSTM over characters", "test cross-entropy", windows, Letters, next_character, 16, 1200
    ),
    "patches": Task(
        "noisy photographs, convolutions with batch norm", "test MSE x 1000", noisy_patches, Denoiser, squared_error,
        16, 1200, None, 1000.0,
    ),
}  # fmt: skip
