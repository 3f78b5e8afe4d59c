"""What was tuned, when, and why: the record of a run, to look at, to export and to replay."""

from __future__ import annotations

import csv
import json
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onepass.snapshot import read_value, write_value

Values = dict[str, list[Any]]


@dataclass(frozen=True)
class TunerStep:
    """One hyper step.

    Attributes:
        step: weight steps taken so far.
        values: name -> one value a param group, natural units, after this hyper step.
        hypergradients: name -> one derivative a param group, in raw space; NaN where none was taken.
        valid_loss: validation loss after the last weight step.
        guard: what the guard did, or ``None``.
        back_to: the weight step that the guard went back to, or ``None``.
        skipped: why the hyperparameters were left alone, or ``None``.
    """

    step: int
    values: Values
    hypergradients: Values
    valid_loss: float
    guard: str | None = None
    skipped: str | None = None
    back_to: int | None = None


@dataclass(repr=False)
class History:
    """The records of all hyper steps, oldest first, preceded by the values that the run began with.

    ``extra`` names the values that live in the loss; ``scheduled`` says whether an LR scheduler took part.

    A value with one entry per weight is kept as its ``{"min", "median", "max"}``: a history must not outgrow the model.
    """

    start: Values
    records: list[TunerStep] = field(default_factory=list)
    extra: tuple[str, ...] = ()
    scheduled: bool = False

    def __post_init__(self) -> None:
        self.start = _thin(self.start)

    def append(self, record: TunerStep) -> None:
        """One more record at the end, with what has one entry per weight thinned."""
        thin = {"values": _thin(record.values), "hypergradients": _thin(record.hypergradients)}
        self.records.append(TunerStep(**{**record.__dict__, **thin}))

    def __repr__(self) -> str:
        return f"History of {len(self)} hyper steps of {', '.join(self.start)}"

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[TunerStep]:
        return iter(self.records)

    def __getitem__(self, index: int) -> TunerStep:
        return self.records[index]

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, ready for ``json.dumps``."""
        records = [asdict(record) for record in self.records]
        return {"start": self.start, "records": records, "extra": list(self.extra), "scheduled": self.scheduled}

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> History:
        """What ``to_dict`` gave, as a history again."""
        records = [TunerStep(**record) for record in found["records"]]
        return cls(found["start"], records, tuple(found["extra"]), found["scheduled"])

    def to_csv(self, path: str | Path) -> None:
        """One row a hyper step, one column a value and group: ``lr[0]``, ``hypergradient of lr[0]``."""
        with open(path, "w", newline="") as file:
            names = list(_columns(self.start))
            writer = csv.writer(file)
            gradient_names = [f"hypergradient of {name}" for name in names]
            writer.writerow(["step", "valid_loss", *names, *gradient_names, "guard", "skipped"])
            writer.writerow([0, "", *_columns(self.start).values(), *("" for _ in names), "", ""])
            for r in self.records:
                values, slopes = _columns(r.values), _columns(r.hypergradients)
                notes = [r.guard or "", r.skipped or ""]
                writer.writerow([r.step, r.valid_loss, *values.values(), *(slopes.get(n, "") for n in names), *notes])

    def schedule(self) -> Schedule:
        """The found values as a schedule that anyone can replay, with no tuner and no validation set.

        What the guard has undone is left out: steps are counted along the path that survived.
        """
        if self.scheduled:
            raise ValueError("values found beside an LR scheduler cannot be replayed: the history has only their base")
        names = [name for name in self.start if name not in self.extra]
        for name in names:
            if any(isinstance(entry, dict) for entry in self.start[name]):
                raise ValueError(f"only one value a group can be replayed, but {name!r} has one per element")
        every = [(0, self.start)]
        offset = 0  # weight steps that the guard has undone so far
        for record in self.records:
            step = record.step - offset
            if record.back_to is not None:
                step = min(step, max(record.back_to - offset, 0))
                offset = record.step - step
                every = [(s, values) for s, values in every if s < step or s == 0]
            every.append((step, record.values))
        return Schedule([step for step, _ in every], [{name: v[name] for name in names} for _, v in every])

    def plot(self, path: str | Path) -> None:
        """Draw every tuned value and the validation loss over time (needs matplotlib)."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("history.plot needs matplotlib: pip install matplotlib") from error
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        curves = self.curves()
        figure = Figure(figsize=(7, 1.8 * len(curves)), layout="constrained")
        panels = figure.subplots(len(curves), 1, sharex=True, squeeze=False)[:, 0]
        for panel, (name, lines) in zip(panels, curves.items(), strict=True):
            for label, (steps, values) in lines.items():
                panel.plot(steps, values, label=label)
            shown = [value for _, values in lines.values() for value in values]
            if shown and min(shown) > 0 and max(shown) > 5 * min(shown):
                panel.set_yscale("log")
            panel.set_ylabel(name)
            panel.grid(alpha=0.3)
            if 1 < len(lines) <= 8:
                panel.legend(fontsize="small")
            for record in self.records:
                if record.guard:
                    panel.axvline(record.step, color="tab:red", linestyle=":")
        figure.align_ylabels()
        panels[-1].set_xlabel(
            "weight steps (dotted red: the guard went back)" if any(r.guard for r in self) else "weight steps"
        )
        figure.savefig(path, dpi=150)

    def curves(self) -> dict[str, dict[str, tuple[list[int], list[float]]]]:
        """What ``plot`` draws: panel -> line -> (steps, values)."""
        finite = [r for r in self.records if r.valid_loss == r.valid_loss]
        panels = {"validation loss": {"": ([r.step for r in finite], [r.valid_loss for r in finite])}}
        steps = [0, *(record.step for record in self.records)]
        every = [self.start, *(record.values for record in self.records)]
        for name, entries in self.start.items():
            lines = {}
            for g in range(len(entries)):
                values = [_middle(v[name][g]) for v in every]
                if any(values):  # a switch that is off, such as no weight decay on biases, is not worth a line
                    lines[f"group {g}" if len(entries) > 1 else ""] = (steps, values)
            panels[name] = lines
        return panels


