"""Tensors on a GPU, directly or through the host. Ranks share GPUs if there are fewer GPUs."""

import copy
import datetime
import json
import os
import signal
import time
import traceback
from tempfile import TemporaryDirectory

import checks_collectives  # noqa: F401
import checks_hooks
import moved
import pytest
import torch
from harness import CHECKS, PATIENCE, NotRun, Ranks, checked, judge, once, run_checks, start
from torch import nn

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT RUN: CUDA tensors, there is no GPU here")

# Several of the segments of 4 MiB that are copied and reduced side by side, and a part of one.
MANY = 3 * (1 << 20) + 12_345

# How tensors get from one rank to another: where they are; through kolo's pinned memory; copied by
# torch_kolo.
PATHS = {
    "direct": {"KOLO_DEVICES": "cuda"},
    "staged": {"KOLO_DEVICES": "cuda", "KOLO_DEVICE_PATH": "staged"},
    "host": {"KOLO_DEVICES": "none"},
}
CASES = [(2, "direct"), (4, "direct"), (2, "staged"), (2, "host")]

# The paths of kolo's operations in each of these, as torch_kolo.stats() names them: those of large
# ones, and that of small ones and messages. torch_kolo's own copies are no operation on a device.
COUNTED = {"direct": {"in_place", "through_areas", "one_shot", "whole"}, "staged": {"staged", "whole"}, "host": set()}


def device_of(rank):
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def note(what, seconds):
    """For the report of scripts/gpu-check.sh."""
    if file := os.environ.get("KOLO_GPU_FIGURES"):
        with open(file, "a") as figures:
            print(json.dumps({"what": what, "seconds": round(seconds, 4)}), file=figures)


def reach_each_other(world):
    """Whether the GPUs of all ranks can reach each other's memory, without which no path is direct."""
    gpus = range(min(world, torch.cuda.device_count()))
    return all(torch.cuda.can_device_access_peer(one, other) for one in gpus for other in gpus if one != other)


def paths_taken():
    """How many operations of the default group took each path. Those before a barrier have been counted."""
    import torch_kolo

    return {path: count for path, count in torch_kolo.stats()["device"].items() if count}


# ---- Every collective, as on the host ----


def run_moved(rank, world, names, method, on):
    with moved.to(device_of(rank) if on == "cuda" else torch.device(on)):
        return run_checks(rank, world, names, method)


@once
def outcomes(world, path, on):
    names = [name for name in moved.CHECKS if name in CHECKS]
    with TemporaryDirectory() as folder:
        ranks = Ranks(world, run_moved, names, f"file://{folder}/store", on, environment=PATHS[path])
        return ranks.results(patience=600)


@needs_gpu
@pytest.mark.parametrize("name", moved.CHECKS)
@pytest.mark.parametrize("world,path", CASES)
def test_collective_on_a_gpu(world, path, name):
    judge(outcomes(world, path, "cuda"), name)


@pytest.mark.parametrize("name", moved.CHECKS)
@pytest.mark.parametrize("path", ["host", "direct"])
def test_collective_with_tensors_moved_to_other_memory(path, name):
    """Moving tensors is right, also without a GPU, and so are host tensors in a group with devices."""
    judge(outcomes(2, path, "cpu"), name)


# ---- Callbacks and hooks ----

OF_HOOKS = [name for name, function in CHECKS.items() if function.__module__ == "checks_hooks"]


@once
def outcomes_of_hooks(world, path):
    return checked(world, OF_HOOKS, {**PATHS[path], checks_hooks.DEVICE: "cuda"})


@needs_gpu
@pytest.mark.parametrize("name", OF_HOOKS)
@pytest.mark.parametrize("world,path", CASES)
def test_hook_on_a_gpu(world, path, name):
    judge(outcomes_of_hooks(world, path), name)


def tells_of_devices(rank, world, method):
    import torch.distributed as dist

    start("kolo", method, rank, world)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    # Tensors on the host have no streams: wait() waits on the host, with and without the option.
    for is_blocking in (False, True):
        import torch_kolo

        options = torch_kolo.Options()
        options.blocking_wait = is_blocking
        group = dist.new_group(pg_options=options, timeout=datetime.timedelta(seconds=240))
        tensor = torch.ones(100_000)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        work.wait()
        assert work.is_completed() and (tensor == world).all()
        assert group._get_backend(torch.device("cpu")).has_devices == backend.has_devices
    return backend.has_devices


