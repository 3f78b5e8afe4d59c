"""Cells spread over a Ray cluster, or over the CPUs or GPUs of this machine.

Workers share nothing but Ray with whoever asked: data sets go there, and what was trained comes back to be saved.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from onepass.experiments.connection import connect
from onepass.experiments.datasets import Data, load
from onepass.experiments.errors import UsageError
from onepass.experiments.methods import METHODS
from onepass.experiments.protocol import PROTOCOLS
from onepass.experiments.runs import Cell, Request, alone, check_backend, finished, here, keep
from onepass.experiments.training import Outcome, train
from onepass.experiments.variants import varied

RETRIES = 3  # of what was lost with its worker


def computed(
    requests: Sequence[Request],
    out: Path,
    *,
    address: str | None = None,
    device: str | None = None,
    backend: str = "auto",
    data_dir: str | Path | None = None,
) -> Generator[Cell, None, None]:
    """The cells, each as soon as it is finished and saved. Should one fail, the others are finished first."""
    if not requests:
        return
    data = {_data_of(request): _loaded(request, data_dir) for request in requests}
    with ExitStack() as stack:
        for request in requests:
            stack.enter_context(alone(request, out))
        ray = stack.enter_context(connect(address))
        device = device_of(ray, device)
        check_backend(backend, device)
        shared = {name: ray.put(one) for name, one in data.items()}
        task = ray.remote(num_cpus=1, num_gpus=int(device == "cuda"), max_retries=RETRIES)(_trained)
        running = {}
        for request in requests:
            if (done := finished(request, out)) is not None:  # by another process, just now
                yield done
            else:
                running[task.remote(request, shared[_data_of(request)], device, backend)] = request
        for request, (outcome, made) in _as_they_end(ray, running):
            yield keep(request, out, outcome, made)


def _data_of(request: Request) -> tuple[str, int | None]:
    return PROTOCOLS[request.dataset].data or request.dataset, request.split


def _loaded(request: Request, data_dir: str | Path | None) -> Data:
    name, split = _data_of(request)
    return load(name, data_dir=data_dir, split=split)


def device_of(ray: Any, asked: str | None) -> str:
    """Of the workers, whatever this machine has."""
    if asked not in (None, "cpu", "cuda"):
        raise UsageError(f"--device must be cpu or cuda with --engine ray, which shares them out, but got {asked}")
    gpus = ray.cluster_resources().get("GPU", 0) >= 1
    if asked == "cuda" and not gpus:
        raise UsageError("'cuda' was asked for, but the Ray cluster has no GPU; use --device cpu")
    return asked or ("cuda" if gpus else "cpu")


def _trained(request: Request, data: Data, device: str, backend: str) -> tuple[Outcome, dict[str, Any]]:
    """What a worker does."""
    torch.set_num_threads(1)  # the CPU it has asked for
    protocol, method, data = varied(request.variant, PROTOCOLS[request.dataset], METHODS[request.method], data)
    outcome = train(
        protocol,
        method,
        data,
        replicas=request.replicas,
        steps=request.steps,
        seed=request.seed,
        device=device,
        backend=backend,
    )
    return outcome, here(device)


def _as_they_end(ray: Any, running: dict[Any, Request]) -> Iterator[tuple[Request, Any]]:
    failed: list[Exception] = []
    try:
        while running:
            (ended, *_), _ = ray.wait(list(running))
            request = running.pop(ended)
            try:
                found = ray.get(ended)
            except ray.exceptions.RayError as error:
                failed.append(_plain(request, error))
            else:
                yield request, found
    finally:  # interrupted, on a cluster that goes on without us
        for task in running:
            ray.cancel(task, force=True)
    if failed:
        raise failed[0]


def _plain(request: Request, error: Exception) -> Exception:
    """What went wrong in training, as it would have without Ray; or what Ray could not do."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception):
        return cause
    return UsageError(
        f"{request.dataset}, {request.method} was lost with its worker, and so was every retry "
        f"({type(error).__name__}); what is finished stays, and the same command goes on from there"
    )
