"""A store of the program's own, where the ranks find each other."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any, Protocol

from . import _abi
from ._errors import check
from ._library import function
from ._signals import keep_of_handler

_reply = function("store_reply")

# How long to wait before the store is asked again, in seconds: twice as long each time.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.002, 0.05


class Store(Protocol):
    """A key-value store that all ranks share. A function that fails raises an exception.

    A store may also have ``claim(key, value) -> bytes``, which sets a key unless it is set,
    atomically, and returns the value that it has afterwards: then two processes with the same rank
    are found at once.
    """

    def set(self, key: str, value: bytes) -> object:
        """Sets a key, whether it is set already or not."""

    def get(self, key: str) -> bytes | None:
        """Returns the value of a key, or None if it is not set. Does not wait."""


class Callbacks:
    """Is kept until the communicator has been made."""

    def __init__(self, store: Store) -> None:
        self.problem: BaseException | None = None
        claim: Any = getattr(store, "claim", None)

        def guarded(call: Callable[..., None]) -> Callable[..., int]:
            # Exceptions must not leave a callback.
            def guarded(_context: object, *arguments: Any) -> int:
                try:
                    call(*arguments)
                    return 0
                except BaseException as error:
                    keep_of_handler(error)
                    self.problem = error
                    return 1

            return guarded

        def set_value(key: bytes, value: int, length: int, _timeout: int) -> None:
            store.set(key.decode(), ctypes.string_at(value, length))

        def get_value(key: bytes, timeout: int, reply: int) -> None:
            until = time.monotonic() + timeout / 1000
            pause = _SHORTEST_PAUSE
            while (value := store.get(key.decode())) is None:
                left = until - time.monotonic()
                if left <= 0:
                    return
                time.sleep(min(pause, left))
                pause = min(2 * pause, _LONGEST_PAUSE)
            check(_reply(reply, bytes(value), len(value)))

        def claim_value(key: bytes, value: int, length: int, _timeout: int, reply: int) -> None:
            held = bytes(claim(key.decode(), ctypes.string_at(value, length)))
            check(_reply(reply, held, len(held)))

        # Other processes may read and write it, for all that kolo knows.
        self.store = _abi.Store(
            size=ctypes.sizeof(_abi.Store),
            set=_abi.StoreSet(guarded(set_value)),
            get=_abi.StoreGet(guarded(get_value)),
            claim=_abi.StoreClaim(guarded(claim_value)) if claim else _abi.StoreClaim(),
            is_private=0,
        )
