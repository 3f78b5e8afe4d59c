"""The Lightning callback gives what a plain loop gives, and feels like Lightning."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data.distributed import DistributedSampler

import onepass
from tests.integrations.loops import (
    CASES,
    RANKS,
    SPREAD,
    Case,
    assert_bit_for_bit,
    assert_same_history,
    assert_same_run,
    loader,
    network,
    on_two_ranks,
    optimizer_of,
    plain,
    settings,
)
from tests.problems import Batch, cross_entropy, digits

L = pytest.importorskip("lightning")
torchmetrics = pytest.importorskip("torchmetrics")

from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint  # noqa: E402
from lightning.pytorch.loggers import CSVLogger  # noqa: E402

from onepass.integrations.lightning import OnePass  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own advice
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)


class Digits(L.LightningModule):  # type: ignore[misc,name-defined]
    def __init__(self, case: Case = CASES["the whole run"]) -> None:
        super().__init__()
        self.net, self.case = network(), case
        self.outputs: list[Tensor] = []
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=10)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        outputs = self.net(batch[0])
        loss = F.cross_entropy(outputs, batch[1])
        self.log("train_loss", loss, on_step=False, on_epoch=True, reduce_fx="sum")
        self.accuracy(outputs, batch[1])
        self.outputs.append(loss.detach())
        return {"loss": loss}

    def validation_step(self, batch: Batch) -> Any:
        self.log("valid_loss", cross_entropy(self.net, batch))

    def configure_optimizers(self) -> Any:
        optimizer = optimizer_of(self, self.case)
        if self.case.schedule is None:
            return optimizer
        return [optimizer], [{"scheduler": self.case.schedule(optimizer), "interval": "step"}]


def trainer(*callbacks: Any, case: Case = CASES["the whole run"], epochs: int = 1, **options: Any) -> Any:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return L.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=list(callbacks),
        gradient_clip_val=case.clip,
        accumulate_grad_batches=case.accumulate,
        precision="bf16-mixed" if case.precision is torch.bfloat16 else "32-true",
        enable_model_summary=False,
        **{**quiet, **options},
    )


def loaders() -> tuple[Any, Any]:
    train, valid, _ = digits()
    return loader(train), loader(valid)


@pytest.mark.parametrize("name", CASES)
def test_same_values_as_a_plain_loop(name: str) -> None:
    case, callback = CASES[name], OnePass(**settings(CASES[name]))
    trainer(callback, case=case).fit(Digits(case), *loaders())
    assert_same_run(callback.tuner, plain(case)[1])


def test_a_step_leaves_no_second_trace() -> None:
    """Whatever a training step logs, counts or keeps is there once a batch, although the tuner calls it more often."""
    module, callback = Digits(), OnePass(interval=1, lookback=2)
    fit = trainer(callback)
    fit.fit(module, *loaders())
    assert callback.tuner is not None
    assert len(callback.tuner.history) == len(module.outputs) == module.accuracy.update_count == 30
    assert float(module.accuracy.tp.sum() + module.accuracy.fn.sum()) == 1200
    assert float(fit.callback_metrics["train_loss"]) == pytest.approx(float(sum(module.outputs)), rel=1e-5)


@pytest.mark.parametrize("name", ["the whole run", "with a scheduler"])
def test_learning_rate_monitor_shows_the_tuned_values(name: str, tmp_path: Path) -> None:
    case, callback = CASES[name], OnePass(interval=1)
    monitor = LearningRateMonitor("step", log_momentum=True)
    module = Digits(case)
    trainer(monitor, callback, case=case, logger=CSVLogger(tmp_path), log_every_n_steps=1).fit(module, *loaders())
    assert callback.tuner is not None
    values = [callback.tuner.history.start, *(record.values for record in callback.tuner.history)]
    assert list(monitor.lrs) == ["lr-SGD"]
    factors = [1 - step / 60 if case.schedule else 1.0 for step in range(30)]
    for shown, value, factor in zip(monitor.lrs["lr-SGD"], values, factors, strict=False):
        assert shown == pytest.approx(value["lr"][0] * factor)
    assert monitor.last_momentum_values["lr-SGD-momentum"] == pytest.approx(values[-2]["momentum"][0])


def test_records_go_to_the_trainer_s_loggers(tmp_path: Path) -> None:
    callback, logger = OnePass(interval=10), CSVLogger(tmp_path)
    trainer(callback, logger=logger, log_every_n_steps=100).fit(Digits(), *loaders())
    assert callback.tuner is not None
    text = (Path(logger.log_dir) / "metrics.csv").read_text()
    assert all(f"onepass/{name}" in text for name in ("lr", "valid_loss", "hypergradient/momentum", "guard"))
    assert str(callback.tuner.history[-1].valid_loss) in text


@pytest.mark.parametrize("name", ["the whole run", "with a scheduler"])
def test_resumed_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Saved after 12 of 30 steps by Lightning's own checkpoints, and resumed by a new trainer."""
    case = CASES[name]

    def run(epochs: int, resume: str | None = None) -> tuple[Digits, OnePass]:
        module, callback = Digits(case), OnePass(**settings(case))
        save = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
        train, valid, _ = digits()
        fit = trainer(callback, save, case=case, epochs=epochs, enable_checkpointing=True)
        fit.fit(module, loader(train, 400), loader(valid), ckpt_path=resume)
        return module, callback

    run(1)
    resumed, first = run(3, str(tmp_path / "epoch=0.ckpt"))
    whole, second = run(3)
    assert_bit_for_bit(first.tuner, second.tuner, resumed, whole)


