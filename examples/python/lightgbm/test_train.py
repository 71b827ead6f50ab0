"""Tests of train.py and network.py on 1 to 5 ranks, under `kolo run`."""

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

lightgbm = pytest.importorskip("lightgbm", reason="NOT RUN: lightgbm is not installed; pip install lightgbm")
import pykolo  # noqa: E402
from network import Network, Reducer  # noqa: E402

TRAIN = Path(__file__).resolve().with_name("train.py")
SMALL = ["--rows", "20000", "--trees", "20"]


def train(ranks, *arguments):
    command = [shutil.which("kolo"), "run", "-n", str(ranks), "--keep-going", "--", sys.executable, TRAIN, *SMALL, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def model_of(folder, ranks, *arguments):
    """Trains, checks that all ranks have one model, and returns it as text."""
    done = train(ranks, "--model", folder / f"model{ranks}", *arguments)
    assert done.returncode == 0, done.stderr
    models = {(folder / f"model{ranks}.{rank}").read_text() for rank in range(ranks)}
    assert len(models) == 1
    return models.pop()


def nodes(tree):
    """Returns the splits and the numbers of rows of a tree, and the values of its leaves."""
    if "leaf_value" in tree:
        return [tree["leaf_count"]], [tree["leaf_value"]]
    left, right = nodes(tree["left_child"]), nodes(tree["right_child"])
    split = (tree["split_feature"], tree["threshold"], tree["internal_count"])
    return [split, *left[0], *right[0]], left[1] + right[1]


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_trees_are_those_of_one_rank(tmp_path, ranks):
    one, several = (
        [nodes(tree["tree_structure"]) for tree in lightgbm.Booster(model_str=model).dump_model()["tree_info"]]
        for model in (model_of(tmp_path, 1), model_of(tmp_path, ranks))
    )
    assert len(one) == len(several) == 20
    for (splits, values), (other_splits, other_values) in zip(one, several):
        assert splits == other_splits
        # Sums have another order.
        assert values == pytest.approx(other_values, rel=1e-9, abs=1e-12)


# LightGBM has another order of sums on 3 ranks, because 3 is not a power of two.
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_model_is_that_of_the_sockets(tmp_path, ranks):
    # A feature has more values than bins, so that bins depend on the rows of a rank.
    on_kolo = model_of(tmp_path, ranks, "--values", "5000")
    assert on_kolo == model_of(tmp_path, ranks, "--values", "5000", "--network", "sockets")


@Reducer
def add(given, output, _element_size, size):
    doubles = ctypes.c_double * (size // 8)
    given, output = doubles.from_address(given), doubles.from_address(output)
    output[:] = [one + other for one, other in zip(output, given)]


# Large terms absorb small ones: in rank order the sums would be 1, 0 and 2.
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1e16, 1, -1e16, 1], 2),  # (0 + 2) + (1 + 3)
        ([1, 1e16, -1e16], 1),  # 0 + (1 + 2)
        ([1e16, 1, -1e16, 1, 1], 3),  # (0 + 2) + (1 + (3 + 4))
    ],
)
def test_sums_have_the_order_of_recursive_halving(values, expected):
    ranks = len(values)

    def of_rank(comm):
        """Sums the ranks' values, one block for each rank, as LightGBM does."""
        reduce_scatter, _ = Network(comm).functions
        given = (ctypes.c_double * ranks)(*[values[comm.rank]] * ranks)
        start, length = (ctypes.c_int32 * ranks)(*range(0, 8 * ranks, 8)), (ctypes.c_int32 * ranks)(*[8] * ranks)
        total = ctypes.c_double()
        reduce_scatter(
            ctypes.addressof(given), 8 * ranks, 8, start, length, ranks, ctypes.addressof(total), 8, ctypes.pointer(add)
        )
        return total.value

    assert pykolo.spawn(ranks, of_rank) == [expected] * ranks


def test_a_comparison_prints_both_times():
    done = train(2, "--compare", "2")
    assert done.returncode == 0, done.stderr
    assert re.search(r"2 ranks, 2 rounds, equal trees: kolo [\d.]+ s, sockets [\d.]+ s", done.stdout)


# Before the ranks find the bins, which are in collectives of their own, and between two trees.
@pytest.mark.parametrize(("ranks", "killed", "trees"), [(2, 0, 5), (4, 2, 5), (4, 1, 0), (3, 2, 1)])
def test_the_other_ranks_name_a_killed_rank(ranks, killed, trees):
    done = train(ranks, "--kill", str(killed), "--kill-after", str(trees))
    assert done.returncode != 0
    for rank in set(range(ranks)) - {killed}:
        assert re.search(rf"rank {rank} ends: .* rank {killed} \(.*\) has died", done.stderr), done.stderr
    assert f"rank {killed} ends" not in done.stderr
