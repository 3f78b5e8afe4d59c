"""The series and exact unrolling on a quadratic, where everything can be written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from onepass.hypergradient import look_back, unrolled
from onepass.linearise import Piece
from onepass.rules import RULES

Values = dict[str, Tensor]
Walk = Callable[["Quadratic", Values, int], Tensor]


pytestmark = pytest.mark.usefixtures("float64")


class Quadratic:
    """Training loss ``w'Hw/2 - pull c'w``, validation loss ``|w - target|²/2``; ``pull`` lives inside the loss."""

    def __init__(self, size: int = 4) -> None:
        basis, _ = torch.linalg.qr(torch.randn(size, size))
        self.hessian: Tensor = basis @ torch.diag(torch.linspace(0.3, 1.5, size)) @ basis.T
        self.c, self.target, self.start = torch.randn(3, size).unbind()
        self.pull = torch.tensor(1.0)

    def gradient(self, w: Tensor) -> Tensor:
        return self.hessian @ w - self.pull * self.c

    def valid_loss(self, w: Tensor) -> Tensor:
        return (w - self.target).square().sum() / 2

    def valid_gradient(self, w: Tensor) -> Tensor:
        return w - self.target

    def product(self, v: Sequence[Tensor]) -> list[Tensor]:
        return [self.hessian @ v[0]]

    def stationary(self, weight_decay: Tensor) -> Tensor:
        return solved(self.hessian + weight_decay * torch.eye(len(self.c)), self.pull * self.c)


def solved(matrix: Tensor, right: Tensor) -> Tensor:
    result: Tensor = torch.linalg.solve(matrix, right)
    return result


def sgd_by_hand(problem: Quadratic, h: Values, steps: int) -> Tensor:
    w, velocity = problem.start, torch.zeros_like(problem.start)
    for _ in range(steps):
        velocity = h["momentum"] * velocity + problem.gradient(w) + h["weight_decay"] * w
        w = w - h["lr"] * velocity
    return w


def adam_by_hand(problem: Quadratic, h: Values, steps: int) -> Tensor:
    w = problem.start
    m = v = torch.zeros_like(w)
    for t in range(1, steps + 1):
        g = problem.gradient(w) + h["weight_decay"] * w
        m, v = h["beta1"] * m + (1 - h["beta1"]) * g, h["beta2"] * v + (1 - h["beta2"]) * g**2
        m_hat, v_hat = m / (1 - h["beta1"] ** t), v / (1 - h["beta2"] ** t)
        w = w - h["lr"] * m_hat / (v_hat.sqrt() + h["eps"])
    return w


class Case(NamedTuple):
    rule: str
    by_hand: Walk
    tuned: dict[str, float]
    switches: dict[str, Any]


CASES = {
    "sgd": Case("sgd", sgd_by_hand, {"lr": 0.3, "momentum": 0.7, "weight_decay": 0.2}, {"dampening": 0, "nesterov": 0}),
    "adam": Case(
        "adam",
        adam_by_hand,
        {"lr": 0.1, "beta1": 0.8, "beta2": 0.95, "eps": 0.01, "weight_decay": 0.2},
        {"amsgrad": False},
    ),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def tensors(case: Case) -> Values:
    return {name: torch.tensor(value) for name, value in case.tuned.items()}


def record(
    case: Case, problem: Quadratic, steps: int, values: Values | None = None
) -> tuple[list[list[Piece]], Tensor]:
    """Real steps from an empty state, as pieces, and the weights after the last."""
    tuned, update = values or tensors(case), RULES[case.rule].update
    w, state, pieces = problem.start, dict[str, Any](), []
    for _ in range(steps):
        pieces.append([Piece(update, {**case.switches, **tuned}, w, problem.gradient(w), state, tuple(tuned))])
        u, state = update(pieces[-1][0].values, w, pieces[-1][0].gradient, state)
        w = w - u
    return pieces, w


def through_hand_written_steps(case: Case, problem: Quadratic, steps: int, values: Values | None = None) -> Values:
    """The derivative of the final validation loss by every tuned value and by ``pull``, by autograd."""
    leaves = {k: v.clone().requires_grad_() for k, v in {**(values or tensors(case)), "pull": problem.pull}.items()}
    problem.pull = leaves["pull"]
    loss = problem.valid_loss(case.by_hand(problem, leaves, steps))
    problem.pull = problem.pull.detach()
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def assert_equal(found: Values, expected: Values, tolerance: float = 1e-10) -> None:
    assert set(found) == set(expected)
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=tolerance, atol=tolerance, msg=name)


@every_case
def test_one_term_equals_autograd_and_central_differences_through_one_step(case: Case) -> None:
    problem = Quadratic()
    steps, after = record(case, problem, 1)
    (found,), (b_g,) = look_back(steps[-1], [problem.valid_gradient(after)], lookback=1, cotangents=True)
    assert_equal({**found, "pull": -b_g @ problem.c}, through_hand_written_steps(case, problem, 1))
    size = 1e-5
    for name, value in tensors(case).items():
        ends = [case.by_hand(problem, {**tensors(case), name: value + d}, 1) for d in (size, -size)]
        difference = (problem.valid_loss(ends[0]) - problem.valid_loss(ends[1])) / (2 * size)
        assert float(found[name]) == pytest.approx(float(difference), rel=1e-6, abs=1e-9)


@every_case
@pytest.mark.parametrize("factors", [1.0, [0.8, 0.9, 0.95, 1.0]], ids=["scalar", "per-element"])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_unrolled_equals_autograd_through_hand_written_steps(case: Case, factors: Any, count: int) -> None:
    problem = Quadratic()
    values = {name: value * torch.tensor(factors) for name, value in tensors(case).items()}
    steps, after = record(case, problem, count, values)
    hessians = [None, *[problem.product] * (count - 1)]  # the oldest step's is never used
    (found,), cotangents = unrolled(steps, [problem.valid_gradient(after)], hessians, cotangents=True)
    pull = sum((-b_g @ problem.c for (b_g,) in cotangents), start=torch.tensor(0.0))
    assert_equal({**found, "pull": pull}, through_hand_written_steps(case, problem, count, values))
    newest = look_back(steps[-1], [problem.valid_gradient(after)], lookback=1, cotangents=True)[1]
    torch.testing.assert_close(cotangents[-1], newest)  # oldest first, as the steps


def at_rest(problem: Quadratic, values: Values) -> Piece:
    """An SGD step where nothing moves any more; a walk by hand starts there too."""
    problem.start = w = problem.stationary(values["weight_decay"])
    state = {"momentum_buffer": torch.zeros_like(w)}
    named = {**CASES["sgd"].switches, **values}
    return Piece(RULES["sgd"].update, named, w, problem.gradient(w), state, tuple(values))


@pytest.mark.parametrize("momentum", [0.0, 0.6])
@pytest.mark.parametrize("terms", [1, 2, 6])
def test_at_rest_the_series_equals_as_many_unrolled_steps(terms: int, momentum: float) -> None:
    """Where a step no longer moves, the last step repeated is the same as the last steps."""
    problem, case = Quadratic(), CASES["sgd"]
    values = {**tensors(case), "momentum": torch.tensor(momentum)}
    piece = at_rest(problem, values)
    v = problem.valid_gradient(piece.weights)
    (found,), (b_g,) = look_back([piece], [v], problem.product, lookback=terms, cotangents=True)
    expected = through_hand_written_steps(case, problem, terms, values)
    assert_equal({**found, "pull": -b_g @ problem.c}, expected)
    assert abs(float(expected["weight_decay"])) > 1e-2


@pytest.mark.parametrize("through_state", [True, False])
def test_many_terms_tend_to_the_implicit_gradient(through_state: bool) -> None:
    """Weight decay moves the minimum: ``dw*/dwd = -(H + wd)⁻¹ w*``, and ``dw*/dpull = (H + wd)⁻¹ c``."""
    problem, values = Quadratic(), tensors(CASES["sgd"])
    piece = at_rest(problem, values)
    v = problem.valid_gradient(piece.weights)
    (found,), (b_g,) = look_back(
        [piece], [v], problem.product, lookback=400, cotangents=True, through_state=through_state
    )
    adjoint = solved(problem.hessian + values["weight_decay"] * torch.eye(4), v)
    torch.testing.assert_close(found["weight_decay"], -adjoint @ piece.weights)
    torch.testing.assert_close(-b_g @ problem.c, adjoint @ problem.c)


@every_case
@pytest.mark.parametrize("through_state", [True, False])
def test_series_equals_equation_6_with_dense_jacobians(case: Case, through_state: bool) -> None:
    problem = Quadratic()
    steps, after = record(case, problem, 4)
    (piece,) = steps[-1]
    v = problem.valid_gradient(after)
    (found,), _ = look_back([piece], [v], problem.product, lookback=5, through_state=through_state)
    assert_equal(found, equation_6(piece, problem, v, terms=5, through_state=through_state))
    (other,), _ = look_back([piece], [v], problem.product, lookback=5, through_state=not through_state)
    assert all(abs(float(found[name] - other[name])) > 1e-3 * abs(float(found[name])) for name in found)


def equation_6(piece: Piece, problem: Quadratic, v: Tensor, *, terms: int, through_state: bool) -> Values:
    """The sum of ``a (∂x'/∂x)^j ∂x'/∂λ`` over ``j < terms``, where ``x`` is the weights, or weights and state."""
    carried = [key for key, value in piece.state.items() if isinstance(value, Tensor)] if through_state else []
    x = torch.cat([piece.weights, *[piece.state[key] for key in carried]])
    names = list(piece.tuned)

    def step(x: Tensor, tuned: Tensor) -> Tensor:
        w, *rest = x.split(len(v))
        state = {**piece.state, **dict(zip(carried, rest, strict=True))}
        values = {**piece.values, **dict(zip(names, tuned, strict=True))}
        u, after = piece.update(values, w, problem.gradient(w), state)
        return torch.cat([w - u, *[after[key] for key in carried]])

    by_x, by_tuned = torch.autograd.functional.jacobian(step, (x, torch.stack([piece.values[n] for n in names])))
    a = torch.cat([v, torch.zeros(len(x) - len(v))])
    series = torch.stack([torch.linalg.matrix_power(by_x, j) for j in range(terms)]).sum(0)
    return dict(zip(names, a @ series @ by_tuned, strict=True))


@pytest.mark.parametrize("lr", [1.2, 1.9, 3.0])
def test_an_overshooting_learning_rate_is_lowered(lr: float) -> None:
    """The update is taken at the old weights, the validation gradient at the new ones.

    On ``w²/2`` any rate above 1 jumps over the minimum. Seen from there the two gradients are opposed, which asks for a
    smaller rate; both at one point they are always aligned, and would ask for a larger one.
    """

    def by_lr(update_at: float, valid_at: float) -> float:
        w = torch.tensor([update_at])
        values = {"lr": torch.tensor(lr), "momentum": 0, "weight_decay": 0}
        piece = Piece(RULES["sgd"].update, values, w, w.clone(), {}, ("lr",))
        (found,), _ = look_back([piece], [torch.tensor([valid_at])], lookback=1)
        return float(found["lr"])

    old = 1.0
    new = old - lr * old
    assert by_lr(update_at=old, valid_at=new) > 0
    assert by_lr(update_at=old, valid_at=old) < 0
    assert by_lr(update_at=new, valid_at=new) < 0


@every_case
@pytest.mark.parametrize("shape", [(), (4,)], ids=["shared", "per-element"])
def test_pieces_may_be_cut_anywhere(case: Case, shape: tuple[int, ...]) -> None:
    """Two pieces that share their value tensors add up to the one piece they were cut from."""
    problem = Quadratic()
    steps, after = record(case, problem, 3, {name: value.expand(shape) for name, value in tensors(case).items()})
    v = problem.valid_gradient(after)
    (whole,), (cotangent,) = look_back(steps[-1], [v], problem.product, lookback=4, cotangents=True)
    halves = [cut(steps[-1][0], slice(0, 1)), cut(steps[-1][0], slice(1, 4))]

    def product(parts: Sequence[Tensor]) -> list[Tensor]:
        return list((problem.hessian @ torch.cat(list(parts))).split([1, 3]))

    (first, second), cotangents = look_back(halves, v.split([1, 3]), product, lookback=4, cotangents=True)
    joined = {k: torch.cat([first[k], second[k]]) if shape else first[k] + second[k] for k in whole}
    assert_equal({**joined, "g": torch.cat(cotangents)}, {**whole, "g": cotangent})


def cut(piece: Piece, part: slice) -> Piece:
    def of(value: Any) -> Any:
        return value[part] if isinstance(value, Tensor) and value.dim() else value

    values, state = ({k: of(v) for k, v in kept.items()} for kept in (piece.values, piece.state))
    return Piece(piece.update, values, of(piece.weights), of(piece.gradient), state, piece.tuned)


@every_case
def test_arguments_are_left_untouched(case: Case) -> None:
    problem = Quadratic()
    steps, after = record(case, problem, 3)
    v = problem.valid_gradient(after)
    contents = [x for (p,) in steps for x in (p.weights, p.gradient, *p.values.values(), *p.state.values())]
    held = [x for x in [v, *contents] if isinstance(x, Tensor)]
    keys = [(list(p.values), list(p.state)) for (p,) in steps]
    versions, before = [x._version for x in held], [x.clone() for x in held]
    look_back(steps[-1], [v], problem.product, lookback=3)
    unrolled(steps, [v], [problem.product] * 3)
    assert [x._version for x in held] == versions
    assert all(torch.equal(x, b) for x, b in zip(held, before, strict=True))
    assert not any(x.requires_grad or x.grad is not None for x in held)
    assert [(list(p.values), list(p.state)) for (p,) in steps] == keys


def errors() -> dict[str, Callable[[], object]]:
    one = torch.ones(2)
    values = {"lr": torch.tensor(0.1), "momentum": 0, "weight_decay": 0}
    piece = Piece(RULES["sgd"].update, values, one, one, {}, ("lr",))
    return {
        "lookback must be at least 1, but got 0": lambda: look_back([piece], [one], lookback=0),
        "hessian must be given for lookback=2, but got None": lambda: look_back([piece], [one], lookback=2),
        "steps must hold at least one step, but got none": lambda: unrolled([], [one], []),
        "hessians[1] must be given, but got None": lambda: unrolled([[piece]] * 2, [one], [None, None]),
    }


@pytest.mark.parametrize("message", errors())
def test_errors_say_what_is_wrong(message: str) -> None:
    with pytest.raises(ValueError) as raised:
        errors()[message]()
    assert message in str(raised.value)
