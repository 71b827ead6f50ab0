"""Runs the checks of gpu-check.sh: FOLDER is the packed folder, REPORT the report without its ending."""

import ctypes
import datetime
import glob
import gzip
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# The time for all parts, in seconds. Parts that would begin later do not run.
LIMIT = 520
SIZES = [8, 64 << 10, 1 << 20, 64 << 20, 256 << 20]
LARGE = 256 << 20
PASSED, FAILED, NOT_RUN, MET, NOT_MET = "passed", "FAILED", "NOT RUN", "met", "NOT MET"


class NotRun(Exception):
    """The reason why a part cannot run here."""


class Failed(Exception):
    """A part that failed, with the reason."""


def ended(what, status, text):
    """A failed command, with the end of its output."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return Failed(f"{what} ended with {status}{': ' if lines else ''}{lines[-1][:200] if lines else ''}\n{text}")


class Check:
    def __init__(self, folder, scratch):
        self.folder = folder
        self.scratch = scratch
        self.kolo = folder / "bin" / "kolo"
        self.began = time.monotonic()
        self.until = self.began + LIMIT
        self.parts = []
        self.figures = {}
        self.machine = {}
        self.environment = dict(os.environ, KOLO_CACHE_DIR=str(scratch / "kernels"), PYTHONDONTWRITEBYTECODE="1")
        # Before libraries of the same name on the machine, which may have any version.
        self.environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder / "python"), os.environ.get("PYTHONPATH")]))

    def run(self, command, limit, what, environment=None):
        """Returns the output and the errors of a command. Ends its processes at the time limit."""
        limit = min(limit, self.until - time.monotonic())
        if limit < 5:
            raise NotRun("the time for all parts was over")
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            process = subprocess.Popen(
                [str(word) for word in command],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=self.scratch,
                env={**self.environment, **(environment or {})},
                start_new_session=True,
            )
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
                # `kolo run` ends its ranks when it receives SIGTERM.
                process.terminate()
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    pass
            # Also end the processes that it left behind, by its process group.
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
            output.seek(0)
            text = output.read()
        if status is None:
            raise Failed(f"{what} was not done after {limit:.0f} s\n{text}")
        return status, text

    def part(self, name, function, *args):
        began = time.monotonic()
        entry = {"name": name, "status": PASSED, "why": "", "output": ""}
        print(f"--- {name}", flush=True)
        try:
            entry["output"] = function(*args) or ""
        except NotRun as why:
            entry.update(status=NOT_RUN, why=str(why))
        except Failed as why:
            first, _, rest = str(why).partition("\n")
            entry.update(status=FAILED, why=first, output=rest)
        except Exception as error:
            entry.update(status=FAILED, why=f"{type(error).__name__}: {error}")
        entry["output"] = entry["output"][-6000:]
        entry["seconds"] = round(time.monotonic() - began, 1)
        self.parts.append(entry)
        print(f"    {entry['status']}{': ' if entry['why'] else ''}{entry['why']} ({entry['seconds']} s)", flush=True)

    # ---- What there is ----

    def look_around(self):
        self.machine.update(python=sys.version.split()[0], cores=os.cpu_count())
        self.torch = importlib.util.find_spec("torch")
        for library in self.cuda_libraries():
            paths = self.environment.get("LD_LIBRARY_PATH", "").split(os.pathsep)
            self.environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [*paths, library]))
        self.gpu = self.find_gpu()
        if self.torch:
            status, text = self.run([sys.executable, "-c", "import torch; print(torch.__version__)"], 60, "import torch")
            if status == 0:
                self.machine["torch"] = text.split()[-1]
            else:
                self.torch = None
                self.machine["torch"] = f"cannot be imported: {text.strip().splitlines()[-1] if text.strip() else status}"

    def cuda_libraries(self):
        """Folders where PyTorch's packages have CUDA's libraries."""
        if self.torch and self.torch.origin:
            packages = Path(self.torch.origin).parent.parent
            for library in ("cuda_nvrtc/lib", "cuda_runtime/lib", "cu*/lib"):
                yield from glob.glob(str(packages / "nvidia" / library))

    def find_gpu(self):
        """Returns None, or the reason why there is none."""
        try:
            cuda = ctypes.CDLL("libcuda.so.1")
        except OSError:
            return "there is no CUDA driver here (libcuda.so.1)"
        if result := cuda.cuInit(0):
            return f"the CUDA driver does not start (error {result})"
        count, version = ctypes.c_int(), ctypes.c_int()
        cuda.cuDeviceGetCount(ctypes.byref(count))
        cuda.cuDriverGetVersion(ctypes.byref(version))
        self.machine.update(cuda=f"{version.value // 1000}.{version.value % 1000 // 10}", gpus=count.value)
        if count.value == 0:
            return "there is no GPU here"
        name = ctypes.create_string_buffer(256)
        cuda.cuDeviceGetName(name, 256, 0)
        self.machine["device"] = name.value.decode(errors="replace")
        if shutil.which("nvidia-smi"):
            query = ["nvidia-smi", "--query-gpu=driver_version,memory.total,clocks.max.sm,mig.mode.current", "--format=csv,noheader"]
            status, text = self.run(query, 20, "nvidia-smi")
            if status == 0:
                self.machine["driver"] = text.strip().splitlines()[0]
        return None

    def needs_gpu(self, torch=False):
        if self.gpu:
            raise NotRun(self.gpu)
        if torch and not self.torch:
            raise NotRun(f"there is no PyTorch here{'; it ' + self.machine['torch'] if 'torch' in self.machine else ''}")

    # ---- kolo alone ----

    def doctor(self):
        self.needs_gpu()
        status, text = self.run([self.kolo, "doctor"], 60, "kolo doctor")
        if status:
            raise ended("kolo doctor", status, text)
        return text

    def unit_tests(self, wrapper=(), limit=90):
        self.needs_gpu()
        command = [*wrapper, self.folder / "bin" / "unit-tests", "on_a_gpu", "--include-ignored", "--test-threads=4"]
        status, text = self.run(command, limit, "the unit tests", {"KOLO_TEST_GPU": "1"})
        if status:
            raise ended("the unit tests", status, text)
        counted = re.search(r"(\d+) passed", text)
        if not counted or counted[1] == "0":
            raise NotRun("no unit test is for a GPU")
        return text

    def sanitizer(self, tool):
        self.needs_gpu()
        found = shutil.which("compute-sanitizer") or next(iter(glob.glob("/usr/local/cuda*/bin/compute-sanitizer")), None)
        if not found:
            raise NotRun("there is no compute-sanitizer here")
        wrapper = [found, "--tool", tool, "--target-processes", "all", "--error-exitcode", "77"]
        text = self.unit_tests(wrapper, 75)
        if not re.search(r"ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards", text):
            raise Failed(f"{tool} found something\n{text}")
        self.figures[tool] = 0
        return text

    def bounds(self):
        """Measures the bounds of the goals: copies on the device, and both ways through pinned memory."""
        self.needs_gpu(torch=True)
        status, text = self.run([sys.executable, Path(__file__).resolve(), "--bounds"], 60, "measuring copies")
        if status:
            raise ended("measuring copies", status, text)
        self.figures.update(json.loads(text.strip().splitlines()[-1]))
        return text

    def bench(self, key, ranks, sizes, options=(), environment=None, limit=40):
        self.needs_gpu()
        figures = self.figures.setdefault(key, {"in_place": {}, "out_of_place": {}})
        printed = ""
        # The largest size by itself: if it fails, the other measurements are kept.
        for some in ([size for size in sizes if size < LARGE], [size for size in sizes if size >= LARGE]):
            if not some:
                continue
            file = self.scratch / "bench.json"
            bench = [self.kolo, "bench", "all_reduce", "--device", "cuda", "--sizes", ",".join(map(str, some)), "--check"]
            bench += ["--iters", 10, "--warmup", 3, "--timeout", "20s", "--json", file, *options]
            status, text = self.run([self.kolo, "run", "-n", ranks, "--", *bench], limit, "kolo bench", environment)
            printed += text
            if status:
                raise ended("kolo bench", status, printed)
            for row in json.loads(file.read_text())["rows"]:
                for form in figures:
                    if row.get(form):
                        figures[form][row["bytes"]] = {of: round(row[form][of], 3) for of in ("p50_us", "algbw_gbs")}
        return printed

    # ---- Beside PyTorch ----

    def peer(self, backend, ranks, limit):
        self.needs_gpu(torch=True)
        sizes = ",".join(map(str, SIZES))
        command = [sys.executable, self.folder / "peers" / "device.py", backend, "--ranks", ranks, "--sizes", sizes, "--seconds", 1]
        status, text = self.run(command, limit, backend)
        if status == 3:
            raise NotRun(text.strip().splitlines()[-1].removeprefix("NOT RUN: "))
        if status:
            raise ended(backend, status, text)
        found = json.loads([line for line in text.splitlines() if line.startswith("{")][-1])
        self.figures[f"{backend} under PyTorch, {ranks} ranks"] = {int(size): took for size, took in found.items()}
        return text

    def build_backend(self):
        self.needs_gpu(torch=True)
        built = {"PYTHONPATH": os.pathsep.join([str(self.folder / "site"), self.environment["PYTHONPATH"]])}
        if (self.folder / "site").is_dir():
            status, text = self.run([sys.executable, "-c", "import torch, torch_kolo; torch_kolo.Options()"], 60, "torch_kolo", built)
            if status == 0:
                self.environment.update(built)
                self.backend = self.folder / "torch"
                return "it was packed\n"
        if not shutil.which("g++"):
            raise NotRun("there is no g++ to build torch_kolo with, and none was packed that fits")
        source, site, kolo = (self.scratch / name for name in ("torch", "site", "kolo"))
        shutil.copytree(self.folder / "torch", source)
        shutil.copytree(self.folder / "include", kolo / "include")
        (kolo / "lib").mkdir()
        with gzip.open(self.folder / "lib" / "libkolo.a.gz") as packed, open(kolo / "lib" / "libkolo.a", "wb") as library:
            shutil.copyfileobj(packed, library)
        environment = {
            "KOLO_TORCH_CPP": "1",
            "KOLO_LIBRARY": str(kolo / "lib" / "libkolo.a"),
            "MAX_JOBS": str(os.cpu_count()),
            "PATH": os.pathsep.join([str(self.folder / "python" / "bin"), self.environment["PATH"]]),
        }
        pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation", "--target", site, source]
        status, text = self.run(pip, 150, "building torch_kolo", environment)
        if status:
            raise ended("building torch_kolo", status, text)
        self.environment["PYTHONPATH"] = os.pathsep.join([str(site), self.environment["PYTHONPATH"]])
        self.backend = source
        return text

    def torch_tests(self, which, limit):
        self.needs_gpu(torch=True)
        if not getattr(self, "backend", None):
            raise NotRun("torch_kolo was not built")
        figures = self.scratch / "figures"
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", self.backend / "tests" / "test_cuda.py", "-k", which]
        status, text = self.run(command, limit, "pytest", {"KOLO_GPU_FIGURES": str(figures)})
        if figures.exists():
            for line in figures.read_text().splitlines():
                figure = json.loads(line)
                self.figures[figure["what"]] = figure["seconds"]
        if status:
            counts = [line for line in text.splitlines() if re.search(r"\d+ (failed|passed|error)", line)]
            raise Failed(f"{counts[-1].strip('= ') if counts else f'pytest ended with {status}'}\n{text}")
        if not re.search(r"\d+ passed", text):
            raise NotRun("pytest ran nothing")
        return text

    # ---- The goals ----

    def goals(self):
        """What is wanted on one GPU, each with its figure, if all that it needs was measured."""
        figures = self.figures

        def kolo(key, size, form="in_place", of="p50_us"):
            return figures[key][form][size][of]

        def times(sizes):
            gloo = figures["gloo under PyTorch, 2 ranks"]
            return min(gloo[size] / kolo("kolo, 2 ranks", size) for size in sizes)

        def registered():
            bound = figures["device_copy_gbs"] / 4
            rate = kolo("kolo registered, 2 ranks", LARGE, of="algbw_gbs")
            return rate / bound, f"{rate / bound:.2f} ({rate:.0f} of {bound:.0f} GB/s)"

        def any_memory():
            rate = kolo("kolo, 2 ranks", LARGE, of="algbw_gbs") / 1000
            return rate, f"{rate:.3f} TB/s"

        def against(sizes):
            return lambda: (times(sizes), f"{times(sizes):.1f} times")

        def staged():
            share = figures["pinned_both_ways_us"] / kolo("kolo staged, 2 ranks", 64 << 20)
            return share, f"{share:.2f}"

        def errors():
            took = max(figures[f"a killed rank is named, {path}"] for path in ("direct", "staged", "host"))
            return -took, f"{took:.2f} s"

        def clean():
            return -(figures["memcheck"] + figures["racecheck"]), "clean"

        for what, goal, least, figure in [
            ("all_reduce 256 MiB f32, registered, in place, 2 ranks, of the bound", ">= 0.7", 0.7, registered),
            ("all_reduce 256 MiB, any device memory, 2 ranks", ">= 0.45 TB/s", 0.45, any_memory),
            ("against Gloo on CUDA tensors, 1 MiB and up", ">= 20 times", 20, against([size for size in SIZES if size >= 1 << 20])),
            ("host-staged path, 64 MiB, of one pinned copy each way", ">= 0.8", 0.8, staged),
            ("small messages, 8 B to 64 KiB, against Gloo on CUDA", ">= 3 times", 3, against([8, 64 << 10])),
            ("a killed rank is named, and the context stays usable", "< 1 s", -1, errors),
            ("compute-sanitizer, memcheck and racecheck", "clean", 0, clean),
        ]:
            try:
                value, text = figure()
            except (KeyError, ZeroDivisionError):
                yield {"what": what, "goal": goal, "figure": None, "status": NOT_RUN}
            else:
                yield {"what": what, "goal": goal, "figure": text, "status": MET if value >= least else NOT_MET}


def all_parts(check):
    part = check.part
    part("kolo doctor", check.doctor)
    part("unit tests on a GPU", check.unit_tests)
    part("bounds: copies", check.bounds)
    for ranks in (2, 4):
        part(f"kolo bench, any device memory, {ranks} ranks", check.bench, f"kolo, {ranks} ranks", ranks, SIZES)
        key = f"kolo registered, {ranks} ranks"
        part(f"kolo bench, registered memory, {ranks} ranks", check.bench, key, ranks, SIZES, ["--registered"])
    staged = {"KOLO_DEVICE_PATH": "staged"}
    part("kolo bench, staged through the host, 2 ranks", check.bench, "kolo staged, 2 ranks", 2, SIZES[:4], (), staged)
    part("Gloo on CUDA tensors, 2 ranks", check.peer, "gloo", 2, 60)
    part("NCCL, 2 ranks", check.peer, "nccl", 2, 40)
    part("torch_kolo: build", check.build_backend)
    part("torch_kolo: a killed rank", check.torch_tests, "killed", 90)
    part("torch_kolo: streams, futures, DDP", check.torch_tests, "test_on_a_gpu", 150)
    part("torch_kolo: every collective", check.torch_tests, "test_collective_on_a_gpu", 120)
    part("kolo under PyTorch, 2 ranks", check.peer, "kolo", 2, 40)
    for tool in ("memcheck", "racecheck"):
        part(f"compute-sanitizer {tool}", check.sanitizer, tool)


def table(rows):
    rows = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return [f"| {' | '.join(rows[0])} |", "|" + "---|" * len(rows[0]), *(f"| {' | '.join(row)} |" for row in rows[1:])]


def size_name(size):
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def write(report, out):
    """Leaves out the name of the machine, because only the device matters."""
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{out}.json", "w") as file:
        json.dump(report, file, indent=2)
        file.write("\n")
    machine = report["machine"]
    lines = [f"# GPU checks: {machine.get('device', 'no GPU')}", ""]
    lines += [f"{report['date']}, kolo {report['kolo']}" + "".join(f", {name} {machine[name]}" for name in machine if name != "device"), ""]
    if not report["was_run"]:
        lines += [f"**NOTHING WAS RUN: {report['parts'][0]['why']}.**", ""]
    goals = [[goal["what"], goal["goal"], goal["figure"] or "", goal["status"]] for goal in report["goals"]]
    parts = [[part["name"], part["status"], part["seconds"], part["why"]] for part in report["parts"]]
    lines += [*table([["goal", "wanted", "figure", ""], *goals]), "", *table([["part", "", "seconds", "why"], *parts])]
    medians = {}
    for key, figure in report["figures"].items():
        if isinstance(figure, dict) and "in_place" in figure:
            medians[key] = {size: row["p50_us"] for size, row in figure["in_place"].items()}
        elif isinstance(figure, dict):
            medians[key] = figure
    medians = {key: of for key, of in medians.items() if of}
    if medians:
        lines += ["", "all_reduce in place, f32, medians in microseconds:", ""]
        rows = [[key, *(of.get(size, "") for size in SIZES)] for key, of in medians.items()]
        lines += table([["", *map(size_name, SIZES)], *rows])
    Path(f"{out}.md").write_text("\n".join(lines) + "\n")


def measure_bounds():
    import torch

    def best(prepare, count=10):
        took = []
        for _ in range(count):
            torch.cuda.synchronize()
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            prepare()
            ended.record()
            torch.cuda.synchronize()
            took.append(began.elapsed_time(ended) * 1e-3)
        return sorted(took)[count // 2]

    one, other = (torch.zeros(LARGE, dtype=torch.uint8, device="cuda") for _ in range(2))
    device = 2 * LARGE / best(lambda: one.copy_(other)) * 1e-9
    # For two ranks that share the GPU's copy engines.
    size = 2 * (64 << 20)
    hosts = [torch.zeros(size, dtype=torch.uint8).pin_memory() for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def both_ways():
        now = torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(now)
        with torch.cuda.stream(streams[0]):
            hosts[0].copy_(one[:size], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            other[:size].copy_(hosts[1], non_blocking=True)
        for stream in streams:
            now.wait_stream(stream)

    print(json.dumps({"device_copy_gbs": round(device, 1), "pinned_both_ways_us": round(best(both_ways) * 1e6, 1)}))


def main():
    if sys.argv[1:] == ["--bounds"]:
        return measure_bounds()
    folder, out = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    if not (folder / "bin" / "kolo").is_file():
        print(f"{sys.argv[1]} is not what --pack makes: there is no bin/kolo in it", file=sys.stderr)
        return 2
    # End within nine minutes.
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for ending in ("json", "md"):
            with open(f"{out}.{ending}", "a"):
                pass
    except OSError as problem:
        print(f"the report cannot be written: {problem}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="kolo-gpu-") as scratch:
        check = Check(folder, Path(scratch))
        check.look_around()
        all_parts(check)
    was_run = [part for part in check.parts if part["status"] != NOT_RUN]
    commit = folder / "COMMIT"
    report = {
        "kolo": commit.read_text().strip() if commit.is_file() else "unknown",
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "machine": check.machine,
        "was_run": bool(was_run),
        "seconds": round(time.monotonic() - check.began),
        "goals": list(check.goals()),
        "parts": check.parts,
        "figures": check.figures,
    }
    write(report, out)
    failed = [part["name"] for part in check.parts if part["status"] == FAILED]
    left_out = len(check.parts) - len(was_run)
    if not was_run:
        print(f"NOTHING WAS RUN: {check.parts[0]['why']}")
        return 3
    print(f"{len(was_run) - len(failed)} parts passed, {len(failed)} failed, {left_out} NOT RUN")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
