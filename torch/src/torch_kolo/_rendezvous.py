"""Runs Python's signal handlers while PyTorch makes the store of a start, and keeps the store apart from
that of the start before.

PyTorch's TCP store waits for the other ranks in C++: a Ctrl-C would have no effect for the whole
timeout. So a thread of its own makes the store.

With ``env://`` and ``tcp://``, rank 0 serves PyTorch's store, and closes it when the program
destroys the default group. If the program starts again with the same address, another rank may
still connect to the store that closes: its start fails, and rank 0 waits for it at the next store
in vain.

PyTorch logs the stack of every call to a store that closes. So each rank keeps a connection of its own
to the store, on which it sends nothing: the end of that is the end of the store.
"""

import functools
import os
import socket
import threading
import time
from urllib.parse import urlsplit

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import _rendezvous_handlers

# The key of the number of a start.
START = "torch_kolo/start"

# How long a rank waits before it asks again whether rank 0 has started again.
PAUSE = 0.01

# How long a rank that starts again waits for the end of the store before it asks the store. If the
# program keeps the store of rank 0, that has no end.
CLOSES = 0.5

# The number of the last start of this process at each host and port, and the connection that ends
# with its store, except on rank 0.
last_starts = {}


def follow_stores():
    """Has a rank that starts again wait for the store of the new start, from now on."""
    for scheme in ("env", "tcp"):
        handler = _rendezvous_handlers[scheme]
        if not hasattr(handler, "__wrapped__"):
            _rendezvous_handlers[scheme] = _following(handler)


def _following(handler):
    @functools.wraps(handler)
    def followed(url, timeout=default_pg_timeout, **others):
        until = time.monotonic() + timeout.total_seconds()
        connection = _connection(url)
        has_ended = _has_ended(connection, min(CLOSES, timeout.total_seconds()))
        while True:
            try:
                steps = handler(url, timeout=timeout, **others)
                met = store, rank, _ = _with_signals(lambda: next(steps))
            except dist.DistNetworkError:
                # PyTorch tries again only until it has connected.
                if not last_starts or time.monotonic() >= until:
                    raise
                continue
            if rank == 0:
                store.set(START, os.urandom(16).hex())
                break
            if has_ended or _is_new(store, until, connection):
                break
            has_ended = _has_ended(connection, 0)
            # Rank 0 counts the ranks that connect to the new store, so a new object is needed.
            del met, store, steps
        yield met
        yield from steps

    return followed


def _with_signals(function):
    """Calls a function in which PyTorch runs no signal handlers. If a handler raises an exception
    meanwhile, the thread of the call is left behind.
    """
    if threading.current_thread() is not threading.main_thread():
        return function()
    outcomes = []

    def call():
        try:
            outcomes.append((function(), None))
        except BaseException as error:
            outcomes.append((None, error))

    thread = threading.Thread(target=call, name="kolo-store", daemon=True)
    thread.start()
    thread.join()
    result, error = outcomes.pop()
    try:
        if error:
            raise error
        return result
    finally:
        # Nothing keeps the store but the caller.
        del error


def _connection(url):
    """The connection to the store of the last start at the address of a URL, if there is one."""
    parts = urlsplit(url)
    # The store of torchrun's agent lasts longer than a start.
    if parts.scheme == "env" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    try:
        address = parts.hostname, parts.port
        if parts.scheme == "env":
            address = os.environ.get("MASTER_ADDR"), int(os.environ.get("MASTER_PORT") or 0)
    except ValueError:
        # PyTorch says what is wrong with the port.
        return None
    return last_starts.get(address, (None, None))[1]


def _has_ended(connection, wait):
    """Waits up to `wait` seconds for the store to close a connection. Returns whether the store has closed it."""
    if connection is None:
        return False
    connection.settimeout(wait)
    try:
        return not connection.recv(1)
    except (TimeoutError, BlockingIOError):
        return False
    except OSError:
        return True


def _is_new(store, until, connection):
    """Whether rank 0 has started again with this store. Otherwise the store has closed."""
    last, _ = last_starts.get((store.host, store.port), (None, None))
    if last is None:
        return True
    while not _has_ended(connection, 0):
        try:
            # The store of the start before has its number.
            if not store.check([START]) or store.get(START) != last:
                return True
        except RuntimeError:
            return False
        if time.monotonic() >= until:
            raise dist.DistStoreError(
                f"the store at {store.host}:{store.port} is still that of the start before: rank 0 has not called init_process_group again "
                "within the timeout; check that it runs"
            )
        time.sleep(PAUSE)
    return False


def joins(store, rank):
    """Is called before the default group is made, with its store."""
    store = _served(store)
    if store and rank == 0 and not store.check([START]):
        # The backend was not known before PyTorch made the store.
        store.set(START, os.urandom(16).hex())


def has_joined(store, rank):
    """Is called when the default group has been made."""
    store = _served(store)
    if not store:
        return
    connection = None
    if rank != 0:
        try:
            connection = socket.create_connection((store.host, store.port), timeout=1)
        except OSError:
            pass
    # The answer shows that the connection is to the same store.
    if store.check([START]):
        _, before = last_starts.get((store.host, store.port), (None, None))
        if before:
            before.close()
        last_starts[store.host, store.port] = store.get(START), connection
    elif connection:
        connection.close()


def _served(store):
    """The store that rank 0 serves, without its prefixes; None if it is of another kind."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, dist.TCPStore) else None