@pytest.mark.parametrize("path", PATHS)
def test_devices_are_there_where_rank_0_wants_them_and_a_driver_is(tmp_path, path):
    found = Ranks(2, tells_of_devices, f"file://{tmp_path}/store", environment=PATHS[path]).results()
    assert found == dict.fromkeys(range(2), path != "host" and torch.cuda.is_available())


# ---- Streams, and what else only devices have ----


def total(world):
    return world * (world + 1) / 2


def large_ones(rank, world, device):
    import torch.distributed as dist

    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for is_async in (False, True):
            tensor = (torch.arange(MANY, device=device) % 7 + rank).to(dtype)
            work = dist.all_reduce(tensor, async_op=is_async)
            if work:
                work.wait()
            expected = sum((torch.arange(MANY) % 7 + other).to(dtype) for other in range(world))
            assert torch.equal(tensor.cpu(), expected), (dtype, is_async)
    tensor = torch.arange(float(MANY), device=device) * (rank + 1)
    dist.broadcast(tensor, src=1)
    assert torch.equal(tensor.cpu(), torch.arange(float(MANY)) * 2)
    tensor = torch.full((MANY,), rank + 1.0, device=device)
    dist.reduce(tensor, dst=0)
    assert (tensor == (total(world) if rank == 0 else rank + 1)).all()
    dist.all_reduce(torch.zeros(0, device=device))


def one_tensor_again_and_again(rank, world, device):
    """The other ranks open the memory of a tensor in its first operations, and then use it where it is."""
    import torch.distributed as dist

    calls = 10
    tensor = torch.empty(MANY, device=device)
    for _ in range(calls):
        tensor.fill_(rank + 1.0)
        dist.all_reduce(tensor)
        assert (tensor == total(world)).all()
    dist.barrier()
    took = paths_taken()
    if not has_devices(device):
        assert not took, took
    elif os.environ.get("KOLO_DEVICE_PATH") == "staged":
        assert took == {"staged": calls}, took
    elif reach_each_other(world):
        assert took.get("in_place", 0) >= calls / 2, took
        assert took["in_place"] + took.get("through_areas", 0) == calls, took
    else:
        raise NotRun("direct access: the GPUs do not reach each other's memory")


def not_contiguous(rank, world, device):
    import torch.distributed as dist

    for is_async in (False, True):
        memory = torch.zeros(1000, 2000, device=device)
        view = memory.t()[1:1999:2, ::3]
        view.fill_(rank + 1.0)
        work = dist.all_reduce(view, async_op=is_async)
        if work:
            work.wait()
        assert (view == total(world)).all() and memory.double().sum() == total(world) * view.numel()
    outputs = [torch.zeros(4, 3, device=device).t() for _ in range(world)]
    dist.all_gather(outputs, torch.full((4, 3), float(rank), device=device).t())
    assert all((output == other).all() for other, output in enumerate(outputs))


def coalesced(rank, world, device):
    import torch.distributed as dist

    tensors = [torch.full((size,), rank + 1.0, device=device) for size in (1, 5, 4096, 300_001)]
    dist.all_reduce_coalesced(tensors)
    assert all((tensor == total(world)).all() for tensor in tensors)
    for is_async in (False, True):
        outputs = [torch.zeros(world * size, device=device) for size in (2, 300)]
        with dist._coalescing_manager(async_ops=is_async) as manager:
            for output, size in zip(outputs, (2, 300)):
                dist.all_gather_into_tensor(output, torch.full((size,), float(rank), device=device))
        if is_async:
            manager.wait()
        for output, size in zip(outputs, (2, 300)):
            assert torch.equal(output.cpu(), torch.arange(float(world)).repeat_interleave(size))
    one, other = torch.ones(3, device=device), torch.full((400_000,), float(rank), device=device)
    with dist._coalescing_manager(device=device, async_ops=True) as manager:
        dist.all_reduce(one)
        dist.broadcast(other, src=world - 1)
    manager.wait()
    assert (one == world).all() and (other == world - 1).all()


