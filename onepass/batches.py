"""Batches, one after the other, for ever."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from onepass.starts import private_random, seed_of


class Cycle:
    """Cycles through any iterable of batches and knows its place, so that a resumed run can find it again.

    Batches are drawn with a random stream of their own: a loader that shuffles gives a new order in every pass, and
    the user's random state does not notice.
    """

    def __init__(self, batches: Iterable[Any], name: str = "valid") -> None:
        if isinstance(batches, (Tensor, Mapping)) or (
            isinstance(batches, tuple) and any(isinstance(b, Tensor) for b in batches)
        ):
            raise ValueError(
                f"{name} must be an iterable of batches, but got a {type(batches).__name__} that looks like one batch; "
                "put it in a list: [batch]"
            )
        if not isinstance(batches, Iterable):
            raise ValueError(
                f"{name} must be an iterable of batches, but got {type(batches).__name__}; put one batch in a list"
            )
        self.batches, self._name = batches, name
        self._iterator: Iterator[Any] | None = None
        self._waiting: list[Any] = []
        self._drawn = 0
        self._random = self._random_at_start = torch.get_rng_state()
        own = getattr(batches, "generator", None)  # a DataLoader's
        self._generator = own if isinstance(own, torch.Generator) else None
        self._generator_at_start: Tensor | None = None
        self.peek()

    def peek(self) -> Any:
        """The next batch, which stays the next."""
        if not self._waiting:
            with self._own_random_stream():
                self._waiting.append(self._draw())
        return self._waiting[0]

    def __next__(self) -> Any:
        batch = self.peek()
        self._waiting.clear()
        self._drawn += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Batches drawn in the current pass, and the random states that the pass began with."""
        return {"drawn": self._drawn, "random": self._random_at_start, "generator": self._generator_at_start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._iterator, self._drawn = None, 0
        self._random = self._random_at_start = state["random"]
        if self._generator is not None and state.get("generator") is not None:
            self._generator.set_state(state["generator"])
        self._waiting.clear()
        for _ in range(state["drawn"]):
            next(self)

    def _draw(self) -> Any:
        for _ in range(2):
            if self._iterator is None:
                self._random_at_start = torch.get_rng_state()
                self._generator_at_start = self._generator.get_state() if self._generator is not None else None
                self._iterator, self._drawn = iter(self.batches), 0
            try:
                return next(self._iterator)
            except StopIteration:
                self._iterator = None
        raise ValueError(
            f"{self._name} must yield at least one batch each time it is iterated, but it is empty; "
            "a generator can be used up only once: give a list or a DataLoader"
        )

    @contextmanager
    def _own_random_stream(self) -> Iterator[None]:
        theirs = torch.get_rng_state()
        torch.set_rng_state(self._random)
        try:
            yield
        finally:
            self._random = torch.get_rng_state()
            torch.set_rng_state(theirs)


class Minibatches:
    """Shuffled mini-batches of data that fits in memory, cut anew in every pass.

    Any loop can iterate over it. A ``Population`` can also give every replica an order of its own, which does not
    depend on how many replicas there are; and a resumed run finds its place at once.

    >>> data = torch.arange(10.0).unsqueeze(1), torch.arange(10)
    >>> [len(batch[1]) for batch in Minibatches(data, size=4)]
    [4, 4]

    Args:
        data: tensors of the same length, in any nest (usually ``(inputs, targets)``); kept where they are.
        size: rows a batch. What is left at the end of a pass is dropped.
        per_replica: one order a replica, instead of one for all.
        skip: batches to leave out at the beginning: with 1, each is the one that comes next in the same order.
    """

    def __init__(self, data: Any, size: int, *, seed: int = 0, per_replica: bool = False, skip: int = 0) -> None:
        tensors = [x for x in tree_leaves(data) if isinstance(x, Tensor)]
        rows = {len(x) for x in tensors}
        if len(rows) != 1:
            raise ValueError(f"data must be tensors of one length, but got lengths {sorted(rows)}")
        self.rows = rows.pop()
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= self.rows:
            raise ValueError(f"size must be an integer from 1 to {self.rows}, but got {size}")
        self.data, self.size, self.seed, self.per_replica, self.skip = data, size, seed, per_replica, skip
        self._passes = 0
        self._orders: tuple[Any, Tensor] = (None, torch.empty(0))

    def __len__(self) -> int:
        return self.rows // self.size

    def __iter__(self) -> Iterator[Any]:
        first = self._passes * len(self)
        self._passes += 1
        for i in range(len(self)):
            yield self.at(first + i)

    def at(self, step: int, replicas: int | Sequence[int] | None = None) -> Any:
        """The batch of one step since the beginning.

        ``replicas``, how many or which of them, have one each, along a leading axis.
        """
        step += self.skip
        order = self._order(step // len(self), replicas)
        place = step % len(self) * self.size
        rows = order[..., place : place + self.size]
        return tree_map(lambda x: x[rows] if isinstance(x, Tensor) else x, self.data)

    def _order(self, number: int, replicas: int | Sequence[int] | None) -> Tensor:
        """The rows of one pass in their order, kept until another pass is asked for."""
        members = None if replicas is None else tuple(range(replicas) if isinstance(replicas, int) else replicas)
        if self._orders[0] != (number, members):
            generator = torch.Generator()
            each = [seed_of(self.seed, "order", number, r) for r in members or ()]
            seeds = [seed_of(self.seed, "order", number)] if members is None else each
            orders = [torch.randperm(self.rows, generator=generator.manual_seed(s)) for s in seeds]
            device = next(x.device for x in tree_leaves(self.data) if isinstance(x, Tensor))
            order = orders[0] if members is None else torch.stack(orders)
            self._orders = ((number, members), order.to(device))
        return self._orders[1]


class Feed:
    """Batches for a population: cycled, on its device, all of one shape, and with a place to come back to.

    ``members``: the numbers of its replicas, by which each has its own order, if it has one.
    """

    def __init__(self, batches: Any, name: str, device: torch.device, members: Sequence[int], seed: int) -> None:
        self.batches, self.name, self._device = batches, name, device
        self.per_replica = isinstance(batches, Minibatches) and batches.per_replica
        self.members = members
        self._shapes: Any = None
        if isinstance(batches, Minibatches):
            moved = Minibatches(
                to_device(batches.data, device),
                batches.size,
                seed=batches.seed,
                per_replica=batches.per_replica,
                skip=batches.skip,
            )
            self._source: Minibatches | Cycle = moved
            self._place = 0
        else:
            if isinstance(batches, list):
                batches = [self._checked(to_device(batch, device)) for batch in batches]
            self._ready = isinstance(batches, list)
            with private_random(seed, name):
                self._source = Cycle(batches, name)

    def peek(self) -> Any:
        if isinstance(self._source, Minibatches):
            return self._source.at(self._place, self.members if self.per_replica else None)
        batch = self._source.peek()
        return batch if self._ready else self._checked(to_device(batch, self._device))

    def __next__(self) -> Any:
        batch = self.peek()
        if isinstance(self._source, Minibatches):
            self._place += 1
        else:
            next(self._source)
        return batch

    def one_pass(self) -> list[Any]:
        """Every batch once, for a look at all of the data."""
        if isinstance(self._source, Minibatches):
            return [self._source.at(i) for i in range(len(self._source))]
        with private_random(0, "one pass"):
            return [to_device(batch, self._device) for batch in self._source.batches]

    def state_dict(self) -> dict[str, Any]:
        return {"place": self._place} if isinstance(self._source, Minibatches) else self._source.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if isinstance(self._source, Minibatches):
            self._place = state["place"]
        else:
            self._source.load_state_dict(state)

    def digest(self) -> str:
        """Shapes and a fingerprint of the first batch, to notice other data."""
        parts = [x.detach().cpu().contiguous() for x in tree_leaves(self.peek()) if isinstance(x, Tensor)]
        shapes = ", ".join(str(tuple(x.shape)) for x in parts)
        return f"{shapes} #{fingerprint(parts)}"

    def _checked(self, batch: Any) -> Any:
        shapes = [tuple(x.shape) for x in tree_leaves(batch) if isinstance(x, Tensor)]
        if self._shapes is None:
            self._shapes = shapes
        if shapes != self._shapes:
            raise ValueError(
                f"batches of {self.name} must all have the same shapes, but after {self._shapes} came {shapes}; "
                "use DataLoader(..., drop_last=True) or onepass.Minibatches"
            )
        return batch


def fingerprint(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=6)
    for tensor in tensors:
        whole = tensor.detach().cpu().contiguous()
        digest.update(ctypes.string_at(whole.data_ptr(), whole.nbytes))
    return digest.hexdigest()


def to_device(batch: Any, device: torch.device) -> Any:
    return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, batch)
