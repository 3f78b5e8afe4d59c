"""The guard of many trainings at once: who goes back, and to where. The verdicts are those of ``Guard``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.guard import Verdict, on_probation
from onepass.method import Method, Taken, copied
from onepass.recovery import MOMENTA
from onepass.replicas import Point, State, Weights, chosen, completed, forgotten, fresh


@torch.no_grad()
def watched(method: Method, state: State, taken: Taken, valid: Any) -> State:
    """With the guard's memory of the first loss, and the first point to go back to.

    Its buffers are those after the first forward pass, when the ``Tuner`` sees a model for the first time.
    """
    assert method.guard is not None
    buffers = copied(state.now.buffers)
    if buffers:
        method.losses(method.stack.views(state.now.weights), buffers, taken)
    health = method.guard.start(method.valid_loss(state.now, valid))
    return state._replace(health=health, point=Point(state.now._replace(buffers=buffers), state.raw, state.path))


@torch.no_grad()
def judged(method: Method, state: State, before: Weights, loss: Tensor, valid: Any) -> tuple[State, Tensor, Tensor]:
    """The state with the guard's new memory; who has to go back; and who has just been back."""
    if method.guard is None or state.health is None or state.point is None:
        nobody = torch.zeros_like(loss, dtype=torch.bool)
        return state, nobody, nobody
    again = on_probation(state.health)
    health, verdict = _verdict(method, state, loss, valid)
    optimizers = [
        completed(one, state.now.optimizer, method.rule) for one in (before.optimizer, state.point.now.optimizer)
    ]
    here = Point(Weights(before.weights, state.now.buffers, optimizers[0]), state.raw, state.path - 1)
    there = state.point._replace(now=state.point.now._replace(optimizer=optimizers[1]))
    return state._replace(health=health, point=chosen(verdict.safe, here, there)), ~verdict.healthy, again


@torch.no_grad()
def probation(method: Method, state: State, valid: Any) -> tuple[State, Tensor]:
    """Between hyper steps: those on probation go back if they are about to be lost. Also returns who did."""
    assert state.health is not None
    on = on_probation(state.health)
    verdict = _verdict(method, state, method.valid_loss(state.now, valid), valid)[1]
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
    return forgotten(state, who)._replace(
        now=chosen(who, point.now._replace(optimizer=at_rest), state.now),
        raw=raw,
        hyper=chosen(who, anew, state.hyper),
        # Should this not be enough, the next return starts from here.
        point=Point(point.now._replace(optimizer=old), chosen(who, raw, point.raw), point.path),
        path=chosen(who, point.path, state.path),
    )


def _verdict(method: Method, state: State, loss: Tensor, valid: Any) -> tuple[Any, Verdict]:
    """A batch that looks as bad at the last healthy point is no sign of divergence."""
    assert method.guard is not None
    assert state.health is not None
    assert state.point is not None
    health, verdict = method.guard.judge(state.health, loss)
    there = method.valid_loss(state.point.now, valid)
    excused = ~verdict.healthy & ~method.guard.trusts(state.health, loss, there)
    return chosen(excused, state.health, health), Verdict(verdict.healthy | excused, verdict.safe)
