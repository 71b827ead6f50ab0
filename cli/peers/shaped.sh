#!/usr/bin/env bash
# Measures an all_reduce among four hosts on a network of known speed, in turns with one TCP stream of
# iperf3. The hosts are those of tests/hosts/bed.sh.
#
#     cli/peers/shaped.sh [KOLO [OPTIONS OF kolo bench all_reduce]]
#
# Needs root, iproute2 and iperf3. Reads KOLO_* variables and RATE, ROUNDS, SIZE and SECONDS_EACH.
set -euo pipefail

kolo=${1:-target/release/kolo}
options=("${@:2}")
hosts=4 rounds=${ROUNDS:-3} size=${SIZE:-64M} seconds=${SECONDS_EACH:-4}
export BED=kolo-shaped-$$ RATE=${RATE:-1gbit}
bed=$(dirname "$0")/../../tests/hosts/bed.sh

die() {
    echo "shaped.sh: $*" >&2
    exit 1
}

command -v iperf3 >/dev/null || die "iperf3 is missing: apt install iperf3"
[ -x "$kolo" ] || die "there is no program $kolo: cargo build --release, or say where it is"

folder=$(mktemp -d)
finish() {
    "$bed" down
    rm -rf "$folder"
}
trap finish EXIT
trap 'exit 130' INT TERM
"$bed" up "$hosts"
server=$("$bed" address 1)

# MB/s of one stream from host 0 to host 1.
stream() {
    "$bed" on 0 iperf3 -c "$server" -t "$seconds" -O 1 -f m >"$folder/iperf3" || die "iperf3 fails: $(tail -1 "$folder/iperf3")"
    awk '/receiver/ { print $7 / 8 }' "$folder/iperf3"
}

# Bus bandwidth of kolo in MB/s, one rank on each host.
all_reduce() {
    "$bed" start 1 "$kolo" bench all_reduce --sizes "$size" --warmup 1 --iters 4 "${options[@]}" >"$folder/kolo"
    grep -q "$hosts ranks on $hosts hosts" "$folder/kolo" || die "these are no $hosts hosts: $(head -1 "$folder/kolo")"
    awk '/^# Avg bus bandwidth/ { print $(NF - 1) * 1000 }' "$folder/kolo"
}

"$bed" on 1 iperf3 -s >/dev/null 2>&1 &
until "$bed" on 0 iperf3 -c "$server" -n 1 >/dev/null 2>&1; do
    kill -0 $! || die "iperf3 -s ended"
done

echo "# all_reduce of $size among $hosts hosts at $RATE, beside one TCP stream; MB/s"
printf '%5s %10s %14s %7s\n' round iperf3 "kolo's busbw" ratio
for ((round = 1; round <= rounds; round++)); do
    one=$(stream)
    bus=$(all_reduce)
    awk -v round="$round" -v one="$one" -v bus="$bus" \
        'BEGIN { printf "%5d %10.1f %14.1f %7.3f\n", round, one, bus, bus / one }' | tee -a "$folder/rounds"
done
awk '{ print $4 }' "$folder/rounds" | sort -n | awk '{ r[NR] = $1 } END { printf "# median ratio: %.3f\n", r[int((NR + 1) / 2)] }'
