"""Runs the checks of gpu-check.sh in a packed folder. See docs/gpu/README.md."""

import argparse
import glob
import gzip
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gpu_stacks
from gpu_command import Commands, Failed, NotRun, ended
from gpu_report import FAILED, LARGE, NOT_RUN, OUTPUT, PASSED, SIZES, UNFINISHED, Report

# The time of a call, in seconds. Parts that would begin later do not run. Half a minute less than
# nine minutes, because the last command may hang, and its stacks take time too.
LIMIT = 515
# A command that takes longer may hang.
STACKS_AFTER = 20
# How test_cuda.py names the ranks and the path of its tests.
CASES = ["2-direct", "4-direct", "2-staged", "2-host"]


class Check:
    def __init__(self, folder, scratch, commands, report, largest):
        self.folder = folder
        self.scratch = scratch
        self.commands = commands
        self.run = commands.run
        self.report = report
        self.largest = largest
        self.figures = report.figures
        self.kolo = folder / "bin" / "kolo"
        self.gpu = "nothing has looked for a GPU"
        self.torch = self.backend = None
        environment = commands.environment
        environment.update(KOLO_CACHE_DIR=str(scratch / "kernels"), PYTHONDONTWRITEBYTECODE="1")
        # Before libraries of the same name on the machine, which may have any version.
        self.add_path("PYTHONPATH", folder / "python")
        if given := os.environ.get("PYTHONPATH"):
            environment["PYTHONPATH"] += os.pathsep + given
        path = f"{folder / 'python' / 'bin'}{os.pathsep}{environment['PATH']}"
        commands.debuggers = gpu_stacks.debuggers(path)

    def add_path(self, name, path):
        environment = self.commands.environment
        environment[name] = os.pathsep.join(filter(None, [environment.get(name), str(path)]))

    def part(self, name, title, limit, function, *args):
        """Runs a part. The report has it from its beginning."""
        began = time.monotonic()
        self.commands.until_of_part = began + limit * self.commands.slow
        before = set(self.figures)
        self.entry = entry = self.report.begin(name, title)
        before &= set(self.figures)
        print(f"--- {title}", flush=True)
        self.commands.say(f"\n==== {title}")
        try:
            entry.update(output=function(self, *args) or "", status=PASSED, why="")
        except NotRun as why:
            entry.update(status=NOT_RUN, why=str(why))
        except Failed as failed:
            entry.update(status=FAILED, why=str(failed), output=failed.output)
        except Exception as error:
            entry.update(status=FAILED, why=f"{type(error).__name__}: {error}")
        except BaseException as error:
            entry["why"] = f"the check was ended during this part ({error})"
            raise
        finally:
            entry["output"] = entry["output"][-OUTPUT:]
            entry["seconds"] = round(time.monotonic() - began, 1)
            entry["figures"] = sorted(set(self.figures) - before)
            self.report.write()
            result = f"{entry['status']}{': ' if entry['why'] else ''}{entry['why']} ({entry['seconds']} s)"
            print(f"    {result}", flush=True)
            self.commands.say(f"==== {title}: {result}")

    def each(self, names, test):
        """Runs tests one by one. The rest runs if one fails."""
        tests, output = self.entry["tests"], ""
        for name in names:
            result = {"name": name, "status": UNFINISHED, "why": "", "output": ""}
            tests.append(result)
            self.report.write()
            began = time.monotonic()
            try:
                text = test(name)
                result["status"] = PASSED
            except NotRun as why:
                text = ""
                result.update(status=NOT_RUN, why=str(why))
            except Failed as failed:
                text = failed.output
                result.update(status=FAILED, why=str(failed), output=text[-OUTPUT:])
            except Exception as error:
                text = ""
                result.update(status=FAILED, why=f"{type(error).__name__}: {error}")
            result["seconds"] = round(time.monotonic() - began, 1)
            output += text
        of = {status: [result for result in tests if result["status"] == status] for status in (PASSED, FAILED, NOT_RUN)}
        if of[FAILED]:
            reasons = "; ".join(f"{result['name']}: {result['why']}" for result in of[FAILED])
            not_run = f", {len(of[NOT_RUN])} were NOT RUN" if of[NOT_RUN] else ""
            raise Failed(f"{len(of[FAILED])} of {len(tests)} failed{not_run}: {reasons}", output)
        if of[NOT_RUN]:
            reasons = "; ".join(f"{result['name']}: {result['why']}" for result in of[NOT_RUN])
            # The others passed, but a part that is not whole must not look so.
            raise NotRun(f"{len(of[NOT_RUN])} of {len(tests)} were not run: {reasons}")
        return output

    # ---- What there is ----

    def machine(self):
        found = self.probe("device", 30)
        self.gpu = found.pop("missing", None)
        machine = self.report.machine
        here = found.get("device", f"no GPU ({self.gpu})")
        if machine.get("device", here) != here:
            raise Failed(f"the report is of {machine['device']}, and this machine has {here}: name another report")
        machine.clear()
        machine.update(found, python=sys.version.split()[0], cores=os.cpu_count())
        tools = self.commands.debuggers
        missing = [name for name in gpu_stacks.DEBUGGERS if name not in tools]
        machine["stacks"] = " and ".join(["/proc", "faulthandler", *tools])
        if missing:
            machine["stacks"] += f" (not installed: {' and '.join(missing)})"
        self.needs_gpu()
        try:
            torch = self.probe("torch", 40)
        except (Failed, NotRun) as why:
            torch = {"missing": f"PyTorch does not start: {why}"}
        self.torch = torch.get("torch")
        machine["torch"] = self.torch or torch["missing"]
        for library in torch.get("libraries", []):
            self.add_path("LD_LIBRARY_PATH", library)
        if shutil.which("nvidia-smi"):
            query = "driver_version,memory.total,clocks.max.sm,mig.mode.current"
            try:
                status, text = self.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], 10, "nvidia-smi")
            except (Failed, NotRun) as why:
                status, text = 0, str(why)
            if status == 0 and text.strip():
                machine["driver"] = text.strip().splitlines()[0]

    def probe(self, what, limit):
        status, text = self.run([sys.executable, self.folder / "gpu_probe.py", what], limit, f"gpu_probe.py {what}")
        if status:
            raise ended(f"gpu_probe.py {what}", status, text)
        return last_json(text)

    def needs_gpu(self, torch=False):
        if self.gpu:
            raise NotRun(self.gpu)
        if torch and not self.torch:
            raise NotRun(self.report.machine["torch"])

    # ---- kolo alone ----

    def doctor(self):
        self.needs_gpu()
        status, text = self.run([self.kolo, "doctor"], 20, "kolo doctor")
        if status:
            raise ended("kolo doctor", status, text)
        return text

    def unit_tests(self, limit, wrapper=(), clean=""):
        """Runs each test in a process of its own. `clean` is what the wrapper prints of a test that passed."""
        self.needs_gpu()
        program = self.unpacked("bin/unit-tests", self.scratch / "unit-tests")
        status, text = self.run([program, "on_a_gpu", "--list", "--format", "terse"], 20, "the list of unit tests")
        if status:
            raise ended("the list of unit tests", status, text)
        names = re.findall(r"^(\S+): test$", text, re.M)
        if not names:
            raise NotRun("no unit test is for a GPU")

        def test(name):
            command = [*wrapper, program, "--exact", name, "--include-ignored"]
            status, text = self.run(command, limit, "it", {"KOLO_TEST_GPU": "1", "RUST_BACKTRACE": "1"})
            if status:
                raise ended("it", status, text, reason(text))
            if not re.search(r"\b1 passed", text):
                raise Failed("it did not run", text)
            if clean not in text:
                raise Failed(f"its output lacks {clean!r}", text)
            return text

        return self.each(names, test)

    def unpacked(self, name, to):
        """Copies a packed file, which may be compressed, and returns the path of the copy."""
        if not to.exists():
            plain = self.folder / name
            with open(plain, "rb") if plain.exists() else gzip.open(f"{plain}.gz") as packed, open(to, "wb") as file:
                shutil.copyfileobj(packed, file)
            to.chmod(0o755)
        return to

    def memcheck(self):
        self.needs_gpu()
        places = glob.glob("/usr/local/cuda*/bin/compute-sanitizer")
        found = shutil.which("compute-sanitizer") or next(iter(places), None)
        if not found:
            raise NotRun("there is no compute-sanitizer here")
        # kolo asks the driver for what may fail, such as the place of memory that is not on a device.
        wrapper = [found, "--tool", "memcheck", "--report-api-errors", "no"]
        wrapper += ["--target-processes", "all", "--error-exitcode", "77"]
        text = self.unit_tests(60, wrapper, "ERROR SUMMARY: 0 errors")
        self.figures["memcheck"] = 0
        return text

    def bounds(self):
        self.needs_gpu(torch=True)
        self.figures.update(self.probe("copies", 30))

    def bench(self, key, ranks, sizes, options=(), environment=None):
        self.needs_gpu()
        figures = self.figures.setdefault(key, {"in_place": {}, "out_of_place": {}})
        file = self.scratch / "bench.json"

        def measure(some):
            file.unlink(missing_ok=True)
            bench = [self.kolo, "bench", "all_reduce", "--device", "cuda", "--sizes", ",".join(map(str, some)), "--wide", "--check"]
            timeout = f"{20 * self.commands.slow:.0f}s"
            bench += ["--iters", 10, "--warmup", 3, "--timeout", timeout, "--json", file, *options]
            status, text = self.run([self.kolo, "run", "-n", ranks, "--", *bench], 25, "kolo bench", environment)
            rows = json.loads(file.read_text())["rows"] if file.exists() else []
            lines = [(row["bytes"], form, row[form]) for row in rows for form in figures if row.get(form)]
            wrong = [f"{line['wrong']} wrong elements at {size} B {form}" for size, form, line in lines if line.get("wrong")]
            if wrong:
                more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
                raise Failed("; ".join(wrong[:3]) + more, text)
            if status:
                raise ended("kolo bench", status, text)
            for size, form, line in lines:
                figures[form][str(size)] = {of: round(line[of], 3) for of in ("p50_us", "algbw_gbs")}
            if {row["bytes"] for row in rows} != set(some):
                raise Failed("kolo bench did not measure all sizes", text)
            return text

        sizes = [size for size in sizes if size <= self.largest]
        # The largest size by itself: if it fails, the other measurements are kept.
        small, large = [size for size in sizes if size < LARGE], [size for size in sizes if size >= LARGE]
        groups = {f"{some[0]} to {some[-1]} B": some for some in (small, large) if some}
        return self.each(groups, lambda name: measure(groups[name]))

    # ---- Beside PyTorch ----

    def peer(self, backend, ranks):
        self.needs_gpu(torch=True)
        if backend == "kolo":
            self.needs_backend()
        sizes = ",".join(map(str, SIZES))
        command = [sys.executable, self.folder / "peers" / "device.py", backend]
        command += ["--ranks", ranks, "--sizes", sizes, "--seconds", 1]
        status, text = self.run(command, 40, backend)
        if status == 3:
            raise NotRun(text.strip().splitlines()[-1].removeprefix("NOT RUN: "))
        if status:
            raise ended(backend, status, text)
        self.figures[f"{backend} under PyTorch, {ranks} ranks"] = last_json(text)
        return text

    def build_backend(self):
        self.needs_gpu(torch=True)
        packed = self.folder / "site"
        why = "none was packed"
        if packed.is_dir():
            # Not the backend in Python, which torch_kolo falls back to.
            command = [sys.executable, "-c", "import torch_kolo; torch_kolo.Options()"]
            environment = self.commands.environment
            site = os.pathsep.join([environment["PYTHONPATH"], str(packed)])
            status, text = self.run(command, 30, "torch_kolo", {"PYTHONPATH": site, "KOLO_TORCH_IMPL": "cpp"})
            if status == 0:
                environment.update(PYTHONPATH=site, KOLO_TORCH_IMPL="cpp")
                self.backend = self.folder / "torch"
                return "it was packed\n"
            why = f"the packed one does not fit: {(text.strip().splitlines() or [''])[-1]}"
        if not shutil.which("g++"):
            raise NotRun(f"there is no g++ to build torch_kolo with, and {why}")
        source, site = (self.scratch / name for name in ("torch", "site"))
        shutil.copytree(self.folder / "torch", source)
        environment = {
            "KOLO_TORCH_CPP": "1",
            "MAX_JOBS": str(os.cpu_count()),
            "PATH": os.pathsep.join([str(self.folder / "python" / "bin"), self.commands.environment["PATH"]]),
        }
        pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation"]
        pip += ["--target", site, source]
        status, text = self.run(pip, 100, "building torch_kolo", environment)
        if status:
            raise ended("building torch_kolo", status, text)
        self.add_path("PYTHONPATH", site)
        self.commands.environment["KOLO_TORCH_IMPL"] = "cpp"
        self.backend = source
        return text

    def needs_backend(self):
        if not self.backend:
            raise NotRun("torch_kolo was not built")

    def torch_tests(self, tests, cases, limit):
        """Runs pytest once for each case, so that a case that hangs does not hide the others."""
        self.needs_gpu(torch=True)
        self.needs_backend()

        def test(case):
            figures = self.scratch / "figures"
            figures.unlink(missing_ok=True)
            # Without capturing, so that the log also has the output of ranks that hang.
            pytest = [sys.executable, "-m", "pytest", "-v", "-s", "-rfEs", "-p", "no:cacheprovider"]
            pytest += [self.backend / "tests" / "test_cuda.py", "-k", f"{tests} and {case}"]
            try:
                status, text = self.run(pytest, limit, "it", {"KOLO_GPU_FIGURES": str(figures)})
            finally:
                if figures.exists():
                    for figure in map(json.loads, figures.read_text().splitlines()):
                        self.figures[figure["what"]] = figure["seconds"]
            if failed := failures(text):
                raise Failed(f"{len(failed)} failed: {'; '.join(failed[:5])}", text)
            if status == 5 or not status and not re.search(r"\d+ passed", text):
                skipped = re.search(r"^SKIPPED .*", text, re.M)
                raise NotRun(f"pytest ran nothing{f': {skipped[0]}' if skipped else ''}")
            if status:
                raise ended("pytest", status, text)
            return text

        return self.each(cases, test)