def messages(rank, world, device):
    import torch.distributed as dist

    to, come = (rank + 1) % world, (rank - 1) % world
    for count in (1, 5000, MANY):
        output = torch.zeros(count, device=device)
        operations = [
            dist.P2POp(dist.irecv, output, come),
            dist.P2POp(dist.isend, torch.full((count,), float(rank), device=device), to),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert (output == come).all()
        output = torch.zeros(count, device=device)
        works = [dist.irecv(output, come), dist.isend(torch.full((count,), float(rank), device=device), to)]
        for work in works:
            work.wait()
        assert (output == come).all()


def side_streams(rank, world, device):
    """The call reduces what the stream wrote before it, and later work of the stream sees the result."""
    import torch.distributed as dist

    side = torch.cuda.Stream(device)
    for is_async in (False, True) * 3:
        for count in (1000, MANY):
            tensor = torch.zeros(count, device=device)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                # Keep the stream busy, so that a call that does not wait for it reads zeros.
                torch.cuda._sleep(50_000_000)
                tensor.fill_(rank + 1.0)
                work = dist.all_reduce(tensor, async_op=is_async)
                if work:
                    work.wait()
                doubled = tensor * 2
            side.synchronize()
            assert (doubled == 2 * total(world)).all() and (tensor == total(world)).all()


def another_stream_waits(rank, world, device):
    """The calling stream continues, and the waiting stream sees the result."""
    import torch.distributed as dist

    side = torch.cuda.Stream(device)
    for _ in range(5):
        tensor = torch.full((MANY,), rank + 1.0, device=device)
        work = dist.all_reduce(tensor, async_op=True)
        with torch.cuda.stream(side):
            work.wait()
            doubled = tensor * 2
        side.synchronize()
        assert (doubled == 2 * total(world)).all()
        torch.cuda.current_stream(device).wait_stream(side)


def memory_that_is_let_go(rank, world, device):
    """The memory of a call is not reused before its end, even without a reference to it."""
    import torch.distributed as dist

    side = torch.cuda.Stream(device)
    for _ in range(10):
        kept = torch.zeros(MANY, device=device)
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            tensor = torch.full((MANY,), rank + 1.0, device=device)
            work = dist.all_reduce(tensor, async_op=True)
            other = torch.full((MANY,), 1.0, device=device)
            dist.all_reduce(other)
            work.wait()
            kept.copy_(tensor)
            del tensor, other, work
            # Takes the freed memory, if the allocator returns it.
            torch.full((MANY,), -1.0, device=device)
        side.synchronize()
        assert (kept == total(world)).all()


def memory_of_the_driver_meanwhile(rank, world, device):
    """Allocating and freeing memory while streams wait for operations causes no deadlock."""
    import torch.distributed as dist

    tensor = torch.full((MANY,), rank + 1.0, device=device)
    for i in range(1, 11):
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        torch.empty((MANY + i * (1 << 20),), device=device).fill_(1)
        torch.cuda.empty_cache()
        assert (tensor == total(world)).all()
        tensor.fill_(rank + 1.0)


def the_host_goes_on(rank, world, device):
    """wait() returns while the stream still has something to do that comes before the operation."""
    import torch.distributed as dist

    if not has_devices(device):
        raise NotRun("a host that does not wait: torch_kolo's own copies make it wait")

    # The first calls compile the kernels and open the memory of peers.
    tensor = torch.ones(MANY, device=device)
    for is_async in (False, True):
        work = dist.all_reduce(tensor, async_op=is_async)
        if work:
            work.wait()
    torch.cuda.synchronize()
    for is_async in (False, True):
        tensor.fill_(rank + 1.0)
        torch.cuda._sleep(2_000_000_000)
        busy = torch.cuda.Event()
        busy.record()
        work = dist.all_reduce(tensor, async_op=is_async)
        if work:
            work.wait()
            assert not work.is_completed()
        assert not busy.query(), "the host waited for the stream"
        assert (tensor == total(world)).all()
    # With blocking_wait, wait() does wait.
    tensor.fill_(rank + 1.0)
    torch.cuda._sleep(100_000_000)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait(datetime.timedelta(seconds=PATIENCE))
    assert work.is_completed() and work.is_success()


def barriers(rank, world, device):
    """Everything that the current stream was given is done, as with NCCL."""
    import torch.distributed as dist

    group = dist.new_group(backend="cuda:kolo")
    torch.cuda._sleep(200_000_000)
    done = torch.cuda.Event()
    done.record()
    dist.barrier(group, device_ids=[device.index])
    assert done.query()


def futures(rank, world, device):
    import torch.distributed as dist

    for _ in range(5):
        tensor = torch.full((MANY,), rank + 1.0, device=device)
        future = dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0] * 2)
        doubled = future.wait()
        assert doubled.device == device and (doubled == 2 * total(world)).all()


