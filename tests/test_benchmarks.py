"""The benchmarks run: they look inside the library, and must not be forgotten when it changes. No time is tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_overhead(tmp_path: Path) -> None:
    result = tmp_path / "overhead.json"
    command = [sys.executable, "benchmarks/overhead.py", "--networks", "MLP", "--seconds", "1", "--json", str(result)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    parts = json.loads(result.read_text())["networks"]["MLP"]["parts"]
    assert all(parts["default"].values())  # each was called; what is left over may even be negative on a busy machine
    assert [part for part, seconds in parts["lookback=5 exact"].items() if not seconds] == ["sensitivities"]


def test_memory() -> None:
    code = (
        "import sys; sys.path.insert(0, 'benchmarks'); import memory; print(memory.extra('cpu', 'SGD', 5, True).kept)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True)
    assert 1.9 < float(done.stdout) < 2.1  # the guard's point: weights and momentum


def test_memory_of_the_default_at_its_highest() -> None:
    code = (
        "import sys; sys.path.insert(0, 'benchmarks'); import memory;"
        "print(*(memory.extra('cpu', optimizer, None, True).highest for optimizer in ('SGD', 'Adam')))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True)
    # Sensitivities of weights and state for each of three values; weights, gradient and state before the step; the
    # validation gradient; the training gradient with its graph, and what comes out of the Hessian product, in whose
    # place the guard's old point was before. That makes 6 + 3 + 1 + 2 for SGD, and 9 + 4 + 1 + 3 for Adam.
    sgd, adam = map(float, done.stdout.split())
    assert 11.5 < sgd < 12.5 and 16.5 < adam < 17.5


def test_memory_at_its_highest() -> None:
    code = (
        "import sys; sys.path.insert(0, 'benchmarks'); import memory;print(memory.extra('cpu', 'SGD', 5, True).highest)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True)
    # Weights, gradient and momentum before the step; two adjoints; what goes into a Hessian product, and what comes
    # out; the training gradient with its graph. That makes 8, and a rest for what is computed a piece at a time.
    assert 7.5 < float(done.stdout) < 8.5


def test_population(tmp_path: Path) -> None:
    result = tmp_path / "population.json"
    command = [sys.executable, "benchmarks/population.py", "--replicas", "1", "3", "--json", str(result)]
    said = subprocess.run([*command, "--quick"], check=True, cwd=ROOT, capture_output=True, text=True).stdout
    assert "hypergradients of both agree to" in said
    times = json.loads(result.read_text())["milliseconds"]
    assert all(len(rounds) == 2 for found in times.values() for rounds in found.values())
    subprocess.run([*command, "--whole-run", "--steps", "20"], check=True, cwd=ROOT, capture_output=True)
    assert all(seconds["first"] > 0 for seconds in json.loads(result.read_text())["seconds"].values())


def test_search(tmp_path: Path) -> None:
    """Without Ray, which has tests of its own."""
    result = tmp_path / "search.json"
    command = [sys.executable, "benchmarks/search.py", "--trials", "4", "8", "--steps", "16", "--workers"]
    said = subprocess.run([*command, "--json", str(result)], check=True, cwd=ROOT, capture_output=True, text=True)
    assert "a trial" in said.stdout and json.loads(result.read_text())["seconds"]["local"].keys() == {"begin", "trial"}


def test_language_model(tmp_path: Path, real_data: Path) -> None:
    result = tmp_path / "language-model.json"
    sizes = ["--steps", "20", "--batch", "2", "--width", "16", "--layers", "1", "--words", "2000"]
    command = [sys.executable, "benchmarks/language_model.py", "--device", "cpu", *sizes, "--json", str(result)]
    subprocess.run(
        command, check=True, cwd=ROOT, capture_output=True, env={**os.environ, "ONEPASS_DATA": str(real_data)}
    )
    found = json.loads(result.read_text())
    assert len(found["fixed"]) == 7 and all(run["path"] for run in found["tuned"])


def test_failures() -> None:
    command = [sys.executable, "benchmarks/failures.py", "--steps", "20", "--seeds", "1"]
    said = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout
    names = [line for line in said.splitlines() if not line.startswith(" ")]
    assert len(names) == 9 and "tanh, float32: cosine 1.000" in said
