"""What tuning costs: the time of a tuned training loop over a plain one, and where the difference goes.

    python benchmarks/overhead.py [--device cuda] [--seconds 15] [--json PATH]

Four small networks, and on a GPU the paper's language model; SGD with momentum and weight decay, a hyper step every 10
weight steps. Plain and tuned blocks of 10 steps take turns, so that a busy machine slows both alike; each ratio is of
neighbours, and the median is shown. Plain is as fast as a loop gets without compiling: on a GPU, torch's fused
optimizer and cuDNN.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onepass
from onepass.curvature import CURVATURES, Products
from onepass.estimator import Estimator
from onepass.evaluation import Evaluation
from onepass.linearise import Linearised
from onepass.snapshot import Snapshot
from onepass.whole_run import WholeRun

Batch = tuple[Tensor, Tensor]
Function = Callable[..., Any]

INTERVAL = 10
VOCABULARY = 1000
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "lookback=1": {"lookback": 1},
    "lookback=5 exact": {"lookback": 5, "curvature": "exact"},
    "lookback=5 finite-difference": {"lookback": 5, "curvature": "finite-difference"},
}

# --- the networks ---


class Block(nn.Module):
    """Two convolutions with batch norm around a skip (He et al., 2016)."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = _convolution(before, after, stride)
        self.second = _convolution(after, after, 1)
        self.skip = nn.Identity() if before == after else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.skip(x))


class Recurrent(nn.Module):
    def __init__(self, width: int = 128, words: int = VOCABULARY) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.output = nn.Linear(width, words)

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.output(self.lstm(self.embedding(words))[0])
        return logits


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inwards, self.outwards = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.inwards(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.outwards(mixed.transpose(1, 2).flatten(2))
        return out


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads))
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        out: Tensor = x + self.mlp(x)
        return out


class Transformer(nn.Module):
    def __init__(self, width: int = 128, heads: int = 4, layers: int = 2, length: int = 64) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.output = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places.weight[: words.shape[1]]
        logits: Tensor = self.output(self.layers(x))
        return logits


def _convolution(before: int, after: int, stride: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(before, after, 3, stride, padding=1, bias=False), nn.BatchNorm2d(after))


def resnet() -> nn.Module:
    blocks = Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    return nn.Sequential(_convolution(3, 16, 1), nn.ReLU(), *blocks, *head)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 50), nn.ReLU(), nn.Linear(50, 10))


def images(batch: int, *shape: int) -> Batch:
    return torch.randn(batch, *shape), torch.randint(10, (batch,))


def text(batch: int, length: int) -> Batch:
    words = torch.randint(VOCABULARY, (batch, length + 1))
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "MLP": (mlp, lambda: images(50, 784)),
    "ResNet": (resnet, lambda: images(32, 3, 32, 32)),
    "LSTM": (Recurrent, lambda: text(20, 35)),
    "transformer": (Transformer, lambda: text(16, 64)),
    "LSTM 650": (lambda: Recurrent(650, 10_000), lambda: text(40, 70)),  # the paper's, on Penn Treebank
}
FOR_A_GPU = ("LSTM 650",)

# --- the loop ---


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def still(raw: list[Tensor]) -> torch.optim.Optimizer:
    """The default hyper-optimizer at the default price, but the values stay: every block does the same work."""
    return onepass.optim.SteadyAdam(raw, lr=1e-9)


class Loop:
    """A training loop, tuned or (``variant=None``) plain."""

    def __init__(self, model: nn.Module, batches: list[Batch], variant: dict[str, Any] | None) -> None:
        self.model, self.batches, self.at = copy.deepcopy(model), batches, 0
        for module in self.model.modules():
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()  # a copy's weights lie apart, which cuDNN would repair at every call
        fused = next(self.model.parameters()).is_cuda
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4, fused=fused)
        self.tuner: onepass.Tuner | None = None
        if variant is not None:
            valid = batches[:1]
            self.tuner = onepass.Tuner(
                self.model, self.optimizer, loss, valid, interval=INTERVAL, hyper_optimizer=still, **variant
            )

    def block(self) -> None:
        for _ in range(INTERVAL):
            self.at = (self.at + 1) % len(self.batches)
            batch = self.batches[self.at]
            self.optimizer.zero_grad()
            loss(self.model, batch).backward()
            self.optimizer.step()
            if self.tuner is not None:
                self.tuner.step(batch)

    def undisturbed(self) -> bool:
        """Whether every hyper step did its whole work."""
        assert self.tuner is not None
        return not any(record.guard or record.skipped for record in self.tuner.history)

    def seconds(self, synchronise: Callable[[], None]) -> float:
        synchronise()
        began = time.perf_counter()
        self.block()
        synchronise()
        return time.perf_counter() - began


# --- measurements ---


class Cost(NamedTuple):
    """Of one network: ``plain`` in seconds a step; ratios: median, first and third quartile; parts in plain steps."""

    plain: float
    rounds: int
    ratios: dict[str, tuple[float, float, float]]
    parts: dict[str, dict[str, float]]


