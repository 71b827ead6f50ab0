"""What a process group tells of the end of its calls: results, durations, PyTorch's hooks, and the
entries and the files of its flight recorder.
"""

import datetime
import glob
import json
import os
import pickle
import subprocess
import sys
import sysconfig
import threading
import time
import warnings

import pytest
import torch
from harness import KILL, PATIENCE, Ranks, is_in_python, start
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, BarrierOptions

# Values of PyTorch's WorkResult.
SUCCESS, TIMEOUT, COMM_ERROR = range(3)


def backend_of(group):
    return group._get_backend(torch.device("cpu"))


def needs(what, where, name):
    return pytest.mark.skipif(not hasattr(where, name), reason=f"NOT RUN: PyTorch {torch.__version__} has no {what}")


needs_abort_hooks = needs("abort hooks", torch._C._distributed_c10d.Backend, "register_abort_hook")
needs_recorder = needs("flight recorder for all backends", torch._C._distributed_c10d, "FlightRecorderHook")


def stand_by(method, name):
    """Ranks meet by files where their group may have failed."""
    return f"{method.removeprefix('file://')}.{name}"


def wait_for(condition, what):
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, f"{what} has not happened"
        time.sleep(0.01)


# ---- Results and durations ----


def every_call(rank, world, is_async):
    """Names and works of calls, all of which have ended, and when they began. Rank 1 is 50 ms late."""
    import torch.distributed as dist

    def late(name, call):
        if rank != 0:
            time.sleep(0.05)
        began = time.monotonic()
        work = call()
        work.wait()
        return name, work, began

    group = dist.group.WORLD
    tensor, large = torch.ones(1000), torch.ones(1000 * world)
    reduced, gathered, barrier = AllreduceOptions(), AllgatherOptions(), BarrierOptions()
    for options in (reduced, gathered, barrier):
        # Older versions of PyTorch do not tell a backend.
        if hasattr(options, "asyncOp"):
            options.asyncOp = is_async
    yield late("all_reduce", lambda: group.allreduce([tensor], reduced))
    yield late("all_gather", lambda: group.allgather([list(large.chunk(world))], [tensor], gathered))
    yield late("barrier", lambda: group.barrier(barrier))
    if is_async:
        yield late("message", lambda: dist.irecv(tensor, 1) if rank == 0 else dist.isend(tensor, 0))


def results_of_calls(rank, world, method):
    import torch.distributed as dist

    start("kolo", method, rank, world)
    dist.group.WORLD._enable_collectives_timing()
    found = []
    for is_async in (False, True):
        for name, work, began in every_call(rank, world, is_async):
            result = work.get_future_result()
            assert result.done() and result.value() == SUCCESS, (name, result.value())
            found.append((name, began, work._get_duration()))
    # A call that has not ended, and a group of calls.
    if rank == 0:
        work = dist.irecv(torch.ones(1), 1)
        with pytest.raises(RuntimeError, match="after its end"):
            work._get_duration()
        result = work.get_future_result()
        assert not result.done()
        dist.send(torch.ones(1), 1)
        assert result.wait() == SUCCESS and work.is_completed() and work._get_duration() > 0
    else:
        dist.recv(torch.ones(1), 0)
        dist.send(torch.ones(1), 0)
    backend = backend_of(dist.group.WORLD)
    start_coalescing = getattr(backend, "_start_coalescing", None) or backend.start_coalescing
    start_coalescing()
    parts = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(3)]
    work = (getattr(backend, "_end_coalescing", None) or backend.end_coalescing)()
    assert work.get_future_result().wait() == SUCCESS
    work.wait()
    assert work._get_duration() == pytest.approx(sum(part._get_duration() for part in parts))
    dist.destroy_process_group()
    return found


def test_every_call_has_a_result_and_a_duration(tmp_path):
    found = Ranks(2, results_of_calls, f"file://{tmp_path}/store").results()
    assert len(found[0]) == len(found[1]) == 7
    for (name, began, milliseconds), (_, late, of_late) in zip(found[0], found[1]):
        # Rank 0 waits for rank 1. On a busy machine, rank 1 may wait for rank 0, too. Half, because
        # the operation begins a little after the call.
        assert max(0, (late - began) * 1000 / 2) < milliseconds < PATIENCE * 1000, (name, late - began, milliseconds)
        assert 0 < of_late < PATIENCE * 1000, (name, of_late)


