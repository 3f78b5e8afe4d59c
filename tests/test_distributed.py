"""Several processes that train one model together find the values that one process finds on all of the data."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import onepass
from onepass.distributed import Ranks, check_same
from tests.problems import Batch, mlp, mse, regression, train_step
from tests.ranks import on_ranks, torchrun

Model = nn.Module
Settings = dict[str, Any]


def rank() -> int:
    return distributed.get_rank() if distributed.is_initialized() else 0


def part(batch: Batch) -> Batch:
    """This rank's share of a batch; all of it in a single process."""
    count = distributed.get_world_size() if distributed.is_initialized() else 1
    inputs, targets = (tensor.chunk(count)[rank()] for tensor in batch)
    return inputs, targets


def sgd(model: Model) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.5, weight_decay=1e-3)


def adamw(model: Model) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def replicated(model: Model) -> Model:
    return DistributedDataParallel(model) if distributed.is_initialized() else model


def validation(dtype: torch.dtype) -> list[Batch]:
    return [part(regression(seed=seed, dtype=dtype)) for seed in (2, 3)]


def train(
    spread: Callable[[Model], Model],
    make: Callable[[Model], torch.optim.Optimizer],
    settings: Settings,
    dtype: torch.dtype = torch.float64,
    steps: int = 15,
) -> dict[str, Any]:
    model = spread(mlp(3, 8, 5, 1, dtype=dtype))
    optimizer = make(model)
    tuner = onepass.Tuner(model, optimizer, mse, validation(dtype), interval=3, **settings)
    for step in range(steps):
        batch = part(regression(seed=10 + step, dtype=dtype))
        train_step(model, optimizer, batch)
        tuner.step(batch)
    return {"values": tuner.values(), "history": tuner.history.to_dict()}


