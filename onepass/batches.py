"""Validation batches, one after the other, for ever."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class Cycle:
    """Cycles through any iterable of batches and knows its place, so that a resumed run can find it again.

    Batches are drawn with a random stream of their own: a loader that shuffles gives a new order in every pass, and
    the user's random state does not notice.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        if isinstance(batches, (Tensor, Mapping)) or (
            isinstance(batches, tuple) and any(isinstance(b, Tensor) for b in batches)
        ):
            raise ValueError(
                f"valid must be an iterable of batches, but got a {type(batches).__name__} that looks like one batch; "
                "put it in a list: [batch]"
            )
        if not isinstance(batches, Iterable):
            raise ValueError(
                f"valid must be an iterable of batches, but got {type(batches).__name__}; put one batch in a list"
            )
        self._batches = batches
        self._iterator: Iterator[Any] | None = None
        self._waiting: list[Any] = []
        self._drawn = 0
        self._random = self._random_at_start = torch.get_rng_state()
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
        """Batches drawn in the current pass, and the random state that the pass began with."""
        return {"drawn": self._drawn, "random": self._random_at_start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._iterator, self._drawn = None, 0
        self._random = self._random_at_start = state["random"]
        self._waiting.clear()
        for _ in range(state["drawn"]):
            next(self)

    def _draw(self) -> Any:
        for _ in range(2):
            if self._iterator is None:
                self._random_at_start = torch.get_rng_state()
                self._iterator, self._drawn = iter(self._batches), 0
            try:
                return next(self._iterator)
            except StopIteration:
                self._iterator = None
        raise ValueError(
            "valid must yield at least one batch each time it is iterated, but it is empty; "
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
