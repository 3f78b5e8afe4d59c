"""One interval of many trainings at once, as pure functions: plain steps, then one hyper step, and the guard.

The rules, the series and the guard are those of the ``Tuner``: they are elementwise, or take any Hessian product, and
so do not care that a leading axis runs over replicas. The sum of all replicas' losses has the gradients of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from onepass.curvature import exact
from onepass.guard import Guard, Verdict, on_probation, probation_step
from onepass.hypergradient import look_back, unrolled
from onepass.hyperparameters import TRANSFORMS
from onepass.linearise import Piece
from onepass.recovery import MOMENTA
from onepass.replicas import Named, Point, Record, State, Weights, chosen, completed, fresh, selected
from onepass.rules import Rule
from onepass.stack import Stack
from onepass.starts import private_random


class Taken(NamedTuple):
    """The batch of a weight step, how many steps came before it, and the first replica of those that take it."""

    step: int
    batch: Any
    first: int = 0


@dataclass(frozen=True)
class Method:
    """How replicas are trained and tuned, the same for all of them.

    Attributes:
        switches: entries of the rule that are one number, or yes or no, for everybody.
        unroll: real steps to differentiate through, instead of the look-back series.
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

    def natural(self, state: State, name: str) -> Tensor:
        return TRANSFORMS[self.rule.tunable[name]].to_natural(state.raw[name]).clamp(*state.limits[name][1:])

    def raw(self, state: State, name: str, natural: Tensor) -> Tensor:
        return TRANSFORMS[self.rule.tunable[name]].to_raw(natural.clamp(*state.limits[name][1:]))

    def values(self, state: State) -> Named:
        """What the next step uses, in the type of the weights."""
        found = {**state.fixed, **{name: self.natural(state, name) for name in self.tune}}
        return {name: value.to(self.stack.dtype) for name, value in found.items()}


class Steps(Protocol):
    """What happens in an interval, by whatever means it is computed."""

    method: Method

    def plain(self, state: State, values: Named, taken: Taken) -> State: ...

    def hyper(self, state: State, values: Named, taken: Sequence[Taken], valid: Any) -> tuple[State, Record]: ...

    def probation(self, state: State, valid: Any) -> tuple[State, Tensor]: ...

    def valid_loss(self, now: Weights, valid: Any) -> Tensor: ...


def advance(
    steps: Steps, state: State, batches: Sequence[Taken], valid: Any, *, earlier: Sequence[Taken] = (), watch: bool
) -> tuple[State, Record]:
    """As many weight steps as there are batches, at most to the end of an interval, which brings a hyper step.

    Args:
        valid: the validation batch; ``None`` where nothing is tuned and nobody wants to know.
        earlier: the steps before, as far as hypergradients are taken through them.
        watch: some replicas are on probation, so that their validation loss is looked at more often.
    """
    method, values = steps.method, steps.method.values(state)
    returned = torch.zeros(len(state.now.weights), dtype=torch.int64, device=state.now.weights.device)
    for taken in batches:
        since = (taken.step + 1) % method.interval
        if since == 0 and method.tune:
            state, record = steps.hyper(state, values, [*earlier, *batches], valid)
            return _restarted(_scaled(state)), record._replace(returned=record.returned + returned)
        state = steps.plain(state, values, taken)
        if watch and probation_step(since):
            state, back = steps.probation(state, valid)
            values, returned = method.values(state), returned + back
    if since == 0:
        state = _scaled(state)
    loss = torch.full_like(returned, torch.nan, dtype=torch.float64)
    if valid is not None:
        loss = steps.valid_loss(state.now, valid)
    return state, _record(method, state, loss, {}, returned, torch.zeros_like(returned))


def resting(method: Method, state: State, *, skipped: bool) -> Record:
    """The record of replicas that take no steps any more; ``skipped``: nor the hyper step that is due."""
    none = torch.zeros(len(state.now.weights), dtype=torch.int64, device=state.now.weights.device)
    lost = torch.full_like(none, torch.nan, dtype=torch.float64)
    return _record(method, state, lost, {}, none, none + int(skipped and bool(method.tune)))


