"""Measures the fused layer beside a product followed by one all-reduce, of kolo and of Gloo.

    python benchmark.py [--ranks 2] [--rounds 31] [--chunks 128,512] [--shapes 2048x1024x1024] [--dtype float32]

A shape is rows x columns of the whole x x columns of y. The variants take turns in the same
processes, so that other load on the machine affects all. A time is that of the slowest rank. The
figures are the median time of "whole", a product and then one all-reduce of kolo, and medians over
the rounds of the time of each variant divided by that of "whole" in the same round.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time


def rank_main(arguments):
    import row_parallel
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dtype = getattr(torch, arguments.dtype)
    with row_parallel.Communicator(timeout=120) as communicator:
        dist.init_process_group(
            "gloo", init_method=f"file://{arguments.folder}/gloo", rank=communicator.rank, world_size=communicator.size
        )

        def slowest(call):
            dist.barrier()
            began = time.perf_counter()
            call()
            took = torch.tensor([time.perf_counter() - began])
            dist.all_reduce(took, dist.ReduceOp.MAX)
            return took.item()

        for shape in arguments.shapes.split(","):
            rows, inputs, outputs = map(int, shape.split("x"))
            torch.manual_seed(communicator.rank)
            part = len(range(inputs)[communicator.part(inputs)])
            x, weight = torch.randn(rows, part).to(dtype), torch.randn(outputs, part).to(dtype)

            variants = {
                "whole": lambda: row_parallel.linear(x, weight, communicator, rows),
                "gloo": lambda: dist.all_reduce(torch.nn.functional.linear(x, weight)),
                "product alone": lambda: torch.nn.functional.linear(x, weight),
                "default chunk": lambda: row_parallel.linear(x, weight, communicator),
            }
            for chunk in map(int, arguments.chunks.split(",")):
                if chunk < rows:
                    variants[f"chunks of {chunk}"] = lambda chunk=chunk: row_parallel.linear(x, weight, communicator, chunk)
            times = {name: [] for name in variants}
            names = list(variants)
            order = random.Random(0)
            for index in range(arguments.rounds + 1):
                # The order affects the times. All ranks shuffle alike.
                for name in order.sample(names, len(names)):
                    took = slowest(variants[name])
                    if index > 0:
                        times[name].append(took)
            if communicator.rank == 0:
                print(f"{shape} {arguments.dtype}, {communicator.size} ranks: whole {statistics.median(times['whole']) * 1e3:.2f} ms")
                for name in names[1:]:
                    ratio = statistics.median(took / whole for took, whole in zip(times[name], times["whole"]))
                    print(f"    {name:16} {ratio:.2f}", flush=True)
        dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--chunks", default="128,256,512,1024")
    parser.add_argument("--shapes", default="2048x1024x1024,4096x512x1024")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder:
        return rank_main(arguments)
    with tempfile.TemporaryDirectory() as folder:
        shared = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "KOLO_WORLD_SIZE": str(arguments.ranks),
            "KOLO_STORE": f"file://{folder}/store",
        }
        command = [sys.executable, __file__, *sys.argv[1:], "--folder", folder]
        ranks = [subprocess.Popen(command, env={**shared, "KOLO_RANK": str(rank)}) for rank in range(arguments.ranks)]
        return max(abs(rank.wait()) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
