"""``onepass reproduce --engine ray``, on a Ray of this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'onepass[ray]'")

from onepass.cli import main
from onepass.experiments import cluster, runs
from onepass.experiments.connection import connect
from onepass.experiments.errors import UsageError

METHODS = ["random", "one-pass"]
CELLS = ["reproduce", "uci", "--datasets", "diabetes", "--methods", *METHODS, "--replicas", "4", "--steps", "20"]
ON_RAY = [*CELLS, "--engine", "ray", "--json", "--out"]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Ray runs in this process, once for all tests here; others can reach it at this address."""
    with connect("local") as ray:
        yield ray.get_runtime_context().gcs_address


def results(text: str) -> list[dict[str, Any]]:
    """Without what differs from run to run: times, and on how many threads."""
    other = ("seconds", "runtimes", "device")
    return [{name: value for name, value in one.items() if name not in other} for one in json.loads(text)]


def attached(out: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """A process of its own, as a user starts it."""
    line = [sys.executable, "-m", "onepass", *ON_RAY, str(out), *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **environment})


def test_the_same_results_as_here(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ON_RAY, str(tmp_path / "ray")]) == 0
    there = capsys.readouterr()
    assert "2 cells: 0 finished, 2 to compute on Ray" in there.err and "[2/2] diabetes, " in there.err
    assert main([*CELLS, "--json", "--device", "cpu", "--quiet", "--out", str(tmp_path / "here")]) == 0
    for found, expected in zip(results(there.out), results(capsys.readouterr().out), strict=True):
        for name in ("values", "mean", "median"):
            assert found.pop(name) == pytest.approx(expected.pop(name), rel=1e-5), name
        assert found == expected
    cells = [json.loads((tmp_path / "ray" / "diabetes" / name / "cell.json").read_text()) for name in METHODS]
    assert [cell["device"] for cell in cells] == ["cpu, 1 thread"] * 2
    assert not list((tmp_path / "ray" / "diabetes").glob(".*")), "no locks, no halves"


def test_from_another_process(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun = attached(tmp_path, "--address", "auto", RAY_ADDRESS=address)
    shown, told = begun.communicate(timeout=120)
    assert begun.returncode == 0, told
    assert [one["method"] for one in json.loads(shown)] == METHODS
    beginnings = ("2 cells", "[1/2]", "[2/2]", "wrote")
    assert [line for line in told.splitlines()[:-1] if not line.startswith(beginnings)] == [], "Ray is quiet"
    for engine in ("local", "ray"):  # what is finished is not repeated, by whichever engine
        assert main([*CELLS, "--engine", engine, "--out", str(tmp_path)]) == 0
        assert "2 finished, 0 to compute" in capsys.readouterr().err


def test_a_killed_worker_costs_a_retry(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train, marker = cluster._trained, tmp_path / "killed"

    def killed_once(*arguments: Any) -> Any:
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return train(*arguments)

    monkeypatch.setattr(cluster, "_trained", killed_once)
    assert main([*ON_RAY, str(tmp_path / "out"), "--methods", "random"]) == 0
    assert marker.exists()
    assert [one["method"] for one in json.loads(capsys.readouterr().out)] == ["random"]


@pytest.mark.parametrize("way", ["an error", "every worker killed"])
def test_a_failure_leaves_the_others(way: str, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = cluster._trained

    def fails(request: Any, *arguments: Any) -> Any:
        if request.method == "random" and way == "an error":
            raise MemoryError("as large as that")
        if request.method == "random":
            os.kill(os.getpid(), signal.SIGKILL)
        return train(request, *arguments)

    monkeypatch.setattr(cluster, "_trained", fails)
    monkeypatch.setattr(cluster, "RETRIES", 0)
    requests = [runs.Request("diabetes", method, 4, 20) for method in METHODS]
    with pytest.raises((MemoryError, UsageError), match=r"as large as that|random was lost with its worker"):
        list(cluster.computed(requests, tmp_path))
    assert runs.finished(requests[1], tmp_path) is not None
    assert runs.finished(requests[0], tmp_path) is None


def test_interrupted_what_is_finished_stays(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train = cluster._trained

    def slow(request: Any, *arguments: Any) -> Any:
        if request.method == "one-pass":
            time.sleep(600)
        return train(request, *arguments)

    def impatient(*arguments: Any) -> Any:
        cell = runs.keep(*arguments)
        signal.raise_signal(signal.SIGINT)
        return cell

    monkeypatch.setattr(cluster, "_trained", slow)
    monkeypatch.setattr(cluster, "keep", impatient)
    assert main([*ON_RAY, str(tmp_path)]) == 130
    assert "the same command goes on from there" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "diabetes").iterdir()] == ["random"]


# --- mistakes ---


def told(line: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(line) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cuda"], "'cuda' was asked for, but the Ray cluster has no GPU"),
        (["--device", "cuda:1"], "--device must be cpu or cuda with --engine ray"),
        (["--backend", "graphs"], "--backend graphs needs a CUDA device"),
    ],
)
def test_what_the_cluster_does_not_have(
    arguments: list[str], message: str, address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in told([*ON_RAY, str(tmp_path), *arguments], capsys)


def test_an_address_without_ray(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = [*CELLS, "--address", "auto", "--out", str(tmp_path)]
    assert "--address is for --engine ray, but --engine is local" in told(line, capsys)


def test_no_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "--engine ray needs ray: pip install 'onepass[ray]'" in told([*ON_RAY, str(tmp_path)], capsys)


@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:9", "nowhere", "ftp://127.0.0.1:9", "host:x"])
def test_nobody_at_the_address(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    began = time.monotonic()
    with pytest.raises(UsageError, match=r"cannot use Ray at|--address must be auto"), connect(address):
        pass
    assert time.monotonic() - began < 15
