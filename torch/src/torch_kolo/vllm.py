"""vLLM on CPUs: with KOLO_AS_GLOO=1 it calls kolo, and not its own shared memory.

vLLM calls `use_kolo` in each of its processes, through an entry point.
"""

from ._as_gloo import is_wanted


def use_kolo():
    if not is_wanted():
        return
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        name = f"{__package__}._vllm_communicator.KoloCommunicator"
        type(current_platform).get_device_communicator_cls = classmethod(lambda cls: name)