@dataclass(repr=False)
class Schedule:
    """Values found by a tuner, replayed: ``attach`` it, then call ``step()`` after every ``optimizer.step()``.

    It has the methods of torch's LR schedulers, and can stand where a framework wants one.
    """

    steps: list[int]
    values: list[Values]

    def attach(self, optimizer: torch.optim.Optimizer) -> Schedule:
        """Write the first values into an optimizer with the same param groups, and follow it from here on."""
        for name, entries in self.values[0].items():
            if len(optimizer.param_groups) != len(entries):
                raise ValueError(
                    f"optimizer must have {len(entries)} param groups, but got {len(optimizer.param_groups)}"
                )
            if any(read_value(group, name) is None for group in optimizer.param_groups):
                raise ValueError(
                    f"optimizer must have {name!r} in its param groups, but {type(optimizer).__name__} has not"
                )
        self.optimizer, self._taken = optimizer, 0
        self._apply()
        return self

    def step(self) -> None:
        """To be called after every ``optimizer.step()``: writes the values that are due."""
        self._check_attached()
        self._taken += 1
        self._apply()

    def get_last_lr(self) -> list[float]:
        """The learning rates that the next step takes, one a param group."""
        self._check_attached()
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """How far it is; the values themselves are in ``to_json``."""
        self._check_attached()
        return {"taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken, with the values that are due there."""
        self._check_attached()
        self._taken = state["taken"]
        self._apply()

    def to_json(self, path: str | Path) -> None:
        """To a file that ``from_json`` reads, or anyone else: steps, and the values from each of them on."""
        Path(path).write_text(json.dumps({"steps": self.steps, "values": self.values}, indent=1))

    @classmethod
    def from_json(cls, path: str | Path) -> Schedule:
        """From a file that ``to_json`` wrote."""
        return cls(**json.loads(Path(path).read_text()))

    def __repr__(self) -> str:
        return f"Schedule of {', '.join(self.values[0])} over {self.steps[-1]} steps"

    def _apply(self) -> None:
        now = self.values[bisect_right(self.steps, self._taken) - 1]
        for name, entries in now.items():
            for group, entry in zip(self.optimizer.param_groups, entries, strict=True):
                write_value(group, name, torch.tensor(entry, dtype=torch.float64))

    def _check_attached(self) -> None:
        if not hasattr(self, "optimizer"):
            raise RuntimeError("a schedule needs an optimizer, but there is none yet; call schedule.attach(optimizer)")


def _thin(values: Values) -> Values:
    return {name: [_summary(entry) for entry in entries] for name, entries in values.items()}


def _summary(entry: Any) -> Any:
    if not isinstance(entry, Tensor):
        return entry
    return {"min": float(entry.min()), "median": float(entry.median()), "max": float(entry.max())}


def _middle(entry: Any) -> float:
    return float(entry["median"] if isinstance(entry, dict) else entry)


def _columns(values: Values) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, entries in values.items():
        for g, entry in enumerate(entries):
            parts = {f".{key}": value for key, value in entry.items()} if isinstance(entry, dict) else {"": entry}
            flat |= {f"{name}[{g}]{part}": value for part, value in parts.items()}
    return flat
