"""torch_kolo.comms, a backend of torchcomms, on a stub: PyPI has no package of torchcomms yet."""

import importlib.metadata
import inspect
import os
import sys

import pytest
from harness import KILL, Ranks, free_port


def backend_class():
    import stub_torchcomms

    sys.modules["torchcomms"] = stub_torchcomms
    import torch_kolo.comms  # noqa: F401

    return stub_torchcomms.registered["kolo"]


def new_comm(rank, world, port, name="main"):
    """What torchcomms does."""
    import stub_torchcomms
    import torch

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    comm = backend_class()()
    comm.init(torch.device("cpu"), name, stub_torchcomms.CommOptions())
    return comm


def test_the_methods_are_those_that_torchcomms_calls():
    import stub_torchcomms

    mine = backend_class()
    for name, method in inspect.getmembers(stub_torchcomms.TorchCommBackend, inspect.isfunction):
        assert name in vars(mine), name
        assert list(inspect.signature(getattr(mine, name)).parameters) == list(inspect.signature(method).parameters), name


def test_the_entry_point_is_that_of_torchcomms():
    try:
        importlib.metadata.distribution("torch_kolo")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("NOT RUN: torch_kolo is not installed")
    (found,) = importlib.metadata.entry_points(group="torchcomms.backends", name="kolo")
    assert found.value == "torch_kolo.comms"


def every_call(rank, world, port):
    import torch
    from stub_torchcomms import ReduceOp

    comm = new_comm(rank, world, port)
    assert (comm.get_rank(), comm.get_size(), comm.get_backend_name(), comm.get_comm_name()) == (rank, world, "kolo", "main")
    ranks, total = range(world), world * (world - 1) // 2
    for async_op in (False, True):

        def call(name, *arguments):
            work = getattr(comm, name)(*arguments, async_op)
            if async_op:
                work.wait()
            else:
                assert work is None, name

        def expect(tensor, values):
            assert tensor.tolist() == list(values), (tensor, list(values))

        def mine(count=2):
            return torch.full((count,), float(rank))

        def empty(*counts):
            return [torch.full((count,), -1.0) for count in counts]

        call("barrier")
        tensor = mine()
        call("all_reduce", tensor, ReduceOp.SUM)
        expect(tensor, [total] * 2)
        tensor = mine()
        call("all_reduce", tensor, ReduceOp.AVG)
        expect(tensor, [total / world] * 2)
        tensor = mine()
        call("reduce", tensor, 1, ReduceOp.MAX)
        expect(tensor, [world - 1 if rank == 1 else rank] * 2)
        tensor = mine()
        call("broadcast", tensor, 1)
        expect(tensor, [1, 1])
        outputs = empty(*[2] * world)
        call("all_gather", outputs, mine())
        expect(torch.cat(outputs), [other for other in ranks for _ in range(2)])
        outputs = empty(*[other + 1 for other in ranks])
        call("all_gather_v", outputs, mine(rank + 1))
        expect(torch.cat(outputs), [other for other in ranks for _ in range(other + 1)])
        output = torch.empty(2 * world)
        call("all_gather_single", output, mine())
        expect(output, [other for other in ranks for _ in range(2)])
        (output,) = empty(2)
        call("reduce_scatter", output, [mine() + other for other in ranks], ReduceOp.SUM)
        expect(output, [total + world * rank] * 2)
        (output,) = empty(rank + 1)
        call("reduce_scatter_v", output, [mine(other + 1) + other for other in ranks], ReduceOp.SUM)
        expect(output, [total + world * rank] * (rank + 1))
        (output,) = empty(2)
        call("reduce_scatter_single", output, torch.arange(2.0 * world), ReduceOp.SUM)
        expect(output, [world * 2 * rank, world * (2 * rank + 1)])
        (output,) = empty(world)
        call("all_to_all_single", output, torch.arange(float(world)) + 10 * rank)
        expect(output, [10 * other + rank for other in ranks])
        # Rank i sends j + 1 elements to rank j, and has two more.
        sends, receives = [other + 1 for other in ranks], [rank + 1] * world
        (output,) = empty(sum(receives) + 1)
        call("all_to_all_v_single", output, mine(sum(sends) + 2), receives, sends)
        expect(output, [other for other in ranks for _ in range(rank + 1)] + [-1])
        outputs = empty(*receives)
        call("all_to_all", outputs, [mine(count) for count in sends])
        expect(torch.cat(outputs), [other for other in ranks for _ in range(rank + 1)])
        (output,) = empty(2)
        # Other ranks than the root may give lists, which mean nothing.
        call("scatter", output, [torch.full((2,), float(other + rank)) for other in ranks], 1)
        expect(output, [rank + 1] * 2)
        outputs = empty(*[2] * world)
        call("gather", outputs, mine(), 1)
        expect(torch.cat(outputs), [other if rank == 1 else -1 for other in ranks for _ in range(2)])
        call("scatter", output, [mine()] * world if rank == 1 else [], 1)
        call("gather", outputs if rank == 1 else [], output, 1)
        expect(torch.cat(outputs), [1 if rank == 1 else -1] * 2 * world)
        if rank == 0:
            call("send", torch.tensor([7.0]), world - 1)
        elif rank == world - 1:
            (output,) = empty(1)
            call("recv", output, 0)
            expect(output, [7])
    with pytest.raises(ValueError, match="PREMUL_SUM: multiply the tensor first"):
        comm.all_reduce(mine(), ReduceOp.PREMUL_SUM, False)
    comm.finalize()
    comm.finalize()


