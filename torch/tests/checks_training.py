"""Training steps, equal to Gloo's."""

import copy
import os
import sys
import tempfile
from unittest import mock

import torch
import torch.distributed as dist
from harness import NotRun, check, is_in_python, needs_gathers_of_several, needs_pytorch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CPU = torch.device("cpu")


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5))


def gloo():
    return dist.new_group(backend="gloo")


def steps(wrapped, optimizer, count=3):
    """Trains on this rank's part of the data."""
    for step in range(count):
        torch.manual_seed(1000 * step + dist.get_rank())
        optimizer.zero_grad()
        wrapped(torch.randn(8, 20)).square().mean().backward()
        optimizer.step()


def state_of(module):
    return torch.cat([value.detach().double().flatten() for value in module.state_dict().values()])


def train_with_ddp(group, **options):
    module = model()
    wrapped = DistributedDataParallel(module, process_group=group, bucket_cap_mb=0.01, **options)
    steps(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1))
    return state_of(module)


@check
def ddp_equals_gloo(group):
    expected = train_with_ddp(gloo())
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}):
        torch.testing.assert_close(train_with_ddp(group, **options), expected, rtol=1e-6, atol=1e-7, msg=str(options))
    module = model()
    wrapped = DistributedDataParallel(module, process_group=group)
    steps(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1))
    mine = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    everybody_s = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody_s, mine, group)
    assert all(torch.equal(other, everybody_s[0]) for other in everybody_s), "ranks differ"


@check
def ddp_with_its_buckets_in_kolo_s_memory(group):
    if is_in_python(group):
        raise NotRun("PyTorch's C++ cannot allocate by a backend in Python")

    def windows():
        return sum("memfd:kolo" in line for line in open("/proc/self/maps"))

    with mock.patch.dict(os.environ, {"DDP_DISABLE_COMM_MEM": "0"} if torch.cuda.is_available() else {}):
        before = windows()
        module = DistributedDataParallel(model(), process_group=group)
        assert windows() > before, "PyTorch did not ask the backend for memory"
        del module
        in_windows = train_with_ddp(group)
    torch.testing.assert_close(in_windows, train_with_ddp(gloo()), rtol=1e-6, atol=1e-7)


@check
def memory_of_kolo(group):
    backend = group._get_backend(CPU)
    assert backend.supports_tensor_alloc(CPU)
    tensor = backend.allocate_tensor(100_000, dtype=torch.float32, device=CPU)
    assert tensor.shape == (100_000,)
    tensor.fill_(1)
    dist.all_reduce(tensor, group=group)
    assert (tensor == dist.get_world_size(group)).all()
    assert backend.allocate_tensor(0, dtype=torch.float32, device=CPU).shape == (0,)
    if not is_in_python(group):
        # As hooks of DDP do. What is longer is ordinary memory.
        tensor.resize_(200_000)
        assert (tensor[:100_000] == dist.get_world_size(group)).all()
    if sys.platform == "win32":
        # Windows has no limit on file sizes.
        return
    import resource

    # Without room for more, the memory is ordinary.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        ordinary = backend.allocate_tensor(100_000_000, dtype=torch.float32, device=CPU)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    ordinary = ordinary[:1000].fill_(1)
    dist.all_reduce(ordinary, group=group)
    assert (ordinary == dist.get_world_size(group)).all()


@check
def fsdp2_in_memory_of_kolo(group):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    def sharded(chosen=None):
        module = model()
        fully_shard(module, mesh=DeviceMesh.from_group(group, "cpu"))
        if chosen is not None:
            module.set_allocate_memory_from_process_group_for_comm(chosen)
        module(torch.ones(2, next(module.parameters()).shape[-1])).sum().backward()
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        return type(groups[0]._all_gather_comm).__name__

    if not hasattr(FSDPModule, "set_allocate_memory_from_process_group_for_comm"):
        raise NotRun("this PyTorch lets no process group allocate for FSDP2")
    assert sharded() == "ProcessGroupAllocAllGather"
    assert sharded(chosen=False) == "DefaultAllGather"


@check
def ddp_with_sparse_gradients(group):
    def train(which):
        torch.manual_seed(0)
        module = nn.Sequential(nn.EmbeddingBag(50, 8, sparse=True), nn.Linear(8, 3))
        wrapped = DistributedDataParallel(module, process_group=which)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        for step in range(3):
            torch.manual_seed(step * 100 + dist.get_rank())
            optimizer.zero_grad()
            wrapped(torch.randint(50, (4, 6))).sum().backward()
            optimizer.step()
        return state_of(module)

    torch.testing.assert_close(train(group), train(gloo()), rtol=1e-6, atol=1e-7)


@check
def ddp_with_uneven_inputs(group):
    def train(which):
        module = model()
        wrapped = DistributedDataParallel(module, process_group=which)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
        with wrapped.join():
            steps(wrapped, optimizer, count=2 + dist.get_rank())
        return state_of(module)

    torch.testing.assert_close(train(group), train(gloo()), rtol=1e-6, atol=1e-7)


