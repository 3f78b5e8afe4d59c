"""Automatic mixed precision: the optimizer's gradient is seen unscaled, and a step left out is not tuned on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import onepass
from tests.problems import Batch, mlp, regression, train_step

Parameters = Any
SCALE, LARGEST = 2.0**12, 2.0**40  # one that fits into float16, and one that overflows


def loss_in(dtype: torch.dtype | None, size: float = 1.0) -> Callable[[Any, Batch], Tensor]:
    def loss(model: Any, batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            outputs = model(batch[0])
        return size * F.mse_loss(outputs.float(), batch[1])

    return loss


def data(seed: int) -> Batch:
    return regression(64, torch.float32, seed)


MAKERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=1e-3, fused=True),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "whole run": {},
    "look-back 1": {"lookback": 1},
    "look-back 5": {"lookback": 5},
    "whole run, finite differences": {"curvature": "finite-difference"},
    "look-back 5, finite differences": {"lookback": 5, "curvature": "finite-difference"},
}


class Run:
    """A loop with a scaler around it, as torch's own recipe has it."""

    def __init__(
        self, maker: str, dtype: torch.dtype | None, scale: float | None, size: float = 1.0, **settings: Any
    ) -> None:
        self.model = mlp(3, 32, 1, dtype=torch.float32)
        self.loss = loss_in(dtype, size)
        self.optimizer = MAKERS[maker](self.model.parameters())
        valid = [data(2), data(3)]
        self.tuner = onepass.Tuner(self.model, self.optimizer, self.loss, valid, **{"interval": 2, **settings})
        self.scaler = torch.amp.GradScaler("cpu", enabled=scale is not None, init_scale=scale or 1.0)
        self.scaler.scale(torch.ones(()))  # without which it has no scale yet that could be set

    def step(self, seed: int, *, clip: float | None = None, unscale: bool = True) -> onepass.TunerStep | None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss(self.model, data(seed))).backward()
        if clip and unscale:
            self.scaler.unscale_(self.optimizer)
        if clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.tuner.step(data(seed))

    def slopes(self, steps: int = 8, **options: Any) -> list[float]:
        records = [self.step(10 + i, **options) for i in range(steps)]
        return [slope for r in records if r for slopes in r.hypergradients.values() for slope in slopes]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize(
    ("dtype", "scale", "close"), [(torch.float16, SCALE, 0.002), (torch.bfloat16, None, 0.02)], ids=["fp16", "bf16"]
)
def test_near_float32(maker: str, settings: str, dtype: torch.dtype, scale: float | None, close: float) -> None:
    found = torch.tensor(Run(maker, dtype, scale, **SETTINGS[settings]).slopes())
    expected = torch.tensor(Run(maker, None, None, **{**SETTINGS[settings], "curvature": "exact"}).slopes())
    close = max(close, 0.03) if "curvature" in SETTINGS[settings] else close
    assert (found - expected).norm() < close * expected.norm()


def test_gradients_too_small_for_float16() -> None:
    """Extra evaluations borrow the scaler's scale: by itself, half of such a gradient would be rounded to zero."""
    slopes = [Run("sgd", dtype, SCALE, size=1e-5).slopes()[0] for dtype in (torch.float16, None)]
    assert slopes[0] == pytest.approx(slopes[1], rel=0.02)


def test_clipped_after_unscaling() -> None:
    slopes = [
        Run("sgd", dtype, scale, lookback=5).slopes(clip=0.1) for dtype, scale in ((torch.float16, SCALE), (None, None))
    ]
    assert slopes[0] == pytest.approx(slopes[1], rel=0.05)


@pytest.mark.parametrize("settings", [{}, {"lookback": 1}, {"lookback": 5}], ids=str)
def test_clipped_before_unscaling_is_told(settings: dict[str, Any]) -> None:
    run = Run("sgd", torch.float16, SCALE, **settings)
    with pytest.raises(ValueError, match=r"must be unscaled before they are clipped.*call scaler\.unscale_"):
        run.slopes(clip=1.0, unscale=False)


@pytest.mark.parametrize("maker", ["sgd", "adamw"])
def test_a_step_left_out_is_as_if_it_had_not_been(maker: str) -> None:
    plain = Run(maker, torch.float16, SCALE)
    expected = plain.slopes()
    run = Run(maker, torch.float16, SCALE)
    found = []
    for i in range(8):
        if i in (0, 3, 4):  # the first of all, one where a hyper step is due, and one where not
            run.scaler.update(LARGEST)
            assert run.step(99) is None
            run.scaler.update(SCALE)
        record = run.step(10 + i)
        if record:
            found += [slope for slopes in record.hypergradients.values() for slope in slopes]
    assert found == expected
    assert run.tuner.values() == plain.tuner.values()
    assert run.tuner.history[-1].step == 8


def test_a_fused_step_that_leaves_itself_out() -> None:
    run = Run("fused adamw", torch.float16, SCALE)
    assert [run.step(10) is None, run.step(11) is None] == [True, False]
    run.step(12)
    run.scaler.update(LARGEST)
    before = run.tuner.values()
    assert run.step(13) is None
    assert run.tuner.values() == before
    run.scaler.update(SCALE)
    record = run.step(14)
    assert record is not None
    assert record.skipped is None


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_put_away_before_the_tuner_is_told(set_to_none: bool) -> None:
    run = Run("sgd", torch.float16, LARGEST)
    run.scaler.scale(run.loss(run.model, data(1))).backward()
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad(set_to_none=set_to_none)
    assert run.tuner.step(data(1)) is None


def test_a_forgotten_step_is_still_told() -> None:
    run = Run("sgd", torch.float16, SCALE)
    run.step(10)
    run.optimizer.zero_grad()
    run.scaler.scale(run.loss(run.model, data(11))).backward()
    with pytest.raises(RuntimeError, match=r"must follow an optimizer\.step"):
        run.tuner.step(data(11))


def test_autocast_around_the_whole_loop() -> None:
    """The tuner evaluates as it is called: inside of autocast, by it."""

    def plain(model: Any, batch: Batch) -> Tensor:
        return F.mse_loss(model(batch[0]).float(), batch[1])

    values = []
    for loss, outside in ((plain, True), (loss_in(torch.bfloat16), False)):
        model = mlp(3, 16, 1, dtype=torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with torch.autocast("cpu", torch.bfloat16, enabled=outside):
            tuner = onepass.Tuner(model, optimizer, loss, [data(2)], interval=1)
            for i in range(4):
                train_step(model, optimizer, data(i), loss)
                tuner.step(data(i))
        values.append(tuner.values()["lr"][0])
    assert values[0] == pytest.approx(values[1], rel=1e-3)


if __name__ == "__main__":  # the table in docs/distributed.md
    print("| | " + " | ".join(MAKERS) + " |")
    for dtype, scale in ((torch.float16, SCALE), (torch.bfloat16, None)):
        for title, settings in SETTINGS.items():
            exact = {**settings, "curvature": "exact"}
            runs = [(Run(m, dtype, scale, **settings), Run(m, None, None, **exact)) for m in MAKERS]
            pairs = [[torch.tensor(run.slopes()) for run in pair] for pair in runs]
            shares = [float((found - expected).norm() / expected.norm()) for found, expected in pairs]
            print(f"| {dtype}, {title} | " + " | ".join(f"{share:.2%}" for share in shares) + " |")
