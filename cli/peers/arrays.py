"""One rank of pykolo, or of mpi4py: collectives of numpy arrays.

README.md describes the questions and the answers.
"""

import socket
import sys
import time

import numpy

IN_FLIGHT, MESSAGES = 10, 64
# How many operations a call consists of, if not one.
OPERATIONS = {"in_flight": IN_FLIGHT, "ping_pong": 2, "bandwidth": MESSAGES}


class Kolo:
    def __init__(self):
        import pykolo

        comm = pykolo.Communicator.from_env()
        self.rank, self.ranks, self.barrier = comm.rank, comm.world_size, comm.barrier
        self.all_reduce, self.start_all_reduce = comm.all_reduce, comm.start_all_reduce
        self.all_gather, self.all_to_all = comm.all_gather, comm.all_to_all
        self.reduce_scatter, self.broadcast = comm.reduce_scatter, comm.broadcast
        self.send, self.recv, self.start_send, self.start_recv = comm.send, comm.recv, comm.start_send, comm.start_recv
        self.largest = lambda x: comm.all_reduce(x, op="max")
        self.end = comm.close


class Mpi:
    def __init__(self):
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
        self.rank, self.ranks, self.barrier = comm.rank, comm.size, comm.Barrier
        self.all_reduce = lambda x: comm.Allreduce(MPI.IN_PLACE, x)
        self.start_all_reduce = lambda x: comm.Iallreduce(MPI.IN_PLACE, x)
        self.all_gather, self.all_to_all = comm.Allgather, comm.Alltoall
        self.reduce_scatter, self.broadcast = comm.Reduce_scatter_block, comm.Bcast
        self.send, self.recv, self.start_send, self.start_recv = comm.Send, comm.Recv, comm.Isend, comm.Irecv
        self.largest = lambda x: comm.Allreduce(MPI.IN_PLACE, x, MPI.MAX)
        self.end = MPI.Finalize


def compute(steps):
    """Computes for a time in proportion to `steps`."""
    x = 1.0
    for _ in range(steps):
        x = x * 0.5 + 1.0


def ping_pong(comm, send, recv):
    peer = 1 - comm.rank
    if comm.rank == 0:
        comm.send(send, peer)
    comm.recv(recv, peer)
    if comm.rank == 1:
        comm.send(send, peer)


def bandwidth(comm, send, recv, answer):
    start = (lambda: comm.start_send(send, 1)) if comm.rank == 0 else (lambda: comm.start_recv(recv, 0))
    for work in [start() for _ in range(MESSAGES)]:
        work.wait()
    comm.recv(answer, 1) if comm.rank == 0 else comm.send(answer, 0)


def nonblocking(comm, arrays, steps):
    """Reduces all arrays at once, and computes meanwhile."""
    works = [comm.start_all_reduce(array) for array in arrays]
    compute(steps)
    for work in works:
        work.wait()


def main():
    name = sys.argv[1]
    comm = Kolo() if name == "pykolo" else Mpi()
    if len(sys.argv) < 3:
        comm.barrier()
        comm.end()
        return
    stream = socket.socket(socket.AF_UNIX)
    stream.connect(sys.argv[2])
    lines = stream.makefile("rw")
    lines.write(f"{name} {comm.rank}\n")
    lines.flush()
    memory = {}

    def room(what, count):
        if memory.get(what) is None or memory[what].size < count:
            memory[what] = numpy.zeros(max(count, 1), numpy.float32)
        return memory[what][:count]

    for line in lines:
        op, size, warmup, iters, calls = line.split()
        size, warmup, iters, calls = int(size), int(warmup), int(iters), int(calls)
        count = size // 4
        send, recv, answer = room("send", count), room("recv", count), room("answer", 1)
        send_block, recv_block = send[: count // comm.ranks], recv[: count // comm.ranks]
        many = [room(f"many {i}", count) for i in range(IN_FLIGHT)] if op == "in_flight" else []
        steps = 0
        operation = {
            "all_reduce": lambda: comm.all_reduce(recv),
            "barrier": comm.barrier,
            "broadcast": lambda: comm.broadcast(send, 0),
            "all_gather": lambda: comm.all_gather(send_block, recv),
            "reduce_scatter": lambda: comm.reduce_scatter(send, recv_block),
            "all_to_all": lambda: comm.all_to_all(send, recv),
            "in_flight": lambda: nonblocking(comm, many, 0),
            "overlap": lambda: nonblocking(comm, [recv], steps),
            "ping_pong": lambda: ping_pong(comm, send, recv),
            "bandwidth": lambda: bandwidth(comm, send, recv, answer),
        }[op]

        def time_of(calls, call):
            """Returns how many nanoseconds these calls take, after a barrier."""
            comm.barrier()
            began = time.perf_counter_ns()
            for _ in range(calls):
                call()
            return time.perf_counter_ns() - began

        # However often zeros are reduced in place, they stay zeros.
        for array in (send, recv, *many):
            array.fill(0)
        alone = 0
        if op == "overlap":
            # As many steps as take as long as an operation on the slowest rank.
            time_of(warmup * calls, operation)
            each = time_of(calls, operation) / calls
            wanted = numpy.array([each / (time_of(1, lambda: compute(10000)) / 10000)])
            comm.largest(wanted)
            steps = int(wanted[0])
            alone = time_of(calls, lambda: compute(steps))
        times = []
        for i in range(warmup + iters):
            took = time_of(calls, operation)
            if i >= warmup:
                times.append(max(took - alone, 0) // calls // OPERATIONS.get(op, 1))
        lines.write(" ".join(map(str, times)) + "\n")
        lines.flush()
    comm.end()


main()
