"""A tuner of prepared objects gives what a plain loop gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

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
from tests.problems import cross_entropy, digits

accelerate = pytest.importorskip("accelerate")

from onepass.integrations.accelerate import AcceleratedTuner  # noqa: E402


@pytest.fixture(autouse=True)
def _fresh_state() -> None:
    """Accelerate keeps its settings for the whole process."""
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


def accelerator_of(case: Case) -> Any:
    accelerate.state.AcceleratorState._reset_state(True)
    precision = "bf16" if case.precision is torch.bfloat16 else "no"
    return accelerate.Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=case.accumulate,
        step_scheduler_with_optimizer=RANKS == 1,  # on two ranks it would go on by two steps at once
    )


def run(
    case: Case,
    *,
    rows: int = 1200,
    epochs: int = 1,
    save: Path | None = None,
    load: Path | None = None,
    late: bool = False,
    shuffle: bool = False,
) -> tuple[nn.Module, AcceleratedTuner]:
    """``late``: the scheduler is made of the prepared optimizer. ``save``: after the first epoch. ``shuffle``: the
    validation data."""
    accelerator = accelerator_of(case)
    train, valid, _ = digits()
    model: Any = network()
    optimizer: Any = optimizer_of(model, case)
    scheduler = case.schedule(optimizer) if case.schedule and not late else None
    model, optimizer, train_loader, valid_loader, scheduler = accelerator.prepare(
        model, optimizer, loader(train, rows), loader(valid, 80, shuffle=shuffle), scheduler
    )
    if case.schedule and late:
        scheduler = accelerator.prepare(case.schedule(optimizer))
    tuner = AcceleratedTuner(accelerator, model, optimizer, cross_entropy, valid_loader, **settings(case))
    if load is not None:
        accelerator.load_state(str(load))
    for epoch in range(1 if load else 0, epochs):
        for batch in train_loader:
            with accelerator.accumulate(model):
                accelerator.backward(cross_entropy(model, batch))
                if accelerator.sync_gradients and case.clip is not None:
                    accelerator.clip_grad_norm_(model.parameters(), case.clip)
                optimizer.step()
                tuner.step(batch)
                if scheduler is not None:
                    scheduler.step()
                optimizer.zero_grad()
        if save is not None and epoch == 0:
            accelerator.save_state(str(save))
    return model, tuner


@pytest.mark.parametrize("name", CASES)
def test_same_values_as_a_plain_loop(name: str) -> None:
    assert_same_run(run(CASES[name])[1], plain(CASES[name], valid_rows=80)[1])


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")
def test_a_scheduler_made_of_the_prepared_optimizer() -> None:
    case = CASES["with a scheduler"]
    assert_same_run(run(case, late=True)[1], plain(case, valid_rows=80)[1])


def test_the_end_of_a_pass_is_noticed() -> None:
    """Accelerate takes a step at the end of a pass, micro-batches left over or not; a validation loader that waits in
    the middle must not hide it."""
    tuner = run(Case({"interval": 1}, accumulate=4), rows=10 * 40, epochs=2)[1]
    assert len(tuner.history) == 6  # after 4, 8 and 10 micro-batches of each pass


@pytest.mark.parametrize("name", ["the whole run", "with a scheduler"])
def test_resumed_bit_for_bit(name: str, tmp_path: Path) -> None:
    whole, first = run(CASES[name], rows=600, epochs=2, save=tmp_path)
    resumed, second = run(CASES[name], rows=600, epochs=2, load=tmp_path)
    assert_bit_for_bit(first, second, whole, resumed)


def test_records_go_to_the_trackers_of_accelerate(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accelerator = accelerate.Accelerator(cpu=True, log_with="tensorboard", project_dir=str(tmp_path))
    accelerator.init_trackers("mine")
    model: Any = network()
    optimizer: Any = optimizer_of(model, Case())
    model, optimizer = accelerator.prepare(model, optimizer)
    tuner = AcceleratedTuner(accelerator, model, optimizer, cross_entropy, [digits()[1]], interval=1)
    tuner.log_to(accelerator)
    accelerator.backward(cross_entropy(model, digits()[1]))
    optimizer.step()
    tuner.step(digits()[1])
    accelerator.end_training()
    events = reader.EventAccumulator(str(tmp_path / "mine")).Reload().Scalars("onepass/lr")
    assert [event.step for event in events] == [0, 1]
    assert events[-1].value == pytest.approx(tuner.values()["lr"][0])


def train_on_a_rank(folder: Path) -> dict[str, AcceleratedTuner]:
    whole, first = run(CASES["the whole run"], rows=600, epochs=2, save=folder / "saved", shuffle=True)
    resumed, second = run(CASES["the whole run"], rows=600, epochs=2, load=folder / "saved", shuffle=True)
    assert_bit_for_bit(first, second, whole, resumed)
    return {name: run(CASES[name])[1] for name in SPREAD}


def test_same_values_on_two_ranks(tmp_path: Path) -> None:
    for name, history in on_two_ranks(__name__, tmp_path).items():
        assert_same_history(history, plain(CASES[name], valid_rows=80)[1])


def test_processes_that_nothing_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, model = accelerator_of(Case()), network()
    monkeypatch.setattr(accelerate.Accelerator, "num_processes", 2)
    with pytest.raises(
        ValueError, match="wrapped in DistributedDataParallel where 2 processes train it, but Accelerate"
    ):
        AcceleratedTuner(accelerator, model, optimizer_of(model, Case()), cross_entropy, [digits()[1]])


def test_misuse() -> None:
    model = network()
    make: Callable[..., Any] = AcceleratedTuner
    with pytest.raises(ValueError, match=r"must be an accelerate.Accelerator, but got Sequential"):
        make(model, optimizer_of(model, Case()), cross_entropy, [digits()[1]], None)
