"""One interval of many trainings at once, as pure functions: plain steps, then one hyper step, and the guard.

The rules, the series and the guard are those of the ``Tuner``: they are elementwise, or take any Hessian product, and
so do not care that a leading axis runs over replicas. The sum of all replicas' losses has the gradients of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from onepass.curvature import exact, finite_difference, relative_row_size
from onepass.guard import probation_step
from onepass.hypergradient import look_back, unrolled
from onepass.hyperparameters import TRANSFORMS
from onepass.linearise import Piece
from onepass.method import Method, Taken, copied, gradient
from onepass.replicas import Named, Record, State, Weights, chosen, completed, forgotten, mapped
from onepass.sensitivity import agreed, carried_on, fading, ramp, turn
from onepass.watch import judged, sent_back

RowProduct = Callable[[Tensor], Tensor]


class StepProducts(NamedTuple):
    """Products with the derivative, by the weights, of the gradients that a step saw: the Hessian, and any clipping.

    ``back``: of a cotangent of these gradients. ``forward``: of a change of the weights.
    """

    back: Callable[[Sequence[Tensor]], list[Tensor]]
    forward: RowProduct


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
    buffers = copied(now.buffers)
    views = method.leaves(now.weights)
    found = method.clipped(method.stack.join(gradient(method.losses(views, buffers, taken), views)))
    state = _remembered(method, state, values)
    return state._replace(now=_stepped(method, now, values, found, buffers), path=state.path + 1)


def hyper_step(method: Method, state: State, values: Named, taken: Sequence[Taken], valid: Any) -> tuple[State, Record]:
    """The last weight step of an interval, and a step of the hyperparameters."""
    before = state.now
    state = _remembered(method, state, values)
    piece, products, buffers = linearised(method, before, values, taken[-1], with_hessian=method.unroll is None)
    now = _stepped(method, before, values, piece.gradient, buffers)
    loss, valid_gradient = _validation(method, now, valid)
    state, back, again = judged(method, state._replace(now=now, path=state.path + 1), before, loss, valid)
    if method.estimator == "product":
        slopes = {"lr": gradient_product(piece.gradient, valid_gradient).to(state.raw["lr"].dtype)}
    else:
        found = _derivatives(method, state, piece, products, valid_gradient, taken)
        slopes = {name: _raw_slope(method, state, name, found[name]) for name in method.tune}
    finite = _finite(loss, slopes)
    if method.estimator == "whole-run":
        assert products is not None
        state = _carried_on(method, state, piece, products)
        far = {name: _far(state, name, valid_gradient) for name in state.sensitivities}
        finite = finite & _finite(loss, far)
        state = forgotten(state, ~finite)
        slopes = {name: agreed(far[name], near) if name in far else near for name, near in slopes.items()}
    with torch.no_grad():
        state = _faded(method, state, _moved(method, state, slopes, finite & ~back))
        state = sent_back(method, state, back, again)
        taken_from = {name: chosen(back, torch.full_like(slope, torch.nan), slope) for name, slope in slopes.items()}
        return state, _record(method, state, loss, taken_from, back.long(), (~finite & ~back).long())


def _derivatives(
    method: Method,
    state: State,
    piece: Piece,
    products: StepProducts | None,
    valid_gradient: Tensor,
    taken: Sequence[Taken],
) -> Named:
    """Of the validation loss, by every tuned value in natural units."""
    if method.unroll is None:
        options = {"lookback": method.lookback, "through_state": method.through_state}
        back = products.back if products is not None else None
        return look_back([piece], [valid_gradient], back, **options)[0][0]  # type: ignore[arg-type]
    window = Window(method, state.window, taken[-len(state.window) :])
    return unrolled(window, [valid_gradient], window.hessians)[0][0]


@torch.no_grad()
def _carried_on(method: Method, state: State, piece: Piece, products: StepProducts) -> State:
    """Sensitivities after the step that ``piece`` is, of the value whose turn it is in each replica."""
    every, before, seeds, turns = state.sensitivities, dict[str, Tensor](), dict[str, Tensor](), dict[str, Tensor]()
    if not every:  # asked for, but nothing tuned is looked at so
        return state
    for place, name in enumerate(every):
        turns[name], earlier = turn(state.age, place, len(every))
        kept = ramp(earlier).to(method.stack.dtype)
        old = {key: kept * tensor for key, tensor in every[name].items()}
        before = chosen(turns[name], old, before) if before else old
        slope = TRANSFORMS[method.rule.tunable[name]].slope(method.natural(state, name)).to(method.stack.dtype)
        seeds[name] = torch.where(turns[name], slope, torch.zeros_like(slope))
    options = {"through_state": method.through_state}
    (after,) = carried_on([piece], [before], [seeds], lambda w: [products.forward(w[0])], **options)
    found = {
        # In the first hyper step, the optimizer's state is new.
        name: chosen(turns[name], after, {key: old.get(key, torch.zeros_like(new)) for key, new in after.items()})
        for name, old in every.items()
    }
    return state._replace(sensitivities=found, age=state.age + 1)


def _faded(method: Method, before: State, state: State) -> State:
    """With less of the sensitivities, where the learning rate has come down."""
    if "lr" not in method.tune or not state.sensitivities:
        return state
    kept = fading(method.natural(state, "lr"), method.natural(before, "lr")).to(method.stack.dtype)
    return state._replace(sensitivities=mapped(lambda tensor: kept * tensor, state.sensitivities))


def _far(state: State, name: str, valid_gradient: Tensor) -> Tensor:
    return (valid_gradient * state.sensitivities[name]["weights"]).sum(1, keepdim=True).to(state.raw[name].dtype)


def gradient_product(last: Tensor, new: Tensor) -> Tensor:
    """How the loss would change with the last learning rate, momentum left aside: -g_new . g_last, one a replica.

    Baydin et al., *Online Learning Rate Adaptation with Hypergradient Descent*, ICLR 2018.
    """
    return -(last * new).sum(1, keepdim=True)


def linearised(
    method: Method, now: Weights, values: Named, taken: Taken, *, with_hessian: bool = True
) -> tuple[Piece, StepProducts | None, Named]:
    """A step as it is differentiated: the rule's piece, products with the Hessian at ``now``, and the new buffers."""
    buffers = copied(now.buffers)
    short = method.estimator == "series" and method.unroll is None and method.lookback == 1
    if with_hessian and not short and method.estimator != "product":
        slope, product = PRODUCTS[method.curvature](method, now, buffers, taken)
    else:
        views = method.leaves(now.weights)
        slope, product = method.stack.join(gradient(method.losses(views, buffers, taken), views)), None
    every = {**method.switches, **values}
    piece = Piece(method.rule.update, every, now.weights, method.clipped(slope), now.optimizer, method.tune)
    if product is None:
        return piece, None, buffers
    products = StepProducts(
        back=lambda v: [product(method.through_clipping(v[0], slope))],
        forward=lambda rows: method.through_clipping(product(rows), slope),  # both derivatives are symmetric
    )
    return piece, products, buffers


