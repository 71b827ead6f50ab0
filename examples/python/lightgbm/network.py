"""LightGBM's network functions on kolo.

    with pykolo.Communicator.from_env() as comm, Network(comm) as network:
        parameters = {"tree_learner": "data", "num_machines": comm.world_size, "pre_partition": True}
        rows = lightgbm.Dataset(my_rows, my_labels, params=parameters).construct()
        model = lightgbm.train(parameters, rows, callbacks=[network.end_if_failed])
"""

import ctypes
from ctypes import CFUNCTYPE, POINTER, c_char, c_int, c_int32, c_ssize_t, c_void_p, py_object

import numpy as np

# LightGBM's C library, and its check of results, which raises LightGBMError.
from lightgbm.basic import _LIB as lightgbm_library
from lightgbm.basic import _safe_call as check_lightgbm

# As LightGBM's meta.h declares them. A reducer adds the elements of its first argument to those of
# its second, or merges them in another way: (input, output, bytes of an element, bytes).
Reducer = CFUNCTYPE(None, c_void_p, c_void_p, c_int, c_int32)
ReduceScatter = CFUNCTYPE(
    None, c_void_p, c_int32, c_int, POINTER(c_int32), POINTER(c_int32), c_int, c_void_p, c_int32, POINTER(Reducer)
)
AllGather = CFUNCTYPE(None, c_void_p, c_int32, POINTER(c_int32), POINTER(c_int32), c_int, c_void_p, c_int32)


class Network:
    """LightGBM's collectives run on a communicator from the beginning of ``with`` to its end.

    LightGBM's functions return nothing. After a failure they give zeros at once, with which LightGBM
    finds no more splits. ``end_if_failed``, a callback of ``lightgbm.train``, raises the error after
    the iteration, and so does the end of ``with``.
    """

    def __init__(self, comm):
        self.comm = comm
        self.failure = None
        # One block from each rank.
        self.received = (c_char * 0)()
        # LightGBM keeps their addresses.
        self.functions = ReduceScatter(self.reduce_scatter), AllGather(self.all_gather)

    def __enter__(self):
        # On one rank LightGBM uses no network.
        addresses = [ctypes.cast(function, c_void_p) for function in self.functions]
        check_lightgbm(lightgbm_library.LGBM_NetworkInitWithFunctions(self.comm.world_size, self.comm.rank, *addresses))
        return self

    def __exit__(self, kind, error, trace):
        check_lightgbm(lightgbm_library.LGBM_NetworkFree())
        # LightGBM's own error, if there is one, comes from the zeros.
        if self.failure is not None and self.failure is not error:
            raise self.failure

    def end_if_failed(self, _environment):
        if self.failure is not None:
            raise self.failure

    def run(self, collective, output, output_size):
        """Exceptions cannot pass through LightGBM, so the first one is kept."""
        if self.failure is None:
            try:
                collective()
                return
            except BaseException as failure:
                self.failure = failure
        ctypes.memset(output, 0, output_size)

    def all_gather(self, given, given_size, start, length, blocks, output, output_size):
        """Writes block i of rank i to `output` on all ranks."""

        def collective():
            counts = self.counts(start, length, blocks)
            own = output + start[self.comm.rank]
            # `given` may be at the start of `output`. kolo accepts it in this rank's block only.
            ctypes.memmove(own, given, given_size)
            self.comm.all_gather_v(memory(own, given_size), counts, memory(output, sum(counts)))

        self.run(collective, output, output_size)

    def reduce_scatter(self, given, given_size, element_size, start, length, blocks, output, output_size, reducer):
        """Reduces block i of all ranks and writes it to `output` of rank i. Only LightGBM knows the
        type of the elements, so the ranks exchange blocks, and LightGBM's reducer reduces them.
        """

        def collective():
            counts = self.counts(start, length, blocks)
            size = counts[self.comm.rank]
            if len(self.received) < size * blocks:
                self.received = (c_char * (size * blocks))()
            address = ctypes.addressof(self.received)
            self.comm.all_to_all_v(memory(given, sum(counts)), counts, [size] * blocks, memory(address, size * blocks))
            for other, into in order(blocks):
                reducer[0](address + other * size, address + into * size, element_size, size)
            ctypes.memmove(output, address, size)

        self.run(collective, output, output_size)

    def counts(self, start, length, blocks):
        """The lengths of the blocks, which follow each other in rank order in LightGBM as in kolo."""
        counts = length[:blocks]
        if blocks != self.comm.world_size or any(start[i] != sum(counts[:i]) for i in range(blocks)):
            raise RuntimeError("LightGBM's blocks are not consecutive")
        return counts


# The fastest way from an address to an array.
memory_view = ctypes.pythonapi.PyMemoryView_FromMemory
memory_view.argtypes, memory_view.restype = (c_void_p, c_ssize_t, c_int), py_object
WRITABLE = 0x200


def memory(address, size):
    return np.frombuffer(memory_view(address, size, WRITABLE), np.uint8)


def order(ranks):
    """The pairs of blocks, of which each reduces the first into the second, in the order of
    LightGBM's recursive halving: sums have the same bits as on LightGBM's sockets.
    """
    groups = 1 << ranks.bit_length() - 1
    # Unless the world size is a power of two, the last ranks form groups of two.
    singles = 2 * groups - ranks
    leaders = [i if i <= singles else 2 * i - singles for i in range(groups)]
    for leader in leaders[singles:]:
        yield leader + 1, leader
    distance = groups // 2
    while distance > 0:
        for i in range(distance):
            yield leaders[i + distance], leaders[i]
        distance //= 2
