"""What many trainings are at one moment: nests of tensors with a leading axis of replicas. Nothing mixes along it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.guard import Health
from onepass.rules import Rule

Named = dict[str, Tensor]


class Weights(NamedTuple):
    """What a weight step changes. ``optimizer`` is the rule's state, with one ``step`` count a replica."""

    weights: Tensor
    buffers: Named
    optimizer: Named


class Limits(NamedTuple):
    """Where one hyperparameter began and between what it stays, in natural units."""

    start: Tensor
    low: Tensor
    high: Tensor


class Point(NamedTuple):
    """What the guard goes back to."""

    now: Weights
    raw: Named
    path: Tensor


class State(NamedTuple):
    """Some replicas at one moment.

    Attributes:
        now: weights, buffers and optimizer state.
        raw: tuned values in raw space: ``(replicas, 1)``, or ``(replicas, weights)`` with one for every weight.
        fixed: values that are not tuned, in natural units.
        factors: what fixed values are multiplied by once an interval.
        limits: of ``raw`` and ``factors``.
        hyper: the hyper-optimizer's state, by tuned name.
        health: the guard's memory, or ``None``.
        point: where the guard goes back to, or ``None``.
        window: weights and values before each of the last steps, where hypergradients are taken through real steps.
        begin: what every interval begins from, where the method restarts.
        sensitivities: by tuned name, what a change of the value over the whole run has done to weights and optimizer
            state, where hypergradients are taken so.
        age: for how many hyper steps they have been kept, ``(replicas, 1)``.
        path: weight steps that led here: all that were taken, less those that the guard has undone; ``(replicas, 1)``.
    """

    now: Weights
    raw: Named
    fixed: Named
    factors: Named
    limits: dict[str, Limits]
    hyper: dict[str, Named]
    health: Health | None
    point: Point | None
    window: list[tuple[Weights, Named]]
    begin: Weights | None
    sensitivities: dict[str, Named]
    age: Tensor
    path: Tensor


class Record(NamedTuple):
    """What one interval did, one entry a replica: a median where every weight has a value of its own.

    ``hypergradients`` in raw space; ``returned``: times the guard went back; ``skipped``: not finite, so not used;
    ``path``: weight steps that the guard has not undone.
    """

    valid_loss: Tensor
    values: Named
    hypergradients: Named
    returned: Tensor
    skipped: Tensor
    path: Tensor


def mapped(function: Callable[..., Any], *nests: Any) -> Any:
    """The function of every tensor, or of tensors in the same place, through tuples, lists and dictionaries."""
    first = nests[0]
    if isinstance(first, Tensor):
        return function(*nests)
    if isinstance(first, dict):
        return {key: mapped(function, *(nest[key] for nest in nests)) for key in first}
    if isinstance(first, (list, tuple)):
        parts = [mapped(function, *together) for together in zip(*nests, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return first


def leaves(nest: Any) -> list[Tensor]:
    """All tensors, in a fixed order."""
    found: list[Tensor] = []
    mapped(found.append, nest)
    return found


def rebuilt(nest: Any, tensors: Iterable[Tensor]) -> Any:
    """A nest of the same form with other tensors: the reverse of ``leaves``."""
    rest = iter(tensors)
    return mapped(lambda _: next(rest), nest)


def chosen(who: Tensor, then: Any, otherwise: Any) -> Any:
    """``then`` for some replicas, ``otherwise`` for the others, through any nest of tensors."""

    def choose(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(who.reshape(-1, *[1] * (a.dim() - 1)), a, b)

    return mapped(choose, then, otherwise)


def forgotten(state: State, who: Tensor) -> State:
    """Without the sensitivities of some replicas: their past says nothing about how they go on."""
    kept = {"sensitivities": state.sensitivities, "age": state.age}
    return state._replace(**chosen(who, mapped(torch.zeros_like, kept), kept))


def selected(nest: Any, index: Tensor | slice | int) -> Any:
    """Some of the replicas, or whatever else the leading axis runs over."""
    return mapped(lambda tensor: tensor[index], nest)


def fresh(state: Named, rule: Rule) -> Named:
    """An optimizer's state before its first step. Numbers that grow by multiplication (NAdam's) begin at 1."""
    return {
        key: torch.ones_like(value) if key in rule.moving_numbers else torch.zeros_like(value)
        for key, value in state.items()
    }


def completed(state: Named, like: Named, rule: Rule) -> Named:
    """A state with all entries of ``like``: rules make theirs in the first step."""
    return {key: state.get(key, value) for key, value in fresh(like, rule).items()}


_KINDS = {kind.__name__: kind for kind in (State, Weights, Limits, Point, Health)}


def to_plain(nest: Any) -> Any:
    """Tensors on the CPU in lists and dictionaries, for a file that can be read without running code."""
    if isinstance(nest, Tensor):
        return nest.detach().cpu()
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return {"kind": type(nest).__name__, "fields": [to_plain(part) for part in nest]}
    if isinstance(nest, (list, tuple)):
        return [to_plain(part) for part in nest]
    return {key: to_plain(part) for key, part in nest.items()} if isinstance(nest, dict) else nest


def from_plain(plain: Any, device: torch.device) -> Any:
    if isinstance(plain, Tensor):
        return plain.to(device)
    if isinstance(plain, list):
        return [from_plain(part, device) for part in plain]
    if isinstance(plain, dict) and "kind" in plain:
        return _KINDS[plain["kind"]](*(from_plain(part, device) for part in plain["fields"]))
    return {key: from_plain(part, device) for key, part in plain.items()} if isinstance(plain, dict) else plain