def test_a_loss_of_one_s_own_and_validation_batches_of_one_s_own() -> None:
    seen = []

    def loss(module: Digits, batch: Batch) -> Tensor:
        seen.append(len(batch[0]))
        return F.cross_entropy(module.net(batch[0]), batch[1], label_smoothing=0.1)

    valid = [digits()[1]]
    callback = OnePass(loss, valid, valid_loss=lambda module, batch: cross_entropy(module.net, batch), interval=5)
    trainer(callback, limit_val_batches=0).fit(Digits(), loaders()[0])
    assert callback.tuner is not None
    assert len(callback.tuner.history) == 6
    assert set(seen) == {40}  # the 300 rows of `valid` are for `valid_loss`


def test_the_loss_of_validation_is_what_validation_step_returns() -> None:
    class Returning(Digits):
        def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:  # type: ignore[override]
            return 7 + cross_entropy(self.net, batch)

    callback = OnePass(interval=5)
    trainer(callback).fit(Returning(), *loaders())
    assert callback.tuner is not None
    assert min(record.valid_loss for record in callback.tuner.history) > 7


def test_validation_that_comes_later() -> None:
    """Only every other epoch, in worker processes that live on, and with no sanity check before."""
    train, valid, _ = digits()
    workers: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*valid), batch_size=40, **workers)
    callback = OnePass(interval=3)
    fit = trainer(callback, epochs=2, check_val_every_n_epoch=2, num_sanity_val_steps=0)
    fit.fit(Digits(), loader(train, 600), batches)
    assert_same_run(callback.tuner, plain_of(600, epochs=2))


def plain_of(rows: int, epochs: int) -> onepass.Tuner:
    train, valid, _ = digits()
    model = network()
    optimizer = optimizer_of(model, Case())
    tuner = onepass.Tuner(model, optimizer, cross_entropy, loader(valid), interval=3)
    for batch in (batch for _ in range(epochs) for batch in loader(train, rows)):
        optimizer.zero_grad()
        cross_entropy(model, batch).backward()
        optimizer.step()
        tuner.step(batch)
    return tuner


