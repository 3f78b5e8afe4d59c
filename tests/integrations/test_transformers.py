"""The callback for Hugging Face's Trainer gives what a plain loop gives, and feels like Transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.integrations.loops import (
    BATCH,
    CASES,
    Case,
    assert_bit_for_bit,
    assert_same_history,
    assert_same_run,
    network,
    on_two_ranks,
    optimizer_of,
    plain,
    settings,
)
from tests.problems import Batch, digits

transformers = pytest.importorskip("transformers")

from onepass.integrations.transformers import OnePassCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # the Trainer's own advice


class Digits(nn.Module):
    """As models in Transformers: inputs by name, a loss where there are labels."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net, self.dropout = network(), dropout

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = F.dropout(self.net(pixels), self.dropout, self.training)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def dataset(data: Batch) -> list[dict[str, Tensor]]:
    return [{"pixels": pixels, "labels": label} for pixels, label in zip(*data, strict=True)]


def arguments(out: Path, case: Case = CASES["the whole run"], **options: Any) -> Any:
    usual: dict[str, Any] = {"num_train_epochs": 1, "save_strategy": "no", "train_sampling_strategy": "sequential"}
    usual["per_device_train_batch_size"] = BATCH
    return transformers.TrainingArguments(
        str(out),
        per_device_eval_batch_size=BATCH,
        gradient_accumulation_steps=case.accumulate,
        max_grad_norm=case.clip or 0.0,
        bf16=case.precision is torch.bfloat16,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **{**usual, **options},
    )


def trainer(callback: Any, args: Any, model: nn.Module | None = None, case: Case | None = None, **options: Any) -> Any:
    train, valid, _ = digits()
    model = model or Digits()
    if case is not None:
        optimizer = optimizer_of(model, case)
        schedule = case.schedule or (lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1.0))
        options["optimizers"] = optimizer, schedule(optimizer)
    data = {"train_dataset": dataset(train), "eval_dataset": dataset(valid)}
    return transformers.Trainer(model, args, callbacks=[callback], **{**data, **options})


@pytest.mark.parametrize("name", CASES)
def test_same_values_as_a_plain_loop(name: str, tmp_path: Path) -> None:
    case, callback = CASES[name], OnePassCallback(**settings(CASES[name]))
    trainer(callback, arguments(tmp_path, case), case=case).train()
    assert_same_run(callback.tuner, plain(case)[1])


def test_as_it_comes(tmp_path: Path) -> None:
    """AdamW in two groups, clipping and linear decay, which are what a Trainer does unless told otherwise; its logs
    have the learning rate that the steps really took, and the values before the decay."""
    callback = OnePassCallback(interval=5)
    args = arguments(tmp_path, Case(clip=1.0), learning_rate=1e-3, logging_steps=5)
    run = trainer(callback, args)
    run.train()
    assert callback.tuner is not None
    logs = [log for log in run.state.log_history if "loss" in log]
    records = list(callback.tuner.history)
    assert [log["step"] for log in logs] == [record.step for record in records] == [5, 10, 15, 20, 25, 30]
    used = [callback.tuner.history.start["lr"][0], *(record.values["lr"][0] for record in records)]
    for log, record, lr in zip(logs, records, used, strict=False):
        assert log["learning_rate"] == pytest.approx(lr * (1 - (log["step"] - 1) / 30))
        assert log["onepass/lr/0"] == record.values["lr"][0]
        assert log["onepass/valid_loss"] == record.valid_loss
    assert used[-1] > 1.5 * used[0]


