"""Every rule against its torch twin, and its derivatives against finite differences through the real optimizer."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from onepass.hypergradient import look_back
from onepass.hyperparameters import TRANSFORMS, in_domain
from onepass.linearise import Piece
from onepass.rules import OPTIMIZERS, RULES, Rule, register, rule_of
from onepass.snapshot import named_values, write_value


class Case(NamedTuple):
    rule: str
    optimizer: type[torch.optim.Optimizer]
    kwargs: Mapping[str, Any]
    before: tuple[int, ...] = (0, 4)  # steps taken before the one that is differentiated


# eps is large and betas are far from 1, so that every derivative is big enough for a finite difference to see.
_ADAM: Mapping[str, Any] = {"lr": 0.05, "betas": (0.8, 0.9), "eps": 0.02}
_DECAYED: Mapping[str, Any] = {**_ADAM, "weight_decay": 0.1}
_EARLY_AND_LATE = (0, 3, 12)  # with beta2 = 0.9 RAdam begins to rectify at its sixth step

CASES = {
    "sgd": Case("sgd", torch.optim.SGD, {"lr": 0.1}),
    "sgd-momentum": Case("sgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.8}),
    "sgd-dampening": Case("sgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.8, "dampening": 0.3}),
    "sgd-nesterov": Case("sgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.8, "nesterov": True}),
    "sgd-decay": Case("sgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.1}),
    "sgd-maximize": Case("sgd", torch.optim.SGD, {"lr": 0.01, "weight_decay": 0.1, "maximize": True}),
    "adam": Case("adam", torch.optim.Adam, _ADAM),
    "adam-decay": Case("adam", torch.optim.Adam, _DECAYED),
    "adam-amsgrad": Case("adam", torch.optim.Adam, {**_DECAYED, "amsgrad": True}),
    "adamw": Case("adamw", torch.optim.AdamW, _DECAYED),
    "adamw-no-decay": Case("adamw", torch.optim.AdamW, {**_ADAM, "weight_decay": 0.0}),
    "adamw-amsgrad": Case("adamw", torch.optim.AdamW, {**_DECAYED, "amsgrad": True}),
    "adamw-maximize": Case("adamw", torch.optim.AdamW, {**_DECAYED, "maximize": True}),
    "nadam": Case("nadam", torch.optim.NAdam, {**_DECAYED, "momentum_decay": 0.2}),
    "nadam-decoupled": Case("nadam", torch.optim.NAdam, {**_DECAYED, "decoupled_weight_decay": True}),
    "radam": Case("radam", torch.optim.RAdam, _DECAYED, _EARLY_AND_LATE),
    "radam-decoupled": Case("radam", torch.optim.RAdam, {**_DECAYED, "decoupled_weight_decay": True}, _EARLY_AND_LATE),
    "rmsprop": Case("rmsprop", torch.optim.RMSprop, {"lr": 0.05, "alpha": 0.9, "eps": 0.02, "weight_decay": 0.1}),
    "rmsprop-momentum": Case("rmsprop", torch.optim.RMSprop, {"lr": 0.01, "alpha": 0.9, "eps": 0.02, "momentum": 0.8}),
    "rmsprop-centered": Case("rmsprop", torch.optim.RMSprop, {"lr": 0.01, "alpha": 0.9, "eps": 0.02, "centered": True}),
    "adagrad": Case("adagrad", torch.optim.Adagrad, {"lr": 0.2, "eps": 0.02, "lr_decay": 0.1, "weight_decay": 0.1}),
    "adamax": Case("adamax", torch.optim.Adamax, _DECAYED),
}
if "decoupled_weight_decay" in inspect.signature(torch.optim.Adam).parameters:  # not in the oldest torch we support
    CASES["adam-decoupled"] = Case("adam", torch.optim.Adam, {**_DECAYED, "decoupled_weight_decay": True})
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


# torch keeps NAdam's running product in the default dtype: in float32 no twin could be equal to 1e-12.
pytestmark = pytest.mark.usefixtures("float64")


class Problem:
    """Six weights under a real optimizer, with a training and a validation loss that no step makes trivial."""

    def __init__(self, case: Case) -> None:
        self.matrix, self.valid_matrix = torch.randn(8, 6), torch.randn(5, 6)
        self.weights = torch.randn(2, 3).requires_grad_()
        self.optimizer = case.optimizer([self.weights], **case.kwargs)

    def step(self) -> None:
        self.optimizer.zero_grad()
        torch.log(torch.cosh(self.matrix @ self.weights.flatten() - 1)).sum().backward()
        self.optimizer.step()

    def valid_loss(self) -> Tensor:
        return torch.log(torch.cosh(self.valid_matrix @ self.weights.flatten() + 1)).sum()

    @property
    def values(self) -> dict[str, Any]:
        return named_values(self.optimizer.param_groups[0])

    def piece(self, tuned: tuple[str, ...]) -> Piece:
        """The step just taken: call on a copy that stands before it, with the gradient of the one after it."""
        values = {**self.values, **{name: torch.tensor(self.values[name]) for name in tuned}}
        state = {k: float(v) if k == "step" else v for k, v in self.optimizer.state[self.weights].items()}
        assert self.weights.grad is not None
        return Piece(rule_of(self.optimizer).update, values, self.weights.detach(), self.weights.grad, state, tuned)


def tunable(case: Case) -> dict[str, float]:
    """The entries of a case that can be tuned from where they stand."""
    rule, values = RULES[case.rule], Problem(case).values
    return {name: values[name] for name in rule.tunable if in_domain(values[name], rule.tunable[name])}


def test_every_rule_and_every_tunable_entry_has_a_case() -> None:
    covered = {(case.rule, name) for case in CASES.values() for name in tunable(case)}
    assert covered == {(name, entry) for name, rule in RULES.items() for entry in rule.tunable}
    assert {case.optimizer for case in CASES.values()} == set(OPTIMIZERS)
    assert all(rule.tunable[name] in TRANSFORMS for rule in RULES.values() for name in rule.tunable)


@every_case
def test_rule_equals_its_torch_twin(case: Case) -> None:
    problem = Problem(case)
    assert rule_of(problem.optimizer) is RULES[case.rule]
    w, state = problem.weights.detach().clone(), dict[str, Any]()
    for _ in range(30):
        problem.step()
        assert problem.weights.grad is not None
        u, state = RULES[case.rule].update(problem.values, w, problem.weights.grad, state)
        w = w - u
        torch.testing.assert_close(w, problem.weights.detach(), rtol=1e-12, atol=1e-12)
    for key, value in state.items():
        twin = problem.optimizer.state[problem.weights][key]
        torch.testing.assert_close(torch.as_tensor(value), torch.as_tensor(twin), rtol=1e-12, atol=1e-12)


def test_radam_equals_its_torch_twin_when_the_default_dtype_is_coarse() -> None:
    """The length of the second moment's memory is a small difference of large numbers: it needs the digits."""
    problem = Problem(Case("radam", torch.optim.RAdam, {"lr": 0.05}))
    torch.set_default_dtype(torch.float32)
    w, state = problem.weights.detach().clone(), dict[str, Any]()
    for _ in range(12):
        problem.step()
        assert problem.weights.grad is not None
        u, state = RULES["radam"].update(problem.values, w, problem.weights.grad, state)
        w = w - u
    torch.testing.assert_close(w, problem.weights.detach(), rtol=1e-12, atol=1e-12)


