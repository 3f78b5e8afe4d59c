"""A user's own file as a problem to search: it defines a model, a loss and batches under agreed names.

>>> sorted(NEEDED), sorted(DEFAULT_STARTS)
(['loss', 'make_model', 'train', 'valid'], ['adamw', 'sgd'])
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves

from onepass.batches import Cycle, Minibatches
from onepass.begin import chosen_rule, default_values
from onepass.experiments.errors import UsageError
from onepass.experiments.search.problem import Problem, Space
from onepass.population import Population
from onepass.rules import RULES
from onepass.starts import LogUniform, Uniform, private_random

NEEDED = ("make_model", "loss", "train", "valid")

# Plain SGD may need a large learning rate. Rules that normalise their steps do not; they diverge there. Weight decay is
# searched where torch has it on; AdamW's is multiplied by the learning rate, and so has to be larger.
DEFAULT_STARTS: dict[str, Space] = {
    "sgd": {"lr": LogUniform(1e-6, 1.0), "momentum": Uniform(0.0, 0.95), "weight_decay": LogUniform(1e-7, 1e-2)},
    "adamw": {"lr": LogUniform(1e-6, 1e-1), "weight_decay": LogUniform(1e-4, 1e-1)},
}
OTHERWISE: Space = {"lr": LogUniform(1e-6, 1e-1)}

# What the command says, and not the file.
TAKEN = ("make_model", "loss", "rule", "replicas", "start", "seed", "device", "backend")


class UserProblem(NamedTuple):
    """``modules``: of the file, and of what it has imported from its own folder."""

    path: Path
    problem: Problem
    modules: list[ModuleType]


def load(path: str | Path, *, rule: str | None = None, fixed: bool = False) -> UserProblem:
    """What a file defines, checked.

    Args:
        rule: instead of the file's.
        fixed: trials keep the values that they start with.
    """
    path = _checked(Path(path))
    with _importable(path) as imported:
        defined = _run(path)
        modules = [defined, *imported()]
        told = vars(defined)
        missing = [name for name in NEEDED if name not in told]
        if missing:
            raise UsageError(f"{path} must define {', '.join(NEEDED)}, but {', '.join(missing)} is missing")
        batches = {name: _batches(path, name, told[name]) for name in ("train", "valid", "test") if name in told}
    for name in ("make_model", "loss", "metric"):
        if name in told and not callable(told[name]):
            raise UsageError(f"{name} in {path} must be a function, but got {_shown(told[name])}")
    metric = told.get("metric", told["loss"])
    asked = rule or told.get("rule", "sgd")
    problem = Problem(
        told["make_model"],
        told["loss"],
        batches["train"],
        batches["valid"],
        _space(path, asked, told.get("start")),
        judge=(metric, _once(batches["valid"])),
        test=(metric, _once(batches["test"])) if "test" in batches else None,
        rule=asked,
        options=_options(path, told.get("options", {}), fixed),
    )
    return UserProblem(path, problem, modules)


def first(batches: Any) -> Any:
    """The first batch, the same each time the file is loaded."""
    if isinstance(batches, Minibatches):
        return batches.at(0)
    with private_random(0, "first"):
        return Cycle(batches, "batches").peek()


def pickled_by_value(found: UserProblem) -> None:
    """Workers of a Ray cluster need not have the user's file."""
    from ray import cloudpickle

    register: Any = cloudpickle.register_pickle_by_value
    for module in found.modules:
        register(module)


# --- the file ---


def _checked(path: Path) -> Path:
    if not path.exists():
        raise UsageError(f"FILE must be there, but there is no {path}")
    if not path.is_file() or path.suffix != ".py":
        raise UsageError(f"FILE must be a Python file, NAME.py, but got {path}")
    return path.resolve()


def _run(path: Path) -> ModuleType:
    """As a module with a name of its own, which no other module can have."""
    name = f"onepass_search_{re.sub(r'[^0-9a-zA-Z]', '_', path.stem)}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses, say, look there for what they are defined in
    with _told_by_line(path):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _importable(path: Path) -> Iterator[Callable[[], list[ModuleType]]]:
    """Modules beside the file can be imported meanwhile. Yields which of them have been."""
    folder, before = path.parent, set(sys.modules)

    def beside(module: ModuleType) -> bool:
        place = Path(getattr(module, "__file__", None) or "/")
        return place.is_relative_to(folder) and "site-packages" not in place.parts and place != path

    sys.path.insert(0, str(folder))
    try:
        yield lambda: [module for name, module in [*sys.modules.items()] if name not in before and beside(module)]
    finally:
        sys.path.remove(str(folder))


