"""One thread a process: the tests run side by side, and small tensors gain nothing from more. And the real data."""

import os
from collections.abc import Iterator
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # for torch here and in every process a test starts: so before it is imported

import pytest
import torch

BESIDE = Path(__file__).parents[2] / "shared" / "data"  # beside the checkout


@pytest.fixture(scope="session")
def real_data() -> Path:
    """A folder with the real files. They are only read: whatever is downloaded goes elsewhere."""
    for folder in (os.environ.get("ONEPASS_DATA"), BESIDE):
        if folder and (Path(folder).expanduser() / "uci" / "energy" / "data.txt").is_file():
            return Path(folder).expanduser()
    pytest.skip(f"the real data is neither in $ONEPASS_DATA nor in {BESIDE}")


@pytest.fixture
def float64() -> Iterator[None]:
    """Double precision wherever a test does not say otherwise, and the same random numbers in every test."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
