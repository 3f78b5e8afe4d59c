"""What a study changes about a training: one record, and what it does to data, protocol and method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from onepass.experiments.datasets import Data
from onepass.experiments.methods import Method
from onepass.experiments.protocol import STARTS, Protocol
from onepass.starts import LogUniform

# Other places to begin from.
STILL = {"lr": STARTS["lr"], "weight_decay": STARTS["weight_decay"], "momentum": 0.0}
WIDE = {"lr": LogUniform(1e-6, 10.0), "weight_decay": LogUniform(1e-7, 100.0), "momentum": 0.0}
BEGINNINGS: dict[str, Mapping[str, Any]] = {"without momentum": STILL, "far and wide, without momentum": WIDE}


@dataclass(frozen=True)
class Variant:
    """What is not as usual; whatever is ``None`` is.

    Attributes:
        place: the folder of its cells, under that of all results.
        interval: weight steps a hyper step, ``T``.
        lookback: terms of the series, or steps that exact hypergradients look through, ``i``.
        validation: the share of all rows that are taken for validation; test rows stay.
        start: a name from `BEGINNINGS`.
        double: in double precision, from the same weights.
        ends_alone: only what came of it is wanted, and not the way there.
    """

    place: str = ""
    interval: int | None = None
    lookback: int | None = None
    validation: float | None = None
    start: str | None = None
    double: bool = False
    ends_alone: bool = False

    @property
    def about(self) -> str:
        """For the notes of tables; empty for the usual.

        >>> Variant("validation-size/45-45-10", validation=0.45).about, Variant().about
        ('45 % of all rows for validation', '')
        """
        found = {
            f"T={self.interval}": self.interval,
            f"i={self.lookback}": self.lookback,
            f"{100 * (self.validation or 0):g} % of all rows for validation": self.validation,
            f"starts {self.start}": self.start,
            "in double precision": self.double or None,
        }
        return ", ".join(text for text, value in found.items() if value is not None)


USUAL = Variant()


def varied(variant: Variant, protocol: Protocol, method: Method, data: Data) -> tuple[Protocol, Method, Data]:
    """All three as the study wants them."""
    if variant.validation is not None:
        data = divided(data, variant.validation)
    if variant.start is not None:
        protocol = replace(protocol, start=BEGINNINGS[variant.start])
    if variant.ends_alone:
        protocol = replace(protocol, points=1)
    if variant.double:
        train, valid, test = map(_double, (data.train, data.valid, data.test))
        protocol, data = in_double(protocol), Data(train, valid, test, data.target_scale)
    return protocol, replace(method, options={**method.options, **_tuning(variant, method)}), data


def _tuning(variant: Variant, method: Method) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if variant.interval is not None:
        found["interval"] = variant.interval
    if variant.lookback is not None:
        found["unroll" if "unroll" in method.options else "lookback"] = variant.lookback
    return found


def in_double(protocol: Protocol) -> Protocol:
    """The same models, drawn as before, then in double precision."""
    return replace(protocol, make_model=lambda data: protocol.make_model(data).double())


def _double(part: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in part)


def divided(data: Data, validation: float) -> Data:
    """The rows that are not for test in the same order, the last of them for validation.

    >>> from onepass.experiments.datasets import load
    >>> [len(part[0]) for part in divided(load("diabetes"), 0.45)[:3]]
    [199, 199, 44]
    """
    known = [torch.cat(both) for both in zip(data.train, data.valid, strict=True)]
    rows = round(validation * (len(known[0]) + len(data.test[0])))
    if not 0 < rows < len(known[0]):
        raise ValueError(f"validation must leave rows for both parts, but got {validation} of {len(known[0])} rows")
    train, valid = zip(*(tensor.split([len(tensor) - rows, rows]) for tensor in known), strict=True)
    return data._replace(train=train, valid=valid)