def plain_step(method: Method, state: State, values: Named, taken: Taken) -> State:
    now = state.now
    buffers = _copied(now.buffers)
    views = _leaves(method, now.weights)
    with _same_dropout(method, taken):
        losses = method.stack.losses(views, buffers, taken.batch, per_replica=method.per_replica[0])
    gradient = method.stack.join(_gradient(losses, views))
    return _remembered(method, state, values)._replace(now=_stepped(method, now, values, gradient, buffers))


def hyper_step(method: Method, state: State, values: Named, taken: Sequence[Taken], valid: Any) -> tuple[State, Record]:
    """The last weight step of an interval, and a step of the hyperparameters."""
    before = state.now
    state = _remembered(method, state, values)
    piece, hessian, buffers = linearised(method, before, values, taken[-1], with_hessian=method.unroll is None)
    now = _stepped(method, before, values, piece.gradient, buffers)
    loss, valid_gradient = _validation(method, now, valid)
    state, back, again = _judged(method, state._replace(now=now), before, loss, valid)
    if method.unroll is None:
        options = {"lookback": method.lookback, "through_state": method.through_state}
        found = look_back([piece], [valid_gradient], hessian, **options)[0][0]  # type: ignore[arg-type]
    else:
        window = Window(method, state.window, taken[-len(state.window) :])
        found = unrolled(window, [valid_gradient], window.hessians)[0][0]
    with torch.no_grad():
        slopes = {name: _raw_slope(method, state, name, found[name]) for name in method.tune}
        finite = torch.stack([loss.isfinite(), *(slope.isfinite().all(1) for slope in slopes.values())]).all(0)
        state = _moved(method, state, slopes, finite & ~back)
        state = sent_back(method, state, back, again)
        taken_from = {name: chosen(back, torch.full_like(slope, torch.nan), slope) for name, slope in slopes.items()}
        return state, _record(method, state, loss, taken_from, back.long(), (~finite & ~back).long())


def linearised(
    method: Method, now: Weights, values: Named, taken: Taken, *, with_hessian: bool = True
) -> tuple[Piece, Callable[..., list[Tensor]] | None, Named]:
    """A step as it is differentiated: the rule's piece, products with the Hessian at ``now``, and the new buffers."""
    buffers, views = _copied(now.buffers), _leaves(method, now.weights)

    def loss(views: Sequence[Tensor]) -> Tensor:
        with _same_dropout(method, taken):
            return method.stack.losses(views, buffers, taken.batch, per_replica=method.per_replica[0]).sum()

    def piece(gradient: Sequence[Tensor]) -> Piece:
        every = {**method.switches, **values}
        return Piece(method.rule.update, every, now.weights, stack.join(gradient), now.optimizer, method.tune)

    stack = method.stack
    if not with_hessian or (method.unroll is None and method.lookback == 1):
        return piece(_gradient(loss(views), views)), None, buffers
    products = exact(loss, views)
    return piece(products.gradient), lambda v: [stack.join(products.hessian(stack.views(v[0])))], buffers


class Window(Sequence[Sequence[Piece]]):
    """The last real steps, evaluated anew one by one on the way back: only their weights and states were kept."""

    def __init__(self, method: Method, steps: Sequence[tuple[Weights, Named]], taken: Sequence[Taken]) -> None:
        self._method, self._steps, self._taken = method, steps, taken
        self._at: tuple[int, Any] = (-1, None)
        self.hessians = _Hessians(self)

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, t: Any) -> Any:
        return [self.evaluated(t % len(self))[0]]

    def evaluated(self, t: int) -> tuple[Piece, Callable[..., list[Tensor]] | None, Named]:
        if self._at[0] != t:
            self._at = (-1, None)  # makes room before the next graph is built
            now, values = self._steps[t]
            self._at = (t, linearised(self._method, now, values, self._taken[t], with_hessian=t > 0))
        return self._at[1]  # type: ignore[no-any-return]


class _Hessians(Sequence[Any]):
    def __init__(self, window: Window) -> None:
        self._window = window

    def __len__(self) -> int:
        return len(self._window)

    def __getitem__(self, t: Any) -> Any:
        return self._window.evaluated(t)[1]


# --- the guard ---


@torch.no_grad()
def probation(method: Method, state: State, valid: Any) -> tuple[State, Tensor]:
    """Between hyper steps: those on probation go back if they are about to be lost. Also returns who did."""
    assert state.health is not None
    on = on_probation(state.health)
    verdict = _verdict(method, state, valid_loss(method, state.now, valid), valid)[1]
    back = on & ~verdict.healthy
    return sent_back(method, state, back, on), back


