"""What ``tuner.log_to`` writes, read back from the files of the real packages."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import onepass
from onepass.loggers import scalars_of
from tests.problems import mlp, mse, regression, train_step

Written = dict[str, dict[int, float]]  # name -> step -> value


def tuner_of(*, lr: float = 1e-3, **settings: Any) -> tuple[onepass.Tuner, Callable[[int], None]]:
    """A tuner, and what takes some steps with it."""
    model = mlp(3, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    tuner = onepass.Tuner(model, optimizer, mse, [regression(seed=2)], interval=2, **settings)

    def train(steps: int) -> None:
        for _ in range(steps):
            train_step(model, optimizer, regression())
            tuner.step(regression())

    return tuner, train


def expected(tuner: onepass.Tuner) -> Written:
    found: Written = {}
    start = {f"onepass/{name}": value for name, (value,) in tuner.history.start.items()}
    for step, scalars in [(0, start), *((record.step, scalars_of(record)) for record in tuner.history)]:
        for name, value in scalars.items():
            found.setdefault(name, {})[step] = value
    return found


def assert_written(written: Written, tuner: onepass.Tuner) -> None:
    wanted = expected(tuner)
    assert written.keys() == wanted.keys()
    assert {"onepass/lr", "onepass/valid_loss", "onepass/hypergradient/momentum", "onepass/guard"} <= wanted.keys()
    for name, values in wanted.items():
        assert written[name] == pytest.approx(values, rel=1e-6), name  # TensorBoard keeps float32


def test_a_function() -> None:
    written: Written = {}
    tuner, train = tuner_of()
    assert tuner.log_to(lambda name, value, step: written.setdefault(name, {}).update({step: value})) is tuner
    train(6)
    assert_written(written, tuner)


def test_tensorboard(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tuner, train = tuner_of()
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        tuner.log_to(writer)
        train(6)
    events = reader.EventAccumulator(str(tmp_path)).Reload()
    names = events.Tags()["scalars"]
    assert_written({name: {e.step: e.value for e in events.Scalars(name)} for name in names}, tuner)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["the module", "a run"])
def test_mlflow(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    tuner, train = tuner_of()
    with mlflow.start_run() as run:
        tuner.log_to(mlflow if kind == "the module" else run)
        train(3)
        if kind == "the module":
            train(3)
    if kind == "a run":  # also after it has ended
        train(3)
    client = mlflow.MlflowClient()
    names = client.get_run(run.info.run_id).data.metrics
    history = {name: client.get_metric_history(run.info.run_id, name) for name in names}
    assert_written({name: {m.step: m.value for m in found} for name, found in history.items()}, tuner)


def test_weights_and_biases(tmp_path: Path) -> None:
    """Offline; a loop that logs by a step of its own is not disturbed."""
    wandb = pytest.importorskip("wandb")
    tuner, train = tuner_of()
    settings = wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True)
    with wandb.init(mode="offline", dir=str(tmp_path), settings=settings) as run:
        tuner.log_to(run)
        for step in range(6):
            train(1)
            run.log({"mine": step})
    wandb.teardown()  # only then is all of it on disk
    rows = rows_of(next(tmp_path.rglob("*.wandb")))
    assert [row["mine"] for row in rows if "mine" in row] == list(range(6))
    written: Written = {}
    for row in rows:
        for name in row.keys() - {"onepass/step"}:
            if name.startswith("onepass/"):
                written.setdefault(name, {})[row["onepass/step"]] = row[name]
    assert_written(written, tuner)


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of an offline run's history."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for data in chunks_of(path.read_bytes()):
        record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item})
    return rows


def chunks_of(file: bytes) -> Iterator[bytes]:
    """The file is a log in blocks of 32 KiB after 7 bytes of its own: checksum, length and kind before each part."""
    place, data, first_or_only, last_or_only = 7, b"", (1, 2), (1, 4)
    while place + 7 <= len(file):
        if 32768 - place % 32768 < 7:  # too little room for another part in this block
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", file, place)
        part, place = file[place + 7 : place + 7 + length], place + 7 + length
        data = part if kind in first_or_only else data + part
        if kind in last_or_only:
            yield data


@pytest.mark.filterwarnings("ignore:the run diverged:UserWarning")
def test_the_guard_is_seen() -> None:
    written: dict[int, float] = {}
    tuner, train = tuner_of(lr=0.5)

    def keep(name: str, value: float, step: int) -> None:
        if name == "onepass/guard":
            written[step] = value

    tuner.log_to(keep)
    train(40)
    went_back = {record.step for record in tuner.history if record.guard}
    assert went_back
    assert {step for step, value in written.items() if value} == went_back


def test_groups_and_values_per_weight() -> None:
    model = mlp(3, 8, 1)
    optimizer = onepass.optim.SGD(onepass.per_element(model.parameters(), lr=1e-2))
    tuner = onepass.Tuner(model, optimizer, mse, [regression(seed=2)], interval=1)
    names: set[str] = set()
    tuner.log_to(lambda name, value, step: names.add(name))
    train_step(model, optimizer, regression())
    tuner.step(regression())
    assert {"onepass/lr/0/median", "onepass/lr/3/max", "onepass/hypergradient/lr/0/min"} <= names


def test_what_is_not_a_number_is_left_out() -> None:
    record = onepass.TunerStep(1, {"lr": [0.1]}, {"lr": [math.nan]}, math.nan, skipped="the loss is not finite")
    assert scalars_of(record) == {"onepass/lr": 0.1, "onepass/guard": 0.0, "onepass/skipped": 1.0}


@pytest.mark.parametrize("bad", [object(), 3, "runs/", dict])
def test_something_else(bad: Any) -> None:
    message = "logger must be .* or a function of .name, value, step., but got"
    with pytest.raises(ValueError, match=message):
        tuner_of()[0].log_to(bad)
