"""Every operation, with threads as ranks."""

import array
import asyncio
import copy
import pickle
import threading

import pykolo
import pytest
from pykolo import _abi, _operations, _store, _work

ranks = pykolo.test.ranks

numpy = pytest.importorskip("numpy")
WORLDS = pytest.mark.parametrize("n", [1, 2, 3, 4])


def filled(rank, *shape):
    return numpy.arange(numpy.prod(shape), dtype=numpy.float64).reshape(shape) + 100 * rank


def same(found, expected):
    numpy.testing.assert_array_equal(found, expected, strict=True)


# For each operation: what a rank passes, and what it gets back.
def all_reduce(n, r):
    return (filled(r, 3, 2),), sum(filled(i, 3, 2) for i in range(n))


def all_reduce_into(n, r):
    return (filled(r, 5), numpy.empty(5)), sum(filled(i, 5) for i in range(n))


def reduce(n, r):
    return (filled(r, 4), None, "max", n - 1), filled(n - 1, 4) if r == n - 1 else None


def broadcast(n, r):
    return (filled(r, 4), n - 1), filled(n - 1, 4)


def all_gather(n, r):
    return (filled(r, 2, 3),), numpy.stack([filled(i, 2, 3) for i in range(n)])


def all_gather_v(n, r):
    return (filled(r, r), list(range(n))), numpy.concatenate([filled(i, i) for i in range(n)])


def reduce_scatter(n, r):
    return (filled(r, n, 3),), sum(filled(i, n, 3) for i in range(n))[r] if n > 1 else filled(0, 3)


def reduce_scatter_of_one_axis(n, r):
    return (filled(r, 2 * n), None, "average"), (sum(filled(i, 2 * n) for i in range(n)) / n)[2 * r : 2 * r + 2]


def reduce_scatter_v(n, r):
    counts = [i + 1 for i in range(n)]
    start = sum(counts[:r])
    return (filled(r, sum(counts)), counts), sum(filled(i, sum(counts)) for i in range(n))[start : start + r + 1]


def all_to_all(n, r):
    return (filled(r, n, 2),), numpy.stack([filled(i, n, 2)[r] for i in range(n)])


def all_to_all_v(n, r):
    sends, receives = [r + 1] * n, [i + 1 for i in range(n)]
    return (filled(r, sum(sends)), sends, receives), numpy.concatenate([filled(i, n * (i + 1))[r * (i + 1) : (r + 1) * (i + 1)] for i in range(n)])


def gather(n, r):
    return (filled(r, 3), None, n - 1), numpy.stack([filled(i, 3) for i in range(n)]) if r == n - 1 else None


def scatter(n, r):
    return (filled(0, n, 3), None, 0) if r == 0 else (None, numpy.empty(3), 0), filled(0, n, 3)[r]


def barrier(_n, _r):
    return (), None


OPERATIONS = [
    *(all_reduce, all_reduce_into, reduce, broadcast, all_gather, all_gather_v, reduce_scatter, reduce_scatter_of_one_axis),
    *(reduce_scatter_v, all_to_all, all_to_all_v, gather, scatter, barrier),
]


@WORLDS
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations(n, operation):
    name = operation.__name__.removesuffix("_into").removesuffix("_of_one_axis")

    def check(found, expected):
        assert (found is None) == (expected is None)
        if expected is not None:
            same(found, expected)

    async def awaits(work):
        return await work

    def of_rank(comm):
        for call in (
            getattr(comm, name),
            lambda *given: getattr(comm, "start_" + name)(*given).wait(),
            lambda *given: getattr(comm, "start_" + name)(*given, timeout=60).wait(timeout=60),
            lambda *given: asyncio.run(awaits(getattr(comm, "start_" + name)(*given))),
        ):
            given, expected = operation(n, comm.rank)
            check(call(*given), expected)

    pykolo.spawn(n, of_rank)


@WORLDS
def test_messages(n):
    def of_rank(comm):
        right, left = (comm.rank + 1) % n, (comm.rank - 1) % n
        comm.send(filled(7, 3), comm.rank)
        comm.send(filled(8, 3), comm.rank, tag=8)
        same(comm.recv(numpy.empty(3), comm.rank, tag=8), filled(8, 3))
        same(comm.recv(numpy.empty(3), comm.rank), filled(7, 3))
        with pytest.raises(pykolo.ArgumentError, match="tag -1 is out of range"):
            comm.send(filled(7, 3), comm.rank, tag=-1)
        if n == 1:
            return
        sent = [comm.start_send(filled(tag, 4), right, tag) for tag in (1, 2, 1 << 31)]
        for tag in (1 << 31, 1, 2):
            same(comm.recv(numpy.empty(4), left, tag), filled(tag, 4))
        for work in sent:
            assert work.wait() is None
        if comm.rank:
            comm.send(filled(3, 2), 0, tag=3)
        else:
            assert sorted(comm.recv_any(numpy.empty(2), tag=3) for _ in range(1, n)) == list(range(1, n))
        same(comm.send_recv(filled(comm.rank, 3), right, numpy.empty(3), left), filled(left, 3))
        sent = comm.start_send(filled(comm.rank, 4), right)
        same(comm.start_recv(numpy.empty(4), left).wait(), filled(left, 4))
        assert sent.wait() is None
        into = numpy.empty(2)
        for receive in (comm.recv_any, lambda out: comm.start_recv_any(out).wait()):
            if comm.rank:
                comm.send(filled(comm.rank, 2), 0)
            else:
                assert sorted(receive(into) for _ in range(1, n)) == list(range(1, n))
            comm.barrier()
        if comm.rank:
            comm.send_object({"from": comm.rank}, 0)
        else:
            assert [comm.recv_object(rank) for rank in range(1, n)] == [{"from": rank} for rank in range(1, n)]

    pykolo.spawn(n, of_rank)


