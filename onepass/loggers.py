"""Where the records of a tuner go besides its history: TensorBoard, MLflow, Weights & Biases, or a plain function.

Loggers are known by the methods they have, so that none of them need be installed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from onepass.history import TunerStep, Values

Scalars = dict[str, float]
Write = Callable[[Scalars, int], None]


class Kind(NamedTuple):
    """A kind of logger: the attributes by which it is known, and how to write to one."""

    known_by: tuple[str, ...]
    writer: Callable[[Any], Write]


def writer_of(logger: Any) -> Write:
    """What writes a dict of numbers at a step to this logger."""
    if not isinstance(logger, type):
        for kind in KINDS.values():
            if all(hasattr(logger, name) for name in kind.known_by):
                return kind.writer(logger)
        if callable(logger):
            return lambda scalars, step: _one_by_one(logger, scalars, step)
    got = f"the class {logger.__name__}; make one of it" if isinstance(logger, type) else type(logger).__name__
    raise ValueError(f"logger must be {', '.join(KINDS)} or a function of (name, value, step), but got {got}")


def scalars_of(record: TunerStep) -> Scalars:
    """One record as numbers by name: ``onepass/lr``, or ``onepass/lr/0`` and so on where there are several groups.

    >>> scalars_of(TunerStep(10, {"lr": [0.1, 0.2]}, {"lr": [1.0, math.nan]}, 0.5))
    ... # doctest: +NORMALIZE_WHITESPACE
    {'onepass/valid_loss': 0.5, 'onepass/guard': 0.0, 'onepass/skipped': 0.0, 'onepass/lr/0': 0.1, 'onepass/lr/1': 0.2,
     'onepass/hypergradient/lr/0': 1.0}
    """
    notes = {"valid_loss": record.valid_loss, "guard": record.guard is not None, "skipped": record.skipped is not None}
    slopes = {f"hypergradient/{name}": slope for name, slope in _flat(record.hypergradients).items()}
    return _named({**notes, **_flat(record.values), **slopes})


def scalars_of_values(values: Values) -> Scalars:
    """The values of a record alone, or those that a run begins with."""
    return _named(_flat(values))


def _named(found: Mapping[str, float]) -> Scalars:
    return {f"onepass/{name}": float(value) for name, value in found.items() if not math.isnan(value)}


def _flat(values: Values) -> Scalars:
    return dict(pair for name, entries in values.items() for pair in _flat_entries(name, entries))


def _flat_entries(name: str, entries: list[Any]) -> Iterator[tuple[str, float]]:
    for group, entry in enumerate(entries):
        place = f"{name}/{group}" if len(entries) > 1 else name
        if isinstance(entry, dict):  # the summary of one value per weight
            yield from ((f"{place}/{part}", value) for part, value in entry.items())
        elif entry is not None:
            yield place, float(entry)


def _one_by_one(write: Callable[[str, float, int], Any], scalars: Scalars, step: int) -> None:
    for name, value in scalars.items():
        write(name, value, step)


def _tensorboard(writer: Any) -> Write:
    return lambda scalars, step: _one_by_one(writer.add_scalar, scalars, step)


def _log_metrics(logger: Any) -> Write:
    return lambda scalars, step: logger.log_metrics(scalars, step=step)


def _mlflow_run(run: Any) -> Write:
    mlflow = sys.modules["mlflow"]  # whoever has a run has imported it
    return lambda scalars, step: mlflow.log_metrics(scalars, step=step, run_id=run.info.run_id)


def _wandb(run: Any) -> Write:
    """On an axis of its own: the run's own step belongs to the user, and must never go back."""
    run.define_metric("onepass/step", hidden=True)
    run.define_metric("onepass/*", step_metric="onepass/step")
    return lambda scalars, step: run.log({**scalars, "onepass/step": step})


def _accelerate(accelerator: Any) -> Write:
    return lambda scalars, step: accelerator.log(scalars, step=step)


KINDS = {
    "a TensorBoard SummaryWriter": Kind(("add_scalar",), _tensorboard),
    "a Weights & Biases run": Kind(("log", "define_metric"), _wandb),
    "the module mlflow or a Lightning logger (anything with log_metrics)": Kind(("log_metrics",), _log_metrics),
    "an MLflow run": Kind(("info", "data"), _mlflow_run),
    "an Accelerator": Kind(("log", "trackers"), _accelerate),
}
