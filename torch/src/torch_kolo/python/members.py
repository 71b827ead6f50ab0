"""Roll calls, and groups of the survivors of a failure."""

import ctypes
import time

import torch.distributed as dist

from . import library
from .error import check, error_of, rethrow_of_handler
from .launch import deadline
from .work import wait_to_the_end


class Operations:
    """Operations in flight, and their memory. The caller aborts the communicator before it drops
    unfinished ones.
    """

    def __init__(self):
        self._works = {}

    def start(self, group, rank, operation, *arguments):
        work = library.Handle()
        check(operation.start(*arguments, group.collectives.comm, None, work), group.members)
        self._works[rank] = work.value

    def wait_until(self, rank, until):
        """IN_PROGRESS if the operation has not ended by then."""
        result = library.work_wait_timeout(self._works[rank], max(0, int((until - time.monotonic()) * 1000)))
        rethrow_of_handler()
        return result

    def close(self):
        for work in self._works.values():
            wait_to_the_end(work)
            library.work_destroy(work)


def named(ranks, members):
    """ "ranks 1 and 3 (2 and 6 of the job)"."""

    def listed(numbers):
        *first, last = [str(number) for number in numbers]
        return ", ".join(first) + " and " + last if first else last

    in_job = [members[rank] if rank < len(members) else rank for rank in ranks]
    text = ("rank " if len(ranks) == 1 else "ranks ") + listed(ranks)
    return text + (f" ({listed(in_job)} of the job)" if in_job != list(ranks) else "")


def gloo_s_words(group, who, timeout_ms):
    """Programs look for these words, which are Gloo's. `who`: "Rank 1", or "Ranks 1, 2" where all
    are named.
    """
    return f"[Rank {group.rank()}]: {who} failed to pass monitoredBarrier in {timeout_ms} ms"


def roll_call(group, timeout_ms):
    """Each rank reports to rank 0, which tells all present ranks which ranks are missing. Returns
    those.

    If any is missing, rank 0 ends the group once all present ranks know why.
    """
    group.seq += 1
    size = group.size()
    if size == 1:
        return []
    is_present = (ctypes.c_uint8 * size)(1)
    if group.rank() != 0:
        # Rank 0 may call just before its deadline, and then waits just as long for the other ranks.
        with deadline(2 * timeout_ms, group.made_with):
            _report(group, is_present)
    else:
        # The deadline of an operation must not end the group before all ranks have been told.
        with deadline(4 * timeout_ms, group.made_with):
            _call(group, is_present, timeout_ms)
    return [rank for rank in range(size) if not is_present[rank]]


def absent(group, missing, timeout_ms):
    """The error of a roll call."""
    who = "Ranks " + ", ".join(map(str, missing))
    return dist.DistBackendError(
        f"{gloo_s_words(group, who, timeout_ms)}: {named(missing, group.members)} did not call monitored_barrier before its "
        f"deadline of {timeout_ms // 1000}.{timeout_ms % 1000 // 100}s. The process group has ended."
    )


def _report(group, is_present):
    comm = group.collectives.comm
    here = ctypes.byref(ctypes.c_uint8(1))
    check(library.send.now(here, 1, library.UINT8, 0, comm, None), group.members)
    check(library.recv.now(is_present, len(is_present), library.UINT8, 0, comm, None), group.members)
    check(library.send.now(here, 1, library.UINT8, 0, comm, None), group.members)


def _call(group, is_present, timeout_ms):
    size = len(is_present)
    reports, thanks = (ctypes.c_uint8 * size)(), (ctypes.c_uint8 * size)()
    coming, telling, leaving = Operations(), Operations(), Operations()
    try:
        for rank in range(1, size):
            coming.start(group, rank, library.recv, ctypes.byref(reports, rank), 1, library.UINT8, rank)
        until = time.monotonic() + timeout_ms / 1000
        for rank in range(1, size):
            result = coming.wait_until(rank, until)
            is_present[rank] = result == library.OK
            if result != library.IN_PROGRESS:
                check(result, group.members)
        present = [rank for rank in range(1, size) if is_present[rank]]
        for rank in present:
            telling.start(group, rank, library.send, is_present, size, library.UINT8, rank)
            leaving.start(group, rank, library.recv, ctypes.byref(thanks, rank), 1, library.UINT8, rank)
        until = time.monotonic() + timeout_ms / 1000
        for rank in present:
            # A rank that is gone by now has been told, or has failed for another reason.
            leaving.wait_until(rank, until)
        if len(present) + 1 < size:
            group.hooks.failed()
            group.abort()
    except BaseException:
        group.hooks.failed()
        group.abort()
        raise
    finally:
        for operations in (coming, telling, leaving):
            operations.close()


def shrink(group, ranks_to_exclude, options):
    """PyTorch names the ranks to leave out, and kolo's ranks agree on the survivors. Both must
    match.
    """
    mine = group.options
    if (options.transport, options.algorithm, options.reproducible) != (mine.transport, mine.algorithm, mine.reproducible):
        raise ValueError("shrink_group: the smaller group keeps the settings of its parent; pg_options can change the timeout only")
    expected = [rank for rank in range(group.size()) if rank not in ranks_to_exclude]
    options.global_ranks_in_group = [group.members[rank] for rank in expected if rank < len(group.members)]
    if group.rank() not in expected:
        raise ValueError(f"shrink_group: rank {group.rank()} is in the list of ranks to leave out, and must not call it")
    if group.messages.comm:
        library.comm_abort(group.messages.comm)
    comm = library.Handle()
    check(library.comm_shrink(group.collectives.comm, comm), group.members)
    count, place = ctypes.c_int32(), ctypes.c_int32()
    library.comm_count(comm, count)
    library.comm_rank(comm, place)
    left = (ctypes.c_int32 * count.value)()
    result = library.all_gather.now(ctypes.byref(ctypes.c_int32(group.rank())), left, 1, library.INT32, comm, None)
    if result or list(left) != expected:
        error = error_of(result, group.members) if result else None
        library.comm_destroy(comm)
        raise error or dist.DistBackendError(
            f"shrink_group: {named(expected, group.members)} were to remain, and {named(list(left), group.members)} have survived. "
            "The process group has ended."
        )
    smaller = type(group)(place.value, count.value, options)
    smaller.made_with = group.made_with
    smaller.take_over(comm.value)
    return smaller
