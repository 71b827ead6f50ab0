"""Arguments: what has memory that kolo can use, and the errors of what has not."""

import array
import ctypes
import pathlib
import pickle
import re
import sys

import pykolo
import pytest
from pykolo import _abi
from pykolo._memory import memory_of
from pykolo._settings import milliseconds

HELD = (ctypes.c_float * 6)(*range(6))
ADDRESS = ctypes.addressof(HELD)


@pytest.fixture
def comm():
    with pykolo.Communicator.from_env() as made:
        yield made


class Interface:
    """Has nothing but one of the interfaces."""

    def __init__(self, name="__array_interface__", **given):
        setattr(self, name, {"shape": (2, 3), "typestr": "<f4", "data": (ADDRESS, False), "strides": None, "version": 3, **given})


class DLPack:
    """Has nothing but DLPack."""

    def __init__(self, owner, is_new=True):
        self.owner = owner
        self.is_new = is_new

    def __dlpack__(self, **given):
        return self.owner.__dlpack__(**(given if self.is_new else {}))

    def __dlpack_device__(self):
        return self.owner.__dlpack_device__()


class Arrow(DLPack):
    """As pyarrow.Array: numpy can copy it, and it has no dtype of numpy."""

    def __array__(self, *given, **options):
        return self.owner.__array__(*given, **options)


def test_array_array_and_bytes(comm):
    x = array.array("d", [1.0, 2.0])
    assert comm.all_reduce(x) is x
    assert comm.all_gather(x) == x
    assert comm.all_gather(b"abc") == bytearray(b"abc")
    assert comm.all_to_all(bytearray(b"abc")) == bytearray(b"abc")
    view = memoryview(array.array("h", [1, 2]))
    assert comm.all_gather(view).tolist() == [[1, 2]]
    assert comm.all_gather(view[:0]).tolist() == []
    held = (ctypes.c_float * 2)(1, 2)
    assert comm.all_reduce(held) is held and comm.all_gather(held).tolist() == [[1.0, 2.0]]
    assert comm.broadcast(memoryview(x)[:1])[0] == 1.0
    assert comm.all_gather(array.array("i")) == array.array("i")
    # It can change its size again.
    x.append(3.0)


@pytest.mark.parametrize("letter", "bBhHiIlLqQfd")
def test_types_of_array_array(comm, letter):
    x = array.array(letter, [1, 2, 3])
    assert comm.all_reduce(x) == array.array(letter, [1, 2, 3])
    assert memory_of(x, "all_reduce", "x").element.size == x.itemsize


def test_interfaces():
    found = memory_of(Interface(), "all_reduce", "x", writes=True)
    assert (found.pointer.value, found.shape, found.count, found.element.code) == (ADDRESS, (2, 3), 6, _abi.FLOAT32)
    assert memory_of(Interface(strides=(12, 4)), "all_reduce", "x").count == 6
    with pytest.raises(pykolo.ArgumentError, match="x is not contiguous in memory: pass numpy.ascontiguousarray"):
        memory_of(Interface(strides=(4, 8)), "all_reduce", "x")
    with pytest.raises(pykolo.ArgumentError, match="out is read-only, and recv writes it: pass a writable copy"):
        memory_of(Interface(data=(ADDRESS, True)), "recv", "out", writes=True)


@pytest.mark.parametrize(
    ("typestr", "size", "code"),
    [
        *(("<f4", 4, _abi.FLOAT32), ("|b1", 1, _abi.BOOL), ("=i8", 8, _abi.INT64), (">f4", 4, None), ("<c8", 8, _abi.FLOAT32)),
        *(("<M8[ns]", 8, None), ("<m8[25us]", 8, None), ("<U5", 20, None), ("|S5", 5, None), ("|V16", 16, None), ("<f16", 16, None)),
    ],
)
def test_types_of_interfaces(typestr, size, code):
    element = memory_of(Interface(typestr=typestr), "all_gather", "x").element
    assert (element.size, element.is_raw) == (size, code is None)
    assert (element.code, element.parts) == ((_abi.UINT8, size) if code is None else (code, 2 if "c" in typestr else 1))


