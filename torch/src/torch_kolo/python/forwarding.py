"""Replaces methods of PyTorch's Work and ProcessGroup, so that they reach those of kolo.

PyTorch wraps each Work of kolo in a Work of its own, which passes on `wait` and `get_future` only: it
would never be completed, and would have no exception and no source. And it does not know that a
backend in Python can gather into one tensor.
"""

import functools

import torch.distributed as dist

from .work import ASKING

# The operation type of a Work that PyTorch makes for a backend in Python.
UNKNOWN = 100

OF_WORK = (
    "is_completed",
    "is_success",
    "exception",
    "result",
    "get_future_result",
    "source_rank",
    "_source_rank",
    "_get_sequence_number",
    "_get_duration",
)


def behind(work):
    """kolo's Work behind a Work of PyTorch, or None if it is another backend's."""
    if work._get_op_type() != UNKNOWN:
        return None
    ASKING.is_on, ASKING.answer = True, None
    try:
        dist.Work.get_future(work)
    except RuntimeError:
        # Another backend's, without a future.
        return None
    finally:
        ASKING.is_on = False
    found, ASKING.answer = ASKING.answer, None
    return found


def _of_work(name, original):
    @functools.wraps(original)
    def asked(self):
        mine = behind(self)
        return original(self) if mine is None else getattr(mine, name)()

    return asked


def _of_group(original):
    @functools.wraps(original)
    def asked(self, output, tensor, opts):
        # Backends in C++ do not have this name.
        gather = getattr(self._get_backend(tensor.device), "kolo_gather_single", None)
        return original(self, output, tensor, opts) if gather is None else gather(output, tensor, opts)

    return asked


def pass_on_everything():
    """Makes PyTorch pass on the rest. Other backends are asked as before."""
    for name in OF_WORK:
        original = getattr(dist.Work, name, None)
        if original is not None:
            setattr(dist.Work, name, _of_work(name, original))
    for name in ("gather_single", "gather_into_tensor"):
        original = getattr(dist.ProcessGroup, name, None)
        if original is not None:
            setattr(dist.ProcessGroup, name, _of_group(original))
