"""Operations in flight."""

from __future__ import annotations

import asyncio
import atexit
import collections
import ctypes
import itertools
import os
import sys
import threading
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Any, Generic, TypeVar

from . import _abi
from ._errors import UnsupportedError, check, error_of
from ._library import function, unconverted
from ._settings import milliseconds
from ._signals import raised_by_handler

T = TypeVar("T")

_wait = unconverted("work_wait")
_wait_timeout = function("work_wait_timeout")
_test = unconverted("work_test")
_on_done = function("work_on_done")
_duration = function("work_duration")
_cancel = function("work_cancel")
_destroy = unconverted("work_destroy")


class _Flight:
    """A handle, and what the operation uses until it has ended."""

    __slots__ = ("handle", "is_over", "uses")

    def __init__(self, handle: ctypes.c_void_p, uses: Any) -> None:
        self.handle = handle
        self.uses = uses
        self.is_over = False

    def has_ended(self) -> bool:
        """Whether the operation uses its memory no more."""
        done = ctypes.c_int32()
        # It fails if the operation has, or in a forked child, whose memory no operation uses. Without a
        # handle, none has begun.
        if self.is_over or not self.handle or _test(self.handle, ctypes.byref(done)) != _abi.OK or done.value != 0:
            self.end()
        return self.is_over

    def end(self) -> None:
        """Lets go of what the operation used. The Work may live on."""
        self.is_over = True
        self.uses = None


# Operations whose Work was dropped before their end, which goes on using the memory. Python may drop
# a Work at any time, also in here and while it holds a lock, so that this has none.
_dropped: collections.deque[_Flight] = collections.deque()
_lock = threading.Lock()


def _drop(flight: _Flight) -> None:
    """Frees a flight, and earlier ones, that have ended."""
    if flight.has_ended():
        _destroy(flight.handle)
    else:
        _dropped.append(flight)
    # A look at all of them at each drop would take quadratic time. Each drop adds one at most and looks
    # at two, so that it frees what has ended faster than others come.
    for _ in range(min(2, len(_dropped))):
        try:
            first = _dropped.popleft()
        except IndexError:
            # Another thread has looked at it.
            return
        if first.has_ended():
            _destroy(first.handle)
        else:
            _dropped.append(first)


class Work(Generic[T]):
    """An operation in flight. Until it has ended, the program does not write its buffers, nor read
    those in which it receives.

    ``work.wait()`` and ``await work`` return what the blocking call returns, and raise what it
    raises.
    """

    __slots__ = ("__weakref__", "_flight", "_result")

    def __init__(self, handle: ctypes.c_void_p, result: Callable[[], T], uses: Any) -> None:
        self._flight = _Flight(handle, uses)
        self._result = result

    def wait(self, timeout: float | timedelta | None = None) -> T:
        """Waits until the operation has ended. Raises TimeoutError if that takes longer than
        ``timeout`` seconds, which may be 0; the operation then goes on, as it does if a signal
        handler raises an exception.
        """
        flight = self._flight
        if timeout is None:
            result = _wait(flight.handle)
        else:
            result = _wait_timeout(flight.handle, milliseconds(timeout, "timeout", 0))
        if result == _abi.IN_PROGRESS:
            raise raised_by_handler() or TimeoutError(f"the operation has not ended after {timeout} s and goes on: wait again, or cancel it")
        if result:
            error = error_of(result)
            # kolo also refuses a wait in a signal handler that runs while a call waits: the operation goes on.
            flight.has_ended()
            raise error
        flight.end()
        return self._result()

    def done(self) -> bool:
        """Whether the operation has ended. Does not wait."""
        return self._flight.has_ended()

    def cancel(self) -> None:
        """Cancels the operation, unless it has ended. This ends the communicator. ``wait`` tells when
        the buffers belong to the caller again.
        """
        check(_cancel(self._flight.handle))

    @property
    def duration(self) -> float:
        """How long the operation took, in seconds, after its end."""
        nanoseconds = ctypes.c_uint64()
        check(_duration(self._flight.handle, nanoseconds))
        return nanoseconds.value / 1e9

    def __await__(self) -> Generator[Any, None, T]:
        if not self.done():
            yield from _end_of(self._flight).__await__()
        return self.wait()

    def __reduce__(self) -> Any:
        raise UnsupportedError("an operation in flight cannot be copied: wait for it, and copy its result")

    def __del__(self, _drop: Callable[[_Flight], None] = _drop) -> None:
        # Not if it could not be made.
        if flight := getattr(self, "_flight", None):
            _drop(flight)


# How often an event loop looks for the end itself, in seconds: kolo does not tell it if the system
# starts no thread for that.
_PERIOD = 1.0

# Who awaits which operation, by the number that kolo passes back.
_awaited: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None] = {}
_numbers = itertools.count(1)
_none_awaited = threading.Event()
_none_awaited.set()


def _end_of(flight: _Flight) -> asyncio.Future[None]:
    """A future that is done when the operation has ended."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    number = next(_numbers)
    with _lock:
        _awaited[number] = (loop, future)
        _none_awaited.clear()
    if result := _on_done(flight.handle, _ended, number):
        with _lock:
            del _awaited[number]
        raise error_of(result)
    timer: asyncio.TimerHandle

    def look() -> None:
        nonlocal timer
        if flight.has_ended():
            _set(future)
        else:
            timer = loop.call_later(_PERIOD, look)

    def finish(_: object) -> None:
        timer.cancel()
        with _lock:
            # `_leave` waits for the thread, which may still come.
            if number in _awaited:
                _awaited[number] = None

    timer = loop.call_later(_PERIOD, look)
    future.add_done_callback(finish)
    return future


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _on_end(number: int, _result: int) -> None:
    with _lock:
        awaited = _awaited.pop(number)
    try:
        if awaited:
            loop, future = awaited
            loop.call_soon_threadsafe(_set, future)
    except RuntimeError:
        # The loop is closed.
        pass
    finally:
        with _lock:
            if not _awaited:
                _none_awaited.set()


_ended = _abi.DoneFunction(_on_end)


def _leave() -> None:
    """Python ends the threads that call it afterwards."""
    _none_awaited.wait(5)


atexit.register(_leave)


def _forget() -> None:
    """Waits for nothing of the parent in a forked child, which has none of its threads. Such a thread
    may have held the locks.
    """
    global _lock, _none_awaited
    _lock = threading.Lock()
    _none_awaited = threading.Event()
    _none_awaited.set()
    _awaited.clear()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forget)


def start(starts: Callable[..., int], arguments: tuple[Any, ...], uses: Any, result: Callable[[], T]) -> Work[T]:
    # Made first: a signal handler may raise an exception as soon as the operation has begun.
    work = Work(ctypes.c_void_p(), result, uses)
    check(starts(*arguments, ctypes.byref(work._flight.handle)))
    return work
