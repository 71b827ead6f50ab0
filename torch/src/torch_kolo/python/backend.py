"""The process group: every collective of PyTorch's backends, on a communicator of kolo."""

import ctypes
import datetime
import os
import threading
import warnings
import weakref

import torch
import torch.distributed as dist
from pykolo._signals import run_signal_handlers
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    Backend,
    BarrierOptions,
    BroadcastOptions,
    ErrorType,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from torch.autograd import _profiler_enabled as profiler_enabled
from torch.distributed import ReduceOp
from torch.distributed.constants import default_pg_timeout

from . import library, members
from .base import Base
from .error import check, ends_group, error_of, last_error, rethrow_of_handler
from .forms import listed, nested, options
from .hooks import Hooks
from .launch import Call, Launch, counts_array, milliseconds
from .store import Rendezvous
from .tensors import check_dense, check_same_type, check_writable, is_plain, moved, premultiplied, premultiply, reduced
from .work import EndedWork, Flight, PendingWork, Waiter


class Options(Backend.Options):
    """As in kolo_config_t. Empty means not set."""

    def __init__(self, timeout=default_pg_timeout):
        super().__init__("kolo", timeout)
        self.transport = ""
        self.algorithm = ""
        self.reproducible = False
        # Whether wait() on an operation on a device returns when the operation has ended, and
        # raises its failure. Otherwise wait() makes the current stream wait.
        self.blocking_wait = False
        # The name of the backend in entries of profiles.
        self.profiled_as = "kolo"

    def copied(self):
        copied = Options(self._timeout)
        copied.__dict__.update(self.__dict__)
        for name in ("global_ranks_in_group", "group_name", "enable_reconfigure"):
            # Older versions of PyTorch have fewer.
            if hasattr(self, name):
                setattr(copied, name, getattr(self, name))
        return copied


class Channel:
    """Collectives and messages have a communicator each, so that a receive that waits does not
    block collectives.
    """

    def __init__(self, in_order):
        self.comm = None
        self.waiter = Waiter(in_order)
        # The flights that have not ended, as far as this process has noticed.
        self.in_flight = set()


class Coalescing:
    """The asynchronous calls that a thread makes between start_coalescing and end_coalescing.

    They start at once, and each has a Work of its own, as other calls. So no call is lost without
    end_coalescing.
    """

    def __init__(self, group_members, hooks):
        self.thread = threading.get_ident()
        self.flight = Flight(group_members, hooks)
        self.outputs = []
        self.has_messages = False


def only(items, call, what="tensor"):
    if len(items) != 1:
        raise ValueError(f"{call}: one {what} is expected, and there are {len(items)}")
    return items[0]


def check_count(count, expected, what, call):
    if count != expected:
        raise ValueError(f"{call}: {what} has {count} elements, and {expected} are needed")


def check_list(tensors, like, size, is_written, call):
    """A list with a tensor for each rank, all of one type and on one device."""
    if len(tensors) != size:
        raise ValueError(f"{call}: the list has {len(tensors)} tensors, and there are {size} ranks")
    for tensor in tensors:
        check_writable(tensor, call) if is_written else check_dense(tensor, call)
        check_same_type(tensor, like, call)


def root_list(lists, like, size, is_root, what, call):
    """The root's list, with a tensor as long as `like` for each rank. Other ranks have none: []."""
    if not is_root:
        if lists and lists[0]:
            raise ValueError(f"{call}: {what}s are for the root only")
        return []
    tensors = only(lists, call, "list of tensors")
    check_list(tensors, like, size, what == "output", call)
    for tensor in tensors:
        check_count(tensor.numel(), like.numel(), f"an {what}", call)
    return tensors


def check_pairs(outputs, inputs, call):
    """Checks the tensors of a call that has an output for each input."""
    if len(outputs) != len(inputs) or not inputs:
        raise ValueError(f"{call}: there are {len(outputs)} outputs and {len(inputs)} inputs")
    for output, tensor in zip(outputs, inputs):
        check_dense(tensor, call)
        check_writable(output, call)
        check_same_type(output, tensor, call)


def are_even(tensors):
    return all(tensor.numel() == tensors[0].numel() for tensor in tensors)


def counts_of(tensors, factor):
    return [tensor.numel() * factor for tensor in tensors]


