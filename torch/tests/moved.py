"""Runs checks with their tensors on a device: each call uses copies of their memory there.

The host computes the expected results. With the host as the device, this tests itself.
"""

import contextlib
import time
from unittest import mock

import torch
import torch.distributed as dist

# The functions with tensors that checks call. Calls among these functions stay as they are.
CALLS = [
    "all_reduce",
    "all_reduce_coalesced",
    "all_gather",
    "all_gather_into_tensor",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "gather_into_tensor",
    "irecv",
    "isend",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
]

# Those that make no use of anything else.
CHECKS = [
    "all_reduce_of_every_type_and_op",
    "reduce_to_every_root",
    "broadcast_of_every_type",
    "gathers_of_every_type",
    "gather_into_one_tensor",
    "all_gather_of_uneven_tensors",
    "all_gather_in_place",
    "scatter_of_every_type",
    "reduce_scatter_of_every_type_and_op",
    "reduce_scatter_of_uneven_tensors",
    "reduce_scatter_into_a_part_of_its_input",
    "all_to_all_of_every_type",
    "all_to_all_with_splits",
    "messages",
    "messages_from_whoever_sends_first",
    "a_receive_that_waits_does_not_hold_up_collectives",
    "works_that_nobody_waits_for",
    "tensors_that_are_not_contiguous",
    "parameters_and_inference_tensors",
    "sparse_all_reduce",
    "groups_of_some_ranks",
    "several_threads",
]

PATIENCE = 240


class Memory:
    """The memory behind the tensors of one call, on the host and on the device. Tensors that share memory on one share it on the other."""

    def __init__(self, device):
        self.device = device
        self.storages = {}
        self.sparse = []

    def there(self, value):
        if isinstance(value, (list, tuple)):
            return type(value)(self.there(each) for each in value)
        if not isinstance(value, torch.Tensor):
            return value
        if value.layout != torch.strided:
            moved = value.to(self.device, copy=True)
            self.sparse.append((value, moved))
            return moved
        value = value.detach()
        if value.is_conj():
            return self.there(value.conj()).conj()
        here = value.untyped_storage()
        if here.data_ptr() not in self.storages:
            moved = torch.UntypedStorage(here.nbytes(), device=self.device)
            moved.copy_(here)
            self.storages[here.data_ptr()] = here, moved
        moved = self.storages[here.data_ptr()][1]
        return torch.empty(0, dtype=value.dtype, device=self.device).set_(moved, value.storage_offset(), value.size(), value.stride())

    def come_back(self):
        for here, there in self.storages.values():
            here.copy_(there)
        for here, there in self.sparse:
            here.copy_(there.to(here.device))


class Work:
    def __init__(self, work, memory):
        self.work = work
        self.memory = memory

    def wait(self):
        done = self.work.wait()
        self.memory.come_back()
        return done

    def is_completed(self):
        # A stream may pass the end of an operation shortly before its Work does.
        until = time.monotonic() + PATIENCE
        while not self.work.is_completed() and time.monotonic() < until:
            time.sleep(0.001)
        return self.work.is_completed()

    def __getattr__(self, name):
        return getattr(self.work, name)


def moved(call, device):
    def on_device(*args, **options):
        memory = Memory(device)
        result = call(*memory.there(args), **{name: memory.there(value) for name, value in options.items()})
        if hasattr(result, "wait"):
            return Work(result, memory)
        memory.come_back()
        return result

    return on_device


@contextlib.contextmanager
def to(device):
    with contextlib.ExitStack() as stack:
        for name in CALLS:
            if hasattr(dist, name):
                stack.enter_context(mock.patch.object(dist, name, moved(getattr(dist, name), device)))
        yield
