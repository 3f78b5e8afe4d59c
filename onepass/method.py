"""How replicas are trained and tuned, the same for all; and their losses, always with the same random numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.clipping import clipped, through_clipping
from onepass.estimator import ESTIMATORS as OF_A_TUNER
from onepass.guard import Guard
from onepass.hyperparameters import TRANSFORMS
from onepass.replicas import Named, State, Weights, selected
from onepass.rules import Rule
from onepass.stack import Stack
from onepass.starts import private_random


class Taken(NamedTuple):
    """The batch of a weight step, how many steps came before it, and the first replica of those that take it."""

    step: int
    batch: Any
    first: int = 0


ESTIMATORS = {
    **OF_A_TUNER,
    "product": "minus the product of a new gradient and the last, for lr alone, in raw space as it is",
}


@dataclass(frozen=True)
class Method:
    """How replicas are trained and tuned, the same for all of them.

    Attributes:
        switches: entries of the rule that are one number, or yes or no, for everybody.
        unroll: real steps to differentiate through, instead of the look-back series.
        estimator: a name from ``ESTIMATORS``.
        curvature: a name from ``interval.PRODUCTS``.
        clip_norm: what the gradient of each replica is clipped to; ``None`` for as it is.
        hyper: rule and settings of the hyper-optimizer, by tuned name.
        per_replica: whether training and validation batches have an axis of replicas of their own.
        dropout: the seed of random numbers in training; ``None`` where there are none.
        idle: parameters that the loss does not use.
    """

    stack: Stack
    rule: Rule
    switches: Mapping[str, Any]
    tune: tuple[str, ...]
    interval: int
    lookback: int
    through_state: bool
    unroll: int | None
    guard: Guard | None
    hyper: Mapping[str, tuple[Rule, Mapping[str, Any]]]
    per_replica: tuple[bool, bool] = (False, False)
    dropout: int | None = None
    idle: tuple[str, ...] = ()
    estimator: str = "series"
    curvature: str = "exact"
    clip_norm: float | None = None

    def natural(self, state: State, name: str) -> Tensor:
        return TRANSFORMS[self.rule.tunable[name]].to_natural(state.raw[name]).clamp(*state.limits[name][1:])

    def raw(self, state: State, name: str, natural: Tensor) -> Tensor:
        return TRANSFORMS[self.rule.tunable[name]].to_raw(natural.clamp(*state.limits[name][1:]))

    def values(self, state: State) -> Named:
        """What the next step uses, in the type of the weights."""
        found = {**state.fixed, **{name: self.natural(state, name) for name in self.tune}}
        return {name: value.to(self.stack.dtype) for name, value in found.items()}

    def leaves(self, weights: Tensor) -> list[Tensor]:
        """Weights to differentiate by, one stacked tensor a parameter."""
        return [view.requires_grad_() for view in self.stack.views(weights.detach())]

    def losses(self, views: Sequence[Tensor], buffers: Named, taken: Taken) -> Tensor:
        """The training loss of each replica; buffers are updated in place."""
        with self._same_random("dropout", taken.step, taken.first):
            return self.stack.losses(views, buffers, taken.batch, per_replica=self.per_replica[0])

    def valid_losses(self, views: Sequence[Tensor], buffers: Named, batch: Any) -> Tensor:
        with self._same_random("valid"):
            return self.stack.valid_losses(views, buffers, batch, per_replica=self.per_replica[1])

    @torch.no_grad()
    def valid_loss(self, now: Weights, batch: Any) -> Tensor:
        return self.valid_losses(self.stack.views(now.weights), now.buffers, batch).double()

    def clipped(self, gradients: Tensor) -> Tensor:
        """Rows of gradients, as a weight step takes them."""
        return gradients if self.clip_norm is None else clipped(gradients, self.clip_norm)

    def through_clipping(self, cotangents: Tensor, gradients: Tensor) -> Tensor:
        """From what a weight step takes back to the gradients of the loss."""
        if self.clip_norm is None:
            return cotangents
        return through_clipping(cotangents, gradients, self.clip_norm)

    def _same_random(self, *purpose: object) -> AbstractContextManager[None]:
        """The same numbers whenever a step is evaluated: now, on the way back, or when the program is run again."""
        return nullcontext() if self.dropout is None else private_random(self.dropout, *purpose)


def idle_parameters(method: Method, state: State, taken: Taken) -> tuple[str, ...]:
    """Names of those that the loss does not use: no gradient, so no step, not even of weight decay."""
    one = torch.zeros(1, dtype=torch.int64, device=state.now.weights.device)
    now, batch = selected(state.now, one), selected(taken.batch, one) if method.per_replica[0] else taken.batch
    views = method.leaves(now.weights)
    losses = method.stack.losses(views, copied(now.buffers), batch, per_replica=method.per_replica[0])
    found = torch.autograd.grad(losses.sum(), views, allow_unused=True) if losses.requires_grad else [None] * len(views)
    if all(gradient is None for gradient in found):
        raise ValueError("loss must depend on the parameters of the model, but its gradient reaches none of them")
    return tuple(name for name, gradient in zip(method.stack.names, found, strict=True) if gradient is None)


def gradient(loss: Tensor, views: Sequence[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(loss.sum(), list(views), allow_unused=True)
    return [torch.zeros_like(v) if f is None else f for f, v in zip(found, views, strict=True)]


def copied(tensors: Named) -> Named:
    return {name: tensor.clone() for name, tensor in tensors.items()}
