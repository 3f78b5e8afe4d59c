"""Several blocks at the same time, each on a core of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

Each = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]


class Gate:
    """Many may be inside together, or one alone."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0

    @contextmanager
    def together(self) -> Iterator[None]:
        with self._changed:
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Waits until everybody has left, and lets nobody in."""
        with self._changed:
            self._changed.wait_for(lambda: self._inside == 0)
            yield


@contextmanager
def workers(count: int) -> Iterator[Each]:
    """A ``map`` over blocks by so many threads.

    torch's own way, all cores on one operation, has them wait for each other hundreds of times a step, which is slow
    for small operations and terrible where other programs want the cores too.
    """
    if count < 2:
        yield lambda function, blocks: [function(block) for block in blocks]
        return
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield lambda function, blocks: list(pool.map(function, blocks))
    finally:
        torch.set_num_threads(before)
