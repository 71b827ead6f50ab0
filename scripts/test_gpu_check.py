"""Runs gpu-check.sh without a GPU, on fake programs: python3 -m unittest discover -s scripts

The programs print and write what the real ones do. `PLANTED` makes them fail.
"""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

import gpu_check
import gpu_report
import gpu_stacks

HERE = Path(__file__).parent
# Seconds after which a command that hangs is ended: far more than a fake program takes, also on a
# machine that is busy.
MOST = 10
# Only a check that does not end takes this long, in seconds.
PATIENCE = 300

PLANTED = """
import json, os, signal, time

def hang_for_ever():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open(os.environ["HUNG"], "a") as pids:
        print(os.getpid(), file=pids)
    while True:
        time.sleep(1)

def fault(name):
    kind = json.loads(os.environ.get("PLANTED", "{}")).get(name)
    if kind == "hang":
        hang_for_ever()
    if kind == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    return kind
"""

PROBE = """
import json, os, sys
from planted import fault
what = sys.argv[1]
assert sys.is_customized, "the machine's sitecustomize did not run"
fault(f"probe {what}")
missing = os.environ.get("NO_" + what.upper())
found = {
    "device": {"device": os.environ.get("DEVICE", "Fake GPU"), "gpus": 1, "cuda": "13.0"},
    "torch": {"torch": "2.11.0", "libraries": []},
    "copies": {"device_copy_gbs": 4300.0, "pinned_both_ways_us": 60.0},
}
print(json.dumps({"missing": missing} if missing else found[what]))
"""

# Its ranks are in sessions of their own, as those of the real one are in groups of their own.
KOLO = """
import json, os, subprocess, sys
from planted import fault
words = sys.argv[1:]
if words[0] == "doctor":
    fault("doctor")
    print("kolo works here")
elif words[0] == "run":
    rank = subprocess.Popen(words[words.index("--") + 1:], env={**os.environ, "RANKS": words[2]}, start_new_session=True)
    if rank.wait():
        sys.exit(f"rank 0 ended with {rank.returncode}")
else:
    assert words[:4] == ["bench", "all_reduce", "--device", "cuda"] and "--check" in words, words
    sizes = [int(size) for size in words[words.index("--sizes") + 1].split(",")]
    kind = "registered" if "--registered" in words else os.environ.get("KOLO_DEVICE_PATH", "any")
    planted = fault(f"bench {kind} {os.environ['RANKS']} {max(sizes)}")
    wrong = 12 if planted == "wrong" else 0
    line = lambda size: {"p50_us": 5 + size / 1e6, "algbw_gbs": 1000.0 if kind == "registered" else 450.0, "wrong": wrong}
    rows = [{"bytes": size, "in_place": line(size), "out_of_place": line(size)} for size in sizes]
    with open(words[words.index("--json") + 1], "w") as file:
        json.dump({"rows": rows}, file)
    if wrong:
        sys.exit(f"{wrong} elements were wrong")
"""

UNIT_TESTS = """
import os, sys
from planted import fault
words = sys.argv[1:]
names = os.environ.get("NAMES", "cuda::on_a_gpu::copies cuda::on_a_gpu::sums ddp::on_a_gpu::reduces").split()
if "--list" in words:
    assert words == ["on_a_gpu", "--list", "--format", "terse"], words
    sys.exit(print("".join(f"{name}: test\\n" for name in names)))
assert os.environ["KOLO_TEST_GPU"] == "1"
name = words[words.index("--exact") + 1]
planted = fault(name)
print("running 1 test")
if planted == "wrong":
    print(f"thread '{name}' panicked at src/cuda/on_a_gpu.rs:12:5:\\nassertion `left == right` failed: 3 and 4")
    print("test result: FAILED. 0 passed; 1 failed; 0 ignored")
    sys.exit(101)
if planted == "missing":
    print("test result: ok. 0 passed; 0 failed; 0 ignored")
else:
    print("test result: ok. 1 passed; 0 failed; 0 ignored")
"""

