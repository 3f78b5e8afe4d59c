"""What a population did, when: the record of all replicas, thinned so that it never outgrows the run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.history import Schedule
from onepass.replicas import Named, Record, mapped, selected

# Once there are this many records, every second is dropped, and only every second, fourth ... is kept from then on.
LARGEST = 1024


class PopulationHistory:
    """Values and validation losses over time, one column a replica.

    Attributes:
        steps: weight steps taken at each record.
        measured_steps: weight steps at which the metrics of ``measured`` were taken.
        measured_seconds: what training took since the time before, without what metrics and checkpoints took; NaN where
            it was interrupted in between.
        returns: how often the guard took each replica back.
        skipped: how many hyper steps left a replica's values alone because something was not finite.
    """

    def __init__(self, start: Named, replicas: int, per_element: tuple[str, ...] = ()) -> None:
        self.start = {name: value.cpu() for name, value in start.items()}
        self._per_element = per_element
        self.steps: list[int] = []
        self.measured_steps: list[int] = []
        self.measured_seconds: list[float] = []
        self._measured: list[Named] = []
        self._records: list[Record] = []
        self._every, self._seen = 1, 0
        self._returns: Tensor = torch.zeros(replicas, dtype=torch.int64)
        self._skipped: Tensor = torch.zeros(replicas, dtype=torch.int64)

    def append(self, step: int, record: Record) -> None:
        self._returns = record.returned + self._returns.to(record.returned.device)
        self._skipped = record.skipped + self._skipped.to(record.skipped.device)
        self._seen += 1
        if (self._seen - 1) % self._every:
            return
        self.steps.append(step)
        self._records.append(record)
        if len(self.steps) == LARGEST:
            self.steps, self._records, self._every = self.steps[1::2], self._records[1::2], 2 * self._every
            self._seen = 1  # the last record was kept: the next is due after a whole gap

    def measure(self, step: int, found: Named, seconds: float) -> None:
        """Beside the records, and never thinned: whoever asks for metrics says how often."""
        self.measured_steps.append(step)
        self.measured_seconds.append(seconds)
        self._measured.append(found)

    def choose(self, index: Tensor) -> None:
        """Go on with the columns of these replicas: each brings its own past along."""

        def columns(nest: Any) -> Any:
            return mapped(lambda tensor: tensor[index.to(tensor.device)], nest)

        self.start, self._records, self._measured = map(columns, (self.start, self._records, self._measured))
        self._returns, self._skipped = columns(self._returns), columns(self._skipped)

    def amend(self, step: int, values: Named) -> None:
        """Values that somebody else has set after the record of this step, or before the first."""
        if step == 0:
            self.start |= {name: value.double().cpu() for name, value in values.items() if name in self.start}
        elif self.steps and self.steps[-1] == step:
            last = self._records[-1]
            known = {name: value.double() for name, value in values.items() if name in last.values}
            self._records[-1] = last._replace(values={**last.values, **known})

    def schedule(self, replica: int) -> Schedule:
        """The values that one replica found, to be replayed in another run. What the guard has undone is left out."""
        if self._per_element:
            raise ValueError(f"only one value a replica can be replayed, but {self._per_element[0]!r} has one a weight")
        every = [(0, {name: [float(value[replica])] for name, value in self.start.items()})]
        columns = {name: value[:, replica].tolist() for name, value in self.values.items()}
        for i, record in enumerate(self._records):
            step = int(record.path[replica])
            while len(every) > 1 and every[-1][0] >= step:
                every.pop()
            every.append((step, {name: [column[i]] for name, column in columns.items()}))
        return Schedule([step for step, _ in every], [values for _, values in every])

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        return f"PopulationHistory of {len(self)} records of {', '.join(self.start)}"

    @property
    def returns(self) -> Tensor:
        return self._returns.cpu()

    @property
    def skipped(self) -> Tensor:
        return self._skipped.cpu()

    @property
    def valid_loss(self) -> Tensor:
        """``(records, replicas)``"""
        return _stacked(*(record.valid_loss for record in self._records)) if self._records else torch.empty(0)

    @property
    def values(self) -> Named:
        """Name -> ``(records, replicas)``, natural units; the median where every weight has a value of its own."""
        return self._all("values")

    @property
    def hypergradients(self) -> Named:
        """Name -> ``(records, replicas)``, in raw space."""
        return self._all("hypergradients")

    @property
    def measured(self) -> Named:
        """Name -> ``(measured_steps, replicas)``, what ``run(..., measure=...)`` asked for; NaN where it did not."""
        names = dict.fromkeys(name for found in self._measured for name in found)
        none = torch.full((len(self._returns),), torch.nan)
        return {n: torch.stack([found.get(n, none).cpu() for found in self._measured]) for n in names}

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, ready for ``json.dumps``: all but seconds, so that equal runs give the same."""
        return {
            "start": {name: value.tolist() for name, value in self.start.items()},
            "steps": self.steps,
            "valid_loss": self.valid_loss.tolist(),
            "values": {name: value.tolist() for name, value in self.values.items()},
            "hypergradients": {name: value.tolist() for name, value in self.hypergradients.items()},
            "measured_steps": self.measured_steps,
            "measured": {name: value.tolist() for name, value in self.measured.items()},
            "returns": self.returns.tolist(),
            "skipped": self.skipped.tolist(),
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "start": self.start,
            "steps": self.steps,
            # One tensor each: a file of many small ones takes longer to write than the run to come that far.
            "records": mapped(_stacked, *self._records)._asdict() if self._records else {},
            "measured": [self.measured_steps, self.measured],
            "measured_seconds": self.measured_seconds,
            "every": [self._every, self._seen],
            "returns": self.returns,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start, self.steps = state["start"], list(state["steps"])
        self._records = [Record(**selected(state["records"], i)) for i in range(len(self.steps))]
        self.measured_steps, measured = list(state["measured"][0]), state["measured"][1]
        self._measured = [selected(measured, i) for i in range(len(self.measured_steps))]
        self.measured_seconds = list(state["measured_seconds"])
        self._every, self._seen = state["every"]
        self._returns, self._skipped = state["returns"], state["skipped"]

    def _all(self, field: str) -> Named:
        found: Named = mapped(_stacked, *(getattr(record, field) for record in self._records)) if self._records else {}
        return found


def _stacked(*records: Tensor) -> Tensor:
    """All records of one thing, on the CPU."""
    devices = {tensor.device for tensor in records}  # after a resume, the earlier ones are on the CPU
    return torch.stack(records if len(devices) == 1 else [tensor.cpu() for tensor in records]).cpu()
