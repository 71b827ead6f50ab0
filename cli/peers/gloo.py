"""One rank of Gloo through PyTorch, or of DeepSpeed's shared memory beside it.

README.md describes the questions and the answers.
"""

import os
import socket
import sys
import time

import torch
import torch.distributed as dist

IN_FLIGHT, MESSAGES = 10, 64
# How many operations a call consists of, if not one.
OPERATIONS = {"in_flight": IN_FLIGHT, "ping_pong": 2, "bandwidth": MESSAGES}


def start(name):
    """Makes the process group. Returns a function that reduces a tensor in place, and a barrier."""
    torch.set_num_threads(1)
    if name != "deepspeed":
        dist.init_process_group("gloo")
        return dist.all_reduce, dist.barrier
    # DeepSpeed shares memory if this says that all ranks are on one host.
    os.environ["LOCAL_SIZE"] = os.environ["WORLD_SIZE"]
    import deepspeed

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    if deepspeed.comm.comm.cdb.shm_vector_kernel_level < 1:
        sys.exit("DeepSpeed has no shared-memory all-reduce for this processor")
    dist.barrier()
    # All ranks have mapped the file by now, and DeepSpeed does not remove it.
    where = [os.environ[variable] for variable in ("MASTER_ADDR", "MASTER_PORT", "RANK")]
    os.unlink(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_{'_'.join(where)}")
    all_reduce, one = torch.ops.deepspeed.inference_all_reduce_, torch.zeros(1)
    # DeepSpeed has no barrier, and ranks leave Gloo's barrier at times that differ too much.
    return all_reduce, lambda: all_reduce(one)


def compute(steps):
    """Computes for a time in proportion to `steps`."""
    x = torch.ones(16)
    for _ in range(steps):
        x.mul_(0.5).add_(1.0)


def ping_pong(rank, send, recv):
    if rank == 0:
        dist.send(send, 1)
    dist.recv(recv, 1 - rank)
    if rank == 1:
        dist.send(send, 0)


def bandwidth(rank, send, recv):
    start = (lambda: dist.isend(send, 1)) if rank == 0 else (lambda: dist.irecv(recv, 0))
    for work in [start() for _ in range(MESSAGES)]:
        work.wait()
    answer = torch.zeros(1)
    dist.recv(answer, 1) if rank == 0 else dist.send(answer, 0)


def nonblocking(tensors, steps):
    """Reduces all tensors at once, and computes meanwhile."""
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    compute(steps)
    for work in works:
        work.wait()


def main():
    name = sys.argv[1]
    all_reduce, barrier = start(name)
    if len(sys.argv) < 3:
        barrier()
        return
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stream = socket.socket(socket.AF_UNIX)
    stream.connect(sys.argv[2])
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
        many = [room(f"many {i}", count) for i in range(IN_FLIGHT)] if op == "in_flight" else []
        steps = 0
        operation = {
            "all_reduce": lambda: all_reduce(recv),
            "barrier": barrier,
            "broadcast": lambda: dist.broadcast(send, 0),
            "all_gather": lambda: dist.all_gather(parts, block),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(recv[: count // ranks], send),
            "all_to_all": lambda: dist.all_to_all_single(recv, send),
            "in_flight": lambda: nonblocking(many, 0),
            "overlap": lambda: nonblocking([recv], steps),
            "ping_pong": lambda: ping_pong(rank, send, recv),
            "bandwidth": lambda: bandwidth(rank, send, recv),
        }[op]

        def time_of(calls, call):
            """Returns how many nanoseconds these calls take, after a barrier."""
            barrier()
            began = time.perf_counter_ns()
            for _ in range(calls):
                call()
            return time.perf_counter_ns() - began

        # However often zeros are reduced in place, they stay zeros.
        for tensor in (send, recv, *many):
            tensor.zero_()
        alone = 0
        if op == "overlap":
            # As many steps as take as long as an operation on the slowest rank.
            time_of(warmup * calls, operation)
            wanted = torch.tensor(time_of(calls, operation) / calls / (time_of(1, lambda: compute(1000)) / 1000))
            dist.all_reduce(wanted, dist.ReduceOp.MAX)
            steps = int(wanted)
            alone = time_of(calls, lambda: compute(steps))
        times = []
        for i in range(warmup + iters):
            took = time_of(calls, operation)
            if i >= warmup:
                times.append(max(took - alone, 0) // calls // OPERATIONS.get(op, 1))
        lines.write(" ".join(map(str, times)) + "\n")
        lines.flush()


main()
