"""What benchmarks/rivals.py and benchmarks/newcomer.py share: a training timed beside a plain one, results on disk."""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

Step = Callable[[], object]
Result = dict[str, Any]

TURNS = 20


def timed(step: Step, plain: Step, steps: int) -> tuple[float, float]:
    """Take so many steps; the seconds they took, and the ratio of one step to a ``plain`` one.

    Both take turns, a quarter as many plain ones, so that a busy machine slows both: the median of neighbours' ratios.
    """
    turn, ratios, seconds = max(10, round(steps // TURNS, -1)), [], 0.0
    for begin in range(0, steps, turn):
        count = min(turn, steps - begin)
        spent = _seconds(step, count)
        few = -(-count // 4)
        ratios.append(spent / count / (_seconds(plain, few) / few))
        seconds += spent
    return seconds, statistics.median(ratios)


def _seconds(step: Step, count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        step()
    return time.perf_counter() - began


def add_arguments(parser: argparse.ArgumentParser, *, out: str, workers: int) -> None:
    parser.add_argument("--steps", type=int, help="by default those of the task or data set")
    parser.add_argument("--workers", type=int, default=workers)
    parser.add_argument("--out", type=Path, default=Path(out), help="folder of results; what it has is not repeated")
    parser.add_argument("--json", type=Path, help="everything in one file")
    parser.add_argument("--tables", type=Path, metavar="PATH", help="only print the tables of that file")


def save(results: Iterable[Result], path: Path | None) -> None:
    """A line each, if anybody wants them."""
    if path is not None:
        path.write_text("[" + ",\n".join(to_json(one).strip() for one in results) + "]\n")


def computed(work: Callable[..., Result], asked: Mapping[str, Result], out: Path, workers: int) -> list[Result]:
    """``work(**asked[name])`` of every name, in ``out/NAME.json``; what is there already is not computed again."""
    missing = [name for name, arguments in asked.items() if not _is_there(out / f"{name}.json", arguments)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_begin_worker) as pool:
        running = {pool.submit(_keep, work, out / f"{name}.json", asked[name]): name for name in missing}
        try:
            for done, future in enumerate(as_completed(running), 1):
                future.result()
                print(f"{done} of {len(missing)}: {running[future]}\033[K", end="\r", file=sys.stderr, flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [json.loads((out / f"{name}.json").read_text()) for name in asked]


def _begin_worker() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # a guard that goes back is on record


def _is_there(file: Path, arguments: Result) -> bool:
    if not file.exists():
        return False
    had = json.loads(file.read_text())["asked"]
    if had != arguments:
        raise SystemExit(f"{file} was computed with {had}, not {arguments}; give another --out, or delete it")
    return True


def _keep(work: Callable[..., Result], file: Path, arguments: Result) -> None:
    """Written under another name first: a file that is there is whole."""
    beside = file.with_name(f".{file.name}")
    file.parent.mkdir(parents=True, exist_ok=True)
    beside.write_text(to_json({"asked": arguments, "torch": torch.__version__, **work(**arguments)}))
    beside.replace(file)


def to_json(found: Any) -> str:
    """On one line. JSON has no NaN: ``null`` stands for what was lost. Floats with six digits."""
    return json.dumps(_plain(found), allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def numbers(values: list[float | None]) -> list[float]:
    """Back from JSON."""
    return [math.nan if value is None else value for value in values]
