"""A Lightning callback that tunes the optimizer of a ``LightningModule`` while ``Trainer.fit`` trains it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from onepass.distributed import check_joined
from onepass.tuner import Tuner

Loss = Callable[[Any, Any], Tensor]
_COMPILED = {name: f"original_{name}" for name in ("forward", "training_step", "validation_step")}
_REGISTERS = {name for name in vars(nn.Module()) if name.startswith("_")}  # torch's own


class OnePass(Callback):
    """Add it to the callbacks, and the learning rate and its like are tuned while the model trains.

    >>> OnePass(interval=20)
    OnePass(interval=20)

    Args:
        loss: ``loss(module, batch)``; by default what ``training_step`` returns.
        valid: an iterable of validation batches; by default the trainer's validation loader.
        valid_loss: ``valid_loss(module, batch)``; by default what ``validation_step`` returns, or, where it returns no
            loss, ``loss`` on the validation batch.
        log: write every record to the trainer's loggers.
        settings: those of ``onepass.Tuner``.

    Attributes:
        tuner: the ``onepass.Tuner``, once training has begun; it has the ``history``.
    """

    def __init__(
        self,
        loss: Loss | None = None,
        valid: Iterable[Any] | None = None,
        *,
        valid_loss: Loss | None = None,
        log: bool = True,
        **settings: Any,
    ) -> None:
        inspect.signature(Tuner).bind(None, None, None, None, **settings)
        self._loss, self._valid, self._valid_loss = loss, valid, valid_loss
        self._log, self._settings = log, settings
        self.tuner: Tuner | None = None
        self._resume: Mapping[str, Any] = {}
        self._hook: Any = None
        self._stepped = False

    def __repr__(self) -> str:
        return f"OnePass({', '.join(f'{name}={value!r}' for name, value in self._settings.items())})"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._resume = {}  # Lightning restores callbacks after this
        if not pl_module.automatic_optimization:
            raise ValueError(
                "OnePass must have automatic_optimization=True, but the module sets it to False; call onepass.Tuner in "
                "training_step instead, after each optimizer.step()"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._let_go()
        model = trainer.strategy.model or pl_module  # with what the strategy has wrapped around it
        check_joined(model, trainer.world_size, type(trainer.strategy).__name__)
        optimizer = _only_optimizer(trainer)
        loss, valid_loss = self._losses(trainer)
        valid = _Batches(trainer, self._valid if self._valid is not None else _validation_loader(trainer))
        self.tuner = Tuner(model, optimizer, loss, valid, valid_loss=valid_loss, **self._settings)
        if self._resume:
            self.tuner.load_state_dict(self._resume)
        if self._log:
            self.tuner.log_to(*trainer.loggers)
        self._hook = optimizer.register_step_post_hook(self._after_step)
        for config in trainer.lr_scheduler_configs:
            config.scheduler = _Shown(config.scheduler, optimizer)  # type: ignore[assignment]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._stepped and self.tuner is not None:  # not between the micro-batches of one step
            self.tuner.step(_Sample(batch, batch_idx))
        self._stepped = False

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._let_go()

    def state_dict(self) -> dict[str, Any]:
        return self.tuner.state_dict() if self.tuner is not None else dict(self._resume)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resume = state_dict

    def _losses(self, trainer: Trainer) -> tuple[Loss, Loss]:
        """Of training and of validation, each in the context that the trainer calls its step in."""
        loss = _own(self._loss) if self._loss else _returned_by("training_step")
        plugin = trainer.precision_plugin

        def valid_loss(module: LightningModule, sample: _Sample) -> Any:
            found = None if self._loss else _returned_by("validation_step")(module, sample)
            return loss(module, sample) if found is None else found

        return (
            _in_context(plugin.train_step_context, loss),
            _in_context(plugin.val_step_context, _own(self._valid_loss) if self._valid_loss else valid_loss),
        )

    def _after_step(self, *_: Any) -> None:
        self._stepped = True

    def _let_go(self) -> None:
        if self.tuner is not None:
            self.tuner.detach()
        if self._hook is not None:
            self._hook.remove()


class _Sample(NamedTuple):
    batch: Any
    place: int


def _own(loss: Loss) -> Loss:
    return lambda module, sample: loss(module, sample.batch)


def _returned_by(name: str) -> Loss:
    """The loss that a step of the module returns, or ``None``."""

    def loss(module: LightningModule, sample: _Sample) -> Any:
        step = getattr(module, name, None)
        if step is None:
            return None
        found = step(*sample) if len(inspect.signature(step).parameters) > 1 else step(sample.batch)
        return found.get("loss") if isinstance(found, Mapping) else found

    return loss


def _in_context(context: Callable[[], AbstractContextManager[None]], loss: Loss) -> Loss:
    def inside(module: LightningModule, sample: _Sample) -> Tensor:
        with context(), _without_trace(module):
            found = loss(module, sample)
        if not isinstance(found, Tensor):
            got = type(found).__name__
            raise ValueError(f"training_step must return a loss, but got {got}; return it, or give OnePass(loss=...)")
        return found

    return inside


@contextmanager
def _without_trace(module: LightningModule) -> Iterator[None]:
    """``self.log`` is silent, compiled steps are plain, and what a step keeps (metrics, lists) is put back."""
    parts = [m for m in module.modules() if isinstance(m, LightningModule) or hasattr(m, "metric_state")]
    kept = [(part, _attributes(part)) for part in parts]
    for part in parts:
        if isinstance(part, LightningModule):
            original = part._compiler_ctx or {}
            plain = {name: original[key] for name, key in _COMPILED.items() if key in original}
            vars(part).update(plain, log=_silent, log_dict=_silent)
    try:
        yield
    finally:
        for part, attributes in kept:
            vars(part).clear()
            vars(part).update({name: _as_it_was(*pair) for name, pair in attributes.items()})


def _attributes(part: nn.Module) -> dict[str, tuple[Any, Any]]:
    """All attributes, with copies of what may change in place: lists, dicts, and the tensors of a metric."""
    changing = (list, dict) if isinstance(part, LightningModule) else (list, dict, Tensor)
    found = vars(part)
    copies = {name for name, value in found.items() if type(value) in changing and name not in _REGISTERS}
    return {name: (value, _copy_of(value) if name in copies else None) for name, value in found.items()}


def _copy_of(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value.copy()


def _as_it_was(value: Any, content: Any) -> Any:
    if isinstance(content, list):
        value[:] = content
    elif isinstance(content, dict):
        value.clear()
        value.update(content)
    elif content is not None:
        return content  # the graph of the loss may still need the tensor itself
    return value


def _silent(*_: Any, **__: Any) -> None:
    """In place of ``self.log``."""


class _Batches:
    """Batches of a loader as the module gets them: on its device, through its transfer hooks."""

    def __init__(self, trainer: Trainer, batches: Iterable[Any]) -> None:
        self._trainer, self._batches = trainer, batches
        self.generator = getattr(batches, "generator", None)
        if isinstance(batches, DataLoader):  # the trainer's own passes must not meet these in persistent workers
            self._batches = own = copy.copy(batches)
            own._iterator = None

    def __iter__(self) -> Iterator[_Sample]:
        for index, batch in enumerate(self._batches):
            batch = self._trainer.precision_plugin.convert_input(batch)
            batch = self._trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
            yield _Sample(self._trainer.strategy.batch_to_device(batch, dataloader_idx=0), index)


class _Shown:
    """An LR scheduler whose ``optimizer`` shows what it really uses, for ``LearningRateMonitor``.

    The tuner shows a scheduler an optimizer of its own; see ``onepass.schedulers``.
    """

    def __init__(self, scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
        self._scheduler, self.optimizer = scheduler, optimizer

    def __getattr__(self, name: str) -> Any:
        if name == "_scheduler":  # half made, by copy.deepcopy
            raise AttributeError(name)
        return getattr(self._scheduler, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._scheduler)


def _only_optimizer(trainer: Trainer) -> torch.optim.Optimizer:
    if len(trainer.optimizers) != 1:
        raise ValueError(f"configure_optimizers must give one optimizer, but it gave {len(trainer.optimizers)}")
    return trainer.optimizers[0]


def _validation_loader(trainer: Trainer) -> Any:
    if not trainer.enable_validation:
        raise ValueError(
            "trainer must have validation data, but it has none; give it a val_dataloader with a validation_step, or "
            "OnePass(valid=...)"
        )
    if trainer.val_dataloaders is None:  # validation comes later
        trainer.fit_loop.epoch_loop.val_loop.setup_data()
    loaders = trainer.val_dataloaders
    several = list(loaders.values()) if isinstance(loaders, Mapping) else loaders
    if not isinstance(several, (list, tuple)):
        return several
    if len(several) != 1:
        raise ValueError(f"trainer must have one validation loader, but it has {len(several)}; give OnePass(valid=...)")
    return several[0]
