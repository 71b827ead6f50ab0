"""Measures all_reduce of tensors on a GPU by a backend of PyTorch: gloo, nccl or kolo.

    python3 cli/peers/device.py gloo --ranks 2 --sizes 8,65536,1048576

It starts its ranks, which share GPUs if there are fewer GPUs. It prints a line of JSON: for each size
in bytes, the median time of the iterations in microseconds. The time of an iteration is that of the
slowest rank. An iteration is several calls, f32, sum, in place, from the first call until the GPU has
completed the last. If the backend cannot run, it prints the reason and ends with status 3.
"""

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
import time

# The calls of one iteration take about this long, in seconds.
ITERATION = 0.02
NOT_RUN = 3
# The first version that allows several ranks on one GPU.
NCCL = (2, 30, 3)


def not_run(why):
    print(f"NOT RUN: {why}", file=sys.stderr)
    sys.exit(NOT_RUN)


def measure(tensor, warmup, iters, seconds):
    import torch
    import torch.distributed as dist

    def iteration(calls):
        torch.cuda.synchronize()
        dist.barrier()
        began = time.perf_counter()
        for _ in range(calls):
            dist.all_reduce(tensor)
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / calls

    def slowest(of_rank):
        everybody_s = torch.tensor([of_rank], dtype=torch.float64, device=tensor.device)
        dist.all_reduce(everybody_s, dist.ReduceOp.MAX)
        return everybody_s.item()

    once = slowest(min(iteration(1) for _ in range(warmup)))
    calls = max(1, min(200, round(ITERATION / once)))
    iters = max(3, min(iters, round(seconds / (once * calls))))
    return statistics.median(slowest(iteration(calls)) for _ in range(iters)) * 1e6


def rank_of(rank, args, folder, answers):
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group(args.backend, f"file://{folder}/store", rank=rank, world_size=args.ranks, timeout=timeout)
    found = {}
    for size in args.sizes:
        tensor = torch.zeros(max(size // 4, 1), device=device)
        found[size] = round(measure(tensor, 3, args.iters, args.seconds), 3)
    if rank == 0:
        answers.put(found)
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("backend", choices=["gloo", "nccl", "kolo"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", type=lambda text: [int(size) for size in text.split(",")], default=[8, 65536, 1 << 20])
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=2, help="of each size, about")
    args = parser.parse_args()
    try:
        import torch
    except ImportError:
        not_run("there is no PyTorch")
    if not torch.cuda.is_available():
        not_run("PyTorch finds no GPU")
    if args.backend == "nccl":
        if not torch.distributed.is_nccl_available():
            not_run("this PyTorch has no NCCL")
        version = torch.cuda.nccl.version()
        if args.ranks > torch.cuda.device_count() and version < NCCL:
            needed, there = (".".join(map(str, each)) for each in (NCCL, version))
            not_run(f"{args.ranks} ranks on {torch.cuda.device_count()} GPU need NCCL {needed}, and this is {there}")
        os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    processes = torch.multiprocessing.get_context("spawn")
    answers = processes.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [processes.Process(target=rank_of, args=(rank, args, folder, answers)) for rank in range(args.ranks)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    if answers.empty() or any(rank.exitcode for rank in ranks):
        sys.exit(f"the ranks ended with {[rank.exitcode for rank in ranks]}")
    print(json.dumps(answers.get()))


if __name__ == "__main__":
    main()