def reason(text):
    """Returns what a test that failed says of it, in its own words or those of memcheck."""
    if error := re.search(r"^=+ (Invalid .*)", text, re.M):
        return error[1]
    if panic := re.search(r"panicked at (.*):\n(.*)", text):
        return f"{panic[2]} ({panic[1]})"
    return ""


def failures(text):
    """Returns the tests that failed and their reasons, from the output of pytest."""
    found = []
    # In its summary.
    for name, why in re.findall(r"^(?:FAILED|ERROR) \S*?::(\S+)(?: - (.*))?$", text, re.M):
        # A rank's error is at the end of a traceback that is itself the message of the test's error.
        section = re.search(rf"^_+ (?:ERROR at \w+ of )?{re.escape(name)} _+$(.*?)(?:^_+ .* _+$|^=+ )", text, re.M | re.S)
        errors = re.findall(r"^E +([\w.]*(?:Error|Exception)\b.*)", section[1] if section else "", re.M)
        found.append(f"{name}: {errors[-1] if errors else why}"[:300])
    return found


def last_json(text):
    lines = [line for line in text.splitlines() if line.startswith("{")]
    if not lines:
        raise Failed("no line of JSON was printed", text)
    return json.loads(lines[-1])


# ---- The parts ----


@dataclass
class Part:
    name: str
    # The calls that it belongs to.
    groups: tuple[str, ...]
    # In seconds. Those of a group add up to LIMIT at most.
    limit: int
    title: str
    function: Callable
    args: tuple = ()


