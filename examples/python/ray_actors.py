"""kolo as a backend of ray.util.collective: actors of Ray are ranks.

    python ray_actors.py [RANKS]

Ray's collectives take arrays of numpy and PyTorch. Each process registers the backend, which has the
name KOLO.
"""

import sys
import time

import numpy as np
import pykolo
import ray
from ray.experimental import internal_kv
from ray.util import collective
from ray.util.collective.backend_registry import register_collective_backend
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from ray.util.collective.types import ReduceOp

OPS = {ReduceOp.SUM: "sum", ReduceOp.PRODUCT: "product", ReduceOp.MIN: "min", ReduceOp.MAX: "max"}
START_TIMEOUT = 60


class KoloGroup(BaseGroup):
    """A group of Ray. Each call has lists of arrays, of which there is one on the CPU."""

    def __init__(self, world_size, rank, group_name):
        super().__init__(world_size, rank, group_name)
        # Rank 0 makes an id, which has its address and a secret of this group. Ray passes it on.
        key = f"kolo group {group_name}"
        if rank == 0:
            internal_kv._internal_kv_put(key, pykolo.unique_id(), overwrite=True)
        try:
            given = self._wait_for(key)
            self.comm = pykolo.Communicator(rank=rank, world_size=world_size, store=given, start_timeout=START_TIMEOUT)
        finally:
            if rank == 0:
                internal_kv._internal_kv_del(key)

    @staticmethod
    def _wait_for(key):
        until = time.monotonic() + START_TIMEOUT
        while (value := internal_kv._internal_kv_get(key)) is None:
            if time.monotonic() > until:
                raise TimeoutError(f"rank 0 has not begun {key} within {START_TIMEOUT} s")
            time.sleep(0.05)
        return value

    @classmethod
    def backend(cls):
        return "KOLO"

    @classmethod
    def check_backend_availability(cls):
        return True

    def destroy_group(self):
        self.comm.close()

    def allreduce(self, tensors, options):
        self.comm.all_reduce(tensors[0], op=OPS[options.reduceOp])

    def reduce(self, tensors, options):
        self.comm.reduce(tensors[0], op=OPS[options.reduceOp], root=options.root_rank)

    def broadcast(self, tensors, options):
        self.comm.broadcast(tensors[0], root=options.root_rank)

    def allgather(self, outputs, tensors, options):
        for output, part in zip(outputs[0], self.comm.all_gather(np.asarray(tensors[0]))):
            np.asarray(output)[...] = part

    def reducescatter(self, outputs, tensors, options):
        self.comm.reduce_scatter(np.stack(tensors[0]), outputs[0], op=OPS[options.reduceOp])

    def send(self, tensors, options):
        self.comm.send(tensors[0], options.dst_rank)

    def recv(self, tensors, options):
        self.comm.recv(tensors[0], options.src_rank)

    def barrier(self, options=None):
        self.comm.barrier()


@ray.remote(num_cpus=1)
class Rank:
    """Has a part of the rows of a matrix."""

    def __init__(self, rows):
        register_collective_backend("KOLO", KoloGroup)
        self.rows = rows

    def means(self):
        """Returns the mean of each column of the whole matrix."""
        sums = np.append(self.rows.sum(axis=0), len(self.rows))
        collective.allreduce(sums)
        return sums[:-1] / sums[-1]


def main():
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    matrix = np.random.default_rng(6).normal(size=(10_000, 8))
    register_collective_backend("KOLO", KoloGroup)
    ray.init(num_cpus=ranks, include_dashboard=False, log_to_driver=False)
    actors = [Rank.remote(rows) for rows in np.array_split(matrix, ranks)]
    collective.create_collective_group(actors, ranks, list(range(ranks)), backend="KOLO")
    for means in ray.get([actor.means.remote() for actor in actors], timeout=120):
        np.testing.assert_allclose(means, matrix.mean(axis=0), rtol=0, atol=1e-12)
    print(f"{ranks} actors found the means of the whole matrix: {means.round(4)}")
    ray.shutdown()


if __name__ == "__main__":
    main()
