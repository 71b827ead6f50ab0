"""Each program finds on several ranks what one process finds."""

import importlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pykolo
import pytest

FOLDER = Path(__file__).resolve().parent
RANKS = pytest.mark.parametrize("ranks", [1, 2, 4])


def run(program, ranks, out):
    """What rank 0 writes to its file."""
    command = [shutil.which("kolo"), "run", "-n", str(ranks), "--", sys.executable, FOLDER / program, out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"{ranks} ranks" in done.stdout
    return np.load(out)


def module(name, needs):
    pytest.importorskip(needs, reason=f"NOT RUN: {needs} is not installed; pip install {needs}")
    return importlib.import_module(name)


@RANKS
def test_k_means_finds_the_centres_that_scikit_learn_finds(tmp_path, ranks):
    cluster = pytest.importorskip("sklearn.cluster", reason="NOT RUN: scikit-learn is not installed")
    k_means = module("k_means", "numpy")
    found = run("k_means.py", ranks, tmp_path / "found.npz")
    model = cluster.KMeans(k_means.CENTRES, init=found["first"], n_init=1, tol=0, algorithm="lloyd").fit(k_means.points())
    np.testing.assert_allclose(found["centres"], model.cluster_centers_, rtol=1e-9)


@RANKS
def test_pca_finds_the_singular_vectors_of_all_rows(tmp_path, ranks):
    rows = module("pca", "numpy").rows()
    found = run("pca.py", ranks, tmp_path / "found.npz")
    np.testing.assert_allclose(found["mean"], rows.mean(axis=0), rtol=1e-9)
    _, singular, vectors = np.linalg.svd(rows - rows.mean(axis=0), full_matrices=False)
    count = len(found["variances"])
    np.testing.assert_allclose(found["variances"], singular[:count] ** 2 / (len(rows) - 1), rtol=1e-9)
    # A component is known but for its sign.
    np.testing.assert_allclose(abs(np.sum(found["components"] * vectors[:count], axis=1)), 1, rtol=1e-9)


@RANKS
def test_jax_has_the_losses_of_whole_batches(tmp_path, ranks):
    jax_step = module("jax_step", "jax")
    import jax

    found = run("jax_step.py", ranks, tmp_path / "found.npz")
    weights, losses = jax_step.first_weights(), []
    for batch in zip(*jax_step.samples()):
        loss, gradients = jax.value_and_grad(jax_step.loss_of)(weights, *batch)
        weights = jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, weights, gradients)
        losses.append(loss)
    assert len(losses) == jax_step.STEPS
    # Sums of 32 bits, in another order.
    np.testing.assert_allclose(found["losses"], losses, rtol=1e-4)
    for name, weight in weights.items():
        np.testing.assert_allclose(found[name], weight, atol=1e-4)


@RANKS
def test_the_average_is_that_of_models_of_one_process(tmp_path, ranks):
    sgd = module("sgd_classifier", "sklearn")
    found = run("sgd_classifier.py", ranks, tmp_path / "found.npz")
    inputs, labels = sgd.samples()
    models = [sgd.new_model(rank) for rank in range(ranks)]
    for _ in range(sgd.EPOCHS):
        for rank, model in enumerate(models):
            model.partial_fit(inputs[rank::ranks], labels[rank::ranks], classes=np.unique(labels))
        for name in ("coef_", "intercept_"):
            average = np.mean([getattr(model, name) for model in models], axis=0)
            for model in models:
                getattr(model, name)[...] = average
    np.testing.assert_allclose(found["coef"], models[0].coef_, rtol=1e-7)
    np.testing.assert_allclose(found["intercept"], models[0].intercept_, rtol=1e-7)


@pytest.fixture
def dask_client():
    distributed = pytest.importorskip("distributed", reason="NOT RUN: Dask is not installed; pip install dask[distributed]")
    cluster = distributed.LocalCluster(n_workers=3, threads_per_worker=1, dashboard_address=None)
    with cluster, distributed.Client(cluster) as client:
        yield client


def test_dask_s_workers_find_the_weights_of_one_process(dask_client):
    dask_workers = module("dask_workers", "dask.array")
    array = dask_workers.samples()
    found = dask_workers.fit_on_workers(dask_client, array)
    assert len(found) == 3
    with pykolo.Communicator.from_env() as alone:
        expected = dask_workers.fit([array.compute()], alone)
    for weights in found:
        np.testing.assert_allclose(weights, expected, rtol=1e-9)


