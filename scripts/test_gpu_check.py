"""Tests gpu_check.py with stubs of kolo's programs: python3 -m unittest discover -s scripts"""

import contextlib
import io
import json
import os
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import gpu_check

# Measures nothing, and says how long each size took; never ends for the sizes that KOLO_HANGS
# names.
KOLO = """#!{python}
import json, os, sys, time
words = sys.argv[1:]
if words[0] == "doctor":
    sys.exit(print("fine"))
sizes = [int(size) for size in words[words.index("--sizes") + 1].split(",")]
time.sleep(600 if str(max(sizes)) == os.environ.get("KOLO_HANGS") else 0)
rows = [{{"bytes": size, "in_place": {{"p50_us": 5 + size / 1e6, "algbw_gbs": 1000.0, "wrong": 0}}}} for size in sizes]
json.dump({{"rows": rows}}, open(words[words.index("--json") + 1], "w"))
"""
UNIT_TESTS = """#!/bin/sh
echo "test result: {}"
"""


class GpuCheck(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        (self.folder / "bin").mkdir()
        self.program("kolo", KOLO.format(python=sys.executable))
        self.program("unit-tests", UNIT_TESTS.format("ok. 3 passed; 0 failed"))

    def program(self, name, text):
        path = self.folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def run_all(self, why_no_gpu=None, limit=gpu_check.LIMIT):
        """The status, the report and the table."""

        def bounds(check):
            check.needs_gpu()
            check.figures.update(device_copy_gbs=4300.0, pinned_both_ways_us=60.0)

        out = self.folder / "out" / "report"
        with (
            mock.patch.object(gpu_check.Check, "find_gpu", lambda check: why_no_gpu),
            mock.patch.object(gpu_check.Check, "bounds", bounds),
            mock.patch.object(gpu_check.importlib.util, "find_spec", lambda name: None),
            mock.patch.object(gpu_check, "LIMIT", limit),
            mock.patch.object(sys, "argv", ["gpu_check.py", str(self.folder), str(out)]),
            contextlib.redirect_stdout(io.StringIO()) as printed,
        ):
            status = gpu_check.main()
        self.printed = printed.getvalue()
        return status, json.loads(Path(f"{out}.json").read_text()), Path(f"{out}.md").read_text()

    def test_without_a_gpu_nothing_is_run_and_all_of_it_says_why(self):
        status, report, table = self.run_all("there is no GPU here")
        self.assertEqual(status, 3)
        self.assertIn("NOTHING WAS RUN: there is no GPU here", self.printed)
        self.assertIn("NOTHING WAS RUN: there is no GPU here", table)
        self.assertFalse(report["was_run"])
        for part in report["parts"]:
            self.assertEqual((part["status"], part["why"]), ("NOT RUN", "there is no GPU here"))
        self.assertEqual({goal["status"] for goal in report["goals"]}, {"NOT RUN"})
        self.assertEqual(len(report["goals"]), 7)

    def test_goals_are_met_or_not(self):
        status, report, table = self.run_all()
        self.assertEqual(status, 0)
        goals = {goal["what"]: (goal["status"], goal["figure"]) for goal in report["goals"]}
        registered = "all_reduce 256 MiB f32, registered, in place, 2 ranks, of the bound"
        self.assertEqual(goals[registered], ("met", "0.93 (1000 of 1075 GB/s)"))
        self.assertEqual(goals["host-staged path, 64 MiB, of one pinned copy each way"], ("met", "0.83"))
        # There is no PyTorch.
        self.assertEqual(goals["small messages, 8 B to 64 KiB, against Gloo on CUDA"], ("NOT RUN", None))
        self.assertIn("| kolo registered, 2 ranks | 5.0 |", table)

    def test_what_fails_does_not_stop_the_rest(self):
        self.program("unit-tests", UNIT_TESTS.format("FAILED. 2 passed; 1 failed") + "exit 101\n")
        status, report, _ = self.run_all()
        self.assertEqual(status, 1)
        parts = {part["name"]: part for part in report["parts"]}
        self.assertIn("FAILED. 2 passed; 1 failed", parts["unit tests on a GPU"]["why"])
        self.assertEqual(parts["kolo bench, registered memory, 4 ranks"]["status"], "passed")

    def test_no_unit_test_is_none_that_passed(self):
        self.program("unit-tests", UNIT_TESTS.format("ok. 0 passed; 0 failed"))
        _, report, _ = self.run_all()
        self.assertEqual({part["status"] for part in report["parts"] if part["name"].startswith("unit")}, {"NOT RUN"})

    def test_what_hangs_is_ended_and_what_was_measured_before_is_kept(self):
        with mock.patch.dict(os.environ, {"KOLO_HANGS": str(gpu_check.LARGE)}):
            status, report, _ = self.run_all(limit=8)
        self.assertEqual(status, 1)
        parts = {part["name"]: part for part in report["parts"]}
        self.assertIn("was not done after", parts["kolo bench, any device memory, 2 ranks"]["why"])
        self.assertEqual(parts["kolo bench, registered memory, 2 ranks"]["why"], "the time for all parts was over")
        self.assertIn("8", report["figures"]["kolo, 2 ranks"]["in_place"])


if __name__ == "__main__":
    unittest.main()