SANITIZER = """
import subprocess, sys
from planted import fault
words = sys.argv[1:]
assert words[:4] == ["--tool", "memcheck", "--report-api-errors", "no"], words
program = next(i for i, word in enumerate(words) if word.endswith("unit-tests"))
status = subprocess.run(words[program:]).returncode
if fault(f"memcheck {words[program + 2]}") == "wrong":
    print("========= Invalid __global__ read of size 4 bytes\\n========= ERROR SUMMARY: 1 error")
    sys.exit(77)
print("========= ERROR SUMMARY: 0 errors")
sys.exit(status)
"""

DEVICE = """
import json, sys
from planted import fault
backend, sizes = sys.argv[1], sys.argv[sys.argv.index("--sizes") + 1]
if fault(backend) == "not run":
    print("NOT RUN: this PyTorch has no NCCL", file=sys.stderr)
    sys.exit(3)
print(json.dumps({size: 1000 + int(size) / 1e4 for size in sizes.split(",")}))
"""

# A test that hangs does so in a forked rank, and its parent waits for it.
PYTEST = """
import json, os, re, sys
from planted import fault, hang_for_ever

def side_streams():
    hang_for_ever()

def waits_for_ranks(rank):
    os.waitpid(rank, 0)

assert os.environ["KOLO_TORCH_IMPL"] == "cpp"
tests, case = sys.argv[sys.argv.index("-k") + 1].split(" and ")
name = f"{tests} {case}"
planted = json.loads(os.environ.get("PLANTED", "{}")).get(name)
if planted == "hang":
    print("tests/test_cuda.py::test_on_a_gpu[4-direct-large_ones] ", end="", flush=True)
    if (rank := os.fork()) == 0:
        side_streams()
    waits_for_ranks(rank)
wrong = fault(name) == "wrong"
if tests == "killed":
    with open(os.environ["KOLO_GPU_FIGURES"], "a") as figures:
        print(json.dumps({"what": f"a killed rank is named, {case}", "seconds": 0.25}), file=figures)
if wrong:
    print(f"=== FAILURES ===\\n___ {tests}[{case}-coalesced] ___\\nE       AssertionError: rank 1:")
    print("E         Traceback (most recent call last):\\nE         ValueError: 3 is not 4\\n=== short test summary info ===")
    print(f"FAILED tests/test_cuda.py::{tests}[{case}-coalesced] - AssertionError: rank 1:")
    print("===== 1 failed, 2 passed in 0.1s =====")
    sys.exit(1)
print("===== 3 passed in 0.1s =====")
"""


