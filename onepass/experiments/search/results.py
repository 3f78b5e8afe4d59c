"""What a search for a user's own model has found: as files, and as a table."""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from onepass.experiments import writing
from onepass.experiments.errors import UsageError
from onepass.experiments.search.problem import Found, Trial, best
from onepass.experiments.writing import Grid, Text
from onepass.history import Schedule

MODEL, SCHEDULE, TRIALS, RESULT = "model.pt", "schedule.json", "trials.csv", "result.json"
SHOWN = 10  # trials of a table

Row = Mapping[str, Any]


def write(folder: Path, described: Row, found: Found) -> None:
    """The result last: where it is, the search has ended, and all other files are there."""
    order = sorted(range(len(found.trials)), key=lambda place: _worse(found.trials[place]))
    trials = [_plain(found.trials[place]) for place in order]
    chosen = [rank for rank, place in enumerate(order) if place in set(found.chosen)]
    kept = best(folder)
    if kept is not None:
        model = kept.model
        _replace(folder / MODEL, lambda path: torch.save(model, path))
        if kept.schedule:
            _replace(folder / SCHEDULE, Schedule(**kept.schedule).to_json)
    _replace(folder / TRIALS, lambda path: _to_csv(path, trials))
    first = trials[0] if kept is not None else None
    result = {**described, "trials": trials, "chosen": chosen, "best": first}
    _replace(folder / RESULT, lambda path: path.write_text(json.dumps(result, allow_nan=False) + "\n"))


def read(folder: Path) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads((folder / RESULT).read_text())
    except ValueError as error:
        raise UsageError(f"{folder / RESULT} cannot be read ({error}); give another --name") from error
    return result


def written(folder: Path) -> dict[str, Path]:
    """The files that there are, by what they hold."""
    names = {"model": MODEL, "schedule": SCHEDULE, "trials": TRIALS}
    return {what: folder / name for what, name in names.items() if (folder / name).exists()}


def show(result: Row, files: Mapping[str, Path]) -> None:
    """The best trials, and where everything is."""
    names = _tuned(result["trials"])
    legend = f"valid{' and test' * result['tested']}: {result['metric']}, over all batches"
    under = "; below each value, what it started from"
    wide = _width(_grid(result, names, narrow=False)) <= shutil.get_terminal_size().columns
    writing.show(
        lambda narrow: [_grid(result, names, narrow=narrow or not wide)], legend + under * (bool(names) and not wide)
    )
    if "model" not in files:
        print("every trial was lost: there is no model; give lower starts, or more --budget")
    for what, path in files.items():
        print(f"{what:8} {path}")


# --- the table ---


def _grid(result: Row, names: Sequence[str], *, narrow: bool) -> Grid:
    """Values as "start -> end"; on a narrow terminal one below the other. What was not tuned has but one."""
    trials = result["trials"][:SHOWN]
    known = list(trials[0]["start"]) if trials else []
    losses = ["valid", "test"] if result["tested"] else ["valid"]
    body = [
        [Text(str(trial["number"])), *(_value(trial, name, name in names, narrow) for name in known)]
        + [Text(_loss(trial[loss]), bold=rank == 0) for loss in losses]
        for rank, trial in enumerate(trials)
    ]
    ended = len(result["trials"])
    several = f"the best {len(trials)} of " if len(trials) < ended else ""
    note = (
        f"{result['search']}, {result['starts']} starts, {result['seconds']:.0f} s: {several}{ended} "
        f"trial{'s' * (ended != 1)} of {result['steps']} steps"
    )
    return Grid(result["study"], note, ["trial", *(name.replace("_", " ") for name in known), *losses], body)


def _value(trial: Row, name: str, tuned: bool, narrow: bool) -> Text:
    start, end = (f"{trial[which][name]:.3g}" if trial[which][name] is not None else "-" for which in ("start", "end"))
    if not tuned:
        return Text(end)
    return Text(end, under=start) if narrow else Text(f"{start} -> {end}")


def _loss(value: float | None) -> str:
    return "lost" if value is None else f"{value:.4g}"


def _tuned(trials: Sequence[Row]) -> list[str]:
    """The names whose values moved in some trial."""
    names = list(trials[0]["start"]) if trials else []
    return [name for name in names if any(trial["start"][name] != trial["end"][name] for trial in trials)]


def _width(grid: Grid) -> int:
    columns = zip(grid.head, *([field.text for field in row] for row in grid.body), strict=True)
    return sum(max(map(len, column)) + 3 for column in columns)  # with what stands between them


# --- the files ---


def _worse(trial: Trial) -> tuple[float, int, int]:
    """Lowest validation loss first, lost ones last."""
    return trial.valid if math.isfinite(trial.valid) else math.inf, trial.repetition, trial.number


def _plain(trial: Trial) -> dict[str, Any]:
    """JSON has no NaN: ``null`` stands for what was lost, or not looked at."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(one) for name, one in value.items()}
        return value if math.isfinite(value) else None

    return {name: plain(value) for name, value in trial._asdict().items()}


def _to_csv(path: Path, trials: Sequence[Row]) -> None:
    names = list(trials[0]["start"]) if trials else []
    heads = ["number", "repetition", "steps", "valid", "test"]
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*heads, *(f"start_{name}" for name in names), *(f"end_{name}" for name in names), "returns"])
        for trial in trials:
            values = [trial[which][name] for which in ("start", "end") for name in names]
            writer.writerow([*(trial[name] for name in heads), *values, trial["returns"]])


def _replace(path: Path, write_to: Callable[[Path], Any]) -> None:
    """Written beside its place and then moved there: it is whole or not there."""
    beside = path.with_name(f".{path.name}.partial")
    write_to(beside)
    os.replace(beside, path)
