"""kolo's C ABI: its constants, types and functions, as kolo.h describes them.

`tests/test_abi.py` compares this file with the header.
"""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, POINTER, c_char, c_char_p, c_double, c_int32, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p

# The version of kolo.h that this file describes.
VERSION = (0, 1, 0)

OK = 0
ERR_ARGUMENT = 1
ERR_HANDLE = 2
ERR_UNSUPPORTED = 3
ERR_PEER = 4
ERR_MISMATCH = 5
ERR_COUNTS = 6
ERR_REVOKED = 7
ERR_ABORTED = 8
ERR_SETTING = 9
ERR_NO_LAUNCHER = 10
ERR_MISSING = 11
ERR_WORLD_SIZE = 12
ERR_RANK_TAKEN = 13
ERR_VERSION = 14
ERR_STORE = 15
ERR_OS = 16
ERR_INTERNAL = 17
IN_PROGRESS = 18
ERR_EXCLUDED = 19
ERR_REDUCER = 20
ERR_FORKED = 21
ERR_DEVICE = 22
ERR_NOT_GROWN = 23
ERR_NOT_ADMITTED = 24
ERR_NO_MEMORY = 25

# The names of KOLO_CAUSE_ and KOLO_OP_, by number.
CAUSES = (
    None,
    "closed",
    "died",
    "left",
    "silent",
    "broken",
    "unreachable",
    "secret",
    "revoked",
    "diverged",
    "corrupt",
    "absent",
    "stopped",
    "unresponsive",
    "gone",
    "aborted",
    "mismatch",
    "counts",
    "tls",
    "panicked",
    "failed",
    "shrinks",
)
OPS = (
    "all_reduce",
    "broadcast",
    "barrier",
    "reduce",
    "all_gather",
    "all_gather_v",
    "reduce_scatter",
    "reduce_scatter_v",
    "all_to_all",
    "all_to_all_v",
    "gather",
    "scatter",
    "send",
    "recv",
    "split",
    "mem_alloc",
    "connect",
    "grow",
)

INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, INT16, UINT16, BOOL, FLOAT8_E4M3, FLOAT8_E5M2 = range(15)
SUM, PROD, MAX, MIN, AVG, BAND, BOR, BXOR = range(8)

NO_COLOR = -1
CONFIG_VERSION = 1

Handle = Memory = Stream = c_void_p
Count = c_size_t
Counts = POINTER(c_size_t)
Type = Reduction = Rank = c_int32
Result = c_int32


class Error(ctypes.Structure):
    _fields_ = (
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
    )


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", c_uint8 * 128),)


class Config(ctypes.Structure):
    _fields_ = (
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
    )


StoreSet = CFUNCTYPE(c_int32, c_void_p, c_char_p, c_void_p, c_size_t, c_uint64)
StoreGet = CFUNCTYPE(c_int32, c_void_p, c_char_p, c_uint64, c_void_p)
StoreClaim = CFUNCTYPE(c_int32, c_void_p, c_char_p, c_void_p, c_size_t, c_uint64, c_void_p)
WaitCheck = CFUNCTYPE(c_int32, c_void_p)
DoneFunction = CFUNCTYPE(None, c_void_p, c_int32)


class Store(ctypes.Structure):
    _fields_ = (
        ("size", c_size_t),
        ("context", c_void_p),
        ("set", StoreSet),
        ("get", StoreGet),
        ("claim", StoreClaim),
        ("is_private", c_int32),
    )


class CommStats(ctypes.Structure):
    _fields_ = (
        ("size", c_size_t),
        ("device_whole", c_uint64),
        ("device_staged", c_uint64),
        ("device_in_place", c_uint64),
        ("device_through_areas", c_uint64),
        ("device_copied", c_uint64),
        ("device_one_shot", c_uint64),
    )


