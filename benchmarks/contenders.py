"""Who runs in benchmarks/rivals.py: one-pass, and what a user would pick instead, as rows of one table."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import onepass
from onepass.experiments.methods import METHODS

SAMPLES = 30  # trainings of a random search

Batch = tuple[Tensor, ...]
Parameters = Iterable[nn.Parameter]
Values = Mapping[str, float]


# --- how a rival trains ---


class Training(NamedTuple):
    """A training that has begun: a step of it, what to do before the model is looked at, its values now."""

    step: Callable[[Batch], object]
    finish: Callable[[], object] = lambda: None
    values: Callable[[], dict[str, float]] = dict


class Problem(NamedTuple):
    """What a training begins with. ``valid``: batches without end."""

    model: nn.Module
    loss: Callable[[Any, Batch], Tensor]
    start: Values
    valid: Iterator[Batch]


Make = Callable[[Parameters], torch.optim.Optimizer]
Begin = Callable[[Problem], Training]


def fixed(make: Make) -> Begin:
    """A torch optimizer that needs nothing."""

    def begin(problem: Problem) -> Training:
        optimizer: Any = make(problem.model.parameters())
        training = Training(stepping(problem, optimizer))
        if hasattr(optimizer, "eval"):  # a schedule-free one, which averages when it is told to
            optimizer.train()
            training = training._replace(finish=optimizer.eval)
        return training

    return begin


def stepping(problem: Problem, optimizer: torch.optim.Optimizer) -> Callable[[Batch], None]:
    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        problem.loss(problem.model, batch).backward()
        optimizer.step()

    return step


def tuned(make: Callable[[Parameters, Values], torch.optim.Optimizer], **options: Any) -> Begin:
    """From a start, with an ``onepass.Tuner``."""

    def begin(problem: Problem) -> Training:
        optimizer = make(problem.model.parameters(), problem.start)
        tuner = onepass.Tuner(problem.model, optimizer, problem.loss, problem.valid, **options)
        plain = stepping(problem, optimizer)

        def step(batch: Batch) -> None:
            plain(batch)
            tuner.step(batch)

        return Training(step, values=lambda: {name: value[0] for name, value in tuner.values().items()})

    return begin


def sgd(parameters: Parameters, start: Values) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=start["lr"], momentum=start["momentum"], weight_decay=start["weight_decay"])


def adamw(parameters: Parameters, start: Values) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=start["lr"], weight_decay=start["weight_decay"])


def stacked(kind: str) -> Begin:
    """From the lr of the start, and for SGD its momentum, moved by SGD at 1e-5 as the package recommends."""

    def begin(problem: Problem) -> Training:
        from gradient_descent_the_ultimate_optimizer import gdtuo

        lr, by = problem.start["lr"], gdtuo.SGD(1e-5)
        adam = kind == "adam"
        optimizer = gdtuo.Adam(lr, optimizer=by) if adam else gdtuo.SGD(lr, problem.start["momentum"], optimizer=by)
        wrapper = gdtuo.ModuleWrapper(problem.model, optimizer=optimizer)
        wrapper.initialize()

        def step(batch: Batch) -> None:
            wrapper.begin()
            loss = problem.loss(problem.model, batch)
            wrapper.zero_grad()
            loss.backward(create_graph=True)
            wrapper.step()

        return Training(step, values=lambda: {"lr": float(optimizer.parameters["alpha"].detach())})

    return begin


# --- the rivals ---


@dataclass(frozen=True)
class Rival:
    """A row of the tables.

    Attributes:
        begin: how it trains; ``None`` for a search.
        kin: the optimizer of the plain training that its time is relative to.
        package: what has to be installed.
        validates: it needs validation data, and so is never trained on them.
    """

    title: str
    begin: Begin | None
    kin: str
    package: str | None = None
    validates: bool = False


def packaged(title: str, package: str, name: str, kin: str) -> Rival:
    """An optimizer at its defaults, of a package that need not be there."""

    def make(parameters: Parameters) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = getattr(importlib.import_module(package), name)(parameters)
        return optimizer

    return Rival(title, fixed(make), kin, package)


PLAIN: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, weight_decay=1e-4),
    "adamw": lambda p: torch.optim.AdamW(p),
}
THE_PAPER_S = METHODS["one-pass-wd-lr-m"].options
GDTUO = "gradient_descent_the_ultimate_optimizer"

RIVALS: dict[str, Rival] = {
    "one-pass": Rival("one-pass, SGD", tuned(sgd), "sgd", validates=True),
    "one-pass-adamw": Rival("one-pass, AdamW", tuned(adamw), "adamw", validates=True),
    "one-pass-lookback-1": Rival("one-pass (i=1), SGD", tuned(sgd, lookback=1), "sgd", validates=True),
    "one-pass-lookback-1-adamw": Rival("one-pass (i=1), AdamW", tuned(adamw, lookback=1), "adamw", validates=True),
    "paper": Rival("paper's WD+LR+M", tuned(sgd, **THE_PAPER_S), "sgd", validates=True),
    "prodigy": packaged("Prodigy", "prodigyopt", "Prodigy", "adamw"),
    "d-adaptation": packaged("D-Adaptation, Adam", "dadaptation", "DAdaptAdam", "adamw"),
    "schedule-free-sgd": packaged("Schedule-Free SGD", "schedulefree", "SGDScheduleFree", "sgd"),
    "schedule-free-adamw": packaged("Schedule-Free AdamW", "schedulefree", "AdamWScheduleFree", "adamw"),
    "adam": Rival("Adam, 1e-3", fixed(lambda p: torch.optim.Adam(p)), "adamw"),
    "adamw": Rival("AdamW, 1e-3", fixed(lambda p: torch.optim.AdamW(p)), "adamw"),
    "sgd": Rival("SGD, 0.1 / 0.9", fixed(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)), "sgd"),
    "gdtuo-sgd": Rival("gdtuo, SGD", stacked("sgd"), "sgd", GDTUO),
    "gdtuo-adam": Rival("gdtuo, Adam", stacked("adam"), "adamw", GDTUO),
    "random-search": Rival(f"random search, best of {SAMPLES}", None, "sgd", validates=True),
}
