"""How many digits a computation has: to have them all, and to see how many there are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Coarsest(TorchFunctionMode):
    """While entered, sees the largest machine epsilon that anything is computed with, at least that of ``tensors``.

    From outside, nobody can tell: a loss enters autocast, or casts, by itself.

    >>> with Coarsest([torch.ones(2)]) as seen:
    ...     half = torch.ones(2).bfloat16().float()
    >>> seen.epsilon == torch.finfo(torch.bfloat16).eps
    True
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.epsilon = max(torch.finfo(tensor.dtype).eps for tensor in tensors)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple) else (result,):
            if isinstance(one, Tensor) and one.is_floating_point():
                self.epsilon = max(self.epsilon, *(torch.finfo(dtype).eps for dtype in _dtypes(one)))
        return result


def _dtypes(result: Tensor) -> list[torch.dtype]:
    """Its own, and that of autocast: some operations, as linear layers in ``vmap``, cast inside and come out wide."""
    kind = result.device.type
    inside = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return [result.dtype, *([torch.get_autocast_dtype(kind)] if inside else [])]


@contextmanager
def full_precision() -> Iterator[None]:
    """float32 proper: in TF32, a GPU rounds the steps of finite differences away. What the user has set comes back."""
    switches = _precision_switches()
    kept = [getattr(owner, name) for owner, name, _ in switches]
    try:
        for owner, name, value in switches:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), value in zip(switches, kept, strict=True):
            setattr(owner, name, value)


def _precision_switches() -> list[tuple[Any, str, Any]]:
    """Where to write what for full precision. torch has two kinds of switches, and refuses those not in use."""
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    old: list[tuple[Any, str, Any]] = [(cuda, "allow_tf32", False), (cudnn, "allow_tf32", False)]
    try:
        for owner, name, _ in old:
            getattr(owner, name)
    except RuntimeError:
        recent = (cuda, *(getattr(cudnn, kind) for kind in ("conv", "rnn")))
        return [(owner, "fp32_precision", "ieee") for owner in recent]
    return old
