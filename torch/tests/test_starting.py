"""The start of a job with nothing imported but PyTorch."""

import importlib
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import EVERY_CASE, Ranks, free_port

PROGRAM = """
    import os, sys
    import torch, torch.distributed as dist
    assert not {{"torch_kolo._C", "torch_kolo.python.backend"}} & set(sys.modules), "loaded by importing PyTorch"
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


BACKENDS = ['"KOLO"', '"cpu:kolo,cuda:kolo"', '"kolo"', '"cpu:kolo"']


# Each starts four processes that import PyTorch.
@pytest.mark.parametrize("backend", BACKENDS if EVERY_CASE else BACKENDS[:2])
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
    ports = [free_port(), free_port()]
    urls = {"file": tmp_path.as_uri() + "/store-{}", "tcp": "tcp://127.0.0.1:{}", "env": "env://"}
    methods = [(urls[kind].format(port), port) for port in ports]
    assert all(Ranks(2, starts, methods).results().values())


def starts_again(rank, world, method, port, keeps_store):
    """Starts again and again; returns how many descriptors are open after each time."""
    import gc

    import torch.distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    # Nothing waits for the garbage collector to close a descriptor.
    gc.disable()
    if not keeps_store:
        # However busy the machine is, rank 0 closes its store before.
        importlib.import_module("torch_kolo._rendezvous").CLOSES = 600
    kept, counts = [], []
    for _ in range(20):
        dist.init_process_group("kolo", init_method=method, rank=rank, world_size=world)
        if keeps_store:
            kept.append(dist.distributed_c10d._get_default_store())
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
        dist.all_reduce(tensor, async_op=True).get_future().wait()
        assert tensor.item() == world**3
        dist.destroy_process_group()
        counts.append(len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0)
    return counts


@pytest.mark.parametrize("kind", ["env", "tcp", "kept"])
def test_ranks_start_again_and_again(kind, capfd):
    """Another rank may connect before rank 0 has closed the store of the start before, or rank 0
    never closes it. PyTorch would log the stack of a call to a store that closes.
    """
    port = free_port()
    method = f"tcp://127.0.0.1:{port}" if kind == "tcp" else "env://"
    for rank, counts in Ranks(2, starts_again, method, port, kind == "kept").results().items():
        assert kind == "kept" or len(set(counts)) == 1, f"rank {rank}: {counts}"
    said = capfd.readouterr().err
    assert "recvValue failed" not in said and "Exception raised" not in said, said


def test_a_rank_that_waits_for_a_key_is_quiet(capfd):
    """kolo waits in short pieces. PyTorch would log each that times out."""
    from torch_kolo.python.store import Rendezvous

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rendezvous = Rendezvous(store)
    # No reply is made, so none is needed.
    assert rendezvous.callbacks.get(None, b"absent", 50, None) == 0
    assert rendezvous.problem is None
    said = capfd.readouterr().err
    assert "timed out" not in said, said


def test_a_store_needs_no_libuv():
    """PyTorch for Windows is built without it."""
    assert all(Ranks(1, starts, [("env://", free_port())]).results().values())


def test_one_rank_alone(tmp_path):
    program = write(tmp_path, PROGRAM, arguments=f'"kolo", init_method="{tmp_path.as_uri()}/store", rank=0, world_size=1')
    ran = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stderr


def test_capabilities():
    """As the table in docs/pytorch.md says."""
    in_cpp = importlib.import_module("torch_kolo")._load().__name__.endswith("._C")
    expected = {
        "supports_splitting": True,
        "supports_coalescing": True,
        "supports_shrinking": True,
        "supports_reconfigure": in_cpp,
        "supports_abort_hooks": True,
        "supports_completion_hooks": in_cpp,
        "_supports_time_estimate": False,
        "supports_window": False,
    }
    dist.init_process_group("kolo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        # Older versions of PyTorch do not ask for each.
        found = {name: getattr(backend, name) for name in expected if hasattr(backend, name)}
    finally:
        dist.destroy_process_group()
    assert found and found == {name: expected[name] for name in found}


def test_the_implementation_is_chosen(tmp_path):
    program = """
        import os, sys, types
        import torch_kolo

        # As after an installation for another PyTorch.
        torch_kolo._build = sys.modules["torch_kolo._build"] = types.SimpleNamespace(torch_version="2.10.1+cpu")
        os.environ.pop("KOLO_TORCH_IMPL", None)
        assert torch_kolo.ProcessGroupKolo.__module__ == "torch_kolo.python.backend"
        for wanted, said in (("cpp", "for PyTorch 2.10.1+cpu"), ("c++", "set it to cpp or python")):
            torch_kolo._load.cache_clear()
            os.environ["KOLO_TORCH_IMPL"] = wanted
            try:
                torch_kolo.Options()
            except ImportError as error:
                assert said in str(error), error
            else:
                raise SystemExit("it was loaded")
    """
    ran = subprocess.run([sys.executable, write(tmp_path, program)], capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stderr


def test_the_version_is_kolo_s():
    torch_kolo = importlib.import_module("torch_kolo")
    manifest = Path(__file__).resolve().parents[2] / "Cargo.toml"
    if not manifest.is_file():
        pytest.skip("NOT RUN: there is no Cargo.toml here")
    (version,) = re.findall(r'^\[workspace.package\]\nversion = "(.*)"$', manifest.read_text(), re.MULTILINE)
    assert torch_kolo.__version__ == version


@pytest.mark.parametrize(
    ("ranks", "arguments", "said"),
    [
        (2, ["--dummy-images", "30", "-b", "64"], "each rank has 15 training images, and its batch has 32; give at most --batch-size 30"),
        (1, ["--start-epoch", "2", "--epochs", "2"], "there is nothing to train: 2 epochs are done"),
        (1, ["--dummy-images", "0"], "give more images"),
        (1, ["--dummy-images", "0", "--evaluate"], "there is no image to evaluate"),
    ][: 4 if EVERY_CASE else 2],
)
def test_a_training_without_a_step_says_so(tmp_path, ranks, arguments, said):
    program = Path(__file__).resolve().parents[1] / "examples" / "imagenet" / "main.py"
    if not program.is_file():
        pytest.skip("NOT RUN: the examples are not here")
    command = [sys.executable, str(program), "--dummy", "--image-size", "32", "-j", "0", "--checkpoint", "", *arguments]
    if ranks > 1:
        command += ["--multiprocessing-distributed", "--ranks", str(ranks), "--dist-url", tmp_path.as_uri() + "/store"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=900, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ran.returncode == 1 and ran.stderr.count(said) == 1 and "Traceback" not in ran.stderr, ran.stderr


AS_GLOO = """
    import datetime, sys
    import torch, torch.distributed as dist
    dist.init_process_group({arguments})
    tensor = torch.ones(1)
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(tensor)
    assert tensor.item() == dist.get_world_size(), tensor
    shown = [(entry.name, entry.input_shapes) for entry in profile.function_events]
    assert ("gloo:all_reduce", [[1]]) in shown, shown
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert type(backend).__name__ == "ProcessGroupKolo", type(backend)
    if dist.get_rank() == 0:
        try:
            dist.monitored_barrier(timeout=datetime.timedelta(seconds=1), wait_all_ranks={all})
        except ValueError as error:
            # Before 2.15, PyTorch refuses it where no backend was named, on Gloo, too.
            assert "only implemented for GLOO" in str(error) and dist.get_backend() != "gloo", error
        except RuntimeError as error:
            assert "failed to pass monitoredBarrier in 1000 ms" in str(error), error
        else:
            raise SystemExit("the others did not come")
    sys.stdout.write(f"rank {{dist.get_rank()}} by {{dist.get_backend()}}\\n")
"""


@pytest.mark.parametrize(("arguments", "said"), [('"gloo"', "gloo"), ("", ("gloo", "undefined"))])
def test_in_place_of_gloo(tmp_path, arguments, said):
    program = write(tmp_path, AS_GLOO, arguments=arguments, all=arguments == "")
    ran = torchrun("--standalone", "--nnodes=1", "--nproc-per-node=2", program, environment={"KOLO_AS_GLOO": "1"})
    assert ran.returncode == 0, ran.stderr
    assert {line.split()[-1] for line in ran.stdout.splitlines()} <= set(said if isinstance(said, tuple) else [said])
    assert len(ran.stdout.splitlines()) == 2, ran.stdout
