"""Many copies of one small model as one: weights stacked along a leading axis, losses evaluated with ``vmap``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from onepass.evaluation import (
    LossFunction,
    check_signature,
    checked_scalar,
    twice_differentiable_kernels,
    validation_mode,
)
from onepass.starts import private_random

Buffers = dict[str, Tensor]
MakeModel = Callable[[], nn.Module]


class Stack:
    """What all copies share: the module, and how its parameters lie in one long vector.

    A row of weights is laid out as by ``torch.nn.utils.parameters_to_vector``. Whatever else a module holds, running
    statistics and frozen parameters, counts as a buffer.
    """

    def __init__(self, make_model: MakeModel, loss: LossFunction, valid_loss: LossFunction | None) -> None:
        if isinstance(make_model, nn.Module) or not callable(make_model):
            raise ValueError(
                f"make_model must be a function that makes a model, but got {type(make_model).__name__}; "
                "write lambda: nn.Sequential(...)"
            )
        self._make_model = make_model
        with private_random(0, "module"):
            self.module = make_model()
        if not isinstance(self.module, nn.Module):
            raise ValueError(f"make_model must return a torch module, but got {type(self.module).__name__}")
        trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        dtypes = {p.dtype for p in trained.values()}
        if len(dtypes) != 1:
            names = ", ".join(sorted(str(d) for d in dtypes)) or "no parameters"
            raise ValueError(f"make_model must return parameters of one floating point type, but got {names}")
        self.dtype = dtypes.pop()
        self.names = list(trained)
        self.shapes = [p.shape for p in trained.values()]
        self.sizes = [p.numel() for p in trained.values()]
        self._loss = _Loss(self.module, loss, "loss")
        self._valid_loss = _Loss(self.module, valid_loss, "valid_loss") if valid_loss else self._loss

    def start(self, seed: int, replicas: int) -> tuple[Tensor, Buffers]:
        """Fresh weights and buffers, each replica from a random state of its own."""
        weights, buffers = [], []
        for r in range(replicas):
            with private_random(seed, "weights", r):
                model = self._make_model()
            own = dict(model.named_parameters())
            shapes = [own[name].shape for name in self.names if name in own]
            if shapes != self.shapes:
                raise ValueError("make_model must always return the same architecture, but replicas differ")
            weights.append(torch.cat([own[name].detach().reshape(-1) for name in self.names]).cpu())
            buffers.append({n: t.detach().clone().cpu() for n, t in _rest(model, self.names).items()})
        return torch.stack(weights), {n: torch.stack([b[n] for b in buffers]) for n in buffers[0]}

    def views(self, weights: Tensor) -> list[Tensor]:
        """Rows of weights, cut into one stacked tensor a parameter."""
        parts = weights.split(self.sizes, dim=1)
        return [
            part.unflatten(1, shape) if shape else part[:, 0] for part, shape in zip(parts, self.shapes, strict=True)
        ]

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """The reverse of ``views``, as a copy."""
        return torch.cat([t.reshape(len(t), -1) for t in tensors], dim=1)

    def only(self, names: Sequence[str], rows: Tensor) -> Tensor:
        """Rows laid out like weights, with zeros for all parameters but these."""
        parts = zip(self.names, rows.split(self.sizes, dim=1), strict=True)
        return torch.cat([part if name in names else torch.zeros_like(part) for name, part in parts], dim=1)

    def losses(self, views: Sequence[Tensor], buffers: Buffers, batch: Any, *, per_replica: bool = False) -> Tensor:
        """The training loss of each replica. Buffers are updated in place, as training does."""
        return self._evaluate(self._loss, views, buffers, batch, per_replica)

    def valid_losses(
        self, views: Sequence[Tensor], buffers: Buffers, batch: Any, *, per_replica: bool = False
    ) -> Tensor:
        """The validation loss of each replica: dropout off, batch norm with the batch's own statistics."""
        copies = {name: buffer.clone() for name, buffer in buffers.items()}
        with validation_mode(self.module):
            return self._evaluate(self._valid_loss, views, copies, batch, per_replica)

    @torch.no_grad()
    def metric(
        self, function: LossFunction, weights: Tensor, buffers: Buffers, batch: Any, *, per_replica: bool = False
    ) -> Tensor:
        """Anything of a model in evaluation mode and a batch, for each replica."""
        modes = [(module, module.training) for module in self.module.modules()]
        self.module.eval()
        try:
            return self._evaluate(
                _Loss(self.module, function, "metric"), self.views(weights), buffers, batch, per_replica
            )
        finally:
            for module, mode in modes:
                module.training = mode

    def model(self, weights: Tensor, buffers: Buffers) -> nn.Module:
        """One row of weights as an ordinary module."""
        model = copy.deepcopy(self.module)
        tensors = dict(zip(self.names, (v[0] for v in self.views(weights.unsqueeze(0))), strict=True)) | buffers
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                tensor.copy_(tensors[name])
        return model

    def _evaluate(
        self, loss: _Loss, views: Sequence[Tensor], buffers: Buffers, batch: Any, per_replica: bool
    ) -> Tensor:
        def one(weights: Sequence[Tensor], own: Buffers, batch: Any) -> Tensor:
            lent = {f"model.{n}": t for n, t in (*zip(self.names, weights, strict=True), *own.items())}
            return functional_call(loss, lent, (batch,))  # type: ignore[no-any-return]

        many: Callable[..., Tensor] = vmap(one, in_dims=(0, 0, 0 if per_replica else None), randomness="different")
        fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # has no derivative, and vmap hides that one is wanted
        try:
            with twice_differentiable_kernels(self.module):
                return many(list(views), buffers, batch)
        except RuntimeError as error:
            raise self._explained(error, loss.name) from error
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)

    def _explained(self, error: RuntimeError, name: str) -> RuntimeError:
        """torch says that something cannot be batched; which module, it does not say."""
        if not any(sign in str(error) for sign in ("vmap", "Batching rule", "data pointer of Tensor")):
            return error
        names = {module: name for name, module in self.module.named_modules()}
        where = name
        trace = error.__traceback__
        while trace is not None:
            owner = trace.tb_frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and owner in names:
                where = f"module {names[owner] or 'model'!r} ({type(owner).__name__})"
            trace = trace.tb_next
        reason = str(error).splitlines()[0].split(". ")[0]
        cure = (
            "evaluate population.model(r), one by one"
            if name == "metric"
            else "train such a model one run at a time with onepass.Tuner"
        )
        return RuntimeError(f"{where} cannot be evaluated for many replicas at once: {reason}; {cure}")


class _Loss(nn.Module):
    """``loss(model, batch)`` as a module, so that ``functional_call`` can lend weights to the model inside."""

    def __init__(self, model: nn.Module, loss: LossFunction, name: str) -> None:
        super().__init__()
        check_signature(name, loss)
        self.model, self.loss, self.name = model, loss, name

    def forward(self, batch: Any) -> Tensor:
        return checked_scalar(self.loss(self.model, batch), self.name)


def _rest(model: nn.Module, trained: Sequence[str]) -> dict[str, Tensor]:
    frozen = {name: p for name, p in model.named_parameters() if name not in trained}
    return {**frozen, **dict(model.named_buffers())}
