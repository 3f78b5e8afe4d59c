"""What a change of each value has done since the run began, kept for a tuner from hyper step to hyper step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from onepass.entries import Entry, Used
from onepass.hyperparameters import TRANSFORMS, Hyperparameter
from onepass.linearise import Piece
from onepass.sensitivity import FAR, Product, Sensitivity, agreed, carried_on, ramp, turn

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

    @torch.no_grad()
    def carry_on(self, pieces: Sequence[Piece], groups: Sequence[int], used: Sequence[Used], gradient: Product) -> None:
        """One step further, for the value whose turn it is.

        Args:
            groups: of each piece.
            gradient: as ``sensitivity.carried_on`` takes it.
        """
        for name, kept in self._kept.items():  # a checkpoint may have come by way of another device
            self._kept[name] = [_beside(piece, one) for piece, one in zip(pieces, kept, strict=True)]
        names = far_names(used)
        for place, name in enumerate(names):
            mine, earlier = turn(self._turns, place, len(names))
            if mine:
                old = self._kept.get(name) or [{"weights": torch.zeros_like(piece.weights)} for piece in pieces]
                before = [{key: ramp(earlier) * tensor for key, tensor in one.items()} for one in old]
                seeds = [_seeds(name, group, used) for group in groups]
                found = carried_on(pieces, before, seeds, gradient, through_state=self._through_state)
                self._kept[name] = found  # only now: a kernel may have refused in between
        self._turns += 1

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
        result = dict(near)
        for name in far_names(used):
            mine = {entry.group: entry.hyperparameter for entry in used if entry.name == name}
            kept = self._kept.get(name)
            far = dict.fromkeys(mine.values(), torch.zeros((), dtype=torch.float64))
            for i, group in enumerate(groups if kept else ()):
                if kept and group in mine:
                    work = (valid_gradient[i] * kept[i]["weights"]).sum().double()
                    far[mine[group]] = far[mine[group]].to(work.device) + work
            for h, slope in zip(far, self._total(list(far.values())), strict=True):
                natural = (slope / _slope(h).to(slope.device)).to(near[h]).reshape(near[h].shape)
                # What is not finite must be seen by whoever takes the step.
                result[h] = agreed(natural, near[h]) if bool(natural.isfinite()) else natural
        return result

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self._kept, "layout": self._layout, "turns": self._turns}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._kept = {
            name: [{key: tensor.clone() for key, tensor in one.items()} for one in pieces]
            for name, pieces in state["kept"].items()
        }
        self._layout, self._turns = state["layout"], state["turns"]


def far_names(entries: Iterable[Used | Entry]) -> list[str]:
    """Of tuned values, those to look at through the whole run; not those with a number for every weight."""
    scalar = {entry.name: entry.hyperparameter.value.numel() == 1 for entry in entries}
    return [name for name in FAR if scalar.get(name)]


def _beside(piece: Piece, one: Sensitivity) -> Sensitivity:
    return {key: tensor.to(piece.weights.device) for key, tensor in one.items()}


def _seeds(name: str, group: int, used: Sequence[Used]) -> dict[str, Tensor]:
    """How fast a group's entry changes with the raw value."""
    mine = next((entry for entry in used if entry.group == group and entry.name == name), None)
    if mine is None:
        return {}
    return {name: (mine.factor * _slope(mine.hyperparameter)).to(mine.value).reshape(mine.value.shape)}


def _slope(h: Hyperparameter) -> Tensor:
    return TRANSFORMS[h.transform].slope(h.value.double())
