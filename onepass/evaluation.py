"""The user's losses as pure functions: extra evaluations of a model in training that leave no trace in it.

Other weights are lent to the model in place of its own, buffers (batch norm statistics) as copies that are thrown
away, and every evaluation starts from the same random state, so that dropout draws the same masks each time.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree

from onepass.curvature import CURVATURES, Products, linearly
from onepass.distributed import Ranks, unwrapped
from onepass.recurrence import lstms_written_out

LossFunction = Callable[[Any, Any], Tensor]
_BATCH_STATISTICS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


class Evaluation:
    """Evaluates ``loss`` and ``valid_loss`` of a model without changing it. Use inside ``undisturbed()``.

    Attributes:
        model: the module inside of whatever wraps it.
        ranks: the processes that train it; values and derivatives are averaged over them.
        loss_scale: derivatives are taken of so many times the loss, and divided again: float16 has no tiny numbers.
    """

    def __init__(self, model: nn.Module, loss: LossFunction, valid_loss: LossFunction | None) -> None:
        self.model, group = unwrapped(model)
        self.ranks = Ranks(group, next((p.device for p in self.model.parameters()), None))
        self.loss_scale = 1.0
        for name, function in (("loss", loss), ("valid_loss", valid_loss)):
            if function is not None:
                check_signature(name, function)
        self._loss = _Scalar(self.model, loss, "loss")
        self._valid_loss = _Scalar(self.model, valid_loss, "valid_loss") if valid_loss else self._loss
        self._cuda = sorted({p.device.index for p in self.model.parameters() if p.device.type == "cuda"})
        self._random: tuple[Tensor, list[Tensor]] | None = None

    def names_of(self, parameters: Sequence[nn.Parameter]) -> list[str]:
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        for p in parameters:
            if p not in names:
                raise ValueError(
                    f"optimizer must hold parameters of model, but got one of shape {tuple(p.shape)} from elsewhere"
                )
        return [names[p] for p in parameters]

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Puts the random state and the modules' modes back at the end, whatever happens in between."""
        self._random = torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in self._cuda]
        try:
            with torch.enable_grad(), eagerly():
                yield
        finally:
            self._rewind()
            self._random = None

    def _rewind(self) -> None:
        """Back to the random state of the beginning, for the same dropout masks in every evaluation."""
        if self._random is None:
            return
        state, cuda_states = self._random
        torch.set_rng_state(state)
        for device, cuda_state in zip(self._cuda, cuda_states, strict=True):
            torch.cuda.set_rng_state(cuda_state, device)

    def training(self, batch: Any, names: Sequence[str], *, twice: bool) -> TrainingLoss:
        """The training loss of a batch as a function of the named weights; ``twice``: with second derivatives."""
        return TrainingLoss(self, batch, names, twice)

    def validation(self, batch: Any, wanted: Sequence[Tensor]) -> tuple[float, list[Tensor | None]]:
        """The validation loss at the current weights, and its gradient by ``wanted``; ``None`` where there is none."""
        with self.lending({}):
            value = self._valid_value(batch)
            if not value.requires_grad:
                raise ValueError(
                    f"{self._valid_loss.name} must depend on the parameters, but its value has no gradient"
                )
            live = [tensor for tensor in wanted if tensor.requires_grad]
            gradients = iter(self.gradients(self._scaled(value), live))
        (loss,) = self.ranks.mean([value.detach()])
        return loss.item(), [next(gradients) if tensor.requires_grad else None for tensor in wanted]

    def valid_loss(self, batch: Any, weights: dict[str, Tensor] | None = None) -> Tensor:
        """The validation loss alone, at the current weights or at others."""
        with torch.no_grad(), self.lending(weights or {}):
            (loss,) = self.ranks.mean([self._valid_value(batch)])
        return loss

    def training_loss(self, batch: Any) -> Tensor:
        """Scaled."""
        self._rewind()
        return self._scaled(self._loss(batch))

    def gradients(self, scaled: Tensor, wanted: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Of a loss, unscaled, over all ranks; ``None`` where nothing flows, which only a single process can tell."""
        found = torch.autograd.grad(scaled, wanted, allow_unused=True)
        if self.ranks.alone and self.loss_scale == 1:
            return found
        return self.made_whole([torch.zeros_like(w) if f is None else f for w, f in zip(wanted, found, strict=True)])

    def made_whole(self, derivatives: Sequence[Tensor]) -> list[Tensor]:
        """Derivatives of the scaled loss of this rank's batch as those of the loss, over all ranks."""
        if self.loss_scale != 1:
            derivatives = [derivative / self.loss_scale for derivative in derivatives]
        return self.ranks.mean(derivatives)

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss if self.loss_scale == 1 else loss * self.loss_scale

    @contextmanager
    def lending(self, weights: dict[str, Tensor]) -> Iterator[None]:
        """The model with other weights, and with copies of its buffers.

        To be held until all derivatives are taken: a checkpointed part of a model runs again on the way back.
        ``torch.func.functional_call`` does the same but ends with the forward pass.
        """
        lent = {**weights, **{name: buffer.clone() for name, buffer in self.model.named_buffers()}}
        with _reparametrize_module(self.model, lent, tie_weights=True) if lent else nullcontext():
            yield

    def _valid_value(self, batch: Any) -> Tensor:
        self._rewind()
        try:
            with validation_mode(self.model):
                return self._valid_loss(batch)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
        # The last batch of a loader may have a single sample, which has no statistics of its own.
        with validation_mode(self.model, batch_statistics=False):
            return self._valid_loss(batch)


class TrainingLoss:
    """The training loss of one batch as a function of the weights (``curvature.LossApart``).

    The weights of the latest call stay lent to the model until the next one, or until the end of the ``with`` block.
    """

    def __init__(self, evaluation: Evaluation, batch: Any, names: Sequence[str], twice: bool) -> None:
        self._evaluation, self._batch, self._names, self._twice = evaluation, batch, names, twice
        self._lent = ExitStack()

    def __enter__(self) -> TrainingLoss:
        return self

    def __exit__(self, *exception: object) -> None:
        self._lent.close()

    def __call__(self, weights: Sequence[Tensor]) -> Tensor:
        self._lent.close()
        self._lent.enter_context(self._evaluation.lending(dict(zip(self._names, weights, strict=True))))
        if self._twice:
            self._lent.enter_context(twice_differentiable_kernels(self._evaluation.model))
            self._lent.enter_context(lstms_written_out(self._evaluation.model))
        return self._evaluation.training_loss(self._batch)

    def products(self, curvature: str, weights: Sequence[Tensor], extra: Sequence[Tensor]) -> Products:
        """With the Hessian of this loss, as ``CURVATURES`` makes them."""
        return linearly(self._evaluation.made_whole, CURVATURES[curvature](self, weights, extra))

    def gradient(self, weights: Sequence[Tensor], extra: Sequence[Tensor] = ()) -> list[Tensor]:
        wanted = [*weights, *extra]
        found = self._evaluation.gradients(self(weights), wanted)
        return [torch.zeros_like(w) if f is None else f for w, f in zip(wanted, found, strict=True)]

    def apart(self, weights: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], Tensor]:
        outputs: list[Tensor] = []
        leaves: list[Tensor] = []

        def cut(module: nn.Module, args: Any, output: Any) -> Any:
            if outputs:
                raise ValueError(
                    "curvature='gauss-newton' needs a loss that calls the model once, but it was called again"
                )
            flat, structure = _pytree.tree_flatten(output)
            for i, tensor in enumerate(flat):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    outputs.append(tensor)
                    leaves.append(tensor.detach().requires_grad_())
                    flat[i] = leaves[-1]
            return _pytree.tree_unflatten(flat, structure)

        handle = self._evaluation.model.register_forward_hook(cut)
        try:
            value = self(weights)
        finally:
            handle.remove()
        if not outputs:
            raise ValueError("curvature='gauss-newton' needs a loss that calls model(...), but it was never called")
        return outputs, leaves, value


