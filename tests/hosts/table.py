#!/usr/bin/env python3
"""Measures collectives on the hosts of bed.sh. Needs root, and the program kolo.

    tests/hosts/table.py choice    every algorithm by size, and how much slower than the best the chosen one is
    tests/hosts/table.py peers     kolo beside Open MPI and Gloo, in turns

Each line gives medians of the rounds, in microseconds. The hosts are namespaces of this machine, so
their ranks share its processors: figures compare only within one run.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

BED = pathlib.Path(__file__).with_name("bed.sh")
ALGORITHMS = ["hierarchical", "ring", "direct", "binomial", "double-tree", "recursive-doubling", "halving-doubling"]
OPS = ["all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "barrier"]


def bed(*words, check=True, **variables):
    done = subprocess.run([BED, *map(str, words)], capture_output=True, text=True, env={**os.environ, **variables})
    if check and done.returncode != 0:
        sys.exit(f"table.py: bed.sh {' '.join(map(str, words))}: {done.stderr.strip()}")
    return done


def bench(args, ranks, op, algorithm=None):
    """Returns the rows of `kolo bench` by size: the time in microseconds and the algorithm."""
    with tempfile.TemporaryDirectory() as folder:
        figures = pathlib.Path(folder, "figures.json")
        words = [args.kolo, "bench", op, "--sizes", args.sizes, "-n", args.iters, "-w", 1, "--json", figures, "--timeout", "60s"]
        if args.check:
            words.append("--check")
        if algorithm:
            words += ["--algorithm", algorithm]
        bed("start", ranks, *words)
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


def choice(args, hosts, each):
    ranks = hosts * each
    worst = []
    for op in args.ops:
        algorithms = [one for one in ALGORITHMS if forced(args, op, one, ranks, hosts)]
        times, chosen = {}, {}
        for _ in range(args.rounds):
            for algorithm in [None, *algorithms]:
                for size, (time, name) in bench(args, each, op, algorithm).items():
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["choice"])
    parser.add_argument("--kolo", default="target/release/kolo")
    parser.add_argument("--layouts", default="2x1,2x2,4x1,4x2", help="hosts x ranks on each")
    parser.add_argument("--ops", default=",".join(OPS), type=lambda text: text.split(","))
    parser.add_argument("--sizes", default="8,64K,1M,8M")
    parser.add_argument("--rounds", default=3, type=int)
    parser.add_argument("--iters", default=3, type=int)
    parser.add_argument("--check", action="store_true", help="check the results too")
    args = parser.parse_args()
    worst = []
    for layout in args.layouts.split(","):
        hosts, each = map(int, layout.split("x"))
        bed("up", hosts)
        try:
            worst += choice(args, hosts, each)
        finally:
            bed("down")
    worst.sort(reverse=True)
    late = [one for one in worst if one[0] > 1.1]
    print(f"# {len(worst)} choices, {len(late)} more than 10 % slower than the best")
    for ratio, text in late:
        print(f"# {ratio:.2f} {text}")


if __name__ == "__main__":
    main()
