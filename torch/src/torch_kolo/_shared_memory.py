"""DDP and FSDP2 keep what they communicate in memory of kolo, which the ranks of a host share. kolo
reads and writes it in place.

PyTorch does so only if it is told to: DDP by a variable, FSDP2 by a call on each module.
"""

import functools
import importlib.abc
import importlib.util
import os
import sys

FSDP2 = "torch.distributed.fsdp._fully_shard._fsdp_param_group"


@functools.cache
def use_shared_memory(for_ddp):
    """Has FSDP2 ask kolo for memory from now on, and DDP if `for_ddp`."""
    # DDP reads the variable when it makes its buckets. It is for all backends of the process: with
    # a GPU, it would also change what NCCL does.
    if for_ddp and not os.path.exists("/dev/nvidiactl"):
        os.environ.setdefault("DDP_DISABLE_COMM_MEM", "0")
    if FSDP2 in sys.modules:
        _change(sys.modules[FSDP2])
    else:
        # Importing it here would take a second that most programs need not spend.
        sys.meta_path.insert(0, _Finder())


def _change(fsdp2):
    """Has parameter groups of FSDP2 whose backend is kolo allocate there, unless the program has
    said what they shall do.
    """
    group = fsdp2.FSDPParamGroup
    if not hasattr(group, "set_allocate_memory_from_process_group"):
        return
    lazy_init, choose = group.lazy_init, group.set_allocate_memory_from_process_group

    @functools.wraps(choose)
    def choose_and_remember(self, enable):
        self._kolo_was_chosen = True
        choose(self, enable)

    @functools.wraps(lazy_init)
    def lazy_init_with_memory(self):
        comms = (type(self._all_gather_comm), type(self._reduce_scatter_comm))
        is_default = comms == (fsdp2.DefaultAllGather, fsdp2.DefaultReduceScatter)
        if is_default and not hasattr(self, "_kolo_was_chosen") and _is_kolo(self):
            choose(self, True)
        return lazy_init(self)

    group.set_allocate_memory_from_process_group = choose_and_remember
    group.lazy_init = lazy_init_with_memory


def _is_kolo(param_group):
    from . import ProcessGroupKolo

    if param_group.device.type != "cpu":
        return False
    process_groups = (param_group._all_gather_process_group, param_group._reduce_scatter_process_group)
    return all(isinstance(group._get_backend(param_group.device), ProcessGroupKolo) for group in process_groups)


class _Finder(importlib.abc.MetaPathFinder):
    """Changes FSDP2 when it is imported."""

    def find_spec(self, name, path, target=None):
        if name != FSDP2:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_change(module):
            load(module)
            _change(module)

        spec.loader.exec_module = load_and_change
        return spec
