"""DeepSpeed with ZeRO, stages 1, 2 and 3."""

import deepspeed
import torch
import torch.distributed as dist
from outcome import backend_of, tell
from torch import nn


def train(stage, rank):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 1.0,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    generator = torch.Generator().manual_seed(100 + rank)
    losses = []
    for _ in range(6):
        features = torch.randn(4, 16, generator=generator).bfloat16()
        loss = nn.functional.mse_loss(engine(features), features.sum(1, keepdim=True))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def main():
    deepspeed.init_distributed()
    rank = dist.get_rank()
    losses = {f"stage_{stage}": train(stage, rank) for stage in (1, 2, 3)}
    tell(rank, by=backend_of(), world=dist.get_world_size(), **losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
