"""torchft: three replicas train, one is killed, the others go on, and a new one catches up.

The program starts the replicas itself, and a lighthouse, which tells replicas of each other.
"""

import itertools
import os
import signal
import subprocess
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from outcome import backend_of, tell
from torch import nn

REPLICAS = 3
# Of all replicas together, before one is killed and after a new one has caught up.
STEPS = 4


def group():
    if os.environ.get("TORCHFT_GROUP") == "kolo":
        from torch_kolo.torchft import ProcessGroupKolo

        return ProcessGroupKolo(timeout=timedelta(seconds=60))
    from torchft import ProcessGroupGloo

    return ProcessGroupGloo(timeout=timedelta(seconds=60))


def train(replica, is_second_life):
    from torchft import DistributedDataParallel, Manager, Optimizer

    torch.manual_seed(replica + 10 * is_second_life)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    inner = torch.optim.Adam(model.parameters(), lr=0.01)

    def load(state):
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    def save():
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    process_group = group()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=process_group,
        min_replica_size=2,
        load_state_dict=load,
        state_dict=save,
        replica_id=f"replica_{replica}_",
        timeout=timedelta(seconds=60),
        quorum_timeout=timedelta(seconds=120),
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
    )
    # All replicas begin with the parameters of one.
    wrapped = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    generator = torch.Generator().manual_seed(50 + replica)
    sizes, by = [], None
    # Whole again: the replica that was killed has come back.
    whole, whole_again, came_back = 0, 0, is_second_life
    while whole_again < STEPS:
        features = torch.randn(4, 16, generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(wrapped(features), features.sum(1, keepdim=True))
        loss.backward()
        if replica == 1 and not is_second_life and whole == STEPS:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        size = manager.num_participants()
        if size < REPLICAS and whole >= STEPS:
            came_back = True
        whole += size == REPLICAS
        whole_again += size == REPLICAS and came_back
        sizes.append(size)
        by = by or backend_of(process_group._pg)
    total = sum(parameter.double().sum().item() for parameter in model.parameters())
    tell(replica, by=by, sizes=[size for size, _ in itertools.groupby(sizes)], total=total)
    manager.shutdown(wait=False)


def start(replica, is_second_life, lighthouse):
    command = [sys.executable, __file__, str(replica), str(int(is_second_life))]
    return subprocess.Popen(command, env={**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse})


def main():
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=5000, heartbeat_timeout_ms=2000)
    # Each replica is a job of its own, with its own store.
    replicas = [start(replica, False, lighthouse.address()) for replica in range(REPLICAS)]
    killed = replicas[1].wait()
    assert killed == -signal.SIGKILL, f"replica 1 ended with {killed}"
    replicas[1] = start(1, True, lighthouse.address())
    ends = [replica.wait() for replica in replicas]
    lighthouse.shutdown()
    assert not any(ends), f"the replicas ended with {ends}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(int(sys.argv[1]), sys.argv[2] == "1")
    else:
        main()
