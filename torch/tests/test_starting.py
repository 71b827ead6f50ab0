"""The start of a job with nothing imported but PyTorch."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from harness import Ranks, free_port

PROGRAM = """
    import os, sys
    import torch, torch.distributed as dist
    assert "torch_kolo._C" not in sys.modules, "loaded by importing PyTorch"
    dist.init_process_group({arguments})
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == dist.get_world_size(), tensor
    sys.stdout.write(f"rank {{dist.get_rank()}} of {{dist.get_world_size()}} by {{dist.get_backend()}}\\n")
    dist.destroy_process_group()
"""


def torchrun(*arguments, environment=None):
    command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **(environment or {})}
    return subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)


def write(folder, program, **values):
    path = folder / "program.py"
    path.write_text(textwrap.dedent(program).format(**values))
    return str(path)


@pytest.mark.parametrize("backend", ['"kolo"', '"cpu:kolo"', '"cpu:kolo,cuda:kolo"', '"KOLO"'])
def test_torchrun(tmp_path, backend):
    program = write(tmp_path, PROGRAM, arguments=backend)
    ran = torchrun("--standalone", "--nnodes=1", "--nproc-per-node=3", program)
    assert ran.returncode == 0, ran.stderr
    assert {line.split(" by ")[0] for line in ran.stdout.splitlines()} >= {f"rank {rank} of 3" for rank in range(3)}


RESTARTED = """
    import os, signal, sys
    import torch, torch.distributed as dist
    dist.init_process_group("kolo")
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    for step in range(100):
        if attempt == 0 and rank == 1 and step == 50:
            os.kill(os.getpid(), signal.SIGKILL)
        tensor = torch.ones(1000)
        dist.all_reduce(tensor)
    assert attempt == 1 and (tensor == 2).all()
    sys.stdout.write(f"rank {{rank}} ended in attempt {{attempt}}\\n")
    dist.destroy_process_group()
"""


def test_a_killed_rank_is_started_again(tmp_path):
    program = write(tmp_path, RESTARTED)
    ran = torchrun("--standalone", "--nnodes=1", "--nproc-per-node=2", "--max-restarts=2", program)
    assert ran.returncode == 0, ran.stderr
    assert "rank 0 ended in attempt 1" in ran.stdout and "rank 1 ended in attempt 1" in ran.stdout


def starts(rank, world, methods):
    import torch.distributed as dist

    for method, port in methods:
        if method == "env://":
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            dist.init_process_group("kolo")
        else:
            dist.init_process_group("kolo", init_method=method, rank=rank, world_size=world)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == world
        dist.barrier()
        dist.destroy_process_group()
    return True


@pytest.mark.parametrize("kind", ["file", "tcp", "env"])
def test_init_methods(tmp_path, kind):
    # Each group has a store of its own: a fast rank could still find the store of the previous
    # group.
    ports = [free_port(), free_port()]
    urls = {"file": "file://{}/store-{}", "tcp": "tcp://127.0.0.1:{1}", "env": "env://"}
    methods = [(urls[kind].format(tmp_path, port), port) for port in ports]
    assert all(Ranks(2, starts, methods).results().values())


def test_one_rank_alone(tmp_path):
    program = write(tmp_path, PROGRAM, arguments=f'"kolo", init_method="file://{tmp_path}/store", rank=0, world_size=1')
    ran = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stderr


def test_another_version_of_pytorch_is_refused(tmp_path):
    program = """
        import torch_kolo, torch_kolo._build
        torch_kolo._build.torch_version = "2.10.1+cpu"
        try:
            torch_kolo.Options()
        except ImportError as error:
            assert "built for PyTorch 2.10.1+cpu" in str(error), error
        else:
            raise SystemExit("it was loaded")
    """
    ran = subprocess.run([sys.executable, write(tmp_path, program)], capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stderr
    assert torch.__version__
