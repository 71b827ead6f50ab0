"""The class that vllm.py names to vLLM. Importing it imports vLLM."""

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class KoloCommunicator(CpuCommunicator):
    """Calls torch.distributed, where kolo takes the place of Gloo."""

    def _all_group_ranks_share_shm_group_name(self):
        # vLLM uses its own shared memory only where this is true.
        return False
