"""torchrun --max-restarts: a rank is killed, torchrun starts all ranks again, and they go on from the
last checkpoint. With ELASTIC_KILL=0 no rank is killed.
"""

import os
import signal
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from outcome import backend_of, tell
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

STEPS = 12
# In the first life, this rank is killed before this step is complete.
KILLED = (1, 5)


@record
def main():
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    # DDP gives all ranks the parameters of rank 0.
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    # torchrun's run has the same name in each life.
    checkpoint = Path(tempfile.gettempdir(), f"elastic-restarts-{os.environ['TORCHELASTIC_RUN_ID']}")
    step, losses = 0, []
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, losses = state["step"], state["losses"]
    began = step
    while step < STEPS:
        generator = torch.Generator().manual_seed(100 * step + rank)
        features = torch.randn(8, 16, generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(features), features.sum(1, keepdim=True))
        if life == 0 and KILLED == (rank, step) and os.environ.get("ELASTIC_KILL") != "0":
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        losses.append(mean.item())
        step += 1
        if rank == 0:
            part = checkpoint.with_suffix(".part")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "losses": losses}, part)
            part.replace(checkpoint)
        # No rank goes on before the step can be read again.
        dist.barrier()
    if rank == 0:
        checkpoint.unlink()
    tell(rank, by=backend_of(), world=world, began=began, losses=losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
