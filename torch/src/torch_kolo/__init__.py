"""PyTorch's distributed package on kolo: ``torch.distributed.init_process_group("kolo")``.

Installed, this needs no import. ``torch_kolo.Options()`` goes to ``pg_options``.
"""

import importlib
import warnings

__all__ = ["Options", "ProcessGroupKolo"]


def _load():
    """The compiled part, which fits one version of PyTorch only."""
    import torch

    from . import _build

    def of(version):
        return tuple(version.split("+")[0].split(".")[:2])

    if of(torch.__version__) != of(_build.torch_version):
        raise ImportError(
            f"torch_kolo was built for PyTorch {_build.torch_version}, and this is PyTorch {torch.__version__}: their C++ interfaces "
            "differ. Install torch_kolo again: pip install --force-reinstall --no-deps ./torch"
        )
    return importlib.import_module("._C", __name__)


def _create(options, backend_options):
    from torch.distributed.constants import default_pg_timeout

    if backend_options is not None:
        of_options = backend_options._timeout
        if default_pg_timeout not in (of_options, options.timeout) and of_options != options.timeout:
            warnings.warn(f"torch_kolo.Options has a timeout of {of_options}, and the argument has one of {options.timeout}, which wins")
    return _load().create(options, backend_options)


def register():
    """Registers "kolo" with torch.distributed.

    PyTorch calls it through an entry point. The compiled part is loaded at first use.
    """
    import torch.distributed as dist

    if dist.is_available() and "KOLO" not in dist.Backend._plugins:
        from ._coalescing import end_groups_on_exceptions

        end_groups_on_exceptions()
        dist.Backend.register_backend("kolo", _create, extended_api=True, devices=["cpu", "cuda"])


def _autoload():
    """For versions of PyTorch that look for backends of devices only, when torch is imported."""
    import torch.distributed as dist

    if dist.is_available() and not hasattr(dist.Backend, "_ensure_backend_registered"):
        register()


def __getattr__(name):
    if name == "ProcessGroupKolo":
        return _load().ProcessGroupKolo
    if name == "Options":
        return _load().ProcessGroupKolo.Options
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
