"""Checks every collective. Each rank computes the expected result from the inputs of all ranks."""

import datetime
import sys
import time
import warnings

import torch
import torch.distributed as dist
from harness import EVERY_CASE, IS_WINE, NotRun, check, is_in_python, needs_gathers_of_several, needs_pytorch

# Import it before making a group, as programs do.
from torch.distributed import _coalescing_manager

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
EIGHTS = [torch.float8_e4m3fn, torch.float8_e5m2]
COMPLEX = [torch.complex64, torch.complex128]
ALL = [*FLOATS, *INTEGERS, torch.bool, *EIGHTS, *COMPLEX]
# No element, one word, one segment, several segments.
SIZES = [0, 1, 17, 5000, 300_001]
OPS = dist.ReduceOp


def make(rank, count, dtype):
    """A rank's elements: small whole numbers, so that sums are exact in every type."""
    base = (torch.arange(count) * (rank + 3) + rank) % 5
    if dtype == torch.bool:
        return base % 2 == 0
    if dtype in COMPLEX:
        return torch.complex(base.double(), (base + rank).double()).to(dtype)
    return base.to(dtype)


def bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8) if tensor.numel() else tensor.flatten()


def same(got, expected, what=""):
    assert got.dtype == expected.dtype and got.shape == expected.shape, (what, got.dtype, expected.dtype, got.shape, expected.shape)
    assert torch.equal(bits(got), bits(expected)), (what, got, expected)


def reduce_locally(op, tensors):
    dtype = tensors[0].dtype
    wide = torch.float64 if dtype.is_floating_point else torch.complex128 if dtype.is_complex else torch.int64
    stack = torch.stack([tensor.to(wide) for tensor in tensors])
    if dtype == torch.bool and op == OPS.SUM:
        return stack.amax(0).bool()
    result = {
        OPS.SUM: lambda: stack.sum(0),
        OPS.AVG: lambda: stack.mean(0),
        OPS.PRODUCT: lambda: stack.prod(0),
        OPS.MIN: lambda: stack.amin(0),
        OPS.MAX: lambda: stack.amax(0),
    }
    bitwise = {OPS.BAND: torch.bitwise_and, OPS.BOR: torch.bitwise_or, OPS.BXOR: torch.bitwise_xor}
    if op in bitwise:
        value = stack[0]
        for other in stack[1:]:
            value = bitwise[op](value, other)
        return value.to(dtype)
    return result[op]().to(dtype)


def reductions():
    for dtype in FLOATS:
        for op in [OPS.SUM, OPS.AVG, OPS.PRODUCT, OPS.MIN, OPS.MAX]:
            yield dtype, op
    for dtype in [*INTEGERS, torch.bool]:
        for op in [OPS.SUM, OPS.PRODUCT, OPS.MIN, OPS.MAX, OPS.BAND, OPS.BOR, OPS.BXOR]:
            yield dtype, op


def all_inputs(world, count, dtype):
    return [make(rank, count, dtype) for rank in range(world)]


def of(group):
    return dist.get_rank(group), dist.get_world_size(group)


def close(got, expected, op, what):
    """The same bits, but for an average, which is rounded."""
    if op == OPS.AVG:
        torch.testing.assert_close(got, expected)
    else:
        same(got, expected, what)


@check
def all_reduce_of_every_type_and_op(group):
    rank, world = of(group)
    for place, (dtype, op) in enumerate(reductions()):
        for count in SIZES:
            inputs = all_inputs(world, count, dtype)
            # Large ones in turns.
            for is_async in (False, True) if count < 10_000 or EVERY_CASE else (place % 2 == 0,):
                tensor = inputs[rank].clone()
                work = dist.all_reduce(tensor, op, group, async_op=is_async)
                if is_async:
                    work.wait()
                    assert work.is_completed() and work.is_success()
                if count:
                    close(tensor, reduce_locally(op, inputs), op, (dtype, op, count))


@check
def sums_of_products_with_a_factor(group):
    """PREMUL_SUM, by which FSDP2 divides gradients."""
    rank, world = of(group)
    total = world * (world + 1) / 2
    for dtype in [*FLOATS, *COMPLEX]:
        for factor in (0.5, torch.tensor([0.5])):
            op = dist._make_nccl_premul_sum(factor)
            for shape in ((), (3,), (2, 4)):
                tensor = torch.full(shape, rank + 1, dtype=dtype)
                dist.all_reduce(tensor, op, group)
                same(tensor, torch.full(shape, total / 2, dtype=dtype), (dtype, factor))
            tensors = [torch.full((count,), rank + 1.0, dtype=dtype) for count in (2, 5)]
            dist.all_reduce_coalesced(tensors, op, group)
            for tensor in tensors:
                same(tensor, torch.full_like(tensor, total / 2), (dtype, factor))
            mine = torch.full((4,), rank + 1, dtype=dtype)
            before = mine.clone()
            dist.reduce(mine, group_dst=0, op=op, group=group)
            same(mine, torch.full_like(mine, total / 2) if rank == 0 else before, (dtype, factor))
            whole = torch.full((3 * world,), rank + 1, dtype=dtype)
            before, part = whole.clone(), torch.empty(3, dtype=dtype)
            dist.reduce_scatter_tensor(part, whole, op, group)
            same(part, torch.full_like(part, total / 2), (dtype, factor))
            part.zero_()
            dist.reduce_scatter(part, list(whole.chunk(world)), op, group)
            same(part, torch.full_like(part, total / 2), (dtype, factor))
            same(whole, before, "the input has changed")
    gradients = torch.ones(3, requires_grad=True)
    dist.all_reduce(gradients.detach(), dist._make_nccl_premul_sum(0.5), group)
    same(gradients.detach(), torch.full((3,), world / 2))


