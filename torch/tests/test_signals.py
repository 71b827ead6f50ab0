"""Signals that reach a rank while it waits for another one."""

import datetime
import os
import pathlib
import signal
import sys
import time

import pytest
from harness import PATIENCE, Ranks, free_port, start

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="NOT RUN: Windows sends no signals to a process")


def wait_for(path):
    until = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < until, f"there is no {path}"
        time.sleep(0.01)


def wait(work):
    """Is in C++ alone with the backend in C++."""
    work.wait()


def is_in_call(frame):
    return frame.f_code.co_filename != __file__ or frame.f_code.co_name == "wait"


def note_waits(folder):
    """Has SIGUSR1 write a file if it reaches this rank in a call of PyTorch."""

    def noted(_, frame):
        if is_in_call(frame):
            pathlib.Path(folder, "waits").touch()

    signal.signal(signal.SIGUSR1, noted)


def reach(ranks, folder):
    """Sends SIGUSR1 to rank 0 until it waits in a call. The handler runs there."""
    wait_for(pathlib.Path(folder, "ready"))
    until = time.monotonic() + PATIENCE / 2
    while not pathlib.Path(folder, "waits").exists():
        assert time.monotonic() < until, "no handler has run while rank 0 waits"
        os.kill(ranks.processes[0].pid, signal.SIGUSR1)
        time.sleep(0.05)


def in_all_reduce(dist, tensor):
    dist.all_reduce(tensor)


def in_recv(dist, tensor):
    dist.recv(tensor, 1)


def behind_another(dist, tensor):
    dist.all_reduce(tensor, async_op=True)
    dist.barrier()


def in_monitored_barrier(dist, tensor):
    # Rank 0 calls the roll.
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=PATIENCE), wait_all_ranks=True)


def interrupted(rank, world, folder, call):
    """Rank 0 waits in `call`; returns what each rank's call raised."""
    import torch
    import torch.distributed as dist

    start("kolo", f"file://{folder}/store", rank, world, timeout=PATIENCE)
    tensor = torch.ones(4)
    if rank == 1:
        wait_for(pathlib.Path(folder, "interrupted"))
        call, tensor = in_all_reduce, torch.ones(5)
    else:
        note_waits(folder)
        pathlib.Path(folder, "ready").touch()
    try:
        call(dist, tensor)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    finally:
        pathlib.Path(folder, "interrupted").touch()
    return None


@pytest.mark.parametrize("call", [in_all_reduce, in_recv, behind_another, in_monitored_barrier])
def test_ctrl_c_ends_a_wait(tmp_path, call):
    ranks = Ranks(2, interrupted, str(tmp_path), call)
    reach(ranks, tmp_path)
    os.kill(ranks.processes[0].pid, signal.SIGINT)
    found = ranks.results(patience=PATIENCE / 2)
    assert found[0].startswith("KeyboardInterrupt"), found
    if call is not in_recv:
        # A receive leaves the group as it is, and the program ends.
        assert found[1].startswith("DistBackendError") and "rank 0" in found[1], found


def beside_pykolo(rank, world, folder, order):
    """Rank 0 waits in a call of what it made first; returns what that raised."""
    import pykolo
    import torch
    import torch.distributed as dist

    def group():
        start("kolo", f"file://{folder}/store", rank, world, timeout=PATIENCE)
        return lambda: dist.recv(torch.ones(4), 1)

    def communicator():
        comm = pykolo.Communicator(rank=rank, world_size=world, store=f"file://{folder}/pykolo")
        return lambda: comm.recv(bytearray(4), 1, timeout=PATIENCE)

    calls = [{"group": group, "communicator": communicator}[each]() for each in order]
    if rank == 1:
        wait_for(pathlib.Path(folder, "interrupted"))
        return None
    note_waits(folder)
    pathlib.Path(folder, "ready").touch()
    try:
        calls[0]()
    except BaseException as error:
        return type(error).__name__
    finally:
        pathlib.Path(folder, "interrupted").touch()
    return None


