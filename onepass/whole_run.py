"""What a change of each value has done since the run began, kept for a tuner from hyper step to hyper step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from onepass.entries import Used
from onepass.hyperparameters import TRANSFORMS, Hyperparameter
from onepass.linearise import Piece
from onepass.sensitivity import Product, Sensitivity, agreed, carried_on, ramp

Layout = list[list[str]]  # names of parameters, piece by piece


class WholeRun:
    """Sensitivities of one run, in raw space. They begin anew where other parameters are stepped than before."""

    def __init__(self, *, through_state: bool) -> None:
        self._through_state = through_state
        self._kept: dict[Hyperparameter, list[Sensitivity]] = {}
        self._layout: Layout = []
        self._age = 0

    def forget(self) -> None:
        """The run went back, or something was not finite: its past says nothing about how it goes on."""
        self._kept, self._age = {}, 0

    @torch.no_grad()
    def carry_on(self, pieces: Sequence[Piece], groups: Sequence[int], used: Sequence[Used], gradient: Product) -> None:
        """One step further. ``groups``: of each piece; ``gradient``: as ``sensitivity.carried_on`` takes it."""
        kept, found = ramp(self._age), {}
        for h in dict.fromkeys(entry.hyperparameter for entry in used if entry.hyperparameter.value.numel() == 1):
            old = self._kept.get(h) or [{"weights": torch.zeros_like(piece.weights)} for piece in pieces]
            before = [{key: kept * tensor for key, tensor in one.items()} for one in old]
            seeds = [_seeds(h, group, used) for group in groups]
            found[h] = carried_on(pieces, before, seeds, gradient, through_state=self._through_state)
        self._kept, self._age = found, self._age + 1  # only now: a kernel may have refused in between

    def begin_anew_unless(self, layout: Layout) -> None:
        if layout != self._layout:
            self.forget()
            self._layout = layout

    @torch.no_grad()
    def agreed(self, near: Mapping[Hyperparameter, Tensor], valid_gradient: Sequence[Tensor]) -> dict[Any, Tensor]:
        """The derivatives of the look-back series, in natural units, replaced by those through the whole run."""
        result = dict(near)
        for h, pieces in self._kept.items():
            far = sum((g * one["weights"]).sum().double() for g, one in zip(valid_gradient, pieces, strict=True))
            natural = (torch.as_tensor(far) / _slope(h)).to(near[h]).reshape(near[h].shape)
            # What is not finite must be seen by whoever takes the step.
            result[h] = agreed(natural, near[h]) if bool(natural.isfinite()) else natural
        return result

    def state_dict(self, hyperparameters: Sequence[Hyperparameter]) -> dict[str, Any]:
        kept = {i: self._kept[h] for i, h in enumerate(hyperparameters) if h in self._kept}
        return {"kept": kept, "layout": self._layout, "age": self._age}

    def load_state_dict(self, state: Mapping[str, Any], hyperparameters: Sequence[Hyperparameter]) -> None:
        self._kept = {
            hyperparameters[i]: [{key: tensor.clone() for key, tensor in one.items()} for one in pieces]
            for i, pieces in state["kept"].items()
        }
        self._layout, self._age = state["layout"], state["age"]


def _seeds(h: Hyperparameter, group: int, used: Sequence[Used]) -> dict[str, Tensor]:
    """How fast a group's entries change with the raw value."""
    mine = [entry for entry in used if entry.group == group and entry.hyperparameter is h]
    return {entry.name: (entry.factor * _slope(h)).to(entry.value).reshape(entry.value.shape) for entry in mine}


def _slope(h: Hyperparameter) -> Tensor:
    return TRANSFORMS[h.transform].slope(h.value.double())
