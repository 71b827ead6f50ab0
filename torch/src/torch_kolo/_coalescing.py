"""Ends PyTorch's groups of coalesced calls when an exception leaves them.

``torch.distributed._coalescing_manager`` has no ``finally``. After an exception inside its ``with``
block, PyTorch keeps the list of calls to coalesce: it adds later calls on the process group to the
list. They return without an error and never run.
"""

import contextlib
import functools

import torch.distributed.distributed_c10d as c10d


def end_groups_on_exceptions():
    """Makes PyTorch's manager end kolo's groups when an exception leaves them. Other backends keep
    theirs.
    """
    manager = c10d._coalescing_manager
    begun = manager.__wrapped__
    if hasattr(begun, "__wrapped__"):
        return

    @functools.wraps(begun)
    def ended(group=None, device=None, async_ops=False):
        group = group or c10d._get_default_group()
        inner = contextlib.contextmanager(begun)(group, device, async_ops)
        # A group that was refused at its start is not open.
        coalesced = inner.__enter__()
        with contextlib.ExitStack() as stack:
            stack.push(lambda kind, *_: _give_up(group, device) if kind else None)
            stack.push(inner)
            yield coalesced

    # Change the function itself, because programs may have imported it already.
    (cell,) = (cell for cell in manager.__closure__ if cell.cell_contents is begun)
    cell.cell_contents = ended
    manager.__wrapped__ = ended


def _give_up(group, device):
    """Drops the calls that PyTorch has not made yet. The calls that it has made continue in order.
    """
    if not any(group._get_backend(each).name() == "kolo" for each in group._device_types):
        return
    c10d._world.pg_coalesce_state.pop(group, None)
    if device is not None:
        # The exception may come from the end of the group.
        with contextlib.suppress(ValueError, RuntimeError):
            group._end_coalescing(device)
