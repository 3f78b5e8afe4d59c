"""From the last real step of a model to its hypergradients: puts pieces, curvature and the series together."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from onepass.curvature import CURVATURES, FIRST_ORDER, NoSecondDerivative, Products, norm
from onepass.entries import Entry
from onepass.evaluation import Evaluation
from onepass.hypergradient import look_back
from onepass.hyperparameters import Hyperparameter
from onepass.linearise import Piece
from onepass.rules import Rule
from onepass.snapshot import Snapshot


class Estimator:
    """Hypergradients by the look-back series, with the curvature that was asked for."""

    def __init__(
        self, evaluation: Evaluation, rule: Rule, *, lookback: int, through_state: bool, curvature: str
    ) -> None:
        if isinstance(lookback, bool) or not isinstance(lookback, int) or lookback < 1:
            raise ValueError(f"lookback must be an integer of at least 1, but got {lookback}")
        if curvature != "auto" and curvature not in CURVATURES:
            raise ValueError(f"curvature must be 'auto' or one of {sorted(CURVATURES)}, but got {curvature!r}")
        self._evaluation, self._rule = evaluation, rule
        self._lookback, self._through_state = lookback, through_state
        self.curvature, self._may_fall_back = ("exact", True) if curvature == "auto" else (curvature, False)

    def hypergradients(
        self,
        batch: Any,
        snapshot: Snapshot,
        valid_gradient: Sequence[Tensor],
        entries: Sequence[Entry],
        extra: Mapping[str, Hyperparameter],
    ) -> dict[Hyperparameter, Tensor]:
        """Derivatives in natural units, of the validation loss *through the weights*; the direct part is the caller's.

        ``valid_gradient``: at the weights after the step, laid out like the snapshot's pieces.
        """
        try:
            values, mixed = self._series(batch, snapshot, valid_gradient, entries, extra)
        except NoSecondDerivative as error:
            self._fall_back(error)
            values, mixed = self._series(batch, snapshot, valid_gradient, entries, extra)
        total = dict(zip(extra.values(), mixed, strict=True))
        for joined, derivatives in zip(snapshot.pieces, values, strict=True):
            for entry in _of_group(entries, joined.group):
                h, derivative = entry.hyperparameter, entry.factor * derivatives[entry.name]
                total[h] = total[h] + derivative if h in total else derivative
        return total

    def _series(
        self,
        batch: Any,
        snapshot: Snapshot,
        valid_gradient: Sequence[Tensor],
        entries: Sequence[Entry],
        extra: Mapping[str, Hyperparameter],
    ) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
        pieces = [self._piece(snapshot, i, entries) for i in range(len(snapshot.pieces))]
        parameters, inside = snapshot.parameters, [h.value for h in extra.values()]
        if self._lookback == 1 and not inside:
            return look_back(pieces, valid_gradient, lookback=1)[0], []
        products = self._products(batch, snapshot, inside)
        # The step saw a clipped or rescaled gradient: its derivative is the Hessian rescaled alike.
        full = norm(products.gradient)
        scale = norm(snapshot.gradients) / full if full > 0 else 1.0

        def hessian(cotangents: Sequence[Tensor]) -> list[Tensor]:
            found = products.hessian(_in_dtype_of(parameters, snapshot.split(cotangents)))
            return [product.mul_(scale) for product in snapshot.join(found)]

        values, cotangents = look_back(
            pieces,
            valid_gradient,
            hessian,
            lookback=self._lookback,
            through_state=self._through_state,
            cotangents=bool(inside),
        )
        mixed = products.mixed(_in_dtype_of(parameters, snapshot.split(cotangents))) if inside else []
        return values, [scale * m for m in mixed]

    def _piece(self, snapshot: Snapshot, index: int, entries: Sequence[Entry]) -> Piece:
        joined = snapshot.pieces[index]
        tuned = {entry.name: entry.effective() for entry in _of_group(entries, joined.group)}
        values = {**snapshot.values[joined.group], **tuned}
        state = {**joined.scalars, **joined.state}
        if "mu_product" in joined.scalars:  # NAdam's one number that hyperparameters move: it is differentiated too
            state["mu_product"] = torch.tensor(joined.scalars["mu_product"], dtype=torch.float64)
        return Piece(self._rule.update, values, joined.weights, snapshot.gradients[index], state, tuple(tuned))

    def _products(self, batch: Any, snapshot: Snapshot, inside: Sequence[Tensor]) -> Products:
        """Curvature of the training loss at the old weights, on the batch of the step."""
        parameters = snapshot.parameters
        old = _in_dtype_of(parameters, snapshot.split([piece.weights for piece in snapshot.pieces]))
        names = self._evaluation.names_of(parameters)
        loss = self._evaluation.training(batch, names, twice=self.curvature not in FIRST_ORDER)
        return CURVATURES[self.curvature](loss, [w.detach().requires_grad_() for w in old], inside)

    def _fall_back(self, error: NoSecondDerivative) -> None:
        if not self._may_fall_back:
            raise RuntimeError(
                f"curvature={self.curvature!r} needs second derivatives, but a kernel has none ({error}); "
                "use curvature='finite-difference', or lookback=1"
            ) from error
        warnings.warn(
            f"a kernel has no second derivative ({error}): onepass takes finite differences instead. These mislead on "
            "networks with ReLU and batch norm; there, use lookback=1.",
            stacklevel=6,
        )
        self.curvature, self._may_fall_back = "finite-difference", False


def _of_group(entries: Sequence[Entry], group: int) -> list[Entry]:
    return [entry for entry in entries if entry.index == group]


def _in_dtype_of(parameters: Sequence[nn.Parameter], tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.to(p.dtype) for p, tensor in zip(parameters, tensors, strict=True)]
