"""Every curvature product against the dense matrix it stands for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from onepass.curvature import CURVATURES, FIRST_ORDER, NoSecondDerivative, Products, norm
from onepass.evaluation import Evaluation, LossFunction, TrainingLoss

Batch = tuple[Tensor, Tensor]
# Relative errors: only the finite difference is not exact to rounding.
TOLERANCE = {name: 1e-6 if name in FIRST_ORDER else 1e-10 for name in CURVATURES}
every_curvature = pytest.mark.parametrize("name", CURVATURES)
every_second_order = pytest.mark.parametrize("name", [name for name in CURVATURES if name not in FIRST_ORDER])


LENT = ExitStack()  # weights lent to models, given back after each test


@pytest.fixture(autouse=True)
def _give_back(float64: None) -> Iterator[None]:
    yield
    LENT.close()


class Problem:
    """A model, one batch and a loss with two hyperparameters inside: one behind the model, one in front of it."""

    def __init__(self, model: nn.Module, batch: Batch, criterion: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.model, self.batch, self.criterion = model, batch, criterion
        self.temperature = torch.tensor(1.3, requires_grad=True)
        self.zoom = torch.tensor(0.7, requires_grad=True)
        self.names = [name for name, _ in model.named_parameters()]
        self.weights = [p.detach().clone().requires_grad_() for p in model.parameters()]

    def loss(self, model: Any, batch: Batch) -> Tensor:
        inputs, targets = batch
        return self.criterion(self.temperature * model(self.zoom * inputs), targets)

    def products(self, name: str, loss: LossFunction | None = None) -> Products:
        return CURVATURES[name](self.training(loss), self.weights, [self.temperature, self.zoom])

    def training(self, loss: LossFunction | None = None) -> TrainingLoss:
        training = Evaluation(self.model, loss or self.loss, None).training(self.batch, self.names, twice=True)
        return LENT.enter_context(training)

    def lent(self, flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split([w.numel() for w in self.weights])
        shaped = [part.view_as(w) for part, w in zip(parts, self.weights, strict=True)]
        return dict(zip(self.names, shaped, strict=True))

    @property
    def flat(self) -> Tensor:
        return flattened(self.weights)

    def outputs(self, flat: Tensor, zoom: Tensor) -> Tensor:
        result: Tensor = functional_call(self.model, self.lent(flat), (zoom * self.batch[0],))
        return result

    def value(self, flat: Tensor, temperature: Tensor, zoom: Tensor) -> Tensor:
        """The loss written out, with no help from the package."""
        return self.criterion(temperature * self.outputs(flat, zoom), self.batch[1])

    def dense_hessian(self) -> Tensor:
        return dense(lambda w: self.value(w, self.temperature, self.zoom), self.flat)

    def dense_gauss_newton(self) -> tuple[Tensor, Tensor, Tensor]:
        """The Jacobian of the outputs by the weights, by ``zoom``, and the Hessian of the criterion by the outputs."""
        by_weights = torch.autograd.functional.jacobian(lambda w: self.outputs(w, self.zoom), self.flat)
        by_zoom = torch.autograd.functional.jacobian(lambda zoom: self.outputs(self.flat, zoom), self.zoom)
        outputs = self.outputs(self.flat, self.zoom).detach()
        inputs, targets = outputs.flatten(), self.batch[1]
        middle = dense(lambda z: self.criterion(self.temperature * z.view_as(outputs), targets), inputs)
        return by_weights.flatten(0, -2), by_zoom.flatten(), middle

    def matrix(self, name: str) -> Tensor:
        """The dense matrix that the named product multiplies by."""
        if name != "gauss-newton":
            return self.dense_hessian()
        jacobian, _, middle = self.dense_gauss_newton()
        return jacobian.T @ middle @ jacobian


def dense(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        hessian: Tensor = torch.autograd.functional.hessian(f, x.detach())
    return hessian.detach()


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


def random_like(weights: Sequence[Tensor]) -> list[Tensor]:
    return [torch.randn_like(w) for w in weights]


def assert_close(found: Tensor, expected: Tensor, name: str) -> None:
    assert norm([expected]) > 1e-3  # a comparison of zeros would prove nothing
    assert norm([found - expected]) <= TOLERANCE[name] * norm([expected])


def mlp() -> Problem:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    return Problem(model, (2 * torch.randn(6, 3), torch.randint(3, (6,))), F.cross_entropy)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(3, 6), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).unsqueeze(1).chunk(3, dim=-1)
        result: Tensor = self.out(F.scaled_dot_product_attention(query, key, value)[:, 0, -1])
        return result


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(3, 2, batch_first=True), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(self.lstm(x)[0][:, -1])
        return result


def sequences(model: nn.Module) -> Problem:
    return Problem(model, (torch.randn(3, 4, 3), torch.randint(2, (3,))), F.cross_entropy)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "mlp": mlp,
    "attention": lambda: sequences(Attention()),
    "lstm": lambda: sequences(Recurrent()),
}


@every_curvature
@pytest.mark.parametrize("kind", PROBLEMS)
def test_product_equals_the_dense_matrix(name: str, kind: str) -> None:
    problem = PROBLEMS[kind]()
    products, matrix = problem.products(name), problem.matrix(name)
    for _ in range(3):
        v = random_like(problem.weights)
        assert_close(flattened(products.hessian(v)), matrix @ flattened(v), name)


@every_curvature
def test_gradient_equals_autograd(name: str) -> None:
    problem = mlp()
    flat = problem.flat.requires_grad_()
    (expected,) = torch.autograd.grad(problem.value(flat, problem.temperature, problem.zoom), flat)
    found = problem.products(name).gradient
    torch.testing.assert_close(flattened(found), expected, rtol=1e-12, atol=1e-12)
    assert not any(g.requires_grad for g in found)


@every_curvature
def test_mixed_derivative_equals_autograd(name: str) -> None:
    problem = mlp()
    v = random_like(problem.weights)
    temperature, zoom = problem.products(name).mixed(v)
    expected = mixed_by_autograd(problem, flattened(v))
    assert_close(temperature, expected[0], name)
    by_weights, by_zoom, middle = problem.dense_gauss_newton()
    # Gauss-Newton leaves out how the model itself curves, here as in its Hessian.
    without_model = flattened(v) @ by_weights.T @ middle @ by_zoom
    assert_close(zoom, without_model if name == "gauss-newton" else expected[1], name)


def mixed_by_autograd(problem: Problem, v: Tensor) -> tuple[Tensor, ...]:
    flat = problem.flat.requires_grad_()
    value = problem.value(flat, problem.temperature, problem.zoom)
    (gradient,) = torch.autograd.grad(value, flat, create_graph=True)
    return torch.autograd.grad(gradient @ v, (problem.temperature, problem.zoom))


@every_curvature
def test_a_penalty_on_the_weights_is_seen(name: str) -> None:
    problem = mlp()

    def penalised(model: Any, batch: Batch) -> Tensor:
        weights = torch.cat([p.flatten() for p in model.parameters()])
        return F.cross_entropy(model(batch[0]), batch[1]) + problem.temperature * weights.square().sum()

    penalty, unused = problem.products(name, penalised).mixed(problem.weights)
    assert_close(penalty, 2 * problem.flat @ problem.flat, name)
    assert float(unused) == 0


@every_curvature
def test_nothing_to_multiply_gives_nothing(name: str) -> None:
    problem = mlp()
    products = problem.products(name)
    nothing = [torch.zeros_like(w) for w in problem.weights]
    for found in [*products.hessian(nothing), *products.mixed(nothing)]:
        assert torch.equal(found, torch.zeros_like(found))
    assert CURVATURES[name](problem.training(), problem.weights).mixed(nothing) == []


@every_curvature
def test_products_leave_weights_and_model_alone(name: str) -> None:
    problem = mlp()
    before = [w.detach().clone() for w in [*problem.weights, *problem.model.parameters()]]
    products = problem.products(name)
    v = random_like(problem.weights)
    first, again = products.hessian(v), products.hessian(v)
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    LENT.close()
    after = [*problem.weights, *problem.model.parameters()]
    assert all(torch.equal(a, b) and a.grad is None for a, b in zip(after, before, strict=True))


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def linear(criterion: Callable[[Tensor, Tensor], Tensor] = squared_error) -> Problem:
    return Problem(nn.Linear(3, 2), (torch.randn(5, 3), torch.randn(5, 2)), criterion)


@every_curvature
def test_all_agree_on_linear_least_squares(name: str) -> None:
    """Where the model is linear, leaving out its curvature leaves out nothing."""
    problem = linear()
    v = random_like(problem.weights)
    assert_close(flattened(problem.products(name).hessian(v)), problem.dense_hessian() @ flattened(v), name)


@every_curvature
def test_torchs_own_squared_error(name: str) -> None:
    problem = linear(F.mse_loss)
    v = random_like(problem.weights)
    if name == "forward":  # torch's defect, see the comment beside "ZeroTensors"
        with pytest.raises(NoSecondDerivative):
            problem.products(name).hessian(v)
        return
    assert_close(flattened(problem.products(name).hessian(v)), problem.dense_hessian() @ flattened(v), name)


def test_gauss_newton_has_no_negative_curvature() -> None:
    problem = mlp()
    eigenvalues, directions = torch.linalg.eigh(problem.dense_hessian())
    assert float(eigenvalues[0]) < -1e-2  # the Hessian itself has: otherwise the rest proves nothing
    product = problem.products("gauss-newton").hessian
    for v in directions.T:
        curved = product(list(problem.lent(v).values()))
        assert float(v @ flattened(curved)) >= -1e-12


class CubeOnce(torch.autograd.Function):
    """A kernel like a fused one: its backward cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        result: Tensor = 3 * x**2 * slope
        return result


