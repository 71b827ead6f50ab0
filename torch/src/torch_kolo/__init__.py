"""PyTorch's distributed package on kolo: ``torch.distributed.init_process_group("kolo")``.

Installed, this needs no import. ``torch_kolo.Options()`` goes to ``pg_options``.
"""

import functools
import importlib
import importlib.metadata
import os
import sys
import warnings

__all__ = ["Options", "ProcessGroupKolo", "stats"]


@functools.cache
def _load():
    """The backend in C++ if this package has one for this PyTorch, otherwise the one in Python.
    KOLO_TORCH_IMPL chooses: cpp or python.
    """
    _check_pykolo()
    wanted = os.environ.get("KOLO_TORCH_IMPL", "")
    if wanted not in ("", "cpp", "python"):
        raise ImportError(f"KOLO_TORCH_IMPL is {wanted!r}: set it to cpp or python, or do not set it")
    reason = None if wanted == "python" else _why_not_cpp()
    if wanted == "cpp" and reason:
        raise ImportError(f"KOLO_TORCH_IMPL is cpp, and {reason}")
    if wanted == "python" or reason:
        return importlib.import_module(".python.backend", __name__)
    # The backend in C++ uses the library that pykolo has loaded.
    importlib.import_module("pykolo._library")
    return importlib.import_module("._C", __name__)


def _check_pykolo():
    """Both are released together, and this package uses pykolo's tables of the library."""
    try:
        mine = importlib.metadata.version("torch_kolo")
    except importlib.metadata.PackageNotFoundError:
        # It is used from its sources.
        return
    try:
        import pykolo
    except ModuleNotFoundError as error:
        if error.name != "pykolo":
            raise
        raise ImportError(f"torch_kolo {mine} needs pykolo {mine}: pip install pykolo=={mine}, or ./python from kolo's repository") from None
    if pykolo.__version__ != mine:
        raise ImportError(f"torch_kolo {mine} needs pykolo {mine}, and this is {pykolo.__version__}: install both of the same version")


def _why_not_cpp():
    """Why the backend in C++ cannot be used, or None. It fits the version of PyTorch that it was
    built for only.
    """
    import torch

    try:
        from . import _build
    except ImportError:
        return "this torch_kolo was installed without the backend in C++"

    def of(version):
        return tuple(version.split("+")[0].split(".")[:2])

    if of(torch.__version__) != of(_build.torch_version):
        return f"this torch_kolo has the backend in C++ for PyTorch {_build.torch_version}, and this is PyTorch {torch.__version__}"
    return None


def _create(options, backend_options, profiled_as="kolo"):
    import torch
    import torch.distributed as dist
    from torch.distributed.constants import default_pg_timeout

    from . import _rendezvous
    from ._shared_memory import use_shared_memory

    if backend_options is not None:
        of_options = backend_options._timeout
        if default_pg_timeout not in (of_options, options.timeout) and of_options != options.timeout:
            warnings.warn(f"torch_kolo.Options has a timeout of {of_options}, and the argument has one of {options.timeout}, which wins")
    is_default = not dist.is_initialized()
    if is_default:
        _rendezvous.joins(options.store, options.group_rank)
    backend = _load().create(options, backend_options, profiled_as)
    if is_default:
        _rendezvous.has_joined(options.store, options.group_rank)
    if backend.supports_tensor_alloc(torch.device("cpu")):
        # DDP asks in C++, by a number, and cannot ask the backend in Python.
        use_shared_memory(for_ddp=_load().__name__.endswith("._C"))
    return backend


def _create_for(store, rank, size, timeout, profiled_as="kolo"):
    """Creates the backend of a group outside init_process_group and new_group."""
    from torch.distributed.distributed_c10d import _DistributedBackendOptions

    options = _DistributedBackendOptions()
    options.store, options.group_rank, options.group_size, options.timeout = store, rank, size, timeout
    return _create(options, None, profiled_as)


def stats(group=None):
    """Returns how many operations of a process group on the memory of devices took each path, on this
    rank: ``{"device": {"whole": 0, "staged": 0, "in_place": 0, "through_areas": 0, "one_shot": 0,
    "copied": 0}}``. Without a group it is the default group. An operation counts when it has completed.
    """
    import torch.distributed as dist

    if group is None:
        group = dist.distributed_c10d._get_default_group()
    backends = [group._get_backend(device) for device in group._device_types]
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL, PyTorch wraps each backend.
    backends = [getattr(backend, "wrapped_pg", backend) for backend in backends]
    # Several devices may have one backend.
    of_kolo = {id(backend): backend for backend in backends if isinstance(backend, _load().ProcessGroupKolo)}
    if not of_kolo:
        raise ValueError("stats: no backend of the process group is kolo; make the group with the backend kolo")
    counted = [backend.stats()["device"] for backend in of_kolo.values()]
    return {"device": {path: sum(each[path] for each in counted) for path in counted[0]}}


def register():
    """Registers "kolo" with torch.distributed.

    PyTorch also calls it through an entry point. The backend is loaded at first use.
    """
    import torch.distributed as dist

    if dist.is_available() and "KOLO" not in dist.Backend._plugins:
        from ._as_gloo import is_wanted, take_the_place_of_gloo
        from ._coalescing import end_groups_on_exceptions
        from ._rendezvous import follow_stores

        end_groups_on_exceptions()
        follow_stores()
        dist.Backend.register_backend("kolo", _create, extended_api=True, devices=["cpu", "cuda"])
        if is_wanted():
            take_the_place_of_gloo(_create, _create_for)


def _autoload():
    """Is called when torch is imported. PyTorch looks for backends only after it has made the store of a
    start, and while it waits there, Python's signal handlers are to run.
    """
    if sys.platform == "win32":
        # PyTorch's TCP stores ask for libuv, which PyTorch for Windows is built without.
        os.environ.setdefault("USE_LIBUV", "0")
    register()


def __getattr__(name):
    if name == "ProcessGroupKolo":
        return _load().ProcessGroupKolo
    if name == "__version__":
        return importlib.metadata.version("torch_kolo")
    if name == "Options":
        return _load().ProcessGroupKolo.Options
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
