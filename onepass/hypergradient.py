r"""The derivative of the validation loss by the hyperparameters: the look-back series, and exact unrolling.

Both walk backwards over weight steps :math:`w' = w - u(\lambda, w, g, s)` with an adjoint
:math:`a = \partial L_V / \partial (w, s)`. One step back is

.. math::
    (b_w, b_g, b_s, b_\lambda) = (-a_w, a_s) \, \partial(u, s') / \partial(w, g, s, \lambda), \qquad
    a_w \leftarrow a_w + b_w + H b_g, \quad a_s \leftarrow b_s,

where :math:`H` is the Hessian of the training loss: rules are elementwise, so it is the only thing that mixes weights.
``unrolled`` walks over the last real steps. ``look_back`` walks over the *last* one again and again, which is equation
(6) of Clarke et al. (2022) and needs no memory of earlier weights.

Lists run over pieces: tensors of weights, each with hyperparameters of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from onepass.linearise import Linearised, Piece, States, Values

Product = Callable[[Sequence[Tensor]], Iterable[Tensor]]


def look_back(
    step: Sequence[Piece],
    valid_gradient: Iterable[Tensor],
    hessian: Product | None = None,
    *,
    lookback: int = 5,
    through_state: bool = True,
    cotangents: bool = False,
) -> tuple[Values, list[Tensor]]:
    r"""Equation (6): :math:`-\nabla L_V(w_1) \sum_{j<i} (I - \partial u/\partial w)^j \partial u/\partial \lambda`.

    Args:
        step: the last step really taken, at the weights *before* it.
        valid_gradient: the gradient of the validation loss at the weights *after* it. Taking both at the same weights
            lets an overshooting learning rate grow without bound. A list is left as it is; an iterator that gives
            its tensors away lets them make room once they are used.
        hessian: multiplies by the Hessian of the training loss at the old weights; not needed for ``lookback=1``.
        lookback: the number of terms ``i``, which costs ``i - 1`` Hessian products.
        through_state: carry the adjoint through the optimizer's state too. *Departs from the paper*: there ``False``.
        cotangents: also find what the derivative of the training gradient by a hyperparameter inside the training loss
            has still to be multiplied by.

    Returns:
        The derivative by each tuned value, and those cotangents (or none).

    >>> import torch
    >>> from onepass.rules import RULES
    >>> values = {"lr": torch.tensor(0.1), "momentum": 0, "weight_decay": 0}
    >>> step = Piece(RULES["sgd"].update, values, torch.tensor([1.0]), torch.tensor([2.0]), {}, ("lr",))
    >>> look_back([step], [torch.tensor([3.0])], lookback=1)[0]  # minus the dot product of the two gradients
    [{'lr': tensor(-6.)}]
    """
    if lookback < 1:
        raise ValueError(f"lookback must be at least 1, but got {lookback}")
    if lookback > 1 and hessian is None:
        raise ValueError(f"hessian must be given for lookback={lookback}, but got None; lookback=1 needs none")
    linear = Linearised(step, states=through_state and lookback > 1)
    a_w, a_s = list(valid_gradient), _no_state(step)
    total: Values = _no_state(step)
    gradients: list[Tensor] = []
    for _ in range(lookback - 1):
        assert hessian is not None
        b_v, b_g = _one_step_back(linear, a_w, a_s, hessian, cotangents)
        total = _added(total, b_v)
        _add_up(gradients, b_g)
    total = _added(total, linear.to_values(a_w, a_s))
    if cotangents:
        _add_up(gradients, linear.to_gradient(a_w, a_s))
    return total, gradients


def unrolled(
    steps: Sequence[Sequence[Piece]],
    valid_gradient: Sequence[Tensor],
    hessians: Sequence[Product | None],
    *,
    cotangents: bool = False,
) -> tuple[Values, list[list[Tensor]]]:
    """The exact derivative through the last real steps (differentiation through optimisation).

    Args:
        steps: each real step at the weights before it, oldest first.
        valid_gradient: the gradient of the validation loss after the last step.
        hessians: multiplies by the training Hessian of each step; the oldest is never used and may be ``None``.

    Returns:
        The derivative by each tuned value, held constant over all steps, and the ``cotangents`` of each step.
    """
    if not steps:
        raise ValueError("steps must hold at least one step, but got none")
    a_w, a_s = list(valid_gradient), _no_state(steps[-1])
    total: Values = _no_state(steps[-1])
    gradients: list[list[Tensor]] = []
    for t in reversed(range(len(steps))):
        linear, product = Linearised(steps[t]), hessians[t]
        if t == 0:
            b_v, b_g = linear.to_values(a_w, a_s), linear.to_gradient(a_w, a_s) if cotangents else []
        elif product is None:
            raise ValueError(f"hessians[{t}] must be given, but got None; only the oldest step can do without")
        else:
            b_v, b_g = _one_step_back(linear, a_w, a_s, product, cotangents)
        total = _added(total, b_v)
        gradients = [b_g, *gradients] if cotangents else []
    return total, gradients


def _one_step_back(
    linear: Linearised, a_w: list[Tensor], a_s: States, hessian: Product, cotangents: bool
) -> tuple[Values, list[Tensor]]:
    """Move the adjoints one step back, in their lists, and return ``b_λ`` and, if asked for, ``b_g``."""
    b_v, b_g = linear.step_back(a_w, a_s)
    for a, product in zip(a_w, hessian(b_g), strict=True):
        a += product
    return b_v, b_g if cotangents else []


def _no_state(step: Sequence[Piece]) -> States:
    return [{} for _ in step]


def _add_up(total: list[Tensor], more: list[Tensor]) -> None:
    """Add to ``total``, which is empty at first, and empty ``more``: each is as large as the model."""
    if total:
        for i, tensor in enumerate(more):
            total[i] = total[i] + tensor
    else:
        total += more
    more.clear()


def _added(total: Values, more: Values) -> Values:
    """The sum, name by name; a name missing in ``total`` counts as zero there."""
    return [
        {**t, **{name: t[name] + m[name] if name in t else m[name] for name in m}}
        for t, m in zip(total, more, strict=True)
    ]
