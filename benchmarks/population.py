"""What a start costs when many are trained at once, against one at a time with the `higher` package.

    python benchmarks/population.py [--device cuda] [--replicas 1 10 50 200 2000] [--json PATH]
    python benchmarks/population.py --whole-run --replicas 200 --steps 4000 [--rows 5898 --features 8 --valid-rows 1475]

A regression problem of the size of UCI Energy (made up, but the same every time), an MLP with 50 hidden units, SGD with
momentum and weight decay, all three tuned as in the paper: a hyper step every 10 weight steps, look-back 5, no guard.

`higher`, which the paper's own program is built on, trains one start alone: a differentiable copy of model and
optimizer for the last step of an interval, and one that keeps no graph for the nine before. Before anything is timed,
its hypergradients must be those of `onepass`.

A run begins with preparations (a look at memory, blocks) that are not part of a step: a long and a short run are timed,
and the difference counts. Tuned, untuned and `higher` take turns, so that a busy machine slows all alike; each ratio is
of neighbours, and the median is shown. But it should be idle: where another program wants one of the cores, torch's
threads wait for each other, and 1 ms can become 40 (`--threads 1` suffers less). `--whole-run` times everything, from
making the population to its last step.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onepass

try:
    import higher
except ImportError:
    higher = None

Batch = tuple[Tensor, Tensor]

INTERVAL, LOOKBACK = 10, 5
STARTS = {
    "lr": onepass.LogUniform(1e-6, 1e-1),
    "weight_decay": onepass.LogUniform(1e-7, 1e-2),
    "momentum": onepass.Uniform(0.0, 1.0),
}
BOUNDS = {"lr": (1e-10, 1.0), "weight_decay": (0.0, math.inf), "momentum": (0.0, 1.0)}  # the paper's: of lr alone
TOLERANCE = 1e-6  # of hypergradients in float64

# --- the problem ---


class Problem(NamedTuple):
    train: Batch
    valid: Batch
    device: str
    backend: str
    unroll: int | None = None


def made_up(rows: int, features: int, valid_rows: int, device: str, dtype: torch.dtype, backend: str) -> Problem:
    """A smooth function of normal features and some noise; everything of about unit size."""
    generator = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(rows + valid_rows, n, generator=generator, dtype=torch.float64) for n in (features, 1))
    mix = torch.randn(features, 3, generator=generator, dtype=torch.float64) / math.sqrt(features)
    y = (torch.sin(2 * x @ mix).sum(1, keepdim=True) + 0.1 * noise) / 1.2
    x, y = x.to(device, dtype), y.to(device, dtype)
    return Problem((x[:rows], y[:rows]), (x[rows:], y[rows:]), device, backend)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def hyper_optimizer(raw: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(raw, lr=0.05)


def population(problem: Problem, replicas: int, *, tuned: bool = True) -> onepass.Population:
    features, dtype = problem.train[0].shape[1], problem.train[0].dtype
    return onepass.Population(
        lambda: nn.Sequential(nn.Linear(features, 50, dtype=dtype), nn.ReLU(), nn.Linear(50, 1, dtype=dtype)),
        loss,
        replicas=replicas,
        start=STARTS,
        tune=tuple(STARTS) if tuned else (),
        interval=problem.unroll or INTERVAL,
        unroll=problem.unroll,
        restart=problem.unroll is not None,
        lookback=LOOKBACK,
        through_state=False,
        hyper_optimizer=hyper_optimizer,
        bounds=BOUNDS if tuned else None,
        guard=None,
        device=problem.device,
        backend=problem.backend,
    )


# --- one start at a time ---


class OneStart:
    """A replica of a population, trained and tuned alone with `higher`."""

    def __init__(self, problem: Problem, many: onepass.Population, replica: int) -> None:
        self.problem, self.model = problem, many.model(replica)
        lr, weight_decay, momentum = (many.values()[name][replica].to(problem.device) for name in STARTS)
        self.raw = [raw.requires_grad_() for raw in (lr.log10(), weight_decay.log10(), momentum.logit())]
        self.hyper_optimizer = hyper_optimizer(self.raw)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)  # the values come as `override`

    def interval(self) -> Tensor:
        """Nine plain weight steps, one that is differentiated, and a hyper step; returns the hypergradients."""
        with self._copy(track=False) as (model, optimizer):
            for _ in range(INTERVAL - 1):
                optimizer.step(loss(model, self.problem.train))
            self._keep(model, optimizer)
        with self._copy(track=True) as (model, optimizer):
            before = list(model.parameters())
            after = optimizer.step(loss(model, self.problem.train))
            slope = torch.autograd.grad(loss(model, self.problem.valid), after)
            hypergradients = self._series(before, after, slope)
            self._keep(model, optimizer)
        for raw, hypergradient in zip(self.raw, hypergradients, strict=True):
            raw.grad = hypergradient
        self.hyper_optimizer.step()
        with torch.no_grad():
            self.raw[0].clamp_(*map(math.log10, BOUNDS["lr"]))
        return torch.stack(hypergradients)

    def _series(self, before: list[Tensor], after: list[Tensor], slope: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """``sum_k a (dw1/dw0)^k dw1/draw`` for ``k`` below the look-back; ``a``: the slope of the validation loss."""
        total = list(slope)
        for _ in range(LOOKBACK - 1):
            slope = torch.autograd.grad(after, before, slope, retain_graph=True)
            total = [t + s for t, s in zip(total, slope, strict=True)]
        return torch.autograd.grad(after, self.raw, total)

    def _copy(self, *, track: bool) -> Any:
        lr, weight_decay, momentum = self.raw if track else [raw.detach() for raw in self.raw]
        override = {"lr": [10.0**lr], "weight_decay": [10.0**weight_decay], "momentum": [momentum.sigmoid()]}
        return higher.innerloop_ctx(
            self.model, self.optimizer, copy_initial_weights=True, override=override, track_higher_grads=track
        )

    @torch.no_grad()
    def _keep(self, model: Any, optimizer: Any) -> None:
        """Weights and momentum, without their graph, for the next copy."""
        for i, (kept, new) in enumerate(zip(self.model.parameters(), model.parameters(), strict=True)):
            kept.copy_(new)
            self.optimizer.state[kept] = {k: v.detach() for k, v in optimizer.state[0][i].items()}


def difference(problem: Problem, starts: int = 5, hyper_steps: int = 5) -> float:
    """The largest relative difference between the hypergradients of both, over the first hyper steps."""
    many = population(problem, starts)
    alone = [OneStart(problem, many, r) for r in range(starts)]
    many.run([problem.train], [problem.valid], steps=hyper_steps * INTERVAL)
    ours = torch.stack([many.history.hypergradients[name] for name in STARTS], dim=-1)
    theirs = torch.stack([torch.stack([one.interval() for one in alone]) for _ in range(hyper_steps)])
    return float((ours / theirs.cpu() - 1).abs().max())


# --- measurements ---


def measure(problem: Problem, replicas: int, steps: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds a weight step and start, one number a round."""
    many = {name: population(problem, replicas, tuned=name == "tuned") for name in ("untuned", "tuned")}
    one = OneStart(problem, many["tuned"], 0) if higher else None
    times: dict[str, list[float]] = {"untuned": [], "tuned": [], "higher": []}
    short: dict[str, list[float]] = {"untuned": [], "tuned": []}
    for turn in range(rounds + 1):
        print(f"{replicas} replicas: {turn} of {rounds} rounds\033[K", end="\r", file=sys.stderr, flush=True)
        for name, runs in many.items():
            for found, length in ((short, INTERVAL), (times, INTERVAL + steps)):
                run = partial(runs.run, [problem.train], [problem.valid] if name == "tuned" else None, steps=length)
                found[name].append(_milliseconds(run, problem.device))
        if one is not None:
            times["higher"].append(_milliseconds(one.interval, problem.device, times=steps // INTERVAL) / INTERVAL)
    lost = sum(int(runs.diverged().sum()) for runs in many.values())
    if lost:
        print(f"{lost} of the {2 * replicas} runs of the next line diverged; a CPU computes those no longer")
    for name, first in short.items():
        # The quickest short run: preparations are always the same, and a busy machine only adds to them.
        times[name] = [(ms - min(first)) / steps / replicas for ms in times[name]]
    return {name: values[1:] for name, values in times.items()}  # the first round only warms up


def _milliseconds(work: Callable[[], object], device: str, times: int = 1) -> float:
    synchronise: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronise()
    began = time.perf_counter()
    for _ in range(times):
        work()
    synchronise()
    return 1e3 * (time.perf_counter() - began) / times


def per_step(problem: Problem, args: argparse.Namespace) -> dict[int, Any]:
    print("milliseconds a weight step and start; ratios: median (quartiles)")
    print(_row("replicas", "tuned", "untuned", "tuned / untuned", "`higher`", "`higher` / tuned"), flush=True)
    found = {}
    for replicas in args.replicas:
        steps = INTERVAL if args.quick else min(max(20_000 // replicas, 20), 200) // INTERVAL * INTERVAL
        found[replicas] = times = measure(problem, replicas, steps, 2 if args.quick else args.rounds)
        untuned, tuned, alone = (f"{statistics.median(ms):.3g}" if ms else "-" for ms in times.values())
        ratios = _ratio(times["tuned"], times["untuned"]), _ratio(times["higher"], times["tuned"])
        print(_row(str(replicas), tuned, untuned, ratios[0], alone, ratios[1]), flush=True)
    return found


def whole_runs(problem: Problem, args: argparse.Namespace) -> dict[int, Any]:
    """Seconds of everything but the start of Python: the first time, again in the same process, and its steps alone."""
    found = {}
    for replicas in args.replicas:
        found[replicas] = seconds = {"first": _whole_run(problem, replicas, args.steps)}
        if problem.unroll is None:
            seconds["again"] = _whole_run(problem, replicas, args.steps)
            seconds["steps alone"] = 2 * (seconds["again"] - _whole_run(problem, replicas, args.steps // 2))
        told = ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items())
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"{replicas} replicas, {args.steps} steps: {told}; the process at its largest {peak:.1f} GiB", flush=True)
    return found


def _whole_run(problem: Problem, replicas: int, steps: int) -> float:
    began = time.perf_counter()
    many = population(problem, replicas)
    many.run([problem.train], [problem.valid], steps=steps, progress=True)
    losses = many.evaluate(loss, problem.valid)  # on the CPU, so everything is done
    seconds = time.perf_counter() - began
    print(f"median validation loss {losses.nanmedian():.3g}, {many.diverged().sum()} diverged", flush=True)
    return seconds


def _ratio(over: list[float], under: list[float]) -> str:
    if not over:
        return "-"
    low, middle, high = statistics.quantiles([a / b for a, b in zip(over, under, strict=True)], n=4, method="inclusive")
    return f"{middle:.3g} ({low:.3g} to {high:.3g})"


def _row(*cells: str) -> str:
    return "".join(f"{cell:>{10 if i in (0, 1, 2, 4) else 26}}" for i, cell in enumerate(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--backend", help="of the population; default traced on a CPU, graphs on CUDA")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default %(default)s")
    parser.add_argument("--replicas", nargs="+", type=int, default=[1, 10, 50, 200, 2000])
    for option, default in (("--rows", 614), ("--features", 8), ("--valid-rows", 78), ("--rounds", 5)):
        parser.add_argument(option, type=int, default=default, help="default %(default)s")
    parser.add_argument("--quick", action="store_true", help="hardly any steps: shows only that it works")
    parser.add_argument("--whole-run", action="store_true", help="time a tuned run from end to end instead")
    parser.add_argument("--steps", type=int, default=4000, help="of a whole run (default %(default)s)")
    parser.add_argument("--unroll", action="store_true", help="exact hypergradients through the whole of a whole run")
    parser.add_argument("--json", type=Path, help="where to save the results")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    machine = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine()
    size = args.rows, args.features, args.valid_rows
    backend = args.backend or ("graphs" if args.device == "cuda" else "traced")
    print(f"torch {torch.__version__}, {args.device} ({machine}), {torch.get_num_threads()} threads, {backend}")
    print(f"{size[0]} rows x {size[1]} features, {size[2]} validation rows")
    if higher is None and not args.whole_run:
        print("`higher` is not installed, so that part is left out: pip install higher==0.2.1")
    elif not args.whole_run:
        found = difference(made_up(*size, args.device, torch.float64, backend))
        print(f"hypergradients of both agree to {found:.1g}")
        assert found < TOLERANCE, f"hypergradients must agree to {TOLERANCE:g} for an honest comparison"
    problem = made_up(*size, args.device, torch.float32, backend)
    if args.unroll:
        problem = problem._replace(unroll=args.steps, backend="eager")
    results = (whole_runs if args.whole_run else per_step)(problem, args)
    if args.json:
        about = {
            "torch": torch.__version__,
            "device": args.device,
            "machine": machine,
            "size": size,
            "backend": backend,
        }
        args.json.write_text(json.dumps({**about, "seconds" if args.whole_run else "milliseconds": results}, indent=1))


if __name__ == "__main__":
    main()
