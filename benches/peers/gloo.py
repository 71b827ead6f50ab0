"""One rank of Gloo, as PyTorch uses it, in a comparison; see README.md for how it is asked and what it answers."""

import os
import socket
import sys
import time

import torch
import torch.distributed as dist


def main():
    path, name = sys.argv[1:3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stream = socket.socket(socket.AF_UNIX)
    stream.connect(path)
    lines = stream.makefile("rw")
    lines.write(f"{name} {rank}\n")
    lines.flush()
    memory = {}

    def room(what, count):
        if memory.get(what) is None or memory[what].numel() < count:
            memory[what] = torch.zeros(max(count, 1))
        return memory[what][:count]

    for line in lines:
        op, size, warmup, iters, calls = line.split()
        size, warmup, iters, calls = int(size), int(warmup), int(iters), int(calls)
        count = size // 4
        send, recv = room("send", count), room("recv", count)
        parts = list(recv.chunk(ranks)) if count >= ranks else [recv] * ranks
        block = send[: count // ranks]
        operation = {
            "all_reduce": lambda: dist.all_reduce(recv),
            "barrier": lambda: dist.barrier(),
            "broadcast": lambda: dist.broadcast(send, 0),
            "all_gather": lambda: dist.all_gather(parts, block),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(recv[: count // ranks], send),
            "all_to_all": lambda: dist.all_to_all_single(recv, send),
        }[op]
        filled = recv if op == "all_reduce" else send
        times = []
        for i in range(warmup + iters):
            # Written anew, so that no call finds its data where the last one left it.
            filled.zero_()
            dist.barrier()
            began = time.perf_counter_ns()
            for _ in range(calls):
                operation()
            if i >= warmup:
                times.append((time.perf_counter_ns() - began) // calls)
        lines.write(" ".join(map(str, times)) + "\n")
        lines.flush()


main()