FIRST, SECOND = ("first",), ("second",)
STAGED = {"KOLO_DEVICE_PATH": "staged"}
MACHINE = Part("machine", FIRST + SECOND, 50, "what the machine has", Check.machine)
# What says most comes first.
PARTS = [
    MACHINE,
    Part("doctor", FIRST, 20, "kolo doctor", Check.doctor),
    Part("unit-tests", FIRST, 90, "unit tests on a GPU", Check.unit_tests, (60,)),
    Part(
        "bench-registered-2",
        FIRST,
        50,
        "kolo bench, registered memory, 2 ranks",
        Check.bench,
        ("kolo registered, 2 ranks", 2, SIZES, ["--registered"]),
    ),
    Part("torch-build", FIRST + SECOND, 70, "torch_kolo: build", Check.build_backend),
    Part("torch-streams", FIRST, 135, "torch_kolo: streams, futures, DDP", Check.torch_tests, ("test_on_a_gpu", CASES, 60)),
    Part("torch-killed", FIRST, 70, "torch_kolo: a killed rank", Check.torch_tests, ("killed", ["direct", "staged", "host"], 40)),
    Part("bounds", FIRST, 30, "bounds: copies", Check.bounds),
    Part("bench-2", SECOND, 40, "kolo bench, any device memory, 2 ranks", Check.bench, ("kolo, 2 ranks", 2, SIZES)),
    Part("gloo", SECOND, 40, "Gloo on CUDA tensors, 2 ranks", Check.peer, ("gloo", 2)),
    Part("torch-kolo", SECOND, 30, "kolo under PyTorch, 2 ranks", Check.peer, ("kolo", 2)),
    Part(
        "bench-staged-2",
        SECOND,
        25,
        "kolo bench, staged through the host, 2 ranks",
        Check.bench,
        ("kolo staged, 2 ranks", 2, SIZES[:4], (), STAGED),
    ),
    Part("memcheck", SECOND, 85, "compute-sanitizer memcheck", Check.memcheck),
    Part(
        "bench-registered-4",
        SECOND,
        30,
        "kolo bench, registered memory, 4 ranks",
        Check.bench,
        ("kolo registered, 4 ranks", 4, SIZES, ["--registered"]),
    ),
    Part("bench-4", SECOND, 30, "kolo bench, any device memory, 4 ranks", Check.bench, ("kolo, 4 ranks", 4, SIZES)),
    Part(
        "torch-collectives",
        SECOND,
        85,
        "torch_kolo: every collective",
        Check.torch_tests,
        ("test_collective_on_a_gpu", CASES, 50),
    ),
    Part("nccl", SECOND, 30, "NCCL, 2 ranks", Check.peer, ("nccl", 2)),
]


