"""Callbacks of futures that call collectives and wait, and each communication hook of PyTorch's DDP."""

import copy
import datetime
import os
import threading
from unittest import mock

import torch
import torch.distributed as dist
from checks_collectives import of, same
from checks_training import gloo, model, state_of
from harness import NotRun, check, needs_pytorch
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    ddp_zero_hook,
    debugging_hooks,
    default_hooks,
    optimizer_overlap_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.nn.parallel import DistributedDataParallel

# test_cuda.py sets it. The host computes the expected results.
DEVICE = "KOLO_TEST_DEVICE"


def device():
    name = os.environ.get(DEVICE, "cpu")
    return torch.device(name, dist.get_rank() % torch.cuda.device_count()) if name == "cuda" else torch.device(name)


def gather_of(tensor, group):
    """The tensors of all ranks."""
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, tensor.contiguous(), group=group)
    return gathered


def ones(count, value=1.0):
    return torch.full((count,), float(value), device=device())


# ---- Callbacks ----


@check
def a_callback_that_calls_collectives(group):
    """Waits for the calls of callbacks, in each possible way."""
    _, world = of(group)

    def wait_for_the_call(future):
        tensor = future.value()[0].clone()
        dist.all_reduce(tensor, group=group)
        return tensor

    def wait_for_the_work(future):
        tensor = future.value()[0].clone()
        dist.all_reduce(tensor, group=group, async_op=True).wait()
        return tensor

    def wait_for_the_future(future):
        tensor = future.value()[0].clone()
        return dist.all_reduce(tensor, group=group, async_op=True).get_future().wait()[0]

    for callback in (wait_for_the_call, wait_for_the_work, wait_for_the_future):
        for _ in range(20):
            future = dist.all_reduce(ones(1000), group=group, async_op=True).get_future()
            same(future.then(callback).wait().cpu(), torch.full((1000,), float(world * world)))


@check
def callbacks_in_callbacks(group):
    _, world = of(group)
    depth = 8

    def deeper(future, level):
        tensor = future.value()[0] / world
        inner = dist.all_reduce(tensor, group=group, async_op=True).get_future()
        if level == 0:
            return inner.wait()[0]
        return inner.then(lambda future: deeper(future, level - 1)).wait()

    # Nested, and one after the other.
    future = dist.all_reduce(ones(100), group=group, async_op=True).get_future()
    same(future.then(lambda future: deeper(future, depth)).wait().cpu(), torch.full((100,), float(world)))
    future = dist.all_reduce(ones(100), group=group, async_op=True).get_future()
    for _ in range(depth):
        future = future.then(lambda future: [deeper(future, 1)])
    same(future.wait()[0].cpu(), torch.full((100,), float(world)))


def of_calls_that_wait(group, tensors, attach):
    """Returns the result of `attach` on rank 0 for works that end later: the other ranks call afterwards."""
    rank, _ = of(group)
    if rank == 0:
        attached = attach([dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors])
        dist.barrier(dist.group.WORLD)
        return attached
    dist.barrier(dist.group.WORLD)
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)
    return None


@check
def callbacks_that_wait_for_one_another(group):
    _, world = of(group)
    count = 12
    come = threading.Barrier(count)

    def attach(works):
        return [work.get_future().then(lambda future: (come.wait(30), future.value()[0])[1]) for work in works]

    futures = of_calls_that_wait(group, [ones(10, i) for i in range(count)], attach)
    for i, future in enumerate(futures or []):
        same(future.wait().cpu(), torch.full((10,), float(i * world)))


@check
def a_callback_that_waits_for_a_later_call(group):
    rank, world = of(group)

    def attach(works):
        first, later = (work.get_future() for work in works)
        return first.then(lambda _: later.wait()[0])

    future = of_calls_that_wait(group, [ones(10), ones(10, rank)], attach)
    if future:
        same(future.wait().cpu(), torch.full((10,), float(sum(range(world)))))


@check
def futures_that_are_asked_for_in_another_order(group):
    """The first call's future completes before the second call's, though that one was requested first."""
    rank, world = of(group)
    if rank == 0:
        first = dist.all_reduce(ones(10), group=group, async_op=True)
        second = dist.all_reduce(ones(10), group=group, async_op=True)
        futures = [work.get_future() for work in (second, first)]
        futures[1].wait()
        # The other ranks make the second call after this.
        for other in range(1, world):
            dist.send(ones(1), group_dst=other, group=group)
        futures[0].wait()
    else:
        dist.all_reduce(ones(10), group=group)
        dist.recv(ones(1), group_src=0, group=group)
        dist.all_reduce(ones(10), group=group)