def fails_with_a_result(rank, world, method, how):
    import torch.distributed as dist

    start("kolo", method, rank, world)
    dist.barrier()
    done = stand_by(method, "done")
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), KILL)
        wait_for(lambda: os.path.exists(done), "the failure of rank 0")
        return None
    options = AllreduceOptions()
    if how == "deadline":
        options.timeout = datetime.timedelta(seconds=1)
    work = dist.group.WORLD.allreduce([torch.ones(1)], options)
    # Each future completes, and so does one that is asked for afterwards.
    result = work.get_future_result()
    future = work.get_future()
    found = [result.wait()]
    with pytest.raises(RuntimeError):
        future.wait()
    with pytest.raises(dist.DistBackendError):
        work.wait()
    found.append(work.get_future_result().wait())
    open(done, "w").close()
    return found


@pytest.mark.parametrize("how", ["killed", "deadline"])
def test_a_failed_call_has_a_result(tmp_path, how):
    found = Ranks(2, fails_with_a_result, f"file://{tmp_path}/store", how).results(expected=1 if how == "killed" else 2)
    assert found[0] == [COMM_ERROR if how == "killed" else TIMEOUT] * 2


def waits_in_callbacks(rank, world, method):
    """A callback of each of the two futures of a call waits for the other future."""
    import torch.distributed as dist

    start("kolo", method, rank, world)
    for _ in range(10):
        dist.barrier()
        if rank == 1:
            # Rank 0 has attached the callbacks.
            dist.recv(torch.ones(1), 0)
        work = dist.all_reduce(torch.ones(10), async_op=True)
        if rank == 1:
            work.wait()
            continue
        future, result = work.get_future(), work.get_future_result()
        one = result.then(lambda _: future.wait()[0].sum().item())
        other = future.then(lambda _: result.wait())
        dist.send(torch.ones(1), 1)
        assert (one.wait(), other.wait()) == (10.0 * world, SUCCESS)
    dist.destroy_process_group()


def test_callbacks_of_both_futures_wait_for_each_other(tmp_path):
    Ranks(2, waits_in_callbacks, f"file://{tmp_path}/store").results()


# ---- Abort hooks ----


def native_name():
    with open(f"/proc/self/task/{threading.get_native_id()}/comm") as name:
        return name.read().strip()


# As with python -W error: a hook that raises gives rise to a warning.
WARNINGS_ARE_ERRORS = ", warnings are errors"


def runs_abort_hooks(rank, world, method, how):
    import torch.distributed as dist

    start("kolo", method, rank, world)
    group, told = dist.group.WORLD, []
    if how.endswith(WARNINGS_ARE_ERRORS):
        how = how.removesuffix(WARNINGS_ARE_ERRORS)
        warnings.simplefilter("error")

    def hook():
        # It blocks, and meanwhile other threads of Python run. It calls the group, which has failed.
        time.sleep(0.2)
        with pytest.raises(dist.DistBackendError):
            dist.all_reduce(torch.ones(1))
        told.append(native_name())

    def wrong():
        raise KeyError("of the hook")

    backend_of(group).register_abort_hook(6, wrong)
    group.register_abort_hook(7, hook)
    group.register_abort_hook(8, lambda: told.append("removed"))
    group.unregister_abort_hook(8)
    tensors = [torch.ones(1000) for _ in range(3)]
    dist.all_reduce(tensors[0])
    if rank == 1:
        if how != "mute":
            os.kill(os.getpid(), KILL)
        # Rank 0 ends the group, and there is no failure for its own hooks.
        with pytest.raises(dist.DistBackendError):
            dist.recv(tensors[0], 0)
        return told
    if how == "mute":
        works = [dist.irecv(tensor, 1) for tensor in tensors]
        backend_of(group).abort()
        for work in works:
            with pytest.raises(dist.DistBackendError):
                work.wait()
        dist.destroy_process_group()
        return told
    if how == "blocking":
        with pytest.raises(dist.DistBackendError):
            dist.all_reduce(tensors[0])
    elif how == "barrier":
        with pytest.raises(dist.DistBackendError):
            group.monitored_barrier(datetime.timedelta(seconds=PATIENCE), wait_all_ranks=True)
    elif how == "threads":
        # All hooks have run when a call of any thread fails.
        outcomes = []

        def fail():
            with pytest.raises(dist.DistBackendError):
                dist.all_reduce(torch.ones(1000), async_op=True).wait()
            outcomes.append(len(told))

        threads = [threading.Thread(target=fail) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        # The call of the hook itself fails at once.
        assert outcomes == [1] * 4, outcomes
    elif how == "polled":
        # Without is_completed() releasing Python's lock, which the other threads need.
        work = dist.all_reduce(tensors[0], async_op=True)
        wait_for(work.is_completed, "the end of the call")
        with pytest.raises(dist.DistBackendError):
            work.wait()
    elif how == "unattended":
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        wait_for(lambda: told, "the hook")
        assert all(work.is_completed() and not work.is_success() for work in works)
    elif how == "dropped":
        dist.all_reduce(tensors[0], async_op=True)
        wait_for(lambda: told, "the hook")
    # Another failed call does not run them again.
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(tensors[0])
    dist.destroy_process_group()
    return told


@needs_abort_hooks
@pytest.mark.parametrize("how", ["blocking", "barrier", "threads", "polled", "unattended", "dropped", f"blocking{WARNINGS_ARE_ERRORS}", f"unattended{WARNINGS_ARE_ERRORS}"])
def test_abort_hooks_run_once_when_the_group_fails(tmp_path, how):
    told = Ranks(2, runs_abort_hooks, f"file://{tmp_path}/store", how).results(expected=1)[0]
    assert len(told) == 1 and told[0] not in ("removed", "kolo-progress"), told


@needs_abort_hooks
def test_abort_hooks_do_not_run_where_the_user_ends_the_group(tmp_path):
    found = Ranks(2, runs_abort_hooks, f"file://{tmp_path}/store", "mute").results()
    # For rank 1 it is the failure of a peer.
    assert found[0] == [] and len(found[1]) == 1, found


def ends_its_group(rank, world, method):
    """A hook ends its group, while another thread has found the failure of a second call."""
    import torch.distributed as dist

    start("kolo", method, rank, world)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), KILL)
    seconds = []

    def hook():
        # Longer than the other thread needs to find it.
        time.sleep(0.5)
        began = time.monotonic()
        dist.destroy_process_group()
        seconds.append(time.monotonic() - began)

    dist.group.WORLD.register_abort_hook(1, hook)
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(3)]
    with pytest.raises(dist.DistBackendError):
        works[0].wait()
    return seconds


