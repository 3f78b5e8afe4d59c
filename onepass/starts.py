"""Where runs begin: distributions of starting values, and random seeds that belong to one replica alone."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch


class Distribution(Protocol):
    """Anything that can draw one number with a generator of its own."""

    def sample(self, generator: torch.Generator) -> float: ...


@dataclass(frozen=True)
class Uniform:
    """Every number between ``low`` and ``high`` equally likely.

    >>> 0.0 <= Uniform(0.0, 1.0).sample(torch.Generator().manual_seed(0)) <= 1.0
    True
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_range(self.low, self.high, -math.inf)

    def sample(self, generator: torch.Generator) -> float:
        """One number, drawn with this generator."""
        fraction = float(torch.rand((), dtype=torch.float64, generator=generator))
        return self.low + (self.high - self.low) * fraction


@dataclass(frozen=True)
class LogUniform:
    """Every decade between ``low`` and ``high`` equally likely: for rates and decays.

    >>> 1e-6 <= LogUniform(1e-6, 1e-1).sample(torch.Generator().manual_seed(0)) <= 1e-1
    True
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_range(self.low, self.high, 0.0)

    def sample(self, generator: torch.Generator) -> float:
        """One number, drawn with this generator."""
        return 10 ** Uniform(math.log10(self.low), math.log10(self.high)).sample(generator)


def seed_of(seed: int, *purpose: object) -> int:
    """A seed for one purpose, unrelated to those of all others: ``seed_of(0, "weights", 7)``.

    It does not depend on who else draws, so that replica 7 of 10 and replica 7 of 1 000 begin alike.
    """
    digest = hashlib.blake2b(repr((seed, *purpose)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # torch takes 63 bits


@contextmanager
def private_random(seed: int, *purpose: object) -> Iterator[None]:
    """Random numbers for one purpose; everybody else's stay as they are."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        _seed_generators(seed_of(seed, *purpose))
        yield


def _seed_generators(seed: int) -> None:
    """``torch.manual_seed``, which would also look, for longer than a small model takes to make, for other devices."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def draw(distribution: Distribution, seed: int, name: str, replicas: int) -> torch.Tensor:
    """One number a replica, as a column."""
    generator = torch.Generator()
    drawn = [distribution.sample(generator.manual_seed(seed_of(seed, name, r))) for r in range(replicas)]
    return torch.tensor(drawn, dtype=torch.float64).unsqueeze(1)


def _check_range(low: float, high: float, above: float) -> None:
    if not (above < low < high < math.inf):
        limit = "finite and" if above < 0 else "above 0 and"
        raise ValueError(f"the range must be {limit} not empty, but got ({low}, {high})")
