"""How the paper trains: which network on which data, from where, for how long."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from onepass.batches import Minibatches
from onepass.evaluation import LossFunction
from onepass.experiments.datasets import DATASETS, Data, Dataset
from onepass.experiments.models import LanguageModel, mlp
from onepass.experiments.sources import DataError
from onepass.experiments.text import next_word, perplexity, windows
from onepass.starts import LogUniform, Uniform

STARTS: dict[str, LogUniform | Uniform] = {
    "lr": LogUniform(1e-6, 1e-1),
    "weight_decay": LogUniform(1e-7, 1e-2),
    "momentum": Uniform(0.0, 1.0),
}


def squared_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The share that is classified wrongly."""
    wrong: Tensor = model(batch[0]).argmax(-1) != batch[1]
    return wrong.double().mean()


Part = tuple[Tensor, ...]  # of a data set: training, validation or test


def in_full(part: Part) -> Any:
    """All rows in every step."""
    return [part]


def shuffled(size: int) -> Callable[[Part], Any]:
    """Mini-batches, every start in an order of its own."""

    def batches(part: Part) -> Minibatches:
        if size > len(part[0]):
            raise DataError(f"mini-batches of {size} rows cannot be drawn from {len(part[0])}")
        return Minibatches(part, size=size, per_replica=True)

    return batches


@dataclass(frozen=True)
class Protocol:
    """What is trained on a data set.

    Attributes:
        metric: what is reported, of the test set after the last step.
        steps, replicas: unless somebody wants others.
        batches: the batches that a part of the data is trained on, or tuned by.
        measure: the metric, of a whole part of the data, if it is not the loss.
        options: arguments of ``Population`` that all methods share here.
        shown_times: tables show the metric times this number, as the paper does for Kin8nm.
        start: where hyperparameters are drawn from.
        data: the data set, if its name is not the protocol's own.
        title: likewise.
        others: further metrics of the test set, by name.
        lost_above: a larger final loss counts as diverged.
        short_steps: of the shorter problem on which hypergradients can look through all steps.
        trainings: of methods that begin again and again.
        points: how often the metric is looked at on the way.
        saves: how often everything is saved on the way, if it is saved.
        tf32: on a GPU, matrix products of training in TF32, as cuDNN computes an LSTM unless told otherwise.
        published: metric -> the table of the paper that has its numbers.
    """

    make_model: Callable[[Data], nn.Module]
    loss: LossFunction
    metric: str
    steps: int
    replicas: int
    batches: Callable[[Part], Any] = in_full
    measure: LossFunction | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    shown_times: int = 1
    start: Mapping[str, Any] = field(default_factory=lambda: STARTS)
    data: str | None = None
    title: str | None = None
    others: Mapping[str, LossFunction] = field(default_factory=dict)
    lost_above: float = math.inf
    short_steps: int = 200
    trainings: int = 30
    points: int = 100
    saves: int = 10
    tf32: bool = False
    published: Mapping[str, str] = field(default_factory=dict)


def regression(**options: Any) -> Protocol:
    def model(data: Data) -> nn.Module:
        return mlp(data.train[0].shape[1], 50, 1)

    settings = {"steps": 4000, "replicas": 200, "published": {"test MSE": "AverageResults_UCI"}, **options}
    return Protocol(model, squared_error, "test MSE", **settings)


def classification(*, batch_norm: bool = False, **options: Any) -> Protocol:
    def model(data: Data) -> nn.Module:
        return mlp(data.train[0].shape[1], 50, int(data.train[1].max()) + 1, batch_norm=batch_norm)

    return Protocol(model, cross_entropy, "test cross-entropy", **{"others": {"test error": error}, **options})


def fashion_mnist(**options: Any) -> Protocol:
    size = {"steps": 10_000, "replicas": 100, "short_steps": 1000, "trainings": 50}
    settings = {**size, "batches": shuffled(50), "lost_above": 1e3, **options}
    return classification(data="fashion-mnist", **settings)


def language(*, width: int = 650, sequences: int = 40, length: int = 70, **options: Any) -> Protocol:
    """An LSTM of two layers that predicts the next word. Of 8 starts, where the paper has 50."""

    def model(data: Data) -> nn.Module:
        return LanguageModel(int(data.train[0].max()) + 1, width, sequences=sequences)

    def measure(model: Any, part: Part) -> Tensor:
        return perplexity(model, part[0], sequences, length)

    settings: dict[str, Any] = {
        "steps": 23_910,
        "replicas": 8,
        "batches": lambda part: windows(part[0], sequences, length),
        "measure": measure,
        "points": 20,  # each takes half a second for 8 starts on an H200
        "saves": 3,  # and each of these writes gigabytes
        "tf32": True,
        "options": {"clip_norm": 0.25, "curvature": "finite-difference"},
        "published": {"test perplexity": "AverageResults_LargeScale"},
        **options,
    }
    return Protocol(model, next_word, "test perplexity", **settings)


PROTOCOLS: dict[str, Protocol] = {
    "uci-boston": regression(),
    "uci-concrete": regression(),
    "uci-energy": regression(),
    "kin8nm": regression(shown_times=1000),
    "uci-naval": regression(shown_times=1_000_000),
    "uci-power": regression(),
    "uci-wine": regression(),
    "uci-yacht": regression(),
    "fashion-mnist": fashion_mnist(
        published={"test cross-entropy": "AverageResults_LargeScale", "test error": "AverageErrors_LargeScale"}
    ),
    "fashion-mnist-batchnorm": fashion_mnist(
        batch_norm=True,
        title="Fashion-MNIST with batch norm",
        published={"test cross-entropy": "AverageResults_Fashion-MNIST"},
    ),
    "penn-treebank": language(),
    "digits": classification(steps=1500, replicas=32, batches=shuffled(50), trainings=5),
    "diabetes": regression(steps=1000, replicas=32, trainings=5),
}


def title_of(name: str) -> str:
    return PROTOCOLS[name].title or data_of(name).title


def data_of(name: str) -> Dataset:
    return DATASETS[PROTOCOLS[name].data or name]
