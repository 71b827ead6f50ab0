"""Communicators: how they begin, divide and end."""

from __future__ import annotations

import atexit
import ctypes
import math
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from . import _abi
from ._errors import ArgumentError, UnsupportedError, check, error_of
from ._library import function
from ._memory import as_array, size_of
from ._objects import Objects
from ._settings import config_of, index, integer, text
from ._short import Fast
from ._signals import run_signal_handlers
from ._store import Callbacks, Store

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from ._abi import Settings

_get_unique_id = function("get_unique_id")
_discard_unique_id = function("discard_unique_id")
_init_env = function("comm_init_env")
_init_rank = function("comm_init_rank")
_init_store = function("comm_init_store")
_init_callbacks = function("comm_init_callbacks")
_init_all = function("comm_init_all")
_split = function("comm_split")
_shrink = function("comm_shrink")
_grow = function("comm_grow")
_abort = function("comm_abort")
_destroy = function("comm_destroy")
_dump_trace = function("comm_dump_trace")
_count = function("comm_count")
_rank = function("comm_rank")
_host_count = function("comm_host_count")
_transport = function("comm_transport")
_has_devices = function("comm_has_devices")
_get_async_error = function("comm_get_async_error")
_mem_alloc = function("mem_alloc")
_mem_alloc_pooled = function("mem_alloc_pooled")
_mem_free = function("mem_free")

# Ends at the end of the program: an operation in flight must not use memory that Python has freed.
_open: weakref.WeakSet[Communicator] = weakref.WeakSet()


def unique_id() -> bytes:
    """Makes what the ranks of one communicator share, for ``store``. One process calls this and
    passes the bytes, which contain the job's secret, to all ranks. It must live until all ranks have
    connected.
    """
    made = _abi.UniqueId()
    check(_get_unique_id(made))
    return bytes(made.internal)


def discard_unique_id(given: bytes) -> None:
    """Stops serving the store of a unique id that no communicator will use."""
    check(_discard_unique_id(_unique_id_of(given, "discard_unique_id: the argument")))


def _unique_id_of(given: bytes, name: str) -> _abi.UniqueId:
    if not isinstance(given, bytes) or len(given) != ctypes.sizeof(_abi.UniqueId):
        what = f"has {len(given)} bytes" if isinstance(given, bytes) else f"is a {type(given).__name__}"
        raise ArgumentError(f"{name} {what}, which is no unique id: pass the bytes of unique_id()")
    return _abi.UniqueId.from_buffer_copy(given)


