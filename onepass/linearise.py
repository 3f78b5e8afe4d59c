"""One weight step as a function, to be multiplied by its transposed Jacobians."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.rules import Update

States = list[dict[str, Tensor]]
Values = list[dict[str, Tensor]]
Named = tuple[dict[str, Tensor], ...]

# Up to this many weights the evaluated step is kept and used again; beyond, it is evaluated anew, piece by piece, since
# its intermediate results would take several times the memory of the weights.
KEPT = 2**20


def at_once(tensor: Tensor) -> int:
    """Of how many elements to compute something at once: on a CPU so many as its cache holds, on a GPU as are worth
    launches.
    """
    return 2**17 if tensor.is_cpu else 2**20


def dot(left: Tensor, right: Tensor) -> Tensor:
    """In float64, a part at a time."""
    size = at_once(left)
    if left.numel() <= size:
        return (left * right).sum().double()
    parts = zip(left.flatten().split(size), right.flatten().split(size), strict=True)
    return torch.stack([(a * b).sum() for a, b in parts]).sum(dtype=torch.float64)


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
    """Jacobian products of the update ``u`` and of the next state, which ``states=False`` leaves out.

    ``a_w`` and ``a_s`` are adjoints: what comes in is the cotangent ``(-a_w, a_s)`` of ``(u, s')``, one a piece.
    """

    def __init__(self, step: Sequence[Piece], *, states: bool = True) -> None:
        self._step, self._states = step, states
        small = sum(piece.weights.numel() for piece in step) <= KEPT
        self._kept = [_Graph(piece) for piece in step] if small else None
        self._parts = [slice(None)] if small else [slice(i, i + 1) for i in range(len(step))]

    def step_back(self, a_w: list[Tensor], a_s: States) -> tuple[Values, list[Tensor]]:
        """Replace ``a_w`` by ``a_w + b_w`` and ``a_s`` by ``b_s``, and return ``b_λ, b_g``.

        Adjoints are as large as the model: they are replaced in their lists, piece by piece, so that the old ones make
        room for the new.
        """
        b_v: Values = []
        b_g: list[Tensor] = []
        for part in self._parts:
            found = self._pull_back(part, a_w, a_s, self._everything)
            b_v += [values for values, _, _ in found]
            a_w[part] = [a + seen["weights"] for a, (_, seen, _) in zip(a_w[part], found, strict=True)]
            b_g += [seen["gradient"] for _, seen, _ in found]
            a_s[part] = [state for _, _, state in found]
        return b_v, b_g

    def to_values(self, a_w: Sequence[Tensor], a_s: States) -> Values:
        """``b_λ``: pulled back to the tuned values."""
        return [
            values
            for part in self._parts
            for (values,) in self._pull_back(part, a_w, a_s, lambda graph: (graph.tuned,))
        ]

    def to_gradient(self, a_w: Sequence[Tensor], a_s: States) -> list[Tensor]:
        """``b_g``: pulled back to the training gradient alone."""

        def gradient(graph: _Graph) -> Named:
            return ({"gradient": graph.gradient},)

        return [found["gradient"] for part in self._parts for (found,) in self._pull_back(part, a_w, a_s, gradient)]

    def _everything(self, graph: _Graph) -> Named:
        seen = {"weights": graph.weights, "gradient": graph.gradient}
        return graph.tuned, seen, graph.state if self._states else {}

    def _pull_back(
        self, part: slice, a_w: Sequence[Tensor], a_s: States, wanted: Callable[[_Graph], Named]
    ) -> list[Named]:
        """For each piece of a part, what flows to the ``wanted`` tensors, by their names. Graphs not kept end here."""
        graphs = self._kept or [_Graph(piece) for piece in self._step[part]]
        named = [wanted(graph) for graph in graphs]
        tensors = [tensor for group in named for names in group for tensor in names.values()]
        found = iter(_grad(graphs, a_w[part], a_s[part], tensors, keep=self._kept is not None))
        return [tuple({name: next(found) for name in names} for names in group) for group in named]


class _Graph:
    """A piece evaluated on fresh leaves: the caller's tensors stay as they are."""

    def __init__(self, piece: Piece) -> None:
        self.weights, self.gradient = _leaf(piece.weights), _leaf(piece.gradient)
        self.tuned = {name: _leaf(piece.values[name]) for name in piece.tuned}
        self.state = {
            key: _leaf(value) for key, value in piece.state.items() if isinstance(value, Tensor) and key != "step"
        }
        self.update, self.next_state = piece.update(
            {**piece.values, **self.tuned}, self.weights, self.gradient, {**piece.state, **self.state}
        )

    def follows(self, key: str) -> bool:
        """Whether a state depends on anything here; a constant of the very first step does not."""
        state = self.next_state.get(key)
        return isinstance(state, Tensor) and state.requires_grad


def _grad(
    graphs: Sequence[_Graph], a_w: Sequence[Tensor], a_s: States, wanted: list[Tensor], *, keep: bool
) -> list[Tensor]:
    if not wanted:
        return []
    pairs = [(graph.update, -a) for graph, a in zip(graphs, a_w, strict=True)]
    for graph, cotangents in zip(graphs, a_s, strict=True):
        pairs += [(graph.next_state[key], a) for key, a in cotangents.items() if graph.follows(key)]
    outputs, incoming = zip(*pairs, strict=True)
    found = torch.autograd.grad(outputs, wanted, incoming, retain_graph=keep, allow_unused=True)
    return [torch.zeros_like(x) if f is None else f for f, x in zip(found, wanted, strict=True)]


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()