def _exact(method: Method, now: Weights, buffers: Named, taken: Taken) -> tuple[Tensor, RowProduct]:
    stack = method.stack
    products = exact(lambda views: method.losses(views, buffers, taken).sum(), method.leaves(now.weights))
    return stack.join(products.gradient), lambda rows: stack.join(products.hessian(stack.views(rows)))


def _finite_difference(method: Method, now: Weights, buffers: Named, taken: Taken) -> tuple[Tensor, RowProduct]:
    """Each replica moves by a step of its own."""
    unused = [buffers]

    def loss(rows: Sequence[Tensor]) -> Tensor:
        # The step itself comes first, and is what buffers remember; the others begin from where it began.
        own = unused.pop() if unused else copied(now.buffers)
        return method.losses(method.stack.views(rows[0]), own, taken).sum()

    products = finite_difference(
        loss, [now.weights.detach().requires_grad_()], size=relative_row_size(method.stack.sizes)
    )
    return products.gradient[0], lambda rows: products.hessian([rows])[0]


# The gradients of the training losses, and products with their Hessians, in rows; the step moves the buffers.
PRODUCTS: dict[str, Callable[[Method, Weights, Named, Taken], tuple[Tensor, RowProduct]]] = {
    "exact": _exact,
    "finite-difference": _finite_difference,
}


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

    def evaluated(self, t: int) -> tuple[Piece, StepProducts | None, Named]:
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
        products = self._window.evaluated(t)[1]
        return products.back if products is not None else None


@torch.no_grad()
def _stepped(method: Method, now: Weights, values: Named, gradient: Tensor, buffers: Named) -> Weights:
    update, optimizer = method.rule.update({**method.switches, **values}, now.weights, gradient, now.optimizer)
    if method.idle:
        update = method.stack.only([name for name in method.stack.names if name not in method.idle], update)
    return Weights(now.weights - update, buffers, optimizer)


def _finite(loss: Tensor, slopes: Named) -> Tensor:
    return torch.stack([loss.isfinite(), *(slope.isfinite().all(1) for slope in slopes.values())]).all(0)


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
    begin = state.begin._replace(buffers=copied(state.begin.buffers))
    return state._replace(now=begin, window=[], path=torch.zeros_like(state.path))


def _scaled(state: State) -> State:
    moved = {name: (state.fixed[name] * by).clamp(*state.limits[name][1:]) for name, by in state.factors.items()}
    return state._replace(fixed={**state.fixed, **moved})


def _validation(method: Method, now: Weights, batch: Any) -> tuple[Tensor, Tensor]:
    views = method.leaves(now.weights)
    losses = method.valid_losses(views, now.buffers, batch)
    return losses.detach().double(), method.stack.join(gradient(losses.sum(), views))


def _record(method: Method, state: State, loss: Tensor, slopes: Named, returned: Tensor, skipped: Tensor) -> Record:
    values = {**state.fixed, **{name: method.natural(state, name) for name in method.tune}}
    unknown = torch.full_like(loss, torch.nan).unsqueeze(1)
    slopes = {name: slopes.get(name, unknown) for name in method.tune}
    return Record(loss, middles(values), middles(slopes), returned, skipped, state.path[:, 0])


def middles(named: Named) -> Named:
    return {n: (v[:, 0] if v.shape[1] == 1 else v.median(1).values).double() for n, v in named.items()}
