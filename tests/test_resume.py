"""A run saved at step 250 and resumed in a new process ends where an uninterrupted one ends, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import onepass
from tests.problems import cross_entropy, digits, mlp, train_step

KINDS: dict[str, dict[str, Any]] = {
    "sgd": {"make": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, weight_decay=1e-4), "schedule": False},
    "adam, diverging at first": {"make": lambda p: torch.optim.Adam(p, lr=1.0), "schedule": False},
    "per element": {
        "make": lambda p: onepass.optim.AdamW(onepass.per_element(p, lr=1e-3), weight_decay=1e-2),
        "schedule": False,
    },
    "through the whole run": {
        "make": lambda p: torch.optim.Adam(p, lr=1.0),
        "schedule": False,
        "tuner": {"estimator": "whole-run", "hyper_optimizer": onepass.optim.SteadyAdam},
    },
    "with a scheduler": {"make": lambda p: torch.optim.AdamW(p, lr=1e-3), "schedule": True},
}


def train(kind: str, steps: int, load: Path | None = None, save: Path | None = None) -> dict[str, Any]:
    """Train up to ``steps``, from the start or from a file; batches depend on the step alone."""
    inputs, targets = digits()[0]
    valid = [tuple(part[i : i + 60] for part in digits()[1]) for i in range(0, 300, 60)]
    model = mlp(64, 32, 10, dtype=torch.float32)
    optimizer = KINDS[kind]["make"](model.parameters())
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if KINDS[kind]["schedule"]:
        parts["schedule"] = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 100))
    parts["tuner"] = tuner = onepass.Tuner(
        model, optimizer, cross_entropy, valid, interval=4, **KINDS[kind].get("tuner", {})
    )
    begin = 0
    if load is not None:
        saved = torch.load(load)
        begin = saved.pop("steps")
        for name, state in saved.items():
            parts[name].load_state_dict(state)
    for step in range(begin, steps):
        rows = torch.randint(0, 1200, (32,), generator=torch.Generator().manual_seed(step))
        batch = inputs[rows], targets[rows]
        train_step(model, optimizer, batch, cross_entropy)
        tuner.step(batch)
        if "schedule" in parts:
            parts["schedule"].step()
    if save is not None:
        torch.save({"steps": steps, **{name: part.state_dict() for name, part in parts.items()}}, save)
    return {"model": model.state_dict(), "values": tuner.values(), "records": tuner.history.to_dict()["records"]}


def resume(kind: str, load: str, result: str) -> None:
    torch.save(train(kind, 500, Path(load)), result)


@pytest.mark.filterwarnings("ignore:the run diverged:UserWarning", "ignore:.*lr_scheduler.step.*:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_resumed_in_a_new_process(kind: str, tmp_path: Path) -> None:
    train(kind, 250, save=tmp_path / "half.pt")
    code = "import sys; from tests.test_resume import resume; resume(*sys.argv[1:])"
    command = [sys.executable, "-W", "ignore", "-c", code, kind, str(tmp_path / "half.pt"), str(tmp_path / "end.pt")]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[1])
    resumed, whole = torch.load(tmp_path / "end.pt"), train(kind, 500)
    for name, tensor in whole["model"].items():
        assert torch.equal(resumed["model"][name], tensor), name
    for name, values in whole["values"].items():
        for mine, theirs in zip(values, resumed["values"][name], strict=True):
            assert torch.equal(torch.as_tensor(mine), torch.as_tensor(theirs)), name
    assert repr(resumed["records"]) == repr(whole["records"])
