"""Messages of any Python object, by pickle."""

from __future__ import annotations

import pickle
from collections.abc import Sequence, Sized
from typing import Any

from ._errors import ArgumentError
from ._operations import Operations, Timeout


class Objects(Operations):
    """A rank that receives a pickle runs what it says: these calls are for ranks that trust each
    other, and no other call uses pickle.
    """

    __slots__ = ()

    def all_gather_object(self, value: Any, *, timeout: Timeout = None) -> list[Any]:
        """Returns the objects of all ranks. Pickles: for ranks that trust each other."""
        mine = pickle.dumps(value)
        sizes = [int.from_bytes(size, "little") for size in _eights(self.all_gather(len(mine).to_bytes(8, "little"), timeout=timeout))]
        data = memoryview(self.all_gather_v(mine, sizes, timeout=timeout))
        return [pickle.loads(part) for part in _parts(data, sizes)]

    def gather_object(self, value: Any, root: int = 0, *, timeout: Timeout = None) -> list[Any] | None:
        """As ``all_gather_object``, for the root alone. Pickles: for ranks that trust each other."""
        mine = pickle.dumps(value)
        self._root(root, "gather_object")
        sizes = [int.from_bytes(size, "little") for size in _eights(self.all_gather(len(mine).to_bytes(8, "little"), timeout=timeout))]
        longest = max(sizes)
        data = self.gather(mine.ljust(longest, b"\0"), root=root, timeout=timeout)
        if data is None:
            return None
        return [pickle.loads(memoryview(data)[rank * longest : rank * longest + size]) for rank, size in enumerate(sizes)]

    def broadcast_object(self, value: Any = None, root: int = 0, *, timeout: Timeout = None) -> Any:
        """Returns the root's object. Pickles: for ranks that trust each other."""
        if self._root(root, "broadcast_object") == self._rank:
            data = bytearray(pickle.dumps(value))
            self.broadcast(bytearray(len(data).to_bytes(8, "little")), root, timeout=timeout)
            self.broadcast(data, root, timeout=timeout)
            return value
        data = bytearray(int.from_bytes(self.broadcast(bytearray(8), root, timeout=timeout), "little"))
        return pickle.loads(self.broadcast(data, root, timeout=timeout))

    def scatter_object(self, values: Sequence[Any] | None = None, root: int = 0, *, timeout: Timeout = None) -> Any:
        """Returns entry i of the root's list on rank i. Pickles: for ranks that trust each other."""
        if self._root(root, "scatter_object") != self._rank:
            size = int.from_bytes(self.scatter(None, bytearray(8), root, timeout=timeout), "little")
            return pickle.loads(self.scatter(None, bytearray(size), root, timeout=timeout))
        if not isinstance(values, Sized) or len(values) != self._size:
            given = "nothing" if values is None else f"{len(values)} objects" if isinstance(values, Sized) else repr(values)
            raise ArgumentError(f"scatter_object: rank {root} is the root and gave {given}: pass one for each of {self._size} ranks")
        all_of_them = [pickle.dumps(value) for value in values]
        longest = max(len(data) for data in all_of_them)
        self.scatter(longest.to_bytes(8, "little") * self._size, root=root, timeout=timeout)
        self.scatter(b"".join(data.ljust(longest, b"\0") for data in all_of_them), root=root, timeout=timeout)
        return values[root]

    def send_object(self, value: Any, peer: int, *, timeout: Timeout = None) -> None:
        """Sends an object to ``recv_object`` of a rank. Pickles: for ranks that trust each other."""
        data = pickle.dumps(value)
        self.send(len(data).to_bytes(8, "little"), peer, timeout=timeout)
        self.send(data, peer, timeout=timeout)

    def recv_object(self, peer: int, *, timeout: Timeout = None) -> Any:
        """Receives an object of ``send_object``. Pickles: for ranks that trust each other."""
        size = int.from_bytes(self.recv(bytearray(8), peer, timeout=timeout), "little")
        return pickle.loads(self.recv(bytearray(size), peer, timeout=timeout))


def _eights(data: Any) -> list[bytes]:
    whole = bytes(data)
    return [whole[start : start + 8] for start in range(0, len(whole), 8)]


def _parts(data: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    parts, start = [], 0
    for size in sizes:
        parts.append(data[start : start + size])
        start += size
    return parts
