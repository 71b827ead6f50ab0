"""kolo's C ABI: what kolo.h says, for ctypes.

Generated: do not change it. After a change of the header: KOLO_WRITE_HEADER=1 cargo test --test header
"""

from __future__ import annotations

import os
from ctypes import CFUNCTYPE, POINTER, Structure, c_char, c_char_p, c_double, c_int32, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from datetime import timedelta
from typing import Any, TypedDict

VERSION = (0, 1, 0)

CONFIG_VERSION = 1
NO_COLOR = -1
REDUCER_CONFIG_VERSION = 1
SYNC_AVERAGE = -1
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
ERR_EXCLUDED = 19
ERR_FORKED = 21
ERR_DEVICE = 22
ERR_NOT_GROWN = 23
ERR_NOT_ADMITTED = 24
ERR_NO_MEMORY = 25
IN_PROGRESS = 18
ERR_REDUCER = 20
INT8 = 0
UINT8 = 1
INT32 = 2
UINT32 = 3
INT64 = 4
UINT64 = 5
FLOAT16 = 6
FLOAT32 = 7
FLOAT64 = 8
BFLOAT16 = 9
INT16 = 10
UINT16 = 11
BOOL = 12
FLOAT8_E4M3 = 13
FLOAT8_E5M2 = 14
SUM = 0
PROD = 1
MAX = 2
MIN = 3
AVG = 4
BAND = 5
BOR = 6
BXOR = 7
UNUSED_ERROR = 0
UNUSED_FIND = 1
UNUSED_STATIC = 2
UNEVEN_NO = 0
UNEVEN_BY_ALL = 1
UNEVEN_BY_ACTIVE = 2
HOOK_AVERAGE = 0
HOOK_FLOAT16 = 1
HOOK_BFLOAT16 = 2
HOOK_POWER_SGD = 3
HOOK_LOCAL_SGD = 4
HOOK_CUSTOM = 5
HOOK_ERROR_FEEDBACK = 6

# The names of KOLO_CAUSE_, by number.
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
    "unmatched",
)

# The names of KOLO_OP_, by number.
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


class Error(Structure):
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


class UniqueId(Structure):
    _fields_ = (
        ("internal", c_uint8 * 128),
    )


class Config(Structure):
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
        ("wire_seed", c_uint32),
    )

StoreSet = CFUNCTYPE(c_int32, c_void_p, c_char_p, c_void_p, c_size_t, c_uint64)

StoreGet = CFUNCTYPE(c_int32, c_void_p, c_char_p, c_uint64, c_void_p)

StoreClaim = CFUNCTYPE(c_int32, c_void_p, c_char_p, c_void_p, c_size_t, c_uint64, c_void_p)


class Store(Structure):
    _fields_ = (
        ("size", c_size_t),
        ("context", c_void_p),
        ("set", StoreSet),
        ("get", StoreGet),
        ("claim", StoreClaim),
        ("is_private", c_int32),
    )


class CommStats(Structure):
    _fields_ = (
        ("size", c_size_t),
        ("device_whole", c_uint64),
        ("device_staged", c_uint64),
        ("device_in_place", c_uint64),
        ("device_through_areas", c_uint64),
        ("device_copied", c_uint64),
        ("device_one_shot", c_uint64),
    )

DoneFunction = CFUNCTYPE(None, c_void_p, c_int32)

WaitCheck = CFUNCTYPE(c_int32, c_void_p)


class Tensor(Structure):
    _fields_ = (
        ("name", c_char_p),
        ("shape", POINTER(c_size_t)),
        ("ndim", c_size_t),
        ("dtype", c_int32),
        ("on_device", c_int32),
    )


class Bucket(Structure):
    _fields_ = (
        ("index", c_size_t),
        ("step", c_uint64),
        ("data", c_void_p),
        ("count", c_size_t),
        ("dtype", c_int32),
        ("on_device", c_int32),
    )

HookFunction = CFUNCTYPE(c_int32, c_void_p, POINTER(Bucket))


