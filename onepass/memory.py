"""How much memory something takes, how much there is, and how to keep it warm."""

from __future__ import annotations

import ctypes
import os
import platform
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MEBIBYTE = 2**20

# Settings of glibc's malloc.h. More than 32 MiB it would not take as the size that is still kept; and new threads are
# to share one pool, since pools of their own go back to the system as soon as they are empty.
MALLOPT = {"M_TRIM_THRESHOLD": -1, "M_TOP_PAD": -2, "M_MMAP_THRESHOLD": -3, "M_ARENA_MAX": -8}
WARM = {"M_MMAP_THRESHOLD": 2**25, "M_TRIM_THRESHOLD": 2**31 - 1, "M_TOP_PAD": 2**26, "M_ARENA_MAX": 1}
GLIBC_DEFAULT = {"M_MMAP_THRESHOLD": 2**17, "M_TRIM_THRESHOLD": 2**17, "M_TOP_PAD": 2**17, "M_ARENA_MAX": 0}


def peak(work: Callable[[], object], device: torch.device) -> int:
    """Bytes of tensors that ``work`` holds at its highest, beside what there was before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = int(torch.cuda.memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device)) - before
    count = Alive()
    with count:
        work()
    return count.highest


def available(device: torch.device) -> int:
    """Bytes that can still be had."""
    if device.type == "cuda":
        free = int(torch.cuda.mem_get_info(device)[0])
        return free + int(torch.cuda.memory_reserved(device)) - int(torch.cuda.memory_allocated(device))
    limits = [_from_proc(), _from_cgroup()]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else 2**62


def cache_size() -> int:
    """Bytes of the processor's last-level cache, or a usual size where it does not tell."""
    try:
        return os.sysconf("SC_LEVEL3_CACHE_SIZE") or 32 * MEBIBYTE
    except (ValueError, OSError):
        return 32 * MEBIBYTE


class Alive(TorchDispatchMode):
    """Bytes of the tensors made under this mode and still alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.highest = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._sizes:
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        self._sizes[storage._cdata] = storage.nbytes()
        self.now += storage.nbytes()
        self.highest = max(self.highest, self.now)
        weakref.finalize(storage, self._remove, storage._cdata)

    def _remove(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


@contextmanager
def kept_warm() -> Iterator[None]:
    """Memory that tensors give back stays with the process: asking the system for the same pages again and again, as
    glibc does with large ones, would take as long as the arithmetic. At the end all goes back.
    """
    if platform.libc_ver()[0] != "glibc":
        yield
        return
    libc = ctypes.CDLL(None)
    for name, value in WARM.items():
        libc.mallopt(MALLOPT[name], value)
    try:
        yield
    finally:
        for name, value in GLIBC_DEFAULT.items():
            libc.mallopt(MALLOPT[name], value)
        libc.malloc_trim(0)


def _from_proc() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _from_cgroup() -> int | None:
    """What a container leaves its processes."""
    folder = Path("/sys/fs/cgroup")
    try:
        return int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return None