@pytest.mark.parametrize("step", [15, 18])
def test_resumed_bit_for_bit(step: int, tmp_path: Path) -> None:
    """At the end of an epoch and within one, with dropout and shuffling."""

    def run(steps: int, resume: bool) -> tuple[nn.Module, OnePassCallback]:
        torch.manual_seed(0)
        model, callback = Digits(dropout=0.1), OnePassCallback(interval=4)
        saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": step, "train_sampling_strategy": "random"}
        args = arguments(tmp_path, learning_rate=1e-3, num_train_epochs=2, **saving)
        options: dict[str, Any] = {"train_dataset": dataset((digits()[0][0][:600], digits()[0][1][:600]))}
        interrupted = [Interrupt(steps)] if steps < 30 else []
        fit = trainer(callback, args, model, **options)
        for other in interrupted:
            fit.add_callback(other)
        fit.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}") if resume else None)
        return model, callback

    whole, first = run(30, resume=False)
    run(step + 2, resume=False)
    resumed, second = run(30, resume=True)
    assert_bit_for_bit(first.tuner, second.tuner, whole, resumed)


class Interrupt(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def test_checkpoints_that_have_moved(tmp_path: Path) -> None:
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 15, "learning_rate": 1e-3}
    trainer(OnePassCallback(interval=3), arguments(tmp_path / "a", **saving)).train()
    moved = (tmp_path / "a" / "checkpoint-15").rename(tmp_path / "moved")
    again = arguments(tmp_path / "b", **saving)
    with pytest.raises(ValueError, match=r"resumes at step 15, but there is no .*; give OnePassCallback\(resume_from="):
        trainer(OnePassCallback(interval=3), again).train(resume_from_checkpoint=str(moved))
    wrong = OnePassCallback(interval=3, resume_from=tmp_path / "a" / "checkpoint-30")
    with pytest.raises(ValueError, match="must belong to the checkpoint that the run resumes from"):
        trainer(wrong, again).train(resume_from_checkpoint=str(moved))
    callback = OnePassCallback(interval=3, resume_from=moved)
    trainer(callback, again).train(resume_from_checkpoint=str(moved))
    assert callback.tuner is not None
    assert callback.tuner.history[-1].step == 30


def test_the_trainer_s_own_loss(tmp_path: Path) -> None:
    """Label smoothing takes the labels out of the model's hands; a subclass may do anything."""

    class Doubled(transformers.Trainer):  # type: ignore[misc,name-defined]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().compute_loss(*args, **kwargs)

    model, callback = Digits(), OnePassCallback(interval=10, tune=("lr",))
    model.config = transformers.PretrainedConfig()  # the Trainer looks into it before it smooths
    data = {"train_dataset": dataset(digits()[0]), "eval_dataset": dataset(digits()[1])}
    Doubled(model, arguments(tmp_path, label_smoothing_factor=0.1), callbacks=[callback], **data).train()
    assert callback.tuner is not None
    pixels, labels = (part[80:120] for part in digits()[1])  # of the third record
    now = 2 * F.cross_entropy(model.net(pixels), labels, label_smoothing=0.1)
    assert callback.tuner.history[-1].valid_loss == pytest.approx(float(now.detach()), rel=1e-5)


def test_a_loss_and_batches_of_one_s_own(tmp_path: Path) -> None:
    pixels, labels = digits()[1]
    valid = [{"pixels": pixels, "labels": labels}]

    def loss(model: nn.Module, inputs: Any) -> Any:
        return 5 + model(**inputs)["loss"]

    callback = OnePassCallback(loss, valid, interval=10)
    trainer(callback, arguments(tmp_path), eval_dataset=None).train()
    assert callback.tuner is not None
    assert min(record.valid_loss for record in callback.tuner.history) > 5