def largest_difference(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Of the tuned values, relative, over the whole history."""
    sides = [
        [r["values"][name] for r in run["history"]["records"] for name in r["values"]] for run in (found, expected)
    ]
    mine, theirs = (torch.tensor(side, dtype=torch.float64) for side in sides)
    return float(((mine - theirs) / theirs).abs().max())


# --- copies on every rank ---

REPLICATED: dict[str, tuple[Callable[[Model], torch.optim.Optimizer], Settings]] = {
    "whole run": (sgd, {}),
    "look-back 1": (sgd, {"lookback": 1}),
    "look-back 5": (sgd, {"lookback": 5}),
    "gauss-newton": (sgd, {"lookback": 5, "curvature": "gauss-newton"}),
    "forward": (sgd, {"curvature": "forward"}),
    "AdamW, whole run": (adamw, {}),
    "AdamW, look-back 1": (adamw, {"lookback": 1}),
    "AdamW, look-back 5": (adamw, {"lookback": 5}),
    "diverging at first": (lambda model: torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9), {}),
}


def train_replicated(dtype: torch.dtype) -> dict[str, Any]:
    return {name: train(replicated, make, settings, dtype) for name, (make, settings) in REPLICATED.items()}


@pytest.mark.filterwarnings("ignore:the run diverged:UserWarning")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=str)
def test_half_the_batch_on_each_of_two_ranks(dtype: torch.dtype, tolerance: float) -> None:
    first, second = on_ranks(train_replicated, dtype)
    for name, expected in train_replicated(dtype).items():
        assert largest_difference(first[name], expected) < tolerance, name
        assert repr(first[name]) == repr(second[name]), name
    if dtype == torch.float64:
        assert any(record["guard"] for record in first["diverging at first"]["history"]["records"])


def penalised(l2: onepass.Hyperparameter, model: Model, batch: Batch) -> Tensor:
    """Depends on the data by more than a sum over examples, so that its derivatives differ from rank to rank."""
    outputs: Tensor = model(batch[0])
    return (outputs - batch[1]).square().mean() + l2.value * outputs.square().mean()


def micro_batches(model: Model, batches: Sequence[Batch]) -> Tensor:
    losses = torch.stack([mse(model, batch) for batch in batches])
    return losses.mean()


def train_with_a_hyperparameter_inside_the_loss() -> dict[str, Any]:
    model, l2 = replicated(mlp(3, 8, 1)), onepass.Hyperparameter(0.1)
    optimizer = sgd(model)

    def loss(model: Model, batch: Batch) -> Tensor:
        return penalised(l2, model, batch)

    tuner = onepass.Tuner(
        model, optimizer, loss, validation(torch.float64), valid_loss=mse, extra={"l2": l2}, interval=2, lookback=3
    )
    for step in range(8):
        batch = part(regression(seed=10 + step))
        train_step(model, optimizer, batch, loss)
        tuner.step(batch)
    return {"values": tuner.values(), "history": tuner.history.to_dict()}


def train_accumulating(pieces: int) -> dict[str, Any]:
    """Gradients of all but the last micro-batch stay on their rank, as ``no_sync`` is made for."""
    model = replicated(mlp(3, 8, 1))
    optimizer = sgd(model)
    valid = [[batch] for batch in validation(torch.float64)]
    tuner = onepass.Tuner(model, optimizer, micro_batches, valid, interval=2, lookback=5)
    for step in range(8):
        batch = part(regression(seed=10 + step))
        pairs = list(zip(*(tensor.chunk(pieces) for tensor in batch), strict=True))
        optimizer.zero_grad()
        for i, pair in enumerate(pairs):
            waits = isinstance(model, DistributedDataParallel) and i < pieces - 1
            with model.no_sync() if waits else nullcontext():  # type: ignore[operator]
                (mse(model, pair) / pieces).backward()
        optimizer.step()
        tuner.step(pairs)
    return {"values": tuner.values(), "history": tuner.history.to_dict()}


def train_wrapped_otherwise() -> list[dict[str, Any]]:
    def compiled(model: Any) -> Any:
        return torch.compile(model, backend="eager")

    return [train(wrap, sgd, {}) for wrap in (lambda m: compiled(replicated(m)), lambda m: replicated(compiled(m)))]


def leave_a_trace() -> list[str]:
    """Names of all that a hyper step has changed in a model with batch norm and dropout."""
    torch.manual_seed(rank())
    parts = [nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1)]
    model = replicated(nn.Sequential(*parts).double())
    optimizer = sgd(model)
    tuner = onepass.Tuner(model, optimizer, mse, validation(torch.float64), interval=1)
    train_step(model, optimizer, part(regression()))

    def everything() -> dict[str, Tensor]:
        gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
        found = {**model.state_dict(), **gradients, "random state": torch.get_rng_state()}
        return {name: tensor.clone() for name, tensor in found.items()}

    before = everything()
    assert tuner.step(part(regression())) is not None
    return [name for name, tensor in everything().items() if not torch.equal(tensor, before[name])]


def many_things() -> dict[str, Any]:
    return {
        "extra": train_with_a_hyperparameter_inside_the_loss(),
        "accumulated": train_accumulating(4),
        "wrapped": train_wrapped_otherwise(),
        "trace": leave_a_trace(),
        "resumed": train_resumed(),
    }


def train_resumed() -> dict[str, Any]:
    """Half-way, a new model, optimizer and tuner go on from the first rank's state."""
    parts: list[Any] = []
    for begin, end in ((0, 6), (6, 12)):
        states = [p.state_dict() for p in parts]
        model = replicated(mlp(3, 8, 1))
        optimizer = sgd(model)
        tuner = onepass.Tuner(model, optimizer, mse, validation(torch.float64), interval=2)
        parts = [model, optimizer, tuner]
        if states and distributed.is_initialized():
            distributed.broadcast_object_list(states)
        for thing, state in zip(parts, states, strict=False):
            thing.load_state_dict(state)
        for step in range(begin, end):
            train_step(model, optimizer, part(regression(seed=10 + step)))
            tuner.step(part(regression(seed=10 + step)))
    return {"values": tuner.values(), "history": tuner.history.to_dict()}


def test_what_else_goes_with_several_ranks() -> None:
    first, second = on_ranks(many_things)
    assert largest_difference(first["extra"], train_with_a_hyperparameter_inside_the_loss()) < 1e-12
    assert largest_difference(first["accumulated"], train_accumulating(1)) < 1e-12
    for run in first["wrapped"]:
        assert largest_difference(run, train(replicated, sgd, {})) < 1e-12
    assert largest_difference(first["resumed"], train_resumed()) < 1e-12
    assert first["trace"] == second["trace"] == []


def test_accumulated_on_one_process() -> None:
    assert largest_difference(train_accumulating(4), train_accumulating(1)) < 1e-12


# --- what goes wrong on one rank is said on all ---


def tuner_of(model: Model, optimizer: torch.optim.Optimizer | None = None, **settings: Any) -> onepass.Tuner:
    valid = settings.pop("valid", validation(torch.float64))
    return onepass.Tuner(model, optimizer or sgd(model), mse, valid, **settings)


def without_validation_data() -> None:
    tuner_of(replicated(mlp(3, 8, 1)), valid=[] if rank() == 1 else [part(regression())])


def at_other_intervals() -> None:
    tuner_of(replicated(mlp(3, 8, 1)), interval=10 - rank())


def with_another_guard() -> None:
    tuner_of(replicated(mlp(3, 8, 1)), guard=onepass.Guard(ratio=2.0 + rank()))


def tuning_other_values() -> None:
    tuner_of(replicated(mlp(3, 8, 1)), tune=("lr",) if rank() else ("lr", "momentum"))


def with_a_value_changed_since() -> None:
    model = replicated(mlp(3, 8, 1))
    optimizer = sgd(model)
    tuner = tuner_of(model, optimizer, interval=1)
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + rank())
    train_step(model, optimizer, part(regression()))
    tuner.step(part(regression()))


