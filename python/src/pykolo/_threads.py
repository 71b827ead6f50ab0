"""Ranks that are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ._communicator import Communicator

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._abi import Settings

R = TypeVar("R")


def spawn(world_size: int, function: Callable[..., R], *arguments: Any, **settings: Unpack[Settings]) -> list[R]:
    """Calls ``function(comm, *arguments)`` in a thread for each rank of a group of this process, and
    returns what the ranks return. If a rank raises an exception, the group ends, and this raises the
    first exception.
    """
    comms = Communicator.threads(world_size, **settings)
    results: list[Any] = [None] * world_size
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(comms[rank], *arguments)
        except BaseException as error:
            # Before the other ranks learn of it, and fail.
            failures.append(error)
            # Python has it from 3.11 on.
            add_note = getattr(error, "add_note", None)
            if add_note:
                add_note(f"on rank {rank} of pykolo.spawn")
            comms[rank].abort()
        comms[rank].close()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(world_size)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:
        # A thread may be anywhere in the program, and the calls that it makes fail from now on.
        for comm in comms:
            comm.abort()
        raise
    if failures:
        raise failures[0]
    return results
