"""Operations in flight, and the threads that wait for them."""

import bisect
import concurrent.futures
import contextlib
import ctypes
import threading
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._autograd import _record_function_with_args_enter

from . import library
from .error import COMM_ERROR, SUCCESS, ends_group, error_of, rethrow_of_handler, work_result_of
from .hooks import warn


class Copy(NamedTuple):
    """A copy that is made when an operation has ended: from the memory that kolo wrote to the
    caller's memory.
    """

    to: torch.Tensor
    source: torch.Tensor


class Step:
    """One of kolo's operations, and the work after it."""

    __slots__ = ("copies", "device", "is_over", "work")

    def __init__(self, work, device=None, copies=()):
        self.work = work
        # The device on which kolo runs the operation, so that streams can wait for it in place of
        # the host.
        self.device = device
        self.copies = copies
        self.is_over = False

    def __del__(self):
        # The operation has ended when the last reference is dropped.
        library.work_destroy(self.work)


def wait_to_the_end(work):
    """Waits until an operation has ended, whatever signal handlers raise."""
    while (result := library.work_wait(work)) == library.IN_PROGRESS:
        pass
    return result


def finish_now(work):
    """Waits until an operation has ended, and frees its handle. Cancels it if a signal handler raises
    an exception.
    """
    result = library.work_wait(work)
    if result == library.IN_PROGRESS:
        # The caller gets its tensors back.
        library.work_cancel(work)
        result = wait_to_the_end(work)
    library.work_destroy(work)
    return result