@contextmanager
def _told_by_line(path: Path) -> Iterator[None]:
    """What goes wrong while the file runs, with the place in it."""
    try:
        yield
    except SystemExit as error:
        cure = "put what it does as a script under if __name__ == '__main__'"
        raise UsageError(f"{path}, line {_line(error, path)}, ends the program; {cure}") from error
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{path}, line {_line(error, path)}: {type(error).__name__}: {error}") from error


def _line(error: BaseException, path: Path) -> int:
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno or 0
    places = traceback.extract_tb(error.__traceback__)
    return next((place.lineno or 0 for place in reversed(places) if place.filename == str(path)), 0)


# --- batches ---


def _batches(path: Path, name: str, found: Any) -> Any:
    """Something to go through again and again, whose batches have tensors in them."""
    if inspect.isroutine(found):
        with _told_by_line(path):
            found = found()
            found = list(found) if isinstance(found, Iterator) else found
    if isinstance(found, Minibatches):
        return found
    if _one_batch(found):
        raise UsageError(f"{name} in {path} must be batches, but looks like one batch; put it in a list: [batch]")
    if not isinstance(found, Iterable) or isinstance(found, str):
        raise UsageError(
            f"{name} in {path} must be a list of batches, a DataLoader or the like, but got {_shown(found)}"
        )
    if isinstance(found, Iterator):
        raise UsageError(f"{name} in {path} can be gone through only once; make it a list, or a function that yields")
    with told_in_a_line():
        batch = Cycle(found, name).peek()
    if not any(isinstance(part, Tensor) for part in tree_leaves(batch)):
        raise UsageError(f"batches of {name} in {path} must have tensors in them, but the first is {_shown(batch)}")
    return found


def _one_batch(found: Any) -> bool:
    """A list of inputs and targets is told by their shapes, which batches have in common."""
    if isinstance(found, list):
        tensors = found and all(isinstance(part, Tensor) for part in found)
        return bool(tensors) and len({part.shape for part in found}) > 1
    parts = found if isinstance(found, tuple) else ()
    return isinstance(found, (Tensor, Mapping)) or any(isinstance(part, Tensor) for part in parts)


def _once(batches: Any) -> list[Any]:
    """Every batch, the same and in the same order each time the file is loaded."""
    if isinstance(batches, Minibatches):
        return [batches.at(i) for i in range(len(batches))]
    with private_random(0, "one pass"):
        return list(batches)


# --- settings ---


def _space(path: Path, rule: Any, start: Any) -> Space:
    with told_in_a_line():
        known = chosen_rule(rule)
    named = next((name for name, one in RULES.items() if one is known), _shown(rule))
    if start is None:
        return DEFAULT_STARTS.get(named, OTHERWISE)
    if not isinstance(start, Mapping) or not start:
        raise UsageError(f"start in {path} must map names to onepass.LogUniform and the like, but got {_shown(start)}")
    for name, value in start.items():
        if name not in {**known.tunable, **default_values(known)}:
            names = ", ".join(known.tunable)
            raise UsageError(f"names in start in {path} must be among those of {named}, {names}, but got {name!r}")
        if not isinstance(value, (LogUniform, Uniform, int, float)):
            kinds = "onepass.LogUniform(low, high), onepass.Uniform(low, high) or a number"
            raise UsageError(f"start[{name!r}] in {path} must be {kinds}, but got {_shown(value)}")
    if not any(isinstance(value, (LogUniform, Uniform)) for value in start.values()):
        raise UsageError(
            f"start in {path} must have a range to search, such as onepass.LogUniform(1e-6, 1), but has none"
        )
    return dict(start)


def _options(path: Path, options: Any, fixed: bool) -> dict[str, Any]:
    known = [name for name in list(inspect.signature(Population).parameters) if name not in TAKEN]
    if not isinstance(options, Mapping):
        raise UsageError(
            f"options in {path} must be a dict of onepass.Population's arguments, but got {_shown(options)}"
        )
    for name in options:
        if name not in known:
            raise UsageError(f"names in options in {path} must be among {', '.join(known)}, but got {name!r}")
    return {**options, **({"tune": ()} if fixed else {})}


def _shown(value: Any) -> str:
    """In one short line: no tensors."""
    plain = isinstance(value, (str, int, float, dict, list, type, type(None)))
    text = repr(value) if plain else ""
    return text if plain and len(text) < 60 and "tensor" not in text else type(value).__name__


@contextmanager
def told_in_a_line() -> Iterator[None]:
    """What this library complains of is a user's mistake. What goes wrong in the user's own code has its traceback."""
    try:
        yield
    except (ValueError, TypeError, RuntimeError) as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        ours = str(frame.f_globals.get("__name__")).startswith("onepass.")
        if not ours or not (isinstance(error, ValueError) or error.__cause__ is not None):
            raise
        raise UsageError(str(error)) from error
