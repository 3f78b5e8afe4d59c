"""LR schedulers on the tuner's optimizer: a scheduler multiplies, the tuner owns the base value."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from onepass.entries import Entry
from onepass.snapshot import Group


def follow_schedulers(
    optimizer: torch.optim.Optimizer, entries: Sequence[Entry | None], *, resumed: bool
) -> list[LRScheduler]:
    """Show every LR scheduler of this optimizer the learning rate it would see without a tuner; returns those found.

    Some schedulers multiply what they find in ``group["lr"]``, others (``LambdaLR``, ``OneCycleLR``) overwrite it with
    a function of where they began. Behind this view both only ever move the factor. A scheduler knows its optimizer
    but not the reverse, hence the search among live objects: made once, and only where a scheduler has left its mark.
    The optimizer it knows may be a wrapper around this one.
    """
    if not any("initial_lr" in group for group in optimizer.param_groups):
        return []
    scalar = {entry.index: entry for entry in entries if entry is not None and entry.hyperparameter.raw.dim() == 0}
    if not resumed:
        for entry in scalar.values():
            entry.start = float(entry.hyperparameter.value)
    found = [
        thing
        for thing in gc.get_objects()
        if issubclass(type(thing), LRScheduler) and _wrapped(thing.__dict__.get("optimizer")) is optimizer
    ]
    for scheduler in found:
        scheduler.optimizer = _SchedulersView(scheduler.optimizer, scalar)
    return found


def release(schedulers: Sequence[LRScheduler]) -> None:
    """Show them their optimizer itself again."""
    for scheduler in schedulers:
        scheduler.optimizer = vars(scheduler.optimizer)["_optimizer"]


def _wrapped(optimizer: Any) -> Any:
    """What an optimizer wraps, as those of Accelerate do."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


class _SchedulersView:
    def __init__(self, optimizer: torch.optim.Optimizer, entries: Mapping[int, Entry]) -> None:
        self._optimizer, self._entries = optimizer, entries

    @property
    def param_groups(self) -> list[Any]:
        groups = self._optimizer.param_groups
        return [_GroupView(g, self._entries[i]) if i in self._entries else g for i, g in enumerate(groups)]

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":  # half made, by copy.deepcopy
            raise AttributeError(name)
        return getattr(self._optimizer, name)


class _GroupView(MutableMapping[str, Any]):
    """A param group whose ``lr`` is the scheduler's own: the start times the factor."""

    def __init__(self, group: Group, entry: Entry) -> None:
        self._group, self._entry = group, entry
        entry.observe(group)

    def __getitem__(self, key: str) -> Any:
        return float(self._entry.start) * self._entry.factor if key == "lr" else self._group[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key != "lr":
            self._group[key] = value
            return
        self._entry.factor = float(value) / float(self._entry.start)
        self._entry.write(self._group)

    def __delitem__(self, key: str) -> None:
        del self._group[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._group)

    def __len__(self) -> int:
        return len(self._group)
