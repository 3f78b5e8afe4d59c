"""Replicas are worked on in blocks: small enough for the cache of a processor, or for the memory of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from onepass.backends import Backend, Eager
from onepass.guard import on_probation
from onepass.interval import hyper_step, plain_step, resting
from onepass.memory import available, cache_size, peak
from onepass.method import Method, Taken
from onepass.replicas import Record, State, mapped, selected
from onepass.watch import watched

GIBIBYTE = 2**30

LANE = 8  # replicas that draw their random numbers together

# Blocks of a new size cost some preparation: this share of a block must be lost before the rest goes on alone.
WORTH_DROPPING = 0.25


class Block:
    """Some replicas that take their steps together. ``alive`` is false for those that nothing can bring back."""

    def __init__(self, backend: Backend, members: Tensor, state: State, *, alive: bool = True) -> None:
        self.members, self.state, self.alive = members, state, alive
        self.backend, self._engine = backend, backend.engine()
        # Looked at once: whoever asks a GPU for a number waits for all that it still has to do.
        self._first, self.in_order = int(members[0]), bool((members.diff() > 0).all())

    def begin(self, taken: Taken, valid: Any) -> None:
        """Before the first steps with a guard: what it measures them by."""
        method = self.backend.steps.method
        if method.guard is not None and self.state.health is None:
            valid = selected(valid, self.members) if method.per_replica[1] else valid
            self.state = watched(method, self.state, self._own(taken, method.per_replica[0]), valid)

    def advanced(self, batches: Sequence[Taken], valid: Any, earlier: Sequence[Taken]) -> tuple[State, Record]:
        """What the block will be after these steps, and what they did."""
        method = self.backend.steps.method
        if not self.alive:
            return self.state, resting(method, self.state, skipped=(batches[-1].step + 1) % method.interval == 0)
        own, before = ([self._own(taken, method.per_replica[0]) for taken in some] for some in (batches, earlier))
        if method.per_replica[1]:
            valid = selected(valid, self.members)
        watch = self.state.health is not None and bool(on_probation(self.state.health).any())
        # Graphs are of states that keep their form. In the first steps, those of the optimizers are still being made,
        # and a window goes on holding one of before.
        engine = self._engine if batches[0].step > (method.unroll or 0) else Eager(method)
        return engine.advance(self.state, own, valid, before, watch=watch)

    def without_lost(self) -> list[Block]:
        """The block in two, if a good part of it is lost: weights that are not finite stay so."""
        fine = self.state.now.weights.isfinite().all(1)
        if not self.alive or fine.double().mean() > 1 - WORTH_DROPPING:
            return [self]
        return [self._part(index, alive) for index, alive in ((fine, True), (~fine, False)) if bool(index.any())]

    def _part(self, index: Tensor, alive: bool) -> Block:
        return Block(self.backend, self.members[index], selected(self.state, index), alive=alive)

    def _own(self, taken: Taken, per_replica: bool) -> Taken:
        batch = selected(taken.batch, self.members) if per_replica else taken.batch
        return Taken(taken.step, batch, self._first)


def split(backend: Backend, state: State, members: Sequence[Tensor], alive: Sequence[bool]) -> list[Block]:
    return [Block(backend, m, selected(state, m), alive=a) for m, a in zip(members, alive, strict=True)]


def merged(blocks: Sequence[Block], nests: Sequence[Any]) -> Any:
    """One nest for each block, put together in the order of the replicas."""
    if len(blocks) == 1 and blocks[0].in_order:
        return nests[0]
    members = torch.cat([block.members for block in blocks])
    # Of a replica that stands in for those missing in a lane, only the first place counts.
    order = torch.argsort(members, stable=True)
    order = order[torch.cat([order.new_ones(1, dtype=torch.bool), members[order].diff() > 0])]
    return mapped(lambda *parts: torch.cat(parts)[order], *nests)


def members_of(replicas: int, size: int, device: torch.device) -> list[Tensor]:
    """Blocks of about the same size, none above ``size``."""
    count = -(-replicas // size)
    return list(torch.arange(replicas, device=device).tensor_split(count))


def lanes_of(replicas: int, device: torch.device) -> list[Tensor]:
    """Blocks of one size, always: random numbers are drawn for a block at a time, and a replica's must not depend on
    how many others there are. The last replica stands in for those that are missing.
    """
    every = torch.arange(-(-replicas // LANE) * LANE, device=device).clamp(max=replicas - 1)
    return list(every.split(LANE))


def block_size(method: Method, state: State, taken: Taken, valid: Any, asked: int | None) -> int:
    """As many replicas as fit, and on a processor no more than its cache holds; or an error that says what would."""
    weights = state.now.weights
    replicas, device = weights.shape[0], weights.device
    kept = _kept(method, state) // replicas
    one = _peak(method, state, taken, valid, 1)
    more = max(_peak(method, state, taken, valid, 2) - one, 1) if replicas > 1 else one
    free = 0.9 * available(device)

    def needed(size: int) -> int:
        return replicas * kept + max(one - more, 0) + size * more

    fits = int((free - needed(0)) // more)
    if fits < 1:
        raise MemoryError(
            f"{replicas} replicas need {_gib(needed(1))} even in blocks of one, but {_gib(free)} are free on {device}; "
            "use fewer replicas"
        )
    if asked is not None:
        size = min(asked, replicas)
        if size > fits:
            raise MemoryError(
                f"block={asked} needs {_gib(needed(size))}, but {_gib(free)} are free on {device}; use block={fits}"
            )
        return size
    if device.type == "cuda":
        return min(replicas, fits)
    threads = torch.get_num_threads()
    return max(1, min(-(-replicas // threads), fits, cache_size() // threads // more))


def _peak(method: Method, state: State, taken: Taken, valid: Any, number: int) -> int:
    """Memory that the largest step of a few replicas takes."""
    some: State = selected(state, slice(number))
    some = some._replace(window=[])
    index = torch.arange(number, device=some.now.weights.device)
    if method.per_replica[0]:
        taken = taken._replace(batch=selected(taken.batch, index))
    if method.per_replica[1] and valid is not None:
        valid = selected(valid, index)
    if method.guard is not None and some.health is None:
        some = watched(method, some, taken, valid)

    def work() -> object:
        values = method.values(some)
        if not method.tune:
            return plain_step(method, some, values, taken)
        return hyper_step(method, some, values, [taken], valid)

    return peak(work, some.now.weights.device)


def _kept(method: Method, state: State) -> int:
    """Bytes of the state, twice (before and after a step), and of the window that exact hypergradients need."""
    bytes_of = sum(x.nbytes for x in tree_leaves(state._replace(window=[])) if isinstance(x, Tensor))
    step = sum(x.nbytes for x in tree_leaves(state.now) if isinstance(x, Tensor)) + state.now.weights.nbytes
    return 2 * bytes_of + (method.unroll or 0) * step


def _gib(number: float) -> str:
    gib = number / GIBIBYTE
    return f"{gib:.3g} GiB" if gib < 1000 else f"{gib:,.0f} GiB"
