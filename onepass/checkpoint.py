"""A file that is either whole or not there."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch

FORM = 3  # of the file; one of another form is refused


def save(path: str | Path, state: dict[str, Any]) -> None:
    """Written beside its place and then moved there: a program killed on the way leaves the file before."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.partial")
    try:
        whole = io.BytesIO()
        # Not to the file: torch hides why one cannot be written, a full disk say.
        torch.save({"form": FORM, **state}, whole)
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
        saved, form = state["made_by"], state.get("form", 1)
    except Exception as error:
        raise ValueError(
            f"checkpoint {path} cannot be read ({type(error).__name__}); move it away to begin anew"
        ) from error
    if form != FORM:
        raise ValueError(
            f"checkpoint {path} must have form {FORM}, but has form {form}: another version of onepass wrote it; "
            "move it away to begin anew"
        )
    for key, value in made_by.items():
        if saved.get(key) != value:
            raise ValueError(
                f"checkpoint {path} must be of the same configuration, but its {key} is {saved.get(key)} and here it "
                f"is {value}; give another path to begin anew"
            )
    return state  # type: ignore[no-any-return]
