"""Runs commands of gpu-check.sh, each within a limit, and writes all of it to a log."""

import os
import shlex
import signal
import subprocess
import time

import gpu_stacks

# More output than this is a loop, and would make the log too large to copy.
MOST_OUTPUT = 8 << 20
# For a command that has been told to end.
GRACE = 2


class NotRun(Exception):
    """The reason why something cannot run here."""


class Failed(Exception):
    """The reason of a failure, and the output that shows it."""

    def __init__(self, why, output=""):
        super().__init__(why)
        self.output = output


def ended(what, status, text, why=None):
    """Returns the failure of a command that has ended. The last line of its output is the reason, if none is known."""
    try:
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with {status}"
    except ValueError:
        how = f"was ended by signal {-status}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    why = why or (lines[-1] if lines else "")
    return Failed(f"{what} {how}{': ' if why else ''}{why[:300]}", text)


class Commands:
    def __init__(self, log, scratch, until, stacks_after, most, slow=1.0):
        """`until` is the end of the call, `most` the longest limit of a command, if any. Limits are `slow` times as long."""
        self.log = open(log, "ab", buffering=0)
        self.scratch = scratch
        self.until = self.until_of_part = until
        self.stacks_after = stacks_after
        self.most = most
        self.slow = slow
        self.count = 0
        self.environment, site = gpu_stacks.environment(scratch)
        self.environment = {**os.environ, **self.environment, "PYTHONPATH": site, "PYTHONUNBUFFERED": "1"}
        self.debuggers = {}

    def say(self, text):
        self.log.write(f"{text}\n".encode())

    def run(self, command, limit, what, environment=None):
        """Returns the status and the output of a command. At the limit it dumps stacks, ends all processes and raises."""
        left = min(self.until, self.until_of_part) - time.monotonic()
        if left < 5:
            raise NotRun(f"the time for {'all parts' if self.until <= self.until_of_part else 'this part'} was over")
        limit = min(limit * self.slow, left, self.most or left)
        self.count += 1
        mark = f"{os.getpid()}-{self.count}"
        command = [str(word) for word in command]
        shown = [f"{name}={value}" for name, value in (environment or {}).items()]
        self.say(f"\n$ {shlex.join([*shown, *command])}    # {time.strftime('%H:%M:%S')}, at most {limit:.0f} s")
        start = self.log.seek(0, os.SEEK_END)
        began = time.monotonic()
        try:
            process = subprocess.Popen(
                command,
                stdout=self.log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=self.scratch,
                env={**self.environment, **(environment or {}), gpu_stacks.MARK: mark},
                start_new_session=True,
            )
        except OSError as problem:
            self.say(f"# {problem}")
            raise Failed(f"{what} does not start: {problem}") from None
        problem = None
        try:
            problem = self.watch(process, mark, began, limit, start)
        finally:
            left_behind = self.end(process, mark)
            status = process.returncode
            text = self.output(start)
            took = f"after {time.monotonic() - began:.1f} s"
            self.say(f"# {problem or f'status {status}'} {took}{f'; ended {left_behind}' if left_behind else ''}")
        if problem:
            raise Failed(f"{what} {problem}", text)
        return status, text

    def watch(self, process, mark, began, limit, start):
        """Waits until the process ends. Otherwise returns what is wrong."""
        has_stacks = False
        while True:
            try:
                process.wait(0.2)
                return None
            except subprocess.TimeoutExpired:
                pass
            took = time.monotonic() - began
            if os.fstat(self.log.fileno()).st_size - start > MOST_OUTPUT:
                return f"printed more than {MOST_OUTPUT >> 20} MiB"
            if took >= limit:
                return f"hung: it was not done after {limit:.0f} s; {self.stacks(mark, took, True)}"
            # A second look, at the limit, shows what has moved since.
            if took >= self.stacks_after and not has_stacks:
                has_stacks = True
                self.stacks(mark, took, False)

    def stacks(self, mark, took, is_last):
        try:
            text, places = gpu_stacks.dump(mark, self.environment[gpu_stacks.FOLDER], self.debuggers, is_last)
        except Exception as error:
            # The command still has hung.
            text, places = "", f"its stacks cannot be read: {type(error).__name__}: {error}"
        self.say(f"\n# stacks after {took:.1f} s\n{text}\n# end of stacks")
        return places

    def end(self, process, mark):
        """Ends all processes of a command, within a few seconds. Returns those that the command left behind."""
        if process.poll() is None:
            # `kolo run` ends its ranks when it receives SIGTERM.
            process.terminate()
            wait(process, GRACE)
        left = [pid for pid in gpu_stacks.processes(mark) if pid != process.pid]
        until = time.monotonic() + 5
        while (now := gpu_stacks.processes(mark)) and time.monotonic() < until:
            for pid in now:
                gpu_stacks.send(pid, signal.SIGKILL)
            wait(process, 0.1)
        wait(process, 1)
        return left

    def output(self, start):
        with open(self.log.name, "rb") as log:
            log.seek(start)
            return log.read().decode(errors="replace")


def wait(process, seconds):
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        pass
