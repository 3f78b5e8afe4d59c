"""The optimizers with tensor hyperparameters against torch's own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import onepass.optim
from onepass.optim import SteadyAdam, per_element, per_tensor


class Case(NamedTuple):
    ours: type[torch.optim.Optimizer]
    twin: type[torch.optim.Optimizer]
    kwargs: Mapping[str, Any]


_ADAM: Mapping[str, Any] = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
_SGD: Mapping[str, Any] = {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.1}

CASES = {
    "sgd-default": Case(onepass.optim.SGD, torch.optim.SGD, {}),
    "sgd": Case(onepass.optim.SGD, torch.optim.SGD, _SGD),
    "sgd-dampening": Case(onepass.optim.SGD, torch.optim.SGD, {**_SGD, "dampening": 0.4}),
    "sgd-nesterov": Case(onepass.optim.SGD, torch.optim.SGD, {**_SGD, "nesterov": True}),
    "sgd-maximize": Case(onepass.optim.SGD, torch.optim.SGD, {"lr": 1e-3, "maximize": True}),
    "adam-default": Case(onepass.optim.Adam, torch.optim.Adam, {}),
    "adam": Case(onepass.optim.Adam, torch.optim.Adam, _ADAM),
    "adam-amsgrad": Case(onepass.optim.Adam, torch.optim.Adam, {**_ADAM, "amsgrad": True}),
    "adam-maximize": Case(onepass.optim.Adam, torch.optim.Adam, {**_ADAM, "maximize": True}),
    "adamw-default": Case(onepass.optim.AdamW, torch.optim.AdamW, {}),
    "adamw": Case(onepass.optim.AdamW, torch.optim.AdamW, _ADAM),
    "adamw-amsgrad": Case(onepass.optim.AdamW, torch.optim.AdamW, {**_ADAM, "amsgrad": True}),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


pytestmark = pytest.mark.usefixtures("float64")


INPUTS = torch.linspace(-1, 1, 15, dtype=torch.float64).view(5, 3).sin()


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        (model(INPUTS) - 1).square().mean().backward()
        optimizer.step()


def converted(kwargs: Mapping[str, Any], convert: Callable[[float], Any]) -> dict[str, Any]:
    """Every number, those of ``betas`` too, made into something else; switches stay as they are."""

    def of(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(convert(number) for number in value)
        return convert(value) if isinstance(value, float) else value

    return {name: of(value) for name, value in kwargs.items()}


@every_case
@pytest.mark.parametrize("convert", [float, torch.tensor], ids=["numbers", "tensors"])
def test_steps_like_torch(case: Case, convert: Callable[[float], Any]) -> None:
    model = network()
    twin = copy.deepcopy(model)
    train(model, case.ours(model.parameters(), **converted(case.kwargs, convert)), 30)
    train(twin, case.twin(twin.parameters(), **case.kwargs), 30)
    ours, theirs = list(model.parameters()), list(twin.parameters())
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@every_case
@pytest.mark.parametrize("columns", [1, 3], ids=["broadcast", "per-element"])
def test_each_element_follows_its_own_values(case: Case, columns: int) -> None:
    """The rows of one matrix have values of their own: each moves as the whole matrix would under those."""
    factors = torch.tensor([[0.7], [1.0]]).expand(2, columns)
    start, gradients = torch.randn(2, 3), torch.randn(10, 2, 3)
    ours = nn.Parameter(start.clone())
    walk(ours, case.ours([ours], **converted(case.kwargs, lambda number: number * factors)), gradients)
    for row in range(2):
        twin, factor = nn.Parameter(start.clone()), float(factors[row, 0])
        walk(twin, case.twin([twin], **converted(case.kwargs, lambda number, f=factor: number * f)), gradients)  # type: ignore[misc]
        torch.testing.assert_close(ours[row], twin[row], rtol=1e-12, atol=1e-12)


def walk(p: nn.Parameter, optimizer: torch.optim.Optimizer, gradients: Tensor) -> None:
    for g in gradients:
        p.grad = g.clone()
        optimizer.step()


@every_case
def test_state_dict_round_trip_continues_the_same_run(case: Case) -> None:
    model = network()
    optimizer = case.ours(per_element(model.parameters(), lr=0.02), **case.kwargs)
    train(model, optimizer, 3)
    resumed = copy.deepcopy(model)
    # Starts from other rates, which the saved ones must replace.
    fresh = case.ours(per_element(resumed.parameters(), lr=0.5), **case.kwargs)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, 3)
    train(resumed, fresh, 3)
    torch.testing.assert_close(list(model.parameters()), list(resumed.parameters()), rtol=0, atol=0)
    # The two are apart: what one tunes in place must not reach the other.
    fresh.param_groups[0]["lr"].fill_(7.0)
    assert float(optimizer.param_groups[0]["lr"].max()) == 0.02


@every_case
def test_weights_without_gradient_stay_and_get_no_state(case: Case) -> None:
    model = network()
    optimizer = case.ours(model.parameters(), **case.kwargs)
    frozen = next(model.parameters()).requires_grad_(False)
    before = frozen.clone()
    train(model, optimizer, 2)
    assert torch.equal(frozen, before) and not optimizer.state[frozen]


@every_case
def test_closure_is_called_once_with_gradients_on_and_its_loss_returned(case: Case) -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = case.ours([p], **case.kwargs)
    calls: list[bool] = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 2.0  # the loss before the step
    assert calls == [True]
    assert not torch.equal(p, torch.ones(2))
    assert optimizer.step() is None


@every_case
def test_hooks_around_a_step_run_once(case: Case) -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer, seen = case.ours([p], **case.kwargs), list[str]()
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    walk(p, optimizer, torch.ones(1, 2))
    assert seen == ["before", "after"]


def test_per_element_and_per_tensor_make_one_group_a_tensor() -> None:
    parameters = list(network().parameters())
    for group, p in zip(per_element(parameters, lr=0.1, weight_decay=0.01), parameters, strict=True):
        assert group["params"] == [p]
        assert group["lr"].shape == group["weight_decay"].shape == p.shape
        assert not group["lr"].requires_grad and group["lr"].unique().tolist() == [0.1]
    for group, p in zip(per_tensor(parameters, lr=0.1), parameters, strict=True):
        assert group == {"params": [p], "lr": 0.1}


def test_per_tensor_serves_torch_optimizers() -> None:
    optimizer = torch.optim.SGD(per_tensor(network().parameters(), lr=0.1), momentum=0.9)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1] * 4


def parameter(*shape: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(*shape))]


ERRORS: list[tuple[Callable[[], object], str]] = [
    (lambda: onepass.optim.SGD(parameter(2), lr=-0.1), "lr must be at least 0, but got -0.1"),
    (lambda: onepass.optim.SGD(parameter(2), momentum=-0.5), "momentum must be at least 0, but got -0.5"),
    (lambda: onepass.optim.Adam(parameter(2), betas=(0.9, -0.1)), "beta2 must be at least 0, but got -0.1"),
    (lambda: onepass.optim.AdamW(parameter(2), eps=float("nan")), "eps must be at least 0, but got nan"),
    (
        lambda: onepass.optim.SGD(parameter(2, 3), lr=torch.ones(2)),
        "lr must broadcast to the weight's shape (2, 3), but got (2,)",
    ),
    (  # broadcasting the weight up to the value is not meant either
        lambda: onepass.optim.Adam(parameter(3), weight_decay=torch.ones(2, 3)),
        "weight_decay must broadcast to the weight's shape (3,), but got (2, 3)",
    ),
    (
        lambda: onepass.optim.SGD(parameter(2)).add_param_group({"params": parameter(4), "momentum": torch.ones(3)}),
        "momentum must broadcast to the weight's shape (4,), but got (3,)",
    ),
]


@pytest.mark.parametrize(("call", "message"), ERRORS, ids=[message for _, message in ERRORS])
def test_errors_say_what_is_wrong(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        call()
    assert message in str(raised.value)


def steady_steps(gradients: Tensor) -> Tensor:
    """How far ``SteadyAdam`` moves at each step, in units of its ``lr``."""
    w = torch.zeros(gradients.shape[1], dtype=torch.float64)
    optimizer, moved = SteadyAdam([w], lr=0.5), []
    for gradient in gradients:
        before, w.grad = w.clone(), gradient
        optimizer.step()
        moved.append((before - w) / 0.5)
    return torch.stack(moved)


def test_steady_adam_takes_full_steps_down_a_steady_slope() -> None:
    sizes = torch.logspace(-9, 3, 5, dtype=torch.float64)
    torch.testing.assert_close(steady_steps(sizes.expand(20, 5)), torch.ones(20, 5, dtype=torch.float64))
    torch.testing.assert_close(steady_steps(-sizes.expand(20, 5)), -torch.ones(20, 5, dtype=torch.float64))


def test_steady_adam_takes_short_steps_in_noise() -> None:
    noise = torch.randn(200, 500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    w = torch.zeros(500, dtype=torch.float64)
    adam, moved = torch.optim.Adam([w], lr=1.0, betas=(0.9, 0.95)), []
    for gradient in noise:
        before, w.grad = w.clone(), gradient
        adam.step()
        moved.append(before - w)

    def usual(steps: Tensor) -> float:
        return float(steps[50:].square().mean().sqrt())

    assert usual(torch.stack(moved)) == pytest.approx(0.23, abs=0.01)
    assert usual(steady_steps(noise)) == pytest.approx(0.08, abs=0.01)


def test_steady_adam_is_as_sure_as_adam_squared() -> None:
    """Its step is Adam's, times the size of Adam's, where that is below one."""
    gradients = torch.randn(30, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5
    w = torch.zeros(4, dtype=torch.float64)
    adam, expected = torch.optim.Adam([w], lr=1.0, betas=(0.9, 0.95), eps=1e-30), []
    for gradient in gradients:
        before, w.grad = w.clone(), gradient
        adam.step()
        expected.append((before - w) * (before - w).abs().clamp(max=1))
    torch.testing.assert_close(steady_steps(gradients), torch.stack(expected), rtol=1e-10, atol=1e-12)
