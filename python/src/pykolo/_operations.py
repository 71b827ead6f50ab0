"""The collectives and messages of a communicator.

Each operation has a method that describes it: its arguments of C before the communicator, what it
returns, and the memory that it uses. The blocking and the nonblocking call follow from it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from ctypes import c_size_t
from datetime import timedelta
from typing import Any, Literal, TypeVar

from . import _abi, _work
from ._errors import ArgumentError, check, error_of
from ._library import function, unconverted
from ._memory import Element, Memory, is_same_type, memory_of, new_like
from ._settings import index, milliseconds
from ._work import Work

A = TypeVar("A")

ReduceOp = Literal["sum", "product", "max", "min", "average", "bitand", "bitor", "bitxor"]
_REDUCTIONS: dict[str, int] = {
    "sum": _abi.SUM,
    "product": _abi.PROD,
    "max": _abi.MAX,
    "min": _abi.MIN,
    "average": _abi.AVG,
    "bitand": _abi.BAND,
    "bitor": _abi.BOR,
    "bitxor": _abi.BXOR,
}
Timeout = float | timedelta | None

_call_timeout = function("call_timeout")


_START = {name.removeprefix("start_"): unconverted(name) for name in _abi.FUNCTIONS if name.startswith("start_")}
_NOW = {name: unconverted(name) for name in (*_START, "send_recv")}


# An operation, its arguments, what returns the result at its end, and the memory that it uses.
_Call = tuple[str, tuple[Any, ...], Callable[[], Any], tuple[Memory, ...]]


def _nothing() -> None:
    return None


def _stream_of(given: Any) -> int:
    """The address of a CUDA stream: of PyTorch, CuPy, or any that has ``__cuda_stream__``."""
    if given is None:
        return 0
    if hasattr(given, "__cuda_stream__"):
        protocol: Any = given.__cuda_stream__
        version_and_handle: Any = protocol() if callable(protocol) else protocol
        return int(version_and_handle[1])
    for attribute in ("cuda_stream", "ptr"):
        if hasattr(given, attribute):
            return int(getattr(given, attribute))
    return index(given, "stream")


def _reduction(op: str, name: str, memory: Memory) -> tuple[int, int, int]:
    """How many elements of which type of kolo a reduction has, and its number."""
    number = _REDUCTIONS.get(op) if isinstance(op, str) else None
    if number is None:
        raise ArgumentError(f"{name}: there is no reduction {op!r}; choose one of {', '.join(_REDUCTIONS)}", op=name)
    element = memory.element
    if element.is_raw:
        raise ArgumentError(f"{name}: kolo does not reduce elements of {element.name}: convert them, as by x.astype(numpy.float32)", op=name)
    if element.is_complex and op not in ("sum", "average"):
        raise ArgumentError(f"{name}: complex numbers have no {op}, only sum and average", op=name)
    return memory.parts, element.code, number


def _same(op: str, x: Memory, out: Memory, count: int, what: str = "x") -> None:
    """Refuses an output of another type, or of another length than it must have."""
    if x.element is not out.element and not is_same_type(x, out):
        raise ArgumentError(f"{op}: {what} has elements of {x.element.name}, and out of {out.element.name}: pass an out of the same type", op=op)
    if out.count != count:
        raise ArgumentError(f"{op}: out has {out.count} elements, and needs {count}", op=op)


def _tagged(name: str, arguments: tuple[Any, ...], tag: int) -> tuple[str, tuple[Any, ...]]:
    """A message with a tag."""
    if tag == 0:
        return name, arguments
    number = index(tag, f"{name}: tag")
    if not 0 <= number < 1 << 32:
        raise ArgumentError(f"{name}: tag {number} is out of range: tags are from 0 to {(1 << 32) - 1}", op=name)
    return name + "_tagged", (*arguments, ctypes.c_uint32(number))


class Operations:
    """What all ranks of a communicator call together, and messages between two."""

    __slots__ = ()

    _handle: ctypes.c_void_p
    # The handle as ctypes passes it.
    _argument: Any
    _rank: int
    _size: int

    def _run(self, call: _Call, timeout: Timeout, stream: Any) -> Any:
        name, arguments, result_of, memories = call
        pointer = self._stream(memories, stream)
        if timeout is None:
            result = _NOW[name](*arguments, self._argument, pointer)
        else:
            try:
                check(_call_timeout(milliseconds(timeout, "timeout")))
                result = _NOW[name](*arguments, self._argument, pointer)
            finally:
                _call_timeout(0)
        if result:
            raise error_of(result)
        return result_of()

    def _start(self, call: _Call, timeout: Timeout, stream: Any) -> Work[Any]:
        name, arguments, result_of, memories = call
        arguments = (*arguments, self._argument, self._stream(memories, stream))
        if timeout is None:
            return _work.start(_START[name], arguments, (self, call), result_of)
        try:
            check(_call_timeout(milliseconds(timeout, "timeout")))
            return _work.start(_START[name], arguments, (self, call), result_of)
        finally:
            _call_timeout(0)

    def _stream(self, memories: tuple[Memory, ...], given: Any) -> ctypes.c_void_p | None:
        if given is not None:
            return ctypes.c_void_p(_stream_of(given))
        for memory in memories:
            if memory.stream:
                return ctypes.c_void_p(memory.stream)
        return None

    def _in(self, x: Any, op: str, stream: Any, name: str = "x") -> Memory:
        return memory_of(x, op, name, stream=0 if stream is None else _stream_of(stream))

    def _out(self, x: Any, op: str, stream: Any, name: str = "out") -> Memory:
        if isinstance(x, str) and x in _REDUCTIONS:
            raise ArgumentError(f"{op}: {name} is {x!r}: pass a reduction by its name, op={x!r}", op=op)
        return memory_of(x, op, name, writes=True, stream=0 if stream is None else _stream_of(stream))

    def _root(self, root: int, op: str) -> int:
        root = index(root, f"{op}: the rank")
        if not 0 <= root < self._size:
            raise ArgumentError(f"{op}: there is no rank {root}; ranks are 0 to {self._size - 1}", op=op)
        return root

    def _counts(self, given: Sequence[int], op: str, name: str = "counts") -> list[int]:
        """A number of elements for each rank."""
        if not isinstance(given, Iterable):
            raise ArgumentError(f"{op}: {name} is {given!r}: pass a number for each of {self._size} ranks", op=op)
        counts = [index(count, f"{op}: a number of {name}") for count in given]
        if len(counts) != self._size:
            raise ArgumentError(f"{op}: {name} has {len(counts)} entries, and needs one for each of {self._size} ranks", op=op)
        if any(count < 0 for count in counts):
            raise ArgumentError(f"{op}: {name} has a number below 0", op=op)
        return counts

    def _sizes(self, counts: Sequence[int], element: Element) -> Any:
        return (c_size_t * self._size)(*(count * element.parts for count in counts))

    def _block(self, memory: Memory, op: str) -> tuple[int, tuple[int, ...]]:
        """The number of elements of one rank's block, and its shape: ``x[rank]`` if there is an entry
        for each rank, otherwise as many entries of the first axis for each.
        """
        shape, size = memory.shape, self._size
        if not shape:
            raise ArgumentError(f"{op}: x is a single element: pass an array with a block for each of {size} ranks", op=op)
        first = shape[0]
        if first % size:
            raise ArgumentError(f"{op}: x has {first} entries, which cannot be divided by {size} ranks: pass a block for each rank", op=op)
        if len(shape) > 1 and first == size:
            return memory.count // size, shape[1:]
        return memory.count // size, (first // size, *shape[1:])

    def _given_or_new(self, out: Any, op: str, stream: Any, like: Any, memory: Memory, shape: tuple[int, ...]) -> tuple[Any, Memory]:
        """The output, and its memory."""
        if out is None:
            if memory.on_device and not hasattr(like, "new_empty") and not hasattr(like, "__array_namespace__"):
                raise ArgumentError(f"{op}: x is on a device; pass an out there", op=op)
            try:
                out = new_like(like, shape, memory.element)
            except MemoryError as error:
                raise MemoryError(f"{op}: there is no memory for an output of shape {shape}: pass an out") from error
            except (OverflowError, ValueError) as error:
                raise ArgumentError(f"{op}: no output of shape {shape} can be made: {error}", op=op) from error
            into = self._out(out, op, stream)
            if isinstance(out, bytearray):
                # Its elements are those of x, which it cannot say.
                into = Memory(into.keep, into.pointer, shape, memory.element)
            return out, into
        return out, self._out(out, op, stream)

    # Each method describes an operation.

    def _all_reduce(self, x: Any, out: Any, op: str, stream: Any) -> _Call:
        name = "all_reduce"
        if out is None or out is x:
            source = into = self._out(x, name, stream, "x")
            out = x
        else:
            source, into = self._in(x, name, stream), self._out(out, name, stream)
            _same(name, source, into, source.count)
        count, code, reduction = _reduction(op, name, source)
        return (name, (source.pointer, into.pointer, c_size_t(count), code, reduction), lambda: out, (source, into))

    def _reduce(self, x: Any, out: Any, op: str, root: int, stream: Any) -> _Call:
        name = "reduce"
        root = self._root(root, name)
        is_root = root == self._rank
        source = self._in(x, name, stream)
        memories: tuple[Memory, ...] = (source,)
        pointer = None
        if is_root:
            out = x if out is None else out
            into = self._out(out, name, stream, "x" if out is x else "out")
            _same(name, source, into, source.count)
            memories, pointer = (source, into), into.pointer
        count, code, reduction = _reduction(op, name, source)
        return (name, (source.pointer, pointer, c_size_t(count), code, reduction, root), lambda: out if is_root else None, memories)

    def _broadcast(self, x: Any, root: int, stream: Any) -> _Call:
        name = "broadcast"
        root = self._root(root, name)
        is_root = root == self._rank
        memory = self._in(x, name, stream) if is_root else self._out(x, name, stream, "x")
        return (name, (memory.pointer, memory.pointer, c_size_t(memory.parts), memory.element.code, root), lambda: x, (memory,))

    def _all_gather(self, x: Any, out: Any, stream: Any) -> _Call:
        name = "all_gather"
        source = self._in(x, name, stream)
        out, into = self._given_or_new(out, name, stream, x, source, (self._size, *source.shape))
        _same(name, source, into, source.count * self._size)
        return (name, (source.pointer, into.pointer, c_size_t(source.parts), source.element.code), lambda: out, (source, into))

    def _all_gather_v(self, x: Any, counts: Sequence[int], out: Any, stream: Any) -> _Call:
        name = "all_gather_v"
        counts = self._counts(counts, name)
        source = self._in(x, name, stream)
        if source.count != counts[self._rank]:
            raise ArgumentError(f"{name}: x has {source.count} elements, and counts[{self._rank}] is {counts[self._rank]}", op=name)
        out, into = self._given_or_new(out, name, stream, x, source, (sum(counts),))
        _same(name, source, into, sum(counts))
        return (name, (source.pointer, into.pointer, self._sizes(counts, source.element), source.element.code), lambda: out, (source, into))

    def _reduce_scatter(self, x: Any, out: Any, op: str, stream: Any) -> _Call:
        name = "reduce_scatter"
        source = self._in(x, name, stream)
        _, code, reduction = _reduction(op, name, source)
        count, shape = self._block(source, name)
        out, into = self._given_or_new(out, name, stream, x, source, shape)
        _same(name, source, into, count)
        return (name, (source.pointer, into.pointer, c_size_t(into.parts), code, reduction), lambda: out, (source, into))

    def _reduce_scatter_v(self, x: Any, counts: Sequence[int], out: Any, op: str, stream: Any) -> _Call:
        name = "reduce_scatter_v"
        counts = self._counts(counts, name)
        source = self._in(x, name, stream)
        _, code, reduction = _reduction(op, name, source)
        if source.count != sum(counts):
            raise ArgumentError(f"{name}: x has {source.count} elements, and the counts are {sum(counts)} together", op=name)
        out, into = self._given_or_new(out, name, stream, x, source, (counts[self._rank],))
        _same(name, source, into, counts[self._rank])
        return (name, (source.pointer, into.pointer, self._sizes(counts, source.element), code, reduction), lambda: out, (source, into))

    def _all_to_all(self, x: Any, out: Any, stream: Any) -> _Call:
        name = "all_to_all"
        source = self._in(x, name, stream)
        self._block(source, name)
        out, into = self._given_or_new(out, name, stream, x, source, source.shape)
        _same(name, source, into, source.count)
        count = source.parts // self._size
        return (name, (source.pointer, into.pointer, c_size_t(count), source.element.code), lambda: out, (source, into))

    def _all_to_all_v(self, x: Any, send_counts: Sequence[int], recv_counts: Sequence[int], out: Any, stream: Any) -> _Call:
        name = "all_to_all_v"
        sends, receives = self._counts(send_counts, name, "send_counts"), self._counts(recv_counts, name, "recv_counts")
        source = self._in(x, name, stream)
        if source.count != sum(sends):
            raise ArgumentError(f"{name}: x has {source.count} elements, and the send_counts are {sum(sends)} together", op=name)
        out, into = self._given_or_new(out, name, stream, x, source, (sum(receives),))
        _same(name, source, into, sum(receives))
        element = source.element
        arguments = (source.pointer, self._sizes(sends, element), into.pointer, self._sizes(receives, element), element.code)
        return (name, arguments, lambda: out, (source, into))

    def _gather(self, x: Any, out: Any, root: int, stream: Any) -> _Call:
        name = "gather"
        root = self._root(root, name)
        is_root = root == self._rank
        source = self._in(x, name, stream)
        memories: tuple[Memory, ...] = (source,)
        pointer = None
        if is_root:
            out, into = self._given_or_new(out, name, stream, x, source, (self._size, *source.shape))
            _same(name, source, into, source.count * self._size)
            memories, pointer = (source, into), into.pointer
        arguments = (source.pointer, pointer, c_size_t(source.parts), source.element.code, root)
        return (name, arguments, lambda: out if is_root else None, memories)

    def _scatter(self, x: Any, out: Any, root: int, stream: Any) -> _Call:
        name = "scatter"
        root = self._root(root, name)
        is_root = root == self._rank
        if not is_root:
            if out is None:
                raise ArgumentError(f"{name}: only the root knows what it sends: pass an out on rank {self._rank}", op=name)
            into = self._out(out, name, stream)
            return (name, (None, into.pointer, c_size_t(into.parts), into.element.code, root), lambda: out, (into,))
        if x is None:
            raise ArgumentError(f"{name}: rank {root} is the root: pass it x, with a block for each rank", op=name)
        source = self._in(x, name, stream)
        count, shape = self._block(source, name)
        out, into = self._given_or_new(out, name, stream, x, source, shape)
        _same(name, source, into, count)
        arguments = (source.pointer, into.pointer, c_size_t(into.parts), source.element.code, root)
        return (name, arguments, lambda: out, (source, into))

    def _send(self, x: Any, peer: int, tag: int, stream: Any) -> _Call:
        memory = self._in(x, "send", stream)
        arguments = (memory.pointer, c_size_t(memory.parts), memory.element.code, self._root(peer, "send"))
        return (*_tagged("send", arguments, tag), _nothing, (memory,))

    def _recv(self, out: Any, peer: int, tag: int, stream: Any) -> _Call:
        memory = self._out(out, "recv", stream)
        arguments = (memory.pointer, c_size_t(memory.parts), memory.element.code, self._root(peer, "recv"))
        return (*_tagged("recv", arguments, tag), lambda: out, (memory,))

    def _recv_any(self, out: Any, tag: int, stream: Any) -> _Call:
        memory = self._out(out, "recv_any", stream)
        source = ctypes.c_int32()
        arguments = (memory.pointer, c_size_t(memory.parts), memory.element.code, ctypes.byref(source))
        return (*_tagged("recv_any", arguments, tag), lambda: source.value, (memory,))

    def all_reduce(self, x: A, out: A | None = None, op: ReduceOp = "sum", *, timeout: Timeout = None, stream: Any = None) -> A:
        """Reduces the arrays of all ranks element by element: in place, or into ``out``."""
        return self._run(self._all_reduce(x, out, op, stream), timeout, stream)  # type: ignore[no-any-return]

    def start_all_reduce(self, x: A, out: A | None = None, op: ReduceOp = "sum", *, timeout: Timeout = None, stream: Any = None) -> Work[A]:
        """Starts ``all_reduce``."""
        return self._start(self._all_reduce(x, out, op, stream), timeout, stream)

    def reduce(
        self, x: A, out: A | None = None, op: ReduceOp = "sum", root: int = 0, *, timeout: Timeout = None, stream: Any = None
    ) -> A | None:
        """As ``all_reduce``, but only the root gets the result, and returns it."""
        return self._run(self._reduce(x, out, op, root, stream), timeout, stream)  # type: ignore[no-any-return]

    def start_reduce(
        self, x: A, out: A | None = None, op: ReduceOp = "sum", root: int = 0, *, timeout: Timeout = None, stream: Any = None
    ) -> Work[A | None]:
        """Starts ``reduce``."""
        return self._start(self._reduce(x, out, op, root, stream), timeout, stream)

    def broadcast(self, x: A, root: int = 0, *, timeout: Timeout = None, stream: Any = None) -> A:
        """Copies the root's array to those of all ranks, in place."""
        return self._run(self._broadcast(x, root, stream), timeout, stream)  # type: ignore[no-any-return]

    def start_broadcast(self, x: A, root: int = 0, *, timeout: Timeout = None, stream: Any = None) -> Work[A]:
        """Starts ``broadcast``."""
        return self._start(self._broadcast(x, root, stream), timeout, stream)

    def all_gather(self, x: Any, out: Any = None, *, timeout: Timeout = None, stream: Any = None) -> Any:
        """Collects the arrays of all ranks: ``out[i]`` is that of rank i."""
        return self._run(self._all_gather(x, out, stream), timeout, stream)

    def start_all_gather(self, x: Any, out: Any = None, *, timeout: Timeout = None, stream: Any = None) -> Work[Any]:
        """Starts ``all_gather``."""
        return self._start(self._all_gather(x, out, stream), timeout, stream)

    def all_gather_v(self, x: Any, counts: Sequence[int], out: Any = None, *, timeout: Timeout = None, stream: Any = None) -> Any:
        """As ``all_gather``, but rank i gives ``counts[i]`` elements. All ranks give the same
        counts. The result is flat.
        """
        return self._run(self._all_gather_v(x, counts, out, stream), timeout, stream)

    def start_all_gather_v(self, x: Any, counts: Sequence[int], out: Any = None, *, timeout: Timeout = None, stream: Any = None) -> Work[Any]:
        """Starts ``all_gather_v``."""
        return self._start(self._all_gather_v(x, counts, out, stream), timeout, stream)

    def reduce_scatter(self, x: Any, out: Any = None, op: ReduceOp = "sum", *, timeout: Timeout = None, stream: Any = None) -> Any:
        """Reduces the arrays of all ranks, of a block for each rank. Returns this rank's block."""
        return self._run(self._reduce_scatter(x, out, op, stream), timeout, stream)

    def start_reduce_scatter(self, x: Any, out: Any = None, op: ReduceOp = "sum", *, timeout: Timeout = None, stream: Any = None) -> Work[Any]:
        """Starts ``reduce_scatter``."""
        return self._start(self._reduce_scatter(x, out, op, stream), timeout, stream)

    def reduce_scatter_v(
        self, x: Any, counts: Sequence[int], out: Any = None, op: ReduceOp = "sum", *, timeout: Timeout = None, stream: Any = None
    ) -> Any:
        """As ``reduce_scatter``, but the block of rank i has ``counts[i]`` elements. All ranks give
        the same counts. The result is flat.
        """
        return self._run(self._reduce_scatter_v(x, counts, out, op, stream), timeout, stream)

    def start_reduce_scatter_v(
        self, x: Any, counts: Sequence[int], out: Any = None, op: ReduceOp = "sum", *, timeout: Timeout = None, stream: Any = None
    ) -> Work[Any]:
        """Starts ``reduce_scatter_v``."""
        return self._start(self._reduce_scatter_v(x, counts, out, op, stream), timeout, stream)

    def all_to_all(self, x: Any, out: Any = None, *, timeout: Timeout = None, stream: Any = None) -> Any:
        """Sends block i of ``x`` to rank i, and returns an array with a block from each rank."""
        return self._run(self._all_to_all(x, out, stream), timeout, stream)

    def start_all_to_all(self, x: Any, out: Any = None, *, timeout: Timeout = None, stream: Any = None) -> Work[Any]:
        """Starts ``all_to_all``."""
        return self._start(self._all_to_all(x, out, stream), timeout, stream)

    def all_to_all_v(
        self,
        x: Any,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        out: Any = None,
        *,
        timeout: Timeout = None,
        stream: Any = None,
    ) -> Any:
        """As ``all_to_all``, with ``send_counts[i]`` elements for rank i and ``recv_counts[i]`` from
        it. The result is flat.
        """
        return self._run(self._all_to_all_v(x, send_counts, recv_counts, out, stream), timeout, stream)

    def start_all_to_all_v(
        self,
        x: Any,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        out: Any = None,
        *,
        timeout: Timeout = None,
        stream: Any = None,
    ) -> Work[Any]:
        """Starts ``all_to_all_v``."""
        return self._start(self._all_to_all_v(x, send_counts, recv_counts, out, stream), timeout, stream)

    def gather(self, x: Any, out: Any = None, root: int = 0, *, timeout: Timeout = None, stream: Any = None) -> Any:
        """As ``all_gather``, but only the root gets the arrays, and returns them."""
        return self._run(self._gather(x, out, root, stream), timeout, stream)

    def start_gather(self, x: Any, out: Any = None, root: int = 0, *, timeout: Timeout = None, stream: Any = None) -> Work[Any]:
        """Starts ``gather``."""
        return self._start(self._gather(x, out, root, stream), timeout, stream)

    def scatter(self, x: Any = None, out: Any = None, root: int = 0, *, timeout: Timeout = None, stream: Any = None) -> Any:
        """Sends block i of the root's ``x`` to rank i. Other ranks than the root need no ``x``, and
        pass an ``out``.
        """
        return self._run(self._scatter(x, out, root, stream), timeout, stream)

    def start_scatter(self, x: Any = None, out: Any = None, root: int = 0, *, timeout: Timeout = None, stream: Any = None) -> Work[Any]:
        """Starts ``scatter``."""
        return self._start(self._scatter(x, out, root, stream), timeout, stream)

    def barrier(self, *, timeout: Timeout = None, stream: Any = None) -> None:
        """Returns when all ranks have called it."""
        self._run(("barrier", (), _nothing, ()), timeout, stream)

    def start_barrier(self, *, timeout: Timeout = None, stream: Any = None) -> Work[None]:
        """Starts ``barrier``."""
        return self._start(("barrier", (), _nothing, ()), timeout, stream)

    def send(self, x: Any, peer: int, tag: int = 0, *, timeout: Timeout = None, stream: Any = None) -> None:
        """Sends an array to a rank, which receives as many elements of the same type, with the same
        tag. It may wait until that rank receives. The rank may be this one.
        """
        self._run(self._send(x, peer, tag, stream), timeout, stream)

    def start_send(self, x: Any, peer: int, tag: int = 0, *, timeout: Timeout = None, stream: Any = None) -> Work[None]:
        """Starts ``send``."""
        return self._start(self._send(x, peer, tag, stream), timeout, stream)

    def recv(self, out: A, peer: int, tag: int = 0, *, timeout: Timeout = None, stream: Any = None) -> A:
        """Receives the next message of a rank with this tag into an array, and returns that."""
        return self._run(self._recv(out, peer, tag, stream), timeout, stream)  # type: ignore[no-any-return]

    def start_recv(self, out: A, peer: int, tag: int = 0, *, timeout: Timeout = None, stream: Any = None) -> Work[A]:
        """Starts ``recv``."""
        return self._start(self._recv(out, peer, tag, stream), timeout, stream)

    def recv_any(self, out: Any, tag: int = 0, *, timeout: Timeout = None, stream: Any = None) -> int:
        """Receives the first message of any rank with this tag into an array, and returns that rank."""
        return self._run(self._recv_any(out, tag, stream), timeout, stream)  # type: ignore[no-any-return]

    def start_recv_any(self, out: Any, tag: int = 0, *, timeout: Timeout = None, stream: Any = None) -> Work[int]:
        """Starts ``recv_any``."""
        return self._start(self._recv_any(out, tag, stream), timeout, stream)

    def send_recv(self, x: Any, to: int, out: A, source: int, *, timeout: Timeout = None, stream: Any = None) -> A:
        """Sends an array to one rank and receives one from another, or the same, at the same time."""
        name = "send_recv"
        send, into = self._in(x, name, stream), self._out(out, name, stream)
        _same(name, send, into, into.count)
        arguments = (
            send.pointer,
            c_size_t(send.parts),
            self._root(to, name),
            into.pointer,
            c_size_t(into.parts),
            self._root(source, name),
            send.element.code,
        )
        return self._run((name, arguments, lambda: out, (send, into)), timeout, stream)  # type: ignore[no-any-return]
