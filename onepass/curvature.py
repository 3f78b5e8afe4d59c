"""Ways to multiply by the Hessian of the training loss, in one table.

Each entry of ``CURVATURES`` takes the training loss as a function of the weights, the weights, and the hyperparameters
inside the loss (often none), and returns ``Products``. Costs are in gradients of the loss.

| name | how | one product |
| --- | --- | --- |
| exact | double backward over a kept graph | about 2 |
| forward | forward-mode over reverse | about 2 |
| gauss-newton | Jacobian products around the loss's own Hessian; never negative curvature | about 1.3 |
| finite-difference | difference of two gradients; any kernel, first derivatives only | 1; 2 in low precision |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from onepass.precision import Coarsest, full_precision

Tensors = Sequence[Tensor]


class Loss(Protocol):
    """The training loss of one batch as a function of the weights."""

    def __call__(self, weights: Tensors, /) -> Tensor: ...


class LossApart(Loss, Protocol):
    """A loss that can also be cut between the model and what is made of its outputs."""

    def apart(self, weights: Tensors, /) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """The model's outputs, leaves that stand in for them, and the loss as a function of those leaves."""


class Products(NamedTuple):
    """What a curvature knows of the loss at some weights.

    ``gradient`` by the weights; ``hessian(v)``: H v; ``mixed(v)``: v times the derivative of the gradient by each
    hyperparameter inside the loss.
    """

    gradient: list[Tensor]
    hessian: Callable[[Tensors], list[Tensor]]
    mixed: Callable[[Tensors], list[Tensor]]


class NoSecondDerivative(RuntimeError):
    """A kernel in the model can be differentiated only once."""


def exact(loss: Loss, weights: Tensors, extra: Tensors = ()) -> Products:
    """Double backward. Agrees with the analytic Hessian to rounding."""
    gradient = _grad(loss(weights), weights, create_graph=True)
    _refuse_first_order_kernels(gradient)

    def product(v: Tensors, wanted: Tensors) -> list[Tensor]:
        with _naming_first_order_kernels():
            return _grad(gradient, wanted, v, retain_graph=True)

    return Products([g.detach() for g in gradient], lambda v: product(v, weights), lambda v: product(v, extra))


def forward(loss: Loss, weights: Tensors, extra: Tensors = ()) -> Products:
    """Forward-mode over reverse: the gradient of a loss whose weights carry the direction as a tangent."""

    def along(v: Tensors) -> list[Tensor]:
        with torch.enable_grad(), _naming_first_order_kernels(), forward_ad.dual_level():
            duals = [forward_ad.make_dual(w, d.contiguous()) for w, d in zip(weights, v, strict=True)]
            wanted = [*duals, *extra]
            found = torch.autograd.grad(loss(duals), wanted, allow_unused=True)
            tangents = [None if f is None else forward_ad.unpack_dual(f).tangent for f in found]
        return _filled(tangents, [*weights, *extra])

    n = len(weights)
    return Products(_grad(loss(weights), weights), lambda v: along(v)[:n], lambda v: along(v)[n:])


def gauss_newton(loss: LossApart, weights: Tensors, extra: Tensors = ()) -> Products:
    """``J' (d²L/dz²) J v`` with ``J`` the Jacobian of the model's outputs ``z``.

    Positive semi-definite where the loss is convex in the outputs. ``J v`` is a derivative of ``J' r`` by the dummy
    ``r``, which needs no forward-mode kernels.
    """
    outputs, cuts, value = loss.apart(weights)
    slopes = _grad(value, cuts, create_graph=True)
    dummies = [torch.zeros_like(z, requires_grad=True) for z in outputs]
    pulled = _grad(outputs, weights, dummies, create_graph=True)
    # What the loss makes of the weights without the model, such as a penalty on their size, is kept exact.
    direct = _grad(value, weights, create_graph=True)
    _refuse_first_order_kernels([*slopes, *pulled, *direct])

    def inner(v: Tensors) -> tuple[list[Tensor], list[Tensor]]:
        with _naming_first_order_kernels():
            moved = _grad(pulled, dummies, v, retain_graph=True)
            curved = _grad(slopes, [*cuts, *extra], moved, retain_graph=True)
        return curved[: len(cuts)], curved[len(cuts) :]

    def hessian(v: Tensors) -> list[Tensor]:
        through_outputs = _grad(outputs, weights, inner(v)[0], retain_graph=True)
        return _sum(through_outputs, _grad(direct, weights, v, retain_graph=True))

    def mixed(v: Tensors) -> list[Tensor]:
        curved, in_loss = inner(v)
        through_outputs = _grad(outputs, extra, curved, retain_graph=True)
        return _sum(in_loss, through_outputs, _grad(direct, extra, v, retain_graph=True))

    through_outputs = _grad(outputs, weights, [s.detach() for s in slopes], retain_graph=True)
    return Products(_sum(through_outputs, [d.detach() for d in direct]), hessian, mixed)


