"""Collective communication between processes: numpy arrays, and everything that has a buffer.

>>> import array, pykolo
>>> comm = pykolo.Communicator.from_env()  # under kolo run, torchrun, srun, mpirun; or alone
>>> comm.all_reduce(array.array("d", [1.0, 2.0]), op="average")
array('d', [1.0, 2.0])
>>> comm.close()
"""

from . import test as test
from ._abi import VERSION as _VERSION
from ._communicator import Communicator, discard_unique_id, unique_id
from ._errors import (
    AbortedError,
    ArgumentError,
    ClosedError,
    DeadlineError,
    ForkedError,
    KoloError,
    MismatchError,
    OutOfMemoryError,
    PeerError,
    RevokedError,
    StartDeadlineError,
    StartError,
    UnsupportedError,
)
from ._operations import ReduceOp
from ._abi import Settings
from ._store import Store
from ._threads import spawn
from ._work import Work

__version__ = ".".join(map(str, _VERSION))
__all__ = [
    "AbortedError",
    "ArgumentError",
    "ClosedError",
    "Communicator",
    "DeadlineError",
    "ForkedError",
    "KoloError",
    "MismatchError",
    "OutOfMemoryError",
    "PeerError",
    "ReduceOp",
    "RevokedError",
    "Settings",
    "StartDeadlineError",
    "StartError",
    "Store",
    "UnsupportedError",
    "Work",
    "discard_unique_id",
    "spawn",
    "unique_id",
]