@check
def callbacks_do_not_run_where_somebody_waits(group):
    """A callback that needs a lock that the waiting thread holds."""
    lock = threading.Lock()
    came = []

    def locked(future):
        assert lock.acquire(timeout=10), "it runs on a thread that waits for the call"
        lock.release()
        came.append(threading.get_ident())

    for way in ("wait", "poll", "drop"):
        attached = of_calls_that_wait(group, [ones(1000)], lambda works: [works[0], works[0].get_future().then(locked)])
        if not attached:
            continue
        with lock:
            if way == "wait":
                attached[0].wait()
                assert attached[0].get_future().done()
            elif way == "poll":
                while not attached[0].is_completed():
                    pass
            del attached[0]
        attached[-1].wait()
    assert threading.get_ident() not in came


@check
def callbacks_of_several_groups(group):
    _, world = of(group)
    other = dist.new_group(timeout=datetime.timedelta(seconds=20))

    def on_the_other(future):
        return dist.all_reduce(future.value()[0], group=other, async_op=True).get_future().then(on_this).wait()

    def on_this(future):
        return dist.all_reduce(future.value()[0], group=group, async_op=True).get_future().wait()[0]

    future = dist.all_reduce(ones(10), group=group, async_op=True).get_future().then(on_the_other)
    same(future.wait().cpu(), torch.full((10,), float(world**3)))
    dist.destroy_process_group(other)


@check
def a_callback_that_ends_its_group(group):
    other = dist.new_group(timeout=datetime.timedelta(seconds=20))
    ended = of_calls_that_wait(
        other, [ones(10)], lambda works: works.pop().get_future().then(lambda _: dist.destroy_process_group(other))
    )
    ended.wait() if ended else dist.destroy_process_group(other)


@check
def a_callback_that_raises(group):
    _, world = of(group)

    def wrong(future):
        dist.all_reduce(ones(1), group=group)
        raise KeyError("of the callback")

    future = dist.all_reduce(ones(10), group=group, async_op=True).get_future().then(wrong)
    try:
        future.wait()
    except Exception as error:
        assert "of the callback" in str(error), error
    else:
        raise AssertionError("the error is lost")
    tensor = ones(1)
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == world


# ---- Hooks ----


def train(group, wrap, where=None, count=6, **options):
    """If callbacks call collectives, there is one bucket. Otherwise the order of calls differs among ranks."""
    where = where or (torch.device("cpu") if dist.get_backend(group) == "gloo" else device())
    module = model().to(where)
    wrapped = DistributedDataParallel(module, process_group=group, **options)
    finish = wrap(wrapped, group) or (lambda step: None)
    optimizer = None if hasattr(wrapped, "no_optimizer") else torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(count):
        torch.manual_seed(1000 * step + dist.get_rank())
        wrapped.zero_grad()
        wrapped(torch.randn(8, 20).to(where)).square().mean().backward()
        if optimizer:
            optimizer.step()
        finish(step)
    return state_of(module).cpu()


def compare(group, wrap, tolerance=1e-6, reference=None, **options):
    expected = train(gloo(), reference or wrap, **options)
    torch.testing.assert_close(train(group, wrap, **options), expected, rtol=tolerance, atol=tolerance)


def registers(hook, state=lambda group: group):
    return lambda wrapped, group: wrapped.register_comm_hook(state(group), hook)


def power_sgd(rank, **options):
    def state(group):
        return powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=rank, start_powerSGD_iter=2, min_compression_rate=0.5, **options
        )

    return state


def of_single_matrices(orthogonalize):
    """PyTorch's batched hook passes one matrix where several are expected, and fails with any backend (2.15)."""
    return lambda matrices, epsilon=0: orthogonalize(matrices if matrices.dim() == 3 else matrices.unsqueeze(0), epsilon)


