"""Finds the processes of a command and shows where each of them is, for a command that hangs.

Linux and Python suffice: /proc has the state of each thread, and faulthandler prints the stack of
each Python thread. Native stacks need py-spy, gdb or cuda-gdb.
"""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

# Names the command that a process belongs to. Processes inherit it, also in a session of their own.
MARK = "GPU_CHECK_COMMAND"
# The folder in which each Python process opens a file for its stacks.
FOLDER = "GPU_CHECK_STACKS"
DEBUGGERS = ("py-spy", "gdb", "cuda-gdb")

# For all processes of a command together, in seconds. A debugger reads the symbols of PyTorch for
# seconds.
PATIENCE = 15

# Processes whose place is in the reason of a failure.
MOST_PLACES = 5

# Each Python process imports this first. A forked process gets a file of its own.
SITECUSTOMIZE = '''
import faulthandler, importlib.machinery, importlib.util, os, signal, sys

def register():
    global kept_open
    new = open(os.path.join(os.environ["GPU_CHECK_STACKS"], str(os.getpid())), "a")
    faulthandler.register(signal.SIGUSR1, file=new, all_threads=True)
    kept_open = new

if "GPU_CHECK_STACKS" in os.environ:
    register()
    os.register_at_fork(after_in_child=register)

# The machine may have a sitecustomize too.
here = os.path.dirname(os.path.abspath(__file__))
rest = [folder for folder in sys.path if os.path.abspath(folder) != here]
if spec := importlib.machinery.PathFinder.find_spec("sitecustomize", rest):
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
'''


def environment(scratch):
    """Returns the variables with which Python processes answer a request for their stacks."""
    site, folder = scratch / "sitecustomize", scratch / "stacks"
    for each in (site, folder):
        each.mkdir()
    (site / "sitecustomize.py").write_text(SITECUSTOMIZE)
    return {FOLDER: str(folder), "PYTHONFAULTHANDLER": "1"}, str(site)


def debuggers(path):
    """Returns the paths of the debuggers of this machine, by name."""
    found = {name: shutil.which(name, path=path) for name in DEBUGGERS}
    if not found["cuda-gdb"] and os.access("/usr/local/cuda/bin/cuda-gdb", os.X_OK):
        found["cuda-gdb"] = "/usr/local/cuda/bin/cuda-gdb"
    return {name: file for name, file in found.items() if file}


def processes(mark):
    """Returns the processes of a command that have not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            pass
    return sorted(found)


def send(pid, number):
    try:
        os.kill(pid, number)
    except OSError:
        pass


def read(file):
    try:
        return Path(file).read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def dump(mark, folder, found, is_last):
    """Returns the stacks of all processes of a command, and a line on where each is.

    `is_last` allows what disturbs a process: cuda-gdb, and for seconds any debugger in one that has
    loaded PyTorch.
    """
    until = time.monotonic() + PATIENCE
    pids = processes(mark)
    of_python = python_stacks(pids, Path(folder))
    texts, places = [], []
    for pid in pids:
        text = [f"---- process {pid}: {read(f'/proc/{pid}/cmdline')[:300]}", threads(pid)]
        tool = next((name for name in DEBUGGERS if name in found and is_for(name, pid in of_python, is_last)), None)
        if tool and time.monotonic() < until:
            text.append(debug(tool, found[tool], pid, until))
        text.append(of_python.get(pid, ""))
        text = "\n".join(filter(None, text))
        texts.append(text)
        places.append(place(pid, text))
    # Those that were started last are ranks, the first only waits for them.
    return "\n".join(texts), "; ".join(places[: -MOST_PLACES - 1 : -1])


def is_for(debugger, is_python, is_last):
    return {"py-spy": is_python and is_last, "gdb": is_last or not is_python, "cuda-gdb": is_last}[debugger]


def threads(pid):
    """Returns what the kernel says of each thread. Its stack inside the kernel is for root only."""
    lines = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*"), key=lambda task: int(task.name)):
        state = re.search(r"State:\s*(.*)", read(task / "status"))
        line = f"thread {task.name} {read(task / 'comm')}: {state[1] if state else 'has ended'}"
        if (inside := read(task / "wchan")) not in ("", "0"):
            line += f", in {inside}"
        frames = re.findall(r"\] (\w+)", read(task / "stack"))
        lines.append(line + (f" ({' < '.join(frames[:8])})" if frames else ""))
    return "\n".join(lines)


def python_stacks(pids, folder):
    """Asks all Python processes at once, so that the slowest alone counts."""
    asked = {}
    for pid in pids:
        file = folder / str(pid)
        if file.exists():
            asked[pid] = file.stat().st_size
            send(pid, signal.SIGUSR1)
    # A file is complete when it has not grown for a moment.
    before, until = None, time.monotonic() + 2
    while asked and time.monotonic() < until:
        time.sleep(0.2)
        now = [(folder / str(pid)).stat().st_size for pid in asked]
        if now == before and all(size > asked[pid] for pid, size in zip(asked, now)):
            break
        before = now
    return {pid: (folder / str(pid)).read_bytes()[size:].decode(errors="replace") for pid, size in asked.items()}


def debug(name, file, pid, until):
    command = [file, "dump", "--native", "--pid", str(pid)]
    if name != "py-spy":
        command = [file, "-nx", "-batch", "-p", str(pid), "-ex", "thread apply all backtrace 40"]
    # gdb would ask a server for symbols.
    variables = dict(os.environ, DEBUGINFOD_URLS="")
    limit = max(until - time.monotonic(), 1)
    try:
        done = subprocess.run(command, capture_output=True, timeout=limit, env=variables, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        # A debugger that is ended may leave the process stopped.
        send(pid, signal.SIGCONT)
        return f"{name} was not done after {limit:.0f} s"
    except OSError as problem:
        return f"{name}: {problem}"
    lines = done.stdout.decode(errors="replace").splitlines()
    lines = [line for line in lines if not line.startswith("[Inferior ")]
    threads = [i for i, line in enumerate(lines) if line.startswith("Thread ")]
    lines = lines[threads[0] :] if threads else lines
    if done.returncode or not threads:
        lines += done.stderr.decode(errors="replace").splitlines()[-3:]
    return "\n".join([f"{name}:", *lines])


def place(pid, text):
    """Returns the innermost functions of the thread that tells most, or the state of the main one."""
    frames = []
    # faulthandler prints the thread that received the signal, which is the main one, under this.
    if main := re.search(r"^(?:Current thread|Stack) [^\n]*most recent call first\):\n((?:  [^\n]*\n?)+)", text, re.M):
        frames = re.findall(r'File "([^"]*)", line (\d+) in (\S+)', main[1])
        frames = [f"{function} ({Path(file).name}:{line})" for file, line, function in frames if "runpy" not in file]
    elif of_threads := re.findall(r"^Thread \d+ [^\n]*\n((?:#[^\n]*\n?)+)", text, re.M):
        # Rust runs each test in a thread of its own. The main one is the last.
        telling = next((stack for stack in of_threads if "on_a_gpu" in stack), of_threads[-1])
        frames = re.findall(r"^#\d+ +(?:0x\w+ in )?(.+?) \(", telling, re.M)
    if frames:
        return f"process {pid} is in {' < '.join(frames[:6])}"
    state = re.search(rf"^thread {pid} [^\n]*?: ([^(\n]*\([^)]*\)[^(\n]*)", text, re.M)
    return f"process {pid}: {state[1].strip() if state else 'has ended'}"
