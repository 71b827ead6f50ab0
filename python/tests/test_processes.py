"""Ranks as processes: launchers, failures, signals, forks."""

import os
import signal
import subprocess
import sys

import pykolo
import pytest
from harness import LONG, started, under_kolo_run

PREAMBLE = "import array, os, signal, sys, threading, pykolo\n"
ONLY_UNIX = pytest.mark.skipif(sys.platform == "win32", reason="signals and forks of Unix")


@pytest.mark.parametrize("n", [2, 4])
def test_ranks_of_kolo_run(n):
    program = """
import pykolo, array
with pykolo.Communicator.from_env() as comm:
    x = comm.all_reduce(array.array("d", [comm.rank]), op="sum")
    parts = comm.all_gather_object(comm.rank)
    print(comm.rank, comm.world_size, comm.transport, x[0], parts)
"""
    end = under_kolo_run(program, n)
    assert end.returncode == 0, end.stderr
    for rank in range(n):
        assert f"{rank} {n} shm {sum(range(n)):.1f} {list(range(n))}" in end.stdout


def test_without_numpy():
    program = """
import sys
sys.modules["numpy"] = None
import pykolo, array
with pykolo.Communicator.from_env() as comm:
    x = comm.alloc(3, "int32")
    x[0] = comm.rank
    print(comm.all_reduce(x).tolist(), comm.all_gather(array.array("i", [comm.rank])).tolist())
"""
    end = under_kolo_run(program, 2)
    assert end.returncode == 0, end.stderr
    assert end.stdout.count("[1, 0, 0] [0, 1]") == 2, end.stdout


def test_numpy_is_not_imported():
    assert subprocess.run([sys.executable, "-c", "import pykolo, sys; sys.exit('numpy' in sys.modules)"], check=False).returncode == 0


@ONLY_UNIX
def test_a_killed_rank_is_named():
    program = """
import os, signal, pykolo
comm = pykolo.Communicator.from_env()
comm.barrier()
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        comm.barrier()
except pykolo.PeerError as error:
    assert error.cause in ("closed", "died", "gone") and error.host and error.pid and not error.usable, vars(error)
    print("rank", comm.rank, "names", error.rank, error.op)
"""
    end = under_kolo_run(program, 3, "--keep-going")
    for rank in (0, 2):
        assert f"rank {rank} names 1 barrier" in end.stdout, end.stdout + end.stderr


def pair(tmp_path, zero, one, connect="comm = connected()"):
    """Two processes, of which rank 1 is `one`."""
    connect = f"""{PREAMBLE}
def connected():
    return pykolo.Communicator(rank=int(os.environ['AT']), world_size=2, store=os.environ['STORE'])
{connect}
"""
    store = {"STORE": f"file://{tmp_path}/store"}
    return [started(connect + program, {**store, "AT": str(rank)}) for rank, program in enumerate((zero, one))]


# Sends itself SIGINT as soon as the main thread is in a function of pykolo, or in an operation: the
# short way has no function.
INTERRUPT = """
def is_in(name):
    code = sys._current_frames()[threading.main_thread().ident].f_code
    return code.co_name == name and code.co_filename.startswith(os.path.dirname(pykolo.__file__))
def is_under_way(op):
    comm.dump_trace(trace := f"{os.environ['STORE']}.trace".removeprefix("file://"))
    return any(f'"op": "{op}"' in line and "under way" in line for line in open(trace))
def interrupt(name):
    while not (is_in(name) if name in ("_run", "wait", "connect") else is_under_way(name)):
        pass
    os.kill(os.getpid(), signal.SIGINT)
"""
IN_ANOTHER_THREAD = """
made = []
thread = threading.Thread(target=lambda: made.append(connected()))
thread.start()
thread.join()
comm = made[0]
"""


