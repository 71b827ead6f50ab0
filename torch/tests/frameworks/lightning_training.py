"""Lightning's Trainer with DDP."""

import os
import sys
import tempfile

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from outcome import backend_of, tell
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
        self.losses, self.validated, self.backend = [], [], None

    def on_fit_start(self):
        self.backend = backend_of()

    def loss(self, batch):
        features, targets = batch
        return nn.functional.mse_loss(self.layers(features), targets)

    def training_step(self, batch, _):
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        self.losses.append(self.all_gather(loss.detach()).mean().item())
        return loss

    def validation_step(self, batch, _):
        self.log("validated", self.loss(batch), sync_dist=True)

    def on_validation_epoch_end(self):
        self.validated.append(self.trainer.callback_metrics["validated"].item())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main():
    lightning.seed_everything(11, verbose=False)
    inputs = torch.randn(64, 16)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=int(os.environ["LOCAL_WORLD_SIZE"]),
            strategy=DDPStrategy(),
            max_epochs=2,
            default_root_dir=folder,
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
            num_sanity_val_steps=0,
        )
        model = Regression()
        trainer.fit(model, DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=4))
        sums = sum(parameter.double().sum() for parameter in model.parameters())
        tell(
            trainer.global_rank,
            by=model.backend,
            world=trainer.world_size,
            losses=model.losses,
            validated=model.validated,
            sums=sums.detach(),
        )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
