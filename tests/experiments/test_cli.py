"""Whole commands, as a user runs them."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from onepass.cli import main
from onepass.experiments.artefacts import ARTEFACTS
from onepass.experiments.methods import ALONE, METHODS
from onepass.experiments.protocol import PROTOCOLS, shuffled

SMALL = ["--replicas", "4", "--steps", "20", "--device", "cpu"]


def command(*arguments: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    # The machine is shared with other tests: threads that wait for each other would take all its time.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "onepass.cli", *arguments]
    return subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True, env=environment)


def test_list_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    for name in (*PROTOCOLS, *METHODS, *ARTEFACTS):
        assert re.search(rf"^  {re.escape(name)} ", shown, re.MULTILINE), name


@pytest.mark.parametrize("words", [[], ["demo"], ["list"], ["run"], ["reproduce"], ["search"], ["report"]])
def test_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main([*words, "--help"])
    assert exit.value.code == 0
    shown = capsys.readouterr().out
    assert "usage: onepass" in shown
    assert not words or words == ["list"] or re.search(r"minute|seconds", shown), "what does it cost?"


def test_run_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "diabetes", "one-pass", *SMALL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["dataset"], found["method"], found["replicas"], found["steps"]) == ("diabetes", "one-pass", 4, 20)
    assert len(found["values"]) == 4 and found["mean"] > 0 and found["diverged"] == 0


def test_run_prints_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["run", "diabetes", "random", *SMALL, "--out", str(tmp_path)]) == 0
    assert "Diabetes: test MSE" in capsys.readouterr().out
    assert (tmp_path / "diabetes" / "random" / "cell.json").exists()


@pytest.fixture
def small_case(request: pytest.FixtureRequest) -> list[str]:
    """A set of the paper where there is real data, else one that comes with scikit-learn."""
    try:
        return ["--datasets", "uci-energy", "--data-dir", str(request.getfixturevalue("real_data"))]
    except pytest.skip.Exception:
        return ["--datasets", "diabetes"]


def test_reproduce_everything(capsys: pytest.CaptureFixture[str], tmp_path: Path, small_case: list[str]) -> None:
    """Every method, a table, with the paper's numbers if it has them, all figures, a report."""
    names = ["uci", "uci-curves", "uci-cdfs", "uci-learning-rates"]
    line = ["reproduce", *names, *SMALL, "--out", str(tmp_path), *small_case]
    assert main(line) == 0
    shown = capsys.readouterr()
    assert "Ours WD+LR+M" in shown.out
    assert "paper" not in shown.out, "so few steps cannot be compared"
    assert f"{len(ALONE)} cells: 0 finished, {len(ALONE)} to compute on cpu" in shown.err
    for name in ("uci.md", "uci.tex", "uci.html", *(f"{name}.png" for name in names[1:]), "report.html"):
        assert (tmp_path / name).stat().st_size > 500, name
    assert main(line) == 0
    assert f"{len(ALONE)} finished, 0 to compute" in capsys.readouterr().err


