"""The 8 x 8 digits for `onepass search examples/search_digits.py`: all that it has to know, under agreed names.

python examples/search_digits.py [--steps 1000]      eight starts without and with tuning, as the command would
"""

import sys
import tempfile

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import onepass
from onepass.cli import main

inputs, targets = (torch.tensor(part) for part in load_digits(return_X_y=True))
order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
inputs, targets = inputs[order].float() / 16, targets[order]
train = onepass.Minibatches((inputs[:1200], targets[:1200]), size=100)
valid, test = [(inputs[1200:1500], targets[1200:1500])], [(inputs[1500:], targets[1500:])]


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def metric(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    wrong: Tensor = model(batch[0]).argmax(-1) != batch[1]  # trials are compared by this: the lower the better
    return wrong.float().mean()


if __name__ == "__main__":
    for how in (["--fixed"], []):
        common = ["search", __file__, "--search", "random", "--budget", "8", "--quiet", "--out", tempfile.mkdtemp()]
        main([*common, *how, *sys.argv[1:]])
