"""The shared library of this package, and its functions."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import _abi

PREFIX = Path(__file__).resolve().parent
ABI = ".".join(map(str, _abi.VERSION[:2]))
REMEDY = "do not set KOLO_LIBRARY" if os.environ.get("KOLO_LIBRARY") else "install pykolo again"
FILES = {"darwin": f"lib/libkolo.{ABI}.dylib", "win32": "bin/kolo.dll"}


def _load() -> ctypes.CDLL:
    path = os.environ.get("KOLO_LIBRARY") or str(PREFIX / FILES.get(sys.platform, f"lib/libkolo.so.{ABI}"))
    try:
        loaded = ctypes.CDLL(path)
    except OSError as error:
        why = str(error).removeprefix(f"{path}: ")
        raise ImportError(f"pykolo cannot load kolo's library, {path}: {why}; {REMEDY}") from error
    major, minor, patch = _abi.VERSION

    def need(*names: str) -> None:
        for name in names:
            if not hasattr(loaded, "kolo_" + name):
                raise ImportError(f"{path} has no function kolo_{name}: it is older than pykolo, or not kolo's library; {REMEDY}")

    need("version", "check_version")
    loaded.kolo_version.restype = ctypes.c_uint32
    if loaded.kolo_check_version(ctypes.c_uint32(10000 * major + 100 * minor + patch)) != _abi.OK:
        found = loaded.kolo_version()
        raise ImportError(f"{path} is kolo {found // 10000}.{found // 100 % 100}, and pykolo needs {major}.{minor}; {REMEDY}")
    need(*_abi.FUNCTIONS)
    return loaded


_loaded = _load()


def function(name: str) -> Callable[..., Any]:
    """A function whose arguments ctypes converts."""
    returns, *arguments = _abi.FUNCTIONS[name]
    found = _loaded["kolo_" + name]
    found.restype, found.argtypes = returns, arguments
    return found


def unconverted(name: str) -> Callable[..., int]:
    """A function whose arguments the caller converts: that takes a third of the time.

    An int is a C int, None is NULL, and a count or a pointer is an object of ctypes.
    """
    found = _loaded["kolo_" + name]
    found.restype = ctypes.c_int32
    return found
