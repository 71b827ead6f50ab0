"""torchcomms on kolo: ``torchcomms.new_comm("kolo", torch.device("cpu"), name="mine")``.

torchcomms imports this module through an entry point. Each communicator is a process group of kolo,
without torch.distributed's own groups.
"""

import collections
import datetime
import functools
import os

import torch.distributed as dist
import torchcomms
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from torch.distributed import ReduceOp

from . import _create_for

__all__ = ["TorchCommKolo"]

# The variables in which torchcomms looks for the rank and the world size, in its order.
RANK_AND_SIZE = (
    ("TORCHCOMM_RANK", "TORCHCOMM_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("RANK", "WORLD_SIZE"),
)

# How many communicators of each name this process has made: each has keys of its own in the store.
made = collections.Counter()


class TorchCommKolo(torchcomms.TorchCommBackend):
    """A call returns None when it has ended, and with ``async_op`` an object with ``wait``."""

    def __init__(self):
        super().__init__()
        self._group = None
        self._splits = 0

    # ---- Beginning and end ----

    def init(self, device, name, options):
        rank, size = rank_and_size()
        made[name] += 1
        store = dist.PrefixStore(f"torch_kolo/{name}/{made[name]}", options.store or store_of_launcher(rank, size))
        self._connect(store, rank, size, name, options.timeout)

    def split(self, ranks, name, options):
        """The ranks in the list call it with the same list, and the others with an empty one."""
        self._splits += 1
        if not ranks:
            return None
        if len(set(ranks)) != len(ranks) or not all(0 <= rank < self._size for rank in ranks):
            raise ValueError(f"split: the ranks are {ranks}: give different ranks from 0 to {self._size - 1}")
        if self._rank not in ranks:
            raise ValueError(f"split: rank {self._rank} is not in its list of ranks, {ranks}: give an empty list")
        part = type(self)()
        # The parts of one split have no rank in common.
        store = dist.PrefixStore(f"split/{self._splits}/{min(ranks)}", self._store)
        part._connect(store, ranks.index(self._rank), len(ranks), name, options.timeout)
        return part

    def _connect(self, store, rank, size, name, timeout):
        self._name, self._rank, self._size, self._store = name, rank, size, store
        self._group = _create_for(store, rank, size, timeout)

    def finalize(self):
        group, self._group = self._group, None
        if group is not None:
            group.shutdown()

    def set_timeout(self, timeout):
        self._group.set_timeout(timeout)

    # ---- What torchcomms asks ----

    def get_rank(self):
        return self._rank

    def get_size(self):
        return self._size

    def get_backend_name(self):
        return "kolo"

    def get_comm_name(self):
        return self._name

    # ---- Calls ----

    def send(self, tensor, dst, async_op):
        return ended(self._group.send([tensor], dst, 0), async_op)

    def recv(self, tensor, src, async_op):
        return ended(self._group.recv([tensor], src, 0), async_op)

    def broadcast(self, tensor, root, async_op):
        return self._call("broadcast", [tensor], opts=BroadcastOptions(), rootRank=root, asyncOp=async_op)

    def all_reduce(self, tensor, op, async_op):
        return self._call("allreduce", [tensor], opts=AllreduceOptions(), reduceOp=reduction(op), asyncOp=async_op)

    def reduce(self, tensor, root, op, async_op):
        return self._call("reduce", [tensor], opts=ReduceOptions(), rootRank=root, reduceOp=reduction(op), asyncOp=async_op)

    def all_gather(self, tensor_list, tensor, async_op):
        return self._call("allgather", [tensor_list], [tensor], opts=AllgatherOptions(), asyncOp=async_op)

    all_gather_v = all_gather

    def all_gather_single(self, output, input, async_op):
        return self._call("_allgather_base", output, input, opts=AllgatherOptions(), asyncOp=async_op)

    def reduce_scatter(self, output, input_list, op, async_op):
        opts = ReduceScatterOptions()
        return self._call("reduce_scatter", [output], [input_list], opts=opts, reduceOp=reduction(op), asyncOp=async_op)

    reduce_scatter_v = reduce_scatter

    def reduce_scatter_single(self, output, input, op, async_op):
        opts = ReduceScatterOptions()
        return self._call("_reduce_scatter_base", output, input, opts=opts, reduceOp=reduction(op), asyncOp=async_op)

    def all_to_all_single(self, output, input, async_op):
        return self._call("alltoall_base", output, input, [], [], opts=AllToAllOptions(), asyncOp=async_op)

    def all_to_all_v_single(self, output, input, output_split_sizes, input_split_sizes, async_op):
        # torchcomms lets a tensor have more rows than its splits.
        output, input = output[: sum(output_split_sizes)], input[: sum(input_split_sizes)]
        splits = list(output_split_sizes), list(input_split_sizes)
        return self._call("alltoall_base", output, input, *splits, opts=AllToAllOptions(), asyncOp=async_op)

    def all_to_all(self, output_tensor_list, input_tensor_list, async_op):
        return self._call("alltoall", output_tensor_list, input_tensor_list, opts=AllToAllOptions(), asyncOp=async_op)

    def scatter(self, output_tensor, input_tensor_list, root, async_op):
        inputs = [input_tensor_list] if self._rank == root else []
        return self._call("scatter", [output_tensor], inputs, opts=ScatterOptions(), rootRank=root, asyncOp=async_op)

    def gather(self, output_tensor_list, input_tensor, root, async_op):
        outputs = [output_tensor_list] if self._rank == root else []
        return self._call("gather", outputs, [input_tensor], opts=GatherOptions(), rootRank=root, asyncOp=async_op)

    def barrier(self, async_op):
        return self._call("barrier", opts=BarrierOptions(), asyncOp=async_op)

    def _call(self, name, *tensors, opts, asyncOp, **fields):
        for field, value in {"asyncOp": asyncOp, **fields}.items():
            setattr(opts, field, value)
        return ended(getattr(self._group, name)(*tensors, opts), asyncOp)


def ended(work, async_op):
    if async_op:
        return work
    work.wait()
    return None


def reduction(op):
    """The ReduceOp of torch.distributed."""
    name = op.type.name
    if name == "PREMUL_SUM":
        raise ValueError("torchcomms does not tell a backend in Python the factor of PREMUL_SUM: multiply the tensor first, and use SUM")
    return getattr(ReduceOp, name)


def rank_and_size():
    for rank, size in RANK_AND_SIZE:
        if os.environ.get(rank) and os.environ.get(size):
            return int(os.environ[rank]), int(os.environ[size])
    raise RuntimeError("no launcher has set RANK and WORLD_SIZE: start the program by kolo run or torchrun, or set TORCHCOMM_RANK and TORCHCOMM_SIZE")


@functools.cache
def store_of_launcher(rank, size):
    """The store at MASTER_ADDR and MASTER_PORT, which all communicators of this process use."""
    store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=datetime.timedelta(minutes=5)))
    return store


if not torchcomms._is_backend_registered("kolo"):
    torchcomms.register_backend("kolo", TorchCommKolo)