class ReducerConfig(Structure):
    _fields_ = (
        ("size", c_size_t),
        ("version", c_uint32),
        ("unused", c_int32),
        ("uneven", c_int32),
        ("no_overlap", c_int32),
        ("no_rebuild", c_int32),
        ("hook", c_int32),
        ("bucket_bytes", c_size_t),
        ("first_bucket_bytes", c_size_t),
        ("hook_start_after", c_uint64),
        ("hook_rank", c_uint32),
        ("device", c_int32),
        ("hook_function", HookFunction),
        ("hook_context", c_void_p),
        ("stream", c_void_p),
    )


class StepStats(Structure):
    _fields_ = (
        ("size", c_size_t),
        ("buckets", c_size_t),
        ("bytes", c_uint64),
        ("computed_us", c_uint64),
        ("waited_us", c_uint64),
        ("communicated_us", c_uint64),
        ("overlapped_us", c_uint64),
    )


class BucketStats(Structure):
    _fields_ = (
        ("size", c_size_t),
        ("bytes", c_uint64),
        ("parameters", c_size_t),
        ("ready_us", c_uint64),
        ("started_us", c_uint64),
        ("ended_us", c_uint64),
        ("dtype", c_int32),
    )


class Settings(TypedDict, total=False):
    """Settings by name. One that is not given comes from its ``KOLO_*`` variable. Times are in
    seconds.
    """

    reproducible: bool
    """True: reductions have the same bits whatever the transport, layout and size. False: they
    need not. All ranks use rank 0's value.
    """

    timeout: float | timedelta
    """The timeout of one operation, in seconds. Default: 5 minutes."""

    start_timeout: float | timedelta
    """How long ranks wait for each other when they connect, in seconds. Default: 30 seconds."""

    transport: str | os.PathLike[str]
    """``auto``, ``tcp`` or ``shm``. All ranks use rank 0's value."""

    copy_mode: str | os.PathLike[str]
    """How large private buffers and messages are copied between processes: ``auto``, ``staged``,
    ``streamed`` or ``cma`` (messages as with ``auto``). All ranks use rank 0's value.
    """

    algorithm: str | os.PathLike[str]
    """The algorithm for all operations that have it, such as ``ring``. All ranks use rank 0's
    value.
    """

    job: str | os.PathLike[str]
    """The name of the job. It distinguishes jobs that use the same store."""

    secret: str | os.PathLike[str]
    """The secret of the job: 64 hexadecimal digits, the same on all ranks."""

    host: str | os.PathLike[str]
    """The name of this rank's host. Ranks with different names do not share memory."""

    interfaces: str | os.PathLike[str]
    """The network interfaces or addresses that may be used, as in ``eth``, ``=eth0``,
    ``^lo,docker``, ``10.0.0.0/8``.
    """

    sockets: int
    """The number of TCP connections of one link, 1 to 64. All ranks use rank 0's value."""

    trace_signal: bool
    """True: kolo handles SIGUSR1, which makes a rank write its last operations to ``trace_dir``.
    False: it does not.
    """

    network_latency_us: float
    """Latency between hosts in microseconds, for choosing algorithms. Set both this and
    ``network_gigabytes_per_s``. All ranks use rank 0's values.
    """

    network_gigabytes_per_s: float
    """Rate of one host's network interface in gigabytes per second, for choosing algorithms."""

    trace_dir: str | os.PathLike[str]
    """A folder to which a rank writes its last operations when one of them fails, for ``kolo
    trace``.
    """

    insecure: bool
    """True: a tcp:// store accepts other machines even without a secret: any process that reaches
    it can join or disturb the job. False: it does not.
    """

    devices: bool
    """True: buffers may be in the memory of GPUs. False: they may not. None: they may if the
    machine has a driver. All ranks use rank 0's value. Every rank's kolo needs the feature
    ``cuda``.
    """

    device_path: str | os.PathLike[str]
    """How data moves between the memory of GPUs: ``auto`` or ``staged``. All ranks use rank 0's
    value.
    """

    secret_file: str | os.PathLike[str]
    """A file with the secret as 64 hexadecimal digits. The file belongs to the user of the
    process, and no other user may open it. ``secret`` takes precedence.
    """

    tls_ca: str | os.PathLike[str]
    """PEM files for encrypted links between hosts, all three or none: the certificate of the job's
    authority, this rank's certificate, which the authority has signed for the name ``kolo``, and
    its private key.
    """

    tls_cert: str | os.PathLike[str]

    tls_key: str | os.PathLike[str]

    flag_layout: str | os.PathLike[str]
    """How ranks of a host learn that all have reached a phase: ``auto``, ``flat`` or
    ``hierarchy``. All ranks use rank 0's value.
    """

    device_waits: str | os.PathLike[str]
    """Where ranks that each have a GPU of their own wait for each other, in a large operation on
    buffers that are open to all of them: ``kernels`` or ``host``. All ranks use rank 0's value.
    """

    wire_dtype: str | os.PathLike[str]
    """How elements of messages between hosts are written, in sums and averages of 16 KiB or more:
    ``f32`` as in the buffers, those of f32 as ``bf16`` or ``f16``, or those of f32, f16 and bf16
    in 8 bits, as ``int8`` or ``f8e4m3``. All ranks use rank 0's value.
    """

    top_dir: str | os.PathLike[str]
    """A folder where the lowest rank of each machine writes a file by which ``kolo top`` finds the
    job. Only its user can open the file, which holds the secret of the job.
    """

    metrics: str | os.PathLike[str]
    """Where this rank serves metrics as Prometheus text: ``127.0.0.1:9400``, whose port is that of
    the first rank of a machine, or ``unix:/run/kolo-{rank}.sock``.
    """

    ports: str | os.PathLike[str]
    """The ports at which this process listens, for firewalls, as in ``20000-20100``. All ranks
    have the same range, with one port for every rank of a host and one more for the store, or two
    for every rank if the job grows.
    """

    congestion_control: str | os.PathLike[str]
    """The congestion control of this rank's TCP connections, for what it sends: ``auto``,
    ``system``, or a name that the system knows, such as ``cubic``.
    """

    join: bool
    """True: this process joins a job that has started, as a further rank, when the ranks of the
    job call ``grow``. It has no rank and no number of ranks: connect with ``from_env``. False: it
    does not.
    """

    topology: str | os.PathLike[str]
    """Where this rank's host is in the network: a path such as ``rack7`` or ``pod1/rack7``."""

    rails: str | os.PathLike[str]
    """The network interfaces over which links to other hosts are striped, as in ``eth0,eth1``. A
    link goes on if one of them fails.
    """

    wire_seed: int
    """The seed with which messages of 8 bits are rounded at random. None: to the nearest. All
    ranks use rank 0's value.
    """


