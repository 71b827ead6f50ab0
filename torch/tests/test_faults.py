"""Failures: each survivor gets an error that names the rank at fault, and no rank hangs."""

import datetime
import os
import re
import tempfile
import time

import pytest
import torch
from harness import EVERY_CASE, KILL, PATIENCE, Ranks, start

# Much less than every deadline here, and more than any machine needs.
SOON = 240


def error_of(call):
    import torch.distributed as dist

    began = time.monotonic()
    try:
        call()
    except dist.DistBackendError as error:
        return type(error).__name__, str(error), time.monotonic() - began
    raise AssertionError("there was no error")


def dies(rank, world, method, how):
    import torch.distributed as dist

    start("kolo", method, rank, world)
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    if rank == world - 1:
        os.kill(os.getpid(), KILL)
    if how == "all_reduce":
        return error_of(lambda: dist.all_reduce(tensor))
    if how == "asynchronous":
        return error_of(lambda: dist.all_reduce(tensor, async_op=True).wait())
    if how == "future":
        work = dist.all_reduce(tensor, async_op=True)
        try:
            work.get_future().wait()
        except RuntimeError as error:
            outcome = type(error).__name__, str(error), 0
        assert work.is_completed() and not work.is_success()
        return outcome
    if how == "recv":
        return error_of(lambda: dist.recv(tensor, src=world - 1))
    if how == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        def build():
            module = DistributedDataParallel(torch.nn.Linear(3, 3))
            module(torch.ones(2, 3)).sum().backward()

        return error_of(build)


@pytest.mark.parametrize("how", ["all_reduce", "asynchronous", "future", "recv", "ddp"])
def test_a_killed_rank_is_named(tmp_path, how):
    outcomes = Ranks(3, dies, f"file://{tmp_path}/store", how).results(expected=2)
    messages = [message for _, message, _ in outcomes.values()]
    # A rank that learns of it from another survivor names it too.
    assert all("rank 2" in message for message in messages), messages
    assert all(took < SOON for _, _, took in outcomes.values()), outcomes


def kills_in_a_group(rank, world, method):
    import torch.distributed as dist

    start("kolo", method, rank, world)
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    if rank == 2:
        os.kill(os.getpid(), KILL)
    return error_of(lambda: dist.barrier(group))


def test_a_rank_of_a_group_is_named_as_in_the_job(tmp_path):
    outcomes = Ranks(3, kills_in_a_group, f"file://{tmp_path}/store").results(expected=2)
    assert "its rank 1 is rank 2 of the job" in outcomes[1][1]


def mismatches(rank, world, method, what):
    import torch.distributed as dist

    start("kolo", method, rank, world)
    tensor = torch.ones(1000 + (rank if what == "count" else 0), dtype=torch.float64 if what == "type" and rank else torch.float32)
    if what == "operation" and rank == 1:
        found = error_of(lambda: dist.broadcast(tensor, 0))
    else:
        op = dist.ReduceOp.MAX if what == "reduction" and rank else dist.ReduceOp.SUM
        found = error_of(lambda: dist.all_reduce(tensor, op))
    assert (tensor == 1).all(), "memory was written"
    # The group has ended, and later calls report this at once.
    assert error_of(dist.barrier)[2] < SOON
    return found


@pytest.mark.parametrize("what", ["operation", "count", "type", "reduction"])
def test_calls_that_differ_are_an_error_that_shows_both(tmp_path, what):
    outcomes = Ranks(2, mismatches, f"file://{tmp_path}/store", what).results()
    shown = {
        "operation": ("all_reduce", "broadcast"),
        "count": ("1000", "1001"),
        "type": ("f32", "f64"),
        "reduction": ("sum", "max"),
    }[what]
    both = [message for _, message, _ in outcomes.values() if all(each in message for each in shown)]
    assert both, outcomes


def set_timeout(timeout):
    import torch.distributed as dist

    # Before 2.15, PyTorch's own function for this skips backends that it does not know.
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    (backend.set_timeout if hasattr(backend, "set_timeout") else backend._set_default_timeout)(timeout)


