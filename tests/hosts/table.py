#!/usr/bin/env python3
"""Measures collectives on the hosts of bed.sh. Needs root, and the program kolo.

    tests/hosts/table.py choice    every algorithm by size, and how much slower than the best the chosen one is
    tests/hosts/table.py peers     kolo beside Open MPI and Gloo, in turns
    tests/hosts/table.py racks     kolo without and with the topology, in turns (RACKS=2 UPLINK=200mbit)
    tests/hosts/table.py order     kolo in the order of ranks, and in the one that it measures (SLOW=1-2:100mbit)
    tests/hosts/table.py predictions   `kolo plan --simulate` beside every algorithm, which is measured twice

Each line gives medians of the rounds, in microseconds. The hosts are namespaces of this machine, so
their ranks share its processors: figures compare only within one run.
"""

import argparse
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile

BED = pathlib.Path(__file__).with_name("bed.sh")
PEERS = pathlib.Path(__file__).parents[2] / "cli" / "peers"
ALGORITHMS = ["hierarchical", "ring", "direct", "binomial", "double-tree", "recursive-doubling", "halving-doubling"]
OPS = ["all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "barrier"]
# What every contestant knows (cli/peers/README.md).
OPS_OF_PEERS = [op for op in OPS if op not in ("reduce", "gather", "scatter")]


def bed(*words, check=True, **variables):
    done = subprocess.run([BED, *map(str, words)], capture_output=True, text=True, env={**os.environ, **variables})
    if check and done.returncode != 0:
        sys.exit(f"table.py: bed.sh {' '.join(map(str, words))}: {done.stderr.strip()}")
    return done


def bench(args, ranks, op, algorithm=None, **variables):
    """Returns the rows of `kolo bench` by size: the time in microseconds and the algorithm."""
    with tempfile.TemporaryDirectory() as folder:
        figures = pathlib.Path(folder, "figures.json")
        words = [args.kolo, "bench", op, "--sizes", args.sizes, "-n", args.iters, "-w", 1, "--json", figures, "--timeout", "60s"]
        if args.check:
            words.append("--check")
        if algorithm:
            words += ["--algorithm", algorithm]
        bed("start", ranks, *words, **variables)
        report = json.loads(figures.read_text())
    rows = {}
    for row in report["rows"]:
        line = row.get("in_place") or row["out_of_place"]
        if line["wrong"]:
            sys.exit(f"table.py: {op} of {row['bytes']} B by {row['algorithm']} is wrong in {line['wrong']} elements")
        rows[row["bytes"]] = (line["p50_us"], row["algorithm"])
    return rows


def forced(args, op, algorithm, ranks_in_all, hosts):
    """Whether `kolo plan` knows this algorithm for an operation."""
    words = [args.kolo, "plan", op, "-n", str(ranks_in_all), "--hosts", str(hosts), "--algorithm", algorithm]
    return subprocess.run(words, capture_output=True).returncode == 0


def choice(args, hosts, each, **variables):
    ranks = hosts * each
    worst = []
    for op in args.ops:
        algorithms = [one for one in ALGORITHMS if forced(args, op, one, ranks, hosts)]
        times, chosen = {}, {}
        for _ in range(args.rounds):
            for algorithm in [None, *algorithms]:
                for size, (time, name) in bench(args, each, op, algorithm, **variables).items():
                    if algorithm is None:
                        chosen[size] = name.split(" ")[0]
                    else:
                        times.setdefault((size, algorithm), []).append(time)
        for size, taken in chosen.items():
            medians = {one: statistics.median(times[size, one]) for one in algorithms if (size, one) in times}
            if taken not in medians:
                continue
            best = min(medians, key=medians.get)
            # The rounds are interleaved, so each compares with itself.
            ratio = statistics.median(a / b for a, b in zip(times[size, taken], times[size, best]))
            worst.append((ratio, f"{op} of {size} B on {hosts}x{each}: {taken}, not {best}"))
            line = "  ".join(f"{one} {time:.0f}" for one, time in sorted(medians.items(), key=lambda item: item[1]))
            print(f"{hosts}x{each} {op:14} {size:>9}  {taken:20} {ratio:5.2f}  {line}", flush=True)
    return worst


def two_ways(args, hosts, each, first, second):
    """Each operation in two ways, which are variables by name, in turns; prints how much slower the first one is."""
    ways = {**first, **second}
    ratio_of = "/".join(ways)
    for op in args.ops:
        times, names = {}, {}
        # The costs of another bed are not those of this one.
        with tempfile.TemporaryDirectory() as cache:
            for _ in range(args.rounds):
                for way, variables in ways.items():
                    for size, (time, name) in bench(args, each, op, KOLO_CACHE_DIR=cache, **variables).items():
                        times.setdefault((size, way), []).append(time)
                        names[size, way] = name
        for size in sorted({size for size, _ in times}):
            # The rounds are interleaved, so each compares with itself.
            ratios = sorted(a / b for a, b in zip(*(times[size, way] for way in ways)))
            figures = [f"{names[size, way]} {statistics.median(times[size, way]):.0f}" for way in ways]
            spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            print(f"{hosts}x{each} {op:14} {size:>9}  {'  '.join(figures)}  {ratio_of} {spread}", flush=True)


def racks(args, hosts, each):
    two_ways(args, hosts, each, {"without": {"TOPOLOGY": "none"}}, {"with": {"TOPOLOGY": "known"}})


def order(args, hosts, each):
    """With given costs, the hosts are visited in the order of ranks."""
    given = {"KOLO_NETWORK_LATENCY": "100us", "KOLO_NETWORK_BANDWIDTH": f"{rate():.5f}"}
    two_ways(args, hosts, each, {"given": given}, {"measured": {}})


def rate():
    """The payload that a link carries, in GB/s: 94.8 % of its rate, the rest is headers."""
    text = os.environ.get("RATE", "1gbit")
    factor = {"gbit": 1.0, "mbit": 1e-3}.get(text.lstrip("0123456789."))
    if factor is None:
        sys.exit(f"table.py: predictions need links of known speed, and RATE is {text}")
    return float(text.rstrip("gmbit")) * factor * 0.948 / 8


def latency(args):
    """The latency between two hosts in microseconds: recursive doubling of 8 B between two ranks is one exchange."""
    bed("up", 2)
    try:
        short = argparse.Namespace(**{**vars(args), "sizes": "8", "iters": 30})
        return statistics.median(bench(short, 1, "all_reduce", "recursive-doubling")[8][0] for _ in range(args.rounds))
    finally:
        bed("down")


def simulated(args, op, size, ranks, hosts, latency_us):
    """The times that `kolo plan` predicts, in microseconds by algorithm."""
    # About as many calls in a row as `kolo bench` makes: the burst of a link counts only for the first ones.
    calls = 200 if size <= 64 << 10 else 20
    words = [args.kolo, "plan", op, "--bytes", str(size), "-n", str(ranks), "--hosts", str(hosts), "--simulate", "--json"]
    words += ["--latency", f"{latency_us:.1f}us", "--bandwidth", f"{rate():.5f}", "--overhead", args.overhead or f"{latency_us / 2:.1f}us"]
    words += ["--burst", "128K", "--processors", str(os.cpu_count()), "--calls", str(calls)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"table.py: kolo plan: {done.stderr.strip()}")
    rows = json.loads(done.stdout)["algorithms"]
    return {row["algorithm"].split(" ")[0]: row["simulated_s"] * 1e6 for row in rows if row["simulated_s"]}


def predictions(args, hosts, each, latency_us):
    """Returns for each cell the ratios of what was simulated to what was measured, and of every second round to the others."""
    cells = []
    for op in args.ops:
        algorithms = [one for one in ALGORITHMS if forced(args, op, one, hosts * each, hosts)]
        times = {}
        for turn in range(2 * args.rounds):
            for algorithm in algorithms:
                for size, (time, name) in bench(args, each, op, algorithm).items():
                    if name.split(" ")[0] == algorithm:
                        times.setdefault((algorithm, size), ([], []))[turn % 2].append(time)
        found = {}
        for (algorithm, size), halves in times.items():
            first, second = map(statistics.median, halves)
            if size not in found:
                found[size] = simulated(args, op, size, hosts * each, hosts, latency_us)
            if algorithm in found[size]:
                measured = statistics.median(halves[0] + halves[1])
                cell = (found[size][algorithm] / measured, second / first)
                cells.append(cell)
                print(
                    f"{hosts}x{each} {op:14} {algorithm:20} {size:>9}  measured {measured:.0f}  "
                    f"simulated/measured {cell[0]:.2f}  again/first {cell[1]:.2f}",
                    flush=True,
                )
    return cells


class Contestant:
    """The ranks of a library, which wait for questions (cli/peers/README.md)."""

    def __init__(self, name, folder, ranks, command, **variables):
        self.name = name
        path = pathlib.Path(folder, f"{name}.sock")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen(ranks)
        listener.settimeout(120)
        self.log = open(pathlib.Path(folder, f"{name}.log"), "w+")
        self.process = subprocess.Popen(
            [*command, name, path], stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, env={**os.environ, **variables}
        )
        self.ranks = []
        try:
            while len(self.ranks) < ranks:
                self.ranks.append(listener.accept()[0].makefile("rw"))
                self.ranks[-1].readline()
        except TimeoutError:
            self.fail()

    def fail(self):
        self.log.seek(0)
        sys.exit(f"table.py: {self.name} does not answer:\n{self.log.read()[-2000:]}")

    def time(self, op, size, warmup, iters, calls):
        """Returns the median time of an operation on the slowest rank, in microseconds."""
        for rank in self.ranks:
            rank.write(f"{op} {size} {warmup} {iters} {calls}\n")
            rank.flush()
        answers = [rank.readline().split() for rank in self.ranks]
        if not all(answers):
            self.fail()
        return max(statistics.median(map(float, answer)) for answer in answers) / 1000

    def end(self):
        for rank in self.ranks:
            rank.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def mpi(folder, hosts, each):
    """The command of Open MPI over the hosts. It reaches them by this program in place of ssh."""
    program, agent = pathlib.Path(folder, "mpi"), pathlib.Path(folder, "agent")
    subprocess.run(["mpicc.openmpi", "-O2", "-o", program, PEERS / "mpi.c"], check=True)
    bed_name = os.environ.get("BED", "kolo-bed")
    # A name of its own for each host: Open MPI takes hosts of one name for one host.
    agent.write_text(
        "#!/bin/sh\n"
        "host=$1\n"
        "shift\n"
        "number=$((${host##*.} - 1))\n"
        f'exec ip netns exec {bed_name}-$number unshare --uts sh -c "hostname {bed_name}-$number; $*"\n'
    )
    agent.chmod(0o755)
    addresses = [bed("address", host).stdout.strip() for host in range(hosts)]
    network = addresses[0].rsplit(".", 1)[0] + ".0/24"
    words = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "--mca", "plm_rsh_agent", agent]
    words += ["--mca", "btl_tcp_if_include", network, "--mca", "oob_tcp_if_include", network, "--mca", "pml", "ob1"]
    words += ["--mca", "btl", "tcp,self,vader", "--host", ",".join(f"{one}:{each}" for one in addresses), program]
    here = ["ip", "netns", "exec", f"{bed_name}-0", "unshare", "--uts", "sh", "-c", f'hostname {bed_name}-0; exec "$@"', "sh"]
    return [*here, *words]


