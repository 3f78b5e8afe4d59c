"""What a folder of results holds: what can be shown, what is still being computed, and what a reader has to know."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from onepass.experiments.errors import UsageError
from onepass.experiments.methods import METHODS
from onepass.experiments.protocol import PROTOCOLS, title_of
from onepass.experiments.runs import Cell, read
from onepass.experiments.tables import settings
from onepass.version import __version__

# What its parts are, whoever wrote the file.
KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("values", "test", "valid", "returns"), list),
    **dict.fromkeys(("start", "end", "others", "versions"), dict),
    **dict.fromkeys(("metric", "device"), str),
    "seconds": (int, float),
}


class Unfinished(NamedTuple):
    """A run that has begun. ``step`` is where it was last saved, ``None`` if it was not; times are Unix's."""

    dataset: str
    method: str
    steps: int | None
    step: int | None
    begun: float | None
    saved: float | None


class Contents(NamedTuple):
    """Of one folder.

    Attributes:
        cells: all that can be read, in the order of tables.
        drawn: those of them whose curves can be drawn.
        unfinished: runs that have begun.
        notes: what was left out and why, and what should not be compared; a line each.
    """

    cells: list[Cell]
    drawn: list[Cell]
    unfinished: list[Unfinished]
    notes: list[str]


def contents(out: Path) -> Contents:
    """Whatever is wrong with one result, the others are there."""
    found, drawn, notes = [], [], list(foreign(out))
    for folder in _folders(out):
        try:
            cell = read(folder)
        except UsageError as error:
            notes.append(f"Left out: {error}.")
            continue
        if flaw := misfit(cell):
            notes.append(f"Left out: {folder} {flaw}; move it away, or compute it anew.")
            continue
        found.append(cell)
        if flaw := curve_flaw(cell):
            notes.append(f"In tables alone: {_name(cell)}: {flaw}.")
        else:
            drawn.append(cell)
    return Contents(found, drawn, list(unfinished(out)), [*notes, *mixed(found), *timeless(drawn), *versions(found)])


def _folders(out: Path) -> Iterator[Path]:
    for dataset in PROTOCOLS:
        for method in METHODS:
            folder = out / dataset / method
            if (folder / "cell.json").exists():
                yield folder


def foreign(out: Path) -> Iterator[str]:
    """What looks like a result, but of something that this version does not know."""
    known = set(_folders(out))
    for file in sorted(out.glob("*/*/cell.json")):
        if file.parent not in known and not file.parent.name.startswith("."):
            name = file.parent.relative_to(out)
            yield f"Left out: {name} holds a result of a data set or a method that onepass {__version__} does not know."


def misfit(cell: Cell) -> str | None:
    """What makes it useless, if anything does."""
    asked = cell.request
    if (asked.dataset, asked.method) != (cell.folder.parent.name, cell.folder.name):
        return f"holds a result of {asked.dataset}, {asked.method}"
    for name, kind in KINDS.items():
        if not isinstance(getattr(cell, name), kind):
            return f"has {name} in another form than this version writes"
    one_each = {"test": cell.test, "valid": cell.valid, **cell.start, **cell.end}
    for name, values in {**one_each, **cell.others, "values": cell.values}.items():
        if not all(isinstance(value, (int, float)) for value in values):
            return f"has something in {name} that is no number"
    for name, values in one_each.items():
        if len(values) != len(cell.test):
            return f"has {len(values)} of {name} and {len(cell.test)} of test, but should have as many of each"
    return None


def curve_flaw(cell: Cell) -> str | None:
    try:
        curves = cell.curves()
    except UsageError as error:
        return str(error)
    search = METHODS[cell.request.method].search is not None  # whose columns are what it likes, without values
    names = ["test"] if search else ["test", *cell.start]
    missing = [name for name in ("steps", *names) if name not in curves]
    if missing:
        return f"its curves.npz has no {', '.join(missing)}"
    shape = len(curves["steps"]), curves["test"].shape[-1] if search else len(cell.test)
    wrong = [name for name in names if curves[name].shape != shape]
    if wrong or not len(curves["steps"]):
        return f"its curves.npz does not fit its cell.json ({', '.join(wrong) or 'no points'})"
    return None