def measure(network: str, device: str, seconds: float) -> Cost:
    synchronise = torch.cuda.synchronize if device == "cuda" else lambda: None
    torch.manual_seed(0)
    make_model, make_batch = NETWORKS[network]
    model = make_model().to(device)
    batches = [(x.to(device), y.to(device)) for x, y in (make_batch() for _ in range(4))]
    plain = Loop(model, batches, None)
    tuned = {name: Loop(model, batches, variant) for name, variant in VARIANTS.items()}
    for loop in [plain, *tuned.values()] * 2:  # allocators, cuDNN's choices, the guard's probation
        loop.block()

    steps = [plain.seconds(synchronise)]
    ratios: dict[str, list[float]] = {name: [] for name in tuned}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(steps) < 5 * len(tuned):
        for name, loop in tuned.items():
            # Plain blocks on both sides: a machine that slows down in between tilts neither way.
            between = loop.seconds(synchronise)
            steps.append(plain.seconds(synchronise))
            ratios[name].append(2 * between / (steps[-2] + steps[-1]))
    parts = {name: breakdown(plain, loop, synchronise, seconds / 10) for name, loop in tuned.items()}
    assert all(loop.undisturbed() for loop in tuned.values()), "a guard or a skipped hyper step spoilt the measurement"
    step, rounds = statistics.median(steps) / INTERVAL, len(steps) // len(tuned)
    return Cost(step, rounds, {name: _quartiles(found) for name, found in ratios.items()}, parts)


def breakdown(plain: Loop, tuned: Loop, synchronise: Callable[[], None], seconds: float) -> dict[str, float]:
    """The parts of one hyper step in plain steps: medians over blocks."""
    found: dict[str, list[float]] = {part: [] for part in PARTS}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(found["products"]) < 5:
        step = plain.seconds(synchronise) / INTERVAL
        watch = Stopwatch(synchronise)
        with watched(watch):
            tuned.block()
        for part, values in found.items():
            values.append(watch.seconds[part] / step)
    return {part: statistics.median(values) for part, values in found.items()}


class Stopwatch:
    """Time spent in each part, without the parts inside it."""

    def __init__(self, synchronise: Callable[[], None]) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._synchronise = synchronise
        self._open: list[str] = []
        self._since = 0.0

    def wrap(self, part: str, function: Function) -> Function:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._charge()
            self._open.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._charge()
                self._open.pop()

        return timed

    def _charge(self) -> None:
        """What passed since the last call goes to the innermost open part."""
        self._synchronise()
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now


PARTS: dict[str, list[tuple[type, str]]] = {
    "snapshot": [(Snapshot, "__init__"), (Snapshot, "take_gradients")],
    "validation gradient": [(Evaluation, "validation")],
    "curvature graph": [],  # the table's functions and what they return: see `watched`
    "products": [],
    "rule": [(Linearised, method) for method in ("__init__", "step_back", "to_values")],
    "sensitivities": [(WholeRun, method) for method in ("weights", "carry_on", "agreed")],
    "series, joining, norms": [(Estimator, "hypergradients")],
    "hyper-optimizer and bookkeeping": [(onepass.Tuner, "_move")],
    "guard, random state, rest": [(onepass.Tuner, "step")],
}


@contextmanager
def watched(watch: Stopwatch) -> Iterator[None]:
    """Times the tuner's parts from outside, for as long as the context is open."""
    with ExitStack() as stack:
        for part, methods in PARTS.items():
            for owner, name in methods:
                stack.enter_context(patch.object(owner, name, watch.wrap(part, getattr(owner, name))))
        stack.enter_context(patch.dict(CURVATURES, {name: _watched(watch, c) for name, c in CURVATURES.items()}))
        yield


def _watched(watch: Stopwatch, curvature: Callable[..., Products]) -> Callable[..., Products]:
    def made(*args: Any) -> Products:
        products: Products = watch.wrap("curvature graph", curvature)(*args)
        return products._replace(hessian=watch.wrap("products", products.hessian))

    return made


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, low, high


# --- tables ---


def show(costs: dict[str, Cost]) -> None:
    print(f"\ntime of a tuned loop over a plain loop, a hyper step every {INTERVAL} steps: median (quartiles)")
    print(_row("", "plain step", *VARIANTS, "rounds", width=30))
    for network, cost in costs.items():
        cells = [f"{m:.2f} ({low:.2f} to {high:.2f})" for m, low, high in cost.ratios.values()]
        print(_row(network, f"{1e3 * cost.plain:.2f} ms", *cells, str(cost.rounds), width=30))
    for variant in VARIANTS:
        print(f"\nwhere the rest goes, {variant}: one hyper step, in plain steps")
        print(_row("", *costs))
        for part in PARTS:
            print(_row(part, *(f"{cost.parts[variant][part]:.2f}" for cost in costs.values())))
        print(_row("together", *(f"{sum(cost.parts[variant].values()):.2f}" for cost in costs.values())))


def _row(first: str, *cells: str, width: int = 13) -> str:
    return f"{first:<32}" + "".join(f"{cell:>{width}}" for cell in cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seconds", type=float, default=15.0, help="a network (default %(default)s)")
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), help="by default all, on a CPU the small ones")
    parser.add_argument("--json", type=Path, help="where to save the results")
    args = parser.parse_args()
    machine = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine()
    print(f"torch {torch.__version__}, {args.device} ({machine}), {torch.get_num_threads()} threads")
    every = [name for name in NETWORKS if args.device == "cuda" or name not in FOR_A_GPU]
    costs = {network: measure(network, args.device, args.seconds) for network in args.networks or every}
    show(costs)
    if args.json:
        found = {network: cost._asdict() for network, cost in costs.items()}
        about = {"torch": torch.__version__, "device": args.device, "machine": machine, "interval": INTERVAL}
        about["threads"] = torch.get_num_threads()
        args.json.write_text(json.dumps({**about, "networks": found}, indent=1))


if __name__ == "__main__":
    main()
