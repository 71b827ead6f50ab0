"""The errors of pykolo."""

from __future__ import annotations

import ctypes
from typing import Any

from . import _abi
from ._library import function
from ._signals import raised_by_handler

_last_error = function("last_error")
_error_string = function("error_string")

# The deadline has passed.
_CAUSES_OF_TIMEOUT = ("silent", "absent", "stopped", "unresponsive", "unmatched")


class KoloError(RuntimeError):
    """A call failed. The message says what happened, which rank is at fault, and what to do.

    ``rank``, ``host`` and ``pid`` are those of the rank at fault, ``cause`` is how it failed, such as
    ``"died"``, ``op`` and ``seq`` are the operation and its number in the communicator, and ``after``
    is the time that it had been running, in seconds. What is not known is None. ``usable``: whether
    the communicator can still be used. ``code`` is the result of the C function.
    """

    rank: int | None
    host: str | None
    pid: int | None
    op: str | None
    seq: int | None
    cause: str | None
    after: float | None
    usable: bool
    code: int

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.rank = fields.get("rank")
        self.host = fields.get("host")
        self.pid = fields.get("pid")
        self.op = fields.get("op")
        self.seq = fields.get("seq")
        self.cause = fields.get("cause")
        self.after = fields.get("after")
        self.usable = fields.get("usable", True)
        self.code = fields.get("code", 0)

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args, vars(self)


class ArgumentError(KoloError, ValueError):
    """An argument or a setting is wrong. Nothing was sent."""


class ClosedError(KoloError, ValueError):
    """The communicator is closed."""


class UnsupportedError(KoloError, NotImplementedError):
    """The request is not supported here."""


class PeerError(KoloError):
    """A rank failed, left, or did not take part."""


class DeadlineError(PeerError, TimeoutError):
    """A rank did not take part before the deadline."""


class MismatchError(KoloError):
    """Ranks made different calls."""


class StartError(KoloError):
    """The ranks did not connect."""


class StartDeadlineError(StartError, TimeoutError):
    """Ranks did not connect before the start deadline."""


class RevokedError(KoloError):
    """An earlier operation failed, which ended the communicator."""


class AbortedError(KoloError):
    """The communicator was aborted or closed."""


class ForkedError(KoloError):
    """This process was forked from the one that made the communicator."""


class OutOfMemoryError(KoloError, MemoryError):
    """A rank had no memory for what it was about to allocate."""


_KINDS: dict[int, type[KoloError]] = {
    _abi.ERR_ARGUMENT: ArgumentError,
    _abi.ERR_SETTING: ArgumentError,
    _abi.ERR_HANDLE: ClosedError,
    _abi.ERR_UNSUPPORTED: UnsupportedError,
    _abi.ERR_PEER: PeerError,
    _abi.ERR_MISMATCH: MismatchError,
    _abi.ERR_COUNTS: MismatchError,
    _abi.ERR_REVOKED: RevokedError,
    _abi.ERR_ABORTED: AbortedError,
    _abi.ERR_NO_LAUNCHER: StartError,
    _abi.ERR_MISSING: StartDeadlineError,
    _abi.ERR_WORLD_SIZE: StartError,
    _abi.ERR_RANK_TAKEN: StartError,
    _abi.ERR_VERSION: StartError,
    _abi.ERR_STORE: StartError,
    _abi.ERR_NOT_ADMITTED: StartError,
    _abi.ERR_FORKED: ForkedError,
    _abi.ERR_NO_MEMORY: OutOfMemoryError,
}


def error_of(result: int) -> BaseException:
    """The error of this thread's last call. If the call ended because a signal handler raised an
    exception, it is that one.
    """
    if raised := raised_by_handler():
        return raised
    kind = _KINDS.get(result, KoloError)
    error = _abi.Error(size=ctypes.sizeof(_abi.Error))
    if _last_error(None, error) != _abi.OK or error.code != result:
        message: bytes = _error_string(result)
        return kind(message.decode(errors="replace"), code=result)
    if result == _abi.ERR_HANDLE:
        return kind("the communicator is closed", code=result, usable=False)
    cause = _abi.CAUSES[error.cause] if 0 <= error.cause < len(_abi.CAUSES) else None
    if kind is PeerError and cause in _CAUSES_OF_TIMEOUT:
        kind = DeadlineError
    has_op = 0 <= error.op < len(_abi.OPS)
    return kind(
        error.message.decode(errors="replace"),
        code=result,
        usable=bool(error.usable),
        rank=error.rank if error.rank >= 0 else None,
        host=error.host.decode(errors="replace") or None,
        pid=error.pid or None,
        op=_abi.OPS[error.op] if has_op else None,
        seq=error.seq if has_op else None,
        cause=cause,
        after=error.after_us / 1e6 if error.after_us else None,
    )


def check(result: int) -> None:
    """Raises the error of this thread's last call, unless it succeeded."""
    if result:
        raise error_of(result)
