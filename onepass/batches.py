"""Validation batches, one after the other, for ever."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


class Cycle:
    """Cycles through any iterable of batches and knows its place, so that a resumed run can find it again."""

    def __init__(self, batches: Iterable[Any]) -> None:
        if not isinstance(batches, Iterable):
            raise ValueError(
                f"valid must be an iterable of batches, but got {type(batches).__name__}; put one batch in a list"
            )
        self._batches = batches
        self._iterator: Iterator[Any] | None = None
        self._waiting: list[Any] = []
        self.position = 0
        self.peek()

    def peek(self) -> Any:
        """The next batch, which stays the next."""
        if not self._waiting:
            self._waiting.append(self._draw())
        return self._waiting[0]

    def __next__(self) -> Any:
        batch = self.peek()
        self._waiting.clear()
        self.position += 1
        return batch

    def seek(self, position: int) -> None:
        """Go to a position in the current pass, from its beginning."""
        self._iterator, self.position = None, 0
        self._waiting.clear()
        for _ in range(position):
            next(self)

    def _draw(self) -> Any:
        for _ in range(2):
            if self._iterator is None:
                self._iterator, self.position = iter(self._batches), 0
            try:
                return next(self._iterator)
            except StopIteration:
                self._iterator = None
        raise ValueError(
            "valid must yield at least one batch each time it is iterated, but it is empty; "
            "a generator can be used up only once: give a list or a DataLoader"
        )
