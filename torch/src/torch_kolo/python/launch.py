"""Makes one call: turns its tensors into memory that kolo can use, runs its operations, and returns
the Work.
"""

import contextlib
import ctypes
import time
from typing import NamedTuple

import torch

from . import library
from .tensors import is_plain, overlap
from .work import Copy, EndedWork, Flight, PendingWork, Profile, Step, copy, finish_now, hand_over


class Call(NamedTuple):
    """What a kind of call is named in errors and in profiles."""

    name: str
    is_message: bool = False


@contextlib.contextmanager
def deadline(milliseconds, usual):
    """The deadline of a single call is a setting of the thread that makes it."""
    if milliseconds == usual:
        yield
        return
    library.call_timeout(milliseconds)
    try:
        yield
    finally:
        library.call_timeout(0)


class Launch:
    # What most calls do not have.
    _profile = _flight = None
    _copies = ()
    _is_done = False

    def __init__(self, group, call, like=None, opts=None, *, inputs=None, is_async=None, timeout=None):
        """`like`: a tensor of the call, whose device all tensors share; None if the call has none.

        `inputs`: the tensors that profiles show, if they are others than `like`.

        `opts`: PyTorch's options of the call, which have its timeout and whether the caller gets a
        Work.
        """
        if opts is not None:
            timeout = opts.timeout
            if is_async is None:
                # Older versions of PyTorch do not tell.
                is_async = getattr(opts, "asyncOp", True)
        self._group = group
        self._call = call
        self._channel = group.messages if call.is_message else group.collectives
        # PyTorch passes a negative timeout where the caller gave none.
        is_given = timeout is not None and timeout.days >= 0 and timeout
        self._timeout = timeout if is_given else group.timeout
        self._milliseconds = milliseconds(timeout) if is_given else group.timeout_ms
        if not call.is_message:
            group.seq += 1
        self._seq = group.seq
        self._began = time.monotonic()
        self._on_device = like is not None and not like.is_cpu
        # The device on whose current stream the call runs, if kolo accepts its memory.
        self._device = like.device if self._on_device and group.has_devices else None
        # Whether the call ends before it returns or, on a stream, before later work of the
        # caller's stream.
        self._is_sync = is_async is False and (not group.options.blocking_wait if self._device else not self._on_device)
        if torch.autograd._profiler_enabled():
            shown = inputs if inputs is not None else () if like is None else (like,)
            self._profile = Profile(f"{group.options.profiled_as}:{call.name}", shown)
        if not self._is_sync:
            self._flight = Flight(group.members, group.hooks, self._profile)
            if self._on_device and not self._device:
                self._flight.after_current_stream(like.device)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        # If the call has failed halfway, operations that have started continue.
        if not self._is_done:
            if self._is_sync and self._profile:
                self._profile.end()
            if self._flight and not self._flight.settle(0):
                hand_over(self._channel.waiter, self._seq, self._flight)

    def _reaches(self, tensor):
        """Whether kolo can use the memory of this tensor's device."""
        return self._device is not None or tensor.is_cpu

    def _memory_for(self, size, like):
        if self._reaches(like):
            return torch.empty(size, dtype=like.dtype, device=like.device)
        # Pinned memory, because copies between pageable memory and a device do not overlap with
        # other work.
        return torch.empty(size, dtype=like.dtype, pin_memory=True)

    def keep(self, memory):
        """Keeps memory until the call has ended."""
        if self._flight:
            self._flight.keep(memory)
        elif self._device:
            # kolo still uses the memory when this returns. Freeing it waits for the stream, which
            # waits for kolo.
            memory.record_stream(torch.cuda.current_stream(self._device))

    def _copy_back(self, to, source):
        if self._flight and self._device and not self._copies:
            self._flight.after_current_stream(self._device)
        self._copies = (*self._copies, Copy(to, source))

    # The elements of a tensor in contiguous memory that kolo can use: the tensor itself if
    # possible, otherwise a copy. `output` and `in_place` copy back when the next operation has
    # ended.

    def input(self, tensor):
        memory = tensor
        if not self._reaches(tensor):
            memory = self._memory_for(tensor.size(), tensor)
            with torch.no_grad():
                memory.copy_(tensor)
        elif not is_plain(tensor):
            with torch.no_grad():
                memory = tensor.resolve_conj().resolve_neg().contiguous()
        self.keep(memory)
        return memory

    def output(self, tensor):
        memory = tensor
        if not (self._reaches(tensor) and is_plain(tensor)):
            memory = self._memory_for(tensor.size(), tensor)
            self._copy_back(tensor, memory)
        self.keep(memory)
        return memory

    def in_place(self, tensor):
        memory = self.input(tensor)
        if memory is not tensor:
            self._copy_back(tensor, memory)
        return memory

    # The same for several tensors, one after the other in memory.

    def inputs(self, tensors):
        memory = joined(tensors) if self._reaches(tensors[0]) else None
        if memory is None:
            memory = self._memory_for((sum(tensor.numel() for tensor in tensors),), tensors[0])
            with torch.no_grad():
                for tensor, part in parts(memory, tensors):
                    part.copy_(tensor)
        self.keep(memory)
        return memory

    def outputs(self, tensors):
        memory = joined(tensors) if self._reaches(tensors[0]) else None
        if memory is None:
            memory = self._memory_for((sum(tensor.numel() for tensor in tensors),), tensors[0])
            for tensor, part in parts(memory, tensors):
                self._copy_back(tensor, part)
        self.keep(memory)
        return memory

    def input_apart(self, memory, output, in_place_at=None):
        """`memory`, or a copy of it if kolo would write to it while it reads it."""
        is_in_place = in_place_at is not None and memory.data_ptr() == output.data_ptr() + in_place_at
        if is_in_place or not overlap(memory, output):
            return memory
        copied = memory.detach().clone()
        self.keep(copied)
        return copied

    def output_apart(self, output, memory):
        """Memory for an output that kolo may write while it reads `memory`."""
        if not self._reaches(output) or not is_plain(output) or not overlap(output, memory):
            return self.output(output)
        apart = self._memory_for(output.size(), output)
        self._copy_back(output, apart)
        self.keep(apart)
        return apart

    def run(self, operation, *arguments):
        """Runs or starts one of kolo's operations. `arguments` are its arguments before the
        communicator.
        """
        if self._milliseconds == self._group.made_with:
            self._run(operation, *arguments)
            return
        with deadline(self._milliseconds, self._group.made_with):
            self._run(operation, *arguments)

    def _run(self, operation, *arguments):
        stream = torch.cuda.current_stream(self._device).cuda_stream if self._device else None
        # A call in a stream returns at once.
        if self._is_sync and (self._device or not self._channel.in_flight):
            if result := operation.now(*arguments, self._channel.comm, stream):
                raise self._group.failure(result)
            return
        work = library.Handle()
        if self._is_sync:
            # It waits for those in flight, and signal handlers run in the wait for an operation.
            result = operation.start(*arguments, self._channel.comm, stream, work) or finish_now(work.value)
            if result:
                raise self._group.failure(result)
            return
        if result := operation.start(*arguments, self._channel.comm, stream, work):
            raise self._group.failure(result)
        if self._copies:
            self._flight.needs_host = True
        self._flight.add(Step(work.value, self._device, self._copies))
        self._copies = ()

    def done(self, outputs, source=None):
        """`source`: kolo writes the sender's rank to it if the message may come from any rank."""
        self._is_done = True
        if self._is_sync:
            for to, memory in self._copies:
                copy(to, memory)
            if self._profile:
                self._profile.end()
            return EndedWork(self._seq, self._timeout, outputs, (time.monotonic() - self._began) * 1000)
        self._flight.count_in(self._channel.in_flight)
        self._group.hooks.watch(self._flight)
        is_collected = self._group.collect(self._flight, outputs, self._call.is_message)
        work = PendingWork(self._seq, self._timeout, outputs, self._flight, self._channel.waiter)
        work.is_left = is_collected
        work.source = source
        work.blocks_host = source is not None or self._group.options.blocking_wait
        return work


def milliseconds(timeout):
    return max(1, int(timeout.total_seconds() * 1000))


def joined(tensors):
    """The tensors as one, if they are adjacent in memory; otherwise None."""
    end = None
    for tensor in tensors:
        start = tensor.data_ptr()
        follows = end is None or (start == end and tensor.untyped_storage()._cdata == tensors[0].untyped_storage()._cdata)
        if not is_plain(tensor) or tensor.numel() == 0 or not follows:
            return None
        end = start + tensor.nbytes
    with torch.no_grad():
        return tensors[0].detach().as_strided((sum(tensor.numel() for tensor in tensors),), (1,))


def parts(memory, tensors):
    """Every tensor and its part of `memory`, in which the tensors follow each other."""
    start = 0
    for tensor in tensors:
        yield tensor, memory.narrow(0, start, tensor.numel()).view(tensor.size())
        start += tensor.numel()


def counts_array(counts):
    return (ctypes.c_size_t * len(counts))(*counts)
