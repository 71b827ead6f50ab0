"""The shared library, without PyTorch: functions, errors, callbacks, and ranks over each transport."""

import array
import contextlib
import ctypes
import importlib.metadata
import multiprocessing
import os
import signal
import struct
import sys
import tempfile
import time
import traceback
from pathlib import Path

import pytest
from pykolo import _abi
from pykolo._library import function
from torch_kolo.python import library

# This process makes no communicator, so its forks may. Windows has no forks.
PROCESSES = multiprocessing.get_context("spawn" if sys.platform == "win32" else "fork")
# Windows has no signals. There, this ends a process as suddenly.
KILL = getattr(signal, "SIGKILL", signal.SIGTERM)
# Only a hang takes this long.
PATIENCE = 300
TRANSPORTS = ["shm", "tcp"]


def last_error():
    error = library.Error(size=ctypes.sizeof(library.Error))
    assert library.last_error(None, error) == library.OK
    return error


def ok(result):
    assert result == library.OK, (result, last_error().message)


def test_version():
    version = function("version")()
    said = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
    assert said == importlib.metadata.version("torch_kolo")


def test_errors():
    value = ctypes.c_float(1)
    handle = library.Handle()
    assert library.all_reduce.now(None, ctypes.byref(value), 1, library.FLOAT32, library.SUM, handle, None) == library.ERR_HANDLE
    assert last_error().code == library.ERR_HANDLE
    config = library.Config(size=ctypes.sizeof(library.Config), version=library.CONFIG_VERSION, transport=b"pigeon")
    store = Folder("/nowhere").callbacks
    assert library.comm_init_callbacks(handle, 1, store, 0, config) == library.ERR_SETTING
    assert b"pigeon" in last_error().message and b"tcp" in last_error().message
    assert not handle.value
    texts = {library.error_string(code) for code in (library.OK, library.ERR_ARGUMENT, library.ERR_PEER, library.ERR_STORE)}
    assert len(texts) == 4


class Folder:
    """A store of files, one for each key."""

    def __init__(self, path, is_broken=False):
        self.path = path
        self.calls = set()
        self.is_broken = is_broken
        self.callbacks = library.Store(
            size=ctypes.sizeof(library.Store),
            set=library.StoreSet(self._set),
            get=library.StoreGet(self._get),
            claim=library.StoreClaim(self._claim),
        )

    def _file(self, key):
        return os.path.join(self.path, key.hex())

    def _written(self, value, length):
        file = tempfile.NamedTemporaryFile(dir=self.path, delete=False)
        with file:
            file.write(ctypes.string_at(value, length))
        return file.name

    def _reply(self, key, reply):
        value = Path(self._file(key)).read_bytes()
        library.store_reply(reply, value, len(value))

    def _set(self, _context, key, value, length, _timeout_ms):
        self.calls.add("set")
        if self.is_broken:
            return 1
        os.replace(self._written(value, length), self._file(key))
        return 0

    def _get(self, _context, key, timeout_ms, reply):
        self.calls.add("get")
        until = time.monotonic() + timeout_ms / 1000
        while not os.path.exists(self._file(key)):
            if time.monotonic() >= until:
                return 0
            time.sleep(0.01)
        self._reply(key, reply)
        return 0

    def _claim(self, _context, key, value, length, _timeout_ms, reply):
        self.calls.add("claim")
        if self.is_broken:
            return 1
        with contextlib.suppress(FileExistsError):
            os.link(self._written(value, length), self._file(key))
        self._reply(key, reply)
        return 0