@pytest.mark.parametrize("has_numpy", [True, False])
@pytest.mark.parametrize(
    ("typestr", "format"),
    [("<f4", "f"), ("<f2", None), ("<i8", "q"), ("|u1", "B"), ("|b1", "?"), ("<c8", None), (">f4", None), ("<M8[ns]", None), ("|V3", None)],
)
def test_new_outputs_have_the_elements_of_the_input(comm, monkeypatch, typestr, format, has_numpy):
    if not has_numpy:
        monkeypatch.setitem(sys.modules, "numpy", None)
    x = Interface(typestr=typestr, shape=(2,))
    size = memory_of(x, "all_gather", "x").element.size
    for found in (comm.all_gather(x), comm.all_gather_v(x, [2]), comm.start_all_to_all(x).wait(), comm.gather(x), comm.scatter(x)):
        assert bytes(found) == bytes(HELD)[: 2 * size]
        if format is None:
            assert isinstance(found, bytearray)
        else:
            assert found.itemsize == size and found.format == format
    empty = Interface(typestr=typestr, shape=(0,))
    assert len(comm.all_gather(empty)) == len(comm.all_to_all(empty)) == 0


def test_new_outputs_of_buffers_that_no_memoryview_can_have(comm):
    swapped = (ctypes.c_int32.__ctype_be__ if sys.byteorder == "little" else ctypes.c_int32.__ctype_le__) * 2
    for x in ((Pair * 2)((1, 2.0), (3, 4.0)), swapped(1, 2)):
        assert comm.all_gather(x) == comm.all_to_all(x) == bytearray(x)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"typestr": "|O8"}, "addresses: use all_gather_object"),
        ({"typestr": "|V16", "descr": [("a", "<f8"), ("b", [("c", "|O")])]}, "addresses"),
        ({"typestr": "|t4"}, "elements of '|t4', which kolo does not know"),
        ({"typestr": "f4"}, "elements of 'f4'"),
        ({"mask": object()}, "has a mask"),
    ],
)
def test_interfaces_that_are_refused(given, message):
    with pytest.raises(pykolo.ArgumentError, match=re.escape(message)):
        memory_of(Interface(**given), "all_gather", "x")


@pytest.mark.parametrize(
    ("shape", "strides", "is_contiguous"),
    [((1, 3), (999, 4), True), ((3, 1), (4, -8), True), ((2, 0), (1, 1), True), ((3, 1), (8, 4), False), ((2, 1, 3), (12, 0, 4), True)],
)
def test_the_stride_of_an_axis_of_length_1_says_nothing(shape, strides, is_contiguous):
    x = Interface(shape=shape, strides=strides)
    if is_contiguous:
        assert memory_of(x, "all_gather", "x").shape == shape
    else:
        with pytest.raises(pykolo.ArgumentError, match="not contiguous"):
            memory_of(x, "all_gather", "x")


def test_numpy_gives_odd_strides_to_axes_of_length_1(comm):
    numpy = pytest.importorskip("numpy")
    x = numpy.lib.stride_tricks.as_strided(numpy.arange(3.0), (1, 3), (5, 8))
    assert comm.all_gather(x).tolist() == [[[0.0, 1.0, 2.0]]]
    for given in (memoryview(x), Interface(**x.__array_interface__), DLPack(x)):
        assert memory_of(given, "all_gather", "x").count == 3


class Pair(ctypes.Structure):
    _fields_ = (("Z", ctypes.c_int), ("d", ctypes.c_double))


class Holder(ctypes.Structure):
    _fields_ = (("a", ctypes.c_int), ("b", ctypes.py_object))