# The result and the arguments of each function.
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "version": (c_uint32,),
    "check_version": (c_int32, c_uint32),
    "last_error": (c_int32, c_void_p, POINTER(Error)),
    "error_string": (c_char_p, c_int32),
    "dtype_size": (c_int32, c_int32, POINTER(c_size_t)),
    "call_timeout": (c_int32, c_uint64),
    "get_unique_id": (c_int32, POINTER(UniqueId)),
    "discard_unique_id": (c_int32, POINTER(UniqueId)),
    "store_reply": (c_int32, c_void_p, c_void_p, c_size_t),
    "comm_init_env": (c_int32, POINTER(c_void_p), POINTER(Config)),
    "comm_init_rank": (c_int32, POINTER(c_void_p), c_int32, UniqueId, c_int32, POINTER(Config)),
    "comm_init_store": (c_int32, POINTER(c_void_p), c_int32, c_char_p, c_int32, POINTER(Config)),
    "comm_init_callbacks": (c_int32, POINTER(c_void_p), c_int32, POINTER(Store), c_int32, POINTER(Config)),
    "comm_init_all": (c_int32, POINTER(c_void_p), c_int32, POINTER(Config)),
    "comm_split": (c_int32, c_void_p, c_int32, c_int32, POINTER(c_void_p)),
    "comm_shrink": (c_int32, c_void_p, POINTER(c_void_p)),
    "comm_grow": (c_int32, c_void_p, POINTER(c_void_p)),
    "comm_abort": (c_int32, c_void_p),
    "comm_destroy": (c_int32, c_void_p),
    "comm_dump_trace": (c_int32, c_void_p, c_char_p),
    "comm_count": (c_int32, c_void_p, POINTER(c_int32)),
    "comm_rank": (c_int32, c_void_p, POINTER(c_int32)),
    "comm_host_count": (c_int32, c_void_p, POINTER(c_int32)),
    "comm_transport": (c_int32, c_void_p, POINTER(c_char_p)),
    "comm_has_devices": (c_int32, c_void_p, POINTER(c_int32)),
    "comm_get_async_error": (c_int32, c_void_p, POINTER(c_int32)),
    "comm_stats": (c_int32, c_void_p, POINTER(CommStats)),
    "all_reduce": (c_int32, c_void_p, c_void_p, c_size_t, c_int32, c_int32, c_void_p, c_void_p),
    "reduce": (c_int32, c_void_p, c_void_p, c_size_t, c_int32, c_int32, c_int32, c_void_p, c_void_p),
    "broadcast": (c_int32, c_void_p, c_void_p, c_size_t, c_int32, c_int32, c_void_p, c_void_p),
    "all_gather": (c_int32, c_void_p, c_void_p, c_size_t, c_int32, c_void_p, c_void_p),
    "all_gather_v": (c_int32, c_void_p, c_void_p, POINTER(c_size_t), c_int32, c_void_p, c_void_p),
    "reduce_scatter": (c_int32, c_void_p, c_void_p, c_size_t, c_int32, c_int32, c_void_p, c_void_p),
    "reduce_scatter_v": (c_int32, c_void_p, c_void_p, POINTER(c_size_t), c_int32, c_int32, c_void_p, c_void_p),
    "all_to_all": (c_int32, c_void_p, c_void_p, c_size_t, c_int32, c_void_p, c_void_p),
    "all_to_all_v": (c_int32, c_void_p, POINTER(c_size_t), c_void_p, POINTER(c_size_t), c_int32, c_void_p, c_void_p),
    "gather": (c_int32, c_void_p, c_void_p, c_size_t, c_int32, c_int32, c_void_p, c_void_p),
    "scatter": (c_int32, c_void_p, c_void_p, c_size_t, c_int32, c_int32, c_void_p, c_void_p),
    "barrier": (c_int32, c_void_p, c_void_p),
    "send": (c_int32, c_void_p, c_size_t, c_int32, c_int32, c_void_p, c_void_p),
    "recv": (c_int32, c_void_p, c_size_t, c_int32, c_int32, c_void_p, c_void_p),
    "send_tagged": (c_int32, c_void_p, c_size_t, c_int32, c_int32, c_uint32, c_void_p, c_void_p),
    "recv_tagged": (c_int32, c_void_p, c_size_t, c_int32, c_int32, c_uint32, c_void_p, c_void_p),
    "recv_any": (c_int32, c_void_p, c_size_t, c_int32, POINTER(c_int32), c_void_p, c_void_p),
    "recv_any_tagged": (c_int32, c_void_p, c_size_t, c_int32, POINTER(c_int32), c_uint32, c_void_p, c_void_p),
    "send_recv": (c_int32, c_void_p, c_size_t, c_int32, c_void_p, c_size_t, c_int32, c_int32, c_void_p, c_void_p),
    "work_wait": (c_int32, c_void_p),
    "work_wait_timeout": (c_int32, c_void_p, c_uint64),
    "work_wait_any": (c_int32, POINTER(c_void_p), c_size_t, POINTER(c_size_t), c_uint64),
    "work_on_done": (c_int32, c_void_p, DoneFunction, c_void_p),
    "work_wait_on": (c_int32, c_void_p, c_void_p),
    "work_test": (c_int32, c_void_p, POINTER(c_int32)),
    "work_duration": (c_int32, c_void_p, POINTER(c_uint64)),
    "work_cancel": (c_int32, c_void_p),
    "work_destroy": (c_int32, c_void_p),
    "start_all_reduce": (c_int32, c_void_p, c_void_p, c_size_t, c_int32, c_int32, c_void_p, c_void_p, POINTER(c_void_p)),
    "start_reduce": (c_int32, c_void_p, c_void_p, c_size_t, c_int32, c_int32, c_int32, c_void_p, c_void_p, POINTER(c_void_p)),
    "start_broadcast": (c_int32, c_void_p, c_void_p, c_size_t, c_int32, c_int32, c_void_p, c_void_p, POINTER(c_void_p)),
    "start_all_gather": (c_int32, c_void_p, c_void_p, c_size_t, c_int32, c_void_p, c_void_p, POINTER(c_void_p)),
    "start_all_gather_v": (c_int32, c_void_p, c_void_p, POINTER(c_size_t), c_int32, c_void_p, c_void_p, POINTER(c_void_p)),
    "start_reduce_scatter": (c_int32, c_void_p, c_void_p, c_size_t, c_int32, c_int32, c_void_p, c_void_p, POINTER(c_void_p)),
    "start_reduce_scatter_v": (c_int32, c_void_p, c_void_p, POINTER(c_size_t), c_int32, c_int32, c_void_p, c_void_p, POINTER(c_void_p)),
    "start_all_to_all": (c_int32, c_void_p, c_void_p, c_size_t, c_int32, c_void_p, c_void_p, POINTER(c_void_p)),
    "start_all_to_all_v": (c_int32, c_void_p, POINTER(c_size_t), c_void_p, POINTER(c_size_t), c_int32, c_void_p, c_void_p, POINTER(c_void_p)),
    "start_gather": (c_int32, c_void_p, c_void_p, c_size_t, c_int32, c_int32, c_void_p, c_void_p, POINTER(c_void_p)),
    "start_scatter": (c_int32, c_void_p, c_void_p, c_size_t, c_int32, c_int32, c_void_p, c_void_p, POINTER(c_void_p)),
    "start_barrier": (c_int32, c_void_p, c_void_p, POINTER(c_void_p)),
    "start_send": (c_int32, c_void_p, c_size_t, c_int32, c_int32, c_void_p, c_void_p, POINTER(c_void_p)),
    "start_recv": (c_int32, c_void_p, c_size_t, c_int32, c_int32, c_void_p, c_void_p, POINTER(c_void_p)),
    "start_send_tagged": (c_int32, c_void_p, c_size_t, c_int32, c_int32, c_uint32, c_void_p, c_void_p, POINTER(c_void_p)),
    "start_recv_tagged": (c_int32, c_void_p, c_size_t, c_int32, c_int32, c_uint32, c_void_p, c_void_p, POINTER(c_void_p)),
    "start_recv_any": (c_int32, c_void_p, c_size_t, c_int32, POINTER(c_int32), c_void_p, c_void_p, POINTER(c_void_p)),
    "start_recv_any_tagged": (c_int32, c_void_p, c_size_t, c_int32, POINTER(c_int32), c_uint32, c_void_p, c_void_p, POINTER(c_void_p)),
    "set_wait_check": (c_int32, WaitCheck, c_void_p),
    "group_start": (c_int32,),
    "group_end": (c_int32,),
    "mem_alloc": (c_int32, POINTER(c_void_p), c_size_t, c_void_p),
    "mem_alloc_pooled": (c_int32, POINTER(c_void_p), c_size_t, c_void_p),
    "mem_free": (c_int32, c_void_p),
    "reducer_create": (c_int32, POINTER(c_void_p), POINTER(Tensor), c_size_t, POINTER(Tensor), c_size_t, POINTER(ReducerConfig), c_void_p),
    "reducer_destroy": (c_int32, c_void_p),
    "reducer_begin": (c_int32, c_void_p),
    "reducer_accumulate": (c_int32, c_void_p),
    "reducer_gradient": (c_int32, c_void_p, c_size_t, POINTER(c_void_p), POINTER(c_int32)),
    "reducer_ready": (c_int32, c_void_p, c_size_t),
    "reducer_unused": (c_int32, c_void_p, c_size_t),
    "reducer_put": (c_int32, c_void_p, c_size_t, c_void_p, POINTER(c_size_t)),
    "reducer_finish": (c_int32, c_void_p),
    "reducer_join": (c_int32, c_void_p, POINTER(c_int32)),
    "reducer_last": (c_int32, c_void_p, POINTER(c_int32)),
    "reducer_broadcast_parameters": (c_int32, c_void_p, POINTER(c_void_p)),
    "reducer_average_parameters": (c_int32, c_void_p, POINTER(c_void_p)),
    "reducer_sync_buffers": (c_int32, c_void_p, POINTER(c_void_p), c_int32),
    "reducer_is_used": (c_int32, c_void_p, c_size_t, POINTER(c_int32)),
    "reducer_stats": (c_int32, c_void_p, POINTER(StepStats)),
    "reducer_bucket_stats": (c_int32, c_void_p, c_size_t, POINTER(BucketStats)),
}