@every_case
def test_look_back_of_one_equals_the_finite_difference_through_the_real_optimizer(case: Case) -> None:
    for before in case.before:
        problem = Problem(case)
        for _ in range(before):
            problem.step()
        after = copy.deepcopy(problem)
        after.step()
        problem.weights.grad = after.weights.grad
        (valid_gradient,) = torch.autograd.grad(after.valid_loss(), after.weights)
        names = tuple(tunable(case))
        (found,), _ = look_back([problem.piece(names)], [valid_gradient], lookback=1)
        expected = {name: central_difference(problem, name) for name in names}
        assert {n: float(v) for n, v in found.items()} == pytest.approx(expected, rel=1e-5, abs=1e-10), before
        # Otherwise a case might compare nothing but zeros.
        assert abs(expected["lr"]) > 1e-3


def central_difference(problem: Problem, name: str) -> float:
    size = 1e-4 * float(problem.values[name])
    losses = []
    for change in (size, -size):
        moved = copy.deepcopy(problem)
        write_value(moved.optimizer.param_groups[0], name, torch.tensor(problem.values[name] + change))
        moved.step()
        losses.append(float(moved.valid_loss().detach()))
    return (losses[0] - losses[1]) / (2 * size)


@every_case
def test_tensor_values_equal_elementwise_scalars(case: Case) -> None:
    problem = Problem(case)
    shape = problem.weights.shape
    spread = {name: value * (0.8 + 0.3 * torch.rand(shape)) for name, value in tunable(case).items()}
    gradients = torch.randn(9, *shape)  # nine steps: RAdam's elements begin to rectify at different times
    whole = walk(case, {**problem.values, **spread}, problem.weights.detach(), gradients)
    for i, j in [(i, j) for i in range(shape[0]) for j in range(shape[1])]:
        alone = {**problem.values, **{name: float(value[i, j]) for name, value in spread.items()}}
        one = walk(case, alone, problem.weights.detach()[i, j], gradients[:, i, j])
        torch.testing.assert_close(whole[i, j], one, rtol=1e-12, atol=1e-12)


