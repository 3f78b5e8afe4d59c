"""A tuner for training loops with Hugging Face Accelerate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device, synchronize_rng_states
from torch import nn

from onepass.distributed import check_joined
from onepass.evaluation import LossFunction
from onepass.history import TunerStep
from onepass.tuner import Tuner


class AcceleratedTuner(Tuner):
    """``onepass.Tuner`` of what ``accelerator.prepare`` gives.

    ``accelerator.save_state`` and ``load_state`` carry it; ``step`` does nothing between the micro-batches of one step,
    nor after a step that fp16 has skipped.

    Args:
        accelerator: the one that has prepared the rest.
        model: prepared.
        optimizer: prepared.
        loss: ``loss(model, batch)``.
        valid: prepared, or any iterable of batches; they are put on the accelerator's device.
        settings: those of ``onepass.Tuner``.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: LossFunction,
        valid: Iterable[Any],
        **settings: Any,
    ) -> None:
        if not isinstance(accelerator, Accelerator):
            raise ValueError(f"accelerator must be an accelerate.Accelerator, but got {type(accelerator).__name__}")
        check_joined(model, accelerator.num_processes, "Accelerate")
        self._accelerator = accelerator
        own = getattr(optimizer, "optimizer", optimizer)
        super().__init__(model, own, loss, _Batches(accelerator, valid), **settings)
        accelerator.register_for_checkpointing(self)

    def step(self, batch: Any) -> TunerStep | None:
        if not self._accelerator.sync_gradients or self._accelerator.optimizer_step_was_skipped:
            return None
        return super().step(batch)


class _Batches:
    """Batches on the device, without Accelerate's count of them.

    A prepared loader tells everyone where it stands while it is iterated; left waiting between two hyper steps it would
    hide the end of the training loader, and with it the last step of a pass under gradient accumulation.
    """

    def __init__(self, accelerator: Accelerator, batches: Iterable[Any]) -> None:
        self._device, self._batches = accelerator.device, getattr(batches, "base_dataloader", batches)
        shared = getattr(batches, "synchronized_generator", None)
        if shared is not None:  # shuffles on every rank, which have different rows only if it does so equally
            synchronize_rng_states(["generator"], shared)
        self.generator = shared or getattr(self._batches, "generator", None)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            yield send_to_device(batch, self._device)
