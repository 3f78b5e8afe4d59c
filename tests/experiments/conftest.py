"""Data for the tests: trust in small made files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from onepass.experiments import sources


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], dict[str, str]]:
    """Take the files that a folder now has for the published ones."""

    def trust(folder: Path) -> dict[str, str]:
        files = (file for file in folder.rglob("*") if file.is_file())
        table = {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
        monkeypatch.setattr(sources, "published", lambda: table)
        return table

    return trust
