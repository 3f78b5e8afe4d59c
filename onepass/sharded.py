"""Extra evaluations of a model that ``fully_shard`` has spread over ranks, each of which has a part of every weight.

``fully_shard`` gathers weights and averages gradients in hooks around a module's own forward and backward pass. So
other weights are written where the shards lie, and put back bit for bit, and gradients come by ``.backward()``, once.
Second derivatives do not pass those hooks: curvature is by finite differences.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from onepass.curvature import Products, finite_difference
from onepass.distributed import Ranks, local, unwrapped
from onepass.evaluation import Evaluation, LossFunction, TrainingLoss
from onepass.snapshot import named_values


def evaluation_of(model: nn.Module, loss: LossFunction, valid_loss: LossFunction | None) -> Evaluation:
    """The evaluations that go with the way the model is spread over ranks."""
    kind = ShardedEvaluation if any(is_sharded(p) for p in unwrapped(model)[0].parameters()) else Evaluation
    return kind(model, loss, valid_loss)


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")


class ShardedEvaluation(Evaluation):
    """The same for a sharded model: weights come in and gradients go out as this rank's parts of them."""

    def __init__(self, model: nn.Module, loss: LossFunction, valid_loss: LossFunction | None) -> None:
        super().__init__(model, loss, valid_loss)
        # Kept, since a module shows its whole weights while they are gathered.
        self.parameters: dict[str, Any] = dict(self.model.named_parameters())
        self._modules = [m for m in self.model.modules() if hasattr(m, "reshard")]
        first = next(p for p in self.parameters.values() if is_sharded(p))
        if not self._modules or first.device_mesh.ndim != 1 or not all(map(is_sharded, self.parameters.values())):
            raise ValueError(
                "model must be sharded as a whole by fully_shard over a mesh of one dimension, but it is in another way"
            )
        self.ranks = Ranks(first.device_mesh.get_group(), first.device, shards=True)

    def training(self, batch: Any, names: Sequence[str], *, twice: bool) -> TrainingLoss:
        return ShardedLoss(self, batch, names, twice)

    @contextmanager
    def lending(self, weights: dict[str, Tensor]) -> Iterator[None]:
        shards = {name: local(self.parameters[name]) for name in weights}
        kept = {name: shard.clone() for name, shard in shards.items()}
        try:
            self._write(shards, weights)
            with super().lending({}):
                yield
        finally:
            self._write(shards, kept)

    def gradients(self, scaled: Tensor, wanted: Sequence[Tensor]) -> list[Tensor | None]:
        """By ``.backward()``, which averages those of the weights; what it writes into ``.grad`` is taken out again."""
        leaves = list(dict.fromkeys([*self.parameters.values(), *wanted]))
        kept = [leaf.grad for leaf in leaves]
        try:
            for leaf in leaves:
                leaf.grad = None
            scaled.backward()
            found = [torch.zeros_like(local(w)) if w.grad is None else local(w.grad) for w in wanted]
        finally:
            for leaf, gradient in zip(leaves, kept, strict=True):
                leaf.grad = gradient
        whole = self.made_whole([f for w, f in zip(wanted, found, strict=True) if not is_sharded(w)])
        rest = iter(whole)
        return [f / self.loss_scale if is_sharded(w) else next(rest) for w, f in zip(wanted, found, strict=True)]

    def relative_size(self, direction: Sequence[Tensor], weights: Sequence[Tensor]) -> float:
        """``curvature.relative_size`` of tensors of which every rank has a part."""
        norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in (*direction, *weights)]
        squares = [norm.square() for norm in norms]
        counts = [torch.full_like(squares[0], tensor.numel()) for tensor in weights]
        v, w, n = torch.stack(self.ranks.total([*squares, *counts])).view(3, -1).sqrt()
        return float(torch.linalg.vector_norm(v / (w + 0.01 * n)))

    @torch.no_grad()
    def _write(self, shards: dict[str, Tensor], values: dict[str, Tensor]) -> None:
        for name, shard in shards.items():
            shard.copy_(values[name])
        for module in self._modules:  # weights gathered earlier are no longer theirs
            module.reshard()  # type: ignore[operator]


class ShardedLoss(TrainingLoss):
    """The training loss of one batch as a function of this rank's parts of the weights."""

    _evaluation: ShardedEvaluation

    def products(self, curvature: str, weights: Sequence[Tensor], extra: Sequence[Tensor]) -> Products:
        def gradient(at: Sequence[Tensor]) -> list[Tensor]:
            return self.gradient(at, extra)

        return finite_difference(self, weights, extra, size=self._evaluation.relative_size, gradient=gradient)

    def gradient(self, weights: Sequence[Tensor], extra: Sequence[Tensor] = ()) -> list[Tensor]:
        wanted = [*(self._evaluation.parameters[name] for name in self._names), *extra]
        found = self._evaluation.gradients(self(weights), wanted)
        return [gradient for gradient in found if gradient is not None]  # none is: zeros stand there


def refuse_shapes(groups: Sequence[dict[str, Any]]) -> None:
    for group in groups:
        for name, value in named_values(group).items():
            if isinstance(value, Tensor) and value.dim() > 0:
                raise ValueError(
                    f"a sharded model must have one value a param group, but got {name} of shape {tuple(value.shape)}"
                )


def curvature_for_shards(curvature: str, *, needed: bool) -> str:
    """The one that works, with a word where it was not asked for."""
    if curvature not in ("auto", "finite-difference"):
        raise ValueError(
            f"curvature must be 'auto' or 'finite-difference' for a sharded model, but got {curvature!r}: "
            "fully_shard has no second derivatives"
        )
    if curvature == "auto" and needed:
        warnings.warn(
            "a sharded model has no second derivatives: onepass takes finite differences instead. These mislead on "
            "networks with ReLU and batch norm; there, use lookback=1.",
            stacklevel=4,
        )
    return "finite-difference"
