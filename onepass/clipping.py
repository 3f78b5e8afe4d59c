r"""Gradients clipped to a Euclidean norm, one row a replica, and the derivative of that.

.. math::
    c(g) = s g, \quad s = \min\left(1, \frac{N}{\lVert g \rVert + \epsilon}\right), \qquad
    \frac{\partial c}{\partial g} = s \left(I - \frac{g g^\top}{\lVert g \rVert (\lVert g \rVert + \epsilon)}\right)
    \text{ where } s < 1.

The small :math:`\epsilon` is that of ``torch.nn.utils.clip_grad_norm_``.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-6


def clipped(rows: Tensor, norm: float) -> Tensor:
    """Every row on its own, shortened to ``norm`` if it is longer."""
    return rows * _scale(_lengths(rows), norm)


def through_clipping(cotangents: Tensor, rows: Tensor, norm: float) -> Tensor:
    """A cotangent of each clipped row, times the derivative of the clipping there. Needs no graph."""
    lengths = _lengths(rows)
    scale = _scale(lengths, norm)
    along = (cotangents * rows).sum(1, keepdim=True) / (lengths * (lengths + EPSILON))
    # Where nothing is clipped the row may be all zeros, and what is along it not a number.
    return torch.where(scale < 1, scale * (cotangents - along * rows), cotangents)


def _lengths(rows: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return lengths


def _scale(lengths: Tensor, norm: float) -> Tensor:
    return (norm / (lengths + EPSILON)).clamp(max=1.0)