def split_counts(splits, tensor, size, factor, what):
    """The splits of all_to_all in elements. They count rows of the first dimension; without splits,
    the ranks share the rows evenly.
    """
    call = "all_to_all_single"
    rows = tensor.size(0) if tensor.dim() else tensor.numel()
    if not splits:
        if rows % size:
            raise ValueError(
                f"{call}: the first dimension of the {what} is {rows}, which {size} ranks cannot share evenly; give split sizes"
            )
        return [tensor.numel() // size * factor] * size
    if len(splits) != size:
        raise ValueError(f"{call}: there are {len(splits)} {what} splits and {size} ranks")
    for split in splits:
        if split < 0:
            raise ValueError(f"{call}: an {what} split is {split}")
    if sum(splits) != rows:
        raise ValueError(f"{call}: the {what} splits sum up to {sum(splits)}, and its first dimension is {rows}")
    return [split * (tensor.numel() // rows) * factor if rows else 0 for split in splits]


BROADCAST = Call("broadcast")
ALL_REDUCE = Call("all_reduce")
ALL_REDUCE_COALESCED = Call("all_reduce_coalesced")
SPARSE_ALL_REDUCE = Call("sparse_all_reduce")
REDUCE = Call("reduce")
ALL_GATHER = Call("all_gather")
ALL_GATHER_COALESCED = Call("all_gather_coalesced")
ALL_GATHER_INTO_TENSOR = Call("all_gather_into_tensor")
ALL_GATHER_INTO_TENSORS = Call("all_gather_into_tensor_coalesced")
GATHER = Call("gather")
SCATTER = Call("scatter")
REDUCE_SCATTER = Call("reduce_scatter")
REDUCE_SCATTER_TENSOR = Call("reduce_scatter_tensor")
REDUCE_SCATTER_TENSORS = Call("reduce_scatter_tensor_coalesced")
ALL_TO_ALL_SINGLE = Call("all_to_all_single")
ALL_TO_ALL = Call("all_to_all")
BARRIER = Call("barrier")
MONITORED_BARRIER = Call("monitored_barrier")
SEND = Call("send", is_message=True)
RECV = Call("recv", is_message=True)
RECV_ANY = Call("recvAnySource", is_message=True)


# PyTorch's wrapper for TORCH_DISTRIBUTED_DEBUG=DETAIL does not keep the Python part of a group, so it is
# kept here until the group ends.
WRAPPED = set()


class ProcessGroupKolo(Base):
    Options = Options

    def __init__(self, rank, size, options):
        super().__init__(rank, size)
        self._rank = rank
        self._size = size
        self._options = options
        # The deadline with which the communicators were made, in milliseconds.
        self.made_with = milliseconds(options._timeout)
        self.timeout = options._timeout
        self.timeout_ms = self.made_with
        self.members = list(options.global_ranks_in_group)
        self.hooks = Hooks(self.made_with / 1000, self.members[rank] if rank < len(self.members) else rank)
        self.collectives = Channel(in_order=True)
        self.messages = Channel(in_order=False)
        self.has_devices = False
        self.seq = 0
        # PyTorch waits for the Work of a call that is not asynchronous, and drops it.
        self._ended = EndedWork(0, self.timeout, [])
        self._coalescing_lock = threading.Lock()
        self._coalescing = None
        # PyTorch keeps the default group until the interpreter ends, so this closes the group there,
        # too. It does not wait for callbacks of futures.
        weakref.finalize(self, close, self.collectives, self.messages, self.hooks, 0)

    # ---- Beginning and end ----

    @classmethod
    def connected(cls, store, rank, size, options):
        """Finds the other ranks through the store."""
        if options._timeout <= datetime.timedelta(0):
            raise ValueError(f"the timeout of a process group must be positive, and is {options._timeout}")
        if getattr(options, "enable_reconfigure", False):
            raise ValueError(
                "kolo's backend in Python has no reconfigure, because PyTorch keeps the rank and size of a backend in C++: use the "
                "backend in C++, make a new process group, or continue with some of the ranks with shrink_group"
            )
        group = cls(rank, size, options)
        rendezvous = Rendezvous(store)
        config = library.Config(size=ctypes.sizeof(library.Config), version=library.CONFIG_VERSION, timeout_ms=group.made_with)
        if "KOLO_START_TIMEOUT" not in os.environ:
            config.start_timeout_ms = config.timeout_ms
        config.transport = options.transport.encode() or None
        config.algorithm = options.algorithm.encode() or None
        config.reproducible = 1 if options.reproducible else 0
        comm = library.Handle()
        result = library.comm_init_callbacks(comm, size, rendezvous.callbacks, rank, config)
        rethrow_of_handler()
        if result == library.ERR_STORE and rendezvous.problem:
            raise dist.DistBackendError(f"the store of the rendezvous failed: {rendezvous.problem}")
        check(result, group.members)
        group.take_over(comm.value)
        return group

    def take_over(self, comm):
        """Takes over a communicator."""
        self.collectives.comm = comm
        has_devices = ctypes.c_int32()
        self.has_devices = library.comm_has_devices(comm, has_devices) == library.OK and has_devices.value != 0
        if self._size > 1:
            messages = library.Handle()
            result = library.comm_split(comm, 0, self._rank, messages)
            if result:
                error = error_of(result, self.members)
                self.shutdown()
                raise error
            self.messages.comm = messages.value
        if dist.get_debug_level() == dist.DebugLevel.DETAIL:
            WRAPPED.add(self)

    def shutdown(self):
        WRAPPED.discard(self)
        close(self.collectives, self.messages, self.hooks, self.timeout_ms)

    def abort(self):
        self.hooks.mute()
        for channel in (self.collectives, self.messages):
            if channel.comm:
                library.comm_abort(channel.comm)

    def get_error(self):
        for channel in (self.collectives, self.messages):
            result = ctypes.c_int32()
            if channel.comm and library.comm_get_async_error(channel.comm, result) == library.OK and result.value != library.OK:
                return ErrorType.REMOTE_ERROR if result.value == library.ERR_PEER else ErrorType.COMM_ERROR
        return ErrorType.SUCCESS

    def stats(self):
        if not self.collectives.comm:
            raise ValueError("stats: the process group has no communicator; it has ended")
        device = dict.fromkeys(("whole", "staged", "in_place", "through_areas", "one_shot", "copied"), 0)
        for channel in (self.collectives, self.messages):
            # A group of one rank has no messages.
            if channel.comm:
                counted = library.CommStats(size=ctypes.sizeof(library.CommStats))
                check(library.comm_stats(channel.comm, counted), self.members)
                for path in device:
                    device[path] += getattr(counted, f"device_{path}")
        return {"device": device}

    def split(self, store, ranks, opts):
        if self._rank not in ranks:
            return None
        return self.merge(store, opts, list(ranks).index(self._rank), len(ranks))

    def merge(self, store, opts, rank, size):
        # The caller may use the connection of its store meanwhile.
        return ProcessGroupKolo.connected(store.clone(), rank, size, self.options_of(opts))

    def shrink(self, ranks_to_exclude, shrink_flags=0, opts_override=None):
        return members.shrink(self, ranks_to_exclude, self.options_of(opts_override))

    def options_of(self, given):
        """The options of this group, or those that the call has."""
        if isinstance(given, Options):
            given = given.copied()
            given.profiled_as = self._options.profiled_as
            return given
        mine = self._options.copied()
        if given is not None:
            mine._timeout = given._timeout
            mine.group_name = given.group_name
            mine.global_ranks_in_group = given.global_ranks_in_group
        return mine

    # ---- Hooks ----

    @property
    def supports_abort_hooks(self):
        return True

    def register_abort_hook(self, hook_id, hook):
        self.hooks.add(hook_id, hook)

    def unregister_abort_hook(self, hook_id):
        self.hooks.remove(hook_id)

    # PyTorch's C++ asks by its own names.
    registerAbortHook = register_abort_hook
    unregisterAbortHook = unregister_abort_hook

    def _register_on_completion_hook(self, _hook):
        raise ValueError(
            "kolo's backend in Python has no completion hooks, because PyTorch lets no Python make the WorkInfo that they get: use the "
            "backend in C++, or a callback of work.get_future()"
        )

    def _wait_for_pending_works(self):
        self.hooks.await_calls()

    def _enable_collectives_timing(self):
        """Every call is timed."""

    # ---- What PyTorch asks ----

    @property
    def options(self):
        return self._options

    @property
    def supports_splitting(self):
        return True

    @property
    def supports_coalescing(self):
        return True

    @property
    def supports_shrinking(self):
        return True

    # PyTorch asks a backend in Python for these for ever if it does not have them.

    @property
    def supports_reconfigure(self):
        return False

    @property
    def supports_window(self):
        return False

    @property
    def _supports_time_estimate(self):
        return False

    def getBackendName(self):
        return "kolo"

    def set_timeout(self, timeout):
        self._options._timeout = self.timeout = timeout
        self.timeout_ms = milliseconds(timeout)

    def _get_sequence_number_for_group(self):
        return self.seq

    def _set_sequence_number_for_group(self):
        pass

    def perform_nocolor_split(self, _device):
        """Ranks outside a new group take no part, because kolo's groups find each other at the
        store.
        """

    # ---- The short way, which takes half the time ----

    def is_short(self, opts, tensor=None):
        """Whether kolo's function is all that a call needs: the call ends before it returns, and its tensor
        is contiguous in the host's memory.
        """
        return (
            not getattr(opts, "asyncOp", True)
            and (tensor is None or (tensor.is_cpu and is_plain(tensor)))
            and opts.timeout.days < 0
            and self.timeout_ms == self.made_with
            and not self.collectives.in_flight
            and not profiler_enabled()
        )

    def run_short(self, operation, *arguments):
        self.seq += 1
        if result := operation.now(*arguments, self.collectives.comm, None):
            raise self.failure(result)
        return self._ended

    def failure(self, result):
        """The error of a call. If the group has failed, abort hooks run before this returns."""
        error = error_of(result, self.members)
        if ends_group(result):
            self.hooks.failed()
        return error

    # ---- One tensor on every rank ----

    def broadcast(self, tensors, opts=None, **short):
        opts, tensors = options(BroadcastOptions, opts, short, "root"), listed(tensors)
        tensor = only(tensors, "broadcast")
        is_root = opts.rootRank == self._rank
        check_dense(tensor, "broadcast") if is_root else check_writable(tensor, "broadcast")
        dtype, factor = moved(tensor.dtype)
        if self.is_short(opts, tensor):
            pointer = tensor.data_ptr()
            return self.run_short(library.broadcast, pointer, pointer, tensor.numel() * factor, dtype, opts.rootRank)
        with Launch(self, BROADCAST, tensor, opts) as launch:
            memory = launch.input(tensor) if is_root else launch.output(tensor)
            pointer = memory.data_ptr()
            launch.run(library.broadcast, pointer, pointer, memory.numel() * factor, dtype, opts.rootRank)
            return launch.done(tensors)

    def allreduce(self, tensors, opts=None, **short):
        opts, tensors = options(AllreduceOptions, opts, short, "op"), listed(tensors)
        tensor = only(tensors, "all_reduce")
        if tensor.is_sparse:
            return self.allreduce_sparse(tensors, opts)
        check_writable(tensor, "all_reduce")
        dtype, factor, op, premultiplies = reduced(tensor.dtype, opts.reduceOp, "all_reduce")
        if premultiplies:
            premultiply(tensors, opts.reduceOp)
        if self.is_short(opts, tensor):
            pointer = tensor.data_ptr()
            return self.run_short(library.all_reduce, pointer, pointer, tensor.numel() * factor, dtype, op)
        with Launch(self, ALL_REDUCE, tensor, opts) as launch:
            memory = launch.in_place(tensor)
            pointer = memory.data_ptr()
            launch.run(library.all_reduce, pointer, pointer, memory.numel() * factor, dtype, op)
            return launch.done(tensors)

    def allreduce_coalesced(self, tensors, opts=None, **short):
        opts = options(AllreduceCoalescedOptions, opts, short, "op")
        name = "all_reduce_coalesced"
        if not tensors:
            raise ValueError(f"{name}: there are no tensors")
        for tensor in tensors:
            check_writable(tensor, name)
            if tensor.device != tensors[0].device:
                raise ValueError(f"{name}: tensors are on different devices")
            reduced(tensor.dtype, opts.reduceOp, name)
        premultiply(tensors, opts.reduceOp)
        with Launch(self, ALL_REDUCE_COALESCED, tensors[0], opts, inputs=tensors) as launch:
            for tensor in tensors:
                dtype, factor, op, _ = reduced(tensor.dtype, opts.reduceOp, name)
                memory = launch.in_place(tensor)
                pointer = memory.data_ptr()
                launch.run(library.all_reduce, pointer, pointer, memory.numel() * factor, dtype, op)
            return launch.done(tensors)

    def reduce(self, tensors, opts=None, **short):
        opts, tensors = options(ReduceOptions, opts, short, "root"), listed(tensors)
        tensor = only(tensors, "reduce")
        is_root = opts.rootRank == self._rank
        check_writable(tensor, "reduce") if is_root else check_dense(tensor, "reduce")
        dtype, factor, op, _ = reduced(tensor.dtype, opts.reduceOp, "reduce")
        if is_root:
            premultiply(tensors, opts.reduceOp)
        else:
            tensor = only(premultiplied(tensors, opts.reduceOp), "reduce")
        with Launch(self, REDUCE, tensor, opts) as launch:
            memory = launch.in_place(tensor) if is_root else launch.input(tensor)
            pointer = memory.data_ptr()
            launch.run(library.reduce, pointer, pointer if is_root else None, memory.numel() * factor, dtype, op, opts.rootRank)
            return launch.done(tensors)

    def allreduce_sparse(self, tensors, opts):
        """Each rank gets the indices and values of all ranks, and sums them in the order of ranks.

        The operation has ended when this returns, because the lengths are known only after the
        numbers of elements have arrived.
        """
        name = "sparse_all_reduce"
        tensor = only(tensors, name)
        if tensor.layout is not torch.sparse_coo:
            raise ValueError(f"{name}: the tensor is {tensor.layout}, and only sparse COO is supported")
        is_average = opts.reduceOp == ReduceOp.AVG
        if not is_average and opts.reduceOp != ReduceOp.SUM:
            raise ValueError(f"{name}: only ReduceOp.SUM and AVG are supported for sparse tensors")
        if is_average:
            reduced(tensor.dtype, opts.reduceOp, name)
        with Launch(self, SPARSE_ALL_REDUCE, None, opts, inputs=tensors, is_async=False) as launch, torch.no_grad():
            mine = tensor.detach().cpu().coalesce()
            # All ranks see all shapes, so all come to the same result.
            shapes = self._exchange_shapes(launch, mine, name)
            elements = mine.size()[mine.sparse_dim() :].numel()
            dtype, factor = moved(mine.dtype)
            total = sum(nnz for *_, nnz in shapes)
            my_indices, my_values = mine.indices().t().contiguous(), mine.values().contiguous()
            indices = torch.empty((total, mine.sparse_dim()), dtype=torch.int64)
            values = torch.empty((total, *mine.size()[mine.sparse_dim() :]), dtype=my_values.dtype)
            counts = counts_array([nnz * mine.sparse_dim() for *_, nnz in shapes])
            launch.run(library.all_gather_v, my_indices.data_ptr(), indices.data_ptr(), counts, library.INT64)
            counts = counts_array([nnz * elements * factor for *_, nnz in shapes])
            launch.run(library.all_gather_v, my_values.data_ptr(), values.data_ptr(), counts, dtype)
            total_tensor = torch.sparse_coo_tensor(indices.t(), values, mine.size(), check_invariants=False).coalesce()
            if is_average:
                total_tensor.values().div_(self._size)
            tensor.copy_(total_tensor)
            return launch.done(tensors)

    def _exchange_shapes(self, launch, mine, name):
        """For each rank the type, the numbers of dimensions, the sizes and the number of elements;
        the first ones are equal.
        """
        most = 64
        if mine.dim() > most:
            raise ValueError(f"{name}: the tensor has more than {most} dimensions")
        types = sorted((dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)), key=str)
        shape = [types.index(mine.dtype), mine.sparse_dim(), mine.dense_dim(), *mine.size()]
        shape += [0] * (3 + most - len(shape)) + [mine._nnz()]
        sent = torch.tensor(shape, dtype=torch.int64)
        received = torch.empty((self._size, len(shape)), dtype=torch.int64)
        launch.run(library.all_gather, sent.data_ptr(), received.data_ptr(), len(shape), library.INT64)
        shapes = received.tolist()
        for rank, theirs in enumerate(shapes):
            if theirs[:-1] != shapes[0][:-1]:
                raise ValueError(f"{name}: the tensors of rank 0 and rank {rank} differ in type, size, or number of sparse dimensions")
            if theirs[-1] < 0:
                raise ValueError(f"{name}: rank {rank} has {theirs[-1]} elements")
        return shapes

    # ---- Gathering and scattering ----

    def allgather(self, outputs, inputs, opts=None, **short):
        opts, outputs, inputs = options(AllgatherOptions, opts, short), nested(outputs), listed(inputs)
        if len(outputs) != 1 or len(inputs) != 1:
            raise ValueError("all_gather: one tensor and one list are expected")
        return self._gather_lists(ALL_GATHER, outputs, inputs, opts)

    def allgather_coalesced(self, outputs, inputs, opts=None, **short):
        opts = options(AllgatherOptions, opts, short)
        name = "all_gather_coalesced"
        if len(outputs) != self._size:
            raise ValueError(f"{name}: there are {len(outputs)} lists and {self._size} ranks")
        if not inputs:
            raise ValueError(f"{name}: there are no tensors")
        for tensors in outputs:
            if len(tensors) != len(inputs):
                raise ValueError(f"{name}: a list has {len(tensors)} tensors, and there are {len(inputs)} inputs")
        # This call has a list for each rank; other calls have one for each input.
        return self._gather_lists(ALL_GATHER_COALESCED, [list(each) for each in zip(*outputs)], inputs, opts)

    def _gather_lists(self, call, outputs, inputs, opts):
        for tensors, tensor in zip(outputs, inputs):
            check_dense(tensor, call.name)
            check_list(tensors, tensor, self._size, True, call.name)
            check_same_type(tensor, inputs[0], call.name)
            check_count(tensor.numel(), tensors[self._rank].numel(), "the input", call.name)
        with Launch(self, call, inputs[0], opts, inputs=inputs) as launch:
            for tensors, tensor in zip(outputs, inputs):
                dtype, factor = moved(tensor.dtype)
                to = launch.outputs(tensors)
                before = sum(each.numel() for each in tensors[: self._rank]) * to.element_size()
                source = launch.input_apart(launch.input(tensor), to, before)
                if are_even(tensors):
                    launch.run(library.all_gather, source.data_ptr(), to.data_ptr(), tensor.numel() * factor, dtype)
                else:
                    counts = counts_array(counts_of(tensors, factor))
                    launch.run(library.all_gather_v, source.data_ptr(), to.data_ptr(), counts, dtype)
            return launch.done([tensor for tensors in outputs for tensor in tensors])

    def all_gather_single(self, output, tensor, opts=None, **short):
        opts = options(AllgatherOptions, opts, short)
        return self._gather_tensors(ALL_GATHER_INTO_TENSOR, [output], [tensor], opts)

    def all_gather_single_coalesced(self, outputs, inputs, opts=None, **short):
        opts = options(AllgatherOptions, opts, short)
        return self._gather_tensors(ALL_GATHER_INTO_TENSORS, outputs, inputs, opts)

    def _gather_tensors(self, call, outputs, inputs, opts):
        check_pairs(outputs, inputs, call.name)
        for output, tensor in zip(outputs, inputs):
            check_count(output.numel(), tensor.numel() * self._size, "the output", call.name)
        with Launch(self, call, inputs[0], opts, inputs=inputs) as launch:
            for output, tensor in zip(outputs, inputs):
                dtype, factor = moved(tensor.dtype)
                to = launch.output(output)
                source = launch.input_apart(launch.input(tensor), to, self._rank * tensor.nbytes)
                launch.run(library.all_gather, source.data_ptr(), to.data_ptr(), source.numel() * factor, dtype)
            return launch.done(outputs)

    def gather(self, outputs, inputs, opts=None, **short):
        opts, outputs, inputs = options(GatherOptions, opts, short, "root"), nested(outputs), listed(inputs)
        name = "gather"
        tensor = only(inputs, name)
        check_dense(tensor, name)
        is_root = opts.rootRank == self._rank
        tensors = root_list(outputs, tensor, self._size, is_root, "output", name)
        dtype, factor = moved(tensor.dtype)
        with Launch(self, GATHER, tensor, opts) as launch:
            source = launch.input(tensor)
            to = None
            if is_root:
                memory = launch.outputs(tensors)
                source = launch.input_apart(source, memory, self._rank * source.nbytes)
                to = memory.data_ptr()
            launch.run(library.gather, source.data_ptr(), to, source.numel() * factor, dtype, opts.rootRank)
            return launch.done(tensors)

    def kolo_gather_single(self, output, tensor, opts):
        name = "gather_into_tensor"
        outputs = []
        if opts.rootRank == self._rank:
            check_writable(output, name)
            check_count(output.numel(), tensor.numel() * self._size, "the output", name)
            if not output.is_contiguous():
                raise ValueError(f"{name}: the output must be contiguous")
            outputs = [list(output.view(self._size, -1).unbind(0))]
        return self.gather(outputs, [tensor], opts)

    def scatter(self, outputs, inputs, opts=None, **short):
        opts, outputs, inputs = options(ScatterOptions, opts, short, "root"), listed(outputs), nested(inputs)
        name = "scatter"
        output = only(outputs, name)
        check_writable(output, name)
        is_root = opts.rootRank == self._rank
        tensors = root_list(inputs, output, self._size, is_root, "input", name)
        dtype, factor = moved(output.dtype)
        with Launch(self, SCATTER, output, opts, inputs=tensors) as launch:
            source = launch.inputs(tensors) if is_root else None
            to = launch.output_apart(output, source) if is_root else launch.output(output)
            pointer = source.data_ptr() if is_root else None
            launch.run(library.scatter, pointer, to.data_ptr(), to.numel() * factor, dtype, opts.rootRank)
            return launch.done(outputs)

    def reduce_scatter(self, outputs, inputs, opts=None, **short):
        opts, outputs, inputs = options(ReduceScatterOptions, opts, short, "op"), listed(outputs), nested(inputs)
        name = "reduce_scatter"
        output = only(outputs, name)
        tensors = only(inputs, name, "list of tensors")
        check_writable(output, name)
        check_list(tensors, output, self._size, False, name)
        check_count(output.numel(), tensors[self._rank].numel(), "the output", name)
        dtype, factor, op, _ = reduced(output.dtype, opts.reduceOp, name)
        tensors = premultiplied(tensors, opts.reduceOp)
        with Launch(self, REDUCE_SCATTER, output, opts, inputs=tensors) as launch:
            source = launch.inputs(tensors)
            to = launch.output_apart(output, source)
            if are_even(tensors):
                launch.run(library.reduce_scatter, source.data_ptr(), to.data_ptr(), to.numel() * factor, dtype, op)
            else:
                counts = counts_array(counts_of(tensors, factor))
                launch.run(library.reduce_scatter_v, source.data_ptr(), to.data_ptr(), counts, dtype, op)
            return launch.done(outputs)

    def reduce_scatter_single(self, output, tensor, opts=None, **short):
        opts = options(ReduceScatterOptions, opts, short, "op")
        return self._scatter_tensors(REDUCE_SCATTER_TENSOR, [output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None, **short):
        opts = options(ReduceScatterOptions, opts, short, "op")
        return self._scatter_tensors(REDUCE_SCATTER_TENSORS, outputs, inputs, opts)

    def _scatter_tensors(self, call, outputs, inputs, opts):
        check_pairs(outputs, inputs, call.name)
        for output, tensor in zip(outputs, inputs):
            check_count(tensor.numel(), output.numel() * self._size, "the input", call.name)
            reduced(tensor.dtype, opts.reduceOp, call.name)
        inputs = premultiplied(inputs, opts.reduceOp)
        with Launch(self, call, inputs[0], opts, inputs=inputs) as launch:
            for output, tensor in zip(outputs, inputs):
                dtype, factor, op, _ = reduced(tensor.dtype, opts.reduceOp, call.name)
                source = launch.input(tensor)
                to = launch.output_apart(output, source)
                launch.run(library.reduce_scatter, source.data_ptr(), to.data_ptr(), to.numel() * factor, dtype, op)
            return launch.done(outputs)

    def all_to_all_single(self, output, tensor, output_splits, input_splits, opts=None, **short):
        opts = options(AllToAllOptions, opts, short)
        name = "all_to_all_single"
        check_dense(tensor, name)
        check_writable(output, name)
        check_same_type(output, tensor, name)
        dtype, factor = moved(tensor.dtype)
        sends = split_counts(input_splits, tensor, self._size, factor, "input")
        receives = split_counts(output_splits, output, self._size, factor, "output")
        is_even = not output_splits and not input_splits
        if is_even:
            check_count(output.numel(), tensor.numel(), "the output", name)
        with Launch(self, ALL_TO_ALL_SINGLE, tensor, opts) as launch:
            to = launch.output(output)
            source = launch.input_apart(launch.input(tensor), to, 0 if is_even else None)
            if is_even:
                launch.run(library.all_to_all, source.data_ptr(), to.data_ptr(), sends[0], dtype)
            else:
                self._exchange(launch, source, sends, to, receives, dtype)
            return launch.done([output])

    def alltoall(self, outputs, inputs, opts=None, **short):
        opts = options(AllToAllOptions, opts, short)
        name = "all_to_all"
        if not inputs:
            raise ValueError(f"{name}: there are no tensors")
        check_list(inputs, inputs[0], self._size, False, name)
        check_list(outputs, inputs[0], self._size, True, name)
        dtype, factor = moved(inputs[0].dtype)
        with Launch(self, ALL_TO_ALL, inputs[0], opts, inputs=inputs) as launch:
            to = launch.outputs(outputs)
            source = launch.input_apart(launch.inputs(inputs), to)
            self._exchange(launch, source, counts_of(inputs, factor), to, counts_of(outputs, factor), dtype)
            return launch.done(outputs)

    def _exchange(self, launch, source, sends, to, receives, dtype):
        launch.run(library.all_to_all_v, source.data_ptr(), counts_array(sends), to.data_ptr(), counts_array(receives), dtype)

    # The names that older versions of PyTorch call.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    gather_into_tensor = kolo_gather_single
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ---- Barriers and messages ----

    def barrier(self, opts=None, **short):
        opts = options(BarrierOptions, opts, short)
        # Earlier work of the device's current stream completes before the barrier, if the caller
        # names the device. PyTorch passes on the numbers of devices, and not the device.
        device = getattr(opts, "device", None)
        if ids := getattr(opts, "device_ids", None):
            device = torch.device("cuda", ids[0])
        if device is not None and device.type == "cuda" and torch.cuda.is_available():
            torch.cuda.current_stream(device).synchronize()
        if self.is_short(opts):
            return self.run_short(library.barrier)
        with Launch(self, BARRIER, None, opts) as launch:
            launch.run(library.barrier)
            return launch.done([])

    def monitored_barrier(self, opts, wait_all_ranks=False):
        """Each of kolo's barriers names the first missing rank; a roll call names all missing
        ranks.

        `opts`: as PyTorch's C++ gives them, or a timeout.
        """
        timeout = opts if isinstance(opts, datetime.timedelta) else opts.timeout
        if not timeout:
            raise dist.DistBackendError(f"[Rank {self._rank}]: Rank {self._rank} timed out in monitoredBarrier after 0 ms, its timeout")
        timeout_ms = milliseconds(timeout) if timeout > datetime.timedelta(0) else self.timeout_ms
        try:
            if wait_all_ranks:
                missing = members.roll_call(self, timeout_ms)
            else:
                missing = []
                with Launch(self, MONITORED_BARRIER, timeout=timeout, is_async=False) as launch:
                    launch.run(library.barrier)
                    launch.done([])
        except dist.DistBackendError as failed:
            error = last_error()
            self.hooks.failed()
            if error is None or error.rank < 0:
                raise
            raise dist.DistBackendError(f"{members.gloo_s_words(self, f'Rank {error.rank}', timeout_ms)}: {failed}") from None
        if missing:
            self.hooks.failed()
            raise members.absent(self, missing, timeout_ms)

    def send(self, tensors, to, tag=0):
        tensor = only(tensors, "send")
        check_dense(tensor, "send")
        dtype, factor = moved(tensor.dtype)
        with Launch(self, SEND, tensor) as launch:
            memory = launch.input(tensor)
            launch.run(library.send_tagged, memory.data_ptr(), memory.numel() * factor, dtype, to, not_negative(tag, "send"))
            return launch.done(tensors)

    def recv(self, tensors, peer, tag=0):
        return self._receive(tensors, peer, tag)

    def recv_anysource(self, tensors, tag=0):
        return self._receive(tensors, None, tag)

    def _receive(self, tensors, peer, tag):
        """Without a peer, the first message from any rank is received."""
        tensor = only(tensors, "recv")
        check_writable(tensor, "recv")
        dtype, factor = moved(tensor.dtype)
        source = ctypes.c_int32(-1) if peer is None else None
        tag = not_negative(tag, "recv")
        with Launch(self, RECV_ANY if peer is None else RECV, tensor) as launch:
            memory = launch.output(tensor)
            pointer, count = memory.data_ptr(), memory.numel() * factor
            if peer is None:
                launch.keep(source)
                launch.run(library.recv_any_tagged, pointer, count, dtype, source, tag)
            else:
                launch.run(library.recv_tagged, pointer, count, dtype, peer, tag)
            return launch.done(tensors, source)

    # ---- Several calls as one ----

    def start_coalescing(self):
        with self._coalescing_lock:
            if self._coalescing:
                raise ValueError("calls are being coalesced already: groups of calls cannot be nested; _end_coalescing ends one")
            self._coalescing = Coalescing(self.members, self.hooks)

    def collect(self, flight, outputs, is_message):
        """Adds a call to the Work of end_coalescing. Returns False if this thread is not
        coalescing.
        """
        if self._coalescing is None:
            return False
        with self._coalescing_lock:
            group = self._coalescing
            # Calls of other threads, such as those of callbacks, are not part of the group.
            if group is None or group.thread != threading.get_ident():
                return False
            group.flight.add_part(flight)
            group.outputs.extend(outputs)
            group.has_messages |= is_message
            return True

    def end_coalescing(self):
        with self._coalescing_lock:
            done, self._coalescing = self._coalescing, None
        if done is None:
            raise ValueError("no calls are being coalesced")
        waiter = (self.messages if done.has_messages else self.collectives).waiter
        work = PendingWork(self.seq, self._options._timeout, done.outputs, done.flight, waiter)
        work.blocks_host = self._options.blocking_wait
        return work

    # ---- Memory ----

    def supports_tensor_alloc(self, device):
        # A number is the question of PyTorch's C++, which cannot call allocate_tensor.
        if isinstance(device, int) or device.type != "cpu" or self.collectives.comm is None or self._size == 1:
            return False
        transport = ctypes.c_char_p()
        return library.comm_transport(self.collectives.comm, transport) == library.OK and transport.value.startswith(b"shm")

    def allocate_tensor(self, size, dtype=torch.float32, device=None):
        if device is not None and torch.device(device).type != "cpu":
            raise ValueError("allocateTensor: the kolo backend allocates memory of the host only")
        if size < 0:
            raise ValueError(f"allocateTensor: the size is {size}")
        if size == 0:
            return torch.empty(0, dtype=dtype)
        pointer = library.Memory()
        length = size * dtype.itemsize
        if result := library.mem_alloc_pooled(pointer, length, self.collectives.comm):
            # PyTorch asks by default, and works with ordinary memory, too. If the group has failed,
            # the next call says so.
            failure = error_of(result, self.members)
            warnings.warn(
                f"{failure}. Tensors that PyTorch communicates are in ordinary memory, which takes longer: free shared memory, or raise its "
                "limit."
            )
            return torch.empty(size, dtype=dtype)
        memory = (ctypes.c_char * length).from_address(pointer.value)
        weakref.finalize(memory, library.mem_free, pointer.value)
        return torch.frombuffer(memory, dtype=dtype, count=size)


def not_negative(tag, name):
    if tag < 0:
        raise ValueError(f"{name}: the tag is {tag}; it must not be negative")
    return tag


def close(collectives, messages, hooks, patience_ms):
    """Destroys the communicators, and waits for the callbacks of their calls."""
    hooks.mute()
    for channel in (messages, collectives):
        comm, channel.comm = channel.comm, None
        if comm:
            library.comm_destroy(comm)
    for channel in (messages, collectives):
        channel.waiter.close(patience_ms / 1000)
    hooks.close(patience_ms / 1000)


def create(dist_options, given, profiled_as="kolo"):
    """Makes a process group for torch.distributed. `profiled_as`: the name of the backend in entries of profiles."""
    options = given.copied() if given is not None else Options()
    # The argument `timeout` wins over the one in the options. Without the argument, PyTorch passes
    # its default, and the options win. Python warns if both are given and differ.
    if dist_options.timeout != default_pg_timeout or given is None:
        options._timeout = dist_options.timeout
    if getattr(dist_options, "enable_reconfigure", False):
        options.enable_reconfigure = True
    options.profiled_as = profiled_as
    options.group_name = dist_options.group_id
    options.global_ranks_in_group = dist_options.global_ranks_in_group
    return ProcessGroupKolo.connected(dist_options.store, dist_options.group_rank, dist_options.group_size, options)


run_signal_handlers()
