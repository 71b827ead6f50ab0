"""Processes as ranks."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

# As long as nothing takes that is not a defect.
LONG = 120


def kolo():
    """The program, which the wheel installs beside Python."""
    beside = Path(sys.executable).parent / ("kolo.exe" if sys.platform == "win32" else "kolo")
    found = os.environ.get("PYKOLO_PROGRAM") or (str(beside) if beside.exists() else shutil.which("kolo"))
    assert found, "there is no program kolo: install the wheel, or set PYKOLO_PROGRAM"
    return found


def started(program, environment=None, **options):
    """Starts a program of Python."""
    command = [sys.executable, "-u", "-c", textwrap.dedent(program)]
    options = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.PIPE, **options}
    return subprocess.Popen(command, env={**os.environ, **(environment or {})}, **options)


def under_kolo_run(program, world_size, *options):
    """Runs a program of Python in a process for each rank. Returns its end, with the output of all."""
    command = [kolo(), "run", "-n", str(world_size), *options, "--", sys.executable, "-u", "-c", textwrap.dedent(program)]
    return subprocess.run(command, text=True, capture_output=True, timeout=LONG, check=False)
