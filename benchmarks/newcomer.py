"""The newcomer's check: five small tasks, three optimizers, three learning rates to start from, no setting touched.

    python benchmarks/newcomer.py [TASK ...] [--seeds 3] [--workers 1] [--out DIR] [--json PATH]
    python benchmarks/newcomer.py --tables PATH     the Markdown table of such a JSON

The tuned loop is the README's: torch's optimizer with nothing but `lr` (and `momentum=0.9` for SGD), `Tuner(model,
optimizer, loss, valid_loader)`, `tuner.step(batch)`. It is compared with the best of ten fixed learning rates by
validation loss, 3.2e-5 to 1, same optimizer and number of steps. A seed decides on weights and which rows are which.
Time is that of a tuned step over a plain one of the same optimizer, in turns. What is finished in --out is not computed
again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from beginner_tasks import TASKS, Batch, Loss, Parts, Task
from torch import nn
from trainings import Result, add_arguments, computed, numbers, save, timed

import onepass
from onepass.experiments.writing import Grid, Text, to_markdown

GRID = tuple(10 ** (-4.5 + i / 2) for i in range(10))
STARTS = (1e-6, 1e-3, 1.0)
SHORT = 1.1  # times the metric of the best fixed learning rate

Make = Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    "Adam": lambda parameters, lr: torch.optim.Adam(parameters, lr=lr),
    "AdamW": lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr),
}


def cell(task: str, optimizer: str, seed: int, steps: int) -> Result:
    """All trainings of one task by one optimizer: at fixed learning rates, and tuned."""
    row, make = TASKS[task], OPTIMIZERS[optimizer]
    parts = row.load(seed)
    fixed = [plain_run(row, make, lr, parts, seed, steps) for lr in GRID]
    tuned = [tuned_run(row, make, lr, parts, seed, steps) for lr in STARTS]
    return {"fixed": fixed, "tuned": tuned}


def plain_run(task: Task, make: Make, lr: float, parts: Parts, seed: int, steps: int) -> Result:
    model = new_model(task, seed)
    optimizer = make(model.parameters(), lr)
    for batch in itertools.islice(cycled(task, parts.train), steps):
        plain_step(model, optimizer, task.loss, batch)
    return {"lr": lr, **measured(task, model, parts)}


def tuned_run(task: Task, make: Make, lr: float, parts: Parts, seed: int, steps: int) -> Result:
    model, beside = new_model(task, seed), new_model(task, seed)
    optimizer, plain = make(model.parameters(), lr), make(beside.parameters(), 1e-3)
    tuner = onepass.Tuner(model, optimizer, task.loss, task.batches(parts.valid))
    fed, fed_beside = cycled(task, parts.train), cycled(task, parts.train)

    def step() -> None:
        batch = next(fed)
        plain_step(model, optimizer, task.loss, batch)
        tuner.step(batch)

    seconds, ratio = timed(step, lambda: plain_step(beside, plain, task.loss, next(fed_beside)), steps)
    records = [*tuner.history][:: max(1, len(tuner.history) // 50)]
    told = {
        "end": {name: value[0] for name, value in tuner.values().items()},
        "returns": sum(record.guard is not None for record in tuner.history),
        "steps": [record.step for record in records],
        "path": [record.values["lr"][0] for record in records],
        "valid losses": [record.valid_loss for record in records],
    }
    return {"lr": lr, **measured(task, model, parts), "seconds": seconds, "ratio": ratio, **told}


def new_model(task: Task, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return task.model()


def cycled(task: Task, part: Batch) -> Iterator[Batch]:
    batches = task.batches(part)
    while True:
        yield from batches


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, batch: Batch) -> None:
    optimizer.zero_grad()
    loss(model, batch).backward()
    optimizer.step()


@torch.no_grad()
def measured(task: Task, model: nn.Module, parts: Parts) -> dict[str, float]:
    model.eval()
    lost = not all(bool(weight.isfinite().all()) for weight in model.parameters())
    test = math.nan if lost else float((task.measure or task.loss)(model, parts.test))
    return {"valid": float(task.loss(model, parts.valid)), "test": test}


# --- tables ---


def to_table(cells: list[Result]) -> str:
    """Markdown: one row a task and optimizer."""
    starts = [f"from {lr:.0e}".replace("e-0", "e-").replace("1e+00", "1") for lr in STARTS]
    head = ["task, metric", "optimizer", "best of ten lr", "its lr", *starts, "time"]
    groups: dict[tuple[str, str], list[Result]] = {}
    for one in cells:
        groups.setdefault((one["asked"]["task"], one["asked"]["optimizer"]), []).append(one)
    body = [_row(TASKS[task], optimizer, some) for (task, optimizer), some in groups.items()]
    seeds = " or ".join(str(n) for n in sorted({len(some) for some in groups.values()}))
    note = f"means over seeds, {seeds} of them; bold: more than a tenth worse"
    return to_markdown(Grid("Newcomer's check", note, head, body))


def _row(task: Task, optimizer: str, cells: list[Result]) -> list[Text]:
    chosen = [best_fixed(one["fixed"]) for one in cells]
    by_hand = numbers([one["test"] for one in chosen])
    fields = [Text(f"{task.title}: {task.metric}"), Text(optimizer), _shown(task, by_hand)]
    lrs = sorted({one["lr"] for one in chosen})
    fields.append(Text(" to ".join(f"{lr:.2g}" for lr in dict.fromkeys((lrs[0], lrs[-1])))))
    for i in range(len(STARTS)):
        found = numbers([one["tuned"][i]["test"] for one in cells])
        fields.append(_shown(task, found, falls_short(found, by_hand)))
    ratio = statistics.median(run["ratio"] for one in cells for run in one["tuned"])
    return [*fields, Text(f"x {ratio:.2f}")]


def best_fixed(runs: list[Result]) -> Result:
    """By validation loss."""
    return min(runs, key=lambda run: math.inf if run["valid"] is None or run["test"] is None else run["valid"])


def falls_short(found: list[float], by_hand: list[float]) -> bool:
    """More than a tenth worse on average, or lost for a seed."""
    return not statistics.mean(found) <= SHORT * statistics.mean(by_hand)


def _shown(task: Task, values: list[float], bold: bool = False) -> Text:
    lost = sum(map(math.isnan, values))
    mean = statistics.mean([value for value in values if not math.isnan(value)] or [math.nan])
    return Text(f"{task.shown_times * mean:.3g}" + (f", {lost} lost" if lost else ""), bold)


# --- the command ---


def asked_of(tasks: Iterable[str], seeds: int, steps: int | None) -> dict[str, Any]:
    """File name -> arguments of ``cell``."""
    return {
        f"{task}-{optimizer}-{seed}": {
            "task": task, "optimizer": optimizer, "seed": seed, "steps": steps or TASKS[task].steps,
        }
        for task, optimizer, seed in itertools.product(tasks, OPTIMIZERS, range(seeds))
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(TASKS)}")
    parser.add_argument("--seeds", type=int, default=3)
    add_arguments(parser, out="out/newcomer", workers=1)
    args = parser.parse_args()
    if unknown := set(args.tasks) - set(TASKS):
        parser.error(f"tasks must be among {', '.join(TASKS)}, but got {', '.join(sorted(unknown))}")
    if args.tables is None:
        cells = computed(cell, asked_of(args.tasks or TASKS, args.seeds, args.steps), args.out, args.workers)
    else:
        cells = json.loads(args.tables.read_text())
    print(to_table(cells), end="")
    save(cells, args.json)


if __name__ == "__main__":
    main()