def finite_difference(
    loss: Loss,
    weights: Tensors,
    extra: Tensors = (),
    *,
    size: Callable[[Tensors, Tensors], Any] | None = None,
    gradient: Callable[[Tensors], list[Tensor]] | None = None,
) -> Products:
    """Difference of the gradients at ``w + εv`` and ``w``, with ``ε = 3 √(machine epsilon) / size(v, w)``.

    Exact to about 3 digits in float32 where the loss is smooth; ReLU with batch norm is not (kinks dominate). Not in
    TF32, whatever is set for training.

    Where the loss rounds to bfloat16 or float16 on its way, such a step is lost in the rounding. There it is a wide one
    in both directions, ``w + εv`` and ``w - εv`` with ``ε = ∛(machine epsilon) / 2 size(v, w)``: exact to about 2
    digits, for one gradient more.

    ``size``: of such tensors beside the weights; by default ``relative_size``. ``gradient``: of the loss at other
    weights, by them and by ``extra``; by default, as autograd finds it.
    """
    size, gradient = size or relative_size, gradient or (lambda at: _grad(loss(at), [*at, *extra]))
    with full_precision(), Coarsest([*weights, *extra]) as seen:
        here = gradient(weights)
    wide = seen.epsilon > torch.finfo(torch.float32).eps
    step = seen.epsilon ** (1 / 3) / 2 if wide else 3 * seen.epsilon**0.5

    @torch.enable_grad()
    @full_precision()
    def along(v: Tensors) -> list[Tensor]:
        far = size(v, weights)
        epsilon = step / (far + (far == 0))  # along nothing: a step of nothing, and a product of nothing

        def gradient_at(distance: Any) -> list[Tensor]:
            return gradient([(w.detach() + distance * d).requires_grad_() for w, d in zip(weights, v, strict=True)])

        there = gradient_at(epsilon)
        other, apart = (gradient_at(-epsilon), 2 * step) if wide else (here, step)
        for i, a in enumerate(other):  # in their list, so that the gradient makes room for the product
            there[i] = (there[i] - a) * (far / apart)
            if wide:  # so far off, dead units wake up; what they say, Adam would divide by nothing but its eps
                there[i] = there[i].where(here[i] != 0, 0)
        return there

    n = len(weights)
    return Products(here[:n], lambda v: along(v)[:n], lambda v: along(v)[n:])


def relative_size(direction: Tensors, weights: Tensors) -> float:
    """``sqrt(sum over tensors of (rms(v) / (rms(w) + 0.01))²)``: how far a direction goes, by what each tensor is like.

    The norm of all weights together would be that of an embedding, next to which a step that moves the recurrent
    weights of an LSTM beyond recognition looks small.
    """
    ratios = [_ratio(_norm(v), _norm(w), w.numel()) for v, w in zip(direction, weights, strict=True)]
    return float(torch.linalg.vector_norm(torch.stack([r.to(ratios[0]) for r in ratios])))