@needs_abort_hooks
def test_a_hook_may_end_its_group(tmp_path):
    (seconds,) = Ranks(2, ends_its_group, f"file://{tmp_path}/store").results(expected=1)[0]
    assert seconds < PATIENCE / 2, "it waited for the timeout of the group"


HOOK_AT_EXIT = """
import os, sys, time
import torch, torch.distributed as dist
rank, method = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("kolo", init_method=method, rank=rank, world_size=2)
began = open(method.removeprefix("file://") + ".began", "a")
def hook():
    print("began", file=began, flush=True)
    for _ in range(20):
        time.sleep(0.05)
    print("hook ends", flush=True)
dist.group.WORLD.register_abort_hook(1, hook)
if rank == 1:
    os._exit(0)
work = dist.all_reduce(torch.ones(1000), async_op=True)
while not os.path.getsize(began.name):
    time.sleep(0.01)
print("main ends", flush=True)
"""


@needs_abort_hooks
def test_a_program_may_end_while_a_hook_runs(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", HOOK_AT_EXIT, str(rank), f"file://{tmp_path}/store"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(2)
    ]
    output, _ = ranks[0].communicate(timeout=PATIENCE)
    ranks[1].communicate(timeout=PATIENCE)
    assert ranks[0].returncode == 0, output
    assert output.index("main ends") < output.index("hook ends"), output


# ---- Completion hooks ----


def learns_of_completions(rank, world, method):
    import torch.distributed as dist

    start("kolo", method, rank, world)
    group = dist.group.WORLD
    if is_in_python(group):
        with pytest.raises((ValueError, RuntimeError), match="use the backend in C\\+\\+"):
            group._register_on_completion_hook(lambda info: None)
        dist.destroy_process_group()
        return None
    infos, tensor = [], torch.ones(1000)

    def hook(info):
        # It may call the group, and wait.
        if info.op_type == dist._OpType.BROADCAST if hasattr(dist, "_OpType") else str(info.op_type).endswith("BROADCAST"):
            dist.all_reduce(torch.ones(1))
        infos.append((str(info.op_type).split(".")[-1], info.seq, info.active_duration.total_seconds(), native_name()))

    group._register_on_completion_hook(hook)
    with pytest.raises(RuntimeError, match="already"):
        group._register_on_completion_hook(hook)
    if rank == 0:
        time.sleep(0.05)
    dist.all_reduce(tensor)
    held = dist.all_reduce(tensor, async_op=True)
    dist.broadcast(tensor, 0, async_op=True)
    wait_for(lambda: len(infos) == 4, "the hook")
    held.wait()
    group._wait_for_pending_works()
    dist.destroy_process_group()
    return infos