class GpuCheck(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder, self.out = Path(folder.name, "folder"), Path(folder.name, "out", "report")
        self.hung = Path(folder.name, "hung")
        self.addCleanup(self.end_all)
        for name in ("bin", "peers", "python", "site", "tools", "torch/tests"):
            (self.folder / name).mkdir(parents=True)
        for file in ["gpu-check.sh", *(file.name for file in HERE.glob("gpu_*.py"))]:
            shutil.copy(HERE / file, self.folder)
        for name, text in {
            "bin/kolo": KOLO,
            "bin/unit-tests": UNIT_TESTS,
            "tools/compute-sanitizer": SANITIZER,
            "gpu_probe.py": PROBE,
            "peers/device.py": DEVICE,
            "python/pytest.py": PYTEST,
            "python/planted.py": PLANTED,
            "python/sitecustomize.py": "import sys\nsys.is_customized = True\n",
            "site/torch_kolo.py": "Options = object\n",
        }.items():
            (self.folder / name).write_text(f"#!{sys.executable}\n{text}")
            (self.folder / name).chmod(0o755)
        # As --pack leaves it.
        tests = self.folder / "bin" / "unit-tests"
        Path(f"{tests}.gz").write_bytes(gzip.compress(tests.read_bytes()))
        tests.unlink()
        (self.folder / "COMMIT").write_text("abc\n")

    def end_all(self):
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def pids(self):
        """The processes that have hung."""
        return [int(pid) for pid in self.hung.read_text().split()] if self.hung.exists() else []

    def start(self, *args, planted=None, **environment):
        command = ["sh", self.folder / "gpu-check.sh", "--run", self.folder, "--out", self.out, *args]
        environment = {**os.environ, "PLANTED": json.dumps(planted or {}), "HUNG": str(self.hung), **environment}
        environment["PATH"] = f"{self.folder / 'tools'}{os.pathsep}{environment['PATH']}"
        command += ["--stacks-after", "1", "--most", str(MOST)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run_check(self, *args, **options):
        """Returns the status. Reads the report."""
        process = self.start(*args, **options)
        self.printed, _ = process.communicate(timeout=PATIENCE)
        self.read_report()
        return process.returncode

    def read_report(self):
        self.report = json.loads(Path(f"{self.out}.json").read_text())
        self.table = Path(f"{self.out}.md").read_text()
        self.log = Path(f"{self.out}.log").read_text()
        self.parts = {part["part"]: part for part in self.report["parts"]}

    def statuses(self):
        return {name: part["status"] for name, part in self.parts.items()}

    def failed(self):
        return {name for name, status in self.statuses().items() if status == "FAILED"}

    def assert_ended(self, hung):
        """Checks the number of processes that have hung, and that none is left."""
        self.assertEqual(len(self.pids()), hung)
        for pid in self.pids():
            # What has ended has no command line, also if no process has waited for it.
            self.assertEqual(gpu_stacks.read(f"/proc/{pid}/cmdline"), "")

    # ---- What works ----

    def test_two_calls_make_one_report(self):
        self.assertEqual(self.run_check("--parts", "first"), 0)
        self.assertEqual(set(self.statuses().values()), {"passed"})
        order = "machine doctor unit-tests bench-registered-2 torch-build torch-streams torch-killed bounds"
        self.assertEqual(list(self.parts), order.split())
        self.assertEqual(self.run_check("--parts", "second"), 0)
        self.assertEqual(list(self.parts), [part.name for part in gpu_check.PARTS])
        self.assertEqual(set(self.statuses().values()), {"passed"})
        goals = {goal["what"]: (goal["status"], goal["figure"]) for goal in self.report["goals"]}
        registered = "all_reduce 256 MiB f32, registered, in place, 2 ranks, of the bound"
        self.assertEqual(goals[registered], ("met", "0.93 (1000 of 1075 GB/s)"))
        any_memory = "all_reduce 256 MiB, any device memory, 2 ranks, of the bound"
        self.assertEqual(goals[any_memory], ("met", "0.84 (450 of 538 GB/s)"))
        self.assertEqual(goals["host-staged path, 64 MiB, of one pinned copy each way"], ("met", "0.83"))
        self.assertEqual(goals["a killed rank is named, and the context stays usable"], ("met", "0.25 s"))
        self.assertEqual(goals["compute-sanitizer, memcheck"], ("met", "clean"))
        self.assertEqual(len(goals), 7)
        self.assertNotIn("NOT RUN", {status for status, _ in goals.values()})
        self.assertIn("| kolo registered, 2 ranks | 5.0 |", self.table)
        # Of both calls.
        self.assertIn("unit-tests --exact cuda::on_a_gpu::sums --include-ignored", self.log)
        self.assertIn("device.py nccl --ranks 2", self.log)
        self.assertIn("test result: ok. 1 passed", self.log)

    def test_each_call_has_the_time_for_its_parts(self):
        for group in ("first", "second"):
            self.assertLessEqual(sum(part.limit for part in gpu_check.PARTS if group in part.groups), gpu_check.LIMIT)
        self.assertTrue(all(part.groups for part in gpu_check.PARTS))

    def test_parts_are_listed_and_chosen(self):
        listed = subprocess.run(["sh", self.folder / "gpu-check.sh", "--list"], capture_output=True, text=True, check=True).stdout
        self.assertEqual([line.split()[0] for line in listed.splitlines()], [part.name for part in gpu_check.PARTS])
        self.assertEqual(self.run_check("--parts", "doctor,torch-killed"), 0)
        self.assertEqual(list(self.parts), ["machine", "doctor", "torch-build", "torch-killed"])
        # A part that runs again replaces what it has found.
        self.assertEqual(self.run_check("--parts", "torch-killed", planted={"killed staged": "crash"}), 1)
        self.assertEqual(self.failed(), {"torch-killed"})
        self.assertEqual(self.parts["doctor"]["status"], "passed")
        self.assertEqual(set(self.report["figures"]), {f"a killed rank is named, {path}" for path in ("direct", "host")})
        process = self.start("--parts", "doctor,nothing")
        printed, _ = process.communicate(timeout=PATIENCE)
        self.assertEqual(process.returncode, 2)
        self.assertIn("there is no part 'nothing'", printed)

    def test_what_does_not_belong_together_is_not_added(self):
        self.assertEqual(self.run_check("--parts", "doctor"), 0)
        (self.folder / "COMMIT").write_text("def\n")
        self.assertEqual(self.run_check("--parts", "bounds"), 2)
        self.assertIn("report.json is of kolo abc, and this is def", self.printed)
        (self.folder / "COMMIT").write_text("abc\n")
        self.assertEqual(self.run_check("--parts", "doctor,bounds", DEVICE="Other GPU"), 1)
        self.assertIn("FAILED: what the machine has: the report is of Fake GPU, and this machine has Other GPU", self.printed)
        self.assertEqual(self.run_check("--parts", "doctor,bounds", NO_DEVICE="there is no driver"), 1)
        self.assertIn("this machine has no GPU (there is no driver)", self.printed)
        self.assertEqual(self.parts["doctor"]["status"], "passed")
        self.assertNotIn("bounds", self.parts)

    # ---- What is missing ----

    def test_without_a_gpu_nothing_is_run_and_all_of_it_says_why(self):
        self.assertEqual(self.run_check(NO_DEVICE="there is no GPU here"), 3)
        self.assertIn("NOTHING WAS RUN: there is no GPU here", self.printed)
        self.assertIn("NOTHING WAS RUN: there is no GPU here", self.table)
        self.assertFalse(self.report["was_run"])
        self.assertEqual(len(self.parts), len(gpu_check.PARTS))
        for part in self.report["parts"]:
            self.assertEqual((part["status"], part["why"]), ("NOT RUN", "there is no GPU here"))
        self.assertEqual({goal["status"] for goal in self.report["goals"]}, {"NOT RUN"})
        self.assertEqual(len(self.report["goals"]), 7)

    def test_without_pytorch_the_rest_is_run(self):
        self.assertEqual(self.run_check(NO_TORCH="there is no PyTorch here"), 0)
        not_run = {name for name, status in self.statuses().items() if status == "NOT RUN"}
        of_torch = {"torch-build", "torch-streams", "torch-killed", "torch-kolo", "torch-collectives", "gloo", "nccl", "bounds"}
        self.assertEqual(not_run, of_torch)
        self.assertEqual(self.parts["gloo"]["why"], "there is no PyTorch here")
        self.assertEqual({goal["status"] for goal in self.report["goals"] if "Gloo" in goal["what"]}, {"NOT RUN"})

    def test_no_unit_test_is_none_that_passed(self):
        self.assertEqual(self.run_check("--parts", "doctor,unit-tests", NAMES=" "), 0)
        self.assertEqual(self.parts["unit-tests"]["status"], "NOT RUN")
        self.assertEqual(self.run_check("--parts", "unit-tests", planted={"cuda::on_a_gpu::sums": "missing"}), 1)
        self.assertIn("cuda::on_a_gpu::sums: it did not run", self.parts["unit-tests"]["why"])

    def test_a_backend_that_does_not_fit_is_not_one_that_passed(self):
        (self.folder / "site" / "torch_kolo.py").write_text("raise ImportError('it is for PyTorch 2.15')\n")
        # No compiler.
        for name in ("sh", "dirname"):
            (self.folder / "tools" / name).symlink_to(shutil.which(name))
        (self.folder / "tools" / "python3").symlink_to(sys.executable)
        self.assertEqual(self.run_check("--parts", "doctor,torch-streams", PATH=""), 0)
        self.assertIn("the packed one does not fit: ImportError: it is for PyTorch 2.15", self.parts["torch-build"]["why"])
        self.assertEqual(self.statuses()["torch-streams"], "NOT RUN")

    # ---- What fails ----

    def test_planted_failures_are_named_and_the_rest_is_run(self):
        planted = {
            "cuda::on_a_gpu::copies": "hang",
            "cuda::on_a_gpu::sums": "crash",
            "ddp::on_a_gpu::reduces": "wrong",
            "bench registered 2 67108864": "wrong",
            "bench registered 2 268435456": "hang",
            "test_on_a_gpu 4-direct": "hang",
            "test_on_a_gpu 2-host": "wrong",
            "killed staged": "crash",
        }
        self.assertEqual(self.run_check("--parts", "first", planted=planted), 1)
        self.assertEqual(self.failed(), {"unit-tests", "bench-registered-2", "torch-streams", "torch-killed"})
        self.assert_ended(3)
        # A failure is named by the last lines, by both reports, and with its reason.
        whys = {}
        for part in self.report["parts"]:
            whys.update({(part["part"], test["name"]): test["why"] for test in part["tests"] if test["status"] == "FAILED"})
        expected = {
            ("unit-tests", "cuda::on_a_gpu::copies"): r"it hung: .* after 10 s; .* is in hang_for_ever \(planted.py:",
            ("unit-tests", "cuda::on_a_gpu::sums"): "it was ended by SIGSEGV",
            ("unit-tests", "ddp::on_a_gpu::reduces"): r"failed: 3 and 4 \(src/cuda/on_a_gpu.rs:12:5\)",
            ("bench-registered-2", "8 to 67108864 B"): "12 wrong elements at 8 B in_place",
            ("bench-registered-2", "268435456 to 268435456 B"): "kolo bench hung: .* hang_for_ever",
            ("torch-streams", "4-direct"): r"it hung: .* is in hang_for_ever \S+ < side_streams .* is in waits_for_ranks",
            ("torch-streams", "2-host"): r"1 failed: test_on_a_gpu\[2-host-coalesced\]: ValueError: 3 is not 4",
            ("torch-killed", "staged"): "pytest was ended by SIGSEGV",
        }
        self.assertEqual(whys.keys(), expected.keys())
        for (part, test), why in expected.items():
            self.assertRegex(whys[part, test], why)
            self.assertRegex(self.printed, f"FAILED: {self.parts[part]['name']}: .*{test.replace('.', '[.]')}: ")
            self.assertIn(f"| {self.parts[part]['name']} | FAILED | ", self.table)
        # What the programs printed, stacks included, is in the log alone.
        self.assertNotIn("\"output\"", json.dumps(self.report))
        self.assertNotIn("```", self.table)
        passed = [test["name"] for test in self.parts["torch-streams"]["tests"] if test["status"] == "passed"]
        self.assertEqual(passed, ["2-direct", "2-staged"])
        # The first look and the last.
        self.assertEqual(self.log.count("# stacks after"), 2 * 3)
        self.assertIn("in side_streams", self.log)
        self.assertEqual(self.report["figures"]["a killed rank is named, direct"], 0.25)

    def test_what_hangs_is_ended_and_what_was_measured_before_is_kept(self):
        planted = {"bench any 2 268435456": "hang"}
        self.assertEqual(self.run_check("--parts", "bench-2,bench-4", planted=planted), 1)
        self.assertEqual(self.failed(), {"bench-2"})
        self.assertIn("was not done after", self.parts["bench-2"]["why"])
        self.assertIn("8", self.report["figures"]["kolo, 2 ranks"]["in_place"])
        self.assertNotIn(str(gpu_report.LARGE), self.report["figures"]["kolo, 2 ranks"]["in_place"])
        self.assert_ended(1)

    def test_stacks_of_a_program_without_python(self):
        program = subprocess.Popen(["sleep", "600"], env={**os.environ, gpu_stacks.MARK: "test"})
        self.addCleanup(program.wait)
        self.addCleanup(program.kill)
        while gpu_stacks.read(f"/proc/{program.pid}/comm") != "sleep":
            time.sleep(0.01)
        text, places = gpu_stacks.dump("test", self.folder, {}, True)
        self.assertIn(f"---- process {program.pid}: sleep 600\nthread {program.pid} sleep: ", text)
        self.assertRegex(places, rf"^process {program.pid}: [SR] \(")
        if gdb := shutil.which("gdb"):
            text, places = gpu_stacks.dump("test", self.folder, {"gdb": gdb}, False)
            if "not permitted" not in text:
                self.assertIn("gdb:\nThread 1 ", text)
                self.assertRegex(places, rf"^process {program.pid} is in \S*nanosleep")

    def test_the_thread_of_a_test_is_what_tells(self):
        stacks = """Thread 3 (Thread 0x7f01 (LWP 9) "watch"):
#0  __poll (fds=0x1) at poll.c:29
Thread 2 (Thread 0x7f02 (LWP 8) "cuda::on_a_gpu:"):
#0  0x0000000000001234 in sched_yield () at ../sysdeps/syscall-template.S:120
#1  0x0000000000005678 in <kolo::cuda::Nvidia as kolo::cuda::Device>::wait (self=0x1)
#2  0x0000000000009abc in kolo::cuda::nvidia::on_a_gpu::until_done ()
Thread 1 (Thread 0x7f03 (LWP 7) "unit-tests"):
#0  futex_wait (private=0) at futex.c:146
"""
        inside = "sched_yield < <kolo::cuda::Nvidia as kolo::cuda::Device>::wait < kolo::cuda::nvidia::on_a_gpu::until_done"
        self.assertEqual(gpu_stacks.place(7, stacks), f"process 7 is in {inside}")
        self.assertEqual(gpu_stacks.place(7, stacks.replace("on_a_gpu", "")), "process 7 is in futex_wait")

    def test_errors_of_memcheck_are_named(self):
        self.assertEqual(self.run_check("--parts", "memcheck", planted={"memcheck cuda::on_a_gpu::sums": "wrong"}), 1)
        failed = "FAILED: compute-sanitizer memcheck: 1 of 3 failed: cuda::on_a_gpu::sums: "
        self.assertRegex(self.printed, failed + ".*Invalid __global__ read of size 4")
        self.assertNotIn("memcheck", self.report["figures"])

    def test_failures_of_single_commands_are_named(self):
        planted = {"doctor": "crash", "gloo": "crash", "kolo": "wrong", "nccl": "not run", "probe copies": "crash"}
        self.assertEqual(self.run_check("--parts", "doctor,gloo,nccl,torch-kolo,bounds", planted=planted), 1)
        self.assertEqual(self.failed(), {"doctor", "gloo", "bounds"})
        for name in ("kolo doctor", "Gloo on CUDA tensors, 2 ranks", "bounds: copies"):
            self.assertRegex(self.printed, f"FAILED: {name}: .* was ended by SIGSEGV")
        self.assertEqual(self.parts["nccl"]["why"], "this PyTorch has no NCCL")

    def test_a_driver_that_hangs_is_a_failure(self):
        self.assertEqual(self.run_check("--parts", "doctor", planted={"probe device": "hang"}), 1)
        self.assertRegex(self.printed, "FAILED: what the machine has: gpu_probe.py device hung")
        self.assert_ended(1)

    def until_it_hangs(self, number, planted):
        """Sends a signal to a check whose command hangs. Reads the report that it leaves."""
        process = self.start("--parts", "first", planted={planted: "hang"})
        until = time.monotonic() + PATIENCE
        while not self.pids() and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(number)
        self.assertNotEqual(process.wait(PATIENCE), 0)
        process.stdout.close()
        self.read_report()

    def test_a_check_that_is_told_to_end_ends_its_processes(self):
        self.until_it_hangs(signal.SIGTERM, "cuda::on_a_gpu::sums")
        self.assert_ended(1)
        self.assertEqual(self.statuses(), {"machine": "passed", "doctor": "passed", "unit-tests": "UNFINISHED"})
        tests = {test["name"]: test["status"] for test in self.parts["unit-tests"]["tests"]}
        self.assertEqual(tests, {"cuda::on_a_gpu::copies": "passed", "cuda::on_a_gpu::sums": "UNFINISHED"})
        self.assertIn("the check was ended during this part (SIGTERM)", self.table)

    def test_a_check_that_is_killed_leaves_a_report(self):
        self.until_it_hangs(signal.SIGKILL, "doctor")
        self.assertEqual(self.statuses(), {"machine": "passed", "doctor": "UNFINISHED"})
        self.assertIn("| kolo doctor | UNFINISHED | 0 | the check ended during this part |", self.table)
        self.assertIn("bin/kolo doctor ", self.log)


class Page(unittest.TestCase):
    """docs/gpu/README.md has the figures of the reports beside it."""

    ROWS = {
        "PyTorch, Gloo, 2 ranks": "gloo under PyTorch, 2 ranks",
        "PyTorch, kolo, 2 ranks": "kolo under PyTorch, 2 ranks",
        "`alloc_device`, 2 ranks": "kolo registered, 2 ranks",
        "memory that others cannot open, 2 ranks": "kolo, 2 ranks",
        "staged, 2 ranks": "kolo staged, 2 ranks",
        "`alloc_device`, 4 ranks": "kolo registered, 4 ranks",
    }

    def test_figures_and_goals(self):
        folder = Path(__file__).parent.parent / "docs" / "gpu"
        rows = [line.strip("| ").split(" | ") for line in (folder / "README.md").read_text().splitlines() if line.startswith("| ")]
        reports = sorted(folder.glob("*.json"))
        self.assertTrue(reports)
        for column, path in enumerate(reports):
            device = path.name.split("-")[0].upper()
            report = json.loads(path.read_text())
            medians = {}
            for key, figure in report["figures"].items():
                if isinstance(figure, dict):
                    of = {size: row["p50_us"] for size, row in figure["in_place"].items()} if "in_place" in figure else figure
                    medians[key] = [str(round(of[str(size)])) for size in gpu_report.SIZES if str(size) in of]
            found = {row[1]: row[2:] for row in rows if row[0] == device}
            self.assertTrue(found, device)
            self.assertEqual(found, {name: medians[self.ROWS[name]] for name in found})
            heading = next(at for at, row in enumerate(rows) if row[0] == "goal")
            for row, goal in zip(rows[heading + 1 :], report["goals"]):
                said = row[2 + column]
                self.assertEqual("not met" in said, goal["status"] == "NOT MET", row)
                self.assertEqual(said == "not run", goal["status"] == "NOT RUN", row)
                self.assertIn(said.removeprefix("not met: "), goal["figure"] or "not run", row)


if __name__ == "__main__":
    unittest.main()