def walk(case: Case, values: Mapping[str, Any], w: Tensor, gradients: Tensor) -> Tensor:
    state: dict[str, Any] = {}
    for g in gradients:
        u, state = RULES[case.rule].update(values, w, g, state)
        w = w - u
    return w


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dead_weights_give_no_nan(case: Case, dtype: torch.dtype) -> None:
    """A weight that is zero and never had a gradient must not spoil the hypergradient of all the others."""
    values = {**Problem(case).values, **({"eps": 1e-8} if "eps" in tunable(case) else {})}
    w, g, state = torch.tensor([0.0, 1.0], dtype=dtype), torch.tensor([0.0, 1.0], dtype=dtype), dict[str, Any]()
    for _ in range(8):
        tuned = {name: torch.tensor(values[name]) for name in tunable(case)}
        piece = Piece(RULES[case.rule].update, {**values, **tuned}, w, g, state, tuple(tuned))
        (found,), (b_g,) = look_back([piece], [torch.ones_like(w)], lambda v: v, lookback=3, cotangents=True)
        assert all(torch.isfinite(x).all() for x in [*found.values(), b_g])
        u, state = RULES[case.rule].update(values, w, g, state)
        w = w - u
        assert torch.isfinite(w).all()


@every_case
def test_rule_leaves_its_arguments_alone(case: Case) -> None:
    problem = Problem(case)
    for _ in range(2):
        problem.step()
    piece = problem.piece(tuple(tunable(case)))
    containers = (piece.values, piece.state)
    tensors = [x for c in containers for x in c.values() if isinstance(x, Tensor)] + [piece.weights, piece.gradient]
    versions, contents = [x._version for x in tensors], [dict(c) for c in containers]
    piece.update(piece.values, piece.weights, piece.gradient, piece.state)
    assert [x._version for x in tensors] == versions
    assert all(now[k] is was[k] for now, was in zip(containers, contents, strict=True) for k in now)
    assert [list(c) for c in containers] == [list(c) for c in contents]


class Lion(torch.optim.SGD):
    """A subclass may step in its own way."""


def test_unknown_optimizer_is_told_the_known_ones_and_the_cure() -> None:
    optimizer = Lion([torch.zeros(1)])
    with pytest.raises(ValueError, match="optimizer must be one of ") as raised:
        rule_of(optimizer)
    assert all(cls.__name__ in str(raised.value) for cls in OPTIMIZERS)
    assert "but got Lion; teach it with onepass.register(Lion, rule)" in str(raised.value)


def test_registered_optimizer_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, torch.optim.Rprop, RULES["sgd"])  # put back what the next line changes
    rule = Rule(RULES["sgd"].update, {"lr": "log10"})
    register(torch.optim.Rprop, rule)
    assert rule_of(torch.optim.Rprop([torch.zeros(1)])) is rule


def test_register_wants_a_rule() -> None:
    with pytest.raises(TypeError, match=r"rule must be an onepass\.rules\.Rule, but got function"):
        register(Lion, RULES["sgd"].update)  # type: ignore[arg-type]
