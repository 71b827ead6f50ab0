"""The settings of a communicator, as kolo_config_t has them."""

from __future__ import annotations

import ctypes
import math
import numbers
import operator
import os
from datetime import timedelta
from typing import Any

from . import _abi
from ._errors import ArgumentError

# The field of each setting, with its type.
_FIELDS: dict[str, tuple[str, Any]] = {
    field[0].removesuffix("_ms"): (field[0], field[1]) for field in _abi.Config._fields_ if field[0] not in ("size", "version")
}
# The limits of numbers, where they are not 1 and the most of the type.
_RANGES = {"sockets": (1, 64), "wire_seed": (0, 2**32 - 1)}


def milliseconds(given: float | timedelta, name: str, least: int = 1) -> int:
    """A time of an argument, which is at least so long."""
    seconds = given.total_seconds() if isinstance(given, timedelta) else given
    try:
        # The milliseconds of a number of numpy may be out of the range of its type.
        seconds = float(seconds) if isinstance(seconds, numbers.Real) else math.nan
    except (OverflowError, TypeError):
        # Of an integer, or of numpy's durations, which count as integers.
        seconds = math.nan
    if not (0 < seconds < 1e12 or seconds == least == 0):
        raise ArgumentError(f"{name} is {given!r}: give a time in seconds, {'more than 0' if least else '0 or more'}")
    return max(least, round(1000 * seconds))


def index(given: Any, name: str) -> int:
    """A number of an argument, which may be of numpy."""
    try:
        return operator.index(given)
    except TypeError:
        raise ArgumentError(f"{name} is {given!r}: give an integer") from None


def integer(given: int, name: str, least: int, most: int = 2**31 - 1) -> int:
    """A number of an argument. C would cut it to 32 bits."""
    number = index(given, name)
    if not least <= number <= most:
        raise ArgumentError(f"{name} is {number}: give {least} to {most}")
    return number


def positive(given: float, name: str) -> float:
    """A number of an argument that may have a fraction."""
    if not isinstance(given, numbers.Real) or not 0 < given < math.inf:
        raise ArgumentError(f"{name} is {given!r}: give a finite number above 0")
    return given


def text(given: str | os.PathLike[str], name: str) -> bytes:
    """A text or a path of an argument, as C has it."""
    try:
        encoded = os.fsencode(given)
    except TypeError:
        raise ArgumentError(f"{name} is {given!r}: give a text") from None
    if b"\0" in encoded:
        raise ArgumentError(f"{name} is {given!r}: it has a NUL, where a text ends in C")
    return encoded


def config_of(settings: dict[str, Any]) -> _abi.Config:
    config = _abi.Config(size=ctypes.sizeof(_abi.Config), version=_abi.CONFIG_VERSION)
    for name, value in settings.items():
        if name not in _FIELDS:
            raise ArgumentError(f"there is no setting {name}; the settings are {', '.join(sorted(_FIELDS))}")
        if value is None:
            continue
        field, kind = _FIELDS[name]
        # 0 and NULL are not set.
        if field.endswith("_ms"):
            value = milliseconds(value, name)
        elif kind is ctypes.c_int32:
            if value not in (False, True):
                raise ArgumentError(f"{name} is {value!r}: give True or False")
            value = 1 if value else -1
        elif kind is ctypes.c_char_p:
            value = text(value, name)
        elif kind is ctypes.c_double:
            value = positive(value, name)
        elif kind is ctypes.c_uint32:
            value = integer(value, name, *_RANGES.get(name, (1, 2**32 - 1)))
        setattr(config, field, value)
    return config
