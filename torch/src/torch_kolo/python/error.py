"""Turns kolo's errors into PyTorch's."""

import ctypes

import torch.distributed as dist
from pykolo._signals import raised_by_handler

from . import library

# PyTorch's WorkResult, as futures have it.
SUCCESS, TIMEOUT, COMM_ERROR = range(3)


def last_error():
    error = library.Error(size=ctypes.sizeof(library.Error))
    return error if library.last_error(None, error) == library.OK else None


def rethrow_of_handler():
    """Raises the exception of a handler that has ended a wait of this thread, once."""
    if raised := raised_by_handler():
        raise raised


def error_of(result, members):
    """The error of this thread's last call, with kolo's message: a ValueError for wrong arguments,
    otherwise a DistBackendError.

    If the call ended because a signal handler raised an exception, it is that one. `members`: the
    ranks of the group as ranks of the job, which errors also name.
    """
    if raised := raised_by_handler():
        return raised
    error = last_error()
    has_details = error is not None and error.code == result
    text = (error.message if has_details else library.error_string(result)).decode(errors="replace")
    if has_details and 0 <= error.rank < len(members) and members[error.rank] != error.rank:
        text += f" (Ranks are those of the process group; its rank {error.rank} is rank {members[error.rank]} of the job.)"
    if has_details and error.cause in library.CAUSES_OF_TIMEOUT:
        # Programs look for these words, which are Gloo's.
        text += f". Timed out waiting {error.after_us // 1000}ms for the operation to complete"
    if result in (library.ERR_ARGUMENT, library.ERR_SETTING, library.ERR_UNSUPPORTED):
        return ValueError(text)
    if result == library.ERR_HANDLE:
        text = "this process group has been shut down"
    return dist.DistBackendError(text)


def ends_group(result):
    """Whether a result is the failure of the whole group, after which no rank can use it.
    ERR_ABORTED is not: this rank has ended its group.
    """
    return result not in library.GROUP_GOES_ON


def work_result_of(result):
    """The result of this thread's last call in PyTorch's words."""
    if result == library.OK:
        return SUCCESS
    error = last_error()
    has_details = error is not None and error.code == result
    return TIMEOUT if has_details and error.cause in library.CAUSES_OF_TIMEOUT else COMM_ERROR


def check(result, members):
    """Raises unless this thread's last call succeeded."""
    if result:
        raise error_of(result, members)