def contestants(args, folder, hosts, each):
    ranks = hosts * each
    found = []
    for name in args.peers:
        if name == "kolo":
            found.append(Contestant(name, folder, ranks, [BED, "start", str(each), args.kolo, "compete"]))
        elif name == "openmpi":
            found.append(Contestant(name, folder, ranks, mpi(folder, hosts, each)))
        elif name == "gloo":
            address = bed("address", 0).stdout.strip()
            # The variables of torchrun, by which PyTorch finds the other ranks.
            words = 'RANK=$KOLO_RANK WORLD_SIZE=$KOLO_WORLD_SIZE exec "$0" "$@"'
            variables = {"MASTER_ADDR": address, "MASTER_PORT": "29555", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
            command = [BED, "start", str(each), "sh", "-c", words, args.python, PEERS / "gloo.py"]
            found.append(Contestant(name, folder, ranks, command, **variables))
        else:
            sys.exit(f"table.py: {name} is unknown; there are kolo, openmpi and gloo")
    return found


def number(text):
    factor = {"K": 1 << 10, "M": 1 << 20}.get(text[-1].upper())
    return int(text[:-1]) * factor if factor else int(text)


def peers(args, hosts, each):
    ranks = hosts * each
    with tempfile.TemporaryDirectory() as folder:
        found = contestants(args, folder, hosts, each)
        for op in args.ops:
            # A barrier has no size.
            for size in [0] if op == "barrier" else map(number, args.sizes.split(",")):
                if op not in ("all_reduce", "broadcast", "barrier"):
                    # At least one element for each rank.
                    size = max(size, 4 * ranks)
                calls = 20 if size < 1 << 17 else 3 if size < 1 << 22 else 1
                times = {one.name: [] for one in found}
                for _ in range(args.rounds):
                    for one in found:
                        times[one.name].append(one.time(op, size, 1, args.iters, calls))
                medians = "  ".join(f"{name} {statistics.median(several):.0f}" for name, several in times.items())
                # The rounds are interleaved, so each compares with itself.
                ratios = [
                    f"{name}/kolo {statistics.median(a / b for a, b in zip(several, times['kolo'])):.2f}"
                    for name, several in times.items()
                    if name != "kolo"
                ]
                print(f"{hosts}x{each} {op:14} {size:>9}  {medians}  {'  '.join(ratios)}", flush=True)
        for one in found:
            one.end()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["choice", "peers", "racks", "order", "predictions"])
    parser.add_argument("--kolo", default="target/release/kolo")
    parser.add_argument("--layouts", default="2x1,2x2,4x1,4x2", help="hosts x ranks on each")
    parser.add_argument("--ops", type=lambda text: text.split(","), help="default: all; for peers, those that all of them know")
    parser.add_argument("--peers", default="kolo,openmpi,gloo", type=lambda text: text.split(","))
    parser.add_argument("--python", default="python3", help="a Python with PyTorch, for Gloo")
    parser.add_argument("--sizes", default="8,64K,1M,8M")
    parser.add_argument("--rounds", default=3, type=int)
    parser.add_argument("--iters", default=3, type=int)
    parser.add_argument("--overhead", help="processor time of a message at either end, for predictions; default: half the latency")
    parser.add_argument("--check", action="store_true", help="check the results too")
    args = parser.parse_args()
    known = OPS_OF_PEERS if args.what == "peers" else OPS
    args.ops = args.ops or known
    for op in args.ops:
        if op not in known:
            parser.error(f"--ops: {op} is unknown; {args.what} knows {', '.join(known)}")
    worst, cells = [], []
    latency_us = latency(args) if args.what == "predictions" else None
    if latency_us:
        print(f"# latency {latency_us:.1f} us, {rate():.4f} GB/s", flush=True)
    for layout in args.layouts.split(","):
        hosts, each = map(int, layout.split("x"))
        bed("up", hosts)
        try:
            if args.what == "peers":
                peers(args, hosts, each)
            elif args.what == "racks":
                racks(args, hosts, each)
            elif args.what == "order":
                order(args, hosts, each)
            elif args.what == "predictions":
                cells += predictions(args, hosts, each, latency_us)
            else:
                # The costs of another bed are not those of this one.
                with tempfile.TemporaryDirectory() as cache:
                    worst += choice(args, hosts, each, KOLO_CACHE_DIR=cache)
        finally:
            bed("down")
    if cells:
        near = [sum(1 / 1.1 <= ratio <= 1.1 for ratio in ratios) for ratios in zip(*cells)]
        print(f"# of {len(cells)}, {near[0]} predictions are within 10 %, and {near[1]} measurements within 10 % of the first")
    if args.what != "choice":
        return
    worst.sort(reverse=True)
    late = [one for one in worst if one[0] > 1.1]
    print(f"# {len(worst)} choices, {len(late)} more than 10 % slower than the best")
    for ratio, text in late:
        print(f"# {ratio:.2f} {text}")


if __name__ == "__main__":
    main()