@check
def all_reduce_of_complex_numbers(group):
    rank, world = of(group)
    for dtype in COMPLEX:
        inputs = all_inputs(world, 100, dtype)
        tensor = inputs[rank].clone()
        dist.all_reduce(tensor, group=group)
        same(tensor, reduce_locally(OPS.SUM, inputs))
        tensor = inputs[rank].clone()
        dist.all_reduce(tensor, OPS.AVG, group)
        torch.testing.assert_close(tensor, reduce_locally(OPS.AVG, inputs))
        # As C++ makes the call: without Python's view as real numbers.
        for op in (OPS.SUM, OPS.AVG):
            options = dist.AllreduceOptions()
            options.reduceOp = op
            tensor = inputs[rank].clone()
            group.allreduce([tensor], options).wait()
            close(tensor, reduce_locally(op, inputs), op, (dtype, op))


@check
def reductions_of_float8(group):
    """As computed in float32 and rounded by PyTorch, each number with each, also for what is too large."""
    rank, world = of(group)
    every = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    for dtype in EIGHTS:
        for op in (OPS.SUM, OPS.AVG, OPS.PRODUCT, OPS.MIN, OPS.MAX):
            if world == 2:
                # Each number with each, NaN and infinities as well.
                inputs = [every.repeat(256).view(dtype), every.repeat_interleave(256).view(dtype)]
            else:
                # Numbers with which no intermediate result is rounded, however the ranks share the work.
                inputs = [((torch.arange(4096) + other) % 3).to(dtype) for other in range(world)]
            inputs = [tensor[: tensor.numel() // world * world] for tensor in inputs]
            expected = reduce_locally_in_float32(op, inputs)

            def check_result(got, place=slice(None)):
                # Zeros of both signs are equal: either may be the minimum.
                torch.testing.assert_close(got.float(), expected[place].float(), rtol=0, atol=0, equal_nan=True)

            for is_async in (False, True):
                tensor = inputs[rank].clone()
                work = dist.all_reduce(tensor, op, group, async_op=is_async)
                if is_async:
                    work.wait()
                check_result(tensor)
            tensor = inputs[rank].clone()
            dist.reduce(tensor, group_dst=world - 1, op=op, group=group)
            if rank == world - 1:
                check_result(tensor)
            count = len(expected) // world
            part = torch.zeros(count, dtype=dtype)
            dist.reduce_scatter_tensor(part, inputs[rank].clone(), op, group)
            check_result(part, slice(rank * count, (rank + 1) * count))
    # What is too large for a type, and the average of what is too large before it is divided.
    for dtype, largest, overflow in ((torch.float8_e4m3fn, 448.0, 448.0), (torch.float8_e5m2, 57344.0, float("inf"))):
        tensor = torch.tensor([largest, -largest]).to(dtype)
        dist.all_reduce(tensor, group=group)
        assert torch.equal(tensor.float(), torch.tensor([overflow, -overflow])), tensor
        if world == 2:
            tensor = torch.full((3,), largest).to(dtype)
            dist.all_reduce(tensor, OPS.AVG, group)
            assert (tensor.float() == largest).all(), tensor
    try:
        dist.all_reduce(torch.ones(2).to(torch.float8_e5m2), dist._make_nccl_premul_sum(0.5), group)
    except ValueError as error:
        assert "cannot multiply" in str(error), error
    else:
        raise AssertionError("PREMUL_SUM of float8 is not refused")


def reduce_locally_in_float32(op, tensors):
    stack = torch.stack([tensor.float() for tensor in tensors])
    result = {
        OPS.SUM: lambda: stack.sum(0),
        OPS.AVG: lambda: stack.sum(0) / len(tensors),
        OPS.PRODUCT: lambda: stack.prod(0),
        OPS.MIN: lambda: stack.amin(0),
        OPS.MAX: lambda: stack.amax(0),
    }
    result = result[op]()
    if tensors[0].dtype == torch.float8_e4m3fn:
        # Before 2.13, PyTorch made NaN of what is too large.
        result = result.clamp(-448, 448)
    return result.to(tensors[0].dtype)


@check
def reduce_to_every_root(group):
    rank, world = of(group)
    for root, (dtype, op) in enumerate(reductions()):
        root %= world
        inputs = all_inputs(world, 999, dtype)
        tensor = inputs[rank].clone()
        dist.reduce(tensor, group_dst=root, op=op, group=group)
        if rank == root:
            close(tensor, reduce_locally(op, inputs), op, (dtype, op))
        else:
            same(tensor, inputs[rank])


@check
def broadcast_of_every_type(group):
    rank, world = of(group)
    for dtype in ALL:
        for count in SIZES:
            root = count % world
            tensor = make(rank, count, dtype)
            dist.broadcast(tensor, group_src=root, group=group)
            same(tensor, make(root, count, dtype), (dtype, count))


@check
def gathers_of_every_type(group):
    rank, world = of(group)
    for dtype in ALL:
        for count in SIZES:
            inputs = all_inputs(world, count, dtype)
            mine = inputs[rank].clone()
            outputs = [torch.zeros(count, dtype=dtype) for _ in range(world)]
            dist.all_gather(outputs, mine, group)
            for got, expected in zip(outputs, inputs):
                same(got, expected)
            output = torch.zeros(world * count, dtype=dtype)
            dist.all_gather_into_tensor(output, mine, group)
            same(output, torch.cat(inputs))
            # Outputs that are parts of one tensor are filled in place.
            output = torch.zeros(world, count, dtype=dtype)
            dist.all_gather(list(output.unbind(0)), mine, group, async_op=True).wait()
            same(output, torch.stack(inputs))
            root = count % world
            outputs = [torch.zeros(count, dtype=dtype) for _ in range(world)] if rank == root else None
            dist.gather(mine, outputs, group_dst=root, group=group)
            if rank == root:
                for got, expected in zip(outputs, inputs):
                    same(got, expected)
            same(mine, inputs[rank])


@check
def gather_into_one_tensor(group):
    rank, world = of(group)
    if not hasattr(dist, "gather_into_tensor"):
        raise NotRun(f"gather_into_tensor, which PyTorch {torch.__version__} does not have")
    output = torch.zeros(world, 3) if rank == 1 else None
    dist.gather_into_tensor(torch.full((3,), float(rank)), output, group_dst=1, group=group)
    if rank == 1:
        same(output, torch.arange(float(world))[:, None].expand(world, 3).contiguous())


@check
def all_gather_of_uneven_tensors(group):
    rank, world = of(group)
    counts = [(other * 7) % 5 for other in range(world)]
    outputs = [torch.zeros(count) for count in counts]
    dist.all_gather(outputs, torch.full((counts[rank],), float(rank)), group)
    for other, output in enumerate(outputs):
        same(output, torch.full((counts[other],), float(other)))


@check
def all_gather_in_place(group):
    rank, world = of(group)
    output = torch.zeros(world, 3)
    output[rank] = rank + 1
    dist.all_gather_into_tensor(output, output[rank], group)
    same(output, torch.stack([torch.full((3,), other + 1.0) for other in range(world)]))
    # An input that overlaps another part of the output is copied first.
    memory = torch.arange(float(3 * world + 1))
    shifted = memory[1:4].clone()
    dist.all_gather_into_tensor(memory[: 3 * world], memory[1:4], group)
    same(memory[: 3 * world], shifted.repeat(world))


@check
def scatter_of_every_type(group):
    rank, world = of(group)
    for dtype in ALL:
        for count in (0, 5, 3000):
            root = (count + 1) % world
            inputs = [make(other + 2, count, dtype) for other in range(world)]
            output = torch.zeros(count, dtype=dtype)
            dist.scatter(output, inputs if rank == root else None, group_src=root, group=group)
            same(output, inputs[rank])


@check
def reduce_scatter_of_every_type_and_op(group):
    rank, world = of(group)
    for dtype, op in reductions():
        for count in (0, 3, 2500):
            inputs = [make(other, world * count, dtype) for other in range(world)]
            expected = reduce_locally(op, inputs).view(world, -1)[rank] if count else None
            for single in (True, False):
                output = torch.zeros(count, dtype=dtype)
                mine = inputs[rank].clone()
                if single:
                    dist.reduce_scatter_tensor(output, mine, op, group)
                else:
                    dist.reduce_scatter(output, list(mine.view(world, count).unbind(0)), op, group)
                same(mine, inputs[rank])
                if count:
                    close(output, expected, op, (dtype, op, count, single))


@check
def reduce_scatter_of_uneven_tensors(group):
    rank, world = of(group)
    counts = [other + 1 for other in range(world)]
    output = torch.zeros(counts[rank])
    dist.reduce_scatter(output, [torch.full((count,), float(rank + count)) for count in counts], group=group)
    same(output, torch.full((rank + 1,), float(sum(other + rank + 1 for other in range(world)))))


@check
def reduce_scatter_into_a_part_of_its_input(group):
    rank, world = of(group)
    memory = torch.arange(float(2 * world))
    before = memory.clone()
    dist.reduce_scatter_tensor(memory[2 * rank : 2 * rank + 2], memory, group=group)
    before[2 * rank : 2 * rank + 2] *= world
    same(memory, before)


@check
def all_to_all_of_every_type(group):
    rank, world = of(group)
    for dtype in ALL:
        for count in (0, 1, 700):
            inputs = [make(other, world * count, dtype) for other in range(world)]
            expected = torch.cat([each.view(world, count)[rank] for each in inputs])
            output = torch.zeros(world * count, dtype=dtype)
            dist.all_to_all_single(output, inputs[rank], group=group)
            same(output, expected)
            outputs = [torch.zeros(count, dtype=dtype) for _ in range(world)]
            dist.all_to_all(outputs, list(inputs[rank].view(world, count).unbind(0)), group)
            same(torch.cat(outputs), expected)


@check
def all_to_all_with_splits(group):
    rank, world = of(group)
    # Rank i sends i + j rows to rank j.
    sends = [rank + other for other in range(world)]
    rows = torch.full((sum(sends), 3), float(rank))
    output = torch.zeros(sum(sends), 3)
    dist.all_to_all_single(output, rows, sends, sends, group)
    same(output, torch.cat([torch.full((rank + other, 3), float(other)) for other in range(world)]))


@check
def coalesced_forms(group):
    needs_gathers_of_several()
    rank, world = of(group)
    device = torch.device("cpu")
    tensors = [torch.full((size,), float(rank + 1)) for size in (1, 5, 4096)]
    dist.all_reduce_coalesced(tensors, group=group)
    for tensor in tensors:
        same(tensor, torch.full_like(tensor, world * (world + 1) / 2))
    for is_async in (False, True):
        outputs = [torch.zeros(world * size) for size in (2, 300)]
        with dist._coalescing_manager(group, async_ops=is_async) as manager:
            for output, size in zip(outputs, (2, 300)):
                dist.all_gather_into_tensor(output, torch.full((size,), float(rank)), group)
        if is_async:
            manager.wait()
        for output, size in zip(outputs, (2, 300)):
            same(output, torch.arange(float(world)).repeat_interleave(size))
        outputs = [torch.zeros(size) for size in (2, 300)]
        with dist._coalescing_manager(group, async_ops=is_async) as manager:
            for output, size in zip(outputs, (2, 300)):
                dist.reduce_scatter_tensor(output, torch.ones(world * size), group=group)
        if is_async:
            manager.wait()
        for output in outputs:
            same(output, torch.full_like(output, float(world)))
    # With a device, the backend collects calls of any kind.
    one, other = torch.ones(3), torch.full((4,), float(rank))
    with dist._coalescing_manager(group, device=device, async_ops=True) as manager:
        dist.all_reduce(one, group=group)
        dist.broadcast(other, group_src=world - 1, group=group)
    manager.wait()
    same(one, torch.full((3,), float(world)))
    same(other, torch.full((4,), float(world - 1)))


def refused(group):
    """Makes a wrong call: its elements share memory."""
    dist.irecv(torch.ones(1).expand(4), group_src=0, group=group)


class Own(Exception):
    pass


def raises(group):
    raise Own


@check
def groups_that_an_exception_leaves(group):
    """Later calls run, and the calls that were made before continue."""
    _, world = of(group)
    cpu = torch.device("cpu")
    for device, is_async, problem, fails in [
        (device, is_async, problem, fails)
        for device in (None, cpu)
        for is_async in (False, True)
        for problem, fails in ((ValueError, refused), (Own, raises))
    ]:
        what = (device, is_async, problem)
        before, captured = torch.ones(3), torch.ones(3)
        try:
            with _coalescing_manager(group, device, async_ops=is_async):
                # The first call starts at once. PyTorch keeps the second one until the end.
                group.allreduce([before])
                dist.all_reduce(captured, group=group)
                fails(group)
        except problem:
            pass
        else:
            raise AssertionError(f"not refused: {what}")
        for later_is_async in (False, True):
            after = torch.ones(5)
            work = dist.all_reduce(after, group=group, async_op=later_is_async)
            if later_is_async:
                work.wait()
            same(after, torch.full((5,), float(world)), what)
        same(before, torch.full((3,), float(world)), what)
        same(captured, torch.ones(3), what)
        # The next group is a group like any other.
        with _coalescing_manager(group, device, async_ops=True) as manager:
            dist.all_reduce(after, group=group)
        manager.wait()
        same(after, torch.full((5,), float(world * world)), what)


@check
def groups_that_fail_at_their_end(group):
    _, world = of(group)
    for device in (None, torch.device("cpu")):
        try:
            with _coalescing_manager(group, device):
                dist.all_reduce(torch.ones(3, dtype=torch.int32), OPS.AVG, group)
        except ValueError as error:
            assert "AVG is for floating point" in str(error), error
        else:
            raise AssertionError("not refused")
        after = torch.ones(5)
        dist.all_reduce(after, group=group)
        same(after, torch.full((5,), float(world)))
        dist.batch_isend_irecv([dist.P2POp(dist.isend, after, group=group, group_peer=0)]) if dist.get_rank(group) == 1 else None
        if dist.get_rank(group) == 0:
            dist.recv(after, group_src=1, group=group)


@check
def a_batch_of_messages_that_is_refused(group):
    rank, world = of(group)
    to, come = (rank + 1) % world, (rank - 1) % world
    for _ in range(2):
        wrong = [dist.P2POp(dist.irecv, torch.ones(1).expand(4), group=group, group_peer=come)]
        try:
            dist.batch_isend_irecv(wrong)
        except ValueError as error:
            assert "share memory" in str(error), error
        else:
            raise AssertionError("not refused")
        after = torch.ones(5)
        dist.all_reduce(after, group=group)
        same(after, torch.full((5,), float(world)))
        output = torch.zeros(9)
        operations = [
            dist.P2POp(dist.irecv, output, group=group, group_peer=come),
            dist.P2POp(dist.isend, torch.full((9,), float(rank)), group=group, group_peer=to),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        same(output, torch.full((9,), float(come)))


@check
def groups_in_groups(group):
    _, world = of(group)
    cpu = torch.device("cpu")
    other = dist.new_group(timeout=datetime.timedelta(seconds=20))
    tensors = [torch.ones(3) for _ in range(4)]
    try:
        with _coalescing_manager(group, cpu):
            dist.broadcast(tensors[0], group_src=0, group=group)
            with _coalescing_manager(other, cpu, async_ops=True):
                other.allreduce([tensors[1]])
                refused(other)
    except ValueError as error:
        assert "share memory" in str(error), error
    else:
        raise AssertionError("not refused")
    # A nested group is refused, and the outer group continues.
    with _coalescing_manager(group, cpu):
        try:
            with _coalescing_manager(group, cpu):
                raise AssertionError("not refused")
        except ValueError as error:
            assert "already" in str(error), error
        dist.all_reduce(tensors[2], group=group)
    same(tensors[2], torch.full((3,), float(world)))
    for which in (group, other):
        after = torch.ones(5)
        dist.all_reduce(after, group=which)
        same(after, torch.full((5,), float(world)))
    dist.destroy_process_group(other)


@check
def a_group_that_never_ends(group):
    """PyTorch's own functions without its manager: the calls run, and wait() waits for them."""
    _, world = of(group)
    cpu = torch.device("cpu")
    group._start_coalescing(cpu)
    for is_async in (False, True):
        tensor = torch.ones(100_000)
        work = dist.all_reduce(tensor, group=group, async_op=is_async)
        if is_async:
            work.wait()
        same(tensor, torch.full((100_000,), float(world)))
    same(group.allreduce([torch.ones(9)]).get_future().wait()[0], torch.full((9,), float(world)))
    collected = torch.ones(9)
    group.allreduce([collected])
    group._end_coalescing(cpu).wait()
    same(collected, torch.full((9,), float(world)))


@check
def other_threads_take_no_part_in_a_group(group):
    import threading

    rank, world = of(group)
    cpu = torch.device("cpu")
    other = dist.new_group(timeout=datetime.timedelta(seconds=20))
    outputs = [torch.ones(10), torch.full((10,), float(rank))]
    works = []
    other._start_coalescing(cpu)
    thread = threading.Thread(target=lambda: works.append(other.allreduce([outputs[0]])))
    thread.start()
    thread.join()
    other._end_coalescing(cpu).wait()
    works[0].wait()
    same(outputs[0], torch.full((10,), float(world)))
    dist.destroy_process_group(other)


@check
def messages(group):
    rank, world = of(group)
    to, come = (rank + 1) % world, (rank - 1) % world
    for dtype in ALL:
        for count in (0, 1, 100_000):
            output = torch.zeros(count, dtype=dtype)
            works = [
                dist.isend(make(rank, count, dtype), group_dst=to, group=group),
                dist.irecv(output, group_src=come, group=group),
            ]
            for work in works:
                work.wait()
            same(output, make(come, count, dtype))
    if rank == 0:
        dist.send(torch.arange(5), group_dst=1, group=group, tag=7)
    elif rank == 1:
        output = torch.zeros(5, dtype=torch.int64)
        assert dist.recv(output, group_src=0, group=group, tag=7) == dist.get_global_rank(group, 0)
        same(output, torch.arange(5))
    # Receives find their messages by tag, in any order.
    if rank == 0:
        works = [dist.isend(torch.full((1000,), float(tag)), group_dst=1, group=group, tag=tag) for tag in range(5)]
        for work in works:
            work.wait()
    elif rank == 1:
        for tag in (3, 0, 4, 2, 1):
            output = torch.zeros(1000)
            dist.recv(output, group_src=0, group=group, tag=tag)
            same(output, torch.full((1000,), float(tag)))


@check
def messages_from_whoever_sends_first(group):
    rank, world = of(group)
    for tag in (0, 7):
        # A message with the next tag is the next message, once its sender has sent this one.
        dist.barrier(group)
        if rank == 0:
            seen = []
            for i in range(2 * (world - 1)):
                output = torch.zeros(1000)
                if i % 2:
                    work = dist.irecv(output, group=group, tag=tag)
                    work.wait()
                    source = work._source_rank()
                else:
                    source = dist.get_group_rank(group, dist.recv(output, group=group, tag=tag))
                same(output, torch.full((1000,), 10.0 * source + seen.count(source)))
                seen.append(source)
            assert sorted(seen) == sorted(2 * list(range(1, world))), seen
        else:
            for i in range(2):
                dist.send(torch.full((1000,), 10.0 * rank + i), group_dst=0, group=group, tag=tag)


@check
def messages_in_batches(group):
    rank, world = of(group)
    outputs = [torch.zeros(1000) for _ in range(world)]
    operations = []
    # All ranks receive first: a receive must not block a send.
    for other in range(world):
        if other != rank:
            operations.append(dist.P2POp(dist.irecv, outputs[other], group=group, group_peer=other))
    for other in range(world):
        if other != rank:
            operations.append(dist.P2POp(dist.isend, torch.full((1000,), float(rank)), group=group, group_peer=other))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    for other in range(world):
        if other != rank:
            same(outputs[other], torch.full((1000,), float(other)))


@check
def a_receive_that_waits_does_not_hold_up_collectives(group):
    rank, _ = of(group)
    tensor = torch.zeros(10)
    work = dist.irecv(tensor, group_src=1, group=group) if rank == 0 else None
    dist.barrier(group)
    if rank == 1:
        dist.send(torch.ones(10), group_dst=0, group=group)
    if work:
        work.wait()
        same(tensor, torch.ones(10))


@check
def works_that_nobody_waits_for(group):
    rank, world = of(group)
    for _ in range(20):
        dist.all_reduce(torch.ones(100_000), group=group, async_op=True)
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == world


@check
def futures(group):
    rank, world = of(group)
    tensor = torch.ones(1000)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    same(doubled.wait(), torch.full((1000,), 2.0 * world))
    assert work.get_future().done()
    work = dist.all_reduce(tensor, group=group, async_op=True)
    work.wait()
    assert work.get_future().wait()[0] is tensor or torch.equal(work.get_future().wait()[0], tensor)
    strided = torch.ones(10, 10).t()[::2]
    future = dist.all_reduce(strided, group=group, async_op=True).get_future()
    future.wait()
    same(strided, torch.full((5, 10), float(world)))


@check
def tensors_that_are_not_contiguous(group):
    rank, world = of(group)
    memory = torch.zeros(6, 8)
    view = memory.t()[1:5:2, ::3]
    view.fill_(rank + 1.0)
    dist.all_reduce(view, group=group)
    total = world * (world + 1) / 2
    assert (view == total).all() and memory.sum() == total * view.numel(), memory
    image = torch.full((2, 3, 4, 4), float(rank), requires_grad=True).contiguous(memory_format=torch.channels_last)
    dist.broadcast(image.detach(), group_src=1, group=group)
    assert (image == 1).all()
    outputs = [torch.zeros(4, 3).t() for _ in range(world)]
    dist.all_gather(outputs, torch.full((4, 3), float(rank)).t(), group)
    for other, output in enumerate(outputs):
        assert (output == other).all() and output.shape == (3, 4)
    sending = torch.tensor([1 + 2j, 3 - 1j]).conj()
    receiving = torch.zeros(world * 2, dtype=sending.dtype)
    group._allgather_base(receiving, sending).wait()
    same(receiving, torch.tensor([1 - 2j, 3 + 1j] * world))


@check
def parameters_and_inference_tensors(group):
    rank, world = of(group)
    parameter = torch.nn.Parameter(torch.full((3, 2), float(rank)).t())
    dist.broadcast(parameter.data.t()[::1], group_src=1, group=group)
    assert (parameter == 1).all()
    with torch.inference_mode():
        tensor = torch.ones(4, 4).t()[1:]
        dist.all_reduce(tensor, group=group)
        assert (tensor == world).all()


@check
def sparse_all_reduce(group):
    rank, world = of(group)

    def of_rank(other, dtype=torch.float32):
        indices = torch.tensor([[other, other + 1, 0], [0, other % 3, 2]])
        return torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0, 3.0], dtype=dtype) + other, (world + 2, 3))

    for is_async in (False, True):
        tensor = of_rank(rank)
        work = dist.all_reduce(tensor, group=group, async_op=is_async)
        if work:
            work.wait()
        same(tensor.to_dense(), sum(of_rank(other).to_dense() for other in range(world)))
    rows = torch.sparse_coo_tensor([[rank]], torch.ones(1, 4), (world, 4))
    dist.all_reduce(rows, group=group)
    same(rows.to_dense(), torch.ones(world, 4))
    empty = torch.sparse_coo_tensor(torch.zeros(1, 0), torch.zeros(0), (5,)) if rank == 0 else torch.ones(5).to_sparse()
    dist.all_reduce(empty, OPS.AVG, group=group)
    torch.testing.assert_close(empty.to_dense(), torch.full((5,), (world - 1) / world))