def test_formats_of_the_buffer_protocol(comm):
    found = memory_of((Pair * 3)(), "all_gather", "x")
    assert found.element.is_raw and (found.element.size, found.count) == (ctypes.sizeof(Pair), 3)
    swapped = (ctypes.c_int32.__ctype_be__ if sys.byteorder == "little" else ctypes.c_int32.__ctype_le__) * 2
    assert memory_of(swapped(), "all_gather", "x").element.is_raw
    with pytest.raises(pykolo.ArgumentError, match="does not reduce elements"):
        comm.all_reduce(swapped())
    for kind in (ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_wchar_p, ctypes.POINTER(ctypes.c_int), Holder):
        with pytest.raises(pykolo.ArgumentError, match="addresses"):
            comm.all_gather((kind * 2)())


def test_structs_of_numpy_that_have_objects(comm):
    numpy = pytest.importorskip("numpy")
    x = numpy.zeros(2, [("a", "O"), ("Zd", "i4")])
    for given in (x, memoryview(x)):
        with pytest.raises(pykolo.ArgumentError, match="addresses"):
            comm.all_gather(given)
    for dtype in ("<M8[ns]", "<U5", ">i2", [("a", ">i2"), ("b", "S3")]):
        x = numpy.zeros(2, dtype)
        given = Interface(**x.__array_interface__)
        assert memory_of(given, "all_gather", "x").element.size == x.itemsize
        assert comm.all_gather(x).shape == (1, 2)


def test_the_interface_of_cuda_has_a_stream(comm):
    for stream, expected in ((None, 0), (1, 0), (2, 2), (0x5000, 0x5000)):
        found = memory_of(Interface("__cuda_array_interface__", stream=stream), "all_reduce", "x")
        assert (found.pointer.value, found.on_device, found.stream) == (ADDRESS, True, expected)

    class Stream:
        cuda_stream = 0x6000

    class Protocol:
        def __cuda_stream__(self):
            return (0, 0x7000)

    x = Interface("__cuda_array_interface__", stream=0x5000)
    call = comm._all_reduce(x, None, "sum", None)
    given = [comm._stream(call[3], stream).value for stream in (None, Stream(), Protocol(), 0x8000)]
    assert given == [0x5000, 0x6000, 0x7000, 0x8000]


def test_what_has_no_memory(comm):
    for x in ([1.0, 2.0], 3.0, "text", None, object()):
        with pytest.raises(pykolo.ArgumentError, match=f"x is a {type(x).__name__}, which has no memory .* pass a numpy array"):
            comm.all_reduce(x)
    with pytest.raises(pykolo.ArgumentError, match="x is read-only"):
        comm.all_reduce(b"abc")
    with pytest.raises(pykolo.ArgumentError, match="not contiguous"):
        comm.all_reduce(memoryview(bytearray(8))[::2])


def test_an_output_for_which_there_is_no_memory(comm):
    with pytest.raises(MemoryError, match=r"all_to_all_v: there is no memory for an output of shape \(2305843009213693951,\): pass an out"):
        comm.all_to_all_v(b"ab", [2], [2**61 - 1])


