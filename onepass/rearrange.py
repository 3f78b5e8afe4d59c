"""Replicas chosen anew between two runs, and values given to them: pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from onepass.method import Method
from onepass.replicas import Named, State, mapped


def checked_replicas(name: str, given: Any, count: int) -> Tensor:
    """Numbers of replicas, at least one, as a tensor on the CPU."""
    try:
        index = torch.as_tensor(given).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        index = torch.empty(0)
    if index.dim() != 1 or not len(index) or index.is_floating_point() or index.dtype == torch.bool:
        raise ValueError(f"{name} must be one or more numbers of replicas, but got {given!r}")
    if int(index.min()) < 0 or int(index.max()) >= count:
        raise ValueError(f"{name} must be from 0 to {count - 1}, but got {int(index.min())} to {int(index.max())}")
    return index


def taken_from(nest: Any, index: Tensor) -> Any:
    """The rows of these replicas, wherever the tensors are."""
    return mapped(lambda tensor: tensor[index.to(tensor.device)], nest)


def with_values(method: Method, state: State, values: Mapping[str, Any]) -> State:
    """Other hyperparameters, in natural units; tuned ones as far as their bounds allow."""
    raw, fixed = dict(state.raw), dict(state.fixed)
    for name, given in values.items():
        if name in raw:
            column = _column(name, given, raw[name])
            moved = column != method.natural(state, name)  # a detour through natural units would round
            raw[name] = torch.where(moved, method.raw(state, name, column), raw[name])
        elif name in fixed:
            fixed[name] = _column(name, given, fixed[name])
        else:
            known = sorted({*raw, *fixed})
            raise ValueError(
                f"values must be of {', '.join(known) or 'nothing here'}, which replicas have of their own, but got "
                f"{name!r}; a start of one number each makes it so"
            )
    return state._replace(raw=raw, fixed=fixed)


def _column(name: str, given: Any, like: Tensor) -> Tensor:
    """One number for all, one a replica, or one a replica and weight."""
    found = torch.as_tensor(given, dtype=like.dtype, device=like.device)
    found = found.unsqueeze(1) if found.dim() == 1 else found
    if found.dim() not in (0, 2) or (found.dim() == 2 and found.shape[0] != like.shape[0]):
        raise ValueError(f"values[{name!r}] must be a number or {like.shape[0]} numbers, but got {tuple(found.shape)}")
    if not bool((found.isfinite() & (found >= 0)).all()):
        raise ValueError(f"values[{name!r}] must be finite and at least 0, but got {given!r}")
    return found.expand_as(like).clone()


def named_columns(values: Named) -> Named:
    """As a history has them: one number a replica."""
    return {name: value if value.dim() == 1 else value.median(1).values for name, value in values.items()}