@torch.no_grad()
def sent_back(method: Method, state: State, who: Tensor, again: Tensor) -> State:
    """Some replicas go back to their point, at rest and with a lower rate.

    ``again``: who has just been there, so that something else must be wrong: their other values then begin anew. Back
    at the very start, an SGD with dampening finds a momentum of zero, where the ``Tuner``'s has none yet.
    """
    if method.guard is None or state.point is None:
        return state
    point = state.point
    old = completed(point.now.optimizer, state.now.optimizer, method.rule)
    at_rest = {key: torch.zeros_like(value) if key in MOMENTA else value for key, value in old.items()}
    raw = {}
    for name in method.tune:
        there = method.natural(state._replace(raw=point.raw), name)
        if name == "lr":
            there = there * 10**-method.guard.backoff
        else:
            there = chosen(again, state.limits[name].start.expand_as(there), there)
        raw[name] = chosen(who, method.raw(state, name, there), state.raw[name])
    anew = {name: fresh(own, method.hyper[name][0]) for name, own in state.hyper.items()}
    return state._replace(
        now=chosen(who, point.now._replace(optimizer=at_rest), state.now),
        raw=raw,
        hyper=chosen(who, anew, state.hyper),
        # Should this not be enough, the next return starts from here.
        point=Point(point.now._replace(optimizer=old), chosen(who, raw, point.raw)),
    )


@torch.no_grad()
def _judged(method: Method, state: State, before: Weights, loss: Tensor, valid: Any) -> tuple[State, Tensor, Tensor]:
    """The state with the guard's new memory; who has to go back; and who has just been back."""
    if method.guard is None or state.health is None or state.point is None:
        nobody = torch.zeros_like(loss, dtype=torch.bool)
        return state, nobody, nobody
    again = on_probation(state.health)
    health, verdict = _verdict(method, state, loss, valid)
    optimizers = [
        completed(one, state.now.optimizer, method.rule) for one in (before.optimizer, state.point.now.optimizer)
    ]
    here = Point(Weights(before.weights, state.now.buffers, optimizers[0]), state.raw)
    there = Point(state.point.now._replace(optimizer=optimizers[1]), state.point.raw)
    return state._replace(health=health, point=chosen(verdict.safe, here, there)), ~verdict.healthy, again


def _verdict(method: Method, state: State, loss: Tensor, valid: Any) -> tuple[Any, Verdict]:
    """A batch that cannot be evaluated at the last healthy point either is no sign of divergence."""
    assert method.guard is not None
    assert state.health is not None
    assert state.point is not None
    broken = ~loss.isfinite() & ~valid_loss(method, state.point.now, valid).isfinite()
    health, verdict = method.guard.judge(state.health, loss)
    return chosen(broken, state.health, health), Verdict(verdict.healthy | broken, verdict.safe & ~broken)


# --- small steps ---


@torch.no_grad()
def _stepped(method: Method, now: Weights, values: Named, gradient: Tensor, buffers: Named) -> Weights:
    update, optimizer = method.rule.update({**method.switches, **values}, now.weights, gradient, now.optimizer)
    if method.idle:
        update = method.stack.only([name for name in method.stack.names if name not in method.idle], update)
    return Weights(now.weights - update, buffers, optimizer)


@torch.no_grad()
def _moved(method: Method, state: State, slopes: Named, usable: Tensor) -> State:
    """One step of the hyper-optimizer, for the replicas whose hypergradients can be used."""
    raw, hyper = dict(state.raw), dict(state.hyper)
    for name, slope in slopes.items():
        rule, settings = method.hyper[name]
        update, after = rule.update(settings, raw[name], slope, hyper[name])
        ends = [method.raw(state, name, end) for end in state.limits[name][1:]]
        inside = (raw[name] - update).clamp(torch.minimum(*ends), torch.maximum(*ends))
        raw[name] = chosen(usable, inside, raw[name])
        hyper[name] = chosen(usable, after, completed(hyper[name], after, rule))
    return state._replace(raw=raw, hyper=hyper)


