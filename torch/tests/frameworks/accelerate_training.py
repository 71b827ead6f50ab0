"""Accelerate: training, gradient accumulation, and its collectives of objects and tensors."""

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object, set_seed
from outcome import backend_of, tell
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    rank, world = accelerator.process_index, accelerator.num_processes
    set_seed(7)
    inputs = torch.randn(96, 16)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    losses = []
    for _ in range(3):
        for features, targets in data:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(features), targets)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather_for_metrics(loss.detach()).mean().item())

    assert accelerator.reduce(torch.tensor([rank + 1.0]), "sum").item() == world * (world + 1) / 2
    assert accelerator.gather(torch.tensor([rank])).tolist() == list(range(world))
    padded = accelerator.pad_across_processes(torch.ones(rank + 1), dim=0)
    assert len(padded) == world
    assert gather_object([{"rank": rank}]) == [{"rank": other} for other in range(world)]
    shared = [f"from rank {rank}"]
    broadcast_object_list(shared)
    assert shared == ["from rank 0"]
    with accelerator.main_process_first():
        pass
    accelerator.wait_for_everyone()
    tell(rank, by=backend_of(), world=world, losses=losses)
    accelerator.end_training()


if __name__ == "__main__":
    main()
