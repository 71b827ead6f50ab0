"""DistributedDataParallel in three small programs: training, a checkpoint for all ranks, a split model.

    python torch/examples/ddp.py [--backend kolo] [--ranks 2] [basic|checkpoint|model_parallel]...
"""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(10, 32)
        self.second = nn.Linear(32, 5)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


class InParts(nn.Module):
    """Its halves live on different devices: two GPUs, or the CPU twice."""

    def __init__(self, devices):
        super().__init__()
        self.devices = devices
        self.first = nn.Linear(10, 32).to(devices[0])
        self.second = nn.Linear(32, 5).to(devices[1])

    def forward(self, x):
        hidden = torch.relu(self.first(x.to(self.devices[0])))
        return self.second(hidden.to(self.devices[1]))


def train_step(model, optimizer):
    """One step on random data, which every rank draws for itself."""
    optimizer.zero_grad()
    outputs = model(torch.randn(20, 10))
    loss = nn.functional.mse_loss(outputs, torch.randn(20, 5).to(outputs.device))
    loss.backward()
    optimizer.step()


def check_same_everywhere(model):
    mine = torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()])
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, mine)
    assert all(torch.equal(mine, other) for other in all_of_them), "the ranks' parameters differ"


def basic(rank):
    model = DistributedDataParallel(Small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(5):
        train_step(model, optimizer)
    check_same_everywhere(model)


def checkpoint(rank):
    model = DistributedDataParallel(Small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    path = [os.path.join(tempfile.mkdtemp(), "small.pt") if rank == 0 else None]
    dist.broadcast_object_list(path, src=0)
    # All ranks have the same parameters, so rank 0 saves them.
    if rank == 0:
        torch.save(model.state_dict(), path[0])
    # No rank reads the file before it is written.
    dist.barrier()
    device = f"cuda:{rank}" if torch.cuda.device_count() > rank else "cpu"
    model.load_state_dict(torch.load(path[0], map_location=device, weights_only=True))
    for _ in range(5):
        train_step(model, optimizer)
    check_same_everywhere(model)
    # All ranks have read the file: the steps above have synchronised them.
    if rank == 0:
        os.remove(path[0])
        os.rmdir(os.path.dirname(path[0]))


def model_parallel(rank):
    devices = ["cpu", "cpu"]
    if torch.cuda.device_count() >= 2 * dist.get_world_size():
        devices = [f"cuda:{2 * rank}", f"cuda:{2 * rank + 1}"]
    # No device_ids: the model places its parts itself.
    model = DistributedDataParallel(InParts(devices))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(5):
        train_step(model, optimizer)
    check_same_everywhere(model)


PROGRAMS = {"basic": basic, "checkpoint": checkpoint, "model_parallel": model_parallel}


def run(rank, world, backend, store, names):
    torch.manual_seed(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    for name in names:
        PROGRAMS[name](rank)
        if rank == 0:
            print(f"{name}: {world} ranks with {backend} have the same parameters", flush=True)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", default=list(PROGRAMS), metavar="program", help=", ".join(PROGRAMS))
    parser.add_argument("--backend", default="kolo")
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (args.ranks, args.backend, os.path.join(folder, "store"), args.programs), nprocs=args.ranks)


if __name__ == "__main__":
    main()
