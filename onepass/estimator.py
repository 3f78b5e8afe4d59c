"""From the last real step of a model to its hypergradients: puts pieces, curvature and the series together."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from onepass.curvature import CURVATURES, FIRST_ORDER, NoSecondDerivative, norm
from onepass.entries import Used
from onepass.evaluation import Evaluation, trains_by_cudnn
from onepass.hypergradient import look_back
from onepass.hyperparameters import Hyperparameter
from onepass.linearise import Piece, dot
from onepass.rules import Rule
from onepass.scaling import LARGE_SCALE, suspiciously_short
from onepass.sharded import curvature_for_shards
from onepass.snapshot import Snapshot, drained
from onepass.whole_run import WholeRun

# The derivative by each piece's tuned values, and by the hyperparameters inside the loss.
Found = tuple[list[dict[str, Tensor]], list[Tensor]]


ESTIMATORS = {
    "series": "the look-back series",
    "whole-run": "the same through the whole run so far, where the look-back series has the same sign",
}


def how_far(estimator: str | None, lookback: int | None, *, far: bool) -> tuple[str, int]:
    """Estimator and look-back as asked for, or the defaults: to look through the whole run where that can be (``far``),
    unless a look-back is named; that asks for the paper's series.
    """
    if estimator is None:
        estimator = "whole-run" if far and lookback is None else "series"
    if lookback is None:
        lookback = 1 if estimator == "whole-run" else 5
    return estimator, lookback


class Estimator:
    """Hypergradients as they were asked for: how far they look, and with what curvature."""

    def __init__(
        self, evaluation: Evaluation, rule: Rule, *, lookback: int, through_state: bool, curvature: str, estimator: str
    ) -> None:
        if isinstance(lookback, bool) or not isinstance(lookback, int) or lookback < 1:
            raise ValueError(f"lookback must be an integer of at least 1, but got {lookback}")
        if curvature != "auto" and curvature not in CURVATURES:
            raise ValueError(f"curvature must be 'auto' or one of {sorted(CURVATURES)}, but got {curvature!r}")
        if estimator not in ESTIMATORS:
            raise ValueError(f"estimator must be one of {sorted(ESTIMATORS)}, but got {estimator!r}")
        self.settings = {
            "estimator": estimator,
            "lookback": lookback,
            "through_state": through_state,
            "curvature": curvature,
        }
        self._ranks = evaluation.ranks
        self.past = WholeRun(self._ranks.total, through_state=through_state) if estimator == "whole-run" else None
        self._evaluation, self._rule = evaluation, rule
        self._lookback, self._through_state = lookback, through_state
        self._rule_checked = False
        if self._ranks.shards:
            curvature = curvature_for_shards(curvature, needed=lookback > 1 or self.past is not None)
        self._asked = curvature
        self.curvature = "exact" if curvature == "auto" else curvature

    def hypergradients(
        self,
        batch: Any,
        snapshot: Snapshot,
        valid_gradient: list[Tensor],
        used: Sequence[Used],
        extra: Mapping[str, Hyperparameter],
        *,
        again: Callable[[], list[Tensor]],
    ) -> dict[Hyperparameter, Tensor]:
        """Derivatives in natural units, of the validation loss *through the weights*; the direct part is the caller's.

        ``valid_gradient``: at the weights after the step, laid out like the snapshot's pieces. It is as large as the
        model and leaves its list as it is used; ``again`` makes it anew should a kernel have no second derivative.
        """
        found: Found | None = None
        kept = list(valid_gradient) if self.past else []
        try:
            found = self._series(batch, snapshot, valid_gradient, used, extra)
        except NoSecondDerivative as error:
            self._fall_back_from(error)
        # Not inside the handler: the error holds on to all that has been computed.
        values, mixed = found or self._series(batch, snapshot, again(), used, extra)
        total: dict[Hyperparameter, Tensor] = {}
        for joined, derivatives in zip(snapshot.pieces, values, strict=True):
            for entry in _of_group(used, joined.group):
                h, derivative = entry.hyperparameter, entry.factor * derivatives[entry.name]
                total[h] = total[h] + derivative if h in total else derivative
        total = dict(zip(total, self._ranks.total(list(total.values())), strict=True))
        total |= zip(extra.values(), mixed, strict=True)
        return self.past.agreed(total, kept, [j.group for j in snapshot.pieces], used) if self.past else total

    def _series(
        self,
        batch: Any,
        snapshot: Snapshot,
        valid_gradient: list[Tensor],
        used: Sequence[Used],
        extra: Mapping[str, Hyperparameter],
    ) -> Found:
        pieces = [self._piece(snapshot, i, used) for i in range(len(snapshot.pieces))]
        if not self._rule_checked:
            self._rule_checked = True
            _check_rule(pieces, snapshot)
        inside = [h.value for h in extra.values()]
        self._refuse_early_clipping(batch, snapshot)
        if self._lookback == 1 and not inside and self.past is None:
            return look_back(pieces, drained(valid_gradient), lookback=1)[0], []
        if self.past is not None:
            self.past.begin_anew_unless([self._evaluation.names_of(j.parameters) for j in snapshot.pieces])
        along = self.past.weights(pieces, used) if self.past is not None else []
        values, mixed, changes = self._products(batch, snapshot, pieces, valid_gradient, inside, along)
        if self.past is not None:  # only now that the graph of the products has made room
            self.past.carry_on(pieces, [j.group for j in snapshot.pieces], used, changes)
        return values, mixed

    def _products(
        self,
        batch: Any,
        snapshot: Snapshot,
        pieces: Sequence[Piece],
        valid_gradient: list[Tensor],
        inside: Sequence[Tensor],
        along: Sequence[Tensor],
    ) -> tuple[list[dict[str, Tensor]], list[Tensor], Iterable[Tensor]]:
        """The series, by its pieces and by what is ``inside`` the loss; and how the gradient that the step saw changes
        along other directions of the weights, if there are any.
        """
        parameters, old = snapshot.parameters, _weights_before(snapshot)
        names, twice = self._evaluation.names_of(parameters), self.curvature not in FIRST_ORDER
        if self._asked == "auto" and twice and trains_by_cudnn(self._evaluation.model):
            raise NoSecondDerivative("cuDNN's recurrent networks")
        with self._evaluation.training(batch, names, twice=twice) as loss:
            products = loss.products(self.curvature, old, inside)
            through_clipping = self._clipping(snapshot, lambda: snapshot.join(products.gradient))

            def to_loss(cotangents: Sequence[Tensor]) -> list[Tensor]:
                return _in_dtype_of(parameters, snapshot.split(through_clipping(cotangents)))

            def joined(direction: list[Tensor]) -> Iterable[Tensor]:
                return snapshot.join(drained(products.hessian(direction)))

            values, cotangents = look_back(
                pieces,
                drained(valid_gradient),
                lambda b_g: joined(to_loss(b_g)),
                lookback=self._lookback,
                through_state=self._through_state,
                cotangents=bool(inside),
            )
            mixed = products.mixed(to_loss(cotangents)) if inside else []
            if not along:
                return values, mixed, []
            # The derivative of clipping is symmetric.
            return values, mixed, through_clipping(joined(_in_dtype_of(parameters, snapshot.split(along))))

    def _piece(self, snapshot: Snapshot, index: int, used: Sequence[Used]) -> Piece:
        joined = snapshot.pieces[index]
        tuned = {entry.name: entry.value for entry in _of_group(used, joined.group)}
        values = {**snapshot.values[joined.group], **tuned}
        state = {**joined.scalars, **joined.state}
        for number in self._rule.moving_numbers:
            if number in joined.scalars:
                state[number] = torch.tensor(joined.scalars[number], dtype=torch.float64)
        return Piece(self._rule.update, values, joined.weights, snapshot.gradients[index], state, tuple(tuned))

    def _refuse_early_clipping(self, batch: Any, snapshot: Snapshot) -> None:
        seen = self._norm(snapshot.gradients) if snapshot.loss_scale >= LARGE_SCALE else math.inf
        if not suspiciously_short(seen, snapshot.loss_scale):
            return
        names = self._evaluation.names_of(snapshot.parameters)
        with self._evaluation.training(batch, names, twice=False) as loss:
            whole = self._norm(loss.gradient(_weights_before(snapshot)))
        if seen < 0.05 * whole:
            raise ValueError(
                f"gradients must be unscaled before they are clipped, but the step saw a norm of {seen:.2g} where the "
                f"loss has {whole:.2g}; call scaler.unscale_(optimizer) before clip_grad_norm_"
            )

    def _clipping(
        self, snapshot: Snapshot, full: Callable[[], Iterable[Tensor]]
    ) -> Callable[[Iterable[Tensor]], Iterable[Tensor]]:
        """How a cotangent of the gradient that the step saw goes back to the loss's gradient, by comparing the two.

        Parallel and shorter: clipped to a norm, whose derivative is ``c (I - ĝ ĝ')``. Parallel and longer: rescaled.
        Not parallel (other dropout masks, other batches averaged in): taken as it is, unless it is so much shorter that
        a Hessian of the full loss would be far too large.
        """
        pairs = zip(snapshot.gradients, full(), strict=True)  # one at a time: they are as large as the model
        squares = self._summed(torch.stack([dot(g, g), dot(f, f), dot(g, f)]) for g, f in pairs)
        short, long = math.sqrt(squares[0]), math.sqrt(squares[1])
        if long == 0 or short == 0:
            return lambda cotangents: cotangents
        scale = short / long
        parallel = squares[2] / (long * short) > 0.999
        if abs(scale - 1) < 1e-3 if parallel else scale > 0.5:
            return lambda cotangents: cotangents
        if not parallel or scale > 1:
            return lambda cotangents: (scale * c for c in cotangents)

        def project(cotangents: Iterable[Tensor]) -> list[Tensor]:
            cotangents = list(cotangents)
            (along,) = self._summed(dot(c, f).reshape(1) for c, f in zip(cotangents, full(), strict=True))
            return [scale * (c - along / long**2 * f) for c, f in zip(drained(cotangents), full(), strict=True)]

        return project

    def _norm(self, tensors: Sequence[Tensor]) -> float:
        if not self._ranks.shards:
            return norm(tensors)
        return math.sqrt(self._summed(dot(t, t).reshape(1) for t in tensors)[0])

    def _summed(self, numbers: Iterable[Tensor]) -> list[float]:
        """Over the pieces, and over the parts of the weights that other processes have."""
        found: list[float] = self._ranks.total([torch.stack([n.cpu() for n in numbers]).sum(0)])[0].tolist()
        return found

    @property
    def fell_back(self) -> bool:
        return self._asked == "auto" and self.curvature != "exact"

    def fall_back(self) -> None:
        if self._asked == "auto":
            self.curvature = "finite-difference"

    def _fall_back_from(self, error: NoSecondDerivative) -> None:
        if self._asked != "auto":
            raise RuntimeError(
                f"curvature={self.curvature!r} needs second derivatives, but a kernel has none ({error}); "
                "use curvature='finite-difference', or lookback=1"
            ) from error
        warnings.warn(
            f"a kernel has no second derivative ({error}): onepass takes finite differences instead. These mislead on "
            "networks with ReLU and batch norm; there, use lookback=1.",
            stacklevel=6,
        )
        self.fall_back()


@torch.no_grad()
def _check_rule(pieces: Sequence[Piece], snapshot: Snapshot) -> None:
    """A rule that does not do what the optimizer did would give hypergradients that look fine and are wrong."""
    now = snapshot.join(p.detach() for p in snapshot.parameters)
    for piece, joined, after in zip(pieces, snapshot.pieces, now, strict=True):
        update = piece.update(piece.values, piece.weights, piece.gradient, piece.state)[0]
        if not piece.weights.numel():  # a rank may have no part of a small tensor
            continue
        error, size = (piece.weights - update - after).abs().max(), update.abs().max()
        rounding = 8 * torch.finfo(joined.parameters[0].dtype).eps * piece.weights.abs().max()
        if error > 1e-2 * size + rounding:
            warnings.warn(
                f"the rule does not reproduce the optimizer's step (off by {float(error / size):.2g} of it), so that "
                "hypergradients will be wrong. Either the rule registered for this optimizer is not its own, or "
                "something else moved the weights between optimizer.step() and tuner.step()",
                stacklevel=7,
            )
            return


def _of_group(used: Sequence[Used], group: int) -> list[Used]:
    return [entry for entry in used if entry.group == group]


def _weights_before(snapshot: Snapshot) -> list[Tensor]:
    """Those that the step was taken at, one a parameter, to be differentiated by."""
    weights = snapshot.split([piece.weights for piece in snapshot.pieces])
    return [weight.detach().requires_grad_() for weight in _in_dtype_of(snapshot.parameters, weights)]


def _in_dtype_of(parameters: Sequence[nn.Parameter], tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.to(p.dtype) for p, tensor in zip(parameters, tensors, strict=True)]
