"""PyTorch's store as the store of kolo's rendezvous."""

import ctypes
import time

from pykolo._signals import keep_of_handler

from . import library

# How long to wait before the store is asked again, in seconds. Each pause is twice the one before, up to a
# limit.
SHORTEST_PAUSE = 0.002
LONGEST_PAUSE = 0.05


class Rendezvous:
    """Is kept until the communicator has been made.

    Nothing that it refers to refers to it, so that it is freed with its last reference: rank 0 may
    serve the store, whose port the next start needs.
    """

    def __init__(self, store):
        self._problems = []

        def guarded(function):
            return _guarded(function, store, self._problems)

        # Every process that reaches PyTorch's store can read and write it.
        self.callbacks = library.Store(
            size=ctypes.sizeof(library.Store),
            set=library.StoreSet(guarded(_set)),
            get=library.StoreGet(guarded(_get)),
            claim=library.StoreClaim(guarded(_claim)),
            is_private=0,
        )

    @property
    def problem(self):
        """The store's message if it failed; otherwise None."""
        return self._problems[-1] if self._problems else None


def _guarded(function, store, problems):
    """Exceptions must not leave a callback, so their message is kept."""

    def guarded(_context, *arguments):
        try:
            function(store, *arguments)
            return 0
        except BaseException as error:
            keep_of_handler(error)
            problems.append(str(error) or type(error).__name__)
            return 1

    return guarded


def _set(store, key, value, length, _timeout_ms):
    store.set(key.decode(), ctypes.string_at(value, length))


def _get(store, key, timeout_ms, reply):
    name = key.decode()
    # kolo waits in short pieces, and PyTorch logs each wait that times out.
    until = time.monotonic() + timeout_ms / 1000
    pause = SHORTEST_PAUSE
    while not store.check([name]):
        left = until - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(pause, left))
        pause = min(2 * pause, LONGEST_PAUSE)
    value = store.get(name)
    library.store_reply(reply, value, len(value))


def _claim(store, key, value, length, _timeout_ms, reply):
    mine = ctypes.string_at(value, length)
    try:
        held = store.compare_set(key.decode(), b"", mine)
    except NotImplementedError:
        # A store of the program's own. Two processes with one rank are then noticed later.
        store.set(key.decode(), mine)
        held = mine
    library.store_reply(reply, held, len(held))
