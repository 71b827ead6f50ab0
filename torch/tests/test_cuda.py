"""Tensors on a GPU, which travel by way of the host. Ranks share GPUs if there are fewer."""

import pytest
import torch
from harness import Ranks, start

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT RUN: CUDA tensors, there is no GPU here")

WORLD = 2
# Several of the pieces of 4 MiB that are copied and reduced side by side, and a part of one.
MANY = 3 * (1 << 20) + 12_345


def device_of(rank):
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def in_pieces(rank, world, device):
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
    assert (tensor == (3 if rank == 0 else 2)).all()
    empty = torch.zeros(0, device=device)
    dist.all_reduce(empty)


def not_contiguous(rank, world, device):
    import torch.distributed as dist

    memory = torch.zeros(1000, 2000, device=device)
    view = memory.t()[1:1999:2, ::3]
    view.fill_(rank + 1.0)
    dist.all_reduce(view)
    assert (view == 3).all() and memory.sum() == 3 * view.numel()
    outputs = [torch.zeros(4, 3, device=device).t() for _ in range(world)]
    dist.all_gather(outputs, torch.full((4, 3), float(rank), device=device).t())
    assert all((output == other).all() for other, output in enumerate(outputs))


def other_collectives(rank, world, device):
    import torch.distributed as dist

    output = torch.zeros(world * 100, device=device)
    dist.all_gather_into_tensor(output, torch.full((100,), float(rank), device=device))
    assert torch.equal(output.cpu(), torch.arange(float(world)).repeat_interleave(100))
    output = torch.zeros(100, device=device)
    dist.reduce_scatter_tensor(output, torch.ones(world * 100, device=device))
    assert (output == world).all()
    output = torch.zeros(world, device=device)
    dist.all_to_all_single(output, torch.full((world,), float(rank), device=device))
    assert torch.equal(output.cpu(), torch.arange(float(world)))
    if rank == 0:
        dist.send(torch.ones(5000, device=device), 1)
    else:
        received = torch.zeros(5000, device=device)
        dist.recv(received, 0)
        assert (received == 1).all()


def side_streams(rank, world, device):
    """What a stream wrote before the call is what is reduced, and what it does afterwards sees the result."""
    import torch.distributed as dist

    side = torch.cuda.Stream(device)
    for _ in range(5):
        tensor = torch.zeros(MANY, device=device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            # Busy for a while, so that a call that does not wait for the stream reads zeros.
            torch.cuda._sleep(50_000_000)
            tensor.fill_(rank + 1.0)
            work = dist.all_reduce(tensor, async_op=True)
            work.wait()
            doubled = tensor * 2
        side.synchronize()
        assert (doubled == 6).all() and (tensor == 3).all()


def futures(rank, world, device):
    import torch.distributed as dist

    tensor = torch.full((MANY,), rank + 1.0, device=device)
    future = dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0] * 2)
    doubled = future.wait()
    assert doubled.device == device and (doubled == 6).all()


def ddp_equals_cpu(rank, world, device):
    from torch.nn.parallel import DistributedDataParallel

    def train(on):
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 5)).double().to(on)
        wrapped = DistributedDataParallel(module, device_ids=None if on.type == "cpu" else [on.index])
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        for step in range(3):
            inputs = torch.randn(8, 20, dtype=torch.double, generator=torch.Generator().manual_seed(10 * step + rank))
            optimizer.zero_grad()
            wrapped(inputs.to(on)).square().mean().backward()
            optimizer.step()
        return torch.cat([value.detach().cpu().flatten() for value in module.state_dict().values()])

    torch.testing.assert_close(train(device), train(torch.device("cpu")), rtol=1e-9, atol=1e-10)


def on_gpus(rank, world, method, name):
    import torch.distributed as dist

    start("cpu:kolo,cuda:kolo", method, rank, world)
    PROGRAMS[name](rank, world, device_of(rank))
    dist.barrier()
    dist.destroy_process_group()


PROGRAMS = {
    program.__name__: program for program in (in_pieces, not_contiguous, other_collectives, side_streams, futures, ddp_equals_cpu)
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_on_a_gpu(tmp_path, name):
    Ranks(WORLD, on_gpus, f"file://{tmp_path}/store", name).results()