def futures_in_the_order_of_streams(rank, world, device):
    """The future is complete at once, and its callback only gives work to streams."""
    import torch.distributed as dist

    if not has_devices(device):
        raise NotRun("a future in the order of streams: torch_kolo's own copies need the host")
    # The first call compiles the kernels and opens the memory of peers.
    dist.all_reduce(torch.ones(MANY, device=device))
    torch.cuda.synchronize()
    tensor = torch.full((MANY,), rank + 1.0, device=device)
    torch.cuda._sleep(2_000_000_000)
    busy = torch.cuda.Event()
    busy.record()
    future = dist.all_reduce(tensor, async_op=True).get_future()
    assert future.done()
    doubled = future.then(lambda done: done.value()[0] * 2).wait()
    assert not busy.query(), "the host waited for the stream"
    assert (doubled == 2 * total(world)).all()


def mixed_devices_of_one_group(rank, world, device):
    import torch.distributed as dist

    for _ in range(5):
        on_device, on_host = torch.full((MANY,), rank + 1.0, device=device), torch.full((1000,), rank + 1.0)
        works = [dist.all_reduce(on_device, async_op=True), dist.all_reduce(on_host, async_op=True)]
        for work in reversed(works):
            work.wait()
        assert (on_device == total(world)).all() and (on_host == total(world)).all()


def a_graph(rank, world, device):
    import torch.distributed as dist

    if not has_devices(device):
        raise NotRun("graphs, which torch_kolo's own copies do not know")
    stream = torch.cuda.Stream(device)
    for count in (100, MANY):
        values, gathered = torch.zeros(count, device=device), torch.zeros(world * count, device=device)
        stream.wait_stream(torch.cuda.current_stream(device))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            dist.all_reduce(values)
            work = dist.all_gather_into_tensor(gathered, values * 2, async_op=True)
            work.wait()
            gathered.add_(1)
        for replay in range(3):
            values.fill_(rank + replay)
            graph.replay()
            expected = sum(peer + replay for peer in range(world))
            assert (values == expected).all(), (count, replay, values[:3])
            assert (gathered == 2 * expected + 1).all(), (count, replay, gathered[:3])
            # A call of its own between two replays.
            dist.all_reduce(values)
            assert (values == world * expected).all(), (count, replay, values[:3])
        torch.cuda.synchronize()
        dist.barrier()


def ddp_equals_cpu(rank, world, device):
    from torch.nn.parallel import DistributedDataParallel

    def train(on, **options):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 5)).double().to(on)
        wrapped = DistributedDataParallel(module, device_ids=None if on.type == "cpu" else [on.index], bucket_cap_mb=0.005, **options)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        for step in range(5):
            inputs = torch.randn(8, 20, dtype=torch.double, generator=torch.Generator().manual_seed(10 * step + rank))
            optimizer.zero_grad()
            wrapped(inputs.to(on)).square().mean().backward()
            optimizer.step()
        return torch.cat([value.detach().cpu().flatten() for value in module.state_dict().values()])

    expected = train(torch.device("cpu"))
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
        torch.testing.assert_close(train(device, **options), expected, rtol=1e-9, atol=1e-10, msg=str(options))


def resnet18():
    try:
        from torchvision.models import resnet18
    except ImportError:
        import sys
        from pathlib import Path

        sys.path.append(str(Path(__file__).resolve().parent.parent / "examples" / "imagenet"))
        from resnet import resnet18
    return resnet18(num_classes=10)


STEPS = 100


def ddp_resnet_equals_one_process(rank, world, device):
    """The same global batch, in one process and divided, gives the same model (pytorch#170812: gradients that were silently wrong).

    In double precision, so that only what is wrong makes a difference; normalisation by each rank's part of a batch would make
    one of its own, so it uses what it learnt before, which stays as it is.
    """
    from torch.nn.parallel import DistributedDataParallel

    torch.backends.cudnn.deterministic = True
    torch.manual_seed(0)
    alone = resnet18().double().to(device).eval()
    model = copy.deepcopy(alone)
    divided = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01, momentum=0.9) for each in (alone, model)]
    generator = torch.Generator().manual_seed(1)
    batch = 2 * world
    for _ in range(STEPS):
        images = torch.randn(batch, 3, 32, 32, dtype=torch.double, generator=generator).to(device)
        labels = torch.randint(10, (batch,), generator=generator).to(device)
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.cross_entropy(alone(images), labels).backward()
        mine = slice(2 * rank, 2 * rank + 2)
        nn.functional.cross_entropy(divided(images[mine]), labels[mine]).backward()
        for optimizer in optimizers:
            optimizer.step()
    moved_by = 0.0
    torch.manual_seed(0)
    for before, one, other in zip(resnet18().double().parameters(), alone.parameters(), model.parameters()):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)
        moved_by = max(moved_by, (before.to(device) - one).abs().max().item())
    assert moved_by > 1e-3, "nothing was learnt, so nothing was compared"


