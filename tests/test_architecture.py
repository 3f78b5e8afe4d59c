"""Dependencies point one way, and the library needs torch alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "onepass"
MODULES = {path.stem: path for path in PACKAGE.glob("*.py")}

# Lower layers know nothing of higher ones; a module may import from its own layer.
LAYERS = [
    {
        "version",
        "hyperparameters",
        "rules",
        "clipping",
        "curvature",
        "distributed",
        "guard",
        "starts",
        "memory",
        "operations",
        "recurrence",
        "precision",
        "checkpoint",
        "progress",
        "stopwatch",
        "workers",
    },
    {"linearise", "evaluation", "sharded", "scaling", "snapshot", "checks", "batches", "replicas"},
    {"hypergradient", "sensitivity", "entries", "history", "loggers", "optim", "recovery", "stack", "journal"},
    {"whole_run", "estimator", "schedulers", "method"},
    {"tuner", "watch", "rearrange"},
    {"begin", "interval"},
    {"backends"},
    {"blocks", "settings"},
    {"population"},
    {"__init__"},
    {"experiments", "integrations"},
    {"cli"},
    {"__main__"},
]
FOLDER = PACKAGE / "experiments"
DRAWING = {"charts", "figures", "panels", "report", "studies/pictures"}
INTEGRATIONS = {path.stem: path for path in (PACKAGE / "integrations").glob("*.py") if path.stem != "__init__"}
EXPERIMENTS = {str(path.relative_to(FOLDER).with_suffix("")): path for path in FOLDER.rglob("*.py")}


def imports(path: Path) -> set[str]:
    return imported(ast.parse(path.read_text()))


def imported(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {
                f"{node.module}.{alias.name}" if node.module == "onepass" else node.module for alias in node.names
            }
    return found


def test_every_module_has_its_layer() -> None:
    assert set().union(*LAYERS) == {*MODULES, "experiments", "integrations"}


@pytest.mark.parametrize("name", MODULES)
def test_dependencies_point_down(name: str) -> None:
    level = next(i for i, layer in enumerate(LAYERS) if name in layer)
    allowed = set().union(*LAYERS[: level + 1])
    own = {module.split(".")[1] for module in imports(MODULES[name]) if module.startswith("onepass.")}
    assert own <= allowed


@pytest.mark.parametrize("name", MODULES)
def test_torch_alone(name: str) -> None:
    outside = {module.split(".")[0] for module in imports(MODULES[name])} - set(sys.stdlib_module_names)
    lazily = {"matplotlib"} if name == "history" else set()  # only inside `plot`, with an error that says so
    assert outside <= {"torch", "onepass", "__future__"} | lazily


@pytest.mark.parametrize("name", sorted({*EXPERIMENTS} - DRAWING - {"search/ray_hooks"}))
def test_training_needs_numpy_alone(name: str) -> None:
    """Where tables and pictures are not wanted, as on a cluster, nothing else has to be installed."""
    tree = ast.parse(EXPERIMENTS[name].read_text())
    tree.body = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    outside = {module.split(".")[0] for module in imported(tree)} - set(sys.stdlib_module_names)
    assert outside <= {"torch", "numpy", "onepass", "__future__"}


@pytest.mark.parametrize("name", INTEGRATIONS)
def test_an_integration_needs_its_own_framework_alone(name: str) -> None:
    found = imports(INTEGRATIONS[name])
    outside = {module.split(".")[0] for module in found} - set(sys.stdlib_module_names)
    assert outside <= {"torch", "onepass", "__future__", name}
    assert {module.split(".")[1] for module in found if module.startswith("onepass.")} <= set(MODULES)


def test_import_brings_nothing_else() -> None:
    names = ("sklearn", "matplotlib", "rich", *INTEGRATIONS, "tensorboard", "mlflow", "wandb")
    names += ("onepass.experiments", "onepass.integrations")
    code = f"import sys, onepass; print([m for m in {names} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_mathematics_stays_small() -> None:
    assert len(MODULES["hypergradient"].read_text().splitlines()) < 150
