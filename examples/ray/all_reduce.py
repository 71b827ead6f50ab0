"""Ranks that are actors of Ray, one in each bundle of a placement group, which sum their vectors.

    KOLO_LIBRARY=target/release/libkolo.so python examples/ray/all_reduce.py [RANKS]

The actors call the C library. The first one makes an id, which Ray passes to all of them: it has the
address where the ranks find each other, and a secret of their own.
"""

import ctypes
import os
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

FLOAT32, SUM = 7, 0


@ray.remote(num_cpus=1)
class Rank:
    def __init__(self, library, rank, ranks):
        self.kolo = ctypes.CDLL(library)
        self.kolo.kolo_error_string.restype = ctypes.c_char_p
        # Made here: Ray cannot send ctypes' classes to an actor.
        self.UniqueId = type("UniqueId", (ctypes.Structure,), {"_fields_": [("internal", ctypes.c_uint8 * 128)]})
        self.rank, self.ranks, self.comm = rank, ranks, ctypes.c_void_p()

    def call(self, function, *arguments):
        result = getattr(self.kolo, function)(*arguments)
        if result != 0:
            raise RuntimeError(f"rank {self.rank}: {function}: {self.kolo.kolo_error_string(result).decode()}")

    def make_id(self):
        unique_id = self.UniqueId()
        self.call("kolo_get_unique_id", ctypes.byref(unique_id))
        return bytes(unique_id.internal)

    def connect(self, unique_id):
        unique_id = self.UniqueId.from_buffer_copy(unique_id)
        self.call("kolo_comm_init_rank", ctypes.byref(self.comm), self.ranks, unique_id, self.rank, None)

    def all_reduce(self, count):
        """Sums vectors of which each has its rank in all elements; returns the sum's least and largest element."""
        buffer = (ctypes.c_float * count)(*[float(self.rank)] * count)
        self.call("kolo_all_reduce", buffer, buffer, ctypes.c_size_t(count), FLOAT32, SUM, self.comm, None)
        return min(buffer), max(buffer)

    def close(self):
        self.call("kolo_comm_destroy", self.comm)


def main():
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    library = os.path.abspath(os.environ.get("KOLO_LIBRARY", "libkolo.so"))
    ray.init(num_cpus=ranks, include_dashboard=False, log_to_driver=False)
    group = placement_group([{"CPU": 1}] * ranks, strategy="SPREAD")
    ray.get(group.ready(), timeout=120)
    actors = [
        Rank.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)).remote(
            library, rank, ranks
        )
        for rank in range(ranks)
    ]
    unique_id = ray.get(actors[0].make_id.remote(), timeout=120)
    ray.get([actor.connect.remote(unique_id) for actor in actors], timeout=120)
    expected = float(sum(range(ranks)))
    for count in (1, 1000, 1 << 20):
        sums = ray.get([actor.all_reduce.remote(count) for actor in actors], timeout=120)
        assert sums == [(expected, expected)] * ranks, sums
    ray.get([actor.close.remote() for actor in actors], timeout=120)
    print(f"{ranks} actors of a placement group: all sums are {expected}")
    ray.shutdown()


if __name__ == "__main__":
    main()