def test_wrong_arguments(comm):
    x = array.array("d", [1.0, 2.0])
    wrong = [
        (lambda: comm.all_reduce(x, op="mean"), "all_reduce: there is no reduction 'mean'; choose one of sum, product"),
        (lambda: comm.all_reduce(x, array.array("f", [0, 0])), "x has elements of float64, and out of float32: pass an out of the same type"),
        (lambda: comm.all_reduce(x, array.array("d", [0])), "out has 1 elements, and needs 2"),
        (lambda: comm.all_gather(x, array.array("d", [0])), "all_gather: out has 1 elements, and needs 2"),
        (lambda: comm.all_gather(x, bytes(16)), "out is read-only"),
        (lambda: comm.broadcast(x, 1), "there is no rank 1; ranks are 0 to 0"),
        (lambda: comm.broadcast(x, -1), "there is no rank -1"),
        (lambda: comm.all_gather_v(x, [1]), r"x has 2 elements, and counts\[0\] is 1"),
        (lambda: comm.all_gather_v(x, [1, 1]), "counts has 2 entries, and needs one for each of 1 ranks"),
        (lambda: comm.reduce_scatter_v(x, [-2]), "below 0"),
        (lambda: comm.reduce_scatter_v(x, [3]), "x has 2 elements, and the counts are 3 together"),
        (lambda: comm.all_to_all_v(x, [2], [1], array.array("d", [0, 0])), "out has 2 elements, and needs 1"),
        (lambda: comm.all_to_all_v(x, [2], [2**62]), r"all_to_all_v: no output of shape \(4611686018427387904,\) can be made"),
        (lambda: comm.scatter(), "rank 0 is the root: pass it x"),
        (lambda: comm.all_reduce(x, timeout=0), "timeout is 0: give a time in seconds"),
        (lambda: comm.all_reduce(x, timeout="3"), "timeout is '3': give a time in seconds"),
        (lambda: comm.all_reduce(x, op="bitand"), "all_reduce"),
        (lambda: comm.all_reduce(x, "max"), "out is 'max': pass a reduction by its name, op='max'"),
        (lambda: comm.all_gather_v(x, ["2"]), "a number of counts is '2': give an integer"),
        (lambda: comm.send(x, 0, tag="a"), "tag is 'a': give an integer"),
        *(
            (lambda store=store: pykolo.Communicator(rank=0, world_size=1, store=store), "store is .*: pass a URL")
            for store in (None, 5, pathlib.PurePosixPath("store"))
        ),
        (lambda: pykolo.Communicator(rank="0", world_size=1, store="file:///"), "rank is '0': give an integer"),
        (lambda: pykolo.Communicator.from_env(colour="red"), "there is no setting colour; the settings are algorithm"),
        (lambda: pykolo.Communicator.from_env(transport="pigeon"), "pigeon"),
        (lambda: pykolo.Communicator(rank=0, world_size=1, store=b"x"), "no unique id"),
        (lambda: pykolo.spawn(0, print), "world_size is 0"),
        (lambda: comm.alloc(-1), "below 0"),
        (lambda: comm.all_gather_v(x, 2), "counts is 2: pass a number for each of 1 ranks"),
        (lambda: comm.barrier(stream="abc"), "stream is 'abc': give an integer"),
        (lambda: comm.scatter_object(3), "rank 0 is the root and gave 3: pass one for each of 1 ranks"),
        (lambda: comm.dump_trace(None), "path is None: give a text"),
        (lambda: pykolo.discard_unique_id(b"abc"), "the argument has 3 bytes, which is no unique id"),
        (lambda: pykolo.Communicator.from_env(ports=5), "ports is 5: give a text"),
        (lambda: pykolo.Communicator.from_env(trace_dir="a\0b"), "trace_dir is .*: it has a NUL"),
        (lambda: pykolo.Communicator.from_env(reproducible="false"), "reproducible is 'false': give True or False"),
        (lambda: pykolo.Communicator.from_env(network_latency_us="abc"), "network_latency_us is 'abc': give a finite number above 0"),
        (lambda: comm.alloc("3"), "a length of the shape is '3': give an integer"),
        (lambda: comm.alloc((2**62, 8), "int8"), "no memory has"),
        (lambda: comm.reduce_scatter(memoryview(x)[:1].cast("B").cast("d", ())), "x is a single element: pass an array with a block for each of 1 ranks"),
        *(
            (lambda given=given: pykolo.Communicator(store="file:///", **{"rank": 0, "world_size": 2, **given}), message)
            for given, message in (
                ({"rank": 2}, "rank is 2: give 0 to 1"),
                ({"rank": -1}, "rank is -1: give 0 to 1"),
                ({"rank": 2**32}, "rank is 4294967296: give 0 to 1"),
                ({"world_size": 0}, "world_size is 0: give 1 to 2147483647"),
                ({"world_size": 2**32 + 2}, "world_size is 4294967298: give 1 to"),
                ({"sockets": 0}, "sockets is 0: give 1 to 64"),
                ({"sockets": 65}, "sockets is 65: give 1 to 64"),
                ({"sockets": 2**32 + 1}, "sockets is 4294967297: give 1 to 64"),
                ({"network_latency_us": 0.0}, "network_latency_us is 0.0: give a finite number above 0"),
            )
        ),
        (lambda: pykolo.Communicator.from_env(ports="1-70000"), "a range of ports of 1 to 65535"),
    ]
    for call, message in wrong:
        with pytest.raises(ValueError, match=message) as caught:
            call()
        assert isinstance(caught.value, pykolo.KoloError)
    assert list(x) == [1.0, 2.0] and comm.is_usable


