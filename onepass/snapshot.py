"""The last weight step as it really happened: weights and optimizer state before it, and the gradient it saw.

Rules are elementwise, so the weights that share their hyperparameters are laid end to end in one long *piece*: a model
of sixty small tensors costs one kernel an operation, not sixty.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from onepass.distributed import local

Group = dict[str, Any]
T = TypeVar("T")

# A piece ends at about this many weights: what is computed of it at once should stay small beside a large model.
LARGEST = 2**20


class Joined(NamedTuple):
    """Some parameters of one group before a step, end to end. ``scalars`` are the state's numbers (``step``)."""

    group: int
    parameters: list[nn.Parameter]
    weights: Tensor
    state: dict[str, Tensor]
    scalars: dict[str, float]

    def views(self, joined: Tensor) -> list[Tensor]:
        """A tensor laid out like ``weights``, cut into one view a parameter."""
        if len(self.parameters) == 1:
            return [joined]
        here = [local(p) for p in self.parameters]
        parts = joined.split([p.numel() for p in here])
        return [part.view(p.shape) for p, part in zip(here, parts, strict=True)]

    def only(self, keep: Sequence[nn.Parameter]) -> Joined:
        """The same for some of the parameters."""
        if len(keep) == len(self.parameters):
            return self
        chosen = [i for i, p in enumerate(self.parameters) if any(p is k for k in keep)]
        state = {key: _join([self.views(value)[i] for i in chosen]) for key, value in self.state.items()}
        weights = _join([self.views(self.weights)[i] for i in chosen])
        return Joined(self.group, [self.parameters[i] for i in chosen], weights, state, self.scalars)


class Snapshot:
    """Taken around one ``optimizer.step()``: made before it, ``complete``d after it.

    ``loss_scale``: of the ``GradScaler`` that the step was taken with.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, loss_scale: float = 1.0) -> None:
        self.loss_scale = loss_scale
        # The values the step really used, a scheduler's factor included.
        self.values = [named_values(group) for group in optimizer.param_groups]
        self.everything = [_joined(optimizer, *key_and_members) for key_and_members in _sharing(optimizer).items()]
        self.pieces: list[Joined] = []
        self.gradients: list[Tensor] = []

    def take_gradients(self) -> None:
        """Before the step, since some optimizers write into them (SGD's foreach Nesterov); after it where they are only
        made inside the step, by a closure or a fused unscaling."""
        for joined in self.everything:
            stepped = [p for p in joined.parameters if p.grad is not None]
            for p in stepped:
                if p.grad.layout != torch.strided:  # type: ignore[union-attr]
                    raise ValueError(
                        f"gradients must be dense, but a parameter of shape {tuple(p.shape)} has a sparse one; "
                        "use nn.Embedding(..., sparse=False)"
                    )
            if stepped:
                self.pieces.append(joined.only(stepped))
                self.gradients.append(_join([p.grad for p in stepped]))  # type: ignore[misc]
        if not self.pieces:
            raise ValueError(
                "optimizer.step must be taken with gradients, but there are none; call backward() before it"
            )

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for piece in self.pieces for p in piece.parameters]

    def join(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """Tensors, one a parameter, as new tensors, one a piece, each made when it is asked for."""
        rest = iter(tensors)
        return (_join([next(rest) for _ in piece.parameters]) for piece in self.pieces)

    def split(self, joined: Iterable[Tensor]) -> list[Tensor]:
        """The reverse of ``join``, as views."""
        return [view for piece, tensor in zip(self.pieces, joined, strict=True) for view in piece.views(tensor)]


def drained(tensors: list[T]) -> Iterator[T]:
    """One after the other, each free once it has been used: together they are as large as the model."""
    tensors.reverse()
    while tensors:
        yield tensors.pop()


def _sharing(optimizer: torch.optim.Optimizer) -> dict[Any, list[nn.Parameter]]:
    """Who can share a piece: same group, same kind of tensor, same age; nobody where values have a shape."""
    shares: dict[Any, list[nn.Parameter]] = {}
    sizes: dict[Any, int] = {}
    for g, group in enumerate(optimizer.param_groups):
        shaped = any(isinstance(v, Tensor) and v.dim() > 0 for v in named_values(group).values())
        for i, p in enumerate(group["params"]):
            state = {key: value for key, value in optimizer.state.get(p, {}).items() if value is not None}
            tensors = tuple(key for key, value in state.items() if _is_tensor_state(key, value, p))
            scalars = tuple((key, float(value)) for key, value in state.items() if key not in tensors)
            kind = (g, scalars, tensors, p.dtype, p.device, i if shaped else -1)
            sizes[kind] = sizes.get(kind, 0) + p.numel()
            shares.setdefault((*kind, sizes[kind] // LARGEST), []).append(p)
    return shares


def named_values(group: Group) -> dict[str, Any]:
    """All of a param group's entries by the names rules use: ``betas`` becomes ``beta1``, ``beta2``."""
    values = {name: value for name, value in group.items() if name != "params"}
    for name in [name for name, value in values.items() if isinstance(value, (tuple, list))]:
        for i, value in enumerate(values.pop(name), start=1):
            values[f"{name.removesuffix('s')}{i}"] = value
    return values


def read_value(group: Group, name: str) -> Any:
    """One entry by the name rules use, or ``None``."""
    if name in group:
        return group[name]
    entries = group.get(name[:-1] + "s", ())
    return entries[int(name[-1]) - 1] if isinstance(entries, (tuple, list)) and entries else None


def write_value(group: Group, name: str, value: Tensor) -> None:
    """Put a tuned value where the optimizer reads it, as the kind of thing that stands there."""
    if name in group:
        group[name] = _like(group[name], value)
        return
    key, place = name[:-1] + "s", int(name[-1]) - 1
    entries = list(group[key])
    entries[place] = _like(entries[place], value)
    group[key] = tuple(entries)


def _like(old: Any, value: Tensor) -> Any:
    if isinstance(old, Tensor):
        return old.copy_(value)
    return float(value)


def _is_tensor_state(key: str, value: Any, p: nn.Parameter) -> bool:
    return isinstance(value, Tensor) and value.shape == p.shape and key != "step"


def _joined(optimizer: torch.optim.Optimizer, key: Any, members: list[nn.Parameter]) -> Joined:
    group, scalars, kinds = key[:3]
    state = {kind: _join([optimizer.state[p][kind] for p in members]) for kind in kinds}
    return Joined(group, members, _join([p.detach() for p in members]), state, dict(scalars))


def _join(tensors: Sequence[Tensor]) -> Tensor:
    """A copy, end to end in one vector; a single tensor keeps its shape. Half precision is widened: rules square small
    numbers. Of what is spread over ranks, this one's part."""
    tensors = [local(t) for t in tensors]
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    if len(tensors) == 1:
        return tensors[0].to(wide, copy=True)
    return torch.cat([t.reshape(-1) for t in tensors]).to(wide)
