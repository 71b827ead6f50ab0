"""The short way of operations: `_fast`, a module in C, which Communicator puts before `Operations`.

A Python that cannot load it, such as one without the interpreter's lock, takes the long way.
"""

from __future__ import annotations

import array
import ctypes
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ._errors import check
from ._library import unconverted
from ._operations import Operations

NAMES = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "barrier", "send", "recv", "send_recv")


class Long:
    """The base of Communicator without `_fast`."""

    __slots__ = ()

    def _bind(self, handle: int, rank: int, world_size: int) -> None:
        """Sets what the short way needs: the handle, or 0 if there is none."""


def _address(name: str) -> int:
    pointer: Any = unconverted(name)
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0


def _documentation(method: Callable[..., object]) -> bytes:
    """As `inspect` and `help` read it of a method in C."""
    signature = inspect.signature(method)
    bare = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    text = signature.replace(parameters=bare, return_annotation=signature.empty)
    return f"{method.__name__}{text}\n--\n\n{inspect.getdoc(method)}".replace("(self", "($self", 1).encode()


def _base() -> type[Long]:
    try:
        from . import _fast
    except ImportError:
        return Long
    methods = {name: getattr(Operations, name) for name in NAMES}
    documentation = {name: _documentation(method) for name, method in methods.items()}
    return _fast.make({name: _address(name) for name in NAMES}, methods, documentation, check, array.array)


if TYPE_CHECKING:
    Fast = Long
else:
    Fast = _base()
