"""``Tuner``: gathers the last step, asks for its hypergradient, and writes new values back. No equation stands here."""

from __future__ import annotations

import copy
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from onepass.batches import Cycle
from onepass.checks import check_arguments, checked_extra
from onepass.distributed import local
from onepass.entries import Used, collect
from onepass.estimator import Estimator, how_far
from onepass.evaluation import LossFunction
from onepass.guard import Guard, probation_step
from onepass.history import History, TunerStep, Values
from onepass.hyperparameters import Hyperparameter
from onepass.loggers import Write, scalars_of, scalars_of_values, writer_of
from onepass.optim import SteadyAdam
from onepass.recovery import Recovery
from onepass.rules import rule_of
from onepass.scaling import evaluation_scale, left_out, overflowed, scale_of, scaler_at_work
from onepass.schedulers import follow_schedulers, release
from onepass.sharded import evaluation_of, refuse_shapes
from onepass.snapshot import Snapshot, drained, read_value
from onepass.whole_run import far_names

HyperOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]

_NONE: Mapping[Any, Any] = {}
_TUNED: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def default_hyper_optimizer(raw: list[Tensor]) -> torch.optim.Optimizer:
    """A step of 0.1 where hypergradients are steady, so that a learning rate moves by a decade in ten hyper steps.

    *Departs from the paper* (Adam, 0.05): short steps in noise; a short memory (``beta2``), since hypergradients shrink
    by orders of magnitude during a run and a long one would remember only the first; and no ``eps``, since they may all
    be tiny.
    """
    return SteadyAdam(raw, lr=0.1, betas=(0.9, 0.95), eps=1e-30)


