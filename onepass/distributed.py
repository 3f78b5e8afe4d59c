"""Several processes (*ranks*) that train one model together, each on batches of its own.

Every rank evaluates the losses of its own batches; ``mean`` makes of what they found that of all batches together.
Whatever follows, the guard's verdict included, is then the same on every rank, and so are the hyperparameters.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel


class Ranks:
    """The processes of a group, or this one alone.

    Args:
        group: that they talk in; ``None``: there is nobody to talk to.
        device: that they talk through; not every group can send tensors of every device.
        shards: each has a part of every weight (``fully_shard``), where else it has a copy of all.

    >>> Ranks().mean([torch.tensor(3.0)])
    [tensor(3.)]
    """

    def __init__(self, group: Any = None, device: torch.device | None = None, *, shards: bool = False) -> None:
        self._group, self._device, self.shards = group, device, shards
        self.alone = group is None
        self.size = 1 if self.alone else distributed.get_world_size(group)

    def mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Of what each rank has found on its own batches, as ``DistributedDataParallel`` does."""
        return self._summed(tensors, self.size)

    def total(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Of sums over the weights a rank has. Copies have the same sum: averaged, lest rounding part the ranks."""
        return self._summed(tensors, 1 if self.shards else self.size)

    def _summed(self, tensors: Sequence[Tensor], share: int) -> list[Tensor]:
        """One message for all tensors of a kind."""
        found, kinds = list(tensors), dict[Any, list[int]]()
        for i, tensor in enumerate(() if self.alone else tensors):
            kinds.setdefault((tensor.dtype, tensor.device), []).append(i)
        for (_, device), places in kinds.items():
            flat = torch.cat([tensors[i].detach().reshape(-1) for i in places]).to(self._device)
            with _saying_who_is_missing():
                distributed.all_reduce(flat, group=self._group)
            parts = flat.div_(share).to(device).split([tensors[i].numel() for i in places])
            for i, part in zip(places, parts, strict=True):
                found[i] = part.view(tensors[i].shape)
        return found

    @contextmanager
    def together(self, settings: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
        """What goes wrong here on one rank is an error on all, which would wait for it; settings that differ, too."""
        if self.alone:
            yield
            return
        trouble: Exception | None = None
        try:
            yield
        except Exception as error:
            trouble = error
        everyone = self._gathered((None if trouble is None else str(trouble), dict(settings())))
        if trouble is not None:
            raise trouble
        for rank, (message, _) in enumerate(everyone):
            if message is not None:
                raise ValueError(f"on rank {rank}: {message}")
        check_same([theirs for _, theirs in everyone])

    def _gathered(self, mine: Any) -> list[Any]:
        everyone: list[Any] = [None] * self.size
        # Objects travel through the current GPU, which need not be the model's.
        gpu = self._device if self._device is not None and self._device.type == "cuda" else None
        with _saying_who_is_missing(), torch.cuda.device(gpu) if gpu else nullcontext():
            distributed.all_gather_object(everyone, mine, group=self._group)
        return everyone


def check_same(everyone: Sequence[Mapping[str, Any]]) -> None:
    """The settings of all ranks.

    >>> check_same([{"interval": 10}, {"interval": 5}])
    Traceback (most recent call last):
    ValueError: interval must be the same on all ranks, but got 10 on rank 0 and 5 on rank 1
    """
    for rank, theirs in enumerate(everyone):
        for name, value in theirs.items():
            first = everyone[0].get(name)
            if value != first:
                raise ValueError(
                    f"{name} must be the same on all ranks, but got {first} on rank 0 and {value} on rank {rank}"
                )


def unwrapped(model: nn.Module) -> tuple[nn.Module, Any]:
    """The module inside of ``torch.compile`` and ``DistributedDataParallel``, and the latter's process group.

    ``DistributedDataParallel`` averages in ``.backward()`` alone, and a compiled model has no second derivative, and
    would compile again for other weights: extra evaluations want neither.
    """
    group = None
    while True:
        if isinstance(model, DistributedDataParallel):
            model, group = model.module, model.process_group
        elif (original := getattr(model, "_orig_mod", None)) is not None:
            model = original
        else:
            break
    _refuse_parts(model)
    if group is None and distributed.is_available() and distributed.is_initialized() and _has_a_wrapper(model):
        raise ValueError("model must be the DistributedDataParallel itself, but got the module inside of it")
    return model, group


def check_joined(model: nn.Module, processes: int, made_by: str) -> None:
    """Several processes must be joined by their model, or each would tune values of its own."""
    module, group = unwrapped(model)
    if processes > 1 and group is None and not any(hasattr(p, "to_local") for p in module.parameters()):
        raise ValueError(
            f"model must be wrapped in DistributedDataParallel where {processes} processes train it, but {made_by} has "
            f"given a {type(model).__name__}; take a strategy that wraps it so"
        )


def _refuse_parts(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise ValueError(
                f"model must be wrapped in DistributedDataParallel as a whole, but only its part {name!r} is; "
                "wrap the whole, and hand that to the tuner"
            )
        if type(module).__name__ == "DeepSpeedEngine":
            raise ValueError("model must leave its optimizer to torch, but DeepSpeed makes its own; train without it")
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ValueError(
                "model must be sharded by fully_shard, but it is by FullyShardedDataParallel, its forerunner"
            )


def _has_a_wrapper(model: nn.Module) -> bool:
    """A module does not know what wraps it, hence the search among live objects."""
    return any(
        issubclass(type(thing), DistributedDataParallel) and unwrapped(thing)[0] is model for thing in gc.get_objects()
    )


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; any other as it is. By its method: torch has moved its class about."""
    part = getattr(tensor, "to_local", None)
    if part is None:
        return tensor
    with torch.no_grad():
        shard: Tensor = part()
    return shard


@contextmanager
def _saying_who_is_missing() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            "every rank must take every hyper step, but one of them has ended or is somewhere else: look for its own "
            f"error, and see that all call tuner.step equally often ({str(error).splitlines()[0]})"
        ) from error
