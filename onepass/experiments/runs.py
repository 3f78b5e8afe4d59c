"""Results on disk: one folder a cell, data set x method, which is either whole or not there.

OUT/uci-energy/one-pass/cell.json     what was asked, where and how long it ran, its figures
OUT/uci-energy/one-pass/curves.npz    test loss and hyperparameters over time
OUT/uci-energy/.one-pass.4000.pt      a checkpoint, while the cell of so many steps is being computed
OUT/uci-energy/.asha-random.4000.local/       the same of a search, by its engine
OUT/sensitivity/T3-i5/uci-energy/...  cells of a study that changes something: each variant is such a folder of its own
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows has no such locks: there, nobody warns who runs a command twice at once
    fcntl = None  # type: ignore[assignment]

import numpy as np
import torch

from onepass.experiments.datasets import load
from onepass.experiments.errors import UsageError
from onepass.experiments.methods import METHODS
from onepass.experiments.protocol import PROTOCOLS
from onepass.experiments.search import Where
from onepass.experiments.search.cells import searched
from onepass.experiments.statistics import Array, Summary, best_of, summary
from onepass.experiments.training import Outcome, train
from onepass.experiments.variants import USUAL, Variant, varied
from onepass.version import __version__


@dataclass(frozen=True)
class Request:
    """What determines the numbers of a cell.

    Attributes:
        split: of the data; ``None`` for the paper's own.
        engine: of a search. What trains every start for itself does the same with each.
        variant: what a study changes.
    """

    dataset: str
    method: str
    replicas: int
    steps: int
    seed: int = 0
    split: int | None = None
    engine: str = "local"
    variant: Variant = USUAL


@dataclass(frozen=True)
class Cell:
    """A finished training of many starts.

    Attributes:
        values: final test losses of the starts that count: all, or the best of every few.
        others: further metrics of the same starts.
        seconds: of wall time; of the last part, if ``resumed``.
        hypergradients: of each start, in raw space, at its last hyper step; none in cells of older versions.
    """

    request: Request
    metric: str
    values: list[float]
    seconds: float
    device: str
    resumed: bool
    versions: dict[str, str]
    test: list[float]
    valid: list[float]
    others: dict[str, list[float]]
    start: dict[str, list[float]]
    end: dict[str, list[float]]
    returns: list[int]
    folder: Path
    hypergradients: dict[str, list[float]] = field(default_factory=dict)

    @property
    def summary(self) -> Summary:
        return summary(self.values)

    def curves(self) -> dict[str, Array]:
        """``steps`` ``(points,)``; ``test`` and the name of every hyperparameter ``(points, starts)``.

        And, but for cells of older versions, ``seconds`` ``(points,)``: what training all starts took since the point
        before, NaN where it was interrupted in between.
        """
        try:
            with np.load(self.folder / "curves.npz", allow_pickle=False) as saved:
                return {name: saved[name].astype(np.float64) for name in saved.files}
        except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
            raise UsageError(
                f"{self.folder} has no readable curves.npz; move the folder away to compute it anew"
            ) from error

    def runtimes(self) -> Array:
        """Seconds of a whole run per start, at the pace of one part of it after the other.

        All starts are trained together, so that none has a time of its own. Interrupted parts are left out.
        """
        curves = self.curves()
        if "seconds" not in curves or METHODS[self.request.method].search is not None:
            return np.empty(0)
        pace = curves["seconds"] / np.diff(curves["steps"], prepend=0.0)
        found: Array = pace[np.isfinite(pace)] * self.request.steps / self.request.replicas
        return found

    def to_json(self) -> dict[str, Any]:
        """What ``onepass run --json`` prints."""
        found = self.summary
        asked = self.request
        return {
            "dataset": asked.dataset,
            "method": asked.method,
            "replicas": asked.replicas,
            "steps": asked.steps,
            "seed": asked.seed,
            "split": asked.split,
            "engine": asked.engine,
            **({} if asked.variant == USUAL else {"variant": asdict(asked.variant)}),
            "device": self.device,
            "metric": self.metric,
            **{name: _plain(value) for name, value in found._asdict().items() if name != "starts"},
            "seconds": self.seconds,
            "values": _short(self.values),
            "others": {name: _short(values) for name, values in self.others.items()},
            "runtimes": _short(self.runtimes()),
        }


def compute(
    request: Request,
    out: Path,
    *,
    device: str = "cpu",
    backend: str = "auto",
    data_dir: str | Path | None = None,
    progress: bool = False,
    address: str | None = None,
) -> Cell:
    """The cell, from disk if it is finished, else computed, going on from where it was killed."""
    done = finished(request, out)
    if done is not None:
        return done
    usual, row = PROTOCOLS[request.dataset], METHODS[request.method]
    data = load(usual.data or request.dataset, data_dir=data_dir, split=request.split)
    protocol, method, data = varied(request.variant, usual, row, data)
    with alone(request, out) as checkpoint:
        done = finished(request, out)  # by another process, just now
        if done is not None:
            return done
        resumed = checkpoint.exists()
        try:
            sizes: dict[str, Any] = {"replicas": request.replicas, "steps": request.steps, "seed": request.seed}
            if method.search is not None:
                where = Where(checkpoint, device, backend, progress, address)
                outcome = searched(protocol, method, data, where, engine=request.engine, **sizes)
            else:
                computed: dict[str, Any] = {"device": device, "backend": backend, "progress": progress}
                outcome = train(protocol, method, data, checkpoint=checkpoint, **sizes, **computed)
        except ValueError as error:
            if not resumed:
                raise
            raise UsageError(
                f"{out} holds an unfinished run of {request.dataset}, {request.method} that cannot go on ({error}); "
                f"give another --out, or delete {checkpoint}"
            ) from error
        return keep(request, out, outcome, here(device), resumed)


def keep(request: Request, out: Path, outcome: Outcome, made: dict[str, Any], resumed: bool = False) -> Cell:
    """The cell of what was trained, wherever that was: ``made`` is what ``here`` said there."""
    folder = _folder(request, out)
    _save(folder, {**_described(request, outcome), **made, "resumed": resumed}, outcome)
    unfinished = _checkpoint(request, folder)
    shutil.rmtree(unfinished) if unfinished.is_dir() else unfinished.unlink(missing_ok=True)
    return read(folder)


def here(device: str) -> dict[str, Any]:
    """What a cell tells about where it was computed."""
    versions = {"onepass": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return {"device": _device_name(device), "versions": versions}


@contextmanager
def alone(request: Request, out: Path) -> Iterator[Path]:
    """Nobody else computes the same cell meanwhile. Yields where an unfinished run of it is kept."""
    folder = _folder(request, out)
    folder.parent.mkdir(parents=True, exist_ok=True)
    checkpoint = _checkpoint(request, folder)
    with _locked(folder):
        yield checkpoint


def _checkpoint(request: Request, folder: Path) -> Path:
    """Where an unfinished run is kept. One of another length could go on here, but would not end as it should."""
    kind = "pt" if METHODS[request.method].search is None else request.engine
    own = folder.with_name(f".{folder.name}.{request.steps}.{kind}")
    for other in folder.parent.glob(f".{folder.name}.*.{kind}"):
        if other != own:
            steps = other.name.split(".")[-2]
            raise UsageError(
                f"{folder.parent} holds an unfinished run of {request.method} with {steps} steps, but now steps is "
                f"{request.steps}; give another --out, the same steps, or delete {other}"
            )
    return own


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """By a lock of the system's, which ends with the process."""
    lock = folder.with_name(f".{folder.name}.lock")
    with open(lock, "w") as file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(f"another process is computing {folder}; wait for it, or give another --out") from error
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def check_backend(backend: str, device: str) -> None:
    if backend == "graphs" and device == "cpu":
        raise UsageError("--backend graphs needs a CUDA device, but this runs on the CPU; use traced or compiled")


