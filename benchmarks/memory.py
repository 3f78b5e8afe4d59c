"""What tuning costs in memory: nothing that grows, and a few copies of the weights.

    python benchmarks/memory.py [--device cuda] [--json PATH]

First: 1 000 hyper steps after a warm-up of 100, with the process's memory and all live tensors counted before and
after. What grows is the history: one record of a few numbers a hyper step.

Second: the highest memory of a whole tuned run over that of a plain run, for a network whose weights dominate, in units
of the weights' size. On CUDA the allocator counts; on the CPU a dispatch mode sees the result of every operator,
forwards and backwards, and adds up the storages that are alive (what a kernel keeps to itself is not seen).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onepass
from onepass.memory import MEBIBYTE, Alive

Batch = tuple[Tensor, Tensor]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, weight_decay=1e-4),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-4, weight_decay=1e-4),
}


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, tuner: onepass.Tuner | None, batch: Batch, n: int
) -> None:
    for _ in range(n):
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
        if tuner is not None:
            tuner.step(batch)


# --- does it grow? ---


class Memory(NamedTuple):
    """``resident``: bytes the process holds; ``tensors``: live ones; ``tensor_bytes``: of their storages, each once."""

    resident: int
    tensors: int
    tensor_bytes: int


def memory() -> Memory:
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return Memory(_resident(), len(tensors), sum(storages.values()))


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def growth(device: str, hyper_steps: int) -> tuple[Memory, Memory]:
    """Memory before and after, with a hyper step at every weight step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10)).to(device)
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    batch = torch.randn(50, 100, device=device), torch.randint(10, (50,), device=device)
    tuner = onepass.Tuner(model, optimizer, loss, [batch], interval=1)
    train(model, optimizer, tuner, batch, max(hyper_steps // 10, 10))
    before = memory()
    train(model, optimizer, tuner, batch, hyper_steps)
    return before, memory()


# --- how much is it? ---


class Peak(NamedTuple):
    """Extra memory of a tuned run, in copies of the weights: at its highest, and what stays between steps."""

    highest: float
    kept: float


def extra(device: str, optimizer: str, lookback: int | None, guard: bool) -> Peak:
    plain, tuned = (_run(device, optimizer, options) for options in (None, (lookback, guard)))
    weights = 4 * sum(p.numel() for p in deep().parameters())
    return Peak((tuned[0] - plain[0]) / weights, (tuned[1] - plain[1]) / weights)


def deep() -> nn.Module:
    """Eight million weights in many tensors, as large models have them."""
    layers = [layer for _ in range(30) for layer in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(512, 10))


def _run(device: str, name: str, options: tuple[int | None, bool] | None) -> tuple[int, int]:
    """The highest and the last memory of a training of its own, in bytes."""

    def work() -> object:
        torch.manual_seed(0)
        model = deep().to(device)
        optimizer = OPTIMIZERS[name](model.parameters())
        batch = torch.randn(4, 512, device=device), torch.randint(10, (4,), device=device)
        tuner = None
        if options is not None:
            guard = onepass.Guard() if options[1] else None
            tuner = onepass.Tuner(model, optimizer, loss, [batch], interval=3, lookback=options[0], guard=guard)
        train(model, optimizer, tuner, batch, 13)  # ends on an ordinary step
        return model, optimizer, tuner  # alive until the end is measured

    gc.collect()
    return _on_cuda(work) if device == "cuda" else _on_cpu(work)


def _on_cuda(work: Callable[[], object]) -> tuple[int, int]:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    alive = work()
    found = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    del alive
    return found


def _on_cpu(work: Callable[[], object]) -> tuple[int, int]:
    with Alive() as count:
        alive = work()
    gc.collect()
    found = count.highest, count.now
    del alive
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--hyper-steps", type=int, default=1000)
    parser.add_argument("--json", type=Path, help="where to save the results")
    args = parser.parse_args()

    print(f"torch {torch.__version__}, {args.device}\n\n{args.hyper_steps} hyper steps after a warm-up")
    before, after = growth(args.device, args.hyper_steps)
    print(f"{'':<18}{'before':>14}{'after':>14}{'growth':>14}")
    for label, scale, b, a in zip(
        ("resident (MiB)", "live tensors", "their size (MiB)"), (MEBIBYTE, 1, MEBIBYTE), before, after, strict=True
    ):
        print(f"{label:<18}{b / scale:>14.2f}{a / scale:>14.2f}{(a - b) / scale:>14.2f}")

    print("\nextra memory of a tuned run over a plain one, in copies of the weights")
    print(f"{'optimizer':<12}{'lookback':>10}{'guard':>8}{'highest':>10}{'kept':>8}")
    found = {}
    for name, lookback, guard in product(OPTIMIZERS, (None, 1, 5), (True, False)):
        peak = found[name, lookback, guard] = extra(args.device, name, lookback, guard)
        row = f"{name:<12}{lookback or 'default':>10}{'on' if guard else 'off':>8}"
        print(f"{row}{peak.highest:>10.2f}{peak.kept:>8.2f}")
    if args.json:
        peaks = [{"optimizer": n, "lookback": i, "guard": g, **p._asdict()} for (n, i, g), p in found.items()]
        growths = {"hyper_steps": args.hyper_steps, "before": before._asdict(), "after": after._asdict()}
        args.json.write_text(json.dumps({"torch": torch.__version__, "growth": growths, "extra": peaks}, indent=1))


if __name__ == "__main__":
    main()
