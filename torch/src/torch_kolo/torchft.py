"""torchft on kolo: ``Manager(pg=torch_kolo.torchft.ProcessGroupKolo(), ...)``.

torchft makes a new group of the live replicas after each failure. It aborts the old one first.
"""

import torch
from torch.distributed import ProcessGroup
from torchft.process_group import ProcessGroupWrapper

from . import _create_for

__all__ = ["ProcessGroupKolo"]


class ProcessGroupKolo(ProcessGroupWrapper):
    """A group of kolo that torchft makes anew when replicas come or go. Its timeout, 60 s unless it
    is given, is the deadline of the start and of each operation.
    """

    def getBackendName(self):
        return "torchft-kolo"

    def _create_pg(self, store, rank, world_size):
        backend = _create_for(store, rank, world_size, self._timeout)
        if isinstance(backend, ProcessGroup):
            # Before PyTorch 2.14 the backend in Python is a whole group.
            return backend
        group = ProcessGroup(store, rank, world_size)
        group._set_default_backend(ProcessGroup.BackendType.CUSTOM)
        for device in ("cpu", "cuda"):
            group._register_backend(torch.device(device), ProcessGroup.BackendType.CUSTOM, backend)
        return group

    def shutdown(self):
        # The wrapper forgets the group, and a group that others still refer to would go on.
        self.abort(errored=False)