def monitored_barrier(timeout, wait_all_ranks=False):
    import torch.distributed as dist

    if hasattr(dist.Backend, "_ensure_backend_registered"):
        dist.monitored_barrier(timeout=timeout, wait_all_ranks=wait_all_ranks)
    else:
        # Before 2.15, PyTorch's own function for this accepts Gloo only.
        dist.group.WORLD.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)


def times_out(rank, world, method, how):
    import torch.distributed as dist

    start("kolo", method, rank, world, timeout=PATIENCE)
    dist.barrier()
    found = None
    if rank == 0:
        if how == "argument":
            options = dist.AllreduceOptions()
            options.timeout = datetime.timedelta(seconds=1)
            options.asyncOp = False
            group = dist.group.WORLD
            found = error_of(lambda: group.allreduce([torch.ones(1)], options))
        elif how == "asynchronous":
            options = dist.AllreduceOptions()
            options.timeout = datetime.timedelta(seconds=1)
            found = error_of(lambda: dist.group.WORLD.allreduce([torch.ones(1)], options).wait())
        elif how == "monitored":
            found = error_of(lambda: monitored_barrier(datetime.timedelta(seconds=1)))
        elif how == "group":
            set_timeout(datetime.timedelta(seconds=1))
            found = error_of(lambda: dist.all_reduce(torch.ones(1)))
        elif how == "recv":
            set_timeout(datetime.timedelta(seconds=1))
            found = error_of(lambda: dist.recv(torch.ones(1), src=1))
        elif how == "wait":
            work = dist.all_reduce(torch.ones(1), async_op=True)
            found = error_of(lambda: work.wait(datetime.timedelta(seconds=1)))
            assert not work.is_completed()
        open(method.removeprefix("file://") + ".done", "w").close()
    else:
        until = time.monotonic() + PATIENCE
        while not os.path.exists(method.removeprefix("file://") + ".done") and time.monotonic() < until:
            time.sleep(0.05)
    return found


@pytest.mark.parametrize("how", ["argument", "asynchronous", "monitored", "group", "recv", "wait"])
def test_a_deadline_of_a_call(tmp_path, how):
    outcomes = Ranks(2, times_out, f"file://{tmp_path}/store", how).results()
    _, message, took = outcomes[0]
    assert 0.9 < took < SOON, outcomes[0]
    assert re.search("has not ended after 1000 ms" if how == "wait" else r"rank 1 .*deadline of 1\.0s", message), message


def answers_a_roll_call(rank, world, method, missing):
    import torch.distributed as dist

    start("kolo", method, rank, world)
    # A roll call of all ranks succeeds.
    monitored_barrier(datetime.timedelta(seconds=PATIENCE), wait_all_ranks=True)
    if rank not in missing:
        found = error_of(lambda: monitored_barrier(datetime.timedelta(seconds=10), wait_all_ranks=True))
    else:
        # A missing rank gets the failure from its next call.
        found = error_of(lambda: dist.recv(torch.ones(1), src=0))
    # The group has ended on all ranks.
    assert error_of(lambda: dist.all_reduce(torch.ones(1)))[2] < SOON
    return found


@pytest.mark.parametrize("missing", [[1, 3], [2]] if EVERY_CASE else [[1, 3]])
def test_a_monitored_barrier_names_all_who_do_not_come(tmp_path, missing):
    outcomes = Ranks(4, answers_a_roll_call, f"file://{tmp_path}/store", missing).results()
    named = "ranks 1 and 3 did not call" if len(missing) == 2 else "rank 2 did not call"
    for rank, (_, message, took) in outcomes.items():
        assert took < SOON, outcomes
        if rank not in missing:
            assert named in message, outcomes
            assert "deadline of 10.0s" in message, outcomes
            assert took > 1.9 or rank != 0, outcomes