def with_validation_data_that_ends() -> None:
    model = replicated(mlp(3, 8, 1))
    optimizer = sgd(model)
    batches = [part(regression(seed=seed)) for seed in range(2 - rank())]
    tuner = tuner_of(model, optimizer, valid=iter(batches), interval=1)
    for _ in range(2):
        train_step(model, optimizer, part(regression()))
        tuner.step(part(regression()))


def wrapped_in_part() -> None:
    tuner_of(nn.Sequential(replicated(mlp(3, 8)), mlp(8, 1)))


def without_its_wrapper() -> None:
    model = replicated(mlp(3, 8, 1))
    tuner_of(getattr(model, "module", model))


def by_deepspeed() -> None:
    class DeepSpeedEngine(nn.Sequential): ...

    tuner_of(DeepSpeedEngine(mlp(3, 8, 1)))


def by_the_first_fsdp() -> None:
    tuner_of(FullyShardedDataParallel(mlp(3, 8, 1), device_id=torch.device("cpu")))


BAD: list[tuple[Callable[[], None], str]] = [
    (without_validation_data, r"valid must yield at least one batch"),
    (at_other_intervals, r"interval must be the same on all ranks, but got 10 on rank 0 and 9 on rank 1"),
    (with_another_guard, r"guard must be the same on all ranks, but got .*ratio=2\.0.* and .*ratio=3\.0"),
    (tuning_other_values, r"tune and extra must be the same on all ranks"),
    (with_a_value_changed_since, r"lr of param group 0 must be the same on all ranks, but got 0\.1 .* and 0\.2"),
    (with_validation_data_that_ends, r"used up only once"),
    (wrapped_in_part, r"must be wrapped in DistributedDataParallel as a whole, but only its part '0' is"),
    (by_deepspeed, r"must leave its optimizer to torch, but DeepSpeed makes its own"),
    (by_the_first_fsdp, r"must be sharded by fully_shard, but it is by FullyShardedDataParallel, its forerunner"),
    (without_its_wrapper, r"must be the DistributedDataParallel itself, but got the module inside"),
]


def refusals() -> list[str]:
    found = []
    for do, _ in BAD:
        with pytest.raises(ValueError) as told:
            do()
        found.append(str(told.value))
    return found


def test_bad_input_on_one_rank_is_one_error_on_all() -> None:
    first, second = on_ranks(refusals)
    for on_first, on_second, (_, message) in zip(first, second, BAD, strict=True):
        assert re.search(message, on_first)
        assert on_first.removeprefix("on rank 1: ") == on_second


def end_early() -> None:
    model = replicated(mlp(3, 8, 1))
    optimizer = sgd(model)
    tuner = tuner_of(model, optimizer, interval=1)
    train_step(model, optimizer, part(regression()))
    if rank() == 0:
        tuner.step(part(regression()))


def test_a_rank_that_takes_no_hyper_step() -> None:
    first, second = on_ranks(end_early)
    assert isinstance(first, RuntimeError)
    assert re.search(r"every rank must take every hyper step, but one of them has ended", str(first))
    assert second is None


def test_a_single_process_has_nobody_to_talk_to() -> None:
    with Ranks().together(dict):
        assert Ranks().total([torch.ones(2)])[0].tolist() == [1, 1]
    check_same([{"interval": 1}, {"interval": 1}])


# --- torchrun ---

KILLED = """
import os, signal
from torch import distributed
from tests.test_distributed import *
distributed.init_process_group("gloo")
model = replicated(mlp(3, 8, 1))
optimizer = sgd(model)
tuner = tuner_of(model, optimizer, interval=2)
for step in range(1000):
    train_step(model, optimizer, part(regression()))
    if step == 5 and rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    tuner.step(part(regression()))
"""


def test_a_killed_rank_ends_the_job(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    done = torchrun(script)
    assert done.returncode != 0
    assert re.search(r"Signal 9 \(SIGKILL\) received", done.stderr), done.stderr
