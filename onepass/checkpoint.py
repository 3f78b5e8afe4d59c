"""A file that is either whole or not there."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch


def save(path: str | Path, state: dict[str, Any]) -> None:
    """Written beside its place and then moved there: a program killed on the way leaves the file before."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.partial")
    try:
        whole = io.BytesIO()
        torch.save(state, whole)  # not to the file: torch hides why a file cannot be written, a full disk say
        with open(beside, "wb") as file:
            file.write(whole.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def load(path: str | Path, made_by: dict[str, Any]) -> dict[str, Any]:
    """What was saved, provided that it comes from the same configuration."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        saved = state["made_by"]
    except Exception as error:
        raise ValueError(
            f"checkpoint {path} cannot be read ({type(error).__name__}); move it away to begin anew"
        ) from error
    for key, value in made_by.items():
        if saved.get(key) != value:
            raise ValueError(
                f"checkpoint {path} must be of the same configuration, but its {key} is {saved.get(key)} and here it "
                f"is {value}; give another path to begin anew"
            )
    return state  # type: ignore[no-any-return]
