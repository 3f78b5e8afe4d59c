"""``onepass search FILE``: a search for a user's own model, kept in a folder of its own so that it can go on.

OUT/NAME/study.json      what was asked, written before anything is trained
OUT/NAME/...             what the search remembers, such as studies.db, and its best model
OUT/NAME/model.pt, schedule.json, trials.csv, result.json      what it found, written at the end
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onepass.experiments.errors import UsageError
from onepass.experiments.runs import _locked as alone
from onepass.experiments.search import Found, Plan, Problem, Where, search
from onepass.experiments.search.local import budgets
from onepass.experiments.search.results import RESULT, read, show, write, written
from onepass.experiments.search.user import UserProblem, first, load, pickled_by_value, told_in_a_line

STUDY = "study.json"
LOSSES = "losses of a fresh model"  # follow from all else, and tell what the file does

ABOUT = (
    "Good starting values for your own model, and the model trained from them. FILE is Python and defines "
    "make_model(), loss(model, batch), train and valid; see docs/search.md. A search costs about as much as BUDGET "
    "trainings of STEPS steps, side by side in one process: seconds for a model of a few thousand weights, minutes or "
    "hours for larger ones. It can be killed, and goes on with the same command."
)


@dataclass(frozen=True)
class Asked:
    """What the command was given.

    Attributes:
        budget: in whole trainings.
        rule: ``None`` for the file's.
        fixed: trials keep the values that they start with, instead of tuning them.
        name: of the study; ``None`` for the file's.
        block: starts that one worker of Ray trains together.
    """

    file: Path
    search: str = "asha"
    budget: int = 16
    steps: int = 1000
    fixed: bool = False
    rule: str | None = None
    name: str | None = None
    engine: str = "local"
    address: str | None = None
    block: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for option, value in (("--address", self.address), ("--block", self.block)):
            if value is not None and self.engine != "ray":
                raise UsageError(f"{option} is for --engine ray, but --engine is {self.engine}; leave it out")
        if self.study in ("", ".", "..") or re.search(r"[/\\]", self.study):
            raise UsageError(f"--name must be a name for a folder inside --out, but got {self.study!r}")

    @property
    def study(self) -> str:
        return self.file.stem if self.name is None else self.name

    @property
    def plan(self) -> Plan:
        """Trials that cost about as much as the budget. Of successive halving, each of its stages costs the same."""
        shared = self.search == "asha"
        trials = max(1, round(self.budget * self.steps / len(budgets(self.steps)))) if shared else self.budget
        return Plan(self.search, trials, self.steps, seed=self.seed)


def run(asked: Asked, out: Path, *, device: str, json_wanted: bool = False, progress: bool = True) -> None:
    """Begin a search, go on with it, or show what it has found."""
    user = load(asked.file, rule=asked.rule, fixed=asked.fixed)
    folder = out / asked.study
    with alone(folder):
        _claim(folder, configuration(asked, user))
        if not (folder / RESULT).exists():
            where = Where(folder, device, progress=progress, address=asked.address, block=asked.block or 1)
            began = time.perf_counter()
            found = _searched(asked, user, where)
            write(folder, _described(asked, user.problem, found, time.perf_counter() - began), found)
    result = read(folder)
    if json_wanted:
        print(json.dumps({**result, "files": {name: str(path) for name, path in written(folder).items()}}))
    else:
        show(result, written(folder))


def _searched(asked: Asked, user: UserProblem, where: Where) -> Found:
    if asked.engine == "ray":
        pickled_by_value(user)
    with told_in_a_line():
        return search(user.problem, asked.plan, where, asked.engine)


def _described(asked: Asked, problem: Problem, found: Found, seconds: float) -> dict[str, Any]:
    return {
        "study": asked.study,
        "search": asked.search,
        "engine": asked.engine,
        "starts": asked.plan.trials,
        "steps": asked.steps,
        "metric": _name(problem.judge[0]),
        "tested": problem.test is not None,
        "seconds": round(max([seconds, *(moment.seconds for moment in found.course[-1:])]), 3),
    }


# --- whose folder it is ---


def configuration(asked: Asked, user: UserProblem) -> dict[str, Any]:
    """What has to be the same to go on, in words that an error message can show."""
    problem = user.problem
    rule = problem.rule if isinstance(problem.rule, str) else _name(problem.rule)
    return {
        "file": str(user.path),
        "search": asked.search,
        "engine": asked.engine,
        "block": asked.block or 1,
        "rule": rule,
        "start": _in_words(problem.space),
        "options": _in_words(problem.options),
        "budget": asked.budget,
        "steps": asked.steps,
        "seed": asked.seed,
        LOSSES: _first_losses(problem, asked.seed),
    }


def _first_losses(problem: Problem, seed: int) -> str:
    """Of a fresh model, to notice another model, loss or other data; and a mistake in any of them before training."""
    nowhere = Where(Path(), backend="eager")  # on the CPU, so that a search can go on elsewhere
    metrics = [(problem.loss, [first(problem.train)]), problem.judge, *([problem.test] if problem.test else [])]
    with told_in_a_line():
        population = problem.population(1, seed, nowhere)
        losses = [float(population.evaluate(metric, batches[0])) for metric, batches in metrics]
    return ", ".join(f"{loss:.3g}" for loss in losses)


def _claim(folder: Path, asked: dict[str, Any]) -> None:
    """This search's own folder: a new one, or one that it was begun in."""
    path = folder / STUDY
    if path.exists():
        _compare(folder, json.loads(path.read_text()), asked)
    elif folder.exists() and any(not file.name.startswith(".") for file in folder.iterdir()):
        raise UsageError(f"{folder} is there, but holds no search; give another --name")
    else:
        folder.mkdir(parents=True, exist_ok=True)
        beside = folder / f".{STUDY}.partial"
        beside.write_text(json.dumps(asked, indent=1) + "\n")
        beside.replace(path)


def _compare(folder: Path, had: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    differ = [name for name in asked if had.get(name) != asked[name]]
    causes = [name for name in differ if name != LOSSES]
    if differ:
        then = " and ".join(f"{name} {had.get(name)}" for name in causes or differ)
        now = " and ".join(f"{name} is {asked[name]}" for name in causes or differ)
        random = "" if causes else "; what the file draws at random needs a seed"
        raise UsageError(f"{folder} holds a search with {then}, but now {now}; give another --name{random}")


def _in_words(values: Mapping[str, Any]) -> str:
    """The same in every process, so without addresses in memory."""
    words = (f"{name} {_name(value) if callable(value) else value}" for name, value in sorted(values.items()))
    return re.sub(r" at 0x[0-9a-f]+", "", ", ".join(words)) or "none"


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)