# The arguments of each operation. The blocking function has two more, a communicator and a stream;
# the one that starts the operation also has a pointer to a kolo_work_t.
OPERATIONS: dict[str, tuple[type, ...]] = {
    "all_reduce": (Memory, Memory, Count, Type, Reduction),
    "reduce": (Memory, Memory, Count, Type, Reduction, Rank),
    "broadcast": (Memory, Memory, Count, Type, Rank),
    "all_gather": (Memory, Memory, Count, Type),
    "all_gather_v": (Memory, Memory, Counts, Type),
    "reduce_scatter": (Memory, Memory, Count, Type, Reduction),
    "reduce_scatter_v": (Memory, Memory, Counts, Type, Reduction),
    "all_to_all": (Memory, Memory, Count, Type),
    "all_to_all_v": (Memory, Counts, Memory, Counts, Type),
    "gather": (Memory, Memory, Count, Type, Rank),
    "scatter": (Memory, Memory, Count, Type, Rank),
    "barrier": (),
    "send": (Memory, Count, Type, Rank),
    "recv": (Memory, Count, Type, Rank),
    "recv_any": (Memory, Count, Type, POINTER(Rank)),
}

# The result and the arguments of each other function.
FUNCTIONS: dict[str, tuple[type, ...]] = {
    "version": (c_uint32,),
    "check_version": (Result, c_uint32),
    "last_error": (Result, Handle, POINTER(Error)),
    "error_string": (c_char_p, Result),
    "call_timeout": (Result, c_uint64),
    "get_unique_id": (Result, POINTER(UniqueId)),
    "discard_unique_id": (Result, POINTER(UniqueId)),
    "store_reply": (Result, Handle, c_void_p, c_size_t),
    "comm_init_env": (Result, POINTER(Handle), POINTER(Config)),
    "comm_init_rank": (Result, POINTER(Handle), c_int32, UniqueId, Rank, POINTER(Config)),
    "comm_init_store": (Result, POINTER(Handle), c_int32, c_char_p, Rank, POINTER(Config)),
    "comm_init_callbacks": (Result, POINTER(Handle), c_int32, POINTER(Store), Rank, POINTER(Config)),
    "comm_init_all": (Result, POINTER(Handle), c_int32, POINTER(Config)),
    "comm_split": (Result, Handle, c_int32, c_int32, POINTER(Handle)),
    "comm_shrink": (Result, Handle, POINTER(Handle)),
    "comm_grow": (Result, Handle, POINTER(Handle)),
    "comm_abort": (Result, Handle),
    "comm_destroy": (Result, Handle),
    "comm_dump_trace": (Result, Handle, c_char_p),
    "comm_count": (Result, Handle, POINTER(c_int32)),
    "comm_rank": (Result, Handle, POINTER(Rank)),
    "comm_host_count": (Result, Handle, POINTER(c_int32)),
    "comm_transport": (Result, Handle, POINTER(c_char_p)),
    "comm_has_devices": (Result, Handle, POINTER(c_int32)),
    "comm_get_async_error": (Result, Handle, POINTER(Result)),
    "comm_stats": (Result, Handle, POINTER(CommStats)),
    "send_recv": (Result, Memory, Count, Rank, Memory, Count, Rank, Type, Handle, Stream),
    "work_wait": (Result, Handle),
    "work_wait_timeout": (Result, Handle, c_uint64),
    "work_wait_any": (Result, POINTER(Handle), c_size_t, POINTER(c_size_t), c_uint64),
    "work_on_done": (Result, Handle, DoneFunction, c_void_p),
    "work_wait_on": (Result, Handle, Stream),
    "work_test": (Result, Handle, POINTER(c_int32)),
    "work_duration": (Result, Handle, POINTER(c_uint64)),
    "work_cancel": (Result, Handle),
    "work_destroy": (Result, Handle),
    "set_wait_check": (Result, WaitCheck, c_void_p),
    "mem_alloc": (Result, POINTER(Memory), c_size_t, Handle),
    "mem_alloc_pooled": (Result, POINTER(Memory), c_size_t, Handle),
    "mem_free": (Result, Memory),
}