@check
def barriers(group):
    """No rank leaves before all ranks have called. Late ranks write to a store when they call."""
    rank, world = of(group)
    backend = group._get_backend(torch.device("cpu"))
    store = dist.distributed_c10d._get_process_group_store(group)
    calls = [
        lambda: dist.barrier(group),
        lambda: dist.barrier(group, async_op=True).wait(),
        lambda: backend.monitored_barrier(datetime.timedelta(seconds=240), False),
        lambda: backend.monitored_barrier(datetime.timedelta(seconds=240), True),
    ]
    for number, call in enumerate(calls):
        for late in range(world):
            if rank == late:
                time.sleep(0.05)
            store.add(f"came to {number} with {late}", 1)
            call()
            assert store.add(f"came to {number} with {late}", 0) == world, (number, late)


@check
def objects(group):
    rank, world = of(group)
    everybody_s = [None] * world
    dist.all_gather_object(everybody_s, {"rank": rank, "text": "x" * rank * 1000}, group)
    assert [each["rank"] for each in everybody_s] == list(range(world))
    given = [("a", 1), None] if rank == 1 else [None, None]
    dist.broadcast_object_list(given, group_src=1, group=group)
    assert given == [("a", 1), None]
    gathered = [None] * world if rank == 0 else None
    dist.gather_object(rank * 2, gathered, group_dst=0, group=group)
    assert rank != 0 or gathered == [2 * other for other in range(world)]
    output = [None]
    dist.scatter_object_list(output, list(range(world)) if rank == 0 else None, group_src=0, group=group)
    assert output == [rank]
    if rank == 0:
        dist.send_object_list(["over", 3], group_dst=1, group=group)
    elif rank == 1:
        received = [None, None]
        dist.recv_object_list(received, group_src=0, group=group)
        assert received == ["over", 3]


