"""PyTorch's reconfigure: a group whose members change."""

import datetime
import os

import pytest
from harness import KILL, Ranks, free_port

FIRST, SECOND = "first", "second"


def exchange(store, name, rank, count, handle):
    """The handles of `count` processes, in the order of their numbers. PyTorch leaves this to the
    program.
    """
    store.set(f"{name}/{rank}", handle)
    return [store.get(f"{name}/{other}").decode() for other in range(count)]


def begin(port, number):
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, is_master=number == 0, wait_for_workers=False)
    # Without members, so the ranks of this call mean nothing.
    dist.init_process_group("kolo", store=dist.PrefixStore("unused", store), rank=0, world_size=1, enable_reconfigure=True)
    return store


def sum_of_ranks():
    import torch
    import torch.distributed as dist

    tensor = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(tensor)
    return dist.get_rank(), dist.get_world_size(), tensor.item()


def survivor(rank, world, port):
    """Number 2 is killed, and a new process joins numbers 0 and 1."""
    import torch
    import torch.distributed as dist

    store = begin(port, rank)
    group = dist.group.WORLD
    with pytest.raises(ValueError, match="has no members; call reconfigure"):
        dist.all_reduce(torch.ones(1))
    assert dist.distributed_c10d._supports_reconfigure()
    own = group.get_reconfigure_handle()
    handles = exchange(store, FIRST, rank, world, own)
    for wrong, words in [
        ([handles[(rank + 1) % world]], "is not in the list"),
        ([own, own], "more than once"),
        ([own, "abc"], "get_reconfigure_handle"),
    ]:
        with pytest.raises(ValueError, match=words):
            dist.distributed_c10d._reconfigure(1, wrong)
    dist.distributed_c10d._reconfigure(1, handles).wait()
    assert sum_of_ranks() == (rank, 3, 6.0)
    if rank == 2:
        os.kill(os.getpid(), KILL)
    with pytest.raises(dist.DistBackendError, match="rank 2"):
        for _ in range(1000):
            dist.all_reduce(torch.ones(1))
    handle = group.get_reconfigure_handle()
    assert handle != own
    handles = exchange(store, SECOND, rank, world, handle)
    # A set leaves the order to the backend.
    timeout = datetime.timedelta(seconds=120)
    dist.distributed_c10d._reconfigure(2, set(handles), timeout=timeout).wait()
    return use()


def use():
    """What every member of the last group does with it."""
    import torch
    import torch.distributed as dist

    found = sum_of_ranks()
    message = torch.zeros(1)
    if dist.get_rank() == 0:
        dist.send(torch.ones(1), 1)
    elif dist.get_rank() == 1:
        dist.recv(message, 0)
        assert message.item() == 1
    dist.barrier()
    dist.destroy_process_group()
    return found


def newcomer(rank, world, port):
    import torch.distributed as dist

    # Not the store's owner, and not the one that is killed.
    store = begin(port, 2)
    handles = exchange(store, SECOND, 2, 3, dist.group.WORLD.get_reconfigure_handle())
    dist.distributed_c10d._reconfigure(2, set(handles)).wait()
    return use()


def refuses(rank, world, port):
    import torch.distributed as dist

    try:
        begin(port, rank)
    except ValueError as error:
        return str(error)
    dist.destroy_process_group()
    return None


def test_a_killed_member_is_replaced():
    import torch.distributed.distributed_c10d as c10d

    if not hasattr(c10d, "_reconfigure"):
        pytest.skip("this PyTorch has no reconfigure")
    port = free_port()
    [refused] = Ranks(1, refuses, free_port()).results().values()
    if refused:
        assert "backend in Python has no reconfigure" in refused
        pytest.skip("the backend in Python has no reconfigure")
    members, late = Ranks(3, survivor, port), Ranks(1, newcomer, port)
    found = {**members.results(expected=2), 2: late.results()[0]}
    assert sorted(found.values()) == [(rank, 3, 6.0) for rank in range(3)]
