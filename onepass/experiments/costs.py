"""What cells will take, before they are computed: time and memory, within a factor of two or so."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from onepass.experiments.methods import METHODS
from onepass.experiments.protocol import PROTOCOLS
from onepass.experiments.runs import Request

MEASURED = (
    "estimates, within a factor of two or so, from what 4000 steps of 200 starts took on one H200 "
    "(docs/results), 200 of 8 there on Penn Treebank, and 300 of 16 on one core of an x86-64 server, torch 2.13"
)
EAGER = 5  # times as long, on a GPU, where steps are not recorded
LAUNCHES = 2.2e-4  # seconds that the small kernels of one recorded step take on a GPU, whatever they do
PREPARATION = 0.4  # seconds of a cell
PROCESS = 0.7 * 2**30  # bytes, before anything is trained
COPIES = 14  # of the weights of each start: themselves, the optimizer's and the tuner's, before and after a step
HIDDEN = 8  # copies of the hidden layer that are alive in a step
WIDTH = 50


class Unit(NamedTuple):
    """One weight step of one start, not tuned.

    Attributes:
        rows: that it sees.
        weights: of the network.
        core, gpu: microseconds on one CPU core and on an H200 that is busy; NaN where nobody has looked.
    """

    rows: int
    weights: int
    core: float
    gpu: float


UNITS: dict[str, Unit] = {
    "uci-boston": Unit(364, 751, 100, 0.5),
    "uci-concrete": Unit(742, 501, 180, 1.7),
    "uci-energy": Unit(614, 501, 150, 1.1),
    "kin8nm": Unit(5898, 501, 1300, 8.0),
    "uci-naval": Unit(8593, 901, 2400, 11.6),
    "uci-power": Unit(6889, 301, 1400, 9.3),
    "uci-wine": Unit(1151, 651, 280, 2.2),
    "uci-yacht": Unit(222, 401, 70, 0.5),
    "fashion-mnist": Unit(50, 39_760, 1200, 8.0),
    "fashion-mnist-batchnorm": Unit(50, 39_860, 1400, 6.0),
    "penn-treebank": Unit(2800, 13_276_000, math.nan, 4800),
    "digits": Unit(50, 3760, 150, 1.0),
    "diabetes": Unit(354, 601, 100, 0.5),
}


class Cost(NamedTuple):
    """NaN seconds: of some of it, nobody knows."""

    cells: int = 0
    seconds: float = 0.0
    bytes: float = 0.0


def steps_of(request: Request) -> float:
    """Weight steps of one start, and what is done beside them, in steps that are not tuned."""
    protocol, row, variant = PROTOCOLS[request.dataset], METHODS[request.method], request.variant
    if row.search is not None:
        budgets = 1 + math.log(max(request.steps, 4), 4)
        return 2 * (budgets if row.search.name == "asha" else request.steps * (row.search.trials or 1))
    interval, through = _hyper_steps(request)
    if row.options.get("tune") == ():
        return request.steps
    exact = row.horizon is not None or "unroll" in row.options
    hyper = 2 + (2.25 if exact else 1.5) * (through - 1)
    once = request.steps * (1 + hyper / interval)
    return protocol.trainings * once if row.again and variant.interval is None else once


def _hyper_steps(request: Request) -> tuple[int, int]:
    """How often, and how far each looks."""
    row, variant = METHODS[request.method], request.variant
    if row.horizon is not None:
        horizon = min(row.horizon, request.steps)
        return horizon, horizon
    interval = variant.interval or row.options.get("interval", 10)
    if row.options.get("estimator") == "product":
        return interval, 1
    return interval, variant.lookback or row.options.get("unroll") or row.options.get("lookback") or 5


def seconds_of(request: Request, device: str) -> float:
    unit, steps = UNITS[request.dataset], steps_of(request)
    if torch.device(device).type == "cuda":
        slow = EAGER if METHODS[request.method].again else 1
        busy = request.replicas * unit.gpu * 1e-6
        return PREPARATION + steps * (slow * max(LAUNCHES, busy) if math.isfinite(busy) else math.nan)
    return PREPARATION + steps * request.replicas * unit.core * 1e-6 / torch.get_num_threads()


def bytes_of(request: Request, device: str) -> float:
    """At its highest. On a CPU, starts are worked on in blocks; a GPU takes all at once."""
    unit, row = UNITS[request.dataset], METHODS[request.method]
    one = 8 if request.variant.double else 4
    window = 2 * _hyper_steps(request)[1] if row.horizon is not None or "unroll" in row.options else 0
    replicas = min(request.replicas, 2000) if row.search else request.replicas
    hidden = HIDDEN * unit.rows * WIDTH * (replicas if torch.device(device).type == "cuda" else 1)
    return PROCESS + one * (replicas * unit.weights * (COPIES + window) + hidden)


def total(requests: Iterable[Request], device: str) -> Cost:
    every = list(requests)
    return Cost(
        len(every),
        sum(seconds_of(request, device) for request in every),
        max((bytes_of(request, device) for request in every), default=0.0),
    )


def plan(wanted: Mapping[str, Sequence[Request]], done: Iterable[Request], device: str) -> list[str]:
    """A line an artefact: what is still to compute, each cell where it is needed first; and all of it."""
    seen, costs = set(done), dict[str, Cost]()
    for name, requests in wanted.items():
        new = [request for request in dict.fromkeys(requests) if request not in seen]
        seen |= {*new}
        costs[name] = total(new, device)
    width = max(map(len, [*costs, "in all"]))
    lines = [f"  {name:{width}}  {_line(cost)}" for name, cost in costs.items()]
    every = [cost for cost in costs.values() if cost.cells]
    if len(every) > 1:
        whole = Cost(sum(c.cells for c in every), sum(c.seconds for c in every), max(c.bytes for c in every))
        lines.append(f"  {'in all':{width}}  {_line(whole)}")
    return [f"to compute ({MEASURED}):", *lines] if every else []


def _line(cost: Cost) -> str:
    if not cost.cells:
        return "nothing more"
    cells = f"{cost.cells} cell{'s' if cost.cells > 1 else ''}"
    return f"{cells:>10}, {_time(cost.seconds)}, up to {cost.bytes / 2**30:.1f} GiB"


def in_short(requests: Sequence[Request]) -> str:
    """Of one artefact at its usual size, for who asks for help.

    >>> in_short([])
    'seconds'
    """
    if not requests:
        return "seconds"
    gpu, cpu = (_time(total(requests, device).seconds).removeprefix("for ") for device in ("cuda", "cpu"))
    return f"{len(requests)} cells: {gpu} on one H200, {cpu} on this CPU"


def _time(seconds: float) -> str:
    """
    >>> _time(8.2), _time(400.0), _time(30_000.0), _time(float("nan"))
    ('about 8 s', 'about 7 min', 'about 8 h', 'for how long is unknown')
    """
    if math.isnan(seconds):
        return "for how long is unknown"
    for unit, name in ((3600, "h"), (60, "min")):
        if seconds >= 1.5 * unit:
            return f"about {seconds / unit:.0f} {name}"
    return f"about {max(1, round(seconds))} s"
