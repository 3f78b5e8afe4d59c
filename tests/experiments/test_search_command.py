"""``onepass search`` as a user runs it."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from onepass import Schedule
from onepass.cli import main
from onepass.experiments.search import ENGINES
from onepass.experiments.search.command import Asked
from onepass.experiments.search.user import DEFAULT_STARTS, OTHERWISE, load, pickled_by_value
from onepass.rules import RULES
from onepass.starts import LogUniform, private_random

DATA = """
import torch
from torch import nn

inputs = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
targets = inputs @ torch.tensor([[1.0], [2.0], [-1.0]]) + 0.1 * inputs[:, :1] ** 2
train, valid, test = ([(inputs[i : i + 16], targets[i : i + 16])] for i in (0, 16, 32))
"""
MODEL = """
def make_model():
    return nn.Linear(3, 1)
"""
LOSS = """
def loss(model, batch):
    return ((model(batch[0]) - batch[1]) ** 2).mean()
"""
TINY = DATA + MODEL + LOSS
SMALL = ["--budget", "4", "--steps", "24", "--device", "cpu", "--quiet"]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return written(tmp_path, TINY)


def written(folder: Path, text: str, name: str = "tiny.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def line(file: Path, *options: str) -> list[str]:
    return ["search", str(file), "--out", str(file.parent / "out"), *SMALL, *options]


def rows(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "trials.csv").open()))


# --- what it finds ---


@pytest.mark.parametrize("search", ENGINES["local"])
def test_every_search_ends_with_a_model(search: str, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    budget = "6" if search == "bayesian-optimisation" else "4"  # one trial more than are drawn at random
    assert main(line(tiny, "--search", search, "--budget", budget)) == 0
    shown, out = capsys.readouterr(), tiny.parent / "out" / "tiny"
    assert f"{search}, " in shown.out and "model.pt" in shown.out and shown.err == ""
    found = rows(out)
    losses = [float(row["valid"]) for row in found]
    assert losses == sorted(losses) and {row["steps"] for row in found} == {"24"}
    problem = load(tiny).problem
    model = problem.make_model()
    model.load_state_dict(torch.load(out / "model.pt", weights_only=True))
    assert float(problem.loss(model, problem.valid[0]).detach()) == pytest.approx(losses[0], rel=1e-5)
    schedule = Schedule.from_json(out / "schedule.json")
    assert schedule.values[-1]["lr"][0] == pytest.approx(float(found[0]["end_lr"]))


def test_the_schedule_trains_the_same_model(tiny: Path) -> None:
    assert main(line(tiny, "--search", "random")) == 0
    out = tiny.parent / "out" / "tiny"
    best = rows(out)[0]
    assert best["returns"] == "0", "what the guard undoes is not in a schedule"
    problem = load(tiny).problem
    with private_random(0, "weights", int(best["number"])):
        model = problem.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = Schedule.from_json(out / "schedule.json").attach(optimizer)
    for _ in range(24):
        optimizer.zero_grad()
        problem.loss(model, problem.train[0]).backward()
        optimizer.step()
        schedule.step()
    for name, expected in torch.load(out / "model.pt", weights_only=True).items():
        torch.testing.assert_close(model.state_dict()[name], expected, rtol=1e-4, atol=1e-5)


def test_fixed_values_stay(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line(tiny, "--search", "random", "--fixed", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["trials"]) == 4 and all(trial["start"] == trial["end"] for trial in found["trials"])


def test_json(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line(tiny, "--search", "random", "--name", "first", "--json")) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert shown.err == "" and shown.out.count("\n") == 1
    assert (found["study"], found["search"], found["starts"], found["chosen"]) == ("first", "random", 4, [0, 1, 2, 3])
    assert found["best"] == found["trials"][0] and found["seconds"] > 0
    assert all(Path(path).exists() for path in found["files"].values())


def test_without_a_test_there_is_no_column_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, TINY.replace("train, valid, test", "train, valid, _"))
    assert main(line(file, "--search", "random")) == 0
    shown = capsys.readouterr().out
    assert "valid" in shown and "test" not in shown.replace(str(tmp_path), "")


def test_where_all_are_lost_there_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, TINY + "from onepass import LogUniform\nstart = {'lr': LogUniform(1e6, 1e7)}\n")
    assert main(line(file, "--search", "random", "--fixed")) == 0
    assert "every trial was lost" in capsys.readouterr().out
    assert not (tmp_path / "out" / "tiny" / "model.pt").exists()


def test_many_trials_are_cut(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line(tiny, "--search", "random", "--budget", "12", "--fixed")) == 0
    assert "the best 10 of 12 trials" in " ".join(capsys.readouterr().out.split())
    assert len(rows(tiny.parent / "out" / "tiny")) == 12


def test_a_budget_is_in_whole_trainings() -> None:
    """Of ASHA as in the paper."""
    assert Asked(Path("x.py"), "asha", budget=200, steps=4000).plan.trials == 114286
    assert [Asked(Path("x.py"), search, 7).plan.trials for search in ("pbt", "random")] == [7, 7]
    assert Asked(Path("x.py"), "asha", budget=1, steps=1).plan.trials == 1


# --- the file ---


@pytest.mark.parametrize(
    "text",
    [
        "train = torch.utils.data.DataLoader([*zip(inputs[:16], targets[:16])], batch_size=4, shuffle=True)",
        "import onepass\ntrain = onepass.Minibatches((inputs[:16], targets[:16]), size=4)\nvalid = train",
        "rows = train\ndef train():\n    yield from rows",
        "rows = valid\ndef valid(): return rows\ntest = lambda: rows",
        "from beside import batches as train",
        "from dataclasses import dataclass\n@dataclass\nclass Setting:\n    width: int = 3",
        "rule = torch.optim.AdamW\noptions = {'tune': ('lr',), 'interval': 5}",
        "from onepass import LogUniform\nrule, start = 'adam', {'lr': LogUniform(1e-4, 1e-1), 'beta1': 0.8}",
        "def metric(model, batch): return (model(batch[0]) - batch[1]).abs().mean()",
    ],
    ids=["loader", "minibatches", "generator", "functions", "beside", "dataclass", "class", "start", "metric"],
)
def test_a_file_can_say_it_in_many_ways(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    written(tmp_path, DATA + "batches = train", "beside.py")
    arguments = line(written(tmp_path, TINY + text), "--search", "random", "--budget", "2", "--steps", "12")
    assert main(arguments) == 0
    torch.rand(3)  # nothing may depend on the random state that a file is loaded in
    assert main(arguments) == 0


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_has_a_start(rule: str, tiny: Path) -> None:
    space = load(tiny, rule=rule).problem.space
    assert space == DEFAULT_STARTS.get(rule, OTHERWISE) and isinstance(space["lr"], LogUniform)
    assert {*space} <= {*RULES[rule].tunable}


def test_workers_need_no_file(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cloudpickle: Any = pytest.importorskip("ray.cloudpickle")
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    written(tiny.parent, MODEL.replace("def", "from torch import nn\ndef"), "beside.py")
    user = load(written(tiny.parent, DATA + LOSS + "from beside import make_model"))
    assert [module.__name__ for module in user.modules] == ["onepass_search_tiny", "beside"]
    pickled_by_value(user)
    sent = cloudpickle.dumps(user.problem)
    for module in user.modules:
        cloudpickle.unregister_pickle_by_value(module)
        monkeypatch.delitem(sys.modules, module.__name__)
    problem = cloudpickle.loads(sent)
    assert float(problem.loss(problem.make_model(), problem.train[0]).detach()) > 0


# --- mistakes ---

START = "from onepass import LogUniform\nstart = "

FILES = [
    (
        "import torch\nimport nowhere_to_be_found",
        "tiny.py, line 2: ModuleNotFoundError: No module named 'nowhere_to_be",
    ),
    ("x = 1\nprint(1 / 0)", "tiny.py, line 2: ZeroDivisionError: division by zero"),
    ("def loss(:", "tiny.py, line 1: SyntaxError: "),
    ("import sys\nsys.exit(3)", "tiny.py, line 2, ends the program; put what it does as a script under if __name__"),
    ("import onepass\nstart = onepass.LogUniform(1, 0)", "line 2: ValueError: the range must be above 0 and not empty"),
    ("", "must define make_model, loss, train, valid, but make_model, loss, train, valid is missing"),
    (DATA + LOSS, "tiny.py must define make_model, loss, train, valid, but make_model is missing"),
    (TINY + "loss = 3", "loss in"),
    (TINY + "make_model = make_model()", "make_model must be a function that makes a model, but got Linear"),
    (TINY + "def make_model(): return 3", "make_model must return a torch module, but got int"),
    (TINY + "def loss(model): return 0", "loss must be a function of (model, batch)"),
    (TINY + "train = 3", "train in"),
    (TINY + "train = 3", "must be a list of batches, a DataLoader or the like, but got 3"),
    (TINY + "train = 'digits'", "must be a list of batches, a DataLoader or the like, but got 'digits'"),
    (TINY + "valid = valid[0]", "valid in"),
    (TINY + "valid = valid[0]", "must be batches, but looks like one batch; put it in a list: [batch]"),
    (TINY + "valid = list(valid[0])", "must be batches, but looks like one batch; put it in a list: [batch]"),
    (TINY + "test = inputs", "must be batches, but looks like one batch; put it in a list: [batch]"),
    (TINY + "train = [1, 2]", "must have tensors in them, but the first is 1"),
    (TINY + "train = []", "train must yield at least one batch"),
    (TINY + "train = iter(train)", "can be gone through only once; make it a list, or a function that yields"),
    (TINY + "def train():\n    return 1 / 0", "line 15: ZeroDivisionError: division by zero"),
    (TINY + "start = {}", "must map names to onepass.LogUniform and the like, but got {}"),
    (TINY + "start = [1]", "must map names to onepass.LogUniform and the like, but got [1]"),
    (TINY + "start = {'lr': 0.1}", "must have a range to search, such as onepass.LogUniform(1e-6, 1), but has none"),
    (TINY + "start = {'lr': [0.1, 0.2]}", "must be onepass.LogUniform(low, high), onepass.Uniform(low, high) or a"),
    (
        TINY + START + "{'alpha': LogUniform(0.1, 1)}",
        "must be among those of sgd, lr, momentum, dampening, weight_decay",
    ),
    (TINY + START + "{'momentum': LogUniform(0.1, 1)}", "start must have 'lr', but got ['momentum']"),
    (TINY + "rule = 'sdg'", "rule must be one of ['adagrad', 'adam', "),
    (TINY + "options = 3", "must be a dict of onepass.Population's arguments, but got 3"),
    (TINY + "options = {'seed': 3}", "must be among tune, interval, lookback"),
    (TINY + "options = {'interval': 0}", "interval must be an integer of at least 1, but got 0"),
    (
        TINY + "def loss(model, batch): return model(batch[0]).mean() if model(batch[0]).sum() > 0 else 0",
        "cannot be evaluated for many replicas at once",
    ),
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


@pytest.mark.parametrize(("text", "message"), FILES)
def test_a_wrong_file(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in fails(line(written(tmp_path, text)), capsys)
    assert not (tmp_path / "out" / "tiny").exists(), "nothing is begun"


OPTIONS = [
    (["--budget", "0"], "--budget: must be a whole number of at least 1, but got '0'"),
    (["--steps", "0.5"], "--steps: must be a whole number of at least 1, but got '0.5'"),
    (["--search", "grid"], "unknown search 'grid'; known are random, asha, pbt, bayesian-optimisation"),
    (["--rule", "adan"], "unknown rule 'adan'; did you mean adam?"),
    (["--engine", "spark"], "invalid choice: 'spark'"),
    (["--address", "auto"], "--address is for --engine ray, but --engine is local; leave it out"),
    (["--block", "8"], "--block is for --engine ray, but --engine is local; leave it out"),
    (["--name", "../x"], "--name must be a name for a folder inside --out, but got '../x'"),
    (["--name", ""], "--name must be a name for a folder inside --out, but got ''"),
    (["--out", "/dev/null/x"], "--out must be a folder that can be written to"),
    (["--device", "tpu"], "--device: must be cpu or cuda, but got 'tpu'"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS)
def test_a_wrong_option(options: list[str], message: str, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in fails(line(tiny, *options), capsys)


@pytest.mark.parametrize(
    ("path", "message"),
    [("nowhere.py", "FILE must be there, but there is no"), (".", "FILE must be a Python file, NAME.py, but got")],
)
def test_no_file(path: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in fails(line(tmp_path / path), capsys)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("def loss(model, batch): return {}['weights']", KeyError),
        ("def loss(model, batch): return model(batch[1]).mean()", RuntimeError),
        ("def make_model(): raise ValueError('not yet')", ValueError),
    ],
)
def test_a_bug_of_the_users_has_its_traceback(text: str, error: type[Exception], tmp_path: Path) -> None:
    with pytest.raises(error):
        main(line(written(tmp_path, TINY + text)))


# --- again ---


def test_what_has_ended_is_shown_again(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(line(tiny, "--search", "random")) == 0
    shown = capsys.readouterr().out
    monkeypatch.setattr("onepass.experiments.search.command.search", None)
    written(tiny.parent, TINY + "# a comment\n")
    assert main(line(tiny, "--search", "random")) == 0
    assert capsys.readouterr().out == shown


OTHERS = [
    (["--steps", "25"], "", "holds a search with steps 24, but now steps is 25; give another --name"),
    (["--budget", "5"], "", "holds a search with budget 4, but now budget is 5"),
    (["--seed", "1"], "", "holds a search with seed 0, but now seed is 1; give another --name"),
    (["--search", "pbt"], "", "holds a search with search random, but now search is pbt"),
    (["--fixed"], "", "holds a search with options none, but now options is tune ()"),
    (["--rule", "adam"], "", "holds a search with rule sgd and start lr LogUniform(low=1e-06, high=1.0), momentum"),
    ([], START + "{'lr': LogUniform(0.1, 1.0)}", "but now start is lr LogUniform(low=0.1, high=1.0); give"),
    (
        [],
        "def loss(model, batch): return model(batch[0]).pow(2).mean()",
        "holds a search with losses of a fresh model ",
    ),
    ([], "train = [(inputs, targets)]", "what the file draws at random needs a seed"),
]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a search that has ended."""
    file = written(tmp_path_factory.mktemp("ended"), TINY)
    assert main(line(file, "--search", "random")) == 0
    return file