def test_one_callback_for_several_fits() -> None:
    callback, module = OnePass(interval=3), Digits()
    for _ in range(2):
        trainer(callback).fit(module, *loaders())
        assert callback.tuner is not None
        assert len(callback.tuner.history) == 10


class Manual(Digits):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Silent(Digits):
    def training_step(self, batch: Batch, batch_idx: int) -> None:
        return None


BAD: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "manual optimization": (Manual, {}, "must have automatic_optimization=True, but the module sets it to False"),
    "no validation data": (Digits, {"limit_val_batches": 0}, "must have validation data, but it has none"),
    "no loss": (Silent, {}, "training_step must return a loss, but got NoneType"),
}


@pytest.mark.parametrize("name", BAD)
def test_misuse_is_told_before_training(name: str) -> None:
    make, options, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        trainer(OnePass(), **options).fit(make(), *loaders())


def train_on_a_rank(folder: Path) -> dict[str, onepass.Tuner | None]:
    whole, first = train_spread(Case(), ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1), epochs=2)
    resumed, second = train_spread(Case(), epochs=2, resume=str(folder / "epoch=0.ckpt"))
    assert_bit_for_bit(first, second, whole, resumed)
    return {name: train_spread(CASES[name])[1] for name in SPREAD}


def train_spread(case: Case, *callbacks: Any, epochs: int = 1, resume: str | None = None) -> Any:
    train, valid, _ = digits()
    rows = 1200 // epochs
    # Of its own, Lightning shuffles.
    order: Any = DistributedSampler(loader(train, rows).dataset, RANKS, int(os.environ["RANK"]), shuffle=False)
    module, callback = Digits(case), OnePass(**settings(case))
    saving = {"enable_checkpointing": bool(callbacks)}
    fit = trainer(callback, *callbacks, case=case, epochs=epochs, strategy="ddp", devices=RANKS, **saving)
    fit.fit(module, loader(train, rows, sampler=order), loader(valid, 240), ckpt_path=resume)
    return module, callback.tuner


def test_same_values_on_two_ranks(tmp_path: Path) -> None:
    for name, history in on_two_ranks(__name__, tmp_path).items():
        assert_same_history(history, plain(CASES[name], valid_rows=240)[1])


def test_processes_that_nothing_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = trainer(OnePass())
    monkeypatch.setattr(L.Trainer, "world_size", 2)
    with pytest.raises(ValueError, match="where 2 processes train it, but SingleDeviceStrategy has given a Digits"):
        fit.fit(Digits(), *loaders())


def test_several_optimizers() -> None:
    class Two(Digits):
        def configure_optimizers(self) -> Any:
            return [optimizer_of(self.net, self.case), optimizer_of(self.net, self.case)]

    with pytest.raises(RuntimeError, match="multiple optimizers is only supported with manual optimization"):
        trainer(OnePass()).fit(Two(), *loaders())


def test_several_validation_loaders() -> None:
    train, valid = loaders()
    with pytest.raises(ValueError, match=r"must have one validation loader, but it has 2; give OnePass\(valid=...\)"):
        trainer(OnePass()).fit(TwoLoaders(), train, [valid, valid])


class TwoLoaders(Digits):
    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:  # type: ignore[override]
        return cross_entropy(self.net, batch)


def test_unknown_setting() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'intervall'"):
        OnePass(intervall=3)


def test_a_compiled_module_is_tuned_by_its_plain_steps() -> None:
    case, callback = CASES["the whole run"], OnePass(**settings(CASES["the whole run"]))

    class Bare(Digits):  # `self.log` does not compile
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            return cross_entropy(self.net, batch)

        def validation_step(self, batch: Batch) -> Tensor:
            return cross_entropy(self.net, batch)

    compiled: Any = torch.compile(Bare(case), backend="aot_eager")  # has no second derivatives
    trainer(callback, case=case).fit(compiled, *loaders())
    assert_same_run(callback.tuner, plain(case)[1])
