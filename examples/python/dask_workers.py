"""Workers of a Dask cluster are ranks: logistic regression on an array whose chunks they hold.

    python dask_workers.py [WORKERS]

Dask places the chunks and starts a task on each worker. The tasks then talk to each other, and not
to the scheduler: a collective for each step.
"""

import sys

import dask.array as da
import numpy as np
import pykolo
from dask.distributed import Client, LocalCluster, futures_of, wait

STEPS = 200


def samples(count=20_000, features=10, chunk=1000):
    """Rows in chunks, with the label (0 or 1) in the last column."""
    state = da.random.default_rng(8)
    inputs = state.normal(size=(count, features), chunks=(chunk, features))
    labels = (inputs @ np.linspace(-1, 1, features) + state.normal(size=count, chunks=chunk) > 0).astype(float)
    return da.concatenate([inputs, labels[:, None]], axis=1).rechunk((chunk, features + 1))


def fit(chunks, comm):
    """Gradient descent. Returns the weights, the same on all ranks."""
    rows = np.concatenate(chunks)
    inputs, labels = rows[:, :-1], rows[:, -1]
    weights = np.zeros(inputs.shape[1])
    for _ in range(STEPS):
        errors = 1 / (1 + np.exp(-inputs @ weights)) - labels
        sums = np.append(inputs.T @ errors, len(errors))
        comm.all_reduce(sums)
        weights -= sums[:-1] / sums[-1]
    return weights


def fit_as_rank(chunks, rank, world_size, unique_id):
    """A task."""
    with pykolo.Communicator(rank=rank, world_size=world_size, store=unique_id, start_timeout=60) as comm:
        return fit(chunks, comm)


def fit_on_workers(client, array):
    """Has the workers that hold chunks of an array fit it. Returns what each has found."""
    array = client.persist(array)
    wait(array)
    chunks_of = {}
    holders = client.who_has(array)
    for chunk in futures_of(array):
        chunks_of.setdefault(holders[chunk.key][0], []).append(chunk)
    workers = sorted(chunks_of)
    # The id has the address of the worker that makes it, and a secret of these ranks.
    unique_id = client.submit(pykolo.unique_id, workers=workers[:1], pure=False).result()
    # Each task on the worker whose chunks it takes: all must run at the same time.
    tasks = [
        client.submit(fit_as_rank, chunks_of[worker], rank, len(workers), unique_id, workers=[worker], pure=False)
        for rank, worker in enumerate(workers)
    ]
    return client.gather(tasks)


def main():
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    with LocalCluster(n_workers=count, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster) as client:
        array = samples()
        found = fit_on_workers(client, array)
        with pykolo.Communicator.from_env() as alone:
            expected = fit([array.compute()], alone)
    for weights in found:
        np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-12)
    print(f"{len(found)} workers and one process found the same weights: {expected.round(3)}")


if __name__ == "__main__":
    main()