def check_signature(name: str, function: Any) -> None:
    cure = f"write def {name}(model, batch): return criterion(model(batch[0]), batch[1])"
    if isinstance(function, nn.Module) or not callable(function):
        raise ValueError(f"{name} must be a function of (model, batch), but got {type(function).__name__}; {cure}")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise ValueError(
            f"{name} must be a function of (model, batch), but for the one given: {error}; {cure}"
        ) from error
    except ValueError:  # a builtin that does not tell
        return


class _Scalar:
    """``loss(model, batch)`` of one model, and a clear word where it is not a scalar."""

    def __init__(self, model: nn.Module, loss: LossFunction, name: str) -> None:
        self.model, self.loss, self.name = model, loss, name

    def __call__(self, batch: Any) -> Tensor:
        return checked_scalar(self.loss(self.model, batch), self.name)


def checked_scalar(value: Any, name: str) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name}(model, batch) must return a scalar tensor, but got {got}")
    return value.reshape(())


@contextmanager
def validation_mode(model: nn.Module, *, batch_statistics: bool = True) -> Iterator[None]:
    """Dropout off, batch norm as it was.

    With running statistics the loss would seem to depend on the scale of weights that batch norm makes irrelevant, and
    weight decay would be tuned by that illusion. RNNs keep their mode, since cuDNN cannot go backwards in the other.
    """
    modes = [(module, module.training) for module in model.modules() if module.training]
    rnns = [(module, module.dropout) for module, _ in modes if isinstance(module, nn.RNNBase)]
    try:
        for module, _ in modes:
            keeps = isinstance(module, nn.RNNBase) or (batch_statistics and isinstance(module, _BATCH_STATISTICS))
            module.training = keeps
        for module, _ in rnns:
            module.dropout = 0.0
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for module, dropout in rnns:
            module.dropout = dropout


def eagerly() -> AbstractContextManager[Any]:
    """Whatever is compiled runs as written: it has no second derivative, and would compile again for other weights."""
    # Absent before torch 2.6; and where nothing is compiled, the import alone takes seconds.
    stance = getattr(torch.compiler, "set_stance", None)
    return stance("force_eager") if stance and "torch._dynamo" in sys.modules else nullcontext()


def trains_by_cudnn(model: nn.Module) -> bool:
    """Whether recurrent networks run by kernels of cuDNN that can be evaluated again with the same result.

    Those with dropout cannot: cuDNN draws its masks from a state of its own, which nobody can put back.
    """
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    return any(torch.backends.cudnn.is_acceptable(p) for module in recurrent for p in module.parameters()) and not any(
        module.dropout for module in recurrent
    )


@contextmanager
def twice_differentiable_kernels(model: nn.Module) -> Iterator[None]:
    """Swaps the fused kernels that have no second derivative for plain ones: attention, and cuDNN's recurrent nets."""
    cudnn = torch.backends.cudnn
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            kept = {"benchmark": cudnn.benchmark, "deterministic": cudnn.deterministic, "allow_tf32": cudnn.allow_tf32}
            stack.enter_context(cudnn.flags(enabled=False, **kept))
        yield