@WORLDS
def test_objects(n):
    def of_rank(comm):
        value = "x" * comm.rank
        assert comm.all_gather_object(value) == ["x" * rank for rank in range(n)]
        assert comm.gather_object(value, n - 1) == (["x" * rank for rank in range(n)] if comm.rank == n - 1 else None)
        assert comm.broadcast_object(value, n - 1) == "x" * (n - 1)
        assert comm.scatter_object(list(range(n)) if comm.rank == 0 else None) == comm.rank

    pykolo.spawn(n, of_rank)


@ranks(4)
def test_split(comm):
    half = comm.split(comm.rank % 2, -comm.rank)
    assert (half.world_size, half.rank) == (2, 1 - comm.rank // 2)
    same(half.all_gather(filled(comm.rank, 1)).ravel(), numpy.array([100.0 * (comm.rank % 2 + 2), 100.0 * (comm.rank % 2)]))
    assert comm.split(None if comm.rank else 0) is None or comm.rank == 0


@ranks(3)
def test_the_survivors_of_a_failure_go_on(comm):
    if comm.rank == 1:
        comm.abort()
        return
    with pytest.raises(pykolo.PeerError) as caught:
        while True:
            comm.barrier()
    assert (caught.value.rank, caught.value.usable, caught.value.op) == (1, False, "barrier")
    with comm.shrink() as smaller:
        assert smaller.world_size == 2
        same(smaller.all_reduce(numpy.ones(2)), numpy.full(2, 2.0))
    assert not comm.is_usable


@ranks(2)
def test_registered_memory(comm):
    x = comm.alloc((50, 400), "float32")
    assert (x.shape, x.dtype, x.sum()) == ((50, 400), numpy.float32, 0)
    x += comm.rank
    same(comm.all_reduce(x), numpy.ones((50, 400), numpy.float32))
    tail = comm.alloc(10, pooled=True)[5:]
    # The memory lives as long as an array that uses it, also after the communicator.
    comm.close()
    x += 1
    tail += 1
    assert x[0, 0] == 2


def test_work():
    go = threading.Event()

    def of_rank(comm):
        assert comm.start_barrier().wait() is None
        x = numpy.ones(3)
        if comm.rank:
            assert go.wait(60)
            comm.all_reduce(x)
            comm.send(b"a", 0)
            return
        work = comm.start_all_reduce(x)
        try:
            for timeout in (0, 0.001):
                with pytest.raises(TimeoutError, match="goes on"):
                    work.wait(timeout)
            with pytest.raises(ValueError, match="0 or more"):
                work.wait(-1)
            assert not work.done()
            # A Work that is dropped keeps its array until the end.
            comm.start_recv(bytearray(1), 1)
        finally:
            go.set()
        assert work.wait() is x and work.done() and work.wait() is x
        assert work.duration > 0

    pykolo.spawn(2, of_rank)


@ranks(2)
def test_cancel(comm):
    if comm.rank:
        with pytest.raises(pykolo.PeerError):
            comm.barrier()
            comm.barrier()
        return
    comm.barrier()
    work = comm.start_barrier()
    work.cancel()
    with pytest.raises((pykolo.AbortedError, pykolo.RevokedError)):
        work.wait()


def test_a_work_is_not_copied():
    with pykolo.Communicator.from_env() as comm:
        work = comm.start_barrier()
        for call in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(pykolo.UnsupportedError, match="wait for it, and copy its result"):
                call(work)
        work.wait()


def test_many_works_of_one_loop():
    async def all_of(comm):
        arrays = [numpy.full(10, float(i)) for i in range(20)]
        return await asyncio.gather(*(asyncio.ensure_future(wrapped(comm.start_all_reduce(x))) for x in arrays))

    async def wrapped(work):
        return await work

    for found in pykolo.spawn(2, lambda comm: asyncio.run(all_of(comm))):
        for i, each in enumerate(found):
            same(each, numpy.full(10, 2.0 * i))


def test_an_operation_is_awaited_whose_end_kolo_does_not_tell(monkeypatch):
    # As where the system starts no thread.
    monkeypatch.setattr(_work, "_on_done", lambda *_: _abi.OK)
    monkeypatch.setattr(_work, "_PERIOD", 0.01, raising=False)
    monkeypatch.setattr(_work, "_awaited", {})
    monkeypatch.setattr(_work, "_none_awaited", threading.Event())
    go = threading.Event()

    async def awaits(work, timeout):
        async def awaited():
            return await work

        return await asyncio.wait_for(awaited(), timeout)

    def of_rank(comm):
        if comm.rank:
            assert go.wait(60)
            comm.send(b"a", 0)
            return
        work = comm.start_recv(bytearray(1), 1)
        with pytest.raises(asyncio.TimeoutError):
            asyncio.run(awaits(work, 0.05))
        go.set()
        assert asyncio.run(awaits(work, 60)) == b"a"

    pykolo.spawn(2, of_rank)
    assert set(_work._awaited.values()) == {None}


def test_a_deadline():
    over = threading.Event()

    def of_rank(comm):
        if comm.rank:
            assert over.wait(60)
            return
        try:
            with pytest.raises(pykolo.DeadlineError) as caught:
                comm.recv(bytearray(1), 1, timeout=0.05)
            assert isinstance(caught.value, TimeoutError) and caught.value.rank == 1 and caught.value.op == "recv"
        finally:
            over.set()

    pykolo.spawn(2, of_rank)


@ranks(1)
def test_a_timeout_is_for_one_call_alone(comm):
    set_timeout = _operations._call_timeout
    found = []

    def interrupted(milliseconds):
        found.append(milliseconds)
        set_timeout(milliseconds)
        if milliseconds:
            # As Ctrl-C, when it is set.
            raise KeyboardInterrupt

    for call in (comm.barrier, comm.start_barrier):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_operations, "_call_timeout", interrupted)
            with pytest.raises(KeyboardInterrupt):
                call(timeout=5)
    assert found == [5000, 0, 5000, 0]


