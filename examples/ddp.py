"""Two processes that train one model with DistributedDataParallel, and find the same learning rate on both.

torchrun --standalone --nproc-per-node=2 examples/ddp.py
"""

import argparse
import gc
from datetime import timedelta

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import onepass

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=600)
args = parser.parse_args()

# Should a rank ever be lost, the others wait no longer than this.
distributed.init_process_group("gloo", timeout=timedelta(minutes=2))
rank, count = distributed.get_rank(), distributed.get_world_size()

torch.manual_seed(0)  # the same data on every rank, of which each takes its share
x = torch.rand(600, 2) * 6 - 3
y = (x[:, :1] * 2).sin() * x[:, 1:].cos() + 0.05 * torch.randn(600, 1)
train, valid = (x[rank:400:count], y[rank:400:count]), (x[400 + rank :: count], y[400 + rank :: count])

model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def mean_over_ranks(value: Tensor) -> float:
    distributed.all_reduce(value)
    return value.item() / count


tuner = onepass.Tuner(model, optimizer, loss, [valid])
start = mean_over_ranks(loss(model, valid).detach())
for _ in range(args.steps):
    optimizer.zero_grad()
    loss(model, train).backward()
    optimizer.step()
    tuner.step(train)
end = mean_over_ranks(loss(model, valid).detach())

found: list[dict[str, list[float]]] = [{}] * count
distributed.all_gather_object(found, tuner.values())
assert all(values == found[0] for values in found)
if rank == 0:
    print(f"start: validation loss {start:.4f}, learning rate 1e-06")
    print(f"found: validation loss {end:.4f}, learning rate {found[0]['lr'][0]:.3g} on all {count} ranks")
del tuner, optimizer, model  # gloo may abort at its end if anything still holds on to it
gc.collect()
distributed.destroy_process_group()