def connect(folder, rank, world, transport):
    comm = library.Handle()
    config = library.Config(
        size=ctypes.sizeof(library.Config),
        version=library.CONFIG_VERSION,
        reproducible=0,
        timeout_ms=PATIENCE * 1000,
        start_timeout_ms=PATIENCE * 1000,
        transport=b"tcp" if transport == "tcp" else None,
    )
    store = Folder(folder)
    ok(library.comm_init_callbacks(comm, world, store.callbacks, rank, config))
    assert {"get", "claim"} <= store.calls
    name, size, own = ctypes.c_char_p(), ctypes.c_int32(), ctypes.c_int32()
    ok(library.comm_transport(comm, name))
    ok(library.comm_count(comm, size))
    ok(library.comm_rank(comm, own))
    assert (name.value.decode(), size.value, own.value) == (transport, world, rank)
    return comm


def _rank(program, rank, world, answers, args):
    try:
        answers.put((rank, None, program(rank, world, *args)))
    except BaseException:
        answers.put((rank, traceback.format_exc(), None))


def run(world, program, *args, answering=None):
    """Runs `program(rank, world, *args)` in a process for each rank. Returns the results by rank."""
    answers = PROCESSES.Queue()
    ranks = [PROCESSES.Process(target=_rank, args=(program, rank, world, answers, args), daemon=True) for rank in range(world)]
    for process in ranks:
        process.start()
    try:
        found = [answers.get(timeout=PATIENCE * 2) for _ in range(answering or world)]
    finally:
        for process in ranks:
            process.join(10)
            process.kill()
    problems = [f"rank {rank}:\n{problem}" for rank, problem, _ in found if problem]
    assert not problems, "\n".join(problems)
    return {rank: value for rank, _, value in found}


def bfloat16(values):
    return b"".join(struct.pack("<f", value)[2:] for value in values)


def packed(code):
    return lambda values: struct.pack(f"<{len(values)}{code}", *values)


# How each type's elements are written.
TYPES = {
    library.INT8: packed("b"),
    library.UINT8: packed("B"),
    library.INT16: packed("h"),
    library.UINT16: packed("H"),
    library.INT32: packed("i"),
    library.UINT32: packed("I"),
    library.INT64: packed("q"),
    library.UINT64: packed("Q"),
    library.FLOAT16: packed("e"),
    library.FLOAT32: packed("f"),
    library.FLOAT64: packed("d"),
    library.BFLOAT16: bfloat16,
}
REDUCTIONS = {library.SUM: sum, library.MAX: max, library.MIN: min}
# No element, one, less than a vector, several segments.
SIZES = [0, 1, 17, 300_001]


