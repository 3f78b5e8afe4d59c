"""A population killed at any moment and started again ends where an uninterrupted one ends, bit for bit."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import onepass
from onepass import checkpoint
from onepass.journal import PopulationHistory
from tests.populations import TRAIN, VALID, batches, population, trained, weights
from tests.problems import Batch, mse

STEPS = 60


def noisy() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 1)).double()


def shuffled() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*TRAIN), batch_size=8, shuffle=True)


def run(path: Path | None, pause: float = 0.0) -> onepass.Population:
    """Shuffled batches, dropout, running statistics, and a guard that has something to do."""

    def loss(model: Any, batch: Batch) -> Tensor:
        time.sleep(pause)
        return mse(model, batch)

    start = {"lr": [1e-2, 0.1, 30.0], "momentum": 0.9}
    found = population(model=noisy, loss=loss, rule="sgd", start=start, block=2, interval=4)
    found.run(shuffled(), onepass.Minibatches(VALID, 4, seed=3), steps=STEPS, checkpoint=path, every=8)
    return found


def told(found: onepass.Population) -> str:
    """All that a population knows, to the last bit."""
    models = [{name: t.tolist() for name, t in found.model(r).state_dict().items()} for r in range(found.replicas)]
    values = {name: value.tolist() for name, value in found.values().items()}
    return repr((found.steps, models, values, found.history.to_dict()))


def slowly(path: str) -> None:
    run(Path(path), pause=0.02)


def test_killed_and_started_again(tmp_path: Path) -> None:
    path = tmp_path / "population.pt"
    code = "import sys; from tests.test_population_resume import slowly; slowly(sys.argv[1])"
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], cwd=Path(__file__).parents[1])
    patience = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None and time.monotonic() < patience
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    _, reached = torch.load(path)["steps"]
    assert 0 < reached < STEPS
    whole = run(None)
    assert whole.history.returns[2] > 0
    assert told(run(path)) == told(whole)
    assert [file.name for file in tmp_path.iterdir()] == ["population.pt"]


# --- the same within one process ---


def trained_to(steps: int, path: Path | None, train: Any = None, **settings: Any) -> onepass.Population:
    found = population(**settings)
    found.run(train or [TRAIN], [VALID], steps=steps, checkpoint=path, every=10)
    return found


def test_a_finished_checkpoint_does_nothing_more(tmp_path: Path) -> None:
    path = tmp_path / "population.pt"
    whole = trained_to(12, path)
    before = path.stat().st_mtime_ns, path.read_bytes()
    calls = []

    def counted(model: Any, batch: Batch) -> Tensor:
        calls.append(1)
        return mse(model, batch)

    assert told(trained_to(12, path, loss=counted)) == told(whole)
    assert len(calls) <= 4  # a look at the first batches
    assert (path.stat().st_mtime_ns, path.read_bytes()) == before


def test_a_saving_that_fails_leaves_the_file_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "population.pt"
    trained_to(10, path)
    before = path.read_bytes()

    def full(state: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", full)
        with pytest.raises(OSError, match="no space left"):
            trained_to(20, path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["population.pt"]
    assert told(trained_to(20, path)) == told(trained_to(20, None))


def test_what_a_killed_program_was_writing_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / ".population.pt.partial").write_bytes(b"half")
    trained_to(10, tmp_path / "population.pt")
    assert [file.name for file in tmp_path.iterdir()] == ["population.pt"]


LOST: dict[str, Any] = {"lr": [0.05, 0.01, 1e200]}

KINDS: dict[str, dict[str, Any]] = {
    "per element": {"rule": "adamw", "start": {"lr": [1e-3, 1e-2, 1e-1]}, "per_element": ("lr",)},
    "through real steps": {"unroll": 15, "guard": None, "train": batches(3)},
    "restarting": {"restart": True, "interval": 5},
    "scaled": {"tune": (), "scale": {"lr": onepass.Uniform(0.5, 0.9)}, "interval": 5},
    "mini-batches per replica": {"train": onepass.Minibatches(TRAIN, 8, per_replica=True), "block": 2},
    "one lost": {"guard": None, "start": LOST, "block": 2},
    "diverging at first": {"start": {"lr": [0.5, 5.0, 50.0], "momentum": 0.9}},
}


def assert_resumed(path: Path, **settings: Any) -> None:
    """Stopped after ten steps, and taken up by another population."""
    trained_to(10, path, **settings)
    assert told(trained_to(24, path, **settings)) == told(trained_to(24, None, **settings))


class Interrupted:
    """Ctrl-C after so many steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __iter__(self) -> Any:
        yield from [TRAIN] * self.steps
        raise KeyboardInterrupt