@check
def groups_of_some_ranks(group):
    rank, world = dist.get_rank(), dist.get_world_size()
    for members in ([0], [world - 1, 0], list(range(world))):
        part = dist.new_group(members, timeout=datetime.timedelta(seconds=240))
        if rank in members:
            tensor = torch.tensor([float(rank)])
            dist.all_reduce(tensor, group=part)
            assert tensor.item() == sum(set(members))
            dist.destroy_process_group(part)
    local, _ = dist.new_subgroups_by_enumeration([[other] for other in range(world)])
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=local)
    assert tensor.item() == 1 and dist.get_backend(local) == "kolo"


@check
def groups_that_are_split(group):
    rank, world = dist.get_rank(), dist.get_world_size()
    tensor = torch.ones(1)
    if not hasattr(dist.Backend, "_ensure_backend_registered"):
        raise NotRun(f"split_group, which PyTorch {torch.__version__} has for groups with a GPU only")
    split = dist.split_group(split_ranks=[[0, 1], *[[other] for other in range(2, world)]])
    dist.all_reduce(tensor, group=split)
    assert tensor.item() == (2 if rank < 2 else 1)


@check
def what_cannot_be_is_refused(group):
    """The group works afterwards."""
    rank, world = of(group)
    backend = group._get_backend(torch.device("cpu"))
    cases = [
        ("AVG is for floating point", lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), OPS.AVG, group)),
        ("BAND is for integers", lambda: dist.all_reduce(torch.ones(2), OPS.BAND, group)),
        ("PREMUL_SUM is for", lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), dist._make_nccl_premul_sum(2.0), group)),
        ("does not reduce", lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e5m2fnuz), group=group)),
        ("AVG of bool", lambda: dist.all_reduce(torch.ones(2, dtype=torch.bool), OPS.AVG, group)),
        ("share memory", lambda: dist.all_reduce(torch.ones(1).expand(4), group=group)),
        ("is on meta|does not support tensors on meta", lambda: backend.allreduce([torch.ones(2, device="meta")])),
        ("all_gather", lambda: backend._allgather_base(torch.ones(2 * world), torch.ones(3))),
        ("same type", lambda: backend._allgather_base(torch.ones(2 * world), torch.ones(2, dtype=torch.int32))),
        ("list has", lambda: backend.allgather([[torch.ones(1)]], [torch.ones(1)]) if world > 1 else None),
        ("SparseCPU|sparse COO", lambda: dist.broadcast(torch.ones(3).to_sparse(), group_src=0, group=group)),
        ("sum up to", lambda: dist.all_to_all_single(torch.ones(world), torch.ones(world), [1] * world, [2] * world, group)),
        ("root|must be", lambda: backend.broadcast(torch.ones(1), root=world + 3)),
    ]
    import re

    if IS_WINE:
        # PyTorch refuses this by an exception of C++. Those damage the heap under Wine 8.
        cases = [case for case in cases if not case[0].startswith("SparseCPU")]
    for pattern, call in cases:
        try:
            call()
        except (ValueError, RuntimeError) as error:
            assert re.search(pattern, str(error)), (pattern, str(error))
        else:
            raise AssertionError(f"not refused: {pattern}")
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == world


