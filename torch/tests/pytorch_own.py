"""PyTorch's own tests of its collectives and of DDP, with kolo in the place of Gloo.

    WORLD_SIZE=4 python torch/tests/pytorch_own.py [-k NAME]

KOLO_AS_GLOO=0 runs them on Gloo, for comparison. Needs expecttest and hypothesis.
"""

import multiprocessing
import os
import tempfile
import unittest

FOLDER = os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp())
for name, value in {
    "KOLO_AS_GLOO": "1",
    "BACKEND": "gloo",
    "WORLD_SIZE": "2",
    "INIT_METHOD": f"file://{FOLDER}/shared_init_file",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}.items():
    os.environ.setdefault(name, value)
# There, PyTorch's tests want what its own CI has.
os.environ.pop("CI", None)

from torch.testing._internal.common_utils import run_tests  # noqa: E402
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend  # noqa: E402

IN_PLACE_OF_GLOO = os.environ["KOLO_AS_GLOO"] == "1"


class PyTorchOwn(TestDistBackend, DistributedTest._DistTestBase):
    # PyTorch asks a backend of the name gloo for the number of Gloo's threads.
    @unittest.skipIf(IN_PLACE_OF_GLOO, "NOT RUN: DDP's statistics name the backend kolo, and this expects gloo")
    def test_ddp_logging_data_cpu(self):
        super().test_ddp_logging_data_cpu()

    @unittest.skipIf(
        IN_PLACE_OF_GLOO and os.environ["WORLD_SIZE"] != "2",
        "NOT RUN: every rank names the one that is missing, and this expects rank 0 alone to",
    )
    def test_monitored_barrier_gloo(self):
        super().test_monitored_barrier_gloo()

    def setUp(self):
        super().setUp()
        # This process has imported PyTorch, and has no communicator.
        self._start_processes(multiprocessing.get_context("fork").Process)


if __name__ == "__main__":
    run_tests()
