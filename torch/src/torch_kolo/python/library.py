"""kolo's shared library, which is that of pykolo: what this backend uses of it."""

import ctypes
from typing import NamedTuple

from pykolo._abi import (  # noqa: F401
    AVG,
    BAND,
    BFLOAT16,
    BOOL,
    BOR,
    BXOR,
    CAUSES,
    CONFIG_VERSION,
    CommStats,
    Config,
    ERR_ABORTED,
    ERR_ARGUMENT,
    ERR_FORKED,
    ERR_HANDLE,
    ERR_PEER,
    ERR_SETTING,
    ERR_STORE,
    ERR_UNSUPPORTED,
    Error,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    FLOAT8_E4M3,
    FLOAT8_E5M2,
    INT16,
    INT32,
    INT64,
    INT8,
    IN_PROGRESS,
    MAX,
    MIN,
    OK,
    PROD,
    SUM,
    Store,
    StoreClaim,
    StoreGet,
    StoreSet,
    UINT16,
    UINT32,
    UINT64,
    UINT8,
)
from pykolo._library import function

Handle = Memory = ctypes.c_void_p

# Results that are no failure of the group. This rank has ended it itself if it is aborted.
GROUP_GOES_ON = (OK, IN_PROGRESS, ERR_ARGUMENT, ERR_HANDLE, ERR_SETTING, ERR_UNSUPPORTED, ERR_ABORTED, ERR_FORKED)

# The deadline has passed.
CAUSES_OF_TIMEOUT = tuple(map(CAUSES.index, ("silent", "absent", "stopped", "unresponsive", "unmatched")))


class Operation(NamedTuple):
    """The two functions of an operation: one returns when it has ended, the other starts it."""

    now: object
    start: object


def _operation(name):
    return Operation(function(name), function("start_" + name))


all_reduce = _operation("all_reduce")
reduce = _operation("reduce")
broadcast = _operation("broadcast")
all_gather = _operation("all_gather")
all_gather_v = _operation("all_gather_v")
reduce_scatter = _operation("reduce_scatter")
reduce_scatter_v = _operation("reduce_scatter_v")
all_to_all = _operation("all_to_all")
all_to_all_v = _operation("all_to_all_v")
gather = _operation("gather")
scatter = _operation("scatter")
barrier = _operation("barrier")
send = _operation("send")
recv = _operation("recv")
send_tagged = _operation("send_tagged")
recv_tagged = _operation("recv_tagged")
recv_any_tagged = _operation("recv_any_tagged")

last_error = function("last_error")
error_string = function("error_string")
call_timeout = function("call_timeout")
store_reply = function("store_reply")

comm_init_callbacks = function("comm_init_callbacks")
comm_split = function("comm_split")
comm_shrink = function("comm_shrink")
comm_abort = function("comm_abort")
comm_destroy = function("comm_destroy")
comm_count = function("comm_count")
comm_rank = function("comm_rank")
comm_transport = function("comm_transport")
comm_stats = function("comm_stats")
comm_has_devices = function("comm_has_devices")
comm_get_async_error = function("comm_get_async_error")

work_wait = function("work_wait")
work_wait_timeout = function("work_wait_timeout")
work_wait_on = function("work_wait_on")
work_duration = function("work_duration")
work_cancel = function("work_cancel")
work_destroy = function("work_destroy")

mem_alloc_pooled = function("mem_alloc_pooled")
mem_free = function("mem_free")
