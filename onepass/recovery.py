"""The guard at work: keeps a healthy point of the run, and takes the run back to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onepass.distributed import local
from onepass.evaluation import Evaluation
from onepass.guard import Guard, Health, Verdict, on_probation
from onepass.hyperparameters import Hyperparameter
from onepass.snapshot import Joined

# Set to zero on the way back: what pushed the run over the edge must not push again.
MOMENTA = ("momentum_buffer", "exp_avg")


class Point(NamedTuple):
    """Weights and optimizer state before some step, the hyperparameters in use there, and the model's buffers."""

    step: int
    before: list[Joined]
    values: list[Tensor]
    buffers: list[Tensor]

    def weights(self) -> dict[nn.Parameter, Tensor]:
        return {
            p: view
            for joined in self.before
            for p, view in zip(joined.parameters, joined.views(joined.weights), strict=True)
        }

    @torch.no_grad()
    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Put weights, buffers and optimizer state back, at rest; the hyperparameters are the caller's."""
        for p, weights in self.weights().items():
            local(p).copy_(weights)
        for joined in self.before:
            for p in joined.parameters:
                _restore_numbers(optimizer.state.get(p, {}), joined)
            for key, value in joined.state.items():
                for p, view in zip(joined.parameters, joined.views(value), strict=True):
                    local(optimizer.state[p][key]).copy_(torch.zeros_like(view) if key in MOMENTA else view)
        for buffer, saved in zip(model.buffers(), self.buffers, strict=True):
            buffer.copy_(saved)


class Recovery:
    """Watches one run for a tuner. ``rates`` are the hyperparameters that go down when the run goes back."""

    def __init__(
        self,
        guard: Guard,
        evaluation: Evaluation,
        optimizer: torch.optim.Optimizer,
        hyperparameters: Sequence[Hyperparameter],
        rates: Sequence[Hyperparameter],
        first_loss: float,
    ) -> None:
        self._guard, self._evaluation, self._optimizer = guard, evaluation, optimizer
        self._hyperparameters, self._rates = hyperparameters, rates
        self._health = guard.start(first_loss)
        self._point: Point | None = None

    def has_point(self) -> bool:
        return self._point is not None

    def on_probation(self) -> bool:
        return bool(on_probation(self._health))

    def keep(self, step: int, before: list[Joined]) -> None:
        """Remember this point as healthy."""
        values = [h.value.detach().clone() for h in self._hyperparameters]
        buffers = [buffer.clone() for buffer in self._evaluation.model.buffers()]
        self._point = Point(step, before, values, buffers)

    def judge(self, loss: float, batch: Any, *, remember: bool = True) -> Verdict:
        """What to make of the validation loss of a batch. One that looks as bad at the point says nothing."""
        health, verdict = self._guard.judge(self._health, loss)
        if not verdict.healthy and not self._guard.trusts(self._health, loss, self._loss_at_point(batch)):
            return Verdict(healthy=True, safe=False)
        if remember:
            self._health = health
        return verdict

    @torch.no_grad()
    def go_back(self, loss: float, *, again: bool) -> tuple[str, int]:
        """To the point, with lower rates. The answer says so, and which step that was.

        ``again``: this has just been done and was not enough, so something else must be wrong: all other
        hyperparameters then go back to where the run began.
        """
        assert self._point is not None
        down = 10**-self._guard.backoff
        self._point.restore(self._evaluation.model, self._optimizer)
        for h, value in zip(self._hyperparameters, self._point.values, strict=True):
            h.set(value * down if h in self._rates else h.start if again else value)
        # Should this not be enough, the next return starts from here.
        self._point = self._point._replace(values=[h.value.clone() for h in self._hyperparameters])
        did = f"validation loss {loss:g}: went back to step {self._point.step}, lr x {down:.3g}"
        return did, self._point.step

    def state_dict(self) -> dict[str, Any]:
        if self._point is None:
            return {"health": list(self._health), "point": None}
        names = {p: name for name, p in self._evaluation.model.named_parameters()}
        before = [{**j._asdict(), "parameters": [names[p] for p in j.parameters]} for j in self._point.before]
        return {"health": list(self._health), "point": {**self._point._asdict(), "before": before}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._health, point = Health(*state["health"]), state["point"]
        if point is None:
            self._point = None
            return
        parameters = dict(self._evaluation.model.named_parameters())
        before = [_beside([parameters[name] for name in j["parameters"]], Joined(**j)) for j in point["before"]]
        self._point = Point(**{**point, "before": before})

    def _loss_at_point(self, batch: Any) -> float:
        assert self._point is not None
        weights = self._point.weights()
        names = self._evaluation.names_of(list(weights))
        lent = {name: w.to(p.dtype) for name, (p, w) in zip(names, weights.items(), strict=True)}
        return float(self._evaluation.valid_loss(batch, lent))


def _beside(parameters: list[nn.Parameter], joined: Joined) -> Joined:
    """On the device of the parameters: a checkpoint may have come by way of another."""
    device = parameters[0].device
    state = {key: tensor.to(device) for key, tensor in joined.state.items()}
    return joined._replace(parameters=parameters, weights=joined.weights.to(device), state=state)


def _restore_numbers(state: dict[str, Any], joined: Joined) -> None:
    """The numbers of one parameter's state (``step``), and nothing that was made later."""
    for key in set(state) - {*joined.state, *joined.scalars}:
        del state[key]
    for key, number in joined.scalars.items():
        state[key] = state[key].fill_(number) if isinstance(state[key], Tensor) else number
