"""A point that a diverged run can go back to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onepass.snapshot import Joined

# Set to zero on the way back: what pushed the run over the edge must not push again.
MOMENTA = ("momentum_buffer", "exp_avg")


class Point(NamedTuple):
    """Weights and optimizer state before some step, the hyperparameters in use there, and the model's buffers."""

    step: int
    before: list[Joined]
    values: list[Tensor]
    buffers: list[Tensor]

    @torch.no_grad()
    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Put weights, buffers and optimizer state back, at rest; the hyperparameters are the caller's."""
        for joined in self.before:
            for p, weights in zip(joined.parameters, joined.views(joined.weights), strict=True):
                p.copy_(weights)
                _restore_numbers(optimizer.state.get(p, {}), joined)
            for key, value in joined.state.items():
                for p, view in zip(joined.parameters, joined.views(value), strict=True):
                    optimizer.state[p][key].copy_(torch.zeros_like(view) if key in MOMENTA else view)
        for buffer, saved in zip(model.buffers(), self.buffers, strict=True):
            buffer.copy_(saved)

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        names = {p: name for name, p in model.named_parameters()}
        before = [{**joined._asdict(), "parameters": [names[p] for p in joined.parameters]} for joined in self.before]
        return {**self._asdict(), "before": before}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], model: nn.Module) -> Point:
        parameters = dict(model.named_parameters())
        before = [
            Joined(**{**joined, "parameters": [parameters[name] for name in joined["parameters"]]})
            for joined in state["before"]
        ]
        return cls(**{**state, "before": before})


def _restore_numbers(state: dict[str, Any], joined: Joined) -> None:
    """The numbers of one parameter's state (``step``), and nothing that was made later."""
    for key in set(state) - {*joined.state, *joined.scalars}:
        del state[key]
    for key, number in joined.scalars.items():
        state[key] = state[key].fill_(number) if isinstance(state[key], Tensor) else number