def test_an_interrupted_part_has_no_time(tmp_path: Path) -> None:
    """Looked at every 20 steps and saved every 10: what is taken up begins in the middle between two looks."""

    def run(train: Any) -> PopulationHistory:
        found, watched, path = population(), {"valid": (mse, VALID)}, tmp_path / "population.pt"
        with suppress(KeyboardInterrupt):
            found.run(train, [VALID], steps=60, measure=watched, measure_every=20, checkpoint=path, every=10)
        return found.history

    first, second = run(Interrupted(35)), run([TRAIN])
    assert (first.measured_steps, second.measured_steps) == ([20], [20, 40, 60])
    assert second.measured_seconds[0] == first.measured_seconds[0]
    assert [math.isnan(seconds) for seconds in second.measured_seconds] == [False, True, False]


def test_checkpoints_of_another_version_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "population.pt"
    monkeypatch.setattr(checkpoint, "FORM", 2)
    population().run([TRAIN], [VALID], steps=10, checkpoint=path)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="must have form 3, but has form 2: another version of onepass wrote it"):
        population().run([TRAIN], [VALID], steps=10, checkpoint=path)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kind", KINDS)
def test_taken_up_by_another_population(kind: str, tmp_path: Path) -> None:
    assert_resumed(tmp_path / "folder" / "population.pt", **KINDS[kind])


def test_dropout_beside_a_lost_replica_is_taken_up(tmp_path: Path) -> None:
    """Its block was cut in two on the way."""
    assert_resumed(tmp_path / "population.pt", model=noisy, guard=None, start=LOST)


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


def pair_loss(model: Any, pair: Pair) -> Tensor:
    return mse(model, (pair.x, pair.y))


def test_batches_keep_their_type(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"loss": pair_loss, "unroll": 12, "guard": None, "train": [Pair(*TRAIN)]}
    for steps in (10, 20):
        found = population(**{name: value for name, value in settings.items() if name != "train"})
        found.run(settings["train"], [Pair(*VALID)], steps=steps, checkpoint=tmp_path / "population.pt")


def test_saved_as_often_as_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    original = checkpoint.save

    def save(path: Path, state: dict[str, Any]) -> None:
        saved.append(state["steps"][1])
        original(path, state)

    monkeypatch.setattr(checkpoint, "save", save)
    population(interval=2).run([TRAIN], [VALID], steps=15, checkpoint=tmp_path / "a.pt", every=5)
    assert saved == [6, 12, 15]  # at the end of an interval
    saved.clear()
    population(interval=1).run([TRAIN], [VALID], steps=20, checkpoint=tmp_path / "b.pt")
    assert saved == list(range(2, 21, 2))


def test_a_path_may_be_a_string_and_its_folder_new(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "population.pt"
    found = population()
    found.run([TRAIN], [VALID], steps=4, checkpoint=str(path))
    assert path.exists()
    assert torch.equal(weights(found), weights(trained(4)))


def test_an_interrupted_run_can_go_on() -> None:
    """Ctrl-C in a notebook: what was trained so far is there, and the rest can follow."""

    found = population()
    with pytest.raises(KeyboardInterrupt):
        found.run(Interrupted(25), [VALID], steps=40)
    assert found.steps == 20
    assert torch.equal(weights(found), weights(trained(20)))