def parts(rank, world, port):
    """Splits, some of the same name and of overlapping ranks, and two communicators of one name."""
    import stub_torchcomms
    import torch

    options = stub_torchcomms.CommOptions()

    def sum_of(comm, value):
        tensor = torch.tensor([float(value)])
        comm.all_reduce(tensor, stub_torchcomms.ReduceOp.SUM, False)
        return tensor.item()

    comm, again = new_comm(rank, world, port), new_comm(rank, world, port)
    assert sum_of(again, 1) == world
    first = comm.split([0, 1] if rank != 2 else [], "part", options)
    last = comm.split([2, 0] if rank != 1 else [], "part", options)
    assert (first is None) == (rank == 2) and (last is None) == (rank == 1)
    if first:
        assert (first.get_rank(), first.get_size(), sum_of(first, rank)) == (rank, 2, 1)
    if last:
        assert (last.get_rank(), last.get_size(), sum_of(last, rank)) == (1 - rank // 2, 2, 2)
    alone = comm.split([rank], "alone", options)
    assert (alone.get_rank(), alone.get_size(), sum_of(alone, 5)) == (0, 1, 5)
    with pytest.raises(ValueError, match=f"rank {rank} is not in its list"):
        comm.split([(rank + 1) % world], "wrong", options)
    with pytest.raises(ValueError, match="give different ranks from 0 to 2"):
        comm.split([rank, 3], "wrong", options)
    # Rank 0 serves the store.
    comm.barrier(False)
    for each in (first, last, alone, again, comm):
        if each:
            each.finalize()


def killed(rank, world, port):
    import stub_torchcomms
    import torch

    comm = new_comm(rank, world, port)
    comm.barrier(False)
    if rank == 1:
        os.kill(os.getpid(), KILL)
    with pytest.raises(RuntimeError, match="rank 1 .* has died"):
        comm.all_reduce(torch.ones(1), stub_torchcomms.ReduceOp.SUM, True).wait()


@pytest.mark.parametrize("world", [2, 3])
def test_each_call(world):
    Ranks(world, every_call, free_port()).results()


def test_parts():
    Ranks(3, parts, free_port()).results()


def test_a_killed_rank_is_named():
    ranks = Ranks(3, killed, free_port())
    found = ranks.outcomes(expected=2)
    assert found.keys() == {0, 2} and not any(problem for problem, _ in found.values()), found
