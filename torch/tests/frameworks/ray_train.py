"""Ray Train: its TorchTrainer starts the workers and the process group, and prepares model and data."""

import json
import os
import sys
import tempfile
from pathlib import Path

import ray
import ray.train
import ray.train.torch
import torch
from outcome import backend_of, tell
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

HERE = os.path.dirname(os.path.abspath(__file__))


def train_on_worker(config):
    context = ray.train.get_context()
    torch.manual_seed(5)
    inputs = torch.randn(64, 16)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=False)
    data = ray.train.torch.prepare_data_loader(data)
    model = ray.train.torch.prepare_model(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for epoch in range(3):
        data.sampler.set_epoch(epoch)
        for features, targets in data:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(features), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        ray.train.report({"loss": losses[-1]})
    # Ray may end before it has passed on what workers print.
    outcome = {"by": backend_of(), "world": context.get_world_size(), "losses": losses}
    Path(config["folder"], f"{context.get_world_rank()}.json").write_text(json.dumps(outcome))


def main(ranks):
    variables = {name: value for name, value in os.environ.items() if name.startswith(("KOLO_", "GLOO_"))}
    path = os.pathsep.join(filter(None, [HERE, os.environ.get("PYTHONPATH")]))
    ray.init(num_cpus=ranks + 1, include_dashboard=False, runtime_env={"env_vars": {**variables, "PYTHONPATH": path}})
    with tempfile.TemporaryDirectory() as folder:
        trainer = ray.train.torch.TorchTrainer(
            train_on_worker,
            train_loop_config={"folder": folder},
            scaling_config=ray.train.ScalingConfig(num_workers=ranks, use_gpu=False),
            run_config=ray.train.RunConfig(storage_path=folder),
        )
        result = trainer.fit()
        assert result.error is None, result.error
        for rank in range(ranks):
            tell(rank, **json.loads(Path(folder, f"{rank}.json").read_text()))
    ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
