"""What a backend in Python is for this PyTorch.

PyTorch 2.14 and newer: a Backend, of which a process group has one for each kind of device. Older
versions: a ProcessGroup, which is the backend of all devices, so "cpu:kolo,cuda:nccl" needs the
backend in C++ there.
"""

import torch
from torch._C._distributed_c10d import Backend
from torch.distributed import ProcessGroup

from .forwarding import pass_on_everything


def _can_be_a_backend():
    try:
        Backend(0, 1)
    except TypeError:
        # It has no constructor.
        return False
    return True


class Group(ProcessGroup):
    """What PyTorch asks a process group for and a backend not."""

    def __init__(self, rank, size):
        super().__init__(rank, size)
        self._group_name = ""
        self._group_desc = ""

    def _get_backend(self, _device):
        return self

    @property
    def _device_types(self):
        return [torch.device("cpu"), torch.device("cuda")]

    @property
    def group_name(self):
        return self._group_name

    @property
    def group_desc(self):
        return self._group_desc

    def _set_group_name(self, name):
        self._group_name = name
        super()._set_group_name(name)

    def _set_group_desc(self, description):
        self._group_desc = description
        super()._set_group_desc(description)

    def getGroupName(self):
        return self._group_name

    def getGroupDesc(self):
        return self._group_desc

    def name(self):
        return self.getBackendName()

    def _start_coalescing(self, _device=None):
        self.start_coalescing()

    def _end_coalescing(self, _device=None):
        return self.end_coalescing()


if _can_be_a_backend():
    Base = Backend
    pass_on_everything()
else:
    Base = Group
