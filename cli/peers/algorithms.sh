#!/usr/bin/env bash
# Measures every algorithm of all_reduce among hosts on a network of known speed, for comparison with
# `kolo plan --simulate`. The hosts are those of tests/hosts/bed.sh, with one rank each.
#
#     cli/peers/algorithms.sh [KOLO [OPTIONS OF kolo bench all_reduce]]
#
# Needs root and iproute2. Reads KOLO_* variables, those of bed.sh, and HOSTS ("2 4 8"), SIZES,
# ALGORITHMS and ITERS. Prints a line for each number of hosts, algorithm and size: the median of the
# samples in microseconds.
set -euo pipefail

kolo=${1:-target/release/kolo}
options=("${@:2}")
sizes=${SIZES:-8,1K,8K,64K,512K,1M,8M,64M}
read -ra worlds <<<"${HOSTS:-2 4 8}"
read -ra algorithms <<<"${ALGORITHMS:-ring double-tree recursive-doubling halving-doubling direct binomial}"
export BED=kolo-algorithms-$$
bed=$(dirname "$0")/../../tests/hosts/bed.sh

[ -x "$kolo" ] || {
    echo "algorithms.sh: there is no program $kolo: cargo build --release, or say where it is" >&2
    exit 1
}
trap '"$bed" down' EXIT
trap 'exit 130' INT TERM

for hosts in "${worlds[@]}"; do
    "$bed" up "$hosts"
    for algorithm in "${algorithms[@]}"; do
        # Size, and the median of the calls in place.
        "$bed" start 1 "$kolo" bench all_reduce --sizes "$sizes" --warmup 1 --iters "${ITERS:-5}" --algorithm "$algorithm" \
            "${options[@]}" |
            awk -v hosts="$hosts" -v algorithm="$algorithm" '/^ *[0-9]+ +[0-9]+ +f32 / { print hosts, algorithm, $1, $16 }'
    done
    "$bed" down
done
