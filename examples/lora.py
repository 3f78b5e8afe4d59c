"""Fine-tuning a small transformer with LoRA (Hu et al., 2021), from a learning rate 1000 times too small.

It can read digits; the new ones, 200 to train on, are negatives and upside down. `up @ down` adapts each linear layer.
"""

import argparse
import copy

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

import onepass

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=1000)
args = parser.parse_args()


class Adapter(nn.Module):
    def __init__(self, weight: Tensor):
        super().__init__()
        self.down = nn.Parameter(torch.randn(4, weight.shape[1]) / weight.shape[1] ** 0.5)
        self.up = nn.Parameter(torch.zeros(weight.shape[0], 4))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


def loss(model: nn.Module, rows: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(images[rows]), labels[rows])


torch.manual_seed(0)
images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
images = images.float().view(-1, 8, 8) / 16
old, new, valid, test = torch.randperm(1797).split([1000, 200, 200, 397])
layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), 2)
base = nn.Sequential(nn.Linear(8, 32), layers, nn.Flatten(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(base.parameters(), lr=3e-3)
for batch in old[torch.randint(1000, (200, 100))]:
    optimizer.zero_grad()
    loss(base, batch).backward()
    optimizer.step()
images = 1 - images.flip(1)  # here the new task begins
for name, lr in (("plain", 1e-5), ("by hand", 1e-2), ("tuned", 1e-5)):
    model = copy.deepcopy(base).requires_grad_(False)
    for module in [module for module in model.modules() if isinstance(module, nn.Linear)]:
        register_parametrization(module, "weight", Adapter(module.weight))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    tuner = onepass.Tuner(model, optimizer, loss, [valid])
    for batch in new[torch.randint(200, (args.steps, 50))]:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
        if name == "tuned":
            tuner.step(batch)
    print(f"{name}: test loss {loss(model, test):.3f}, lr {optimizer.param_groups[0]['lr']:.2g}")