class Tuner:
    """Tunes the hyperparameters of a torch optimizer while it trains (Clarke et al., 2022, Algorithm 1).

    Call ``tuner.step(batch)`` after every ``optimizer.step()``. Every ``interval`` steps it differentiates the last
    weight update, and moves the values in ``optimizer.param_groups`` down the gradient of the validation loss.

    >>> model = nn.Linear(2, 1)
    >>> def loss(model, batch): return ((model(batch[0]) - batch[1]) ** 2).mean()
    >>> batch = torch.randn(8, 2), torch.randn(8, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    >>> tuner = Tuner(model, optimizer, loss, [batch], interval=1)
    >>> loss(model, batch).backward(); optimizer.step()
    >>> tuner.step(batch).step
    1

    Args:
        model: the model that ``optimizer`` trains.
        optimizer: any optimizer with a rule (``onepass.rules``).
        loss: ``loss(model, batch)``, the scalar training loss.
        valid: an iterable of validation batches, cycled; one batch in a list is fine.
        tune: names of param group entries; by default every one whose start lies inside its domain.
        interval: weight steps a hyper step (``T`` in the paper).
        lookback: terms of the series (``i`` in the paper, which has 5). A number alone asks for the paper's series;
            1 is the cheapest and needs no second derivatives. By default 1, beside the whole run.
        through_state: carry the series through the optimizer's state as well. *Departs from the paper*.
        curvature: a name from ``onepass.curvature.CURVATURES``, or "auto": exact where kernels allow it.
        hyper_optimizer: makes the optimizer of the raw values; by default ``default_hyper_optimizer``.
        valid_loss: ``valid_loss(model, batch)``, by default ``loss``. Dropout is off in it.
        extra: hyperparameters used inside ``loss``, by name.
        bounds: name -> (lowest, highest), natural units.
        guard: goes back when the run diverges; ``None`` for never. *Departs from the paper*.
        tied: names that have one value for all groups.
        estimator: "series", or "whole-run", which also asks what a value has done since the run began, and moves it
            only where both agree (``onepass.sensitivity``). *Departs from the paper*. By default "whole-run", unless
            ``lookback`` is given, or a value has one number for every weight.

    Attributes:
        history: the record of all hyper steps.
        skipped: how many hyper steps left the values alone because something was not finite.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: LossFunction,
        valid: Iterable[Any],
        *,
        tune: Sequence[str] | None = None,
        interval: int = 10,
        lookback: int | None = None,
        through_state: bool = True,
        curvature: str = "auto",
        hyper_optimizer: HyperOptimizer | None = None,
        valid_loss: LossFunction | None = None,
        extra: Mapping[str, Hyperparameter] | None = None,
        bounds: Mapping[str, tuple[float, float]] | None = None,
        guard: Guard | None = Guard(),  # noqa: B008 (frozen)
        tied: Sequence[str] = (),
        estimator: str | None = None,
    ) -> None:
        check_arguments(model, optimizer, interval, hyper_optimizer, valid_loss, guard)
        if optimizer in _TUNED:
            raise ValueError(
                "optimizer must have one tuner, but it already has another; call detach() on that one first"
            )
        self._evaluation = evaluation_of(model, loss, valid_loss)
        self._ranks = self._evaluation.ranks
        if self._ranks.shards:
            refuse_shapes(optimizer.param_groups)
        rule = rule_of(optimizer)
        self._optimizer, self._interval = optimizer, interval
        self._rows = collect(optimizer.param_groups, rule, tune, tied, bounds or {})
        self._entries = [entry for row in self._rows.values() for entry in row if entry is not None]
        self._extra = checked_extra(extra or {}, rule.tunable)
        scalar = all(entry.hyperparameter.value.numel() == 1 for entry in self._entries)
        estimator, lookback = how_far(estimator, lookback, far=scalar and bool(far_names(self._entries)))
        self._estimator = Estimator(
            self._evaluation,
            rule,
            lookback=lookback,
            through_state=through_state,
            curvature=curvature,
            estimator=estimator,
        )
        # One each, in a fixed order: tied entries share theirs.
        self._hyperparameters = list(dict.fromkeys([*(e.hyperparameter for e in self._entries), *self._extra.values()]))
        if not self._hyperparameters:
            raise ValueError(
                f"there must be something to tune among {sorted(rule.tunable)} or in extra, but got nothing"
            )
        self._make_hyper_optimizer = hyper_optimizer or default_hyper_optimizer
        self._hyper_optimizer = self._new_hyper_optimizer()
        with self._ranks.together(lambda: self._settings(guard)):
            self._valid = Cycle(valid)
        with self._evaluation.undisturbed():
            first_loss = self._try_loss()
        rates = [entry.hyperparameter for entry in self._entries if entry.name == "lr"]
        self._recovery = (
            Recovery(guard, self._evaluation, optimizer, self._hyperparameters, rates, first_loss)
            if guard and rates  # without a learning rate to lower, going back would only repeat itself
            else None
        )
        self._snapshot: Snapshot | None = None
        self._scaler: GradScaler | None = None
        self._used: list[Used] = []
        self._schedulers: list[LRScheduler] = []
        self._steps, self.skipped = 0, 0
        self._stepped = self._gradients_come_later = self._resumed = False
        self.history = History(self.values(), extra=tuple(self._extra))
        self._writers: list[Write] = []
        self._hooks = [
            optimizer.register_step_pre_hook(_uncompiled(self._before_step)),
            optimizer.register_step_post_hook(_uncompiled(self._after_step)),
        ]
        _TUNED.add(optimizer)

    def step(self, batch: Any) -> TunerStep | None:
        """To be called after every ``optimizer.step()``, with the batch it was taken on.

        Returns:
            ``None`` on ordinary steps and after one that a ``GradScaler`` has left out, a record every ``interval``
            steps and whenever the guard goes back.
        """
        if not self._stepped:
            if self._left_out():
                return None
            raise RuntimeError(
                "tuner.step must follow an optimizer.step, once each, but there was none since the last; "
                "call optimizer.step(), then tuner.step(batch)"
            )
        self._stepped = False
        self._steps += 1
        since = self._steps % self._interval
        if since and not (probation_step(since) and self._recovery and self._recovery.on_probation()):
            return None
        with self._evaluation.undisturbed():
            record = self._probation_step() if since else self._hyper_step(batch)
        self._snapshot = None
        if record is not None:
            self.history.append(record)
            for write in self._writers:
                write(scalars_of(self.history[-1]), record.step)
        return record

    def log_to(self, *loggers: Any) -> Tuner:
        """Write every record from now on to each of these too: the values, the validation loss, the hypergradients, and
        whether the guard went back.

        Args:
            loggers: a TensorBoard ``SummaryWriter``, the module ``mlflow`` or one of its runs, a Weights & Biases run,
                or a function of ``(name, value, step)`` (``onepass.loggers``).
        """
        writers = [writer_of(logger) for logger in loggers]
        if not self._steps:
            for write in writers:
                write(scalars_of_values(self.history.start), 0)
        self._writers += writers
        return self

    def values(self) -> Values:
        """The tuned values in natural units: name -> one a param group. Under an LR scheduler, the base values."""
        found: Values = {}
        for name, row in self._rows.items():
            fixed = [read_value(group, name) for group in self._optimizer.param_groups]
            tuned = [entry if entry and not entry.paused else None for entry in row]
            tuned += [None] * (len(fixed) - len(row))  # groups added since are not tuned
            found[name] = [_plain(e.hyperparameter.value) if e else f for e, f in zip(tuned, fixed, strict=True)]
        return found | {name: [_plain(h.value)] for name, h in self._extra.items()}

    def __repr__(self) -> str:
        return f"Tuner of {', '.join(self.values())} after {self._steps} steps"

    def detach(self) -> None:
        """Stop tuning, and leave the optimizer free for another tuner."""
        for hook in self._hooks:
            hook.remove()
        release(self._schedulers)
        self._schedulers = []
        _TUNED.discard(self._optimizer)

    # --- around optimizer.step() ---

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._schedulers:
            self._schedulers = follow_schedulers(optimizer, self._rows.get("lr", []), resumed=self._resumed)
        self._snapshot, self._scaler = None, scaler_at_work()
        first = self._recovery is not None and not self._recovery.has_point()
        if first or self._due():
            groups = optimizer.param_groups
            for entry in self._entries:
                entry.observe(groups[entry.index])
            self._used = [entry.used(groups[entry.index]) for entry in self._entries if not entry.paused]
            self._snapshot = Snapshot(optimizer, scale_of(self._scaler))
        if first:
            self._keep_point()
        inside = (
            len(args) > 1 or kwargs.get("closure") is not None or getattr(optimizer, "grad_scale", None) is not None
        )
        self._gradients_come_later = inside
        if self._snapshot is not None and self._due() and not inside:
            self._snapshot.take_gradients()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._snapshot is not None and self._due() and self._gradients_come_later:
            if overflowed(optimizer):  # looked at only where it matters: that waits for the GPU
                return
            self._snapshot.take_gradients()
        self._stepped = True

    def _left_out(self) -> bool:
        parameters = (p for group in self._optimizer.param_groups for p in group["params"])
        anywhere = self._ranks.total([torch.tensor(float(left_out(parameters, self._scaler)))])[0]
        return bool(anywhere > 0)

    # --- what must be the same on all ranks ---

    def _settings(self, guard: Guard | None) -> dict[str, Any]:
        bounds = {name: [e.hyperparameter.bounds for e in row if e] for name, row in self._rows.items()}
        return {
            "optimizer": type(self._optimizer).__name__,
            "tune and extra": self._labels(),
            "interval": self._interval,
            **self._estimator.settings,
            "hyper_optimizer": repr(self._hyper_optimizer),
            "bounds": bounds,
            "guard": guard,
            **self._in_use(),
        }

    def _in_use(self) -> dict[str, Any]:
        """The values that the next step takes, one with a shape by its sum."""
        groups = self._optimizer.param_groups
        found = {f"{e.name} of param group {e.index}": read_value(groups[e.index], e.name) for e in self._entries}
        found |= {f"extra[{name!r}]": h.value for name, h in self._extra.items()}
        return {name: float(value.sum()) if isinstance(value, Tensor) else value for name, value in found.items()}

    def _due(self) -> bool:
        """Whether the next ``tuner.step`` is a hyper step."""
        return (self._steps + 1) % self._interval == 0

    # --- one hyper step ---

    def _hyper_step(self, batch: Any) -> TunerStep:
        snapshot = self._snapshot
        assert snapshot is not None
        self._evaluation.loss_scale = evaluation_scale(snapshot.loss_scale)
        first, again = not self.history.records, self._recovery is not None and self._recovery.on_probation()
        with _requiring_grad([h.value for h in self._extra.values()]):
            with self._ranks.together(self._in_use):
                valid_batch = next(self._valid)
            loss, valid_gradient, direct = self._validation(snapshot, valid_batch)
            verdict = self._recovery.judge(loss, valid_batch) if self._recovery else None
            if verdict is not None and not verdict.healthy:
                return self._go_back(loss, again=again)
            if verdict is not None and verdict.safe:
                self._keep_point()  # now, so that the old point makes room
            natural = self._estimator.hypergradients(
                batch,
                snapshot,
                valid_gradient,
                self._used,
                self._extra,
                again=lambda: self._validation(snapshot, valid_batch)[1],
            )
        for h, derivative in direct.items():
            natural[h] = natural[h] + derivative
        if first:
            self._warn_of_no_effect(natural)
        return self._move({h: h.pull_back(natural[h]) for h in self._hyperparameters if h in natural}, loss)

    def _validation(self, snapshot: Snapshot, batch: Any) -> tuple[float, list[Tensor], dict[Hyperparameter, Tensor]]:
        """The validation loss after the step, its gradient by the weights, and directly by the extras it depends on."""
        parameters, extra = snapshot.parameters, list(self._extra.values())
        loss, found = self._evaluation.validation(batch, [*parameters, *(h.value for h in extra)])
        by_extra = zip(extra, found[len(parameters) :], strict=True)
        direct = {h: g for h, g in by_extra if g is not None}
        del found[len(parameters) :]
        by_weights = (
            torch.zeros_like(local(p)) if g is None else g for p, g in zip(parameters, drained(found), strict=True)
        )
        return loss, list(snapshot.join(by_weights)), direct

    @torch.no_grad()
    def _move(self, raw: dict[Hyperparameter, Tensor], loss: float) -> TunerStep:
        """Move the hyperparameters down their gradients, unless something is not finite."""
        if not math.isfinite(loss) or not all(_is_finite(g) for g in raw.values()):
            self.skipped += 1
            if self._estimator.past is not None:
                self._estimator.past.forget()
            reason = "a hypergradient" if math.isfinite(loss) else "the validation loss"
            return self._record(loss, raw, skipped=f"{reason} is not finite")
        for h, gradient in raw.items():
            h.raw.grad = gradient
        self._hyper_optimizer.step()
        for h in raw:
            h.raw.grad = None
            h.refresh()
        self._write()
        return self._record(loss, raw)

    def _write(self) -> None:
        for entry in self._entries:
            entry.write(self._optimizer.param_groups[entry.index])
            self.history.scheduled |= entry.factor != 1.0

    def _record(self, loss: float, raw: Mapping[Hyperparameter, Tensor] = _NONE, **notes: Any) -> TunerStep:
        def show(h: Hyperparameter | None) -> Any:
            return _plain(raw[h]) if h is not None and h in raw else math.nan

        slopes: Values = {
            name: [show(e.hyperparameter if e else None) for e in row] for name, row in self._rows.items()
        }
        slopes |= {name: [show(h)] for name, h in self._extra.items()}
        return TunerStep(self._steps, self.values(), slopes, loss, **notes)

    def _try_loss(self) -> float:
        """One evaluation before anything is changed, so that a bad loss is told at once."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        self._evaluation.names_of(parameters)
        trained = [p for p in parameters if p.requires_grad]
        loss, gradients = self._evaluation.validation(self._valid.peek(), trained)
        if all(gradient is None for gradient in gradients):
            raise ValueError("loss must depend on the parameters of optimizer, but its gradient reaches none of them")
        return loss

    def _new_hyper_optimizer(self) -> torch.optim.Optimizer:
        return self._make_hyper_optimizer([h.raw for h in self._hyperparameters])

    def _warn_of_no_effect(self, natural: Mapping[Hyperparameter, Tensor]) -> None:
        if any(len(row) < len(self._optimizer.param_groups) for row in self._rows.values()):
            warnings.warn("a param group was added after the tuner was made: it is not tuned", stacklevel=4)
        for name, h in self._extra.items():
            if not natural[h].any():
                warnings.warn(
                    f"extra[{name!r}] does not influence loss: use its .value there, as a tensor", stacklevel=4
                )

    # --- the guard ---

    def _probation_step(self) -> TunerStep | None:
        """Between hyper steps: only looks whether the run is about to be lost."""
        assert self._recovery is not None
        batch = self._valid.peek()
        loss = float(self._evaluation.valid_loss(batch))
        healthy = self._recovery.judge(loss, batch, remember=False).healthy
        return None if healthy else self._go_back(loss, again=True)

    def _go_back(self, loss: float, *, again: bool) -> TunerStep:
        assert self._recovery is not None
        did, step = self._recovery.go_back(loss, again=again)
        if self._estimator.past is not None:
            self._estimator.past.forget()
        self._hyper_optimizer = self._new_hyper_optimizer()
        self._write()
        if not any(record.guard for record in self.history):
            warnings.warn(f"the run diverged at step {self._steps}: {did}; see tuner.history", stacklevel=4)
        return self._record(loss, guard=did, back_to=step)

    def _keep_point(self) -> None:
        assert self._recovery is not None
        assert self._snapshot is not None
        self._recovery.keep(max(self._steps - 1, 0), self._snapshot.everything)

    # --- saving ---

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on bit for bit, in plain containers. Save it beside the optimizer's."""
        past = self._estimator.past
        return {
            "shared": self._shared(),
            "labels": self._labels(),
            "steps": self._steps,
            "skipped": self.skipped,
            "hyperparameters": [h.state_dict() for h in self._hyperparameters],
            "entries": [{"factor": e.factor, "start": e.start, "paused": e.paused} for e in self._entries],
            "scheduled": bool(self._schedulers),
            "hyper_optimizer": copy.deepcopy(self._hyper_optimizer.state_dict()),
            "fell_back": self._estimator.fell_back,
            "valid": self._valid.state_dict(),
            "past": past.state_dict() if past is not None else None,
            "recovery": self._recovery.state_dict() if self._recovery else None,
            "history": self.history.to_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken. Load the model and the optimizer as well."""
        if "labels" not in state:
            raise ValueError("state must come from Tuner.state_dict(), but it has other entries")
        if state["labels"] != self._labels():
            raise ValueError(f"state must be of a tuner of {self._labels()}, but it is of {state['labels']}")
        if state["shared"] != self._shared():
            raise ValueError("state must be of a tuner with the same tied, but other groups share a value there")
        if (state["recovery"] is None) != (self._recovery is None):
            raise ValueError("state must be of a tuner with the same guard, but one has a guard and the other has none")
        past = self._estimator.past
        if (state.get("past") is None) != (past is None):
            raise ValueError("state must be of a tuner with the same estimator, but theirs differ")
        for h, saved in zip(self._hyperparameters, state["hyperparameters"], strict=True):
            h.load_state_dict(saved)
        for entry, saved in zip(self._entries, state["entries"], strict=True):
            entry.factor, entry.start, entry.paused = saved["factor"], saved["start"], saved["paused"]
        self._write()
        self._steps, self.skipped = state["steps"], state["skipped"]
        self._stepped, self._resumed = False, state["scheduled"]
        self._hyper_optimizer = self._new_hyper_optimizer()
        self._hyper_optimizer.load_state_dict(state["hyper_optimizer"])
        if past is not None:
            past.load_state_dict(state["past"])
        if state["fell_back"]:
            self._estimator.fall_back()
        if self._recovery is not None:
            self._recovery.load_state_dict(state["recovery"])
        self.history = History.from_dict(state["history"])
        self._valid.load_state_dict(state["valid"])

    def _shared(self) -> list[int]:
        """Which value each entry has: tied ones the same."""
        places = {h: place for place, h in enumerate(self._hyperparameters)}
        return [places[entry.hyperparameter] for entry in self._entries]

    def _labels(self) -> list[str]:
        """Name, group and shape of everything tuned: two tuners with the same labels can exchange their states."""
        labels = [f"{e.name}[{e.index}] {tuple(e.hyperparameter.raw.shape)}" for e in self._entries]
        return labels + [f"{name} {tuple(h.raw.shape)}" for name, h in self._extra.items()]


def _uncompiled(hook: Callable[..., None]) -> Callable[..., None]:
    """Around a compiled ``optimizer.step`` too, a hook runs as written."""
    left_alone: Callable[..., None] = torch.compiler.disable(hook)
    return left_alone


@contextmanager
def _requiring_grad(tensors: Sequence[Tensor]) -> Iterator[None]:
    try:
        for tensor in tensors:
            tensor.requires_grad_()
        yield
    finally:
        for tensor in tensors:
            tensor.requires_grad_(False)


def _is_finite(gradient: Tensor) -> bool:
    return math.isfinite(gradient) if gradient.dim() == 0 else bool(torch.isfinite(gradient).all())


def _plain(value: Tensor) -> Any:
    return float(value) if value.dim() == 0 else value.detach().clone()
