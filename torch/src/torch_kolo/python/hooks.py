"""What users register on a process group: functions that are called when the group fails, and the
thread that finds the failure of calls that no thread waits for.
"""

import atexit
import logging
import os
import threading
import warnings
import weakref

from torch._C import _distributed_c10d

log = logging.getLogger("torch_kolo")

# How often the end of calls is looked for that no thread waits for, in seconds. NCCL's watchdog
# takes as long.
PERIOD = 0.1


# The objects whose threads run. A hook in Python cannot go on while Python ends.
RUNNING = weakref.WeakSet()
# The dump of the flight recorder takes 4 s.
PATIENCE_AT_EXIT = 30


@atexit.register
def close_all():
    for hooks in list(RUNNING):
        hooks.mute()
        hooks.close(PATIENCE_AT_EXIT)


class Hooks:
    """The hooks of one process group.

    A hook runs on the thread that finds the failure of a call: one that waits for it, a Waiter, or,
    for a call that no thread waits for, a thread of this object. None of them is a thread of kolo,
    and none holds a lock of the group. So a hook may block, and call the group.
    """

    def __init__(self, patience, rank_of_job):
        # How long a thread waits for a hook that another thread runs, in seconds.
        self._patience = min(patience, 24 * 3600)
        self._rank_of_job = rank_of_job
        self._changed = threading.Condition()
        self._abort_hooks = {}
        # The thread that runs the hooks, and whether they have run.
        self._hook_thread = None
        self._hooks_have_run = False
        self._is_muted = False
        # Calls whose end may not have been found. The Work or a Waiter keeps them.
        self._flights = []
        self._is_closed = False
        self._thread = None

    def add(self, number, hook):
        with self._changed:
            self._abort_hooks[number] = hook

    def remove(self, number):
        with self._changed:
            self._abort_hooks.pop(number, None)

    def watch(self, flight):
        """A call has started. Its failure is found within PERIOD, also if no thread waits for it."""
        if not self._abort_hooks:
            return
        with self._changed:
            if self._is_closed:
                return
            self._flights.append(weakref.ref(flight))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kolo-hooks", daemon=True)
                self._thread.start()
                RUNNING.add(self)
            elif len(self._flights) == 1:
                self._changed.notify_all()

    def failed(self):
        """The group has failed. Returns when the abort hooks have run.

        They run once for a failure, although each of its calls in flight fails: other threads wait
        until they have returned.
        """
        with self._changed:
            if self._hook_thread is not None:
                if self._hook_thread != threading.get_ident():
                    # A hook may end the group, and then waits for this thread.
                    self._changed.wait_for(lambda: self._hooks_have_run or self._is_closed, self._patience)
                return
            if self._is_muted:
                return
            self._hook_thread = threading.get_ident()
            hooks = list(self._abort_hooks.values())
        try:
            dump_flight_recorder(self._rank_of_job)
            for hook in hooks:
                call("an abort hook", hook)
        finally:
            with self._changed:
                self._hooks_have_run = True
                self._changed.notify_all()

    def mute(self):
        """The user ends the group: calls that fail from now on run no abort hooks."""
        with self._changed:
            self._is_muted = True

    def await_calls(self):
        """Returns when all calls so far have ended."""
        with self._changed:
            flights = list(self._flights)
        for each in flights:
            flight = each()
            if flight:
                flight.settle()

    def close(self, patience):
        """Ends the thread. The caller has ended all calls before."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            # A hook may hold the last reference to the process group.
            if self._thread in (None, threading.current_thread()):
                return
            if not self._changed.wait_for(lambda: self._thread is None, patience) and patience > 0:
                warn(f"a hook has not returned {patience:g} s after the end of its process group, which no longer waits for it")

    def _run(self):
        with self._changed:
            while not self._is_closed:
                if not self._flights:
                    self._changed.wait()
                    continue
                self._changed.wait_for(lambda: self._is_closed, PERIOD)
                flights, self._flights = self._flights, []
                self._changed.release()
                try:
                    flights = [each for each in flights if not is_over(each())]
                finally:
                    self._changed.acquire()
                self._flights = flights + self._flights
            self._thread = None
            self._changed.notify_all()


def is_over(flight):
    return flight is None or flight.settle(0)


def call(what, hook):
    """An exception of a hook does not change the outcome of the call that the hook reports."""
    try:
        hook()
    except BaseException as error:
        warn(f"{what} of the kolo backend failed: {error}")


def warn(text):
    """Warns on threads and in calls that must go on: if a filter makes the warning an error, as
    `python -W error` does, the log has it.
    """
    try:
        warnings.warn(text, stacklevel=2)
    except Warning:
        log.warning(text)


_dump = threading.Lock()
_is_dumped = False


def dump_flight_recorder(rank):
    """Writes the entries of PyTorch's flight recorder to the file of this rank, once in a process.

    PyTorch's own hook for this asks a backend in C++ only. Its entries of a backend in Python have
    no end, because PyTorch asks such a backend for no completion hooks.
    """
    global _is_dumped
    write = getattr(_distributed_c10d, "_dump_fr_trace_file", None)
    if write is None or not is_set(("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")):
        return
    if not is_set(("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT")):
        return
    with _dump:
        if _is_dumped:
            return
        _is_dumped = True
        call(
            "the dump of the flight recorder",
            lambda: write(
                rank,
                includeStackTraces=is_set(("TORCH_INCLUDE_STACK_TRACE",)),
                onlyActive=is_set(("TORCH_INCLUDE_ONLY_ACTIVE",), default="0"),
                backend="kolo",
            ),
        )


def is_set(names, default="1"):
    """Whether the first of these variables that is set is neither 0 nor false, as PyTorch reads
    them.
    """
    value = next((os.environ[name] for name in names if os.environ.get(name)), default)
    return value.lower() not in ("0", "n", "no", "f", "false")
