#!/usr/bin/env bash
# Measures the figures of this folder: every collective beside Open MPI and MPICH, in interleaved
# rounds. Takes about ten minutes; nothing else should run meanwhile.
#
#     cargo build --profile dist; docs/performance/measure.sh target/dist/kolo
#
# Variables:
#   RANKS   the numbers of ranks; default: 2 4
#   ROUNDS  rounds of each comparison; default: 15
set -euo pipefail
kolo=$(realpath "${1:?"usage: $0 KOLO"}")
cd "$(dirname "$0")"
for ranks in ${RANKS:-2 4}; do
    for op in all_reduce broadcast all_gather reduce_scatter all_to_all barrier; do
        # MPICH spins: with more ranks than processors, one call takes milliseconds.
        if [ "$ranks" -gt "$(nproc)" ]; then with=openmpi; else with=openmpi,mpich; fi
        if [ "$op" = all_reduce ]; then with+=,kolo-registered; fi
        if [ "$op" = barrier ]; then sizes=(); else sizes=(--sizes '8,4K,64K,1M,16M'); fi
        "$kolo" compare "$op" -n "$ranks" --with "$with" "${sizes[@]}" --rounds "${ROUNDS:-15}" \
            --json "$op-$ranks.json" --plot "$op-$ranks.svg"
    done
done