def shrinks(rank, world, method, how):
    import torch.distributed as dist

    start("kolo", method, rank, world)
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), KILL)
        # Ends without an error.
        dist.destroy_process_group()
        return None
    if how == "killed":
        assert "rank 1" in error_of(lambda: dist.all_reduce(tensor))[1]
    if how == "another":
        return error_of(lambda: dist.shrink_group([2] if rank != 2 else [3]))[1]
    group = dist.shrink_group([1])
    assert (dist.get_world_size(), dist.get_rank()) == (world - 1, rank - (rank > 1)) and group is dist.group.WORLD
    tensor = torch.full((1000,), float(rank))
    dist.all_reduce(tensor)
    assert (tensor == 0 + 2 + 3).all(), tensor
    # Messages, and then all of it again.
    if dist.get_rank() == 0:
        dist.send(tensor, 2)
    elif dist.get_rank() == 2:
        dist.recv(tensor, 0)
    dist.barrier()
    if rank == 3:
        dist.destroy_process_group()
        return None
    dist.shrink_group([2])
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.item()


@pytest.mark.parametrize("how", ["killed", "left"])
def test_survivors_go_on(tmp_path, how):
    outcomes = Ranks(4, shrinks, f"file://{tmp_path}/store", how).results(expected=3 if how == "killed" else 4)
    assert outcomes[0] == outcomes[2] == 2, outcomes


def test_others_than_were_to_be_left_are_an_error(tmp_path):
    outcomes = Ranks(4, shrinks, f"file://{tmp_path}/store", "another").results()
    assert "ranks 0, 1 and 3 were to remain, and ranks 0, 2 and 3 have survived" in outcomes[0], outcomes


def aborts(rank, world, method):
    import threading

    import torch.distributed as dist

    start("kolo", method, rank, world)
    # Open a connection between them.
    if rank == 0:
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(1), 0)
    dist.barrier()
    if rank == 0:
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        threading.Timer(0.3, backend.abort).start()
        found = error_of(dist.barrier)
    else:
        found = error_of(lambda: dist.recv(torch.ones(1), src=0))
    dist.destroy_process_group()
    return found


def test_an_abort_ends_what_is_under_way(tmp_path):
    outcomes = Ranks(2, aborts, f"file://{tmp_path}/store").results()
    assert all(took < SOON for _, _, took in outcomes.values()), outcomes


def is_shut_down(rank, world, method):
    import torch.distributed as dist

    start("kolo", method, rank, world)
    group = dist.new_group()
    backend = group._get_backend(torch.device("cpu"))
    work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    work.wait()
    dist.destroy_process_group(group)
    backend.shutdown()
    found = error_of(lambda: backend.allreduce([torch.ones(1)]))
    del backend, group
    # Pending work is given up, and its tensors can be freed.
    pending = dist.irecv(torch.ones(1000), src=1 - rank)
    dist.destroy_process_group()
    return found, error_of(pending.wait)


def test_after_the_end(tmp_path):
    for (after, pending) in Ranks(2, is_shut_down, f"file://{tmp_path}/store").results().values():
        assert "shut down" in after[1]
        assert pending[2] < SOON


def takes_wrong_tags(rank, world, method):
    import torch.distributed as dist

    # The rank that is sent the wrong tag reaches its deadline first.
    start("kolo", method, rank, world, timeout=PATIENCE if rank == 0 else 2)
    if rank == 0:
        dist.send(torch.ones(3), 1, tag=4)
        # Until the other rank has failed.
        return error_of(lambda: dist.recv(torch.ones(3), 1, tag=6))
    return error_of(lambda: dist.recv(torch.ones(3), 0, tag=5))


def test_a_tag_that_does_not_come(tmp_path):
    outcomes = Ranks(2, takes_wrong_tags, f"file://{tmp_path}/store").results()
    assert any("1 message of other tags waits: 4" in outcome[1] for outcome in outcomes.values()), outcomes


def comes_alone(rank, world, method):
    if rank == 1:
        return None
    start_error = None
    import torch.distributed as dist

    try:
        start("kolo", method, rank, world, timeout=3)
    except (RuntimeError, dist.DistError) as error:
        start_error = str(error)
    return start_error


def test_a_rank_that_does_not_come(tmp_path):
    with tempfile.TemporaryDirectory() as folder:
        outcomes = Ranks(2, comes_alone, f"file://{folder}/store").results()
    assert "missing 1;" in (outcomes[0] or "it started alone"), outcomes