def has_devices(device):
    import torch.distributed as dist

    return dist.group.WORLD._get_backend(device).has_devices


def run_programs(rank, world, names, folder, path):
    """Runs checks in one process, each in a group of its own, because starting CUDA is slow. Returns failures by name."""
    import torch.distributed as dist

    device = device_of(rank)
    outcomes = {}
    for name in names:
        if rank == 0:
            # pytest says only what has ended, and the log of scripts/gpu-check.sh also what hangs.
            print(f"{world} ranks, {path}: {name}", flush=True)
        start("cpu:kolo,cuda:kolo", f"file://{folder}/{name}", rank, world, timeout=60)
        try:
            assert has_devices(device) == (path != "host"), "kolo was built without devices, or finds no driver"
            PROGRAMS[name](rank, world, device)
            dist.barrier()
            if path != "direct" or reach_each_other(world):
                took = paths_taken()
                assert took.keys() <= COUNTED[path], f"operations took another path than {path}: {took}"
            outcomes[name] = None
        except NotRun as why:
            outcomes[name] = f"NOT RUN: {why}"
        except BaseException:
            outcomes[name] = traceback.format_exc()
        # Ranks that wait for this one learn that it has left.
        dist.destroy_process_group()
    return outcomes


@once
def outcomes_of_programs(world, path):
    with TemporaryDirectory() as folder:
        ranks = Ranks(world, run_programs, list(PROGRAMS), folder, path, environment=PATHS[path])
        return ranks.results(patience=600)


PROGRAMS = {
    program.__name__: program
    for program in (
        large_ones,
        one_tensor_again_and_again,
        not_contiguous,
        coalesced,
        messages,
        side_streams,
        another_stream_waits,
        memory_that_is_let_go,
        memory_of_the_driver_meanwhile,
        the_host_goes_on,
        barriers,
        futures,
        futures_in_the_order_of_streams,
        mixed_devices_of_one_group,
        a_graph,
        ddp_equals_cpu,
        ddp_resnet_equals_one_process,
    )
}


@needs_gpu
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("world,path", CASES)
def test_on_a_gpu(world, path, name):
    judge(outcomes_of_programs(world, path), name)


# ---- Faults ----

# Far more than needed. The report records the time itself.
SOON = 20


def dies(rank, world, method):
    import torch.distributed as dist

    start("cpu:kolo,cuda:kolo", method, rank, world)
    device = device_of(rank)
    tensor = torch.ones(MANY, device=device)
    for _ in range(3):
        dist.all_reduce(tensor)
    torch.cuda.synchronize()
    dist.barrier()
    # Some operations are in flight at the failure, and the survivor's stream waits for further
    # ones.
    tensor.fill_(1)
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    message = None
    try:
        works += [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
        for work in works:
            work.wait()
        # The streams continue after the failure. Asking for the outcome reports it.
        torch.cuda.synchronize()
        for work in works:
            work.wait(datetime.timedelta(seconds=PATIENCE))
    except dist.DistBackendError as error:
        message = str(error)
    took = time.monotonic() - began
    torch.cuda.synchronize()
    # Exact in float32.
    other = torch.arange(100.0, device=device)
    assert (other @ other).item() == sum(float(i) ** 2 for i in range(100)), "the context is not usable"
    return message, took


@needs_gpu
@pytest.mark.parametrize("path", PATHS)
def test_a_killed_rank_is_named_and_the_context_goes_on(tmp_path, path):
    outcomes = Ranks(2, dies, f"file://{tmp_path}/store", environment=PATHS[path]).results(expected=1)
    message, took = outcomes[0]
    note(f"a killed rank is named, {path}", took)
    assert message and "rank 1" in message, message
    assert took < SOON
