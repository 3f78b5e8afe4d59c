"""One thread a process: the tests run side by side, and small tensors gain nothing from more."""

import os
from collections.abc import Iterator

os.environ["OMP_NUM_THREADS"] = "1"  # for torch here and in every process a test starts: so before it is imported

import pytest
import torch


@pytest.fixture
def float64() -> Iterator[None]:
    """Double precision wherever a test does not say otherwise, and the same random numbers in every test."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
