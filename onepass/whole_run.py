"""What a change of each value has done since the run began, kept for a tuner from hyper step to hyper step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from onepass.entries import Entry, Used
from onepass.hyperparameters import TRANSFORMS, Hyperparameter
from onepass.linearise import Piece, at_once, dot
from onepass.sensitivity import FAR, Sensitivity, agreed, carried_by, fading, ramp, turn

Layout = list[list[str]]  # names of parameters, piece by piece
Total = Callable[[Sequence[Tensor]], list[Tensor]]  # of sums over the weights of this process, over all


class WholeRun:
    """Sensitivities of one run, in raw space. They begin anew where other parameters are stepped than before.

    Values of one name are moved together, in all param groups, so that groups cost nothing more; what comes of it in a
    group's own weights counts as the work of the group's own value. With one group, or tied values, that is exact;
    else it leaves out what a group does to the others' gradients, and its sum over the groups is still exact.
    """

    def __init__(self, total: Total = list, *, through_state: bool) -> None:
        self._total = total
        self._through_state = through_state
        self.forget()
        self._layout: Layout = []

    def forget(self) -> None:
        """The run went back, or something was not finite: its past says nothing about how it goes on."""
        self._kept: dict[str, list[Sensitivity]] = {}
        self._turns = 0
        # One a piece: learning rates at the last hyper step, and what has faded of a value's past since its turn.
        self._rates: Tensor | None = None
        self._faded: dict[str, Tensor] = {}

    @torch.no_grad()
    def weights(self, pieces: Sequence[Piece], used: Sequence[Used]) -> list[Tensor]:
        """How the weights before the step differ for the value whose turn it is, one a piece; or none, for no value."""
        for name, kept in self._kept.items():  # a checkpoint may have come by way of another device
            self._kept[name] = [_beside(piece, one) for piece, one in zip(pieces, kept, strict=True)]
        name, _ = self._turn(used)
        return [one["weights"] for one in self._kept.get(name) or _nothing(pieces)] if name else []

    @torch.no_grad()
    def carry_on(
        self, pieces: Sequence[Piece], groups: Sequence[int], used: Sequence[Used], changes: Iterable[Tensor]
    ) -> None:
        """One step further, for the value whose turn it is.

        Each new sensitivity takes the place of the old, piece by piece: together they are as large as weights and
        state. The share of the old that is kept is taken here: before, it would make a copy of all.

        Args:
            groups: of each piece.
            changes: of the training gradients that the step saw, along ``weights``.
        """
        self._fade(pieces)
        name, share = self._turn(used)
        self._turns += 1
        if not name:
            return
        kept = self._kept[name] = self._kept.get(name) or _nothing(pieces)
        left = self._left(name, len(pieces))
        for i, (piece, group, change) in enumerate(zip(pieces, groups, changes, strict=True)):
            seeds, mine = _seeds(name, group, used), share * left[i]
            kept[i] = _carried(piece, kept[i], mine, seeds, change, through_state=self._through_state)
        self._faded.pop(name, None)

    def _fade(self, pieces: Sequence[Piece]) -> None:
        """Not the sensitivities, which are large, but a number beside them."""
        rates = torch.tensor([_rate(piece) for piece in pieces], dtype=torch.float64)
        if self._rates is not None:
            less = fading(rates, self._rates)
            self._faded = {name: self._faded.get(name, 1.0) * less for name in self._kept}
        self._rates = rates

    def _left(self, name: str, pieces: int) -> list[float]:
        """What of a value's past still counts, piece by piece."""
        return self._faded[name].tolist() if name in self._faded else [1.0] * pieces

    def _turn(self, used: Sequence[Used]) -> tuple[str, float]:
        """Whose turn it is, and what is kept of its sensitivities."""
        names = far_names(used)
        turns = [(name, turn(self._turns, place, len(names))) for place, name in enumerate(names)]
        return next(((name, ramp(earlier)) for name, (mine, earlier) in turns if mine), ("", 0.0))

    def begin_anew_unless(self, layout: Layout) -> None:
        if layout != self._layout:
            self.forget()
            self._layout = layout

    @torch.no_grad()
    def agreed(
        self,
        near: Mapping[Hyperparameter, Tensor],
        valid_gradient: Sequence[Tensor],
        groups: Sequence[int],
        used: Sequence[Used],
    ) -> dict[Hyperparameter, Tensor]:
        """The derivatives of the look-back series, in natural units, replaced by those through the whole run."""
        found = self._far(valid_gradient, groups, used)
        if not found:
            return dict(near)
        far = _numbers(self._total(list(found.values()))) / _numbers(_slope(h) for h in found)
        # What is not finite must be seen by whoever takes the step.
        taken = torch.where(far.isfinite(), agreed(far, _numbers(near[h] for h in found)), far)
        return {**near, **{h: one.to(near[h]).reshape(near[h].shape) for h, one in zip(found, taken, strict=True)}}

    def _far(
        self, valid_gradient: Sequence[Tensor], groups: Sequence[int], used: Sequence[Used]
    ) -> dict[Hyperparameter, Tensor]:
        """What the change of each raw value has done to the validation loss, in the weights of this process."""
        found: dict[Hyperparameter, Tensor] = {}
        for name in far_names(used):
            mine = {entry.group: entry.hyperparameter for entry in used if entry.name == name}
            found |= dict.fromkeys(mine.values(), torch.zeros((), dtype=torch.float64))
            kept = self._kept.get(name, ())
            for slope, one, left, group in zip(valid_gradient, kept, self._left(name, len(kept)), groups, strict=False):
                if group in mine:
                    work = left * dot(slope, one["weights"])
                    found[mine[group]] = found[mine[group]].to(work.device) + work
        return found

    def state_dict(self) -> dict[str, Any]:
        kept = {name: list(pieces) for name, pieces in self._kept.items()}  # whose places new ones take
        past = {"kept": kept, "rates": self._rates, "faded": dict(self._faded)}
        return {**past, "layout": self._layout, "turns": self._turns}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._kept = {
            name: [{key: tensor.clone() for key, tensor in one.items()} for one in pieces]
            for name, pieces in state["kept"].items()
        }
        self._layout, self._turns = state["layout"], state["turns"]
        self._rates, self._faded = state["rates"], dict(state["faded"])


