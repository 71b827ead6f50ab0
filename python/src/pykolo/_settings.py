"""The settings of a communicator, as kolo_config_t has them."""

from __future__ import annotations

import ctypes
import os
from datetime import timedelta
from typing import Any, TypedDict

from . import _abi
from ._errors import ArgumentError


class Settings(TypedDict, total=False):
    """Settings by name. One that is not given comes from its ``KOLO_*`` variable. Times are in
    seconds.
    """

    timeout: float | timedelta
    start_timeout: float | timedelta
    reproducible: bool
    transport: str
    copy_mode: str
    algorithm: str
    job: str
    secret: str
    secret_file: str | os.PathLike[str]
    host: str
    interfaces: str
    sockets: int
    trace_signal: bool
    trace_dir: str | os.PathLike[str]
    network_latency_us: float
    network_gigabytes_per_s: float
    insecure: bool
    devices: bool
    device_path: str
    device_waits: str
    tls_ca: str | os.PathLike[str]
    tls_cert: str | os.PathLike[str]
    tls_key: str | os.PathLike[str]
    flag_layout: str
    wire_dtype: str
    top_dir: str | os.PathLike[str]
    metrics: str
    ports: str
    congestion_control: str
    join: bool
    topology: str
    rails: str


# Fields that are 1 or -1; 0 is not set.
_SWITCHES = ("reproducible", "trace_signal", "insecure", "devices", "join")
_FIELDS: dict[str, Any] = {field[0]: field[1] for field in _abi.Config._fields_ if field[0] not in ("size", "version")}


def milliseconds(given: float | timedelta, name: str) -> int:
    """A time of an argument, which is at least one millisecond."""
    seconds = given.total_seconds() if isinstance(given, timedelta) else given
    if not 0 < seconds < 1e12:
        raise ArgumentError(f"{name} is {given}: give a time in seconds, more than 0")
    return max(1, round(1000 * seconds))


def config_of(settings: dict[str, Any]) -> _abi.Config:
    config = _abi.Config(size=ctypes.sizeof(_abi.Config), version=_abi.CONFIG_VERSION)
    for name, value in settings.items():
        if value is None:
            continue
        if name in ("timeout", "start_timeout"):
            setattr(config, name + "_ms", milliseconds(value, name))
        elif name not in _FIELDS or name.endswith("timeout_ms"):
            known = ", ".join(sorted(Settings.__annotations__))
            raise ArgumentError(f"there is no setting {name}; the settings are {known}")
        elif name in _SWITCHES:
            setattr(config, name, 1 if value else -1)
        elif _FIELDS[name] is ctypes.c_char_p:
            setattr(config, name, os.fsencode(value))
        else:
            setattr(config, name, value)
    return config
