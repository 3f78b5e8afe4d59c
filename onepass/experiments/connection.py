"""Ray, for a while: its noise, and the mistakes in its address, told in a line."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any
from urllib.parse import urlsplit

from onepass.experiments.errors import UsageError

PATIENCE = 10.0  # seconds for somebody to answer at an address

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent to anybody
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else a warning about what Ray will do in future versions
}


@contextmanager
def connect(address: str | None = None, workers: int | None = None) -> Iterator[Any]:
    """Ray, for a while: what runs in this process already, what is at the address, or else one for this machine alone.

    Args:
        address: "auto", "HOST:PORT", "ray://HOST:PORT"; by default what Ray's own ``$RAY_ADDRESS`` says, if it is set.
        workers: of a Ray for this machine alone; by default one a core.
    """
    ray = _imported()
    if ray.is_initialized():
        with redirect_stdout(sys.stderr):
            yield ray
        return
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address == "local":
            ray.init("local", num_cpus=workers, include_dashboard=False, **quiet)
        else:
            ray.init(_answering(address), **quiet)
    except (OSError, ValueError, RuntimeError, SystemExit) as error:  # Ray would end the process
        raise UsageError(f"cannot use Ray at {address}: {error}") from error
    try:
        with redirect_stdout(sys.stderr):  # where Ray would say that a worker died: stdout is for results
            yield ray
    finally:
        ray.shutdown()


def _imported() -> Any:
    try:
        import ray
    except ModuleNotFoundError as missing:
        raise UsageError(f"--engine ray needs {missing.name}: pip install 'onepass[ray]'") from missing
    return ray


def _answering(address: str) -> str:
    """An address where somebody listens: Ray itself would wait for minutes."""
    if address == "auto":
        from ray._private.services import canonicalize_bootstrap_address

        address = canonicalize_bootstrap_address("auto") or "auto"
    parts = urlsplit(address if "://" in address else f"//{address}")
    if not parts.hostname or not parts.port or parts.scheme not in ("", "ray"):
        raise UsageError(f"--address must be auto, HOST:PORT or ray://HOST:PORT, but got {address!r}")
    with socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE):
        return address