def mixed(cells: Sequence[Cell]) -> Iterator[str]:
    """Data sets with results that should not be compared."""
    for dataset in dict.fromkeys(cell.request.dataset for cell in cells):
        groups: dict[str, list[str]] = {}
        for cell in cells:
            if cell.request.dataset == dataset and METHODS[cell.request.method].search is None:
                tried, steps, seed, split, _ = settings(cell.request)
                rows = "" if split is None else f", split {split}"
                size = f"{tried} starts x {steps} steps, seed {seed}{rows}"
                groups.setdefault(size, []).append(METHODS[cell.request.method].label)
        if len(groups) > 1:
            listed = "; ".join(f"{size} ({', '.join(labels)})" for size, labels in groups.items())
            title = title_of(dataset)
            yield f"{title} has runs of different settings, which tables keep apart and charts do not: {listed}."


def timeless(cells: Sequence[Cell]) -> Iterator[str]:
    old = [_name(cell) for cell in cells if "seconds" not in cell.curves()]
    if old:
        yield f"Left out of what is drawn over time, as an older version computed them and kept no times: {_few(old)}."


def versions(cells: Sequence[Cell]) -> Iterator[str]:
    others: dict[str, list[str]] = {}
    for cell in cells:
        version = str(cell.versions.get("onepass", "unknown"))
        if version != __version__:
            others.setdefault(version, []).append(_name(cell))
    for version, names in others.items():
        yield f"Computed by onepass {version}, while this is {__version__}, so that numbers may differ: {_few(names)}."


def _name(cell: Cell) -> str:
    return f"{title_of(cell.request.dataset)}, {METHODS[cell.request.method].label}"


def _few(names: Sequence[str]) -> str:
    return "; ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# --- what is not finished ---


def unfinished(out: Path) -> Iterator[Unfinished]:
    """In the order of tables. A lock alone means that nothing was saved so far."""
    for dataset in PROTOCOLS:
        for method in METHODS:
            folder = out / dataset
            lock = _time(folder / f".{method}.lock")
            kept = [file for kind in ("pt", "local", "ray") for file in folder.glob(f".{method}.*.{kind}")]
            if kept:
                steps = kept[0].name.split(".")[-2]
                asked = int(steps) if steps.isdecimal() else None
                yield Unfinished(dataset, method, asked, _reached(kept[0]), lock, _time(kept[0]))
            elif lock is not None:
                yield Unfinished(dataset, method, None, None, lock, None)


def in_words(one: Unfinished) -> str:
    """How far it is, as far as its files tell."""
    steps = "" if one.steps is None else f" of {one.steps} steps"
    parts = [f"at step {one.step}{steps}" if one.step is not None else f"of {one.steps} steps" if steps else ""]
    parts += [f"{text} {_clock(at)}" for text, at in (("begun", one.begun), ("saved", one.saved)) if at is not None]
    if one.begun is None:
        parts.append("interrupted: the same command goes on from there")
    return ", ".join(filter(None, parts))


def _clock(seconds: float) -> str:
    today = time.strftime("%Y-%m-%d", time.localtime(seconds)) == time.strftime("%Y-%m-%d")
    return time.strftime("at %H:%M:%S" if today else "on %Y-%m-%d at %H:%M", time.localtime(seconds))


def _time(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:  # gone meanwhile
        return None


def _reached(checkpoint: Path) -> int | None:
    """Its step, without reading the tensors in it, which can be gigabytes."""
    if checkpoint.is_dir():
        return None
    try:
        saved = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
        return int(saved["steps"][1])
    except (OSError, RuntimeError, EOFError, KeyError, TypeError, ValueError, IndexError, pickle.UnpicklingError):
        return None  # replaced just now, or of another version


def state(out: Path) -> tuple[tuple[str, int, int], ...]:
    """Differs as soon as a result or a checkpoint does."""
    return tuple(
        (str(file), at.st_mtime_ns, at.st_size)
        for pattern in ("*/*/cell.json", "*/*/curves.npz", "*/.*")
        for file in sorted(out.glob(pattern))
        if (at := _stat(file)) is not None
    )


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None
