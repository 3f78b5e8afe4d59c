"""Data for the tests: the real files where they are, and trust in small made ones."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from onepass.experiments import sources

BESIDE = Path(__file__).parents[3] / "shared" / "data"  # beside the checkout


@pytest.fixture(scope="session")
def real_data() -> Path:
    """A folder with the real files. They are only read: whatever is downloaded goes elsewhere."""
    for folder in (os.environ.get("ONEPASS_DATA"), BESIDE):
        if folder and (Path(folder).expanduser() / "uci" / "energy" / "data.txt").is_file():
            return Path(folder).expanduser()
    pytest.skip(f"the real data is neither in $ONEPASS_DATA nor in {BESIDE}")


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], dict[str, str]]:
    """Take the files that a folder now has for the published ones."""

    def trust(folder: Path) -> dict[str, str]:
        files = (file for file in folder.rglob("*") if file.is_file())
        table = {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
        monkeypatch.setattr(sources, "published", lambda: table)
        return table

    return trust