def chosen(text):
    """Returns the parts that a list of names of parts and groups means, in order."""
    names = [name for name in text.split(",") if name]
    known = {name for part in PARTS for name in (part.name, *part.groups)}
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"there is no part {unknown[0]!r}: see --list")
    parts = [part for part in PARTS if part is MACHINE or {part.name, *part.groups} & set(names)]
    # The tests of PyTorch need the backend, also where it is not named.
    needs_backend = any(part.name.startswith("torch-") for part in parts)
    return [part for part in PARTS if part in parts or needs_backend and part.name == "torch-build"]


def arguments():
    parser = argparse.ArgumentParser(prog="gpu-check.sh", description="Runs the checks that need a GPU.")
    parser.add_argument("--run", metavar="FOLDER", type=Path, help="the folder that --pack has made")
    parser.add_argument("--out", metavar="REPORT", type=Path, help="writes REPORT.json, .md and .log; adds to what is there")
    parser.add_argument("--parts", metavar="NAME,...", type=chosen, default=PARTS, help="parts, or a group: first or second")
    parser.add_argument("--list", action="store_true", help="prints the parts")
    # For the tests of this program.
    parser.add_argument("--stacks-after", type=float, default=STACKS_AFTER, help=argparse.SUPPRESS)
    parser.add_argument("--most", type=float, help=argparse.SUPPRESS)
    # For a GPU in host memory.
    parser.add_argument("--slow", type=float, default=1.0, help=argparse.SUPPRESS)
    parser.add_argument("--largest", type=int, default=SIZES[-1], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.list:
        if not args.run or not args.out:
            parser.error("--run and --out are needed")
        if not (args.run / "bin" / "kolo").is_file():
            parser.error(f"{args.run} is not what --pack makes: there is no bin/kolo in it")
    return args


def print_parts():
    for part in PARTS:
        print(f"{part.name:<20} {' and '.join(part.groups):<17} {part.limit:>3} s  {part.title}")


def main():
    args = arguments()
    if args.list:
        return print_parts()
    began = time.monotonic()
    folder, out = args.run.resolve(), args.out.resolve()
    commit = folder / "COMMIT"
    kolo = commit.read_text().strip() if commit.is_file() else "unknown"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        report = Report(out, kolo, [part.name for part in PARTS])
        with open(f"{out}.log", "a"):
            pass
    except (OSError, ValueError) as problem:
        print(f"the report cannot be written: {problem}", file=sys.stderr)
        return 2
    if report.kolo != kolo:
        print(f"{out}.json is of kolo {report.kolo}, and this is {kolo}: name another report", file=sys.stderr)
        return 2
    # Also ends what is running.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit("SIGTERM"))
    with tempfile.TemporaryDirectory(prefix="kolo-gpu-", ignore_cleanup_errors=True) as scratch:
        report.folders = {str(folder): "FOLDER", scratch: "SCRATCH"}
        if sys.prefix != sys.base_prefix:
            report.folders[sys.prefix] = "PYTHON"
        commands = Commands(f"{out}.log", Path(scratch), began + LIMIT * args.slow, args.stacks_after, args.most, args.slow)
        check = Check(folder, Path(scratch), commands, report, args.largest)
        for part in args.parts:
            check.part(part.name, part.title, part.limit, part.function, *part.args)
            # Nothing else would run, and what an earlier call has found stays in the report.
            if part is MACHINE and check.entry["status"] == FAILED:
                break
    return summary(report, [part.name for part in args.parts])


def summary(report, names):
    """Prints what this call has found, and returns its exit status."""
    parts = [entry for entry in report.parts if entry["part"] in names]
    failed = [entry for entry in parts if entry["status"] == FAILED]
    passed = [entry for entry in parts if entry["status"] == PASSED]
    not_run = [entry for entry in parts if entry["status"] == NOT_RUN]
    if not failed and not_run and all(entry["part"] == MACHINE.name for entry in passed):
        print(f"NOTHING WAS RUN: {not_run[0]['why']}")
        return 3
    for entry in failed:
        print(f"FAILED: {entry['name']}: {entry['why']}")
    print(f"{len(passed)} parts passed, {len(failed)} failed, {len(not_run)} NOT RUN")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
