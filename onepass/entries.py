"""Which entries of an optimizer's param groups are tuned, and what others write there.

For ``lr`` the tuner owns the base value, and others multiply: ``group["lr"] = base * factor``. The tuner moves
``base``; whatever anybody else writes into ``group["lr"]`` moves ``factor``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.hyperparameters import TRANSFORMS, Hyperparameter, in_domain
from onepass.rules import Rule
from onepass.snapshot import Group, read_value, write_value

Entries = dict[str, list["Entry | None"]]


class Used(NamedTuple):
    """A tuned value as one weight step really used it: ``value`` is the hyperparameter's own times ``factor``."""

    group: int
    name: str
    hyperparameter: Hyperparameter
    value: Tensor
    factor: float


class Entry:
    """One hyperparameter in one param group; tied entries share their ``Hyperparameter``.

    Attributes:
        start: the value that a scheduler takes for the base.
        factor: what a scheduler, or anyone else, has made of ``lr`` since.
        paused: the user has set the entry to something that cannot be tuned, such as ``weight_decay = 0``.
    """

    def __init__(self, group: Group, index: int, name: str, hyperparameter: Hyperparameter, start: Any) -> None:
        self.index, self.name, self.hyperparameter, self.start = index, name, hyperparameter, start
        self.factor, self.paused = 1.0, False
        self._written: float | None = None if _has_shape(start) else float(start)
        self.observe(group)

    def observe(self, group: Group) -> None:
        """Notice what others wrote since: for ``lr`` a factor, for anything else a new value."""
        now = read_value(group, self.name)
        if _has_shape(now) or float(now) == self._written:
            return
        self._written = float(now)
        if self.name == "lr":
            self.factor = float(now) / float(self.hyperparameter.value)
            return
        self.paused = not in_domain(float(now), self.hyperparameter.transform)
        if not self.paused:
            self.hyperparameter.set(float(now))

    def used(self, group: Group) -> Used:
        now = read_value(group, self.name)
        value = now.clone() if _has_shape(now) else torch.tensor(float(now), dtype=torch.float64)
        return Used(self.index, self.name, self.hyperparameter, value, self.factor)

    def write(self, group: Group) -> None:
        if self.paused:
            return
        value = self.hyperparameter.value
        write_value(group, self.name, value if self.factor == 1.0 else value * self.factor)
        now = read_value(group, self.name)
        self._written = None if _has_shape(now) else float(now)


def collect(
    groups: Sequence[Group],
    rule: Rule,
    tune: Sequence[str] | None,
    tied: Sequence[str],
    bounds: Mapping[str, tuple[float, float]],
) -> Entries:
    """The tuned entries: name -> one a group, ``None`` where a group's start cannot be tuned (``weight_decay=0``).

    With ``tune=None``, every entry whose start lies inside the domain of its raw space.
    """
    _check_names(rule, tune, tied, bounds)
    entries: Entries = {}
    for name in expanded(tune) if tune is not None else rule.tunable:
        starts = [_start(group, name) for group in groups]
        usable = [start is not None and in_domain(start, rule.tunable[name]) for start in starts]
        if any(usable):
            entries[name] = _entries(groups, name, starts, usable, rule, bounds.get(name), name in expanded(tied))
        elif tune is not None:
            cure = TRANSFORMS[rule.tunable[name]].cure
            raise ValueError(f"{name} cannot be tuned from {starts[0]} in {rule.tunable[name]} space; {cure}")
    return entries


def _entries(
    groups: Sequence[Group],
    name: str,
    starts: Sequence[Any],
    usable: Sequence[bool],
    rule: Rule,
    bounds: tuple[float, float] | None,
    tied: bool,
) -> list[Entry | None]:
    different = {float(start) for start, ok in zip(starts, usable, strict=True) if ok and tied}
    if len(different) > 1:
        raise ValueError(f"tied {name} must start from one value in all groups, but got {sorted(different)}")
    found: list[Entry | None] = []
    shared: Hyperparameter | None = None
    _unshare(groups, name)
    for index, (group, start, ok) in enumerate(zip(groups, starts, usable, strict=True)):
        if not ok:
            found.append(None)
            continue
        exact = start if isinstance(start, Tensor) else torch.tensor(start, dtype=torch.float64)
        own = shared or Hyperparameter(exact, rule.tunable[name], bounds or rule.bounds_around(name, exact), name=name)
        shared = own if tied else None
        found.append(Entry(group, index, name, own, start))
    return found


def _start(group: Group, name: str) -> Any:
    """Where a value begins. A scheduler has already been at ``lr``, and keeps its start in ``initial_lr``."""
    if name == "lr" and "initial_lr" in group:
        return group["initial_lr"]
    return read_value(group, name)


def _has_shape(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _unshare(groups: Sequence[Group], name: str) -> None:
    """torch gives every group the same tensor if the default is one: each needs its own to have its own value."""
    seen: set[int] = set()
    for group in groups:
        value = group.get(name)
        if isinstance(value, Tensor) and id(value) in seen:
            group[name] = value.clone()
        seen.add(id(group.get(name)))


def expanded(tune: Sequence[str]) -> list[str]:
    return [name for given in tune for name in (("beta1", "beta2") if given == "betas" else (given,))]


def _check_names(
    rule: Rule, tune: Sequence[str] | None, tied: Sequence[str], bounds: Mapping[str, tuple[float, float]]
) -> None:
    if isinstance(tune, str) or isinstance(tied, str):
        raise ValueError(
            f"tune and tied must be tuples of names, but got the string {tune if isinstance(tune, str) else tied!r}"
        )
    known = sorted(rule.tunable)
    for argument, names in (("tune", expanded(tune or ())), ("tied", expanded(tied)), ("bounds", bounds)):
        for name in names:
            if name not in rule.tunable:
                raise ValueError(f"names in {argument} must be among {known}, but got {name!r}")