def test_reproduce_the_second_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Of a small set with the same metrics: every table is printed, each once."""
    names = ["fashion-mnist", "fashion-mnist-curves", "fashion-mnist-cdfs", "runtimes"]
    methods = ["random", "random-3-batched", "one-pass"]
    line = ["reproduce", *names, "--datasets", "digits", "--methods", *methods, *SMALL, "--out", str(tmp_path)]
    assert main(line) == 0
    shown = capsys.readouterr()
    assert "3 cells: 0 finished, 3 to compute on cpu" in shown.err
    for title in ("Digits: test cross-entropy", "Digits: test error", "Digits: milliseconds per start"):
        assert shown.out.count(title) == 1
    assert shown.out.count("Random (3-batched)") == 2, "its runs are those of Random"
    for name in ("fashion-mnist.md", "runtimes.md", "runtimes.tex", "runtimes.html", *(f"{n}.png" for n in names[1:])):
        assert (tmp_path / name).stat().st_size > 200, name
    assert "What a run costs" in (tmp_path / "report.html").read_text()


def test_runs_of_older_versions_have_no_times(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = ["reproduce", "runtimes", "--datasets", "diabetes", *SMALL, "--quiet", "--out", str(tmp_path), "--methods"]
    assert main([*line, "random", "one-pass"]) == 0
    assert "Left out" not in capsys.readouterr().out
    timeless(tmp_path / "diabetes" / "one-pass")
    assert main([*line, "random", "one-pass"]) == 0
    told = "Left out, as an older version computed them and kept no times: diabetes, one-pass."
    assert told in " ".join(capsys.readouterr().out.split())
    assert told in (tmp_path / "runtimes.md").read_text()
    timeless(tmp_path / "diabetes" / "random")
    assert "kept no times: diabetes, random" in fails([*line, "random"], capsys)


def timeless(folder: Path) -> None:
    """A cell as older versions wrote it."""
    with np.load(folder / "curves.npz") as saved:
        rest = {name: saved[name] for name in saved.files if name != "seconds"}
    np.savez(folder / "curves.npz", **rest)


def test_reproduce_some_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = ["reproduce", "uci", "--datasets", "diabetes", "--methods", "one-pass", "random", *SMALL, "--quiet"]
    assert main([*line, "--json", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert [one["method"] for one in json.loads(shown.out)] == ["random", "one-pass"]
    assert shown.err == ""


def test_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main(["run", "diabetes", "one-pass", *SMALL, "--out", str(tmp_path), "--json"])
    capsys.readouterr()
    assert main(["report", str(tmp_path)]) == 0
    assert Path(capsys.readouterr().out.strip()).read_text().startswith("<!DOCTYPE html>")


def test_demo(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from onepass.experiments import demo
    from onepass.experiments.protocol import regression

    monkeypatch.setattr(demo, "DEMO_SETS", ("diabetes",))
    monkeypatch.setitem(PROTOCOLS, "diabetes", regression(steps=200, replicas=4))
    assert main(["demo", "--replicas", "4", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for word in ("median", "mean", "worst", "diverged", "time", "plain", "one-pass", "report.html", "demo.png"):
        assert word in shown
    assert (tmp_path / "report.html").exists() and (tmp_path / "demo.png").exists()


def test_methods_that_nobody_asked_for_do_not_matter(tmp_path: Path) -> None:
    """Of two starts, the best of every three cannot be had."""
    line = ["reproduce", "uci", "--datasets", "diabetes", "--methods", "random", "--replicas", "2", "--steps", "3"]
    assert main([*line, "--out", str(tmp_path), "--quiet"]) == 0
    assert (tmp_path / "uci.md").exists() and (tmp_path / "report.html").exists()


# --- mistakes ---

MISTAKES = [
    (["run", "uci-enrgy", "one-pass"], "unknown data set 'uci-enrgy'; did you mean uci-energy?"),
    (["run", "cifar-10", "one-pass"], "no protocol for cifar-10 yet"),
    (["run", "diabetes", "one-pas"], "unknown method 'one-pas'; did you mean one-pass?"),
    (["reproduce", "uci-cdf"], "unknown artefact 'uci-cdf'; did you mean uci-cdfs?"),
    (["reproduce", "uci", "--methods", "baydn"], "unknown method 'baydn'; did you mean baydin?"),
    (
        ["run", "diabetes", "one-pass", "--replicas", "0"],
        "--replicas: must be a whole number of at least 1, but got",
    ),
    (["run", "diabetes", "one-pass", "--steps", "many"], "--steps: must be a whole number"),
    (["run", "diabetes", "one-pass", "--device", "tpu"], "--device: must be cpu or cuda, but got 'tpu'"),
    (["run", "diabetes", "one-pass", "--backend", "fast"], "unknown backend 'fast'"),
    (["run", "diabetes", "one-pass", "--split", "3"], "diabetes has no numbered splits, but got 3"),
    (["run", "uci-energy", "one-pass", "--split", "20"], "--split must be from 0 to 19 for uci-energy, but got 20"),
    (["run", "diabetes", "random-3-batched", "--replicas", "2"], "--replicas must be at least that, but got 2"),
    (["run", "diabetes", "random", "--backend", "graphs", "--device", "cpu"], "--backend graphs needs a CUDA device"),
    (["run", "diabetes", "random", "--out", ""], "--out: must be the name of a folder, but is empty"),
    (["run", "diabetes", "random", "--data-dir", "/nowhere"], "--data-dir: must be a folder that is there"),
    (
        ["reproduce", "uci-learning-rates", "--methods", "random"],
        "none of random is for sample paths of learning rates",
    ),
    (
        ["reproduce", "fashion-mnist", "--datasets", "uci-energy", "kin8nm"],
        "fashion-mnist has fashion-mnist (to try it out, digits too), but not uci-energy, kin8nm",
    ),
    (
        ["reproduce", "runtimes", "uci", "--datasets", "fashion-mnist"],
        "uci-yacht (to try it out, diabetes too)",
    ),
    (["run", "diabetes", "one-pass", "--out", "/dev/null/x"], "--out must be a folder that can be written to"),
    (["reproduce", "toy", "--steps", "7"], "toy trains nothing and has no use for --steps"),
    (["report", "/nowhere"], "/nowhere"),
    ([], "required: COMMAND"),
    (["runn"], "runn"),
]


def fails(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    try:
        code = main(arguments)
    except SystemExit as exit:
        code = exit.code  # type: ignore[assignment]
    shown = capsys.readouterr()
    assert code == 2
    assert shown.out == ""
    assert shown.err.count("\n") == 1, shown.err
    return shown.err


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_a_mistake_is_told_in_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in fails(arguments, capsys)


def test_no_cuda(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "torch sees no CUDA device" in fails(["run", "diabetes", "one-pass", "--device", "cuda"], capsys)


def test_data_that_cannot_be_had(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ONEPASS_MIRROR", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.delenv("ONEPASS_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    told = fails(["run", "uci-energy", "one-pass", *SMALL, "--quiet", "--data-dir", str(tmp_path)], capsys)
    assert "data.txt" in told and "ONEPASS_DATA" in told


def test_mini_batches_larger_than_the_data(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(PROTOCOLS, "digits", replace(PROTOCOLS["digits"], batches=shuffled(400)))
    told = fails(["run", "digits", "one-pass", *SMALL, "--quiet", "--out", str(tmp_path)], capsys)
    assert "mini-batches of 400 rows cannot be drawn from 350" in told


def test_results_of_another_configuration_stay(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = ["reproduce", "uci", "--datasets", "diabetes", "--methods", "random", "--quiet", "--out", str(tmp_path)]
    assert main([*line, *SMALL]) == 0
    before = (tmp_path / "diabetes" / "random" / "cell.json").read_bytes()
    capsys.readouterr()
    assert "holds a run with replicas 4, but now replicas is 5" in fails([*line, *SMALL, "--replicas", "5"], capsys)
    assert (tmp_path / "diabetes" / "random" / "cell.json").read_bytes() == before


def test_a_full_disk(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device", str(tmp_path))

    monkeypatch.setattr("os.fsync", full)
    line = ["run", "diabetes", "random", *SMALL, "--quiet", "--out", str(tmp_path)]
    assert f"cannot write or read {tmp_path}: No space left on device" in fails(line, capsys)


def test_a_subset_does_not_shorten_the_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = ["reproduce", "uci", "--datasets", "diabetes", *SMALL, "--quiet", "--out", str(tmp_path), "--methods"]
    for methods in (["random", "one-pass"], ["random"]):
        assert main([*line, *methods]) == 0
        assert (tmp_path / "uci.md").read_text().count("| one-pass |") == 1
    assert main([*line, "random", "--replicas", "5", "--out", str(tmp_path / "other")]) == 0
    assert "one-pass" not in (tmp_path / "other" / "uci.md").read_text()


@pytest.mark.parametrize("environment", [{"PYTHONIOENCODING": "ascii"}, {"COLUMNS": "50"}])
def test_poor_terminals(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    begun = command("run", "diabetes", "one-pass-wd-lr-m", *SMALL)
    shown, problem = begun.communicate(timeout=120)
    assert begun.returncode == 0, problem
    assert "Ours WD+LR+M" in shown


@pytest.mark.parametrize("line", [("list",), ("run", "diabetes", "random", *SMALL, "--quiet")], ids=" ".join)
def test_a_reader_that_has_seen_enough(line: tuple[str, ...]) -> None:
    begun = command(*line)
    assert begun.stdout is not None
    begun.stdout.close()
    assert begun.stderr is not None and "Traceback" not in begun.stderr.read()
    assert begun.wait(timeout=60) == 0


def test_nobody_listens() -> None:
    line = [sys.executable, "-m", "onepass", "list"]
    found = subprocess.run(f"{shlex.join(line)} >&-", shell=True, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (found.returncode, found.stderr) == (0, "")


def test_an_unfinished_run_of_another_length(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "diabetes").mkdir()
    unfinished = tmp_path / "diabetes" / ".random.6000.pt"
    unfinished.write_bytes(b"")
    told = fails(["run", "diabetes", "random", *SMALL, "--quiet", "--out", str(tmp_path)], capsys)
    assert "an unfinished run of random with 6000 steps, but now steps is 20" in told
    assert unfinished.exists()


# --- killed ---

LONG = ["--datasets", "diabetes", "--methods", "random", "one-pass", "--replicas", "3", "--steps", "600"]


def test_killed_at_any_moment_it_goes_on_to_the_same_table(tmp_path: Path) -> None:
    whole = command("reproduce", "uci", *LONG, "--out", str(tmp_path / "whole"), "--json", "--quiet")
    began = time.monotonic()
    expected, problem = whole.communicate(timeout=300)
    assert whole.returncode == 0, problem
    lasted = time.monotonic() - began
    line = ["reproduce", "uci", *LONG, "--out", str(tmp_path / "killed"), "--json", "--quiet"]
    for _ in range(2):
        begun = command(*line)
        time.sleep(random.uniform(0.2, 0.9) * lasted)
        begun.kill()
        begun.communicate()
    after = command(*line)
    found, problem = after.communicate(timeout=300)
    assert after.returncode == 0, problem
    assert without_times(found) == without_times(expected)
    files = [(tmp_path / name / "uci.md").read_text() for name in ("whole", "killed")]
    assert without_seconds(files[0]) == without_seconds(files[1])


def without_times(text: str) -> list[dict[str, object]]:
    times = ("seconds", "runtimes")
    return [{name: value for name, value in one.items() if name not in times} for one in json.loads(text)]


def without_seconds(markdown: str) -> str:
    return re.sub(r"\| [\d.]+ \|$", "|", markdown, flags=re.MULTILINE)


def test_interrupted_it_says_how_to_go_on(tmp_path: Path) -> None:
    begun = command("reproduce", "uci", *LONG, "--steps", "100000", "--out", str(tmp_path))
    assert begun.stderr is not None
    while "diabetes, random" not in begun.stderr.readline():
        assert begun.poll() is None
    time.sleep(1.0)
    begun.send_signal(signal.SIGINT)
    _, told = begun.communicate(timeout=60)
    assert begun.returncode == 130
    assert told.strip().splitlines()[-1].endswith("and the same command goes on from there")
    assert "Traceback" not in told
