"""Python's signal handlers, which run while the main thread waits for other ranks."""

import threading

from . import library

# The exceptions of handlers that have ended waits of the main thread.
_raised = []


def _handlers():
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
            _raised.append(error)
            answer = 1


def _start():
    handlers = _handlers()
    next(handlers)
    return library.WaitCheck(handlers.send)


_check = _start()


def _watch():
    library.set_wait_check(_check, None)


def run_signal_handlers():
    """Has kolo run the handlers when the main thread waits. Python runs them nowhere else."""
    if threading.current_thread() is threading.main_thread():
        _watch()


def raised_by_handler():
    """The exception of a handler that has ended a wait of this thread, once; otherwise None."""
    if _raised and threading.current_thread() is threading.main_thread():
        return _raised.pop()
    return None


def keep_of_handler(error):
    """Keeps an exception for `raised_by_handler`, if it is one that ends a program."""
    if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
        _raised.append(error)


def rethrow_of_handler():
    """As `raised_by_handler`, but raises it."""
    if error := raised_by_handler():
        raise error