@ONLY_UNIX
@pytest.mark.parametrize(
    ("call", "where", "connect"),
    [
        ("comm.recv(bytearray(1), 1)", "recv", "comm = connected()"),
        ("comm.recv(bytearray(1), 1)", "recv", IN_ANOTHER_THREAD),
        ("comm.recv(bytearray(1), 1)", "recv", "comm = connected().split(0)"),
        ("comm.recv(bytearray(1), 1, timeout=3600)", "_run", "comm = connected()"),
        ("comm.start_recv(bytearray(1), 1).wait()", "wait", "comm = connected()"),
        # Behind an earlier operation.
        ("work = comm.start_recv(bytearray(1), 1); comm.barrier(timeout=3600)", "_run", "comm = connected()"),
    ],
)
def test_ctrl_c_ends_a_call_that_waits(tmp_path, call, where, connect):
    zero = f"""{INTERRUPT}
threading.Thread(target=interrupt, args=({where!r},), daemon=True).start()
try:
    with comm:
        {call}
except KeyboardInterrupt:
    print("interrupted")
"""
    one = """
try:
    comm.recv(bytearray(1), 0)
except pykolo.PeerError as error:
    print(error.rank, error.cause)
"""
    first, second = pair(tmp_path, zero, one, connect)
    out, errors = first.communicate(timeout=LONG)
    assert (out, first.returncode) == ("interrupted\n", 0), errors
    out, errors = second.communicate(timeout=LONG)
    assert out == "0 aborted\n", errors


@ONLY_UNIX
@pytest.mark.parametrize("start", ["Communicator(rank=0, world_size=2, store=os.environ['STORE'])", "Communicator.from_env(join=True, start_timeout=3600)"])
def test_ctrl_c_ends_a_start(tmp_path, start):
    program = f"""{PREAMBLE}{INTERRUPT}
threading.Thread(target=interrupt, args=("connect",), daemon=True).start()
pykolo.{start}
"""
    store = f"file://{tmp_path}/store"
    process = started(program, {"STORE": store, "KOLO_STORE": store, "KOLO_JOB_ID": "job"})
    _, errors = process.communicate(timeout=LONG)
    assert "KeyboardInterrupt" in errors and process.returncode in (1, -signal.SIGINT, 130), errors


@ONLY_UNIX
def test_a_handler_of_the_program_runs_while_a_call_waits(tmp_path):
    zero = f"""{INTERRUPT}
signal.signal(signal.SIGINT, lambda *_: print("handled"))
threading.Thread(target=interrupt, args=("recv",), daemon=True).start()
print(comm.recv(bytearray(1), 1))
"""
    first, second = pair(tmp_path, zero, "sys.stdin.readline(); comm.send(b'a', 0); comm.barrier()")
    assert first.stdout.readline() == "handled\n"
    second.stdin.write("\n")
    second.stdin.flush()
    assert first.stdout.readline() == "bytearray(b'a')\n"
    for process in (first, second):
        process.communicate(timeout=LONG)


@ONLY_UNIX
def test_a_wait_that_kolo_refuses_in_a_handler_leaves_the_operation_in_flight(tmp_path):
    zero = f"""{INTERRUPT}
other = comm.split(0)
work = other.start_recv(bytearray(1), 1)
def handler(*_):
    try:
        work.wait()
    except pykolo.ArgumentError:
        print("refused", work.done())
signal.signal(signal.SIGINT, handler)
threading.Thread(target=interrupt, args=("barrier",), daemon=True).start()
comm.barrier()
print(work.wait())
"""
    one = "other = comm.split(0); sys.stdin.readline(); comm.barrier(); other.send(b'a', 0); other.barrier()"
    first, second = pair(tmp_path, zero, one)
    assert first.stdout.readline() == "refused False\n"
    second.stdin.write("\n")
    second.stdin.flush()
    assert first.stdout.readline() == "bytearray(b'a')\n"
    for process in (first, second):
        process.communicate(timeout=LONG)


@ONLY_UNIX
def test_a_forked_child_gets_an_error_and_the_parent_goes_on():
    program = """
import os, array, pykolo
comm = pykolo.Communicator.from_env()
comm.barrier()
child = os.fork()
if child == 0:
    try:
        comm.barrier()
    except pykolo.ForkedError as error:
        comm.close()
        del comm
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print(comm.all_reduce(array.array("i", [1])))
"""
    end = under_kolo_run(program, 2)
    assert end.stdout.count("array('i', [2])") == 2, end.stdout + end.stderr


