"""One pass from random starts, against what a user would pick instead: same network, starts and number of steps.

    python benchmarks/rivals.py [DATASET ...] [--rivals NAME ...] [--seeds 8] [--workers 2] [--out DIR] [--json PATH]
    python benchmarks/rivals.py --tables PATH       the Markdown tables of such a JSON

Everything is as in `onepass run DATASET one-pass`: start r has the weights, hyperparameters and order of batches of
replica r there. Each start is trained alone, in a plain loop on one core. Rivals without hyperparameters differ by
their weights alone. What needs no validation data is trained on training data, and again with validation data added.
Time is relative to plain SGD with momentum, or AdamW, whichever is the next of kin, in turns with the same loop.

The default data sets are those on which the library's defaults were chosen; the others have to be named. What is
finished in --out is not computed again. Rivals whose package is missing are left out, and named:
`pip install 'onepass[benchmarks]'`.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
from contenders import PLAIN, RIVALS, SAMPLES, Batch, Problem, Rival, stepping
from torch import nn
from trainings import Result, add_arguments, computed, numbers, save, timed

import onepass
from onepass.batches import Minibatches
from onepass.experiments import datasets
from onepass.experiments.protocol import PROTOCOLS, STARTS, Protocol, title_of
from onepass.experiments.statistics import summary
from onepass.experiments.tables import number
from onepass.experiments.writing import Grid, Text, to_markdown
from onepass.starts import private_random, seed_of

CHOOSING = ("uci-energy", "uci-boston", "uci-concrete", "uci-yacht", "digits")
DATASETS = (*CHOOSING, "kin8nm", "uci-naval", "uci-power", "uci-wine", "fashion-mnist", "diabetes")
BLOCK = 4  # starts a file

# --- trainings ---


def block(dataset: str, rival: str, part: str, steps: int, seed: int, first: int, count: int) -> Result:
    """So many starts, from the number ``first`` on."""
    protocol, data = PROTOCOLS[dataset], loaded(PROTOCOLS[dataset].data or dataset)
    if part == "all":
        data = data._replace(train=tuple(torch.cat(both) for both in zip(data.train, data.valid, strict=True)))
    row = RIVALS[rival]
    starts = range(first, first + count)
    if row.begin is None:
        found = [random_search(protocol, data, steps, seed_of(seed, "random search", r)) for r in starts]
    else:
        found = [one_start(protocol, data, row, steps, seed, r) for r in starts]
    return {name: [one[name] for one in found] for name in found[0]}


@functools.cache
def loaded(name: str) -> datasets.Data:
    return datasets.load(name)


def one_start(protocol: Protocol, data: datasets.Data, rival: Rival, steps: int, seed: int, start: int) -> Result:
    def problem() -> Problem:
        return Problem(
            new_model(protocol, data, seed, start),
            protocol.loss,
            start_of(seed, start),
            batches(protocol, data.valid, start),
        )

    assert rival.begin is not None
    ours, beside = problem(), problem()
    training = rival.begin(ours)
    plain = stepping(beside, PLAIN[rival.kin](beside.model.parameters()))
    fed, fed_beside = batches(protocol, data.train, start), batches(protocol, data.train, start)
    seconds, ratio = timed(lambda: training.step(next(fed)), lambda: plain(next(fed_beside)), steps)
    training.finish()
    test = measured(protocol, data, ours.model)
    return {"test": test, "seconds": seconds, "ratio": ratio, "values": training.values()}


def random_search(protocol: Protocol, data: datasets.Data, steps: int, seed: int) -> Result:
    """Of fixed values from the starts, the one with the lowest validation loss; trained in one process."""
    population = onepass.Population(
        lambda: protocol.make_model(data), protocol.loss, replicas=SAMPLES, start=STARTS, tune=(), seed=seed
    )
    population.run(protocol.batches(data.train), steps=steps)
    best = int(population.evaluate(protocol.loss, data.valid).nan_to_num(math.inf).argmin())
    values = {name: float(value[best]) for name, value in population.values().items()}
    test = measured(protocol, data, population.model(best))
    return {"test": test, "seconds": math.nan, "ratio": float(SAMPLES), "values": values}


def new_model(protocol: Protocol, data: datasets.Data, seed: int, start: int) -> nn.Module:
    """With the weights of that replica of a ``Population``."""
    with private_random(seed, "weights", start):
        return protocol.make_model(data)


def start_of(seed: int, start: int) -> dict[str, float]:
    """The hyperparameters of that replica."""
    generator = torch.Generator()
    return {n: s.sample(generator.manual_seed(seed_of(seed, n, start))) for n, s in STARTS.items()}


def batches(protocol: Protocol, part: Batch, start: int) -> Iterator[Batch]:
    """Without end, in the order that this replica sees them in."""
    found = protocol.batches(part)
    if not isinstance(found, Minibatches):
        return itertools.cycle(found)
    return (tuple(tensor[0] for tensor in found.at(step, [start])) for step in itertools.count())


@torch.no_grad()
def measured(protocol: Protocol, data: datasets.Data, model: nn.Module) -> float:
    """The test loss in the target's own units; NaN where the training diverged."""
    loss = float((protocol.measure or protocol.loss)(model.eval(), data.test).double()) * data.target_scale**2
    return loss if math.isfinite(loss) and loss <= protocol.lost_above else math.nan


