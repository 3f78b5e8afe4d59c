r"""How the weights of now would differ had a hyperparameter been different all along: carried forward with the run.

The look-back series asks what a value does to the next few steps, and is short-sighted: a lower learning rate always
helps for a moment, most of all with noisy mini-batches. Here a change of the raw value :math:`\lambda` grows linearly
from the beginning of the run, and what it has done to weights and optimizer state :math:`s = (w, \ldots)` is kept:

.. math::
    \dot s_k = \frac{k-1}{k} \frac{\partial s_k}{\partial s_{k-1}} \dot s_{k-1} + \frac{\partial s_k}{\partial \lambda},
    \qquad \frac{\mathrm{d} L_V}{\mathrm{d} \lambda} \approx \nabla L_V(w_k) \cdot \dot w_k .

One step of every interval stands for all of it. Values take turns, so that a hyper step costs one product with the
Hessian of the training loss, however many there are; each keeps a copy of the weights and of the optimizer's state,
whatever the length of the run. With nothing kept it would be the look-back series with one term.

*Departs from the paper*, which looks back from the end. Sensitivities carried forward are those of Franceschi et al.
(*Forward and Reverse Gradient-Based Hyperparameter Optimization*, ICML 2017).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from onepass.linearise import Piece

Sensitivity = dict[str, Tensor]  # "weights", and the tensors of the optimizer's state
Product = Callable[[Sequence[Tensor]], Iterable[Tensor]]

# What acts through where it has taken the weights. Of all else (beta2, eps), the next steps tell enough.
FAR = ("lr", "momentum", "beta1", "weight_decay")


def carried_on(
    step: Sequence[Piece],
    before: Sequence[Sensitivity],
    seeds: Sequence[Mapping[str, Tensor]],
    gradient: Product,
    *,
    through_state: bool = True,
) -> list[Sensitivity]:
    """The sensitivities after one more step, one a piece.

    Args:
        step: the step at the weights before it.
        before: the sensitivities there, already multiplied by what is kept of them.
        seeds: for each piece, how fast its values change with the one that is asked about.
        gradient: from the sensitivities of the weights to those of the training gradients that the step saw.
        through_state: keep those of the optimizer's state too.

    >>> from onepass.rules import RULES
    >>> values = {"lr": torch.tensor(0.1), "momentum": 0, "weight_decay": 0}
    >>> step = Piece(RULES["sgd"].update, values, torch.tensor([1.0]), torch.tensor([2.0]), {}, ("lr",))
    >>> carried_on([step], [{"weights": torch.zeros(1)}], [{"lr": torch.tensor(1.0)}], lambda w: w)
    [{'weights': tensor([-2.])}]
    """
    gradients = gradient([one["weights"] for one in before])
    parts = zip(step, before, seeds, gradients, strict=True)
    return [carried_by(*part, through_state=through_state) for part in parts]


def carried_by(
    piece: Piece, before: Sensitivity, seeds: Mapping[str, Tensor], gradient: Tensor, *, through_state: bool = True
) -> Sensitivity:
    """The same for one piece, whose training gradient changes by ``gradient``.

    By forward-mode differentiation of the rule: every tensor carries along how fast it changes.
    """
    state = {key: value for key, value in piece.state.items() if isinstance(value, Tensor) and key != "step"}
    # Products of a number that has no change with a tensor that has one are ten times slower than with a change of 0.
    numbers = {n: torch.zeros_like(v) for n, v in piece.values.items() if isinstance(v, Tensor) and v.dim() == 0}
    with forward_ad.dual_level():
        values = {name: forward_ad.make_dual(piece.values[name], seed) for name, seed in {**numbers, **seeds}.items()}
        weights = forward_ad.make_dual(piece.weights, before["weights"])
        carried = {key: forward_ad.make_dual(value, before[key]) for key, value in state.items() if key in before}
        update, after = piece.update(
            {**piece.values, **values},
            weights,
            forward_ad.make_dual(piece.gradient, gradient),
            {**piece.state, **carried},
        )
        changes = {"weights": before["weights"] - _change(update)}
        if through_state:
            tensors = {key: value for key, value in after.items() if isinstance(value, Tensor) and key != "step"}
            changes |= {key: _change(value) for key, value in tensors.items()}
        return changes


def ramp(age: Any) -> Any:
    """What is kept of the sensitivities after ``age`` earlier steps, so that the weights of steps grow linearly."""
    return age / (age + 1)


def fading(rate: Tensor, before: Tensor) -> Tensor:
    """What is kept of the sensitivities where the learning rate has come down: as much less.

    A change at a higher rate has done more than one could do now. With nothing faded, a run whose rate has fallen would
    blame its past for whatever is wrong, lower the rate for it, and move less and less, with the same past to blame.

    >>> fading(torch.tensor([0.1, 0.3]), torch.tensor(0.2))
    tensor([0.5000, 1.0000])
    """
    return torch.where(rate < before, rate / before, torch.ones_like(rate))


def turn(hyper_steps: Any, place: int, values: int) -> tuple[Any, Any]:
    """Whether a hyper step is the turn of the value in this place, and how many turns it has had before.

    >>> [turn(step, 1, 3) for step in range(5)]
    [(False, 0), (True, 0), (False, 1), (False, 1), (True, 1)]
    """
    return hyper_steps % values == place, (hyper_steps + values - 1 - place) // values


def agreed(far: Tensor, near: Tensor) -> Tensor:
    """The far-sighted derivative where the short-sighted one has the same sign, and zero elsewhere.

    The short-sighted one errs towards small learning rates and large weight decay; the other towards what would have
    helped in the past. Neither may move a value alone.
    """
    return torch.where(far * near > 0, far, torch.zeros_like(far))


def _change(value: Tensor) -> Tensor:
    change = forward_ad.unpack_dual(value).tangent
    return torch.zeros_like(value) if change is None else change
