"""Two drawings of ideas, by the library's own functions: nothing is trained."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from onepass.experiments.statistics import Array
from onepass.hypergradient import look_back
from onepass.linearise import Piece
from onepass.rules import RULES

# --- two losses of one weight and one hyperparameter ---

STEP, HYPER_STEP, WEIGHT_STEPS, LOOKBACK, HYPER_STEPS = 0.1, 0.1, 2, 5, 10
BEGIN = (-3.5, -3.0)


def training_loss(w: Array, value: Array) -> Array:
    """It is 0 at ``w = -sin λ``, the best response, where ``λ = -2``."""
    return (w + np.sin(value)) ** 2 + 0.2 * (value + 2) ** 2


def validation_loss(w: Array, value: Array) -> Array:
    return (w - 1) ** 2 + (value - 1) ** 2


class Toy(NamedTuple):
    """``(points, 2)`` each: a weight and a hyperparameter, after every weight step and every hyper step.

    Attributes:
        exact: by the implicit function theorem.
        approximate: by the look-back series.
    """

    exact: Array
    approximate: Array


def toy() -> Toy:
    return Toy(_path(implicit), _path(series))


def _path(hypergradient: Callable[[float, float, float], float]) -> Array:
    w, value = BEGIN
    path = [BEGIN]
    for _ in range(HYPER_STEPS):
        for _ in range(WEIGHT_STEPS):
            before, w = w, w - STEP * 2 * (w + math.sin(value))
            path.append((w, value))
        value -= HYPER_STEP * hypergradient(before, w, value)
        path.append((w, value))
    return np.array(path)


def implicit(before: float, w: float, value: float) -> float:
    """Of the validation loss, were the weight the best response ``-sin λ`` wherever it is."""
    return 2 * (value - 1) + 2 * (w - 1) * -math.cos(value)


def series(before: float, w: float, value: float) -> float:
    """Equation (6), of the step from ``before`` to ``w``. The hyperparameter stands inside the training loss.

    *Departs from the paper*, whose drawing has the derivative by ``λ`` where that by ``w`` belongs, and no ``cos λ``.
    """
    weight = torch.tensor([before], dtype=torch.float64)
    values = {"lr": STEP, "momentum": 0.0, "weight_decay": 0.0}
    step = Piece(RULES["sgd"].update, values, weight, 2 * (weight + math.sin(value)), {}, ())
    ahead = torch.tensor([2 * (w - 1)], dtype=torch.float64)
    _, (cotangent,) = look_back([step], [ahead], lambda v: [2 * v[0]], lookback=LOOKBACK, cotangents=True)
    return 2 * (value - 1) + float(cotangent) * 2 * math.cos(value)


# --- the learning rate scales the steps, or the landscape ---

RATES = (0.1, 0.2, 0.4)
FROM, BOTTOM = -2.0, 2.0


class PseudoLoss(NamedTuple):
    """A parabola: ``heights[k]`` is ``scales[k]`` times its height at ``at``; steps go from ``FROM`` to ``ends[k]``."""

    at: Array
    scales: Array
    heights: Array
    ends: Array


def parabola(w: Array) -> Array:
    return (w - BOTTOM) ** 2


def pseudo_losses(*, scaled: bool) -> PseudoLoss:
    """``scaled``: the landscape by the learning rate; each step is its gradient as it is. The ends are the same."""
    at, rates = np.linspace(-3, 6, 300), np.array(RATES)
    scales = rates if scaled else np.ones(1)
    steps = np.ones(3) if scaled else rates
    slopes = (scales if scaled else np.ones(3)) * 2 * (FROM - BOTTOM)
    return PseudoLoss(at, scales, scales[:, None] * parabola(at), FROM - steps * slopes)