def test_completion_hooks_are_told_of_every_call(tmp_path):
    for infos in Ranks(2, learns_of_completions, f"file://{tmp_path}/store").results().values():
        if infos is None:
            continue
        # The call of the hook ends while the hook runs.
        assert sorted(info[:2] for info in infos) == [("ALLREDUCE", 1), ("ALLREDUCE", 2), ("ALLREDUCE", 4), ("BROADCAST", 3)]
        # Python counts whole microseconds: a short call may take none.
        assert all(0 <= seconds < PATIENCE and thread != "kolo-progress" for _, _, seconds, thread in infos), infos
        assert any(seconds > 0 for _, _, seconds, _ in infos), infos


# ---- PyTorch's flight recorder ----


def recorded():
    from torch._C._distributed_c10d import _dump_fr_trace_json

    return json.loads(_dump_fr_trace_json(backend="kolo")).get("entries", [])


def name_of(entry):
    """The name of the call, of "kolo:send 0->1"."""
    return entry["profiling_name"].split(":")[-1].split(" ")[0]


def records(rank, world, method):
    import torch.distributed as dist

    start("kolo", method, rank, world)
    tensor, large = torch.ones(1000), torch.ones(1000 * world)
    dist.all_reduce(tensor)
    dist.all_gather_into_tensor(large, tensor)
    dist.barrier()
    if rank == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.broadcast(tensor, 0)
    manager.wait()
    # No thread waits for this call.
    held = dist.all_reduce(tensor, async_op=True)
    in_python = is_in_python(dist.group.WORLD)
    if not in_python:
        wait_for(lambda: all(entry["state"] == "completed" for entry in recorded()), "the end of each call")
    entries = recorded()
    held.wait()
    dist.destroy_process_group()
    return in_python, [(name_of(entry), entry["state"], entry.get("duration_ms")) for entry in entries]


@needs_recorder
def test_calls_in_the_flight_recorder_complete(tmp_path):
    """With Gloo, which calls no completion hooks, they stay scheduled."""
    for rank, (in_python, entries) in Ranks(2, records, f"file://{tmp_path}/store").results().items():
        names = [name for name, _, _ in entries]
        assert names == ["all_reduce", "_all_gather_base", "barrier", "recv" if rank else "send", "broadcast", "all_reduce"]
        states = {state for _, state, _ in entries}
        # PyTorch asks a backend in Python for no completion hooks.
        assert states == {"scheduled" if in_python else "completed"}, entries
        if not in_python:
            assert all(duration is not None and duration > 0 for _, _, duration in entries), entries


def leaves_files(rank, world, method):
    import torch.distributed as dist

    start("kolo", method, rank, world)
    for _ in range(3):
        dist.all_reduce(torch.ones(10))
    if rank == world - 1:
        os.kill(os.getpid(), KILL)
    with pytest.raises(dist.DistBackendError):
        dist.all_gather_into_tensor(torch.ones(10 * world), torch.ones(10))
    return is_in_python(dist.group.WORLD)


@needs_recorder
def test_a_failure_leaves_files_of_the_flight_recorder(tmp_path):
    prefix = f"{tmp_path}/trace_"
    environment = {"TORCH_FR_DUMP_TEMP_FILE": prefix, "TORCH_FR_DUMP_ON_TIMEOUT": "1"}
    in_python = Ranks(3, leaves_files, f"file://{tmp_path}/store", environment=environment).results(expected=2)[0]
    files = sorted(glob.glob(prefix + "*"))
    assert files == [prefix + "0", prefix + "1"], files
    for file in files:
        with open(file, "rb") as opened:
            entries = pickle.load(opened)["entries"]
        states = [(name_of(entry), entry["state"]) for entry in entries]
        ended = "scheduled" if in_python else "completed"
        assert states == [("all_reduce", ended)] * 3 + [("_all_gather_base", "scheduled")], states
    # PyTorch's analyzer reads them.
    script = os.path.join(sysconfig.get_path("scripts"), "torchfrtrace")
    read = subprocess.run(
        [sys.executable, script, "--prefix", "trace_", "--allow-incomplete-ranks", str(tmp_path)], capture_output=True, text=True
    )
    assert read.returncode == 0 and "_all_gather_base" in read.stdout + read.stderr, (read.stdout, read.stderr)


def leaves_no_file(rank, world, method):
    import torch.distributed as dist

    start("kolo", method, rank, world)
    dist.all_reduce(torch.ones(10))
    with pytest.raises(ValueError):
        dist.all_reduce(torch.ones(10, dtype=torch.int32), dist.ReduceOp.AVG)
    dist.destroy_process_group()


@needs_recorder
def test_a_group_that_does_not_fail_leaves_no_file(tmp_path):
    prefix = f"{tmp_path}/trace_"
    Ranks(2, leaves_no_file, f"file://{tmp_path}/store", environment={"TORCH_FR_DUMP_TEMP_FILE": prefix}).results()
    assert not glob.glob(prefix + "*")
