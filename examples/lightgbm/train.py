"""Trains a LightGBM model data-parallel: each rank has a part of the rows, and LightGBM's
collectives run on kolo. README.md explains how to build libkolo_lightgbm.so and what to run.

    kolo run -n 4 -- python train.py
    python train.py --ranks 4
"""

import argparse
import contextlib
import ctypes
import logging
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import lightgbm
import numpy as np

# LightGBM's C library, and its check of results, which raises LightGBMError.
from lightgbm.basic import _LIB as lightgbm_library
from lightgbm.basic import LightGBMError
from lightgbm.basic import _safe_call as check_lightgbm

KILLED_AFTER = 5  # trees


class KoloError(Exception):
    """A call of kolo failed."""


class DifferentTrees(Exception):
    """The two networks gave different models."""


def main():
    arguments = parse_arguments()
    if arguments.ranks is not None:
        return start_ranks(arguments)
    # Without what LightGBM tells about its network.
    lightgbm.register_logger(logging.getLogger("lightgbm"))
    try:
        Rank(arguments).run()
    except (LightGBMError, KoloError, DifferentTrees) as error:
        print(f"rank {os.environ.get('KOLO_RANK', os.environ.get('RANK', '?'))} ends: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def parse_arguments():
    parser = argparse.ArgumentParser(description="Trains a LightGBM model on several ranks.")
    parser.add_argument("--ranks", type=int, metavar="N", help="start N ranks on this host, without a launcher")
    parser.add_argument("--network", choices=["kolo", "sockets"], default="kolo", help="kolo or LightGBM's own sockets")
    parser.add_argument("--compare", type=int, metavar="ROUNDS", help="train on both networks in turn, this many times")
    parser.add_argument("--rows", type=int, default=100_000, help="of all ranks [default: %(default)s]")
    parser.add_argument("--features", type=int, default=28, help="[default: %(default)s]")
    parser.add_argument("--values", type=int, default=32, help="of a feature [default: %(default)s]")
    parser.add_argument("--trees", type=int, default=50, help="[default: %(default)s]")
    parser.add_argument("--leaves", type=int, default=31, help="of a tree [default: %(default)s]")
    parser.add_argument("--threads", type=int, default=1, help="of a rank [default: %(default)s]")
    parser.add_argument("--model", metavar="PATH", help="rank i writes its model to PATH.i")
    parser.add_argument("--kill", type=int, metavar="RANK", help=f"RANK kills itself after {KILLED_AFTER} trees")
    parser.add_argument(
        "--library",
        default=os.environ.get("KOLO_LIGHTGBM", str(Path(__file__).resolve().with_name("libkolo_lightgbm.so"))),
        help="what g++ made of network.cpp [default: beside this file]",
    )
    parser.add_argument("--first-port", type=int, default=23400, help="of LightGBM's sockets [default: %(default)s]")
    return parser.parse_args()


def start_ranks(arguments):
    """Starts the ranks as processes of this program. Returns 0 if all ranks succeed."""
    rounds = arguments.compare or 1
    first_port = free_ports(arguments.ranks * rounds)
    command = [sys.executable, __file__, *without_ranks(sys.argv[1:]), "--first-port", str(first_port)]
    with tempfile.TemporaryDirectory() as folder:
        common = {"KOLO_WORLD_SIZE": str(arguments.ranks), "KOLO_STORE": f"file://{folder}/store"}
        ranks = [
            subprocess.Popen(command, env={**os.environ, **common, "KOLO_RANK": str(rank)})
            for rank in range(arguments.ranks)
        ]
        try:
            codes = [rank.wait() for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    return 1 if any(codes) else 0


def without_ranks(arguments):
    """Returns the arguments without `--ranks N`."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--ranks")
    return parser.parse_known_args(arguments)[1]


def free_ports(count):
    """Returns the first of `count` ports in a row on which no process listens. They are below the
    ports that the system gives to connections."""
    for _ in range(100):
        first = random.randrange(20_000, 30_000)
        with contextlib.ExitStack() as sockets:
            try:
                for port in range(first, first + count):
                    sockets.enter_context(socket.create_server(("", port)))
            except OSError:
                continue
            return first
    raise OSError(f"no {count} free ports in a row between 20000 and 30000")


class Rank:
    def __init__(self, arguments):
        self.arguments = arguments
        self.kolo = ctypes.CDLL(arguments.library)
        self.kolo.kolo_lightgbm_error.restype = ctypes.c_char_p
        rank, world_size = ctypes.c_int32(), ctypes.c_int32()
        self.check(self.kolo.kolo_lightgbm_start(ctypes.byref(rank), ctypes.byref(world_size)))
        self.rank, self.world_size = rank.value, world_size.value
        self.parameters = {
            # With L2 loss LightGBM counts the rows of a leaf exactly on several ranks, too.
            "objective": "regression",
            "tree_learner": "data",
            "num_machines": self.world_size,
            "pre_partition": True,
            "num_leaves": arguments.leaves,
            "num_threads": arguments.threads,
            # A rank finds the bins of some features from its own rows. If each value has a bin, the
            # bins are those of one rank.
            "min_data_in_bin": 1,
            "enable_bundle": False,
            "force_col_wise": True,
            "verbosity": -1,
        }

    def run(self):
        self.rows, self.labels = generate(self.arguments)
        if self.arguments.compare:
            self.compare(self.arguments.compare)
        else:
            self.report(*self.train(self.arguments.network))
        self.check(self.kolo.kolo_lightgbm_stop())

    def check(self, result):
        """Raises kolo's error."""
        if result:
            raise KoloError(self.kolo.kolo_lightgbm_error().decode())

    def train(self, network, round=0):
        """Returns a model and the seconds that training took."""
        self.connect(network, round)
        try:
            rows, labels = (np.array_split(all, self.world_size)[self.rank] for all in (self.rows, self.labels))
            data = lightgbm.Dataset(rows, labels, params=self.parameters).construct()
            self.check(self.kolo.kolo_lightgbm_barrier())
            start = time.perf_counter()
            model = lightgbm.train(self.parameters, data, self.arguments.trees, callbacks=[self.kill_if_asked])
            return model, time.perf_counter() - start
        finally:
            check_lightgbm(lightgbm_library.LGBM_NetworkFree())

    def connect(self, network, round):
        """Gives LightGBM its network. On one rank LightGBM uses none."""
        if network == "kolo":
            functions = self.kolo.kolo_lightgbm_reduce_scatter, self.kolo.kolo_lightgbm_all_gather
            addresses = [ctypes.cast(function, ctypes.c_void_p) for function in functions]
            result = lightgbm_library.LGBM_NetworkInitWithFunctions(self.world_size, self.rank, *addresses)
        else:
            first = self.arguments.first_port + round * self.world_size
            machines = ",".join(f"127.0.0.1:{port}" for port in range(first, first + self.world_size))
            minutes = 1
            result = lightgbm_library.LGBM_NetworkInit(machines.encode(), first + self.rank, minutes, self.world_size)
        check_lightgbm(result)

    def kill_if_asked(self, environment):
        if self.arguments.kill == self.rank and environment.iteration + 1 == KILLED_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)

    def report(self, model, seconds):
        if self.arguments.model:
            Path(f"{self.arguments.model}.{self.rank}").write_text(trees(model))
        if self.rank == 0:
            error = np.sqrt(np.mean((model.predict(self.rows) - self.labels) ** 2))
            print(f"{self.world_size} ranks: {seconds:.2f} s, root mean square error {error:.4f}", flush=True)

    def compare(self, rounds):
        """Trains on both networks in turn, checks that the trees are equal, and prints times."""
        times = {"kolo": [], "sockets": []}
        for round in range(rounds):
            found = {}
            for network in sorted(times, reverse=round % 2 == 1):
                model, seconds = self.train(network, round)
                found[network] = trees(model)
                times[network].append(seconds)
            if found["kolo"] != found["sockets"]:
                raise DifferentTrees(f"the trees of kolo and of the sockets differ in round {round}")
        if self.rank == 0:
            kolo, sockets = (statistics.median(times[network]) for network in ("kolo", "sockets"))
            ratios = sorted(other / own for own, other in zip(times["kolo"], times["sockets"]))
            print(
                f"{self.world_size} ranks, {rounds} rounds, equal trees: kolo {kolo:.2f} s, sockets {sockets:.2f} s, "
                f"sockets / kolo {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
                flush=True,
            )


def generate(arguments):
    """Returns rows and labels, the same on all ranks."""
    generator = np.random.default_rng(7)
    rows = generator.integers(0, arguments.values, (arguments.rows, arguments.features)).astype(np.float32)
    scaled = 2 * rows / arguments.values - 1
    labels = scaled[:, 0] * scaled[:, 1] + np.sin(3 * scaled[:, 2]) + scaled[:, 3]
    return rows, (labels + generator.normal(scale=0.5, size=arguments.rows)).astype(np.float32)


def trees(model):
    """Returns a model as text, without the parameters."""
    return model.model_to_string().split("\nparameters:")[0]


if __name__ == "__main__":
    sys.exit(main())
