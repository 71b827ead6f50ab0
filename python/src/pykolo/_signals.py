"""Python's signal handlers, which run while the main thread waits for other ranks."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Generator

from . import _abi
from ._library import function

# The exceptions of handlers that have ended waits of the main thread.
_raised: list[BaseException] = []


def _handlers() -> Generator[int, object, None]:
    """Yields 0 each time that the handlers have run, and 1 if one has raised an exception.

    Python runs handlers where it resumes a generator, and no function can catch what is raised as
    it begins.
    """
    answer = 0
    while True:
        try:
            while True:
                yield answer
                answer = 0
        except GeneratorExit:
            raise
        except BaseException as error:
            # Without the frame of this function.
            _raised.append(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
            answer = 1


def _start() -> _abi.WaitCheck:  # type: ignore[valid-type]
    handlers = _handlers()
    next(handlers)
    return _abi.WaitCheck(handlers.send)


_check = _start()
_set_wait_check = function("set_wait_check")
# No function of Python: a handler would run in it.
_set_on_main = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(functools.partial(_set_wait_check, _check))


def run_signal_handlers() -> None:
    """Has kolo run the handlers when the main thread waits. Python runs them nowhere else."""
    if threading.current_thread() is threading.main_thread():
        _set_wait_check(_check, None)
    else:
        # The main thread does it before its next call.
        ctypes.pythonapi.Py_AddPendingCall(_set_on_main, None)


def raised_by_handler() -> BaseException | None:
    """The last exception of handlers that have ended a wait of this thread, once."""
    if _raised and threading.current_thread() is threading.main_thread():
        raised = _raised[-1]
        _raised.clear()
        return raised
    return None


def keep_of_handler(error: BaseException) -> None:
    """Keeps an exception for `raised_by_handler`, if it is one that ends a program."""
    if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
        _raised.append(error)