def test_spawn_raises_the_first_exception():
    def of_rank(comm):
        if comm.rank == 1:
            raise KeyError("of rank 1")
        comm.barrier()
        comm.barrier()

    with pytest.raises(KeyError, match="of rank 1"):
        pykolo.spawn(3, of_rank)


def test_spawn_ends_the_ranks_if_a_thread_does_not_start(monkeypatch):
    start, ended = threading.Thread.start, threading.Event()

    def starts(thread):
        if thread.name == "rank 1":
            raise RuntimeError("can't start new thread")
        start(thread)

    def of_rank(comm):
        try:
            comm.barrier()
        finally:
            ended.set()

    monkeypatch.setattr(threading.Thread, "start", starts)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        pykolo.spawn(2, of_rank, timeout=300)
    assert ended.wait(60)


def test_the_marks_of_a_test_for_ranks_stay():
    @ranks(2)
    @pytest.mark.skip(reason="later")
    def test(comm):
        pass

    assert [mark.name for mark in test.pytestmark] == ["skip"]


def test_a_unique_id_and_a_store_of_the_program():
    class Store:
        def __init__(self):
            self.held = {}
            self.lock = threading.Lock()

        def set(self, key, value):
            with self.lock:
                self.held[key] = value

        def get(self, key):
            with self.lock:
                return self.held.get(key)

        def claim(self, key, value):
            with self.lock:
                return self.held.setdefault(key, value)

    for store in (pykolo.unique_id(), Store()):
        found = []

        def run(rank, store=store, found=found):
            with pykolo.Communicator(rank=rank, world_size=2, store=store, timeout=60, start_timeout=60) as comm:
                found.append(comm.all_reduce(array.array("i", [rank + 1]))[0])
                comm.barrier()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [3, 3]
    pykolo.discard_unique_id(pykolo.unique_id())


def test_a_store_that_fails():
    class Store:
        def set(self, key, value):
            raise OSError("the disk is full")

        def get(self, key):
            return None

    with pytest.raises(pykolo.StartError) as caught:
        pykolo.Communicator(rank=0, world_size=2, store=Store(), start_timeout=30)
    assert "the disk is full" in str(caught.value.__cause__)


def test_a_store_whose_value_kolo_refuses(monkeypatch):
    class Store:
        def set(self, key, value):
            pass

        def get(self, key):
            return b"value"

    monkeypatch.setattr(_store, "_reply", lambda *_: _abi.ERR_NO_MEMORY)
    with pytest.raises(pykolo.StartError) as caught:
        pykolo.Communicator(rank=1, world_size=2, store=Store(), start_timeout=30)
    assert isinstance(caught.value.__cause__, pykolo.OutOfMemoryError)


def test_one_process_alone():
    with pykolo.Communicator.from_env() as comm:
        assert (comm.rank, comm.world_size, comm.transport, comm.host_count, comm.is_usable) == (0, 1, "none", 1, True)
        assert "rank 0 of 1" in repr(comm)
        with pytest.raises(pykolo.KoloError, match="does not grow"):
            comm.grow()
    assert "closed" in repr(comm)
    comm.close()
    with pytest.raises(pykolo.ClosedError, match="closed"):
        comm.barrier()
    assert not comm.is_usable