def once_only() -> Problem:
    """The cube sits in the criterion, where the reference can do without it."""
    return linear(lambda outputs, targets: squared_error(cube_once(outputs), targets))


def cube_once(x: Tensor) -> Tensor:
    result: Tensor = CubeOnce.apply(x)  # type: ignore[no-untyped-call]
    return result


@pytest.mark.parametrize("name", ["exact", "gauss-newton"])
def test_a_kernel_that_can_be_differentiated_only_once_is_refused(name: str) -> None:
    """Autograd alone would skip the node that complains, and give zeros."""
    problem = once_only()
    with pytest.raises(NoSecondDerivative, match="differentiable"):
        problem.products(name).hessian(random_like(problem.weights))


@every_second_order
def test_a_fused_kernel_without_second_derivative_is_named(name: str) -> None:
    """Attention as training runs it, ``twice=False``."""
    problem = sequences(Attention())
    loss = Evaluation(problem.model, problem.loss, None).training(problem.batch, problem.names, twice=False)
    with loss, pytest.raises(NoSecondDerivative, match="scaled_dot_product"):
        CURVATURES[name](loss, problem.weights).hessian(random_like(problem.weights))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("exact", "attention"), ("exact", "lstm"), ("forward", "attention"), ("gauss-newton", "lstm")],
)
def test_fused_kernels_are_replaced_in_single_precision_too(name: str, kind: str) -> None:
    """Some exist only there: nothing that float64 tests would meet."""
    torch.set_default_dtype(torch.float32)
    narrow = PROBLEMS[kind]()
    inputs, targets = narrow.batch
    wide = Problem(copy.deepcopy(narrow.model).double(), (inputs.double(), targets), narrow.criterion)
    v = random_like(narrow.weights)
    found = flattened(narrow.products(name).hessian(v))
    expected = flattened(wide.products(name).hessian([d.double() for d in v]))
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-5)