@check
def several_threads(group):
    """Threads wait for work that another thread has started."""
    import threading

    rank, world = of(group)
    tensors = [torch.full((50_000,), float(i)) for i in range(16)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    threads = [threading.Thread(target=work.wait) for work in works for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, tensor in enumerate(tensors):
        same(tensor, torch.full((50_000,), float(i * world)))


@check
def sequence_numbers(group):
    backend = group._get_backend(torch.device("cpu"))
    before = backend._get_sequence_number_for_group()
    dist.barrier(group)
    dist.all_reduce(torch.ones(1), group=group)
    assert backend._get_sequence_number_for_group() == before + 2


@check
def options(group):
    import torch_kolo

    options = torch_kolo.Options()
    options.transport = "tcp"
    options.reproducible = True
    over_tcp = dist.new_group(pg_options=options, timeout=datetime.timedelta(seconds=240))
    rank, world = of(over_tcp)
    assert not over_tcp._get_backend(torch.device("cpu")).supports_tensor_alloc(torch.device("cpu"))
    tensor = torch.ones(1000)
    dist.all_reduce(tensor, group=over_tcp)
    same(tensor, torch.full((1000,), float(world)))
    output = torch.zeros(world)
    dist.all_to_all_single(output, torch.full((world,), float(rank)), group=over_tcp)
    same(output, torch.arange(float(world)))


@check
def timeout_of_options(group):
    import torch_kolo

    if not hasattr(group._get_backend(torch.device("cpu")), "options"):
        raise NotRun(f"timeouts of options, which PyTorch {torch.__version__} does not show")

    def timeout_of(group):
        return group._get_backend(torch.device("cpu")).options._timeout

    seconds = [datetime.timedelta(seconds=count) for count in (50, 60)]
    assert timeout_of(dist.new_group(pg_options=torch_kolo.Options(timeout=seconds[0]))) == seconds[0]
    assert timeout_of(dist.new_group(pg_options=torch_kolo.Options(), timeout=seconds[1])) == seconds[1]
    # If the two differ, the argument wins, and a warning says so.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        both = dist.new_group(pg_options=torch_kolo.Options(timeout=seconds[0]), timeout=seconds[1])
    assert timeout_of(both) == seconds[1]
    assert any("0:00:50" in str(warning.message) and "0:01:00" in str(warning.message) for warning in caught), caught


@check
def reconfigure_in_python_is_refused(group):
    import torch_kolo

    if not is_in_python(group):
        raise NotRun("a refusal of the backend in Python; test_reconfigure.py has the one in C++")

    options = torch_kolo.Options()
    if not hasattr(options, "enable_reconfigure"):
        raise NotRun(f"reconfigure, which PyTorch {torch.__version__} does not have")
    options.enable_reconfigure = True
    assert not group._get_backend(torch.device("cpu")).supports_reconfigure
    try:
        dist.new_group(pg_options=options)
    except ValueError as error:
        assert "no reconfigure" in str(error), error
    else:
        raise AssertionError("not refused")


@check
def profiles(group):
    """Entries last from the call to its end, and have the shapes of what the rank gives."""
    rank, world = dist.get_rank(), dist.get_world_size()
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(torch.ones(10), group=group)
        dist.all_reduce(torch.ones(2, 3), group=group, async_op=True).wait()
        dist.all_reduce(torch.ones(2, 3), group=group, async_op=True).get_future().wait()
        dist.all_gather([torch.ones(4) for _ in range(world)], torch.ones(4), group=group)
        dist.scatter(torch.ones(5), [torch.ones(5)] * world if rank == 0 else None, 0, group=group)
        dist.barrier(group=group)
        dist.send(torch.ones(7), 1, group=group) if rank == 0 else dist.recv(torch.ones(7), group=group) if rank == 1 else None
    expected = [
        ("kolo:all_reduce", [[10]]),
        ("kolo:all_reduce", [[2, 3]]),
        ("kolo:all_reduce", [[2, 3]]),
        ("kolo:all_gather", [[4]]),
        ("kolo:scatter", [[5]] * world if rank == 0 else []),
        ("kolo:barrier", []),
        *([("kolo:send", [[7]]), ("kolo:recvAnySource", [[7]])][rank : rank + 1]),
    ]
    entries = [event for event in profile.function_events if event.name.startswith("kolo:")]
    assert [(entry.name, entry.input_shapes) for entry in entries] == expected, entries
    assert all(entry.is_async for entry in entries), entries


@check
def one_library(group):
    """pykolo's is that of both backends."""
    if sys.platform != "linux":
        raise NotRun("the libraries of this process, which Linux lists")
    with open("/proc/self/maps") as maps:
        found = {line.split()[-1] for line in maps if "libkolo" in line}
    assert len(found) == 1, found


@check
def no_path_on_devices_is_counted_for_host_memory(group):
    import torch_kolo

    none = {"device": dict.fromkeys(["whole", "staged", "in_place", "through_areas", "one_shot", "copied"], 0)}
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.all_reduce(torch.ones(300_001), group=group)
    if rank < 2:
        dist.send(torch.ones(5), 1) if rank == 0 else dist.recv(torch.ones(5), 0)
    assert torch_kolo.stats(group) == torch_kolo.stats() == none
    # A group of one rank, and a group that has ended.
    alone = [dist.new_group([only]) for only in range(world)][rank]
    assert torch_kolo.stats(alone) == none
    alone._get_backend(torch.device("cpu")).shutdown()
    try:
        torch_kolo.stats(alone)
    except ValueError as error:
        # PyTorch's wrapper for DETAIL no longer knows the backend in Python then.
        assert "ended" in str(error) or dist.get_debug_level() == dist.DebugLevel.DETAIL, error
    else:
        raise AssertionError("not refused")
    dist.destroy_process_group(alone)


@check
def detailed_debugging(group):
    """Checks that the setting is on, for the tests that need it."""
    if is_in_python(group):
        needs_pytorch(2, 14, "PyTorch compares no calls of a backend in Python")
    assert type(group._get_backend(torch.device("cpu"))).__name__ == "_ProcessGroupWrapper"