def test_dask_gets_the_error_that_names_the_rank(dask_client):
    dask_workers = module("dask_workers", "dask.array")
    unique_id = dask_client.submit(pykolo.unique_id).result()
    workers = sorted(dask_client.scheduler_info()["workers"])
    # Rank 2 has a column less.
    columns = [5, 5, 4]
    tasks = [
        dask_client.submit(dask_workers.fit_as_rank, [np.ones((10, columns[rank]))], rank, 3, unique_id, workers=[worker])
        for rank, worker in enumerate(workers)
    ]
    for task in tasks:
        error = task.exception(timeout=120)
        assert isinstance(error, pykolo.MismatchError) and error.rank == 2, error


@pytest.fixture(scope="module")
def ray():
    ray = pytest.importorskip("ray", reason="NOT RUN: Ray is not installed; pip install ray")
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": str(FOLDER)}})
    yield ray
    ray.shutdown()


def in_actors(ray, name, function):
    """Calls function(rank) in three actors of a group of Ray. Returns what each gives, or its error."""
    from ray.util import collective
    from ray.util.collective.backend_registry import _global_registry, register_collective_backend
    from ray_actors import KoloGroup

    def register():
        if not _global_registry.is_registered("KOLO"):
            register_collective_backend("KOLO", KoloGroup)

    class Actor:
        def call(self):
            register()
            # The first call of a collective makes the group.
            collective.barrier(name)
            return function(collective.get_rank(name))

    register()
    actors = [ray.remote(num_cpus=1)(Actor).remote() for _ in range(3)]
    collective.create_collective_group(actors, 3, [0, 1, 2], backend="KOLO", group_name=name)
    results = []
    for result in [actor.call.remote() for actor in actors]:
        try:
            results.append(ray.get(result, timeout=120))
        except ray.exceptions.RayError as error:
            results.append(error)
    return results


def test_ray_s_actors_find_the_means_of_one_process():
    pytest.importorskip("ray", reason="NOT RUN: Ray is not installed; pip install ray")
    done = subprocess.run([sys.executable, FOLDER / "ray_actors.py", "3"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "3 actors found the means" in done.stdout


def test_each_of_ray_s_collectives(ray):
    from ray.util import collective
    from ray.util.collective.types import ReduceOp

    def of_rank(rank):
        group = {"group_name": "all"}
        ones = np.arange(4.0) + rank
        summed, largest, reduced, copied = ones.copy(), ones.copy(), ones.copy(), ones.copy()
        collective.allreduce(summed, **group)
        collective.allreduce(largest, op=ReduceOp.MAX, **group)
        collective.reduce(reduced, dst_rank=1, op=ReduceOp.PRODUCT, **group)
        collective.broadcast(copied, src_rank=2, **group)
        gathered = [np.empty(4) for _ in range(3)]
        collective.allgather(gathered, ones, **group)
        mine = np.empty(4)
        collective.reducescatter(mine, [ones * (i + 1) for i in range(3)], **group)
        message = np.full(2, 7.0 + rank)
        if rank == 0:
            collective.send(message, 2, **group)
        elif rank == 2:
            collective.recv(message, 0, **group)
        collective.destroy_collective_group("all")
        return summed, largest, reduced, copied, gathered, mine, message

    given = np.arange(4.0) + np.arange(3)[:, None]
    results = in_actors(ray, "all", of_rank)
    for rank, (summed, largest, reduced, copied, gathered, mine, message) in enumerate(results):
        np.testing.assert_array_equal(summed, given.sum(axis=0))
        np.testing.assert_array_equal(largest, given.max(axis=0))
        np.testing.assert_array_equal(reduced, given.prod(axis=0) if rank == 1 else given[rank])
        np.testing.assert_array_equal(copied, given[2])
        np.testing.assert_array_equal(gathered, given)
        np.testing.assert_array_equal(mine, given.sum(axis=0) * (rank + 1))
        np.testing.assert_array_equal(message, [7.0, 8.0, 7.0][rank])


def test_ray_s_actors_name_one_that_is_killed(ray):
    from ray.util import collective

    def of_rank(rank):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        collective.barrier("killed")

    first, killed, last = in_actors(ray, "killed", of_rank)
    assert isinstance(killed, ray.exceptions.ActorDiedError)
    for error in (first, last):
        # Its cause is kolo's error: Ray's own attribute hides that of kolo.
        assert isinstance(error, pykolo.PeerError) and error.rank == 1 and error.cause.cause == "died", error