# --- tables ---


def rows_of(blocks: list[Result]) -> list[Result]:
    """One a data set, rival and part, with its starts side by side."""
    found: dict[tuple[str, ...], Result] = {}
    for one in blocks:
        asked = {name: one["asked"][name] for name in ("dataset", "rival", "part", "steps", "seed")}
        lists = {name: value for name, value in one.items() if isinstance(value, list)}
        row = found.setdefault(tuple(map(str, asked.values())), {**asked, "torch": one["torch"]})
        for name, values in lists.items():
            row[name] = [*row.get(name, []), *values]
    return list(found.values())


def to_tables(rows: list[Result]) -> list[str]:
    """Markdown, one table a data set."""
    return [to_markdown(_grid(name, [r for r in rows if r["dataset"] == name])) for name in _names(rows)]


def _names(rows: list[Result]) -> list[str]:
    return list(dict.fromkeys(row["dataset"] for row in rows))


def _grid(dataset: str, rows: list[Result]) -> Grid:
    protocol = PROTOCOLS[dataset]
    times = f" x {protocol.shown_times:,}".replace(",", " ") if protocol.shown_times > 1 else ""
    starts = " or ".join(str(n) for n in sorted({len(row["test"]) for row in rows}))
    head = ["", "median", "mean", "95th percentile", "diverged", "time"]
    body = [_row(row, protocol.shown_times) for row in rows]
    note = f"{starts} starts x {rows[0]['steps']} steps"
    return Grid(f"{title_of(dataset)}: {protocol.metric}{times}", note, head, body)


def _row(row: Result, times: int) -> list[Text]:
    losses = times * np.array(numbers(row["test"]))
    found, finite = summary(losses), losses[np.isfinite(losses)]
    high = float(np.percentile(finite, 95)) if len(finite) else math.nan
    shown = [number(found.median, found.median_se), number(found.mean, found.mean_se), number(high, math.nan)]
    shown += [f"{found.diverged} of {found.starts}", f"x {np.median(row['ratio']):.2g}"]
    title = RIVALS[row["rival"]].title + (", on all" if row["part"] == "all" else "")
    return [Text(title), *map(Text, shown)]


# --- the command ---


def asked_of(args: argparse.Namespace, names: list[str]) -> dict[str, Result]:
    """File name -> arguments of ``block``."""
    found: dict[str, Result] = {}
    for dataset, name in itertools.product(args.datasets or CHOOSING, names):
        for part in ("training",) if RIVALS[name].validates else ("training", "all"):
            for first in range(0, args.seeds, BLOCK):
                which = {"dataset": dataset, "rival": name, "part": part, "steps": args.steps}
                which["steps"] = args.steps or PROTOCOLS[dataset].steps
                count = min(BLOCK, args.seeds - first)
                file = f"{dataset}/{name}-{part}-{first}-{first + count - 1}"
                found[file] = {**which, "seed": args.seed, "first": first, "count": count}
    return found


def present(names: Iterable[str], table: Mapping[str, Rival] = RIVALS) -> list[str]:
    """Those whose package is installed; of the others, a word."""
    missing = {n: p for n in names if (p := table[n].package) is not None and importlib.util.find_spec(p) is None}
    for name, package in missing.items():
        print(f"{name} is left out: it needs the package {package}", file=sys.stderr)
    return [name for name in names if name not in missing]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="*", metavar="DATASET", help=f"of {', '.join(DATASETS)}")
    parser.add_argument("--rivals", nargs="*", choices=RIVALS, metavar="NAME", help=f"of {', '.join(RIVALS)}")
    parser.add_argument("--seeds", type=int, default=8, help="starts of each")
    parser.add_argument("--seed", type=int, default=0, help="as of `onepass run`")
    add_arguments(parser, out="out/rivals", workers=2)
    args = parser.parse_args()
    if unknown := set(args.datasets) - set(DATASETS):
        parser.error(f"data sets must be among {', '.join(DATASETS)}, but got {', '.join(sorted(unknown))}")
    if args.tables is None:
        asked = asked_of(args, present(args.rivals or RIVALS))
        rows = rows_of(computed(block, asked, args.out, args.workers))
    else:
        rows = json.loads(args.tables.read_text())
    print("\n".join(to_tables(rows)), end="")
    save(rows, args.json)


if __name__ == "__main__":
    main()