def finished(request: Request, out: Path) -> Cell | None:
    """The cell if it is there; an error if what is there was asked differently."""
    folder = _folder(request, out)
    if not (folder / "cell.json").exists():
        return None
    cell = read(folder)
    for name in asdict(request):
        had, value = getattr(cell.request, name), getattr(request, name)
        if had != value:
            raise UsageError(
                f"{folder} holds a run with {name} {had}, but now {name} is {value}; give another --out, or the same "
                f"{name}"
            )
    return cell


def read(folder: Path) -> Cell:
    try:
        saved = json.loads((folder / "cell.json").read_text())
        asked = saved.pop("request")
        request = Request(**{**asked, "variant": Variant(**asked.get("variant", {}))})
        lists = {name: _numbers(saved.pop(name)) for name in ("values", "test", "valid", "start", "end")}
        lists |= {name: _numbers(saved.pop(name, {})) for name in ("others", "hypergradients")}
        return Cell(request=request, folder=folder, **lists, **saved)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"{folder} holds no readable result ({error}); move it away") from error


def cells(out: Path) -> Iterator[Cell]:
    """All finished cells, in order of data set and method as in their tables."""
    for dataset in PROTOCOLS:
        for method in METHODS:
            folder = out / dataset / method
            if (folder / "cell.json").exists():
                yield read(folder)