@pytest.mark.parametrize(("kind", "seconds"), [("int8", 100), ("uint16", 3600), ("float16", 100), ("float32", 0.25)])
def test_a_timeout_may_be_a_number_of_numpy(kind, seconds):
    numpy = pytest.importorskip("numpy")
    assert milliseconds(getattr(numpy, kind)(seconds), "timeout") == 1000 * seconds


@pytest.mark.parametrize("wrong", [10**400, 1e12, float("nan"), -1, 1j])
def test_times_out_of_range_are_refused(wrong):
    with pytest.raises(pykolo.ArgumentError, match="give a time in seconds"):
        milliseconds(wrong, "timeout")


def test_a_timeout_is_no_duration_of_numpy():
    numpy = pytest.importorskip("numpy")
    with pytest.raises(pykolo.ArgumentError, match="give a time in seconds"):
        milliseconds(numpy.timedelta64(5, "s"), "timeout")


def test_blocks_of_the_ranks():
    def of_rank(comm):
        for call in (comm.reduce_scatter, comm.all_to_all):
            with pytest.raises(ValueError, match="x has 3 entries, which cannot be divided by 2 ranks"):
                call(array.array("i", [1, 2, 3]))
        if comm.rank:
            with pytest.raises(ValueError, match="only the root knows what it sends: pass an out on rank 1"):
                comm.scatter()

    pykolo.spawn(2, of_rank)


def test_an_error_can_be_sent_to_another_process():
    error = pykolo.DeadlineError("rank 1 is late", rank=1, host="a", op="barrier", seq=3, cause="absent", usable=False, code=4)
    # As of add_note, which Python has from 3.11 on.
    error.__notes__ = ["on rank 0"]
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is pykolo.DeadlineError and str(copy) == "rank 1 is late" and vars(copy) == vars(error)
    with pytest.raises(pykolo.UnsupportedError, match="make one there"), pykolo.Communicator.from_env() as comm:
        pickle.dumps(comm)


