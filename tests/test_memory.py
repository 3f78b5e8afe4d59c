"""Hyper steps leave nothing behind: memory does not grow with their number."""

from __future__ import annotations

import gc
import tracemalloc

import torch

import onepass
from tests.problems import mlp, mse, regression, train_step


def live_tensors() -> tuple[int, int]:
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return len(tensors), sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_a_thousand_hyper_steps_do_not_grow() -> None:
    model, train = mlp(3, 16, 1), regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tuner = onepass.Tuner(model, optimizer, mse, [regression(seed=2)], interval=1)

    def run(hyper_steps: int) -> None:
        for _ in range(hyper_steps):
            train_step(model, optimizer, train)
            tuner.step(train)

    run(100)
    before = live_tensors()
    tracemalloc.start()
    run(1000)
    python_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert live_tensors() == before
    # What grows is the history: plain numbers, well under 4 kB a record.
    assert python_bytes < 4096 * 1000
    assert len(tuner.history) == 1100