@pytest.mark.parametrize("order", [("group", "communicator"), ("communicator", "group")])
def test_ctrl_c_ends_a_wait_beside_pykolo(tmp_path, order):
    ranks = Ranks(2, beside_pykolo, str(tmp_path), order)
    reach(ranks, tmp_path)
    os.kill(ranks.processes[0].pid, signal.SIGINT)
    assert ranks.results(patience=PATIENCE / 2)[0] == "KeyboardInterrupt"


def waits_again(rank, world, folder):
    import torch
    import torch.distributed as dist

    start("kolo", f"file://{folder}/store", rank, world, timeout=PATIENCE)
    tensor = torch.full((4,), float(rank))
    if rank == 1:
        wait_for(pathlib.Path(folder, "interrupted"))
        dist.send(tensor, 0)
        return tensor.tolist()
    note_waits(folder)
    # A collective may run on the thread that waits for it.
    work = dist.irecv(tensor, 1)
    pathlib.Path(folder, "ready").touch()
    try:
        wait(work)
    except KeyboardInterrupt:
        pathlib.Path(folder, "interrupted").touch()
        wait(work)
    return tensor.tolist()


def test_an_operation_outlives_the_wait_that_ctrl_c_ends(tmp_path):
    ranks = Ranks(2, waits_again, str(tmp_path))
    reach(ranks, tmp_path)
    os.kill(ranks.processes[0].pid, signal.SIGINT)
    assert ranks.results(patience=PATIENCE / 2) == {0: [1.0] * 4, 1: [1.0] * 4}


def starts_alone(_rank, _world, folder, method, rank):
    note_waits(folder)
    pathlib.Path(folder, "ready").touch()
    try:
        start("kolo", method, rank, 2, timeout=PATIENCE)
    except KeyboardInterrupt:
        return "interrupted"


@pytest.mark.parametrize(("kind", "rank"), [("file", 0), ("tcp", 0), ("tcp", 1)])
def test_ctrl_c_ends_a_start(tmp_path, kind, rank):
    """Of a rank in kolo's rendezvous, and of ranks in PyTorch's TCP store: 0 serves it, and 1 finds no server."""
    method = f"file://{tmp_path}/store" if kind == "file" else f"tcp://127.0.0.1:{free_port()}"
    ranks = Ranks(1, starts_alone, str(tmp_path), method, rank)
    reach(ranks, tmp_path)
    os.kill(ranks.processes[0].pid, signal.SIGINT)
    assert ranks.results(patience=PATIENCE / 2) == {0: "interrupted"}


def handled(rank, world, folder, is_async):
    """A handler calls the group while rank 0 waits for rank 1, and then ends it."""
    import torch
    import torch.distributed as dist

    start("kolo", f"file://{folder}/store", rank, world, timeout=PATIENCE)
    tensor = torch.ones(4)
    if rank == 1:
        wait_for(pathlib.Path(folder, "handled"))
        try:
            dist.all_reduce(tensor)
        except RuntimeError as error:
            return str(error)
        return None
    said = []

    def handle(_, frame):
        if not is_in_call(frame) or said:
            return
        pathlib.Path(folder, "waits").touch()
        try:
            work = dist.all_reduce(torch.ones(1), async_op=True)
            said.append(f"started {work.is_completed()}")
        except ValueError as error:
            said.append(str(error))
        dist.destroy_process_group()
        pathlib.Path(folder, "handled").touch()
        raise SystemExit(3)

    signal.signal(signal.SIGUSR1, handle)
    pathlib.Path(folder, "ready").touch()
    try:
        if is_async:
            wait(dist.irecv(tensor, 1))
        else:
            dist.all_reduce(tensor)
    except SystemExit:
        return said[0]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_handler_may_end_the_group(tmp_path, is_async):
    """It may use the group only if another thread runs the call that is waited for."""
    ranks = Ranks(2, handled, str(tmp_path), is_async)
    reach(ranks, tmp_path)
    found = ranks.results(patience=PATIENCE / 2)
    assert "rank 0" in found[1], found
    assert found[0] == "started False" if is_async else "another call of this thread waits" in found[0], found