def test_without_numpy_memory_is_a_memoryview(comm, monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy", None)
    x = comm.alloc((2, 3), "float32")
    assert (x.format, x.shape, x.nbytes) == ("f", (2, 3), 24)
    x[1, 2] = 5.0
    assert comm.all_reduce(x)[1, 2] == 5.0
    with pytest.raises(ValueError, match="bfloat16 is not one of int8, .*: install numpy"):
        comm.alloc(3, "bfloat16")
    with pytest.raises(pykolo.ArgumentError, match="which has no memory"):
        comm.all_reduce([1])


def test_arrays_of_numpy(comm):
    numpy = pytest.importorskip("numpy")
    for name in ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"):
        x = numpy.ones(3, name)
        for _ in range(2):
            assert comm.all_reduce(x, op="max") is x
        assert comm.all_gather(x).dtype == name
    for name in ("complex64", "complex128"):
        x = numpy.full(3, 1 + 2j, name)
        assert (comm.all_reduce(x, op="average") == 1 + 2j).all()
        with pytest.raises(ValueError, match="complex numbers have no max"):
            comm.all_reduce(x, op="max")
    # Elements that kolo does not reduce can be moved.
    for x in (numpy.array(["2026-01-01"], "datetime64[D]"), numpy.zeros(2, "i4,f8"), numpy.array(["a", "bc"]), numpy.ones(2, ">f8")):
        assert (comm.all_gather(x)[0] == x).all() and comm.all_gather(x).dtype == x.dtype
        with pytest.raises(ValueError, match="does not reduce elements of"):
            comm.all_reduce(x)
    with pytest.raises(ValueError, match="of the type object, which are addresses: use broadcast_object"):
        comm.broadcast(numpy.array([None]))
    with pytest.raises(ValueError, match=r"not contiguous in memory: pass numpy.ascontiguousarray\(x\)"):
        comm.all_reduce(numpy.ones((3, 4)).T)
    x = numpy.ones(3)
    x.flags.writeable = False
    with pytest.raises(ValueError, match="x is read-only"):
        comm.all_reduce(x)
    assert (comm.all_gather(x) == x).all()
    for root in (0, numpy.int64(0)):
        assert comm.broadcast(numpy.ones(2), root)[0] == comm.reduce(numpy.ones(2), root=root)[0] == 1
        assert comm.gather(x, root=root).shape == (1, 3) and comm.scatter(x, root=root).shape == (3,)
    assert comm.all_gather_v(x, numpy.array([3])).tolist() == [1, 1, 1]
    for wrong in (0.0, "0", None):
        with pytest.raises(pykolo.ArgumentError, match=f"broadcast: the rank is {wrong!r}: give an integer"):
            comm.broadcast(numpy.ones(2), wrong)
    with pytest.raises(pykolo.ArgumentError, match="there is no reduction"):
        comm.all_reduce(numpy.ones(2), op=["sum"])
    for kind in (numpy.float32, numpy.ndarray):
        with pytest.raises(pykolo.ArgumentError, match="x is a type"):
            comm.all_reduce(kind)
    with pytest.raises(pykolo.ArgumentError, match="alloc: elements of object are addresses"):
        comm.alloc(3, object)
    with pytest.raises(pykolo.ArgumentError, match="alloc: dtype is 'flaot32'"):
        comm.alloc(3, "flaot32")
    assert comm.alloc(numpy.int64(3)).shape == comm.alloc([numpy.int8(3)]).shape == (3,)
    assert comm.alloc(4, "3f4").shape == (4, 3) and comm.alloc(4, "S0").shape == comm.alloc(4, "V0").shape == (4,)
    assert comm.alloc(0).shape == (0,) and comm.alloc((3, 0), "int8").shape == (3, 0)
    assert comm.all_gather(numpy.float32(2)).shape == (1,) and comm.all_gather(numpy.empty((0, 3))).shape == (1, 0, 3)


@pytest.mark.parametrize(
    ("given", "other"),
    [
        *(("M8[D]", "M8[s]"), ("M8[D]", "m8[D]"), (">f4", "U1"), (">f4", ">i4"), ("S1", "u1"), ("i4,f8", "V12")),
        *(("i4,f8", "f8,i4"), ("f2", "u2"), ("c8", "m8[D]")),
    ],
)
def test_an_out_of_another_type_of_the_same_size_is_refused(comm, given, other):
    numpy = pytest.importorskip("numpy")
    x, out = numpy.zeros(2, given), numpy.zeros((1, 2), other)
    for into in (out, Interface(**out.__array_interface__)):
        with pytest.raises(pykolo.ArgumentError, match=re.escape(f"all_gather: x has elements of {x.dtype}, and out of ")) as caught:
            comm.all_gather(x, into)
        assert any(f"out of {name}: pass" in str(caught.value) for name in (out.dtype, out.dtype.str, out.dtype.name))
    with pytest.raises(pykolo.ArgumentError, match="of the same type"):
        comm.send_recv(x, 0, out, 0)


@pytest.mark.parametrize("kind", ["M8[D]", "S1", "U2", ">f4", "i4,f8", [("a", "i4")], [("a", ">i2"), ("b", "S3")]])
def test_an_out_may_give_the_same_type_in_another_way(comm, kind):
    numpy = pytest.importorskip("numpy")
    dtype = numpy.dtype(kind)
    x = numpy.frombuffer(bytes(range(2 * dtype.itemsize)), dtype)
    for give in (lambda out: out, lambda out: Interface(**out.__array_interface__), memoryview):
        out = numpy.zeros((1, 2), dtype)
        try:
            given = give(out)
        except ValueError:
            # No buffer has dates.
            continue
        comm.all_gather(x, given)
        assert out.tobytes() == x.tobytes()


@pytest.mark.parametrize("kind", ["M8[D]", "m8[s]", "S2", "U2", "V3", "i4,f8", "?", "f2", "c8"])
def test_scalars_of_numpy(comm, kind):
    numpy = pytest.importorskip("numpy")
    x = numpy.frombuffer(bytes(range(64)), numpy.dtype(kind), 1)[0]
    for found in (comm.all_gather(x), comm.all_gather(x, numpy.empty(1, kind)), comm.start_gather(x).wait()):
        assert found.dtype == kind and found.shape == (1,) and found.tobytes() == x.tobytes()
    with pytest.raises(pykolo.ArgumentError, match="x is read-only"):
        comm.start_all_reduce(x)


# numpy doubts the format that ctypes gives.
@pytest.mark.filterwarnings("ignore:A builtin ctypes object")
def test_an_out_of_a_struct_of_ctypes(comm):
    numpy = pytest.importorskip("numpy")
    pairs = (Pair * 2)((1, 2.0), (3, 4.0))
    assert comm.all_gather(pairs, numpy.zeros(2, numpy.dtype(Pair)))["d"].tolist() == [2.0, 4.0]


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_types_of_ml_dtypes(name):
    numpy, ml_dtypes = pytest.importorskip("numpy"), pytest.importorskip("ml_dtypes")
    dtype = getattr(ml_dtypes, name)

    def of_rank(comm):
        x = comm.all_reduce(numpy.array([1.5, comm.rank], dtype))
        assert x.dtype == dtype and x.astype(float).tolist() == [3.0, 1.0]
        assert comm.all_gather(x).dtype == dtype and comm.alloc(3, name).dtype == dtype

    pykolo.spawn(2, of_rank)


def test_dlpack(comm):
    numpy = pytest.importorskip("numpy")
    x = numpy.arange(6.0).reshape(2, 3)
    for is_new in (True, False):
        given = DLPack(x, is_new)
        found = memory_of(given, "all_reduce", "x", writes=True)
        assert (found.pointer.value, found.shape, found.element.code) == (x.ctypes.data, (2, 3), _abi.FLOAT64)
        assert comm.all_reduce(given) is given
    gathered = comm.all_gather(Arrow(x))
    assert gathered.dtype == x.dtype and gathered.tolist() == [x.tolist()]
    with pytest.raises(ValueError, match="not contiguous"):
        comm.all_reduce(DLPack(x.T))
    x.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        comm.all_reduce(DLPack(x))
    with pytest.raises(ValueError, match="gives no access to its memory"):
        comm.all_reduce(DLPack(x, is_new=False))


def test_tensors_of_torch(comm):
    # In the root of the repository, torch alone is a folder.
    pytest.importorskip("torch.version")
    import torch

    x = torch.ones(2, 3, dtype=torch.bfloat16)
    assert comm.all_reduce(x) is x
    assert comm.all_gather(x).shape == (1, 2, 3) and comm.all_gather(x).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="grad"):
        comm.all_reduce(torch.ones(3, requires_grad=True))
