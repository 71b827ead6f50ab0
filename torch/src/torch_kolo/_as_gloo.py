"""KOLO_AS_GLOO=1: programs that ask for "gloo", or for no backend on a CPU, run on kolo."""

import os


def is_wanted():
    value = os.environ.get("KOLO_AS_GLOO", "")
    if value not in ("", "0", "1"):
        raise ValueError(f"KOLO_AS_GLOO is {value!r}: set it to 1 or 0, or do not set it")
    return value == "1"


def take_the_place_of_gloo(create, create_for):
    """`create(options, backend_options, profiled_as)` and `create_for(store, rank, size, timeout, profiled_as)`
    make the groups of "gloo" from now on. dist.get_backend() still says "gloo", and so do entries of profiles.
    """
    import torch.distributed as dist

    def create_as_gloo(options, backend_options):
        return create(options, None if _is_gloo_s(backend_options) else backend_options, "gloo")

    if hasattr(dist.Backend, "_ensure_backend_registered"):
        dist.Backend._ensure_backend_registered(dist.Backend.GLOO)
    if "GLOO" not in dist.Backend._plugins:
        _replace_the_class(create_for)
        return
    # Not of the type GLOO: PyTorch's C++ takes a group of this type for an object of its own class.
    devices = dist.Backend.backend_capability[dist.Backend.GLOO]
    dist.Backend.register_backend(dist.Backend.GLOO, create_as_gloo, extended_api=True, devices=devices)


def _replace_the_class(create_for):
    """For versions of PyTorch that know Gloo by its class only, before 2.14."""
    import torch.distributed.distributed_c10d as c10d

    original = c10d.ProcessGroupGloo

    class InPlaceOfGloo(type):
        def __call__(cls, store, rank, size, timeout=c10d.default_pg_timeout, **_):
            return create_for(store, rank, size, timeout, "gloo")

        def __instancecheck__(cls, group):
            return isinstance(group, original) or type(group).__name__ == "ProcessGroupKolo"

    class ProcessGroupGloo(metaclass=InPlaceOfGloo):
        pass

    c10d.ProcessGroupGloo = ProcessGroupGloo


def _is_gloo_s(options):
    """Whether these are options of Gloo, such as its devices and threads, which kolo does not need.
    """
    return options is not None and "Gloo" in type(options).__qualname__