def _folder(request: Request, out: Path) -> Path:
    return out / request.variant.place / request.dataset / request.method


def _described(request: Request, outcome: Outcome) -> dict[str, Any]:
    kept = torch.from_numpy(best_of(outcome.valid.tolist(), METHODS[request.method].best_of))
    return {
        "request": asdict(request),
        "metric": PROTOCOLS[request.dataset].metric,
        "seconds": round(outcome.seconds, 3),
        "values": [_plain(value) for value in outcome.test[kept].tolist()],
        "test": [_plain(value) for value in outcome.test.tolist()],
        "valid": [_plain(value) for value in outcome.valid.tolist()],
        "others": {name: [_plain(x) for x in value[kept].tolist()] for name, value in outcome.others.items()},
        "start": {name: value.tolist() for name, value in outcome.start.items()},
        "end": {name: [_plain(x) for x in value.tolist()] for name, value in outcome.end.items()},
        "returns": outcome.returns.tolist(),
        "hypergradients": {name: [_plain(x) for x in value.tolist()] for name, value in outcome.hypergradients.items()},
    }


def _save(folder: Path, described: dict[str, Any], outcome: Outcome) -> None:
    """Written under another name first, and then moved: a cell that is there is whole."""
    beside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    (beside / "cell.json").write_text(json.dumps(described, allow_nan=False) + "\n")
    curves = {"test": outcome.curve_test, **outcome.curve_values}
    arrays: dict[str, Any] = {name: value.float().numpy() for name, value in curves.items()}
    arrays |= {"steps": np.array(outcome.curve_steps), "seconds": np.array(outcome.curve_seconds)}
    np.savez_compressed(beside / "curves.npz", **arrays)
    os.replace(beside, folder)


def _device_name(device: str) -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(torch.device(device))
    threads = torch.get_num_threads()
    return f"cpu, {threads} thread{'s' if threads > 1 else ''}"


def _short(values: Iterable[float]) -> list[float | None]:
    """All the digits that float32 has."""
    return [_plain(float(f"{value:.7g}")) for value in values]


def _plain(value: float) -> float | None:
    """JSON has no NaN: ``null`` stands for a start that was lost."""
    return value if np.isfinite(value) else None


def _numbers(saved: Any) -> Any:
    if isinstance(saved, dict):
        return {name: _numbers(value) for name, value in saved.items()}
    return [float("nan") if value is None else value for value in saved]
