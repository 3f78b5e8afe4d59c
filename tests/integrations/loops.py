"""One training run as a plain loop, for the loops of other people to be compared with."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import onepass
from onepass.history import History
from tests.problems import Batch, cross_entropy, digits, mlp
from tests.ranks import torchrun

RANKS = int(os.environ.get("WORLD_SIZE", "1"))  # torchrun says so
BATCH = 40 // RANKS
Scheduler = Callable[[torch.optim.Optimizer], Any]


class Case(NamedTuple):
    """A way to train: what a framework does by itself, and the settings of the tuner."""

    settings: dict[str, Any] = {}  # noqa: RUF012 (a default that nobody changes)
    schedule: Scheduler | None = None
    clip: float | None = None
    accumulate: int = 1
    precision: torch.dtype = torch.float32
    weight_decay: float = 1e-4


CASES = {
    "the whole run": Case(),
    "the paper's series": Case({"lookback": 5, "through_state": False}),
    "with a scheduler": Case(schedule=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 - step / 60)),
    "clipped": Case(clip=0.5),
    "accumulated": Case(accumulate=3),
    "bf16": Case(precision=torch.bfloat16),
}


def network() -> nn.Sequential:
    return mlp(64, 32, 10, dtype=torch.float32)


def optimizer_of(model: nn.Module, case: Case) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=case.weight_decay)


def settings(case: Case) -> dict[str, Any]:
    return {"interval": 3, **case.settings}


def loader(data: Batch, rows: int = 1200, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*(part[:rows] for part in data)), batch_size=BATCH, **options)


def plain(case: Case, *, valid_rows: int = 300) -> tuple[nn.Module, onepass.Tuner]:
    """The same run with no framework."""
    train, valid, _ = digits()
    model = network()
    optimizer = optimizer_of(model, case)
    scheduler = case.schedule(optimizer) if case.schedule else None

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=case.precision is torch.bfloat16):
            return cross_entropy(model, batch)

    tuner = onepass.Tuner(model, optimizer, loss, loader(valid, valid_rows), **settings(case))
    for index, batch in enumerate(loader(train)):
        (loss(model, batch) / case.accumulate).backward()
        if (index + 1) % case.accumulate:
            continue
        if case.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        tuner.step(batch)
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
    return model, tuner


SPREAD = ("the paper's series", "with a scheduler", "accumulated")  # on two ranks


def on_two_ranks(module: str, folder: Path) -> dict[str, History]:
    """By case, what ``train_on_a_rank`` of a test module finds when torchrun starts it: the same on both ranks."""
    done = torchrun(Path(__file__), module, str(folder))
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
    assert repr(first) == repr(second)
    return {name: History.from_dict(found) for name, found in first.items()}


def assert_same_run(mine: onepass.Tuner | None, theirs: onepass.Tuner, tolerance: float = 1e-5) -> None:
    assert mine is not None
    assert_same_history(mine.history, theirs, tolerance)


def assert_same_history(mine: History, theirs: onepass.Tuner, tolerance: float = 1e-5) -> None:
    """Record by record; they must also have tuned at all."""
    assert [record.step for record in mine] == [record.step for record in theirs.history]
    for a, b in zip(mine, theirs.history, strict=True):
        assert_close([a.valid_loss], [b.valid_loss], tolerance)
        for name, values in b.values.items():
            assert_close(a.values[name], values, tolerance)
    assert theirs.values()["lr"][0] > 1.5 * theirs.history.start["lr"][0]


def assert_close(mine: Sequence[float], theirs: Sequence[float], tolerance: float) -> None:
    for a, b in zip(mine, theirs, strict=True):
        assert abs(a - b) <= tolerance * abs(b), (a, b)


def assert_bit_for_bit(mine: onepass.Tuner | None, theirs: onepass.Tuner | None, a: nn.Module, b: nn.Module) -> None:
    assert mine is not None
    assert theirs is not None
    assert repr(mine.history.to_dict()) == repr(theirs.history.to_dict())
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q)


if __name__ == "__main__":  # on one of the ranks
    tuners = importlib.import_module(sys.argv[1]).train_on_a_rank(Path(sys.argv[2]))
    found = json.dumps({name: tuner.history.to_dict() for name, tuner in tuners.items()})
    (Path(sys.argv[2]) / f"{os.environ['RANK']}.json").write_text(found)
    os._exit(0)  # at once: now and then gloo aborts the process while that is taken apart