def test_finite_difference_needs_first_derivatives_only() -> None:
    problem = once_only()
    v = random_like(problem.weights)
    found = problem.products("finite-difference").hessian(v)
    problem.criterion = lambda outputs, targets: squared_error(outputs**3, targets)
    assert_close(flattened(found), problem.dense_hessian() @ flattened(v), "finite-difference")


def test_other_errors_are_not_mistaken_for_missing_kernels() -> None:
    problem = mlp()
    with pytest.raises(RuntimeError) as raised:
        problem.products("exact").hessian([torch.randn(1) for _ in problem.weights])
    assert not isinstance(raised.value, NoSecondDerivative)


def test_finite_differences_are_taken_in_full_precision() -> None:
    """A GPU in TF32 would round the small step away; what the user has set comes back, in an error too."""
    seen: list[bool] = []

    def loss(weights: Sequence[Tensor]) -> Tensor:
        seen.append(torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return weights[0].square().sum()

    def flags() -> tuple[bool, bool]:
        return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        asked = flags()
        products = CURVATURES["finite-difference"](loss, [torch.ones(3, requires_grad=True)])
        products.hessian([torch.ones(3)])
        assert (seen, flags()) == ([False, False], asked)
        with pytest.raises(KeyboardInterrupt):
            products.hessian([torch.ones(3)])
        assert flags() == asked and asked[0]
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("kind", ["gradient", "random", "weights"])
def test_a_large_embedding_does_not_stretch_the_step(kind: str) -> None:
    """In float32 as in use: a step of a share of all weights' norm would be off by 5 % along the gradient."""
    torch.manual_seed(0)
    embedding, lstm, output = nn.Embedding(500, 64), nn.LSTM(64, 64), nn.Linear(64, 500)
    weights = [p.detach().requires_grad_() for m in (embedding, lstm, output) for p in m.parameters()]
    words = torch.randint(500, (21, 8))

    def loss(given: Sequence[Tensor]) -> Tensor:
        x = given[0][words[:-1]]
        h = functional_call(lstm, dict(zip(dict(lstm.named_parameters()), given[1:5], strict=True)), (x,))[0]
        return F.cross_entropy((h @ given[5].T + given[6]).flatten(0, 1), words[1:].flatten())

    exact = CURVATURES["exact"](loss, weights)
    directions = {"gradient": exact.gradient, "random": [torch.randn_like(w) for w in weights], "weights": weights}
    v = [d.detach() for d in directions[kind]]
    expected, found = exact.hessian(v), CURVATURES["finite-difference"](loss, weights).hessian(v)
    error = norm([f - e for f, e in zip(found, expected, strict=True)]) / norm(expected)
    assert error < 5e-3
