"""A callback that tunes the optimizer of a Hugging Face ``Trainer`` while it trains."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from onepass.distributed import check_joined
from onepass.evaluation import LossFunction
from onepass.loggers import scalars_of_values
from onepass.snapshot import named_values
from onepass.tuner import Tuner

FILE = "onepass.pt"


class OnePassCallback(TrainerCallback):
    """Add it to the callbacks, and the learning rate and its like are tuned while the model trains.

    Args:
        loss: ``loss(model, inputs)``; by default ``trainer.compute_loss``, whatever it has been made to do.
        valid: an iterable of batches; by default the trainer's evaluation loader.
        resume_from: the checkpoint folder to find the tuner's state in; by default the one in ``args.output_dir``.
        log: add the values and the latest validation loss to what the trainer logs.
        settings: those of ``onepass.Tuner``.

    Attributes:
        tuner: the ``onepass.Tuner``, once training has begun; it has the ``history``.
    """

    def __init__(
        self,
        loss: LossFunction | None = None,
        valid: Iterable[Any] | None = None,
        *,
        resume_from: str | Path | None = None,
        log: bool = True,
        **settings: Any,
    ) -> None:
        inspect.signature(Tuner).bind(None, None, None, None, **settings)
        self._loss, self._valid, self._settings = loss, valid, settings
        self._resume_from, self._log = resume_from, log
        self.tuner: Tuner | None = None
        self._trainer: Any = None
        self._theirs: dict[str, Any] = {}
        self._inputs: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._let_go()
        self._trainer = trainer = _trainer_of(state)
        _check(trainer, self._valid)
        self._optimizer = _real(trainer.optimizer)
        valid = _Batches(trainer, self._valid if self._valid is not None else trainer.get_eval_dataloader())
        self.tuner = Tuner(
            trainer.model_wrapped, self._optimizer, self._loss or _loss_of(trainer), valid, **self._settings
        )
        if state.global_step:
            self.tuner.load_state_dict(self._saved(args, state.global_step))
        # A callback is shown neither the batch nor, before they are written, the logs.
        self._theirs = {"training_step": trainer.training_step, "log": trainer.log}
        vars(trainer).update(training_step=self._training_step, log=self._log_too)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        trainer = self._trainer
        if trainer is None or self.tuner is None or trainer.accelerator.optimizer_step_was_skipped:
            return
        self.tuner.step(self._inputs)
        # The trainer logs what the scheduler says, and that is without the tuner: see `onepass.schedulers`.
        trainer.lr_scheduler._last_lr = [group["lr"] for group in self._optimizer.param_groups]

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        folder = _checkpoint(args, state.global_step)
        if self.tuner is not None and args.should_save and folder.is_dir():
            torch.save({"tuner": self.tuner.state_dict(), "groups": self._groups()}, folder / FILE)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._let_go()

    def _let_go(self) -> None:
        if self.tuner is not None:
            self.tuner.detach()
        for name, method in self._theirs.items():
            setattr(self._trainer, name, method)
        self._trainer, self._theirs, self._inputs = None, {}, None

    def _training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self._inputs = inputs
        return self._theirs["training_step"](model, inputs, *args, **kwargs)

    def _log_too(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self._log and "learning_rate" in logs and self.tuner is not None and len(self.tuner.history):
            record = self.tuner.history[-1]
            logs = {**logs, **scalars_of_values(record.values), "onepass/valid_loss": record.valid_loss}
        self._theirs["log"](logs, *args, **kwargs)

    def _saved(self, args: TrainingArguments, step: int) -> Any:
        """The tuner's state in the checkpoint that the trainer has just resumed from. Nobody tells which it was."""
        path = Path(self._resume_from or _checkpoint(args, step)) / FILE
        cure = "give OnePassCallback(resume_from=...) the folder that trainer.train resumes from"
        if not path.is_file():
            raise ValueError(f"the run resumes at step {step}, but there is no {path}; {cure}")
        saved = torch.load(path, map_location="cpu", weights_only=True)
        if saved["groups"] != self._groups():
            raise ValueError(f"{path} must belong to the checkpoint that the run resumes from, but it does not; {cure}")
        return saved["tuner"]

    def _groups(self) -> list[dict[str, Any]]:
        """All plain numbers of the optimizer's groups: what tells one checkpoint from another."""
        return [
            {name: value for name, value in named_values(group).items() if isinstance(value, (int, float))}
            for group in self._optimizer.param_groups
        ]


def _trainer_of(state: TrainerState) -> Any:
    """A trainer knows its callbacks but not the reverse, hence the search among live objects."""
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), Trainer)]
    return next(trainer for trainer in found if trainer.state is state)


def _check(trainer: Any, valid: Iterable[Any] | None) -> None:
    if trainer.is_deepspeed_enabled:
        raise ValueError("OnePassCallback must have a torch optimizer, but DeepSpeed makes its own; train without it")
    if trainer.args.n_gpu > 1:
        raise ValueError(
            f"OnePassCallback must have one process a GPU, but got one for {trainer.args.n_gpu} (DataParallel); start "
            f"with torchrun --nproc-per-node={trainer.args.n_gpu}, or show it one GPU by CUDA_VISIBLE_DEVICES"
        )
    check_joined(trainer.model_wrapped, trainer.args.world_size, "the Trainer")
    if valid is None and trainer.eval_dataset is None:
        raise ValueError(
            "trainer must have validation data, but it has no eval_dataset; give it one, or OnePassCallback(valid=...)"
        )
    if valid is None and isinstance(trainer.eval_dataset, dict):
        raise ValueError(
            f"trainer must have one eval_dataset, but it has {sorted(trainer.eval_dataset)}; "
            "give OnePassCallback(valid=...) the batches of one"
        )


def _loss_of(trainer: Any) -> LossFunction:
    """As the trainer computes it, of one micro-batch alone."""

    def loss(model: Any, inputs: Any) -> Any:
        items = trainer._get_num_items_in_batch([inputs], trainer.args.device)
        inputs = trainer._prepare_inputs(dict(inputs))  # `compute_loss` takes the labels out
        with trainer.compute_loss_context_manager():
            return trainer.compute_loss(model, inputs, num_items_in_batch=items)

    return loss


class _Batches:
    """The batches of a loader without Accelerate's count of them: see ``onepass.integrations.accelerate``."""

    def __init__(self, trainer: Any, batches: Iterable[Any]) -> None:
        self._trainer, self._batches = trainer, getattr(batches, "base_dataloader", batches)
        self.generator = getattr(self._batches, "generator", None)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            yield self._trainer._prepare_inputs(batch)


def _real(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside Accelerate's wrapper."""
    found: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return found


def _checkpoint(args: TrainingArguments, step: int) -> Path:
    return Path(args.output_dir or ".") / f"{PREFIX_CHECKPOINT_DIR}-{step}"