class Flight:
    """The operations in flight of one call of PyTorch, or of several coalesced calls.

    A flight outlives a Work that was not waited for, because kolo uses the tensors until the
    operations have ended.
    """

    def __init__(self, members, hooks, profile=None):
        self._members = members
        self._hooks = hooks
        self._profile = profile
        self._steps = []
        self._parts = []
        self._tensors = []
        # Whether the host has work after the end.
        self.needs_host = False
        # The streams of copies to a device. They follow the work that the caller's streams had at
        # the call.
        self._stream = None
        self._before = []
        self._after = []
        self._lock = threading.Lock()
        self.is_over = False
        self.failure = None
        # A number of PyTorch's WorkResult.
        self.result = SUCCESS
        # Whether the failure is that of the group.
        self._ends_group = False
        self._nanoseconds = 0
        # The future, and what completes it.
        self._future = None
        self._done = None
        self._devices = []
        self._result_future = None
        # What completes the futures that are not complete. A Waiter has this flight once for each.
        self._due = []
        # The flights of the communicator that have not ended, by id.
        self._all = None

    # The launching thread calls these.

    def keep(self, tensor):
        self._tensors.append(tensor)

    def add(self, step):
        self._steps.append(step)

    def add_part(self, flight):
        """Adds a part. The flight has ended when all its parts have ended."""
        self._parts.append(flight)

    def count_in(self, flights):
        """Counts this flight among those of its communicator until it has ended."""
        self._all = flights
        flights.add(id(self))

    def after_current_stream(self, device):
        """Copies to this device wait for the work that the calling thread's stream has so far."""
        self._before.append(torch.cuda.current_stream(device).record_event())

    def settle(self, seconds=None):
        """Waits at most for the time given and does the work after the end. Returns False if the
        flight has not ended by then, or if a signal handler has raised an exception.
        """
        if self.is_over:
            return True
        until = None if seconds is None else time.monotonic() + seconds
        for step in self._steps:
            # Several threads may wait for one operation. The handle lives as long as this object.
            if until is None:
                result = library.work_wait(step.work)
            else:
                result = library.work_wait_timeout(step.work, max(0, int((until - time.monotonic()) * 1000)))
            if result == library.IN_PROGRESS:
                return False
            self._finish(step, result)
        for part in self._parts:
            if not part.settle(None if until is None else max(0.0, until - time.monotonic())):
                return False
        with self._lock:
            if self.is_over:
                return True
            for part in self._parts:
                if part.failure and not self.failure:
                    self.failure, self.result, self._ends_group = part.failure, part.result, part._ends_group
            self.is_over = True
        if self._all is not None:
            self._all.discard(id(self))
        self.end_profile()
        # Without the lock, because hooks may wait for this call. One thread gets here.
        if self.failure:
            self.await_hooks()
        return True

    def end_profile(self):
        if self._profile:
            self._profile.end()

    def await_hooks(self):
        """Returns when the abort hooks have run, if the failure is that of the group."""
        if self._ends_group:
            self._hooks.failed()

    def milliseconds(self):
        """The time of the operations, one after the other, after the end."""
        return self._nanoseconds / 1e6 + sum(part.milliseconds() for part in self._parts)

    def _finish(self, step, result):
        failure = error_of(result, self._members) if result else None
        # A copy may fail after the operation.
        work_result = work_result_of(result) if result else COMM_ERROR
        with self._lock:
            if step.is_over:
                return
            step.is_over = True
            try:
                if failure:
                    raise failure
                self._nanoseconds += duration_of(step.work)
                for to, source in step.copies:
                    self._copy(to, source, step.work)
            except BaseException as error:
                if not self.failure:
                    self.failure, self.result, self._ends_group = error, work_result, ends_group(result)
            step.copies = ()

    def _copy(self, to, source, work):
        if to.is_cpu:
            copy(to, source)
            return
        with torch.cuda.device(to.device):
            if self._stream is None:
                self._stream = torch.cuda.Stream(to.device)
                for event in self._before:
                    self._stream.wait_event(event)
            # The operation has ended, except in the capture of a CUDA graph.
            if result := library.work_wait_on(work, self._stream.cuda_stream):
                raise error_of(result, self._members)
            with torch.cuda.stream(self._stream):
                copy(to, source)
                to.record_stream(self._stream)
                self._after.append((to.device, self._stream.record_event()))

    def order_streams(self):
        """Makes the current streams of the calling thread wait for the copies to devices."""
        with self._lock:
            for device, event in self._after:
                torch.cuda.current_stream(device).wait_event(event)
        # In the capture of a CUDA graph an operation counts as over, and a stream must wait for it.
        # Another one has ended, and then this does nothing.
        for step in self._steps:
            if step.device is not None:
                if result := library.work_wait_on(step.work, torch.cuda.current_stream(step.device).cuda_stream):
                    raise error_of(result, self._members)
        for part in self._parts:
            part.order_streams()

    def await_on_streams(self):
        """Makes the current streams wait for the end in place of the host. Returns False if the
        host has work before.
        """
        if self.needs_host or any(step.device is None for step in self._steps):
            return False
        # If the operation has failed by now, the host waits and reports the failure.
        for step in self._steps:
            if library.work_wait_on(step.work, torch.cuda.current_stream(step.device).cuda_stream):
                return False
        return all(part.await_on_streams() for part in self._parts)

    def cancel(self):
        for step in self._steps:
            library.work_cancel(step.work)
        for part in self._parts:
            part.cancel()

    def future(self, outputs):
        """The future, which a Waiter completes, and whether it is new: then the caller pushes this
        flight to a Waiter.

        None if the flight has ended without a future.
        """
        with self._lock:
            is_new = not self.is_over and self._future is None
            if is_new:
                self._devices = devices_of(outputs)
                self._done = torch.futures.Future(devices=self._devices)
                # PyTorch can only complete a future with a value. An exception that leaves a
                # callback makes the next future fail, also for callers in C++.
                self._future = self._done.then(lambda _: self._outcome(outputs))
                self._due.append(self._complete)
            return self._future, is_new

    def future_on_streams(self, outputs):
        """A completed future, whose users' streams wait for the end; None if the host has work
        before.
        """
        devices = devices_of(outputs)
        with streams_for(devices):
            if not devices or not self.await_on_streams():
                return None
            future = torch.futures.Future(devices=devices)
            future.set_result(list(outputs))
            return future

    def result_future(self):
        """As `future`, for the result, a number of PyTorch's WorkResult."""
        with self._lock:
            is_new = not self.is_over and self._result_future is None
            if is_new:
                self._result_future = torch.futures.Future()
                self._due.append(lambda: self._result_future.set_result(self.result))
            return self._result_future, is_new

    def _outcome(self, outputs):
        if self.failure:
            raise self.failure
        return outputs

    def has_future(self):
        with self._lock:
            return bool(self._future or self._result_future)

    def await_futures(self):
        """Returns once the futures are completed, even if their callbacks still run."""
        with self._lock:
            futures = [future for future in (self._result_future, self._future) if future]
        for future in futures:
            with contextlib.suppress(Exception):
                future.wait()

    def complete_future(self):
        """After the end: completes one of the futures that are not complete. This runs its
        callbacks, which may take any time, and may wait for the other future.
        """
        with self._lock:
            complete = self._due.pop() if self._due else None
        if complete is None:
            return
        try:
            complete()
        except BaseException as error:
            warn(f"a callback of a future failed: {error}")

    def _complete(self):
        with streams_for(self._devices):
            self.order_streams()
            self._done.set_result(None)