def part(rank, count):
    """A rank's elements: small whole numbers, so that sums are exact in every type."""
    pattern = [(place * (rank + 3) + rank) % 5 for place in range(5)]
    return (pattern * (count // 5 + 1))[:count]


def reductions(rank, world, folder, transport):
    comm = connect(folder, rank, world, transport)
    for dtype, pack in TYPES.items():
        for op, reduced in REDUCTIONS.items():
            # The largest size with sums alone: it takes longest where the processor is emulated.
            for count in SIZES if op == library.SUM else SIZES[:-1]:
                mine = ctypes.create_string_buffer(pack(part(rank, count)))
                ok(library.all_reduce.now(mine, mine, count, dtype, op, comm, None))
                expected = pack([reduced(values) for values in zip(*(part(other, count) for other in range(world)), strict=True)])
                assert mine.raw[: len(expected)] == expected, (dtype, op, count)
    ok(library.comm_destroy(comm))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_reductions(tmp_path, transport, world):
    run(world, reductions, str(tmp_path), transport)


def collectives(rank, world, folder, transport):
    comm = connect(folder, rank, world, transport)
    count = 5000

    def ints(values):
        return (ctypes.c_int32 * len(values))(*values)

    everyone = [part(other, count) for other in range(world)]
    mine, one, all_of_them = ints(everyone[rank]), ints([0] * count), ints([0] * count * world)
    next_rank, previous = (rank + 1) % world, (rank - 1) % world

    ok(library.all_gather.now(mine, all_of_them, count, library.INT32, comm, None))
    assert list(all_of_them) == sum(everyone, [])
    ok(library.reduce_scatter.now(all_of_them, one, count, library.INT32, library.SUM, comm, None))
    assert list(one) == [value * world for value in everyone[rank]]
    ok(library.broadcast.now(mine, one, count, library.INT32, world - 1, comm, None))
    assert list(one) == everyone[world - 1]
    sent = ints([rank * world + other for other in range(world)])
    received = ints([0] * world)
    ok(library.all_to_all.now(sent, received, 1, library.INT32, comm, None))
    assert list(received) == [other * world + rank for other in range(world)]

    # Nonblocking, with a callback on another thread.
    ended = []
    done = _abi.DoneFunction(lambda context, result: ended.append((context, result)))
    sending, receiving, barrier = library.Handle(), library.Handle(), library.Handle()
    ok(library.recv.start(one, count, library.INT32, previous, comm, None, receiving))
    ok(library.send.start(mine, count, library.INT32, next_rank, comm, None, sending))
    ok(function("work_on_done")(receiving, done, 7))
    ok(library.work_wait(receiving))
    ok(library.work_wait(sending))
    assert list(one) == everyone[previous]
    until = time.monotonic() + PATIENCE
    while not ended and time.monotonic() < until:
        time.sleep(0.01)
    assert ended == [(7, library.OK)]
    ok(library.barrier.start(comm, None, barrier))
    ok(library.work_wait_timeout(barrier, PATIENCE * 1000))
    for work in (sending, receiving, barrier):
        ok(library.work_destroy(work))

    # Memory that the ranks share, where there is any.
    memory = library.Memory()
    ok(library.mem_alloc_pooled(memory, 4 * count, comm))
    shared = (ctypes.c_int32 * count).from_address(memory.value)
    shared[:] = everyone[rank]
    ok(library.all_reduce.now(memory, memory, count, library.INT32, library.SUM, comm, None))
    assert list(shared) == [sum(values) for values in zip(*everyone, strict=True)]
    ok(library.mem_free(memory))

    half = library.Handle()
    ok(library.comm_split(comm, rank % 2, -rank, half))
    ok(library.barrier.now(half, None))
    ok(library.comm_destroy(half))

    # A wrong argument changes nothing.
    assert library.broadcast.now(mine, mine, count, library.INT32, world, comm, None) == library.ERR_ARGUMENT
    ok(library.barrier.now(comm, None))
    ok(library.comm_destroy(comm))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_collectives(tmp_path, transport):
    run(3, collectives, str(tmp_path), transport)


def dies(rank, world, folder, transport):
    comm = connect(folder, rank, world, transport)
    buffer = array.array("f", [1.0] * 1000)
    address = buffer.buffer_info()[0]
    ok(library.all_reduce.now(address, address, len(buffer), library.FLOAT32, library.SUM, comm, None))
    if rank == 1:
        os.kill(os.getpid(), KILL)
    result = library.all_reduce.now(address, address, len(buffer), library.FLOAT32, library.SUM, comm, None)
    error = last_error()
    survivors, number = library.Handle(), ctypes.c_int32()
    ok(library.comm_shrink(comm, survivors))
    ok(library.comm_count(survivors, number))
    ok(library.barrier.now(survivors, None))
    ok(library.comm_destroy(survivors))
    ok(library.comm_destroy(comm))
    return result, error.rank, error.message.decode(), number.value


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_killed_rank(tmp_path, transport):
    found = run(3, dies, str(tmp_path), transport, answering=2)
    for result, culprit, message, survivors in found.values():
        assert (result, culprit, survivors) == (library.ERR_PEER, 1, 2), message
        assert "rank 1" in message


def test_a_store_that_fails(tmp_path):
    store, comm = Folder(str(tmp_path), is_broken=True), library.Handle()
    assert library.comm_init_callbacks(comm, 2, store.callbacks, 0, None) == library.ERR_STORE
    assert last_error().code == library.ERR_STORE