def _raw_slope(method: Method, state: State, name: str, derivative: Tensor) -> Tensor:
    natural = method.natural(state, name)
    return derivative.to(natural.dtype) * TRANSFORMS[method.rule.tunable[name]].slope(natural)


def _remembered(method: Method, state: State, values: Named) -> State:
    if method.unroll is None:
        return state
    return state._replace(window=[*state.window, (state.now, values)][-method.unroll :])


def _restarted(state: State) -> State:
    if state.begin is None:
        return state
    return state._replace(now=state.begin._replace(buffers=_copied(state.begin.buffers)), window=[])


def _scaled(state: State) -> State:
    moved = {name: (state.fixed[name] * by).clamp(*state.limits[name][1:]) for name, by in state.factors.items()}
    return state._replace(fixed={**state.fixed, **moved})


def _validation(method: Method, now: Weights, batch: Any) -> tuple[Tensor, Tensor]:
    views = _leaves(method, now.weights)
    with _same_dropout(method, None):
        losses = method.stack.valid_losses(views, now.buffers, batch, per_replica=method.per_replica[1])
    return losses.detach().double(), method.stack.join(_gradient(losses.sum(), views))


def idle_parameters(method: Method, state: State, taken: Taken) -> tuple[str, ...]:
    """Names of those that the loss does not use: no gradient, so no step, not even of weight decay."""
    one = torch.zeros(1, dtype=torch.int64, device=state.now.weights.device)
    now, batch = selected(state.now, one), selected(taken.batch, one) if method.per_replica[0] else taken.batch
    views = _leaves(method, now.weights)
    losses = method.stack.losses(views, _copied(now.buffers), batch, per_replica=method.per_replica[0])
    found = torch.autograd.grad(losses.sum(), views, allow_unused=True) if losses.requires_grad else [None] * len(views)
    if all(gradient is None for gradient in found):
        raise ValueError("loss must depend on the parameters of the model, but its gradient reaches none of them")
    return tuple(name for name, gradient in zip(method.stack.names, found, strict=True) if gradient is None)


@torch.no_grad()
def watched(method: Method, state: State, taken: Taken, valid: Any) -> State:
    """With the guard's memory of the first loss, and the first point to go back to.

    Its buffers are those after the first forward pass, when the ``Tuner`` sees a model for the first time.
    """
    assert method.guard is not None
    buffers = _copied(state.now.buffers)
    if buffers:
        with _same_dropout(method, taken):
            views = method.stack.views(state.now.weights)
            method.stack.losses(views, buffers, taken.batch, per_replica=method.per_replica[0])
    health = method.guard.start(valid_loss(method, state.now, valid))
    return state._replace(health=health, point=Point(state.now._replace(buffers=buffers), state.raw))


@torch.no_grad()
def valid_loss(method: Method, now: Weights, batch: Any) -> Tensor:
    views = method.stack.views(now.weights)
    with _same_dropout(method, None):
        return method.stack.valid_losses(views, now.buffers, batch, per_replica=method.per_replica[1]).double()


def _record(method: Method, state: State, loss: Tensor, slopes: Named, returned: Tensor, skipped: Tensor) -> Record:
    values = {**state.fixed, **{name: method.natural(state, name) for name in method.tune}}
    unknown = torch.full_like(loss, torch.nan).unsqueeze(1)
    return Record(loss, middles(values), middles({n: slopes.get(n, unknown) for n in method.tune}), returned, skipped)


def middles(named: Named) -> Named:
    return {n: (v[:, 0] if v.shape[1] == 1 else v.median(1).values).double() for n, v in named.items()}


def _gradient(loss: Tensor, views: Sequence[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(loss.sum(), list(views), allow_unused=True)
    return [torch.zeros_like(v) if f is None else f for f, v in zip(found, views, strict=True)]


def _leaves(method: Method, weights: Tensor) -> list[Tensor]:
    return [view.requires_grad_() for view in method.stack.views(weights.detach())]


def _copied(tensors: Named) -> Named:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _same_dropout(method: Method, taken: Taken | None) -> AbstractContextManager[None]:
    """The same random numbers whenever a step is evaluated: now, on the way back, or when the program is run again."""
    if method.dropout is None:
        return nullcontext()
    return private_random(method.dropout, *("dropout", taken.step, taken.first) if taken else ("valid",))