def far_names(entries: Iterable[Used | Entry]) -> list[str]:
    """Of tuned values, those to look at through the whole run; not those with a number for every weight."""
    every = [(entry.name, entry.hyperparameter.value.numel()) for entry in entries]
    spread = {name for name, numbers in every if numbers > 1}
    return [name for name in FAR if name in {name for name, _ in every} - spread]


def _rate(piece: Piece) -> float:
    """On average, where every weight has its own; a rule may have none."""
    return float(torch.as_tensor(piece.values.get("lr", 1.0)).double().mean())


def _carried(
    piece: Piece, old: Sensitivity, share: float, seeds: dict[str, Tensor], change: Tensor, *, through_state: bool
) -> Sensitivity:
    """A part of the piece at a time, since the rule and its derivative compute many times as much on the way."""
    every, shape = [*piece.values.values(), *seeds.values()], piece.weights.shape
    shaped = any(isinstance(value, Tensor) and value.dim() > 0 for value in every)
    size = piece.weights.numel() if shaped else at_once(piece.weights)
    found = []
    step = {"weights": piece.weights, "gradient": piece.gradient, "change": change}
    for mine, state, before in zip(*(_cut(tensors, shape, size) for tensors in (step, piece.state, old)), strict=True):
        part = piece._replace(weights=mine["weights"], gradient=mine["gradient"], state=state)
        before = {key: share * tensor for key, tensor in before.items()}
        found.append(carried_by(part, before, seeds, share * mine["change"], through_state=through_state))
    return {key: _whole([one.pop(key) for one in found], shape) for key in list(found[0])}


def _whole(parts: Sequence[Tensor], shape: torch.Size) -> Tensor:
    """Of a number, every part has the same."""
    return torch.cat(list(parts)).view(shape) if len(parts) > 1 and parts[0].dim() else parts[0]


def _cut(tensors: Mapping[str, Any], shape: torch.Size, size: int) -> list[dict[str, Any]]:
    """Those of this shape in parts of a size; the others, numbers, in every part."""
    if shape.numel() <= size:
        return [dict(tensors)]
    count = -(-shape.numel() // size)
    parts = {
        key: value.flatten().split(size) if isinstance(value, Tensor) and value.shape == shape else [value] * count
        for key, value in tensors.items()
    }
    return [{key: cut[i] for key, cut in parts.items()} for i in range(count)]


def _nothing(pieces: Sequence[Piece]) -> list[Sensitivity]:
    return [{"weights": torch.zeros_like(piece.weights)} for piece in pieces]


def _beside(piece: Piece, one: Sensitivity) -> Sensitivity:
    return {key: tensor.to(piece.weights.device) for key, tensor in one.items()}


def _seeds(name: str, group: int, used: Sequence[Used]) -> dict[str, Tensor]:
    """How fast a group's entry changes with the raw value."""
    mine = next((entry for entry in used if entry.group == group and entry.name == name), None)
    if mine is None:
        return {}
    return {name: (mine.factor * _slope(mine.hyperparameter)).to(mine.value).reshape(mine.value.shape)}


def _numbers(tensors: Iterable[Tensor]) -> Tensor:
    """Wherever they are, beside each other."""
    return torch.tensor([float(tensor) for tensor in tensors], dtype=torch.float64)


def _slope(h: Hyperparameter) -> Tensor:
    return TRANSFORMS[h.transform].slope(h.value.double())