def test_a_language_model(tmp_path: Path) -> None:
    """A model of Transformers itself, whose loss counts tokens: two micro-batches of different lengths a step."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 16, (64, 12))]
    for row in rows[::2]:
        row["labels"] = row["labels"].masked_fill(torch.arange(12) > 5, -100)
    callback = OnePassCallback(interval=2, lookback=2)
    args = arguments(tmp_path, Case(accumulate=2), learning_rate=1e-4, per_device_train_batch_size=4)
    run = trainer(callback, args, transformers.GPT2LMHeadModel(config), train_dataset=rows, eval_dataset=rows[:8])
    run.train()
    assert callback.tuner is not None
    assert len(callback.tuner.history) == 4
    assert callback.tuner.values()["lr"][0] > 1.2e-4


def test_one_callback_for_several_trainings(tmp_path: Path) -> None:
    callback = OnePassCallback(interval=3)
    for _ in range(2):
        run = trainer(callback, arguments(tmp_path))
        run.train()
        assert callback.tuner is not None
        assert len(callback.tuner.history) == 10
        assert run.evaluate()["eval_loss"] > 0


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no evaluation data": ({"eval_dataset": None}, "must have validation data, but it has no eval_dataset"),
    "several": ({"eval_dataset": {"a": [], "b": []}}, r"must have one eval_dataset, but it has \['a', 'b'\]"),
}


@pytest.mark.parametrize("name", BAD)
def test_misuse_is_told_before_training(name: str, tmp_path: Path) -> None:
    options, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        trainer(OnePassCallback(), arguments(tmp_path), **options).train()


def train_on_a_rank(folder: Path) -> dict[str, Any]:
    whole, first = train_spread(Case(), arguments(folder, save_strategy="steps", save_steps=15))
    resumed, second = train_spread(Case(), arguments(folder), resume=str(folder / "checkpoint-15"))
    assert_bit_for_bit(first, second, whole, resumed)
    found = {
        name: train_spread(CASES[name], arguments(folder, CASES[name]))[1]
        for name in ("the paper's series", "accumulated")
    }
    return {**found, "counted": train_counted(folder)}


def train_spread(case: Case, args: Any, resume: str | None = None) -> Any:
    valid = dataset((digits()[1][0][:240], digits()[1][1][:240]))
    model, callback = Digits(), OnePassCallback(**settings(case))
    trainer(callback, args, model, case, eval_dataset=valid).train(resume_from_checkpoint=resume)
    return model, callback.tuner


class Counting(Digits):
    """A mean over labels that count, as language models take it: over those of all ranks, of which each has others."""

    def forward(self, pixels: Tensor, labels: Tensor, **kwargs: Any) -> dict[str, Tensor]:  # type: ignore[override]
        losses = F.cross_entropy(self.net(pixels), labels, reduction="sum")
        return {"loss": losses / kwargs["num_items_in_batch"]}


def train_counted(folder: Path) -> Any:
    case = CASES["with a scheduler"]
    ignored = torch.arange(1200) % 40 < 15  # all on the first of two ranks
    train, valid = (
        (x[:n], y[:n].masked_fill(ignored[:n], -100)) for (x, y), n in zip(digits(), (1200, 240), strict=False)
    )
    callback, data = OnePassCallback(interval=3), {"train_dataset": dataset(train), "eval_dataset": dataset(valid)}
    trainer(callback, arguments(folder), Counting(), case, **data).train()
    return callback.tuner


def test_same_values_on_two_ranks(tmp_path: Path) -> None:
    found = on_two_ranks(__name__, tmp_path)
    assert_same_history(found.pop("counted"), train_counted(tmp_path))
    for name, history in found.items():
        assert_same_history(history, plain(CASES[name], valid_rows=240)[1])


def test_processes_that_nothing_joins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer(OnePassCallback(), arguments(tmp_path))
    monkeypatch.setattr(transformers.TrainingArguments, "world_size", 2)
    with pytest.raises(ValueError, match="where 2 processes train it, but the Trainer has given a Digits"):
        run.train()


def test_several_gpus_in_one_process(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    args._n_gpu = 2
    with pytest.raises(ValueError, match=r"one process a GPU, but got one for 2 .* torchrun --nproc-per-node=2"):
        trainer(OnePassCallback(), args).train()


def test_unknown_setting() -> None:
    make: Callable[..., Any] = OnePassCallback
    with pytest.raises(TypeError, match="unexpected keyword argument 'intervall'"):
        make(intervall=3)
