"""kolo's shared library: its functions, types and constants, as kolo.h describes them."""

import ctypes
import sys
from ctypes import CFUNCTYPE, POINTER, c_char, c_char_p, c_double, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import NamedTuple

OK = 0
ERR_ARGUMENT = 1
ERR_HANDLE = 2
ERR_UNSUPPORTED = 3
ERR_PEER = 4
ERR_ABORTED = 8
ERR_SETTING = 9
ERR_STORE = 15
IN_PROGRESS = 18
ERR_FORKED = 21

# Results that are no failure of the group. This rank has ended it itself if it is aborted.
GROUP_GOES_ON = (OK, IN_PROGRESS, ERR_ARGUMENT, ERR_HANDLE, ERR_SETTING, ERR_UNSUPPORTED, ERR_ABORTED, ERR_FORKED)

# Silent, absent, stopped, unresponsive, unmatched: the deadline has passed.
CAUSES_OF_TIMEOUT = (4, 11, 12, 13, 22)

INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, INT16, UINT16, BOOL, FLOAT8_E4M3, FLOAT8_E5M2 = range(15)
SUM, PROD, MAX, MIN, AVG, BAND, BOR, BXOR = range(8)

# The version of kolo.h that this file describes.
VERSION = (0, 1)
NAMES = {"linux": "libkolo.so", "darwin": "libkolo.dylib", "win32": "kolo.dll"}


class Error(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("code", c_int32),
        ("usable", c_int32),
        ("rank", c_int32),
        ("cause", c_int32),
        ("op", c_int32),
        ("pid", c_uint32),
        ("seq", c_uint64),
        ("after_us", c_uint64),
        ("host", c_char * 256),
        ("message", c_char * 2048),
    ]


class Config(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("version", c_uint32),
        ("reproducible", c_int32),
        ("timeout_ms", c_uint64),
        ("start_timeout_ms", c_uint64),
        ("transport", c_char_p),
        ("copy_mode", c_char_p),
        ("algorithm", c_char_p),
        ("job", c_char_p),
        ("secret", c_char_p),
        ("host", c_char_p),
        ("interfaces", c_char_p),
        ("sockets", c_uint32),
        ("trace_signal", c_int32),
        ("network_latency_us", c_double),
        ("network_gigabytes_per_s", c_double),
        ("trace_dir", c_char_p),
        ("insecure", c_int32),
        ("devices", c_int32),
        ("device_path", c_char_p),
        ("secret_file", c_char_p),
        ("tls_ca", c_char_p),
        ("tls_cert", c_char_p),
        ("tls_key", c_char_p),
        ("flag_layout", c_char_p),
        ("device_waits", c_char_p),
        ("wire_dtype", c_char_p),
        ("top_dir", c_char_p),
        ("metrics", c_char_p),
        ("ports", c_char_p),
        ("congestion_control", c_char_p),
        ("join", c_int32),
        ("topology", c_char_p),
        ("rails", c_char_p),
    ]


CONFIG_VERSION = 1


class CommStats(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("device_whole", c_uint64),
        ("device_staged", c_uint64),
        ("device_in_place", c_uint64),
        ("device_through_areas", c_uint64),
        ("device_copied", c_uint64),
        ("device_one_shot", c_uint64),
    ]


StoreSet = CFUNCTYPE(c_int32, c_void_p, c_char_p, c_void_p, c_size_t, c_uint64)
StoreGet = CFUNCTYPE(c_int32, c_void_p, c_char_p, c_uint64, c_void_p)
StoreClaim = CFUNCTYPE(c_int32, c_void_p, c_char_p, c_void_p, c_size_t, c_uint64, c_void_p)


WaitCheck = CFUNCTYPE(c_int32, c_void_p)


class Store(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("context", c_void_p),
        ("set", StoreSet),
        ("get", StoreGet),
        ("claim", StoreClaim),
        ("is_private", c_int32),
    ]


class Operation(NamedTuple):
    """The two functions of an operation: one returns when it has ended, the other starts it."""

    now: object
    start: object


