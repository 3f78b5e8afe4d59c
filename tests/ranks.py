"""Real processes that talk through gloo, for tests of training on several ranks."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import distributed

# Its server imports torch once; every process is then a quick copy of it.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed.tensor", "onepass", "tests.problems"])
PATIENCE = 120


def on_ranks(work: Callable[..., Any], *arguments: Any, size: int = 2) -> list[Any]:
    """What ``work(*arguments)`` returns on each rank, or the error that it raises there."""
    with TemporaryDirectory() as folder:
        todo = [(work, arguments, rank, size, folder) for rank in range(size)]
        processes = [_PROCESSES.Process(target=_one_rank, args=args) for args in todo]
        for process in processes:
            process.start()
        for process in processes:
            process.join(PATIENCE)
        waiting = [process for process in processes if process.is_alive()]
        for process in waiting:
            process.kill()
        assert not waiting, "a rank waits for ever"
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _one_rank(work: Callable[..., Any], arguments: Any, rank: int, size: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    result: Any
    try:
        result = work(*arguments)
    except Exception as error:
        traceback.print_exc()
        result = error
    torch.save(result, Path(folder) / f"{rank}.pt")
    distributed.destroy_process_group()


def torchrun(script: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    root = Path(__file__).parents[1]
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    return subprocess.run([*command, *options], capture_output=True, text=True, timeout=120, env=alone)
