"""Frameworks on kolo in the place of Gloo: the programs in `frameworks` find the same on both.

A framework that is not installed is skipped; .ci/stages/pytorch-frameworks installs all of them.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "frameworks"
sys.path.insert(0, str(FOLDER))

from outcome import told  # noqa: E402

# Only a hang takes this long.
PATIENCE = 900

# Now and then Gloo aborts a process that exits. Then the program runs again on Gloo.
ATTEMPTS = 3
ABORT_AT_EXIT = "terminate called without an active exception"

# KOLO_TEST_WORLDS=2,4: how many ranks there are.
WORLDS = [int(world) for world in os.environ.get("KOLO_TEST_WORLDS", "2").split(",")]


def run(command, backend, **environment):
    """Runs a program on a backend. Returns what each rank has told."""
    everywhere = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}
    everywhere.update(environment, KOLO_AS_GLOO=str(int(backend == "kolo")))
    for attempt in range(1, ATTEMPTS + 1):
        # Into files, because processes that a framework leaves behind would hold a pipe open.
        with tempfile.TemporaryFile() as output:
            ran = subprocess.run(
                command, cwd=FOLDER, env={**os.environ, **everywhere}, stdout=output, stderr=subprocess.STDOUT, timeout=PATIENCE
            )
            output.seek(0)
            text = output.read().decode(errors="replace")
        if ran.returncode == 0:
            return told(text)
        problem = f"{command} on {backend} ended with {ran.returncode}:\n{text[-8000:]}"
        assert backend == "gloo" and ABORT_AT_EXIT in text and attempt < ATTEMPTS, problem
        warnings.warn(f"attempt {attempt} of {ATTEMPTS}: {problem}")


def needs(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def compare(world, command, **environment):
    """Every rank finds on kolo what it finds on Gloo, but for the rounding of sums."""
    found = {backend: run(command, backend, **environment) for backend in ("gloo", "kolo")}
    for backend, ranks in found.items():
        assert sorted(ranks) == list(range(world)), f"on {backend} only these ranks told: {sorted(ranks)}"
        assert {(values.pop("by"), values.pop("world")) for values in ranks.values()} == {(backend, world)}
    assert any(values for values in found["gloo"].values()), "nothing was compared"
    for rank, values in found["gloo"].items():
        for name, of_gloo in values.items():
            assert found["kolo"][rank][name] == pytest.approx(of_gloo, rel=1e-3, abs=1e-5), f"{name} of rank {rank}"


def torchrun(world, program, *options):
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", *options, program]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    "package, program",
    [
        ("torch", "pytorch_parallel.py"),
        ("accelerate", "accelerate_training.py"),
        ("transformers", "transformers_trainer.py"),
        ("lightning", "lightning_training.py"),
        ("deepspeed", "deepspeed_zero.py"),
    ],
)
def test_under_torchrun(package, program, world):
    needs(package)
    compare(world, torchrun(world, program), DS_ACCELERATOR="cpu")


@pytest.mark.parametrize("world", WORLDS)
def test_elastic_restarts(world):
    """After a restart on kolo, ranks find what they find on Gloo without one: Gloo's ranks often fail to connect again."""
    command = torchrun(world, "elastic_restarts.py", "--max-restarts=2")
    gloo, kolo = run(command, "gloo", ELASTIC_KILL="0"), run(command, "kolo")
    assert sorted(gloo) == sorted(kolo) == list(range(world))
    for rank in range(world):
        assert (gloo[rank]["by"], gloo[rank]["began"]) == ("gloo", 0)
        assert (kolo[rank]["by"], kolo[rank]["began"]) == ("kolo", 5)
        assert kolo[rank]["losses"] == pytest.approx(gloo[rank]["losses"], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("world", WORLDS)
def test_ray(world):
    needs("ray")
    # Ray gives its workers a minute to start, and makes them nice. A busy machine needs more.
    patient = {"RAY_worker_niceness": "0", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(PATIENCE)}
    compare(world, [sys.executable, "ray_train.py", str(world)], RAY_TRAIN_V2_ENABLED="1", **patient)


def test_vllm():
    needs("vllm")
    command = [sys.executable, "vllm_tensor_parallel.py", "2"]
    found = {backend: run(command, backend)[0] for backend in ("gloo", "kolo")}
    assert found["kolo"]["by"] == "kolo" and found["kolo"]["communicator"] == "KoloCommunicator", found
    assert found["gloo"]["communicator"] == "CpuCommunicator", found
    assert found["kolo"]["tokens"] == found["gloo"]["tokens"]
    print({backend: f"{values['seconds']:.3f} s" for backend, values in found.items()})


@pytest.mark.parametrize("backend", ["gloo", "kolo"])
def test_torchft(backend):
    needs("torchft")
    # Not KOLO_AS_GLOO: torchft has groups of its own.
    found = run([sys.executable, "torchft_replicas.py"], "gloo", TORCHFT_GROUP=backend)
    assert sorted(found) == [0, 1, 2]
    assert {replica["by"] for replica in found.values()} == {backend}
    for survivor in (0, 2):
        assert found[survivor]["sizes"][-3:] == [3, 2, 3], found
    assert found[1]["sizes"][-1] == 3, found
    assert len({replica["total"] for replica in found.values()}) == 1, f"the replicas have different parameters: {found}"
