"""What a trial of a search costs, side by side in one process and on Ray with 1, 2 and 4 workers.

    python benchmarks/search.py [--search asha] [--workers 1 2 4] [--trials 32 128] [--steps 64] [--json PATH]

A regression problem of the size of UCI Energy (made up, but the same every time), an MLP with 50 hidden units. A search
begins with preparations: a small and a large one are timed, and the difference is divided by that of their trials. Of
Ray, starting it is timed too. It should have as many cores as the largest number of workers; where there are fewer,
workers share them, and what is seen is the price of Ray alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onepass
from onepass.experiments.search import Plan, Problem, Space, Where, search

Batch = tuple[Tensor, Tensor]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 50), nn.ReLU(), nn.Linear(50, 1))


def loss(model: Any, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def data(rows: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 8, generator=generator)
    return inputs, (2 * inputs).sin().mean(1, keepdim=True)


def problem() -> Problem:
    train, valid = data(614, 0), data(78, 1)
    space: Space = {"lr": onepass.LogUniform(1e-4, 1e-1), "momentum": onepass.Uniform(0.0, 0.9)}
    return Problem(network, loss, [train], [valid], space, judge=(loss, [valid]))


@contextmanager
def ray_of(workers: int) -> Iterator[float]:
    """Ray with so many workers, and how long it took to start."""
    from onepass.experiments.connection import connect

    began = time.perf_counter()
    with connect("local", workers):
        yield time.perf_counter() - began


def seconds(kind: str, trials: int, steps: int, engine: str, block: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        search(problem(), Plan(kind, trials, steps), Where(Path(folder), block=block), engine)
        return time.perf_counter() - began


def cost(kind: str, trials: Sequence[int], steps: int, engine: str, block: int) -> dict[str, float]:
    """``begin``: of a search with no trials at all, ``trial``: of each, in seconds."""
    few, many = (seconds(kind, count, steps, engine, block) for count in trials)
    trial = (many - few) / (trials[1] - trials[0])
    return {"begin": few - trials[0] * trial, "trial": trial}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", default="asha", choices=("asha", "random", "pbt"))
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--trials", type=int, nargs=2, default=[32, 128])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--block", type=int, default=1, help="starts that one Ray trial trains together")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    seconds(args.search, args.trials[0], args.steps, "local", 1)  # torch sets itself up
    found["local"] = cost(args.search, args.trials, args.steps, "local", 1)
    for workers in args.workers:
        with ray_of(workers) as start:
            found[f"Ray, {workers}"] = {**cost(args.search, args.trials, args.steps, "ray", args.block), "start": start}
    few, many = args.trials
    print(f"{args.search}, {few} and {many} trials of up to {args.steps} steps, {os.cpu_count()} cores")
    print(f"{'engine':10} {'start Ray':>10} {'begin':>8} {'a trial':>10} {'x local':>8}")
    for engine, times in found.items():
        ratio = times["trial"] / found["local"]["trial"]
        to_start = f"{times['start']:.1f} s" if "start" in times else ""
        print(f"{engine:10} {to_start:>10} {times['begin']:6.1f} s {1000 * times['trial']:7.1f} ms {ratio:8.1f}")
    if args.json:
        about = {"torch": torch.__version__, "machine": platform.machine(), "cores": os.cpu_count()}
        asked = {"search": args.search, "trials": args.trials, "steps": args.steps, "block": args.block}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({**about, **asked, "seconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
