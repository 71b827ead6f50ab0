"""Measures kolo beside Gloo through PyTorch: all_reduce by size, and steps of training.

    python torch/benchmarks/speed.py [--ranks 2,4] [--rounds 5] [--sizes 4,1K,1M] [--no-training]

The steps are those of DDP with ResNet-18, and of DDP and FSDP2 with a transformer. Both backends
take turns in the same processes, so that other load on the machine affects both. The figures are
medians over the rounds, in microseconds, of the time of the slowest rank. For a step, there is also
its time without communication: for DDP that of the bare model, for FSDP2 that with PyTorch's
backend "fake", which does nothing.
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
import torch.testing._internal.distributed.fake_pg  # noqa: F401 (registers the backend "fake")

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "examples", "imagenet"))

BACKENDS = ["kolo", "gloo"]
ALONE = "without communication"
# Calls of a step in each round.
STEPS = 3


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
            # About the same work for every large size, and enough calls that most find warm caches.
            count = 2 if warming == 0 else max(3, min(500, 2**25 // max(size, 1)))
            took = timed(lambda: dist.all_reduce(tensor, group=groups[name]), count, groups["kolo"])
            if warming:
                times[name].append(took)
    return times


def steps_of(models, loss_of, groups, rounds):
    """Times of a step of each model, by the name of its backend."""

    def step(model):
        model.zero_grad()
        loss_of(model).backward()

    times = {name: [] for name in models}
    for warming in range(rounds + 1):
        for name, model in models.items():
            took = timed(lambda: step(model), STEPS, groups["kolo"])
            if warming:
                times[name].append(took)
    return times


def in_ddp(make, groups):
    ddp = torch.nn.parallel.DistributedDataParallel
    models = {name: ddp(make(), process_group=groups[name], gradient_as_bucket_view=True) for name in BACKENDS}
    return {**models, ALONE: make()}


def in_fsdp(make, groups):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    def sharded(group):
        model, mesh = make(), DeviceMesh.from_group(group, "cpu")
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    models = {name: sharded(groups[name]) for name in BACKENDS}
    return {**models, ALONE: sharded(dist.new_group(backend="fake"))}


def transformer():
    """Eight layers of width 256: 25 MB of parameters."""
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)


def training_steps(groups, rounds):
    from resnet import resnet18

    torch.manual_seed(0)
    images, labels = torch.randn(2, 3, 64, 64), torch.randint(1000, (2,))
    tokens = torch.randn(2, 32, 256)

    def on_images(model):
        return torch.nn.functional.cross_entropy(model(images), labels)

    def on_tokens(model):
        return model(tokens).square().mean()

    yield "DDP ResNet-18", steps_of(in_ddp(resnet18, groups), on_images, groups, rounds)
    yield "DDP transformer", steps_of(in_ddp(transformer, groups), on_tokens, groups, rounds)
    if torch.__version__ >= torch.torch_version.TorchVersion("2.6"):
        yield "FSDP2 transformer", steps_of(in_fsdp(transformer, groups), on_tokens, groups, rounds)


def line(what, times):
    medians = {name: statistics.median(values) * 1e6 for name, values in times.items()}
    alone = f"   {ALONE} {medians[ALONE]:12.1f}" if ALONE in medians else ""
    ratio = medians["gloo"] / medians["kolo"]
    print(f"{what:>17} {medians['kolo']:12.1f} {medians['gloo']:12.1f} {ratio:8.2f}{alone}", flush=True)


def rank_of(rank, world, store, options):
    torch.set_num_threads(1)
    dist.init_process_group("kolo", init_method=f"file://{store}", rank=rank, world_size=world)
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    if rank == 0:
        print(f"\n{world} ranks, PyTorch {torch.__version__}\n{'':>17} {'kolo us':>12} {'gloo us':>12} {'times':>8}", flush=True)
    for size in options.sizes:
        times = all_reduce_of(size, groups, options.rounds)
        if rank == 0:
            line(named(size), times)
    if not options.no_training:
        for what, times in training_steps(groups, options.rounds):
            if rank == 0:
                line(what, times)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default="4,64,1K,4K,16K,64K,256K,1M,4M,16M,64M")
    parser.add_argument("--no-training", action="store_true")
    options = parser.parse_args()
    options.sizes = [bytes_of(size) for size in options.sizes.split(",")]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for world in options.ranks.split(","):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(rank_of, (int(world), os.path.join(folder, "store"), options), nprocs=int(world))


if __name__ == "__main__":
    main()
