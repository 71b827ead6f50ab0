"""The programs in torch/examples, with arguments that cannot be meant."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def test_an_epoch_without_a_step_is_refused():
    """Incomplete batches are dropped: without a word, the program would train nothing."""
    words = [sys.executable, EXAMPLES / "imagenet" / "main.py", "--dummy", "--dummy-images", "3", "--image-size", "32"]
    words += ["-b", "64", "--epochs", "1", "--checkpoint", "", "-j", "0"]
    ran = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)
    assert ran.returncode != 0 and "accuracy" not in ran.stdout, ran.stdout
    assert "a step takes 64 images of each of 1 ranks, and there are 3; give a smaller --batch-size (-b)" in ran.stderr, ran.stderr
