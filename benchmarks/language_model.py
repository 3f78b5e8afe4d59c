"""A small transformer in bf16: one tuned run from a bad learning rate, against a grid of fixed ones.

    python benchmarks/language_model.py [--device cuda] [--steps 3000] [--json PATH]

The text is Penn Treebank (from $ONEPASS_DATA, or downloaded). Two layers 256 wide, AdamW, windows of 128 words drawn
anew for every batch, autocast to bf16. Seven fixed learning rates, 1e-5 to 1e-2, run first; then the tuner with its
defaults, from 1e-6 and from 1e-1. All begin with the same weights and see the same batches. Plain is as fast as a loop
gets without compiling: torch's fused optimizer, in the tuned runs too.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from overhead import Layer
from torch import Tensor, nn

import onepass
from onepass.experiments.datasets import load

Batch = tuple[Tensor, Tensor]

GRID = (1e-5, 10**-4.5, 1e-4, 10**-3.5, 1e-3, 10**-2.5, 1e-2)
STARTS = (1e-6, 1e-1)
LENGTH = 128


class Text(NamedTuple):
    """Words of each part, on the device."""

    train: Tensor
    valid: Tensor
    test: Tensor


class Transformer(nn.Module):
    """The output is tied to the embedding."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(LENGTH, width)
        nn.init.normal_(self.words.weight, std=width**-0.5)
        self.dropout = nn.Dropout(0.2)
        self.layers = nn.Sequential(*(nn.Sequential(Layer(width, 4), nn.Dropout(0.2)) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, words: Tensor) -> Tensor:
        x = self.layers(self.dropout(self.words(words) + self.places.weight))
        return F.linear(self.norm(x), self.words.weight)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    with torch.autocast(batch[0].device.type, torch.bfloat16):
        scores = model(batch[0])
    return F.cross_entropy(scores.float().flatten(0, 1), batch[1].flatten())


def windows(words: Tensor, size: int, seed: int) -> Iterator[Batch]:
    """Without end, and the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(words) - LENGTH, (size, 1), generator=generator).to(words.device)
        both = words[starts + torch.arange(LENGTH + 1, device=words.device)]
        yield both[:, :-1].contiguous(), both[:, 1:].contiguous()


@torch.no_grad()
def whole(model: nn.Module, words: Tensor, size: int) -> float:
    """The mean loss over a part, in windows side by side; what is left over is dropped."""
    model.eval()
    count = (len(words) - 1) // LENGTH
    inputs, targets = (words[i : i + count * LENGTH].view(count, LENGTH).split(size) for i in (0, 1))
    total = sum(len(x) * float(loss(model, (x, y))) for x, y in zip(inputs, targets, strict=True))
    model.train()
    return total / count


def trained(text: Text, lr: float, args: argparse.Namespace, *, tuned: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Transformer(max(int(part.max()) for part in text) + 1, args.width, args.layers).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    batches, valid = windows(text.train, args.batch, 1), windows(text.valid, args.batch, 2)
    tuner = onepass.Tuner(model, optimizer, loss, valid) if tuned else None
    for step in range(args.steps):
        if step == args.warm_up:
            _finish(args.device)
            began = time.perf_counter()
        batch = next(batches)
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
        if tuner is not None:
            tuner.step(batch)
    _finish(args.device)
    pace = (time.perf_counter() - began) / (args.steps - args.warm_up)
    found = {"lr": lr, "seconds a step": pace, "final lr": optimizer.param_groups[0]["lr"]}
    found |= {part: whole(model, getattr(text, part), args.batch) for part in ("valid", "test")}
    if tuner is not None:
        found |= {"end": tuner.values(), "returns": sum(record.guard is not None for record in tuner.history)}
        found["path"] = [record.values["lr"][0] for record in tuner.history][:: max(1, len(tuner.history) // 50)]
    return found


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--words", type=int, help="of each part of the text, to try it out")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.warm_up = args.steps // 10
    data = load("penn-treebank")
    text = Text(*(part[0][: args.words].to(args.device) for part in (data.train, data.valid, data.test)))

    print(f"{'':8} {'lr':>8} {'ends at':>8} {'valid':>7} {'of best':>8} {'test':>7} {'ms/step':>8} {'x plain':>8}")
    fixed, tuned = [], []
    for lr in GRID:
        fixed.append(trained(text, lr, args, tuned=False))
        _say("fixed", fixed[-1], fixed)
    for lr in STARTS:
        tuned.append(trained(text, lr, args, tuned=True))
        _say("tuned", tuned[-1], fixed)
    if args.json:
        where = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor()
        about = {"torch": torch.__version__, "device": where, **{n: vars(args)[n] for n in ("steps", "batch", "width")}}
        args.json.write_text(json.dumps({**about, "fixed": fixed, "tuned": tuned}, indent=1) + "\n")


def _say(kind: str, run: dict[str, Any], fixed: list[dict[str, Any]]) -> None:
    best = min(one["valid"] for one in fixed)
    plain = statistics.median(one["seconds a step"] for one in fixed)
    above = f"{run['valid'] / best - 1:+.1%}" if kind == "tuned" else ""
    print(
        f"{kind:8} {run['lr']:8.1e} {run['final lr']:8.1e} {run['valid']:7.3f} {above:>8} "
        f"{run['test']:7.3f} {1000 * run['seconds a step']:8.2f} {run['seconds a step'] / plain:8.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