class Communicator(Fast, Objects):
    """This process's membership in a group of ranks. All ranks make the same calls in the same order.

    ``with`` closes it; if an exception leaves the block, it ends the communicator on all ranks.
    """

    __slots__ = ("__weakref__", "_argument", "_handle", "_rank", "_size")

    def __init__(self, *, rank: int, world_size: int, store: str | bytes | Store, **settings: Unpack[Settings]) -> None:
        """Connects with the other ranks at a store: the URL of one, such as ``tcp://host:port``, the
        bytes of ``unique_id()``, or an object with ``set`` and ``get``.
        """
        world_size = integer(world_size, "world_size", 1)
        rank = integer(rank, "rank", 0, world_size - 1)
        config = config_of(dict(settings))

        def connect(handle: ctypes.c_void_p) -> int:
            result: int
            if isinstance(store, str):
                result = _init_store(handle, world_size, text(store, "store"), rank, config)
            elif isinstance(store, bytes):
                result = _init_rank(handle, world_size, _unique_id_of(store, "store"), rank, config)
            elif not (hasattr(store, "set") and hasattr(store, "get")):
                raise ArgumentError(
                    f"store is {store!r}: pass a URL, such as 'tcp://node0:29500' or 'file:///shared/job', the bytes of unique_id(), or an "
                    "object with set and get"
                )
            else:
                callbacks = Callbacks(store)
                result = _init_callbacks(handle, world_size, callbacks.store, rank, config)
                if result and callbacks.problem:
                    raise error_of(result) from callbacks.problem
            return result

        self._connect(connect)

    @classmethod
    def from_env(cls, **settings: Unpack[Settings]) -> Self:
        """Connects with all ranks that a launcher started: kolo run, torchrun, srun, mpirun and
        others. Without a launcher, this process is alone.
        """
        config = config_of(dict(settings))
        self = cls.__new__(cls)

        def connect(handle: ctypes.c_void_p) -> int:
            result: int = _init_env(handle, config)
            return result

        self._connect(connect)
        return self

    @classmethod
    def threads(cls, world_size: int, **settings: Unpack[Settings]) -> list[Self]:
        """Makes all ranks of a group in this process, each for a thread of its own."""
        world_size = integer(world_size, "world_size", 1, 4096)
        handles = (ctypes.c_void_p * world_size)()
        run_signal_handlers()
        check(_init_all(handles, world_size, config_of(dict(settings))))
        return [cls._of(handle) for handle in handles]

    def _connect(self, connect: Callable[[ctypes.c_void_p], int]) -> None:
        # `close` needs one if this fails.
        self._set(None)
        run_signal_handlers()
        handle = ctypes.c_void_p()
        check(connect(handle))
        self._take(handle.value)

    @classmethod
    def _of(cls, handle: int | None) -> Self:
        self = cls.__new__(cls)
        self._take(handle)
        return self

    def _set(self, handle: int | None) -> None:
        self._handle = ctypes.c_void_p(handle)
        self._argument = ctypes.c_void_p.from_param(handle)
        self._bind(0, 0, 0)

    def _take(self, handle: int | None) -> None:
        run_signal_handlers()
        self._set(handle)
        self._rank = self._asked(_rank, ctypes.c_int32())
        self._size = self._asked(_count, ctypes.c_int32())
        self._bind(handle or 0, self._rank, self._size)
        _open.add(self)

    def _asked(self, ask: Callable[..., int], place: Any) -> Any:
        check(ask(self._handle, ctypes.byref(place)))
        return place.value

    @property
    def rank(self) -> int:
        """This rank: 0 to the world size less one."""
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._size

    @property
    def host_count(self) -> int:
        """The number of hosts of the ranks."""
        return int(self._asked(_host_count, ctypes.c_int32()))

    @property
    def transport(self) -> str:
        """``"none"`` (one rank alone), ``"shm"``, ``"tcp"`` or ``"shm+tcp"``."""
        return str(self._asked(_transport, ctypes.c_char_p()).decode())

    @property
    def has_devices(self) -> bool:
        """Whether this rank's arrays may be in the memory of GPUs."""
        return bool(self._asked(_has_devices, ctypes.c_int32()))

    @property
    def is_usable(self) -> bool:
        """Whether no operation has failed, which would have ended the communicator."""
        result = ctypes.c_int32()
        return _get_async_error(self._handle, result) == _abi.OK and result.value == _abi.OK

    def split(self, color: int | None, key: int = 0) -> Self | None:
        """Makes one communicator of all ranks that give the same ``color``, in the order of their
        keys and ranks. A rank with the color None becomes a member of none, and gets None. All ranks
        call it.
        """
        color = _abi.NO_COLOR if color is None else integer(color, "color", 0)
        handle = ctypes.c_void_p()
        check(_split(self._handle, color, integer(key, "key", -(2**31)), handle))
        return self._of(handle.value) if handle.value else None

    def shrink(self) -> Self:
        """After a failure, makes a communicator of the surviving ranks, which all call it. This one
        has ended; close it.
        """
        handle = ctypes.c_void_p()
        check(_shrink(self._handle, handle))
        return self._of(handle.value)

    def grow(self) -> Self | None:
        """Admits the processes that wait to join the job, which connect with ``from_env(join=True)``.
        Returns the larger communicator, or None if no process waits. All ranks call it.
        """
        handle = ctypes.c_void_p()
        check(_grow(self._handle, handle))
        return self._of(handle.value) if handle.value else None

    def alloc(self, shape: int | Iterable[int], dtype: Any = "float64", *, pooled: bool = False) -> Any:
        """Returns an array of zeros in registered memory, which collectives read and write in place:
        of numpy, or a memoryview where that is not installed. All ranks call it with the same number
        of bytes. With ``pooled`` one rank calls it alone, and its content is undefined.

        The memory is freed with the last array that uses it.
        """
        shape = tuple(index(length, "alloc: a length of the shape") for length in (shape if isinstance(shape, Iterable) else (shape,)))
        if any(length < 0 for length in shape):
            raise ArgumentError(f"alloc: the shape is {shape}: no length is below 0", op="mem_alloc")
        size = math.prod(shape) * size_of(dtype)
        if size > sys.maxsize:
            raise ArgumentError(f"alloc: the shape is {shape}: no memory has {size} bytes", op="mem_alloc")
        pointer = ctypes.c_void_p()
        check((_mem_alloc_pooled if pooled else _mem_alloc)(pointer, size, self._handle))
        memory = (ctypes.c_char * size).from_address(pointer.value or 0)
        # Not at the end of the program, when arrays may still be used.
        weakref.finalize(memory, _mem_free, pointer).atexit = False
        return as_array(memory, shape, dtype)

    def dump_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes the last operations of this rank to a file, for ``kolo trace``."""
        check(_dump_trace(self._handle, text(path, "path")))

    def abort(self) -> None:
        """Ends the communicator on all ranks, and cancels operations in flight. Any thread may call
        it. It has no effect on one that is closed.
        """
        if (result := _abort(self._handle)) not in (_abi.OK, _abi.ERR_HANDLE):
            raise error_of(result)

    def close(self) -> None:
        """Leaves the communicator and frees it. Cancels operations in flight: wait for them first. A
        second call has no effect.
        """
        handle = self._handle
        self._set(None)
        if handle.value:
            # In a forked child, it is the parent's.
            if (result := _destroy(handle)) not in (_abi.OK, _abi.ERR_FORKED, _abi.ERR_HANDLE):
                raise error_of(result)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self.abort()
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_handle") and self._handle.value:
            _destroy(self._handle)

    def __repr__(self) -> str:
        if not self._handle.value:
            return f"<{type(self).__name__}: closed>"
        return f"<{type(self).__name__}: rank {self._rank} of {self._size}, {self.transport}>"

    def __reduce__(self) -> Any:
        raise UnsupportedError("a communicator cannot be copied to another process: make one there")


def _close_all() -> None:
    for comm in list(_open):
        comm.close()


atexit.register(_close_all)
