"""PyTorch's store as the store of kolo's rendezvous."""

import ctypes
import datetime

from . import library


class Rendezvous:
    """Is kept until the communicator has been made; `problem` is then the store's message if it
    failed.
    """

    def __init__(self, store):
        self._store = store
        self.problem = None
        # Every process that reaches PyTorch's store can read and write it.
        self.callbacks = library.Store(
            size=ctypes.sizeof(library.Store),
            set=library.StoreSet(self._guarded(self._set)),
            get=library.StoreGet(self._guarded(self._get)),
            claim=library.StoreClaim(self._guarded(self._claim)),
            is_private=0,
        )

    def _guarded(self, function):
        """Exceptions must not leave a callback, so their message is kept."""

        def guarded(_context, *arguments):
            try:
                function(*arguments)
                return 0
            except BaseException as error:
                self.problem = str(error) or type(error).__name__
                return 1

        return guarded

    def _set(self, key, value, length, _timeout_ms):
        self._store.set(key.decode(), ctypes.string_at(value, length))

    def _get(self, key, timeout_ms, reply):
        name = key.decode()
        if not self._store.check([name]):
            if timeout_ms == 0:
                return
            try:
                self._store.wait([name], datetime.timedelta(milliseconds=timeout_ms))
            except Exception:
                # A timeout and a lost store raise the same; a lost store raises again.
                if not self._store.check([name]):
                    return
        value = self._store.get(name)
        library.store_reply(reply, value, len(value))

    def _claim(self, key, value, length, _timeout_ms, reply):
        mine = ctypes.string_at(value, length)
        try:
            held = self._store.compare_set(key.decode(), b"", mine)
        except NotImplementedError:
            # A store of the program's own. Two processes with one rank are then noticed later.
            self._store.set(key.decode(), mine)
            held = mine
        library.store_reply(reply, held, len(held))