# PyTorch's names, what each stands for with states that begin to compress in the third step, and
# how much rounding there is on the way.
OF_PYTORCH = {
    "ALLREDUCE": (registers(default_hooks.allreduce_hook), 1e-6),
    # Sums of more than two ranks are rounded to 16 bits on the way, and not everywhere in the same
    # order.
    "FP16_COMPRESS": (registers(default_hooks.fp16_compress_hook), 1e-3),
    "BF16_COMPRESS": (registers(default_hooks.bf16_compress_hook), 1e-2),
    "QUANTIZE_PER_TENSOR": (registers(quantization_hooks.quantization_pertensor_hook), 1e-5),
    "QUANTIZE_PER_CHANNEL": (registers(quantization_hooks.quantization_perchannel_hook), 1e-5),
    "POWER_SGD": (registers(powerSGD_hook.powerSGD_hook, power_sgd(1)), 1e-3),
    "POWER_SGD_RANK2": (registers(powerSGD_hook.powerSGD_hook, power_sgd(2)), 1e-3),
    "BATCHED_POWER_SGD": (registers(powerSGD_hook.batched_powerSGD_hook, power_sgd(1)), 1e-3),
    "BATCHED_POWER_SGD_RANK2": (registers(powerSGD_hook.batched_powerSGD_hook, power_sgd(2)), 1e-3),
    "NOOP": (registers(debugging_hooks.noop_hook), 1e-6),
}


@check
def every_hook_of_pytorch_has_a_check(group):
    assert {kind.name for kind in DDPCommHookType} <= set(OF_PYTORCH)


def check_hook(name, wrap, tolerance):
    def compared(group):
        if name.startswith("QUANTIZE"):
            needs_pytorch(2, 15, "PyTorch's hook fails with every backend")
        with mock.patch.object(powerSGD_hook, "_orthogonalize", of_single_matrices(powerSGD_hook._orthogonalize)):
            compare(group, wrap, tolerance)

    compared.__name__ = f"hook_{name.lower()}"
    check(compared)


for _name, (_wrap, _tolerance) in OF_PYTORCH.items():
    check_hook(_name, _wrap, _tolerance)


@check
def hooks_with_several_buckets(group):
    """Hooks whose callbacks call no collectives."""
    for name in ("ALLREDUCE", "FP16_COMPRESS", "BF16_COMPRESS", "NOOP"):
        wrap, tolerance = OF_PYTORCH[name]
        compare(group, wrap, tolerance, bucket_cap_mb=0.01)


@check
def hook_around_another(group):
    for wrapper in (default_hooks.fp16_compress_wrapper, default_hooks.bf16_compress_wrapper):
        # With 16 bits, norms may become zero.
        compare(group, registers(wrapper(powerSGD_hook.powerSGD_hook), power_sgd(1, orthogonalization_epsilon=1e-3)), 3e-2)


@check
def hook_post_local_sgd(group):
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    def wrap(wrapped, group):
        pairs = [[rank, rank + 1] for rank in range(0, dist.get_world_size(), 2)]
        subgroup, _ = dist.new_subgroups_by_enumeration(pairs, backend=dist.get_backend(group))
        state = post_localSGD_hook.PostLocalSGDState(group, subgroup, start_localSGD_iter=2)
        wrapped.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        averager = PeriodicModelAverager(period=2, warmup_steps=2, process_group=group)
        return lambda step: averager.average_parameters(wrapped.parameters())

    compare(group, wrap)


@check
def diloco_makes_outer_steps(group):
    """As computed by the formula of SGD with Nesterov momentum; a newcomer gets parameters, momentum and
    the place between two outer steps.
    """
    from torch_kolo.diloco import DiLoCo

    rank, world = of(group)
    lr, momentum, every = 0.7, 0.9, 3
    torch.manual_seed(rank)
    module = model().to(device())
    diloco = DiLoCo(module.parameters(), every, lr, momentum, group)
    inner = torch.optim.SGD(module.parameters(), lr=0.01)
    last = [parameter.detach().clone() for parameter in module.parameters()]
    assert all(torch.equal(tensor, last[0]) for tensor in gather_of(last[0], group))
    velocity = [torch.zeros_like(tensor) for tensor in last]
    for step in range(1, 11):
        if step == 7:
            # After an outer step, the last rank is a newcomer, with another model.
            if rank == world - 1:
                for parameter in module.parameters():
                    torch.nn.init.ones_(parameter)
                for tensor in diloco.last:
                    torch.nn.init.zeros_(tensor)
                diloco.steps = 2
                diloco.optimizer.state.clear()
            if rank == 0:
                saved = copy.deepcopy(diloco.state_dict())
                for tensor in diloco.last:
                    torch.nn.init.zeros_(tensor)
                diloco.optimizer.state.clear()
                diloco.load_state_dict(saved)
            diloco.start()
        torch.manual_seed(1000 * step + rank)
        inner.zero_grad()
        module(torch.randn(8, 20).to(device())).square().mean().backward()
        inner.step()
        own = [parameter.detach().clone() for parameter in module.parameters()]
        made = diloco.after_step()
        assert made == (step % every == 0), step
        if made:
            for index, tensor in enumerate(own):
                average = sum(gather_of(last[index] - tensor, group)) / world
                velocity[index] = momentum * velocity[index] + average
                last[index] = last[index] - lr * (average + momentum * velocity[index])
            for parameter, expected in zip(module.parameters(), last, strict=True):
                torch.testing.assert_close(parameter.detach(), expected, rtol=1e-4, atol=1e-5)


