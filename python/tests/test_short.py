"""The short way of operations does what the long way does."""

import array
import inspect
import sys
import sysconfig

import pykolo
import pytest
from pykolo._operations import Operations
from pykolo._short import NAMES, Long

HAS_SHORT = not issubclass(pykolo.Communicator, Long)
needs_short = pytest.mark.skipif(not HAS_SHORT, reason="this Python has no short way")


@pytest.mark.skipif(sys.platform == "win32" or bool(sysconfig.get_config_var("Py_GIL_DISABLED")), reason="the wheel has none for this Python")
def test_the_package_has_the_short_way():
    import importlib.util

    assert HAS_SHORT == (importlib.util.find_spec("pykolo._fast") is not None)


@needs_short
@pytest.mark.parametrize("name", NAMES)
def test_methods_are_described_as_those_of_the_long_way(name):
    short, long = getattr(pykolo.Communicator, name), getattr(Operations, name)
    assert short is not long and inspect.getdoc(short) == inspect.getdoc(long)
    pairs = [[(each.name, each.default) for each in inspect.signature(method).parameters.values()] for method in (short, long)]
    assert pairs[0] == pairs[1]


def outcome(call):
    try:
        return call()
    except Exception as error:
        return type(error), str(error)


def calls_of(r, n):
    """Calls of rank r of n, each a name and arguments."""
    row = array.array("d", range(2 * n))

    def one():
        return array.array("d", [r + 1, 2])

    def half():
        return array.array("d", [0, 0])

    def whole():
        return array.array("d", [0] * 2 * n)

    last = n - 1
    yield "all_reduce", (one(),), {}
    yield "all_reduce", (one(), half(), "max"), {}
    yield "all_reduce", (one(),), {"op": "average", "out": half()}
    yield "all_reduce", (one(), None), {"op": "".join(["su", "m"])}
    yield "all_reduce", (), {"x": bytearray(b"abc"), "op": "bitor"}
    yield "all_reduce", (memoryview(array.array("i", [r, 1])),), {}
    yield "reduce", (one(), half() if r == last else None, "sum", last), {}
    yield "reduce", (one(),), {"root": last}
    yield "broadcast", (one(),), {}
    yield "broadcast", (b"ab" if r == last else bytearray(2), last), {}
    yield "all_gather", (one(), whole()), {}
    yield "all_gather", (one(),), {}
    yield "all_gather", (b"ab", bytearray(2 * n)), {}
    yield "reduce_scatter", (row, half(), "min"), {}
    yield "all_to_all", (row, whole()), {}
    yield "gather", (one(), whole() if r == last else None, last), {}
    yield "gather", (one(),), {"out": whole() if r == 0 else None}
    yield "scatter", (row if r == last else None, half(), last), {}
    yield "scatter", (), {"x": row, "out": half()}
    yield "barrier", (), {}
    if n > 1:
        yield "send_recv", (one(), (r + 1) % n, half(), (r - 1) % n), {}
        yield "send_recv", (one(), (r + 1) % n), {"out": half(), "source": (r - 1) % n, "timeout": 60}
        if r < 2:
            yield ("send", (one(), 1), {}) if r == 0 else ("recv", (half(),), {"peer": 0})
        yield "barrier", (), {"timeout": 60}
    # What is wrong.
    readonly = memoryview(bytes(16)).cast("d")
    yield "all_reduce", (readonly,), {}
    yield "all_reduce", (one(), array.array("d", [0])), {}
    yield "all_reduce", (one(), array.array("f", [0, 0])), {}
    yield "all_reduce", (one(), None, "mean"), {}
    yield "all_reduce", (one(), None, None), {}
    yield "all_reduce", ([1.0],), {}
    yield "all_reduce", (memoryview(bytearray(8))[::2],), {}
    yield "all_reduce", (one(),), {"operation": "sum"}
    yield "all_reduce", (one(),), {"x": one()}
    yield "all_reduce", (), {}
    yield "all_reduce", (one(), None, "sum", 0), {}
    yield "broadcast", (one(), n), {}
    yield "broadcast", (one(), -1), {}
    yield "broadcast", (one(), 2**70), {}
    yield "broadcast", (one(), None), {}
    yield "broadcast", (one(), 0.0), {}
    yield "all_gather", (one(), half() if n > 1 else bytearray(1)), {}
    yield "reduce_scatter", (array.array("d", range(2 * n + 1)), half()), {}
    yield "reduce_scatter", (memoryview(array.array("d", [1])).cast("B").cast("d", ()), half()), {}
    yield "all_to_all", (row, half() if n > 1 else bytearray(1)), {}
    yield "scatter", (None, None, r), {}
    yield "send", (one(),), {}
    yield "send_recv", (one(), 0, half()), {}
    yield "barrier", (1,), {}


def plain(found):
    return found.tolist() if isinstance(found, array.array | memoryview) else found


@pytest.mark.parametrize("n", [1, 2, 3])
def test_both_ways_have_the_same_result(n):
    def of_rank(comm):
        found = []
        for method in (lambda name: getattr(comm, name), lambda name: getattr(Operations, name).__get__(comm)):
            found.append([plain(outcome(lambda each=each: method(each[0])(*each[1], **each[2]))) for each in calls_of(comm.rank, n)])
        named = [each[0] for each in calls_of(comm.rank, n)]
        for name, short, long in zip(named, *found, strict=True):
            assert short == long, name

    pykolo.spawn(n, of_rank)


def test_a_call_holds_its_memory():
    """An array cannot change its size while an operation uses it."""

    comms = pykolo.Communicator.threads(2)
    x = bytearray(4)
    work = comms[0].start_recv(x, 1)
    with pytest.raises(BufferError):
        x.append(1)
    comms[1].send(b"abcd", 0)
    assert work.wait() == b"abcd"
    del work


@needs_short
def test_memory_is_released_after_a_call():
    with pykolo.Communicator.from_env() as comm:
        x, out = bytearray(4), bytearray(4)
        before = [sys.getrefcount(each) for each in (x, out)]
        for _ in range(100):
            comm.all_reduce(x)
            comm.all_gather(x, out)
            for wrong in (bytearray(3), b"abcd", array.array("d", [1])):
                with pytest.raises(ValueError):
                    comm.all_gather(x, wrong)
        x.append(1)
        out.append(1)
        assert [sys.getrefcount(each) for each in (x, out)] == before


def test_a_communicator_that_is_closed_or_was_never_made():
    comm = pykolo.Communicator.from_env()
    comm.close()
    for name in ("all_reduce", "all_to_all"):
        with pytest.raises(pykolo.ClosedError):
            getattr(comm, name)(bytearray(1), bytearray(1))
    with pytest.raises(AttributeError):
        pykolo.Communicator.__new__(pykolo.Communicator).all_to_all(bytearray(1), bytearray(1))
