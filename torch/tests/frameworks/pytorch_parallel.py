"""PyTorch's own ways to train in parallel: FSDP2 with activation checkpointing, tensor parallelism of DTensor,
a pipeline, asynchronous checkpoints, and compiled programs with functional collectives."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from outcome import backend_of, tell
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce, reduce_scatter_tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH = 32


def encoder(layers=2):
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def train(model, inputs, count=4):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def batch(rank):
    return torch.randn(4, 6, WIDTH, generator=torch.Generator().manual_seed(100 + rank))


def fsdp2(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    model = encoder()
    apply_activation_checkpointing(model, check_fn=lambda part: isinstance(part, nn.TransformerEncoderLayer))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return train(model, batch(rank))


def fsdp2_of_mixed_precision(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    model = encoder()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return train(model, batch(rank).bfloat16())


def tensor_parallel(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return train(model, batch(0))


def pipeline(rank, world, schedule):
    torch.manual_seed(3)
    parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(world)]
    stage = PipelineStage(parts[rank], rank, world, torch.device("cpu"))
    mean = schedule(stage, 4, loss_fn=lambda outputs, targets: (outputs - targets).square().mean())
    generator = torch.Generator().manual_seed(4)
    inputs, targets = (torch.randn(8, WIDTH, generator=generator) for _ in range(2))
    optimizer = torch.optim.SGD(parts[rank].parameters(), lr=0.1)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        losses = []
        arguments = (inputs,) if rank == 0 else ()
        mean.step(*arguments, **({"target": targets, "losses": losses} if rank == world - 1 else {}))
        optimizer.step()
        loss = torch.stack(losses).mean().reshape(1) if losses else torch.empty(1)
        dist.broadcast(loss.detach(), world - 1)
        found.append(loss.item())
    return found


def asynchronous_checkpoint(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    model = encoder()
    fully_shard(model, mesh=mesh)
    train(model, batch(rank), 1)
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    before = [parameter.full_tensor().clone() for parameter in model.parameters()]
    saving = checkpoint.async_save({"model": model.state_dict()}, checkpoint_id=os.path.join(folder[0], "one"))
    saving.result()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = {"model": model.state_dict()}
    checkpoint.load(state, checkpoint_id=os.path.join(folder[0], "one"))
    model.load_state_dict(state["model"])
    after = [parameter.full_tensor() for parameter in model.parameters()]
    assert all(map(torch.equal, before, after)), "the checkpoint holds other parameters"
    return [sum(parameter.double().sum().item() for parameter in after)]


def compiled_collectives(rank, world):
    """torch.compile of a function whose collectives are part of the graph."""
    group = dist.group.WORLD

    def program(values):
        total = all_reduce(values * 2, "sum", group)
        gathered = all_gather_tensor(total + rank, 0, group)
        return reduce_scatter_tensor(gathered, "sum", 0, group).sin()

    values = torch.arange(8.0) + rank
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    found = [compiled(values) for _ in range(3)]
    assert all(torch.equal(one, program(values)) for one in found)
    return found[0].tolist()


def main():
    dist.init_process_group()
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    values = {
        "fsdp2": fsdp2(rank, world),
        "mixed_precision": fsdp2_of_mixed_precision(rank, world),
        "tensor_parallel": tensor_parallel(rank, world),
        "gpipe": pipeline(rank, world, ScheduleGPipe),
        "one_forward_one_backward": pipeline(rank, world, Schedule1F1B),
        "checkpoint": asynchronous_checkpoint(rank, world),
    }
    # Gloo hangs in compiled collectives.
    if backend_of() == "kolo":
        tell(rank, compiled=compiled_collectives(rank, world))
    tell(rank, by=backend_of(), world=world, **values)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