@check
def zero_redundancy_optimizer(group):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def train(which):
        module = model()
        wrapped = DistributedDataParallel(module, process_group=which)
        optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, process_group=which, lr=0.1, momentum=0.9)
        steps(wrapped, optimizer)
        return state_of(module)

    torch.testing.assert_close(train(group), train(gloo()), rtol=1e-5, atol=1e-6)


def mesh_of(group, name):
    from torch.distributed.device_mesh import DeviceMesh

    # PyTorch treats meshes of the same ranks and names as equal, and would use the cache of one
    # with the group of another.
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(f"{name}_{group.group_name}",))


def train_with_fsdp(group, mixed=False):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor

    module = model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if mixed else MixedPrecisionPolicy()
    mesh = mesh_of(group, "dp")
    for layer in module:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy())
    steps(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
    values = [value.full_tensor() if isinstance(value, DTensor) else value for value in module.state_dict().values()]
    return torch.cat([value.detach().double().flatten() for value in values])


@check
def fsdp_equals_gloo(group):
    needs_gathers_of_several()
    needs_pytorch(2, 11, "Gloo sums where ReduceOp.AVG is asked for")
    torch.testing.assert_close(train_with_fsdp(group), train_with_fsdp(gloo()), rtol=1e-5, atol=1e-6)


@check
def fsdp_of_mixed_precision(group):
    needs_pytorch(2, 11, "Gloo sums where ReduceOp.AVG is asked for")
    torch.testing.assert_close(train_with_fsdp(group, True), train_with_fsdp(gloo(), True), rtol=1e-3, atol=1e-4)


def train_tensor_parallel(group):
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 12))
    parallelize_module(module, mesh_of(group, "tp"), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(step)
        optimizer.zero_grad()
        module(torch.randn(6, 12)).square().sum().backward()
        optimizer.step()
    values = [value.full_tensor() if isinstance(value, DTensor) else value for value in module.state_dict().values()]
    return torch.cat([value.detach().flatten() for value in values])


@check
def tensor_parallel_equals_gloo(group):
    torch.testing.assert_close(train_tensor_parallel(group), train_tensor_parallel(gloo()), rtol=1e-5, atol=1e-6)


@check
def distributed_tensors(group):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = mesh_of(group, "x")
    torch.manual_seed(0)
    # Not divisible by the number of ranks.
    whole = torch.randn(13, 7)
    shared = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(shared.full_tensor(), whole)
    assert torch.equal(shared.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
    assert torch.equal(shared.redistribute(mesh, [Replicate()]).to_local(), whole)
    torch.testing.assert_close((shared @ shared.t()).full_tensor(), whole @ whole.t())


@check
def functional_collectives(group):
    import torch.distributed._functional_collectives as functional

    rank, world = dist.get_rank(group), dist.get_world_size(group)
    assert (functional.all_reduce(torch.ones(3), "sum", group) == world).all()
    gathered = functional.all_gather_tensor(torch.full((2,), float(rank)), 0, group)
    assert torch.equal(gathered + 0, torch.arange(float(world)).repeat_interleave(2))
    assert (functional.reduce_scatter_tensor(torch.ones(2 * world), "avg", 0, group) == 1).all()
    exchanged = functional.all_to_all_single(torch.full((world,), float(rank)), None, None, group)
    assert torch.equal(exchanged + 0, torch.arange(float(world)))


@check
def checkpoints(group):
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.fsdp import fully_shard

    folder = [tempfile.mkdtemp() if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(folder, group_src=0, group=group)

    def sharded(seed):
        module = nn.Sequential(nn.Linear(10, 16), nn.Linear(16, 3))
        torch.manual_seed(seed)
        for parameter in module.parameters():
            nn.init.normal_(parameter)
        fully_shard(module, mesh=mesh_of(group, "dp"))
        return module

    saved, loaded = sharded(1), sharded(2)
    checkpoint.save({"model": saved.state_dict()}, checkpoint_id=folder[0], process_group=group)
    state = {"model": loaded.state_dict()}
    checkpoint.load(state, checkpoint_id=folder[0], process_group=group)
    loaded.load_state_dict(state["model"])
    for one, other in zip(saved.parameters(), loaded.parameters()):
        assert torch.equal(one.full_tensor(), other.full_tensor())
    pending = checkpoint.async_save({"model": saved.state_dict()}, checkpoint_id=folder[0] + "-later", process_group=gloo())
    pending.result()


@check
def pipelines(group):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank, world = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(world)]
    stage = PipelineStage(copy.deepcopy(layers[rank]), rank, world, CPU, group=group)
    schedule = ScheduleGPipe(stage, n_microbatches=4)
    inputs = torch.randn(8, 8)
    output = schedule.step(inputs) if rank == 0 else schedule.step()
    if rank == world - 1:
        torch.testing.assert_close(output, nn.Sequential(*layers)(inputs))


# ---- The calls of frameworks that cannot be installed here ----


@check
def calls_of_megatron(group):
    """As Megatron-LM's core makes them: `param_and_grad_buffer.py` of its distributed optimizer, the
    vocabulary-parallel cross entropy, and the pipeline's `p2p_communication.py`.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    # Gradients: buckets are slices of one buffer, and each rank's shard a slice of its bucket.
    buffer = torch.arange(2 * 1000 * world, dtype=torch.bfloat16) % 7
    buckets = buffer.clone().chunk(2)
    shards = [bucket[1000 * rank : 1000 * (rank + 1)] for bucket in buckets]
    with dist._coalescing_manager(group, async_ops=True) as manager:
        for bucket, shard in zip(buckets, shards):
            dist.reduce_scatter_tensor(shard, bucket, op=dist.ReduceOp.AVG, group=group, async_op=True)
    manager.wait()
    for bucket, shard in zip(buffer.chunk(2), shards):
        assert torch.equal(shard, bucket[1000 * rank : 1000 * (rank + 1)])
    # Parameters: each rank's shard goes to where it lies in the bucket of all.
    for bucket, shard in zip(buckets, shards):
        bucket.fill_(-1)
        shard.fill_(rank)
    with dist._coalescing_manager(group, async_ops=True) as manager:
        for bucket, shard in zip(buckets, shards):
            dist.all_gather_into_tensor(bucket, shard, group=group, async_op=True)
    manager.wait()
    for bucket in buckets:
        assert torch.equal(bucket, torch.arange(world).repeat_interleave(1000).bfloat16())
    # The cross entropy: the maximum of the logits, then sums of slices.
    logits = torch.full((4, 3), float(rank)).max(dim=-1)[0]
    dist.all_reduce(logits, op=dist.ReduceOp.MAX, group=group)
    assert torch.equal(logits, torch.full((4,), float(world - 1)))
    # The pipeline: activations go to the next rank, gradients to the one before, in one batch.
    after, before = (rank + 1) % world, (rank - 1) % world
    activations, gradients = torch.empty(2, 8), torch.empty(2, 8)
    batch = [
        dist.P2POp(dist.isend, torch.full((2, 8), float(rank)), group=group, group_peer=after),
        dist.P2POp(dist.irecv, activations, group=group, group_peer=before),
        dist.P2POp(dist.isend, torch.full((2, 8), float(-rank)), group=group, group_peer=before),
        dist.P2POp(dist.irecv, gradients, group=group, group_peer=after),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    # With two ranks, both messages have the same two ends, and arrive in order.
    assert activations.eq(before).all() and gradients.eq(-after).all()
    dist.barrier(group)


@check
def calls_of_sglang(group):
    """As the GroupCoordinator of SGLang makes them on processors, in `parallel_state.py`: a group for
    tensors, and one for objects.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    ranks = dist.get_process_group_ranks(group)
    for_objects = dist.new_group(ranks, backend="kolo")
    hidden = torch.ones(3, 64, dtype=torch.bfloat16)
    dist.all_reduce(hidden, group=group)
    assert hidden.eq(world).all()
    # Gathered along the last dimension.
    gathered = torch.empty(world * 3, 4)
    dist.all_gather_into_tensor(gathered, torch.full((3, 4), float(rank)), group=group)
    gathered = gathered.reshape(world, 3, 4).movedim(0, 1).reshape(3, 4 * world)
    assert torch.equal(gathered[0], torch.arange(float(world)).repeat_interleave(4))
    gathered = [torch.empty(5) for _ in range(world)] if rank == 0 else None
    dist.gather(torch.full((5,), float(rank)), gathered, dst=ranks[0], group=group)
    assert rank != 0 or all(part.eq(number).all() for number, part in enumerate(gathered))
    # A dictionary of tensors: first what they are, as an object, then each tensor.
    told = [[("ids", torch.int64, (7,)), ("none", torch.float32, (0,)), ("logits", torch.float32, (2, 9))]] if rank == 0 else [None]
    dist.broadcast_object_list(told, src=ranks[0], group=for_objects)
    tensors = [torch.ones(size, dtype=dtype) if rank == 0 else torch.empty(size, dtype=dtype) for _, dtype, size in told[0]]
    for work in [dist.broadcast(tensor, src=ranks[0], group=for_objects, async_op=True) for tensor in tensors if tensor.numel()]:
        work.wait()
    assert all(tensor.eq(1).all() for tensor in tensors)
    # An object between two stages: its size, then its bytes.
    words = torch.frombuffer(bytearray(b"to the next stage"), dtype=torch.uint8)
    if rank == 0:
        dist.send(torch.tensor([words.numel()]), ranks[world - 1], group=for_objects)
        dist.send(words, ranks[world - 1], group=for_objects)
    elif rank == world - 1:
        size = torch.empty(1, dtype=torch.long)
        dist.recv(size, ranks[0], group=for_objects)
        received = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(received, ranks[0], group=for_objects)
        assert bytes(received.tolist()) == b"to the next stage"
    dist.barrier(group=for_objects)
    dist.destroy_process_group(for_objects)
