"""Keeps the store of a start apart from that of the start before.

With ``env://`` and ``tcp://``, rank 0 serves PyTorch's store, and closes it when the program
destroys the default group. If the program starts again with the same address, another rank may
still connect to the store that closes: its start fails, and rank 0 waits for it at the next store
in vain.
"""

import functools
import os
import time

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import _rendezvous_handlers

# The key of the number of a start.
START = "torch_kolo/start"

# How long a rank waits before it asks again whether rank 0 has started again.
PAUSE = 0.01

# The number of the last start of this process at each host and port.
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
        while True:
            try:
                steps = handler(url, timeout=timeout, **others)
                met = store, rank, _ = next(steps)
            except dist.DistNetworkError:
                # PyTorch tries again only until it has connected.
                if not last_starts or time.monotonic() >= until:
                    raise
                continue
            if rank == 0:
                store.set(START, os.urandom(16).hex())
                break
            if _is_new(store, until):
                break
            # Rank 0 counts the ranks that connect to the new store, so a new object is needed.
            del met, store, steps
        yield met
        yield from steps

    return followed


def _is_new(store, until):
    """Whether rank 0 has started again with this store. Otherwise the store has closed."""
    last = last_starts.get((store.host, store.port))
    if last is None:
        return True
    while True:
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


def joins(store, rank):
    """Is called before the default group is made, with its store."""
    store = _served(store)
    if store and rank == 0 and not store.check([START]):
        # The backend was not known before PyTorch made the store.
        store.set(START, os.urandom(16).hex())


def has_joined(store):
    """Is called when the default group has been made."""
    store = _served(store)
    if store and store.check([START]):
        last_starts[store.host, store.port] = store.get(START)


def _served(store):
    """The store that rank 0 serves, without its prefixes; None if it is of another kind."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, dist.TCPStore) else None
