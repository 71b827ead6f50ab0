"""Trains a LightGBM model data-parallel: each rank has a part of the rows, and LightGBM's
collectives run on kolo.

    kolo run -n 4 -- python train.py
"""

import argparse
import contextlib
import logging
import os
import random
import signal
import socket
import statistics
import sys
import time
from pathlib import Path

import lightgbm
import numpy as np
import pykolo
from network import Network, check_lightgbm, lightgbm_library


class DifferentTrees(Exception):
    """The two networks gave different models."""


def main():
    arguments = parse_arguments()
    # Without what LightGBM tells about its network.
    lightgbm.register_logger(logging.getLogger("lightgbm"))
    with pykolo.Communicator.from_env() as comm:
        try:
            Rank(arguments, comm).run()
        except (lightgbm.basic.LightGBMError, pykolo.KoloError, DifferentTrees) as error:
            print(f"rank {comm.rank} ends: {error}", file=sys.stderr, flush=True)
            return 1
    return 0


def parse_arguments():
    parser = argparse.ArgumentParser(description="Trains a LightGBM model on the ranks of a launcher.")
    parser.add_argument("--network", choices=["kolo", "sockets"], default="kolo", help="kolo or LightGBM's own sockets")
    parser.add_argument("--compare", type=int, metavar="ROUNDS", help="train on both networks in turn, this many times")
    parser.add_argument("--rows", type=int, default=100_000, help="of all ranks [default: %(default)s]")
    parser.add_argument("--features", type=int, default=28, help="[default: %(default)s]")
    parser.add_argument("--values", type=int, default=32, help="of a feature [default: %(default)s]")
    parser.add_argument("--trees", type=int, default=50, help="[default: %(default)s]")
    parser.add_argument("--leaves", type=int, default=31, help="of a tree [default: %(default)s]")
    parser.add_argument("--threads", type=int, default=1, help="of a rank [default: %(default)s]")
    parser.add_argument("--model", metavar="PATH", help="rank i writes its model to PATH.i")
    parser.add_argument("--kill", type=int, metavar="RANK", help="RANK kills itself")
    parser.add_argument(
        "--kill-after", type=int, default=5, metavar="TREES", help="0: before the ranks find the bins of the features [default: %(default)s]"
    )
    return parser.parse_args()


class Rank:
    def __init__(self, arguments, comm):
        self.arguments, self.comm = arguments, comm
        self.parameters = {
            # With L2 loss LightGBM counts the rows of a leaf exactly on several ranks, too.
            "objective": "regression",
            "tree_learner": "data",
            "num_machines": comm.world_size,
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

    def train(self, network):
        """Returns a model and the seconds that training took."""
        with Network(self.comm) if network == "kolo" else self.sockets() as made:
            rows, labels = (np.array_split(all, self.comm.world_size)[self.comm.rank] for all in (self.rows, self.labels))
            self.kill_if_asked(0)
            data = lightgbm.Dataset(rows, labels, params=self.parameters).construct()
            self.comm.barrier()
            callbacks = [lambda environment: self.kill_if_asked(environment.iteration + 1)]
            if network == "kolo":
                callbacks.append(made.end_if_failed)
            start = time.perf_counter()
            model = lightgbm.train(self.parameters, data, self.arguments.trees, callbacks=callbacks)
            return model, time.perf_counter() - start

    @contextlib.contextmanager
    def sockets(self):
        """LightGBM's own network."""
        world_size, minutes = self.comm.world_size, 1
        first = int(self.comm.broadcast(np.array([free_ports(world_size)]))[0])
        machines = ",".join(f"127.0.0.1:{port}" for port in range(first, first + world_size))
        check_lightgbm(lightgbm_library.LGBM_NetworkInit(machines.encode(), first + self.comm.rank, minutes, world_size))
        try:
            yield
        finally:
            check_lightgbm(lightgbm_library.LGBM_NetworkFree())

    def kill_if_asked(self, trees):
        if (self.comm.rank, trees) == (self.arguments.kill, self.arguments.kill_after):
            os.kill(os.getpid(), signal.SIGKILL)

    def report(self, model, seconds):
        if self.arguments.model:
            Path(f"{self.arguments.model}.{self.comm.rank}").write_text(trees(model))
        if self.comm.rank == 0:
            error = np.sqrt(np.mean((model.predict(self.rows) - self.labels) ** 2))
            print(f"{self.comm.world_size} ranks: {seconds:.2f} s, root mean square error {error:.4f}", flush=True)

    def compare(self, rounds):
        """Trains on both networks in turn, checks that the trees are equal, and prints times."""
        times = {"kolo": [], "sockets": []}
        for round in range(rounds):
            found = {}
            for network in sorted(times, reverse=round % 2 == 1):
                model, seconds = self.train(network)
                found[network] = trees(model)
                times[network].append(seconds)
            if found["kolo"] != found["sockets"]:
                raise DifferentTrees(f"the trees of kolo and of the sockets differ in round {round}")
        if self.comm.rank == 0:
            kolo, sockets = (statistics.median(times[network]) for network in ("kolo", "sockets"))
            ratios = sorted(other / own for own, other in zip(times["kolo"], times["sockets"]))
            print(
                f"{self.comm.world_size} ranks, {rounds} rounds, equal trees: kolo {kolo:.2f} s, sockets {sockets:.2f} s, "
                f"sockets / kolo {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
                flush=True,
            )


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
