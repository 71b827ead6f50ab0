"""What an operation uses lives until it has ended, however its Work goes away."""

from __future__ import annotations

import array
import asyncio
import collections
import ctypes
import gc
import threading
import time
import weakref

import pytest

import pykolo
from pykolo import _work


def test_a_dropped_receive_from_any_rank_keeps_what_kolo_writes() -> None:
    looked = threading.Event()

    def rank(comm: pykolo.Communicator) -> None:
        if comm.rank == 1:
            out = bytearray(8)
            work = comm.start_recv_any(out)
            _, arguments, result_of, _ = work._flight.uses[1]
            source = result_of.__closure__[0].cell_contents
            assert isinstance(source, ctypes.c_int32)
            alive = weakref.ref(source)
            del work, result_of, arguments, source
            gc.collect()
            assert alive() is not None
            looked.set()
        else:
            looked.wait(60)
            comm.send(bytearray(8), 1)
        # Behind the receive.
        comm.barrier()

    pykolo.spawn(2, rank)


@pytest.mark.parametrize("how", ["wait", "done", "await"])
def test_a_work_lets_go_of_what_the_operation_used_at_its_end(how: str) -> None:
    async def awaits(work: pykolo.Work[object]) -> None:
        await work

    def rank(comm: pykolo.Communicator) -> None:
        x, out = array.array("B", [comm.rank]), bytearray(2)
        alive = weakref.ref(x)
        work = comm.start_all_gather(x, out)
        del x
        if how == "wait":
            work.wait(60)
        elif how == "await":
            asyncio.run(awaits(work))
        else:
            while not work.done():
                time.sleep(0.001)
        gc.collect()
        assert alive() is None
        # It can change its size again, and is still the result.
        out.append(2)
        assert work.wait() is out and out == b"\0\1\2"

    pykolo.spawn(2, rank)


def test_work_that_the_collector_drops_within_a_drop_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    class Flight:
        handle = None

        def has_ended(self) -> bool:
            # As a collection of garbage may.
            if inner:
                _work._drop(inner.pop())
            return True

    inner = [Flight()]
    destroyed: list[object] = []
    monkeypatch.setattr(_work, "_destroy", destroyed.append)
    monkeypatch.setattr(_work, "_dropped", collections.deque())
    _work._drop(Flight())  # type: ignore[arg-type]
    assert len(destroyed) == 2


def test_a_drop_looks_at_few_of_those_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    class Flight:
        handle = None
        looks = 0
        is_over = False

        def has_ended(self) -> bool:
            Flight.looks += 1
            return self.is_over

    destroyed: list[object] = []
    monkeypatch.setattr(_work, "_destroy", destroyed.append)
    monkeypatch.setattr(_work, "_dropped", collections.deque())
    flights = [Flight() for _ in range(1000)]
    for flight in flights:
        _work._drop(flight)  # type: ignore[arg-type]
    assert Flight.looks <= 3 * len(flights) and not destroyed
    Flight.is_over = True
    for flight in [Flight() for _ in flights]:
        _work._drop(flight)  # type: ignore[arg-type]
    assert len(destroyed) == 2 * len(flights) and not _work._dropped


@pytest.mark.parametrize(("color", "key"), [(2**32, 0), (-1, 0), (0, 2**31)])
def test_split_refuses_what_c_would_cut(color: int, key: int) -> None:
    def rank(comm: pykolo.Communicator) -> None:
        with pytest.raises(pykolo.ArgumentError):
            comm.split(color, key)

    pykolo.spawn(2, rank)


def test_masked_arrays_are_refused() -> None:
    numpy = pytest.importorskip("numpy")

    def rank(comm: pykolo.Communicator) -> None:
        with pytest.raises(pykolo.ArgumentError, match="filled"):
            comm.all_reduce(numpy.ma.masked_array([1.0, 2.0], [False, True]))

    pykolo.spawn(2, rank)