def relative_row_size(lengths: Sequence[int]) -> Callable[[Tensors, Tensors], Tensor]:
    """The same for each row of a matrix, as a column: a ``size`` where rows are trained apart.

    ``lengths``: of the tensors that each row is made of.
    """

    def size(direction: Tensors, weights: Tensors) -> Tensor:
        parts = zip(direction[0].detach().split(lengths, 1), weights[0].detach().split(lengths, 1), strict=True)
        norms = ((torch.linalg.vector_norm(v, dim=1), torch.linalg.vector_norm(w, dim=1)) for v, w in parts)
        ratios = [_ratio(v, w, n) for (v, w), n in zip(norms, lengths, strict=True)]
        found: Tensor = torch.linalg.vector_norm(torch.stack(ratios, 1), dim=1, keepdim=True)
        return found

    return size


def _ratio(direction: Tensor, weights: Tensor, count: int) -> Tensor:
    """Of root mean squares, from norms. Tensors that are zero still, such as biases, count as 0.01."""
    return direction / (weights + 0.01 * math.sqrt(count))


def linearly(change: Callable[[Tensors], list[Tensor]], products: Products) -> Products:
    """The products of a loss that is made of this one by something linear, such as its mean over processes."""
    return Products(
        change(products.gradient), lambda v: change(products.hessian(v)), lambda v: change(products.mixed(v))
    )


CURVATURES: dict[str, Callable[..., Products]] = {
    "exact": exact,
    "forward": forward,
    "gauss-newton": gauss_newton,
    "finite-difference": finite_difference,
}

# These need only what training itself needs of a kernel; the others must avoid kernels without second derivative.
FIRST_ORDER = frozenset({"finite-difference"})


def _grad(
    outputs: Tensor | Tensors,
    inputs: Tensors,
    cotangents: Tensors | None = None,
    *,
    create_graph: bool = False,
    retain_graph: bool | None = None,
) -> list[Tensor]:
    """``torch.autograd.grad`` with zeros where nothing flows."""
    sequence = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    given = [None] * len(sequence) if cotangents is None else list(cotangents)
    pairs = [(o, c) for o, c in zip(sequence, given, strict=True) if o.requires_grad]
    if not pairs or not inputs:
        return [torch.zeros_like(x) for x in inputs]
    live, directions = zip(*pairs, strict=True)
    found = torch.autograd.grad(
        live,
        list(inputs),
        None if cotangents is None else directions,
        create_graph=create_graph,
        retain_graph=retain_graph,
        allow_unused=True,
    )
    return _filled(found, inputs)


def _filled(found: Sequence[Tensor | None], like: Tensors) -> list[Tensor]:
    return [torch.zeros_like(x) if f is None else f for f, x in zip(found, like, strict=True)]


def _sum(*lists: Tensors) -> list[Tensor]:
    return [sum(terms[1:], terms[0]) for terms in zip(*lists, strict=True)]


def norm(tensors: Tensors) -> float:
    """The Euclidean norm of all of them together."""
    wide = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    norms = [_norm(t) for t in tensors]
    return float(torch.linalg.vector_norm(torch.stack([n.to(norms[0].device, wide) for n in norms])))


def _norm(tensor: Tensor) -> Tensor:
    wide = torch.promote_types(tensor.dtype, torch.float32)
    found: Tensor = torch.linalg.vector_norm(tensor.detach().to(wide))
    return found


@contextmanager
def _naming_first_order_kernels() -> Iterator[None]:
    """torch says in many ways that a kernel cannot be differentiated again; here they become one error."""
    try:
        yield
    except RuntimeError as error:
        # The last is torch's way to fail on the forward mode of some losses, mse_loss among them.
        signs = ("is not implemented", "support double backward", "differentiate twice", "ZeroTensors")
        if isinstance(error, NotImplementedError) or any(sign in str(error) for sign in signs):
            raise NoSecondDerivative(str(error).splitlines()[0]) from error
        raise


def _refuse_first_order_kernels(outputs: Tensors) -> None:
    """Asked for zeros where nothing flows, autograd silently skips a kernel that refuses to go twice: look first."""
    nodes = dict.fromkeys(output.grad_fn for output in outputs if output.grad_fn is not None)
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node.name() == "torch::autograd::Error":
            raise NoSecondDerivative("a custom function marked as once_differentiable")
        for before, _ in node.next_functions:
            if before is not None and before not in nodes:
                nodes[before] = None
                todo.append(before)