@ONLY_UNIX
def test_a_forked_child_awaits_nothing_of_its_parent():
    program = """
import asyncio, atexit, os, pykolo
from pykolo import _work

async def awaited(work):
    return await work

async def main(comms):
    task = asyncio.ensure_future(awaited(comms[0].start_recv(bytearray(1), 1)))
    while not _work._awaited:
        await asyncio.sleep(0)
    child = os.fork()
    if child == 0:
        # The end of the loop would change the parent's.
        is_set = _work._none_awaited.is_set()
        atexit._run_exitfuncs()
        os._exit(7 if is_set else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    comms[1].send(b"a", 0)
    print(await task)

asyncio.run(main(pykolo.Communicator.threads(2)))
"""
    process = started(program)
    out, errors = process.communicate(timeout=LONG)
    assert out == "bytearray(b'a')\n", errors


@pytest.mark.parametrize("last", ["", "del work", "comm.close()", "raise SystemExit(3)"])
def test_a_program_that_ends_with_operations_in_flight(last):
    program = f"""
import pykolo, asyncio
comm = pykolo.Communicator.from_env()
if comm.rank == 0:
    work = comm.start_recv(bytearray(1 << 20), 1)
    {last}
"""
    end = under_kolo_run(program, 2)
    assert end.returncode == (3 if "3" in last else 0), end.stderr
    assert "Traceback" not in end.stderr, end.stderr


def test_an_exception_on_one_rank_ends_the_others():
    program = """
import pykolo
with pykolo.Communicator.from_env() as comm:
    comm.barrier()
    if comm.rank == 1:
        raise KeyError("of rank 1")
    try:
        comm.barrier()
        comm.barrier()
    except pykolo.PeerError as error:
        print(comm.rank, error.rank, error.cause)
"""
    end = under_kolo_run(program, 3, "--keep-going")
    assert "0 1 aborted" in end.stdout and "2 1 aborted" in end.stdout, end.stdout + end.stderr


def test_newcomers_join():
    newcomer = """
import pykolo
with pykolo.Communicator.from_env(join=True) as comm:
    print("joined as", comm.rank, "of", comm.world_size)
    comm.barrier()
"""
    program = f"""
import os, subprocess, sys, pykolo
comm = pykolo.Communicator.from_env()
if comm.rank == 0:
    kept = {{name: value for name, value in os.environ.items() if name not in ("KOLO_RANK", "KOLO_WORLD_SIZE")}}
    child = subprocess.Popen([sys.executable, "-c", {newcomer!r}], env=kept)
larger = None
while larger is None:
    larger = comm.grow()
larger.barrier()
print("grew to", larger.world_size)
if comm.rank == 0:
    child.wait()
"""
    end = under_kolo_run(program, 2)
    assert end.stdout.count("grew to 3") == 2 and "joined as 2 of 3" in end.stdout, end.stdout + end.stderr


def test_the_parts_of_the_package():
    prefix = subprocess.run([sys.executable, "-m", "pykolo", "--prefix"], text=True, capture_output=True, check=True).stdout.strip()
    assert os.path.samefile(prefix, os.path.dirname(pykolo.__file__))
    assert subprocess.run([sys.executable, "-m", "pykolo"], capture_output=True, check=False).returncode == 2


@pytest.mark.parametrize(("library", "message"), [("libc.so.6", "has no function kolo_version"), ("/nowhere/libkolo.so", "cannot load kolo's library")])
@pytest.mark.skipif(sys.platform != "linux", reason="the name of a library of Linux")
def test_another_library_is_refused(library, message):
    process = started("import pykolo", {"KOLO_LIBRARY": library})
    _, errors = process.communicate(timeout=LONG)
    said = errors.splitlines()[-1]
    assert said.startswith("ImportError") and message in said and said.endswith("do not set KOLO_LIBRARY"), errors