@pytest.mark.parametrize(("options", "text", "message"), OTHERS)
def test_another_search_does_not_go_on_here(
    options: list[str], text: str, message: str, ended: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in (ended.parent / "out" / "tiny").iterdir()}
    written(ended.parent, TINY + text)
    assert message in fails(line(ended, "--search", "random", *options), capsys)
    assert {path: path.read_bytes() for path in (ended.parent / "out" / "tiny").iterdir()} == before


def test_a_file_of_the_same_name_elsewhere(ended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = written(tmp_path, TINY)
    told = fails([*line(other, "--search", "random"), "--out", str(ended.parent / "out")], capsys)
    assert f"holds a search with file {ended}, but now file is {other}; give another --name" in told


def test_a_folder_that_is_somebody_elses(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tiny.parent, "mine", "notes.txt")
    told = fails([*line(tiny), "--out", str(tiny.parent.parent), "--name", tiny.parent.name], capsys)
    assert "is there, but holds no search; give another --name" in told


# --- killed ---

# Saved at every look, so that there is something to go on from.
OFTEN = (
    "import sys; from onepass.experiments.search import memory; from onepass.cli import main; memory.PAUSE = 0.0; "
    "sys.exit(main(sys.argv[1:]))"
)
LONG = {
    "random": (["--steps", "320"], "search.pt"),
    "pbt": (["--steps", "240"], "search.pt"),
    "bayesian-optimisation": (["--budget", "6"], "best.pt"),
}


def begun(arguments: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", OFTEN, *arguments], stderr=pipe, text=True, env=environment)


@pytest.mark.parametrize("search", LONG)
def test_killed_it_goes_on_to_the_same_trials(search: str, tiny: Path) -> None:
    options, saved = LONG[search]
    out = tiny.parent / "out"
    assert main([*line(tiny, "--search", search), *options, "--name", "whole"]) == 0
    arguments = [*line(tiny, "--search", search), *options, "--name", "killed"]
    killed = begun(arguments)
    while not (out / "killed" / saved).exists():
        assert killed.poll() is None, killed.stderr and killed.stderr.read()
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    assert not (out / "killed" / "trials.csv").exists(), "killed too late to tell anything"
    assert main(arguments) == 0
    for name in ("trials.csv", "schedule.json"):
        assert (out / "killed" / name).read_text() == (out / "whole" / name).read_text()


def test_two_at_once(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*line(tiny, "--search", "random"), "--steps", "1000000"]
    first = begun(arguments)
    while not (tiny.parent / "out" / "tiny" / "study.json").exists():
        assert first.poll() is None
        time.sleep(0.01)
    try:
        assert "another process is computing" in fails(arguments, capsys)
    finally:
        first.send_signal(signal.SIGINT)
        _, told = first.communicate(timeout=60)
    assert first.returncode == 130 and "the same command goes on from there" in told
