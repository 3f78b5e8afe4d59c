"""Lightning: one object in the list of callbacks repairs a learning rate that is 1000 times too small.

Handwritten digits by a small network, twice from the same start: as it is, and with `OnePass` among the callbacks.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from typing import Any

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

from onepass.integrations.lightning import OnePass

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=2000, help="weight steps (default %(default)s)")
args = parser.parse_args()
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")  # advice on workers

digits = load_digits()
data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
train, valid, test = random_split(data, [1097, 350, 350], torch.Generator().manual_seed(0))
quiet: Any = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
variants: dict[str, list[L.Callback]] = {"plain": [], "tuned": [OnePass()]}


class Digits(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.training_step(batch)

    def test_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.log("test_loss", self.training_step(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4, momentum=0.9, weight_decay=1e-4)


for name, callbacks in variants.items():
    L.seed_everything(0, verbose=False)
    model = Digits()
    trainer = L.Trainer(max_steps=args.steps, callbacks=callbacks, accelerator="cpu", **quiet)
    trainer.fit(model, DataLoader(train, batch_size=50, shuffle=True), DataLoader(valid, batch_size=350))
    (result,) = trainer.test(model, DataLoader(test, batch_size=350), verbose=False)
    print(f"{name}: test loss {result['test_loss']:.3f}, lr {trainer.optimizers[0].param_groups[0]['lr']:.3g}")
