"""Ranks as processes that run many checks each, because importing PyTorch takes longer than most checks."""

import ctypes
import datetime
import functools
import multiprocessing
import os
import pathlib
import queue
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback

import pytest

# A fork server that has imported PyTorch. It has no communicator, so its forks may make one. On
# Windows each rank imports PyTorch.
PROCESSES = multiprocessing.get_context("spawn" if sys.platform == "win32" else "forkserver")
if sys.platform != "win32":
    PROCESSES.set_forkserver_preload(["torch.distributed"])

# Ends a process at once, so that it does nothing more. Windows has no signals; there, os.kill ends
# the process with this number as its status.
KILL = getattr(signal, "SIGKILL", signal.SIGTERM)

# Whether Windows is Wine.
IS_WINE = sys.platform == "win32" and hasattr(ctypes.windll.ntdll, "wine_get_version")

# Only a hang takes this long.
PATIENCE = 300

# Otherwise what is a matrix runs its diagonal.
EVERY_CASE = bool(os.environ.get("KOLO_TEST_ALL"))

# The queue to which the ranks of this process answer.
ANSWERS = []


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(backend, method, rank, world, timeout=PATIENCE, **options):
    import torch.distributed as dist

    dist.init_process_group(
        backend, init_method=method, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=timeout), **options
    )


def _rank(program, rank, world, answers, environment, args):
    os.environ.update(environment)
    sys.path.insert(0, os.path.dirname(__file__))
    import torch
    import torch.distributed as dist

    # The fork server has imported PyTorch in another environment.
    dist.set_debug_level_from_env()
    torch.set_num_threads(1)
    ANSWERS.append((rank, answers))
    try:
        answers.put((rank, None, program(rank, world, *args)))
    except BaseException:
        answers.put((rank, traceback.format_exc(), None))
    if IS_WINE:
        # A process that has used PyTorch may hang or crash while it ends.
        answers.close()
        answers.join_thread()
        os.kill(os.getpid(), KILL)


class Ranks:
    """Runs `program(rank, world, *args)` in a process for each rank."""

    def __init__(self, world, program, *args, environment=None):
        self.answers = PROCESSES.Queue()
        # Otherwise failures leave files of PyTorch's flight recorder in the home folder.
        everywhere = {"OMP_NUM_THREADS": "1", "TORCH_FR_DUMP_ON_TIMEOUT": "0", **(environment or {})}
        if sys.platform != "win32":
            everywhere.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.processes = [
            PROCESSES.Process(target=_rank, args=(program, rank, world, self.answers, everywhere, args), daemon=True)
            for rank in range(world)
        ]
        for process in self.processes:
            process.start()

    def results(self, expected=None, patience=PATIENCE * 2):
        """Returns the result of each rank, by rank. Raises if a rank did not return."""
        found = self.outcomes(expected, patience)
        problems = [f"rank {rank}:\n{problem}" for rank, (problem, _) in found.items() if problem]
        assert not problems, "\n".join(problems)
        return {rank: value for rank, (_, value) in found.items()}

    def outcomes(self, expected=None, patience=PATIENCE * 2):
        found = {}
        until = time.monotonic() + patience
        expected = len(self.processes) if expected is None else expected
        try:
            while len(found) < expected and time.monotonic() < until:
                try:
                    rank, problem, value = self.answers.get(timeout=1)
                    found[rank] = (problem, value)
                except queue.Empty:
                    pass
            assert len(found) == expected, f"only ranks {sorted(found)} answered: {found}"
            return found
        finally:
            for process in self.processes:
                if len(found) < len(self.processes):
                    process.kill()
                process.join(PATIENCE)


CHECKS = {}


class NotRun(Exception):
    """A check that cannot run here, with the reason."""


def is_in_python(group):
    """Whether the group is the backend in Python, not the one in C++."""
    import torch

    return type(group._get_backend(torch.device("cpu"))).__module__ == "torch_kolo.python.backend"


def check(function):
    """A function of a process group that all ranks call. It raises if a result is wrong."""
    CHECKS[function.__name__] = function
    return function


def needs_pytorch(major, minor, why):
    """Raises NotRun where PyTorch is older."""
    import torch

    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (major, minor):
        raise NotRun(f"{why}, before PyTorch {major}.{minor}")


def needs_gathers_of_several():
    """Raises NotRun where the wrapper of TORCH_DISTRIBUTED_DEBUG=DETAIL cannot gather into several tensors."""
    import torch.distributed as dist

    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        needs_pytorch(2, 15, "gathers into several tensors with TORCH_DISTRIBUTED_DEBUG=DETAIL")


def run_checks(rank, world, names, method):
    """Runs checks in order, each in a group of its own. Returns by name the failure, or why it did not run."""
    import torch.distributed as dist

    start("kolo", method, rank, world)
    outcomes = {}
    for name in names:
        group = dist.new_group(timeout=datetime.timedelta(seconds=240))
        hung = threading.Timer(PATIENCE, give_up, (name, names, outcomes))
        hung.start()
        try:
            outcomes[name] = outcome(CHECKS[name], group)
            dist.barrier()
            dist.destroy_process_group(group)
        finally:
            hung.cancel()
    dist.destroy_process_group()
    return outcomes


def outcome(function, group):
    try:
        function(group)
        return None
    except NotRun as why:
        return f"NOT RUN: {why}"
    except BaseException:
        return traceback.format_exc()


def give_up(name, names, outcomes):
    """Answers in place of a check that hangs, with what each thread does, and ends the process."""
    stacks = ["".join(traceback.format_stack(frame)) for frame in sys._current_frames().values()]
    hung = f"it has not ended after {PATIENCE} s:\n" + "\n".join(stacks)
    rest = {other: f"it was not reached: {name} hung" for other in names}
    rank, answers = ANSWERS[-1]
    answers.put((rank, None, {**rest, **outcomes, name: hung}))
    answers.close()
    answers.join_thread()
    os._exit(1)


def checked(world, names, environment=None):
    with tempfile.TemporaryDirectory() as folder:
        return Ranks(world, _run_imported, names, pathlib.Path(folder, "store").as_uri(), environment=environment).results(patience=600)


def _run_imported(rank, world, names, method):
    import checks_collectives  # noqa: F401
    import checks_hooks  # noqa: F401
    import checks_training  # noqa: F401

    return run_checks(rank, world, names, method)


def once(function):
    """Like functools.cache, but keeps exceptions too, so that no hang is waited for twice."""

    @functools.cache
    def outcome(*args):
        try:
            return function(*args), None
        except Exception as error:
            return None, error

    def cached(*args):
        value, error = outcome(*args)
        if error:
            raise error
        return value

    return cached


def judge(found, name):
    for outcome in found.values():
        if (outcome[name] or "").startswith("NOT RUN: "):
            pytest.skip(outcome[name])
    problems = [f"rank {rank}:\n{outcome[name]}" for rank, outcome in sorted(found.items()) if outcome[name]]
    assert not problems, "\n".join(problems)