@contextlib.contextmanager
def streams_for(devices):
    """Makes a stream of our own the current one of each device. A future records its events on the
    current streams, and the caller's may have unrelated work.
    """
    with contextlib.ExitStack() as streams:
        for device in devices:
            streams.enter_context(torch.cuda.stream(torch.cuda.Stream(device)))
        yield


def duration_of(work):
    """In nanoseconds."""
    nanoseconds = ctypes.c_uint64()
    library.work_duration(work, nanoseconds)
    return nanoseconds.value


def copy(to, source):
    """Copies as kolo writes: it records no gradient and does not change the version counter."""
    if to.is_inference():
        with torch.inference_mode():
            to.copy_(source, non_blocking=True)
        return
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(to):
        to.copy_(source, non_blocking=True)


def devices_of(tensors):
    """Each once. Without its devices, the callbacks of a future would not wait for streams."""
    return list({tensor.device for tensor in tensors if tensor.is_cuda})


class Waiter:
    """Threads that settle flights without a caller that waits (the Work was dropped, or has a
    future), and complete the futures.

    A callback of a future may wait for anything, also for a later flight. So one thread waits for
    flights, and before it completes a future, another thread takes its place: there is a thread for
    each callback that runs, and one that waits. The first starts with the first flight; of idle
    threads, one stays.
    """

    def __init__(self, in_order):
        # Collectives end in the order of their calls; messages do not.
        self._in_order = in_order
        self._changed = threading.Condition()
        # Flights with their numbers, in the order in which threads wait for them.
        self._flights = []
        # The numbers of the flights that threads wait for.
        self._awaited = []
        # The next number of a message.
        self._last_number = 0
        self._idle = 0
        self._is_closed = False
        self._threads = set()

    def push(self, number, flight):
        """`number`: the call's place in the order of the group's calls."""
        with self._changed:
            self._insert(number if self._in_order else self._next_number(), flight)
            self._provide_thread()

    def _next_number(self):
        self._last_number += 1
        return self._last_number

    def _insert(self, number, flight):
        bisect.insort(self._flights, (number, flight), key=lambda each: each[0])

    def _needs_thread(self):
        """Whether no thread waits for the first flight or an earlier one."""
        return self._flights and (not self._awaited or self._flights[0][0] < min(self._awaited))

    def _provide_thread(self):
        if not self._needs_thread():
            return
        if self._idle > 0:
            self._changed.notify_all()
            return
        thread = threading.Thread(target=self._run, name="kolo-waiter", daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError:
            self._threads.discard(thread)
            # Threads that run callbacks return later.
            if not self._threads:
                raise

    def close(self, seconds):
        """Waits until the callbacks have returned, at most for `seconds`. The caller has ended all
        flights before.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            # A callback of a future may hold the last reference to the process group.
            others = lambda: [thread for thread in self._threads if thread is not threading.current_thread()]  # noqa: E731
            self._changed.wait_for(lambda: not others(), min(seconds, 24 * 3600))
            if others() and seconds > 0:
                warn(
                    f"{len(others())} callbacks of futures have not returned {seconds:g} s after the end of their process group, "
                    "which no longer waits for them"
                )

    def _run(self):
        try:
            with self._changed:
                self._settle_flights()
        finally:
            with self._changed:
                self._threads.discard(threading.current_thread())
                self._changed.notify_all()

    def _settle_flights(self):
        while True:
            if not self._needs_thread():
                if self._idle > 0 or (self._is_closed and not self._flights):
                    return
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
                continue
            number, flight = self._flights.pop(0)
            self._awaited.append(number)
            # Messages that wait for different ranks take turns.
            patience = None if self._in_order else 0.001 if self._flights else 0.02
            with unlocked(self._changed):
                is_over = flight.settle(patience)
            self._awaited.remove(number)
            if not is_over:
                self._insert(self._next_number(), flight)
                continue
            if flight.has_future():
                self._provide_thread()
            with unlocked(self._changed):
                flight.complete_future()
                del flight


@contextlib.contextmanager
def unlocked(lock):
    lock.release()
    try:
        yield
    finally:
        lock.acquire()


def hand_over(waiter, number, flight):
    """Leaves a flight that outlives its Work to a Waiter."""
    try:
        waiter.push(number, flight)
    except RuntimeError:
        # The system has no threads left. kolo uses the tensors until this returns, at the latest at
        # the operation's deadline.
        while not flight.settle():
            pass


class Profile:
    """An entry of PyTorch's profiler with the shapes of tensors, from the call to its end."""

    # Ends the entries: PyTorch takes an entry for an asynchronous one if another thread ends it.
    _thread = concurrent.futures.ThreadPoolExecutor(1, "kolo-profile")

    def __init__(self, title, tensors):
        record = _record_function_with_args_enter(title, *tensors)
        self._done = torch.futures.Future()
        # The end is recorded by the profiler of this thread, whichever thread finds it.
        torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(record, self._done)

    def end(self):
        done, self._done = self._done, None
        if done:
            self._thread.submit(done.set_result, None).result()


class Asking(threading.local):
    """Whether this thread asks a Work of PyTorch for the one of kolo behind it, and the answer. See
    forwarding.py.
    """

    is_on = False
    answer = None


ASKING = Asking()


class EndedWork(dist._Work if hasattr(dist, "_Work") else dist.Work):
    """The result of a call that succeeded before it returned."""

    # The sender's rank, if the message might come from any rank.
    source = None

    def __init__(self, seq, timeout, outputs, milliseconds=0.0):
        super().__init__()
        self._seq = seq
        self._timeout = timeout
        self._outputs = outputs
        self._milliseconds = milliseconds

    def is_completed(self):
        return True

    def is_success(self):
        return True

    def exception(self):
        return None

    def result(self):
        return list(self._outputs)

    def wait(self, timeout=None):
        return True

    def synchronize(self):
        self.wait()

    def block_current_stream(self):
        self.wait()

    def abort(self):
        pass

    def get_future(self):
        if ASKING.is_on:
            ASKING.answer = self
            return torch.futures.Future()
        return self._future()

    def _future(self):
        future = torch.futures.Future(devices=devices_of(self._outputs))
        future.set_result(list(self._outputs))
        return future

    def get_future_result(self):
        future = torch.futures.Future()
        future.set_result(SUCCESS)
        return future

    def _get_duration(self):
        """In milliseconds. Every call is timed."""
        return self._milliseconds

    def source_rank(self):
        if self.source is None:
            raise RuntimeError("only a message that was received from any rank has a source")
        return self.source.value

    _source_rank = source_rank

    def _get_sequence_number(self):
        return self._seq

    @property
    def timeout(self):
        return self._timeout


class PendingWork(EndedWork):
    """The result of a call whose operations may be in flight."""

    # For the option blocking_wait: wait() returns after the end, also on devices.
    blocks_host = False
    # Another flight or the Waiter keeps the flight until its end.
    is_left = False

    def __init__(self, seq, timeout, outputs, flight, waiter):
        super().__init__(seq, timeout, outputs)
        self._flight = flight
        self._waiter = waiter

    def __del__(self):
        # After the end of the process group all operations have ended. Leave no work to a thread
        # that is never joined.
        if not self.is_left and not self._flight.settle(0):
            hand_over(self._waiter, self._seq, self._flight)

    def is_completed(self):
        return self._flight.settle(0)

    def is_success(self):
        return self._flight.is_over and self._flight.failure is None

    def exception(self):
        return self._flight.failure if self._flight.is_over else None

    def wait(self, timeout=None):
        flight = self._flight
        seconds = timeout.total_seconds() if timeout else 0
        is_limited = seconds > 0
        if not is_limited and not self.blocks_host and not flight.is_over and flight.await_on_streams():
            flight.end_profile()
            return True
        if not flight.settle(seconds if is_limited else None):
            rethrow_of_handler()
            raise dist.DistBackendError(
                f"the operation with seq={self._seq} has not ended after {seconds * 1000:.0f} ms, the timeout of wait(). It continues: "
                "wait again, or abort the process group."
            )
        flight.await_futures()
        if flight.failure:
            flight.await_hooks()
            raise flight.failure.with_traceback(None)
        flight.order_streams()
        return True

    def abort(self):
        self._flight.cancel()

    def _future(self):
        flight = self._flight
        if not self.blocks_host and not flight.is_over and (future := flight.future_on_streams(self._outputs)):
            return future
        future, is_new = flight.future(self._outputs)
        if is_new:
            self._leave()
        if future:
            return future
        if flight.failure:
            future = torch.futures.Future(devices=devices_of(self._outputs))
            failed = future.then(lambda _: flight._outcome(None))
            future.set_result(None)
            return failed
        flight.order_streams()
        return super()._future()

    def get_future_result(self):
        future, is_new = self._flight.result_future()
        if is_new:
            self._leave()
        if future:
            return future
        future = torch.futures.Future()
        future.set_result(self._flight.result)
        return future

    def _leave(self):
        """Leaves the flight, which now has a future, to the Waiter."""
        self._waiter.push(self._seq, self._flight)
        self.is_left = True

    def _get_duration(self):
        if not self._flight.is_over:
            raise RuntimeError("the duration of an operation is known after its end: call wait() or is_completed() first")
        return self._flight.milliseconds()
