"""One weight step, evaluated once and kept, to be multiplied by its transposed Jacobians."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.rules import Update

States = list[dict[str, Tensor]]


class Piece(NamedTuple):
    """One step of one tensor of weights, *before* the step: ``update(values, weights, gradient, state)``.

    ``tuned`` names the entries of ``values`` to differentiate by; they must be tensors.
    """

    update: Update
    values: dict[str, Any]
    weights: Tensor
    gradient: Tensor
    state: dict[str, Any]
    tuned: tuple[str, ...]


class Linearised:
    """The update ``u`` and the next state of every piece, as functions of fresh leaves.

    ``states=False`` leaves the optimizer's state out of the adjoint.
    """

    def __init__(self, step: Sequence[Piece], *, states: bool = True) -> None:
        self._leaves = [_Leaves(piece) for piece in step]
        self._carried = [tuple(leaf.state) if states else () for leaf in self._leaves]
        self._updates: list[Tensor] = []
        self._states: States = []
        for piece, leaf in zip(step, self._leaves, strict=True):
            u, state = piece.update(leaf.values, leaf.weights, leaf.gradient, leaf.all_state)
            self._updates.append(u)
            self._states.append({key: value for key, value in state.items() if isinstance(value, Tensor)})

    def to_weights(self, a_w: Sequence[Tensor], a_s: States) -> tuple[list[Tensor], list[Tensor], States]:
        """``b_w, b_g, b_s``: cotangents ``(-a_w, a_s)`` of ``(u, s')``, pulled back to weights, gradient and state."""
        wanted = [leaf.weights for leaf in self._leaves] + [leaf.gradient for leaf in self._leaves]
        wanted += [leaf.state[key] for leaf, keys in zip(self._leaves, self._carried, strict=True) for key in keys]
        found = self._pull_back(a_w, a_s, wanted)
        n = len(self._leaves)
        rest = iter(found[2 * n :])
        return found[:n], found[n : 2 * n], [{key: next(rest) for key in keys} for keys in self._carried]

    def to_values(self, a_w: Sequence[Tensor], a_s: States) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
        """``b_λ, b_g``: the same cotangents, pulled back to the tuned values and the gradient."""
        wanted = [tensor for leaf in self._leaves for tensor in leaf.tuned.values()]
        wanted += [leaf.gradient for leaf in self._leaves]
        found = iter(self._pull_back(a_w, a_s, wanted))
        values = [{name: next(found) for name in leaf.tuned} for leaf in self._leaves]
        return values, list(found)

    def _pull_back(self, a_w: Sequence[Tensor], a_s: States, wanted: list[Tensor]) -> list[Tensor]:
        pairs = [(u, -a) for u, a in zip(self._updates, a_w, strict=True)]
        for state, cotangents in zip(self._states, a_s, strict=True):
            # A state that depends on nothing we follow (a constant of the very first step) ends the walk here.
            pairs += [(state[key], a) for key, a in cotangents.items() if key in state and state[key].requires_grad]
        outputs, incoming = zip(*pairs, strict=True)
        found = torch.autograd.grad(outputs, wanted, incoming, retain_graph=True, allow_unused=True)
        return [torch.zeros_like(x) if f is None else f for f, x in zip(found, wanted, strict=True)]


class _Leaves:
    """A piece with every tensor replaced by a leaf."""

    def __init__(self, piece: Piece) -> None:
        self.weights, self.gradient = _leaf(piece.weights), _leaf(piece.gradient)
        self.tuned = {name: _leaf(piece.values[name]) for name in piece.tuned}
        self.values = {**piece.values, **self.tuned}
        self.state = {key: _leaf(value) for key, value in piece.state.items() if isinstance(value, Tensor)}
        self.all_state = {**piece.state, **self.state}


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()
