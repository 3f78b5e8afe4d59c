"""Every backend computes the same; and what recorded operations become on the way."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import onepass
from onepass.operations import open_thin_products, recorded, simplify
from onepass.workers import Gate, workers
from tests.populations import assert_close, batches, population, trained, weights

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
COMPILER = pytest.mark.skipif(not shutil.which("g++"), reason="needs a compiler")

BACKENDS = [
    pytest.param("traced", "cpu", id="traced"),
    pytest.param("compiled", "cpu", id="compiled", marks=COMPILER),
    pytest.param("traced", "cuda", id="traced on CUDA", marks=CUDA),
    pytest.param("graphs", "cuda", id="graphs", marks=CUDA),
    pytest.param("compiled", "cuda", id="compiled on CUDA", marks=CUDA),
]


def normalised() -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 6, dtype=torch.float64),
        nn.BatchNorm1d(6, dtype=torch.float64),
        nn.ReLU(),
        nn.Linear(6, 1, dtype=torch.float64),
    )


# Starts hot enough for the guard to go back, and for its closer watch.
KINDS: dict[str, dict[str, Any]] = {
    "sgd": {"start": {"lr": [0.01, 0.5, 5.0], "momentum": 0.9, "weight_decay": 1e-3}},
    "adamw per element": {"rule": "adamw", "start": {"lr": [1e-3, 1e-2, 1.0]}, "per_element": ("lr",)},
    "batch norm": {"model": normalised, "start": {"lr": [0.01, 0.05, 0.1]}, "guard": None},
    "unrolled": {"start": {"lr": [0.01, 0.05, 0.1]}, "unroll": 3, "guard": None},
    "unrolled to the step before": {
        "start": {"lr": [0.01, 0.05, 0.1], "momentum": 0.9},
        "unroll": 1,
        "interval": 1,
        "guard": None,
    },
    "clipped": {"start": {"lr": [0.01, 0.05, 0.1]}, "clip_norm": 0.5, "guard": None},
    "finite differences": {"start": {"lr": [0.01, 0.05, 0.1]}, "curvature": "finite-difference", "guard": None},
    "whole run": {
        "start": {"lr": [0.01, 0.5, 5.0], "momentum": 0.9},
        "estimator": "whole-run",
        "lookback": 1,
        "hyper_optimizer": onepass.optim.SteadyAdam,
    },
    "plain": {"tune": (), "start": {"lr": [0.01, 0.1, 0.2]}, "scale": {"lr": 0.9}},
}


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_like_the_eager_one(backend: str, device: str, kind: str) -> None:
    if backend == "compiled" and device == "cpu" and kind != "sgd":
        pytest.skip("compiling takes its time: one kind is enough")
    settings = {"lookback": 2, "device": device, **KINDS[kind]}
    found, eager = (trained(34, batches(3), backend=b, **settings) for b in (backend, "eager"))
    assert_close(weights(found), weights(eager), 1e-9)
    for name, value in eager.values().items():
        assert_close(found.values()[name], value, 1e-9, name)
    assert torch.equal(found.history.returns, eager.history.returns)
    assert found.history.returns.any() == (kind in ("sgd", "adamw per element", "whole run"))


@CUDA
@pytest.mark.parametrize("backend", ["eager", "graphs"])
def test_a_replica_on_a_gpu_equals_one_on_a_cpu(backend: str) -> None:
    settings = KINDS["sgd"]
    assert_close(
        weights(trained(34, device="cuda", backend=backend, **settings)).cpu(), weights(trained(34, **settings)), 1e-7
    )


@CUDA
def test_a_run_on_a_gpu_can_be_taken_up(tmp_path: Any) -> None:
    path, settings = tmp_path / "population.pt", {"device": "cuda", "backend": "graphs", **KINDS["sgd"]}
    whole, first, second = (population(**settings) for _ in range(3))
    train, valid = batches(3), batches(2)
    whole.run(train, valid, steps=60)
    first.run(train, valid, steps=30, checkpoint=path)
    second.run(train, valid, steps=60, checkpoint=path)
    assert torch.equal(weights(whole), weights(second))


def test_it_is_recorded_once() -> None:
    found = population(backend="traced", block=1)
    found.run(batches(1), batches(1), steps=20)
    made = found._made
    found.run(batches(1), batches(1), steps=20)
    assert made is found._made


@pytest.mark.parametrize(("replicas", "steps", "recorded"), [(1, 20, False), (20, 20, True), (1, 300, True)])
def test_recording_has_to_pay(replicas: int, steps: int, recorded: bool) -> None:
    """Many blocks of few steps are as good as few blocks of many."""
    made = trained(steps, replicas=replicas, block=1, device="cpu")._made
    assert made is not None and (made[0] == "traced") is recorded


def test_random_numbers_and_real_steps_cannot_be_recorded() -> None:
    noisy = {
        "model": lambda: nn.Sequential(nn.Linear(3, 4, dtype=torch.float64), nn.Dropout(), nn.Linear(4, 1).double())
    }
    with pytest.raises(ValueError, match=r"backend must be 'auto' or 'eager' where the loss draws .* got 'traced'"):
        trained(10, backend="traced", **noisy)
    for beyond in ({"unroll": 11}, {"unroll": 3, "restart": True}):
        with pytest.raises(ValueError, match="'eager' with restarts or unroll beyond an interval, but got 'tr"):
            population(backend="traced", guard=None, **beyond)


def test_inside_no_grad() -> None:
    with torch.no_grad():
        found = trained(20, backend="traced")
    assert torch.equal(weights(found), weights(trained(20, backend="traced")))


# --- recorded operations ---


def program_of(function: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    return GraphModule(*recorded(lambda *tensors: [function(*tensors)], inputs))


def operations(program: GraphModule) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


def trained_a_little(weights: Tensor, means: Tensor, x: Tensor) -> list[Tensor]:
    """A bit of everything: ``vmap``, buffers changed in place, constants, several results, second derivatives."""

    def loss(row: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        hidden = torch.nn.functional.linear(x, row.reshape(4, 3)).relu() * torch.tensor(2.0)
        scaled = torch.nn.functional.batch_norm(hidden, mean, variance, training=True)
        return scaled.chunk(2, 1)[0].pow(3).mean()

    leaf, after = weights.detach().requires_grad_(), means.clone()
    losses = vmap(loss)(leaf, after, torch.ones_like(means))
    (slope,) = torch.autograd.grad(losses.sum(), leaf, create_graph=True)
    return [weights - slope, after, *torch.autograd.grad(slope, leaf, slope.detach())]


def test_recorded_as_torch_records_it() -> None:
    inputs, others = ([torch.randn(*size) for size in ((5, 12), (5, 4), (6, 3))] for _ in range(2))
    found, reference = GraphModule(*recorded(trained_a_little, inputs)), make_fx(trained_a_little)(*inputs)
    for program in (found, reference):
        program.graph.eliminate_dead_code()
    assert operations(found) == operations(reference)
    for mine, theirs, plain in zip(found(*others), reference(*others), trained_a_little(*others), strict=True):
        assert torch.equal(mine, theirs)
        assert_close(mine, plain.detach(), 1e-4)


def test_one_tensor_in_two_places_is_two_inputs() -> None:
    x, y = torch.randn(3), torch.randn(3)
    assert torch.equal(program_of(torch.sub, x, x)(x, y)[0], x - y)


def test_constants_stay_what_they_are() -> None:
    outside = torch.randn(3)

    def function(x: Tensor) -> Tensor:
        return torch.tensor([1.0, 2.0, 3.0]).add_(x) + outside

    x = torch.randn(3)
    program = program_of(function, x)
    assert all(torch.equal(program(x)[0], function(x)) for _ in range(2))


def test_what_depends_on_values_is_not_recorded() -> None:
    with pytest.raises(RuntimeError, match=r"must not depend on the value of a tensor, but .* use backend='eager'"):
        program_of(lambda x: x if x.sum() > 0 else -x, torch.randn(3))


def test_nothing_is_done_twice_or_for_nothing() -> None:
    def wasteful(x: Tensor) -> Tensor:
        return torch.zeros_like(x) + x.detach().view(3, 4).expand(3, 4) * x.exp() + x.exp() * 1

    x = torch.randn(3, 4)
    program = program_of(wasteful, x)
    simplify(program.graph)
    program.graph.eliminate_dead_code()
    program.recompile()
    assert torch.equal(program(x)[0], wasteful(x))
    assert operations(program).count("aten.exp.default") == 1
    assert not any(word in program.code for word in ("zeros", "detach", "view", "expand"))


def test_what_changes_its_input_is_left_alone() -> None:
    def counted(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.clone()
        before = y.exp()
        y.add_(1)
        return before, y.exp()

    x = torch.randn(3)
    program = GraphModule(*recorded(counted, [x]))
    simplify(program.graph)
    program.recompile()
    for found, expected in zip(program(x), counted(x), strict=True):
        assert torch.equal(found, expected)


def test_random_numbers_are_drawn_each_time() -> None:
    program = program_of(lambda x: torch.rand_like(x) - torch.rand_like(x), torch.zeros(3))
    simplify(program.graph)
    program.recompile()
    assert program(torch.zeros(3))[0].abs().min() > 0


@pytest.mark.parametrize("shape", [(5, 40, 1), (1, 40, 5), (5, 1, 40), (8, 40, 20), (20, 40, 8), (3, 4, 2)])
def test_thin_products_become_sums(shape: tuple[int, int, int]) -> None:
    rows, inner, columns = shape
    left, right = (torch.randn(2, *size, dtype=torch.float64) for size in ((rows, inner), (inner, columns)))
    program = program_of(torch.bmm, left, right)
    open_thin_products(program.graph)
    program.recompile()
    assert "bmm" not in program.code
    assert_close(program(left, right)[0], torch.bmm(left, right), 1e-12)


def test_thick_products_stay() -> None:
    program = program_of(torch.bmm, torch.randn(2, 20, 30), torch.randn(2, 30, 40))
    open_thin_products(program.graph)
    assert "bmm" in program.code


# --- side by side ---


def test_one_alone_waits_for_all_others() -> None:
    gate, order = Gate(), []

    def together() -> None:
        with gate.together():
            time.sleep(0.05)
            order.append("together")

    thread = threading.Thread(target=together)
    thread.start()
    time.sleep(0.01)
    with gate.alone():
        order.append("alone")
    thread.join()
    assert order == ["together", "alone"]


def test_workers_leave_the_number_of_threads_as_it_was() -> None:
    before = torch.get_num_threads()
    with workers(3) as each:
        assert each(lambda x: (x * x, torch.get_num_threads()), [1, 2, 3]) == [(1, 1), (4, 1), (9, 1)]
    assert torch.get_num_threads() == before


def test_blocks_side_by_side_are_like_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"replicas": 6, "block": 2, "backend": "traced"}
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # nor would they be set back to the true number
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    many = trained(40, onepass.Minibatches(batches(1)[0], 4, per_replica=True), **settings)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert torch.equal(
        weights(many), weights(trained(40, onepass.Minibatches(batches(1)[0], 4, per_replica=True), **settings))
    )
