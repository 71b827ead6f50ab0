"""Measures kolo beside Gloo through PyTorch: all_reduce by size, and a step of DDP with ResNet-18.

    python torch/benchmarks/speed.py [--ranks 2,4] [--rounds 5] [--sizes 4,1K,1M] [--no-ddp]

Both backends take turns in the same processes, so that other load on the machine affects both. The
figures are medians over the rounds, in microseconds, of the time of the slowest rank.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "examples", "imagenet"))

BACKENDS = ["kolo", "gloo"]


def bytes_of(text):
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)


def named(count):
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count // size} {unit}"
    return f"{count} B"


def slowest(seconds, group):
    """Of all ranks."""
    tensor = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group)
    return tensor.item()


def timed(call, count, group):
    dist.barrier(group)
    began = time.perf_counter()
    for _ in range(count):
        call()
    return slowest((time.perf_counter() - began) / count, group)


def all_reduce_of(size, groups, rounds):
    tensor = torch.zeros(max(1, size // 4))
    times = {name: [] for name in BACKENDS}
    for warming in range(rounds + 1):
        for name in BACKENDS:
            # About the same work for every size, and enough calls for the clock.
            count = 2 if warming == 0 else max(3, min(200, 2**24 // max(size, 1) // 64))
            took = timed(lambda: dist.all_reduce(tensor, group=groups[name]), count, groups["kolo"])
            if warming:
                times[name].append(took)
    return times


def ddp_steps(groups, rounds):
    from resnet import resnet18

    torch.manual_seed(0)
    # Buckets are in kolo's shared memory with PyTorch's DDP_DISABLE_COMM_MEM=0, which `main` sets.
    models = {}
    for name in BACKENDS:
        models[name] = torch.nn.parallel.DistributedDataParallel(resnet18(), process_group=groups[name], gradient_as_bucket_view=True)
    images, labels = torch.randn(2, 3, 64, 64), torch.randint(1000, (2,))

    def step(model):
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()

    times = {name: [] for name in [*BACKENDS, "alone"]}
    alone = resnet18()
    for warming in range(rounds + 1):
        for name in times:
            took = timed(lambda: step(models.get(name, alone)), 3, groups["kolo"])
            if warming:
                times[name].append(took)
    return times


def line(what, times):
    medians = {name: statistics.median(values) * 1e6 for name, values in times.items()}
    alone = f"   without communication {medians['alone']:12.1f}" if "alone" in medians else ""
    ratio = medians["gloo"] / medians["kolo"]
    print(f"{what:>16} {medians['kolo']:12.1f} {medians['gloo']:12.1f} {ratio:8.2f}{alone}", flush=True)


def rank_of(rank, world, store, options):
    torch.set_num_threads(1)
    dist.init_process_group("kolo", init_method=f"file://{store}", rank=rank, world_size=world)
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    if rank == 0:
        print(f"\n{world} ranks, PyTorch {torch.__version__}\n{'':>16} {'kolo us':>12} {'gloo us':>12} {'times':>8}", flush=True)
    for size in options.sizes:
        times = all_reduce_of(size, groups, options.rounds)
        if rank == 0:
            line(named(size), times)
    if not options.no_ddp:
        times = ddp_steps(groups, options.rounds)
        if rank == 0:
            line("DDP ResNet-18", times)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default="4,64,1K,4K,16K,64K,256K,1M,4M,16M,64M")
    parser.add_argument("--no-ddp", action="store_true")
    options = parser.parse_args()
    options.sizes = [bytes_of(size) for size in options.sizes.split(",")]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("DDP_DISABLE_COMM_MEM", "0")
    for world in options.ranks.split(","):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(rank_of, (int(world), os.path.join(folder, "store"), options), nprocs=int(world))


if __name__ == "__main__":
    main()