def _load():
    path = Path(__file__).resolve().parent.parent / NAMES.get(sys.platform, "libkolo.so")
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(f"torch_kolo cannot load kolo's library, {path}: {error}") from error
    loaded.kolo_version.restype = c_uint32
    version = loaded.kolo_version()
    if (version // 10000, version // 100 % 100) != VERSION:
        raise ImportError(
            f"{path} is kolo {version // 10000}.{version // 100 % 100}, and torch_kolo needs {VERSION[0]}.{VERSION[1]}: install it again"
        )
    return loaded


_library = _load()


def _function(name, *arguments, returns=c_int32):
    function = getattr(_library, "kolo_" + name)
    function.argtypes = arguments
    function.restype = returns
    return function


def _operation(name, *arguments):
    now = _function(name, *arguments, Handle, Stream)
    return Operation(now, _function("start_" + name, *arguments, Handle, Stream, POINTER(Handle)))


Handle = Memory = Stream = c_void_p
Count = c_size_t
Counts = POINTER(c_size_t)
Type = Reduction = Rank = c_int32

all_reduce = _operation("all_reduce", Memory, Memory, Count, Type, Reduction)
reduce = _operation("reduce", Memory, Memory, Count, Type, Reduction, Rank)
broadcast = _operation("broadcast", Memory, Memory, Count, Type, Rank)
all_gather = _operation("all_gather", Memory, Memory, Count, Type)
all_gather_v = _operation("all_gather_v", Memory, Memory, Counts, Type)
reduce_scatter = _operation("reduce_scatter", Memory, Memory, Count, Type, Reduction)
reduce_scatter_v = _operation("reduce_scatter_v", Memory, Memory, Counts, Type, Reduction)
all_to_all = _operation("all_to_all", Memory, Memory, Count, Type)
all_to_all_v = _operation("all_to_all_v", Memory, Counts, Memory, Counts, Type)
gather = _operation("gather", Memory, Memory, Count, Type, Rank)
scatter = _operation("scatter", Memory, Memory, Count, Type, Rank)
barrier = _operation("barrier")
send = _operation("send", Memory, Count, Type, Rank)
recv = _operation("recv", Memory, Count, Type, Rank)
send_tagged = _operation("send_tagged", Memory, Count, Type, Rank, c_uint32)
recv_tagged = _operation("recv_tagged", Memory, Count, Type, Rank, c_uint32)
recv_any_tagged = _operation("recv_any_tagged", Memory, Count, Type, POINTER(c_int32), c_uint32)

last_error = _function("last_error", Handle, POINTER(Error))
error_string = _function("error_string", c_int32, returns=c_char_p)
call_timeout = _function("call_timeout", c_uint64)
set_wait_check = _function("set_wait_check", WaitCheck, c_void_p)
store_reply = _function("store_reply", Handle, c_char_p, c_size_t)

comm_init_callbacks = _function("comm_init_callbacks", POINTER(Handle), c_int32, POINTER(Store), Rank, POINTER(Config))
comm_split = _function("comm_split", Handle, c_int32, c_int32, POINTER(Handle))
comm_shrink = _function("comm_shrink", Handle, POINTER(Handle))
comm_grow = _function("comm_grow", Handle, POINTER(Handle))
comm_abort = _function("comm_abort", Handle)
comm_destroy = _function("comm_destroy", Handle)
comm_count = _function("comm_count", Handle, POINTER(c_int32))
comm_rank = _function("comm_rank", Handle, POINTER(Rank))
comm_transport = _function("comm_transport", Handle, POINTER(c_char_p))
comm_stats = _function("comm_stats", Handle, POINTER(CommStats))
comm_has_devices = _function("comm_has_devices", Handle, POINTER(c_int32))
comm_get_async_error = _function("comm_get_async_error", Handle, POINTER(c_int32))

work_wait = _function("work_wait", Handle)
work_wait_timeout = _function("work_wait_timeout", Handle, c_uint64)
work_wait_on = _function("work_wait_on", Handle, Stream)
work_test = _function("work_test", Handle, POINTER(c_int32))
work_duration = _function("work_duration", Handle, POINTER(c_uint64))
work_cancel = _function("work_cancel", Handle)
work_destroy = _function("work_destroy", Handle)

mem_alloc_pooled = _function("mem_alloc_pooled", POINTER(Memory), c_size_t, Handle)
mem_free = _function("mem_free", Memory)