@check
def hook_then_optimizer(group):
    from torch.distributed.optim.utils import as_functional_optim

    def wrap(wrapped, group):
        optimizer = as_functional_optim(torch.optim.SGD, lr=0.1)
        hook = optimizer_overlap_hooks._hook_then_optimizer(
            default_hooks.allreduce_hook, optimizer_overlap_hooks._OptimizerHookState(optimizer)
        )
        wrapped.no_optimizer = True
        wrapped.register_comm_hook(group, hook)

    compare(group, wrap, reference=OF_PYTORCH["ALLREDUCE"][0])
    compare(group, wrap, reference=OF_PYTORCH["ALLREDUCE"][0], bucket_cap_mb=0.01)


def in_backward(group, **options):
    from torch.distributed.optim import _apply_optimizer_in_backward

    where = torch.device("cpu") if dist.get_backend(group) == "gloo" else device()
    module = model().to(where)
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    wrapped = DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=True, **options)
    for step in range(4):
        torch.manual_seed(1000 * step + dist.get_rank())
        wrapped(torch.randn(8, 20).to(where)).square().mean().backward()
    return state_of(module).cpu()


def needs_an_accelerator(what):
    """PyTorch's own hook makes a stream, which a host does not have."""
    if device().type == "cpu":
        raise NotRun(f"{what}, which needs a GPU")


@check
def hook_of_optimizers_in_backward(group):
    needs_an_accelerator("optimizers in backward")
    expected = train(gloo(), OF_PYTORCH["ALLREDUCE"][0], count=4)
    torch.testing.assert_close(in_backward(group), expected, rtol=1e-5, atol=1e-5)


@check
def hook_of_mixed_precision(group):
    from torch.nn.parallel.distributed import _MixedPrecision

    needs_an_accelerator("DDP's mixed precision")
    options = {"mixed_precision": _MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16, buffer_dtype=torch.float16)}
    expected = train(gloo(), lambda *_: None)
    torch.testing.assert_close(train(group, lambda *_: None, **options), expected, rtol=3e-2, atol=3e-2)


def zero_hook(make):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def wrap(wrapped, group):
        zero = ZeroRedundancyOptimizer(
            wrapped.parameters(), torch.optim.SGD, process_group=group, overlap_with_ddp=True, lr=0.1
        )
        wrapped.no_optimizer = True
        wrapped.register_comm_hook(group, make(default_hooks.allreduce_hook, wrapped, zero))
    return wrap


def steps_after_the_second(wrapped, group):
    """PyTorch's hook learns the buckets in the first two steps, which do not change the parameters."""
    wrapped.no_optimizer = True
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    return lambda step: optimizer.step() if step >= 2 else None


# PyTorch refuses these with Gloo, which may hang.
@check
def hook_with_zero_step(group):
    needs_pytorch(2, 11, "PyTorch's hook is for NCCL only")
    compare(group, zero_hook(ddp_zero_hook.hook_with_zero_step), 1e-5, reference=steps_after_the_second)


@check
def hook_with_zero_step_interleaved(group):
    needs_pytorch(2, 11, "PyTorch's hook is for NCCL only")
    compare(group, zero_hook(ddp_zero_hook.hook_with_zero_step_interleaved), 1e-5, reference=steps_after_the_second)
