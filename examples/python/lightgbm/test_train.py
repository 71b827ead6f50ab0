"""Tests of train.py on 1, 2 and 4 ranks. KOLO_LIGHTGBM is the path of libkolo_lightgbm.so."""

import importlib.util
import os
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent
LIBRARY = Path(os.environ.get("KOLO_LIGHTGBM", FOLDER / "libkolo_lightgbm.so"))
SMALL = ["--rows", "20000", "--trees", "20"]

if importlib.util.find_spec("lightgbm") is None:
    warnings.warn("NOT RUN: lightgbm is not installed; pip install lightgbm")
    pytest.skip("NOT RUN: lightgbm is not installed; pip install lightgbm", allow_module_level=True)


def train(ranks, *arguments):
    command = [sys.executable, FOLDER / "train.py", "--ranks", str(ranks), "--library", LIBRARY, *SMALL, *arguments]
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
    import lightgbm

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


# Sums the ranks' values, one block for each rank, with the function that LightGBM would call.
REDUCE = """
import ctypes, os, sys

Doubles = ctypes.POINTER(ctypes.c_double)

@ctypes.CFUNCTYPE(None, Doubles, Doubles, ctypes.c_int, ctypes.c_int32)
def add(input, output, type_size, size):
    for i in range(size // type_size):
        output[i] += input[i]

kolo = ctypes.CDLL(sys.argv[1])
rank, ranks = ctypes.c_int32(), ctypes.c_int32()
assert kolo.kolo_lightgbm_start(ctypes.byref(rank), ctypes.byref(ranks)) == 0
n = ranks.value
values = (ctypes.c_double * n)(*[float(sys.argv[2 + rank.value])] * n)
sum = ctypes.c_double()
start, length = (ctypes.c_int32 * n)(*range(0, 8 * n, 8)), (ctypes.c_int32 * n)(*[8] * n)
kolo.kolo_lightgbm_reduce_scatter(values, 8 * n, 8, start, length, n, ctypes.byref(sum), 8, ctypes.byref(add))
assert kolo.kolo_lightgbm_stop() == 0
print(sum.value)
"""


# Large terms absorb small ones: in rank order the sums would be 1, 0 and 2.
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1e16, 1, -1e16, 1], 2),  # (0 + 2) + (1 + 3)
        ([1, 1e16, -1e16], 1),  # 0 + (1 + 2)
        ([1e16, 1, -1e16, 1, 1], 3),  # (0 + 2) + (1 + (3 + 4))
    ],
)
def test_sums_have_the_order_of_recursive_halving(tmp_path, values, expected):
    common = {**os.environ, "KOLO_WORLD_SIZE": str(len(values)), "KOLO_STORE": f"file://{tmp_path}/store"}
    command = [sys.executable, "-c", REDUCE, LIBRARY, *map(str, values)]
    ranks = [
        subprocess.Popen(command, env={**common, "KOLO_RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(len(values))
    ]
    assert [float(rank.communicate(timeout=60)[0]) for rank in ranks] == [expected] * len(values)


def test_a_comparison_prints_both_times():
    done = train(2, "--compare", "2")
    assert done.returncode == 0, done.stderr
    assert re.search(r"2 ranks, 2 rounds, equal trees: kolo [\d.]+ s, sockets [\d.]+ s", done.stdout)


@pytest.mark.parametrize(("ranks", "killed"), [(2, 0), (4, 2)])
def test_the_other_ranks_name_a_killed_rank(ranks, killed):
    start = time.monotonic()
    done = train(ranks, "--kill", str(killed))
    assert done.returncode == 1
    for rank in set(range(ranks)) - {killed}:
        assert re.search(rf"^rank {rank} ends: kolo: .* rank {killed} \(.*\) has died", done.stderr, re.MULTILINE), done.stderr
    assert f"rank {killed} ends" not in done.stderr
    # Far less than the timeout of an operation, which is 5 minutes. Most of it is start-up.
    assert time.monotonic() - start < 60
