"""A tuner's arguments, checked when it is made: one clear error each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from onepass.guard import Guard
from onepass.hyperparameters import Hyperparameter


def check_arguments(
    model: Any, optimizer: Any, interval: Any, hyper_optimizer: Any, valid_loss: Any, guard: Any
) -> None:
    """What can be told before anything is looked at more closely."""
    if not isinstance(model, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        got = f"{type(model).__name__} and {type(optimizer).__name__}"
        raise ValueError(f"model and optimizer must be a torch module and a torch optimizer, but got {got}")
    if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
        raise ValueError(f"interval must be an integer of at least 1, but got {interval}")
    if hyper_optimizer is not None and not callable(hyper_optimizer):
        raise ValueError(
            f"hyper_optimizer must be a function from tensors to an optimizer, but got {hyper_optimizer!r}"
        )
    if valid_loss is None and any(group.get("maximize") for group in optimizer.param_groups):
        raise ValueError("valid_loss must be given for an optimizer with maximize=True: the tuner minimises it")
    if guard is not None and not isinstance(guard, Guard):
        raise ValueError(f"guard must be an onepass.Guard or None, but got {guard!r}")


def checked_extra(extra: Mapping[str, Hyperparameter], tunable: Mapping[str, str]) -> dict[str, Hyperparameter]:
    if not isinstance(extra, Mapping):
        raise ValueError(f"extra must map names to hyperparameters, but got {type(extra).__name__}")
    for name, h in extra.items():
        if not isinstance(h, Hyperparameter):
            raise ValueError(f"extra[{name!r}] must be an onepass.Hyperparameter, but got {type(h).__name__}")
        if name in tunable:
            raise ValueError(f"extra must not reuse the optimizer's names, but got {name!r}")
    return dict(extra)
