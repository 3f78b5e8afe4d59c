"""One training of many starts of one data set by one method."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.batches import Minibatches
from onepass.experiments.datasets import Data
from onepass.experiments.methods import Method
from onepass.experiments.protocol import Protocol
from onepass.population import Population


class Outcome(NamedTuple):
    """What came of all starts. Losses are the protocol's metric, in the target's own units.

    Attributes:
        test, valid: after the last step, one a start.
        others: likewise, further metrics of the test set.
        start, end: name -> one value a start; the median where every weight has its own.
        curve_steps: weight steps at which the following were looked at.
        curve_seconds: what training took since the look before; NaN where it was interrupted in between.
        curve_test: ``(points, starts)``.
        curve_values: name -> ``(points, starts)``.
        returns: how often the guard went back.
        hypergradients: name -> one value a start, in raw space, at the last hyper step on record.
        seconds: from making the models to the last loss; of the last part, if the run was resumed.
    """

    test: Tensor
    valid: Tensor
    others: dict[str, Tensor]
    start: dict[str, Tensor]
    end: dict[str, Tensor]
    curve_steps: list[int]
    curve_seconds: list[float]
    curve_test: Tensor
    curve_values: dict[str, Tensor]
    returns: Tensor
    hypergradients: dict[str, Tensor] = {}  # noqa: RUF012 (never changed)
    seconds: float = 0.0


def train(
    protocol: Protocol,
    method: Method,
    data: Data,
    *,
    replicas: int,
    steps: int,
    seed: int = 0,
    device: str = "cpu",
    backend: str = "auto",
    progress: bool = False,
    checkpoint: Path | None = None,
) -> Outcome:
    """Train all starts of one data set by one method."""
    began = time.perf_counter()
    where: dict[str, Any] = {"replicas": replicas, "seed": seed, "device": device, "backend": backend}
    tuned, method = None, _within(method, steps)
    if method.again:
        tuned = _population(protocol, method, data, protocol.start, restart=True, **where)
        _run(tuned, protocol, method, data, (protocol.trainings - 1) * steps, progress, checkpoint)
        method, checkpoint = replace(method, options={"tune": ()}), None
    start = protocol.start if tuned is None else {**protocol.start, **tuned.values()}
    population = _population(protocol, method, data, start, **where)
    _run(population, protocol, method, data, steps, progress, checkpoint, measured=True)
    outcome = _outcome(population, protocol, data)
    if tuned is not None:
        outcome = outcome._replace(start=tuned.history.start, hypergradients=_last_hypergradients(tuned))
    return outcome._replace(seconds=time.perf_counter() - began)


def _within(method: Method, steps: int) -> Method:
    """With a horizon of so many steps, if the method has one."""
    if method.horizon is None:
        return method
    horizon = min(method.horizon, steps)
    return replace(method, options={**method.options, "interval": horizon, "unroll": horizon})


def _population(
    protocol: Protocol, method: Method, data: Data, start: Mapping[str, Any], **settings: Any
) -> Population:
    options = {**protocol.options, **method.options, **settings}
    return Population(lambda: protocol.make_model(data), protocol.loss, start=start, **options)


def _run(
    population: Population,
    protocol: Protocol,
    method: Method,
    data: Data,
    steps: int,
    progress: bool,
    checkpoint: Path | None,
    *,
    measured: bool = False,
) -> None:
    training, tuning = _parts(method, data)
    metric = protocol.measure or protocol.loss
    with in_tf32() if protocol.tf32 else nullcontext():
        population.run(
            protocol.batches(training),
            None if tuning is None else following(protocol.batches(tuning), tuning is training),
            steps=steps,
            measure={"test": (metric, data.test)} if measured else None,
            measure_every=max(1, steps // protocol.points),
            progress=progress,
            checkpoint=checkpoint,
            every=-(-steps // protocol.saves),
        )


@contextmanager
def in_tf32() -> Iterator[None]:
    """Matrix products on a GPU with factors of 10 binary digits, at which its matrix units are fast."""
    kept = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(kept)


def _parts(method: Method, data: Data) -> tuple[Any, Any]:
    """What is trained on, and what is tuned by, if anything is."""
    everything = tuple(torch.cat(both) for both in zip(data.train, data.valid, strict=True))
    training = everything if method.trains_on == "all" else data.train
    tuned = method.options.get("tune") != ()
    return training, {"validation": data.valid, "training": training}[method.tunes_by] if tuned else None


def following(batches: Any, same: bool) -> Any:
    """To tune by the training data itself: after each step, the batch of the next one. The batch just stepped on would
    say too much good of the step.
    """
    if not same:
        return batches
    if isinstance(batches, Minibatches):
        return Minibatches(batches.data, batches.size, seed=batches.seed, per_replica=batches.per_replica, skip=1)
    return [*batches[1:], batches[0]]


def _outcome(population: Population, protocol: Protocol, data: Data) -> Outcome:
    history, scale, metric = population.history, data.target_scale**2, protocol.measure or protocol.loss
    at = torch.searchsorted(torch.tensor(history.steps), torch.tensor(history.measured_steps)).clamp(
        max=len(history) - 1
    )
    test = population.evaluate(metric, data.test).double() * scale
    lost = test > protocol.lost_above
    ends = {name: value if value.dim() == 1 else value.median(1).values for name, value in population.values().items()}
    return Outcome(
        test=test.masked_fill(lost, math.nan),
        valid=population.evaluate(metric, data.valid).double() * scale,
        others={n: population.evaluate(m, data.test).masked_fill(lost, math.nan) for n, m in protocol.others.items()},
        start=history.start,
        end=ends,
        curve_steps=history.measured_steps,
        curve_seconds=history.measured_seconds,
        curve_test=history.measured["test"] * scale,
        curve_values={name: value[at] for name, value in history.values.items()},  # those of the nearest record
        returns=history.returns,
        hypergradients=_last_hypergradients(population),
    )


def _last_hypergradients(population: Population) -> dict[str, Tensor]:
    return {name: value[-1] for name, value in population.history.hypergradients.items()}
