"""A learning rate 1000 times too small, repaired while the network trains.

Two copies of one small network see the same batches of handwritten digits. Both start from the same bad learning rate;
one keeps it, the other has a tuner.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn

import onepass

Batch = tuple[Tensor, Tensor]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=4000, help="weight steps (default %(default)s)")
parser.add_argument("--lr", type=float, default=1e-4, help="the learning rate both start from; about 0.1 is right")
parser.add_argument("--out", type=Path, default=Path("out/digits.png"), help="where the picture goes")
args = parser.parse_args()
torch.manual_seed(0)
torch.set_num_threads(1)  # so small a network gains nothing from more

# 1 797 pictures of 8 x 8 pixels: 1 097 to train on, 350 to tune by, 350 to test on.
digits = load_digits()
order = torch.randperm(len(digits.target))
x, y = torch.tensor(digits.data, dtype=torch.float32)[order] / 16, torch.tensor(digits.target)[order]
train, valid, test = zip(x.split([1097, 350, 350]), y.split([1097, 350, 350]), strict=True)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)


models = {"plain": nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))}
models["tuned"] = copy.deepcopy(models["plain"])
optimizers = {name: optimizer_of(model) for name, model in models.items()}
tuner = onepass.Tuner(models["tuned"], optimizers["tuned"], loss, [valid])
seconds = {"plain": 0.0, "tuned": 0.0}

console = Console()
columns = BarColumn(20), TaskProgressColumn(), TextColumn("{task.description}")
with Progress(*columns, console=console) as progress:
    task = progress.add_task("", total=args.steps)
    for step in range(args.steps):
        rows = torch.randint(len(train[0]), (50,))
        batch = train[0][rows], train[1][rows]
        for name, model in models.items():
            began = time.perf_counter()
            optimizers[name].zero_grad()
            loss(model, batch).backward()
            optimizers[name].step()
            if name == "tuned":
                tuner.step(batch)
            seconds[name] += time.perf_counter() - began
        if step % 50 == 0:
            with torch.no_grad():
                now = {name: float(loss(model, valid)) for name, model in models.items()}
            losses = ", ".join(f"{name} {value:.3f}" for name, value in now.items())
            progress.update(task, description=f"validation loss: {losses}")
        progress.advance(task)

table = Table("", *models, title=f"{args.steps} steps from a learning rate of {args.lr:g}")
with torch.no_grad():
    right = {name: (model(test[0]).argmax(1) == test[1]).float().mean() for name, model in models.items()}
    table.add_row("test accuracy", *(f"{value:.1%}" for value in right.values()))
    table.add_row("test loss", *(f"{loss(model, test):.4f}" for model in models.values()))
for entry in ("lr", "momentum", "weight_decay"):
    table.add_row(f"final {entry}", *(f"{optimizers[name].param_groups[0][entry]:.3g}" for name in models))
table.add_row("seconds", *(f"{value:.1f}" for value in seconds.values()))
console.print(table)

args.out.parent.mkdir(parents=True, exist_ok=True)
tuner.history.plot(args.out)
console.print(f"what the tuner did over time: {args.out}")
