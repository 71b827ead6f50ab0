#!/usr/bin/env bash
# Measures an all_reduce among four hosts on a network of known speed, in turns with one TCP stream of
# iperf3. Each host is a network namespace of this machine. A bridge joins them, and both ends of each
# cable are limited to RATE.
#
#     cli/peers/shaped.sh [KOLO [OPTIONS OF kolo bench all_reduce]]
#
# Needs root, iproute2 and iperf3. Reads KOLO_* variables and RATE, ROUNDS, SIZE and SECONDS_EACH.
set -euo pipefail

kolo=${1:-target/release/kolo}
options=("${@:2}")
hosts=4 network=10.213.78
rate=${RATE:-1gbit} rounds=${ROUNDS:-3} size=${SIZE:-64M} seconds=${SECONDS_EACH:-4}

die() {
    echo "shaped.sh: $*" >&2
    exit 1
}

[ "$(id -u)" = 0 ] || die "network namespaces are made by root only: run it with sudo"
for program in ip tc iperf3; do
    command -v "$program" >/dev/null || die "$program is missing: apt install iproute2 iperf3"
done
[ -x "$kolo" ] || die "there is no program $kolo: cargo build --release, or say where it is"

id=kolo$$
folder=$(mktemp -d)
finish() {
    # All processes run inside the namespaces, and end with them.
    for name in $(ip netns list | awk -v id="$id" 'index($1, id "-") == 1 { print $1 }'); do
        ip netns pids "$name" | xargs -r kill 2>/dev/null || true
        ip netns del "$name" || true
    done
    rm -rf "$folder"
}
trap finish EXIT
trap 'exit 130' INT TERM

# Limits one end of a cable to RATE. The bursts are short, so that the link does not catch up after a
# pause. The queue is like that of a switch.
shape() {
    tc -n "$1" qdisc add dev "$2" root tbf rate "$rate" burst 128kb limit 1mb || die "this kernel cannot shape (tbf)"
}

ip netns add "$id-switch" || die "network namespaces cannot be made here"
ip -n "$id-switch" link add bridge type bridge || die "a bridge cannot be made here"
ip -n "$id-switch" link set bridge up
for ((i = 0; i < hosts; i++)); do
    ip netns add "$id-$i"
    ip -n "$id-$i" link set lo up
    ip link add eth0 netns "$id-$i" type veth peer name "port$i" netns "$id-switch" || die "a veth cannot be made here"
    ip -n "$id-$i" addr add "$network.$((i + 1))/24" dev eth0
    ip -n "$id-$i" link set eth0 up
    ip -n "$id-switch" link set "port$i" master bridge up
    shape "$id-$i" eth0
    shape "$id-switch" "port$i"
done

on() {
    local host=$1
    shift
    ip netns exec "$id-$host" "$@"
}

# MB/s of one stream from host 0 to host 1.
stream() {
    on 0 iperf3 -c "$network.2" -t "$seconds" -O 1 -f m >"$folder/iperf3" || die "iperf3 fails: $(tail -1 "$folder/iperf3")"
    awk '/receiver/ { print $7 / 8 }' "$folder/iperf3"
}

# Bus bandwidth of kolo in MB/s, one rank on each host.
all_reduce() {
    local ranks=() i secret
    # Without a secret, ranks listen only to their own host.
    secret=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
    for ((i = 0; i < hosts; i++)); do
        KOLO_RANK=$i KOLO_WORLD_SIZE=$hosts KOLO_STORE=tcp://$network.1:29777 KOLO_JOB_ID=$id KOLO_SECRET=$secret \
            on "$i" "$kolo" bench all_reduce --sizes "$size" --warmup 1 --iters 4 "${options[@]}" >"$folder/kolo$i" 2>&1 &
        ranks+=($!)
    done
    for ((i = 0; i < hosts; i++)); do
        wait "${ranks[$i]}" || die "rank $i fails: $(tail -3 "$folder/kolo$i")"
    done
    grep -q "$hosts ranks on $hosts hosts" "$folder/kolo0" || die "these are no $hosts hosts: $(head -1 "$folder/kolo0")"
    awk '/^# Avg bus bandwidth/ { print $(NF - 1) * 1000 }' "$folder/kolo0"
}

on 1 iperf3 -s >/dev/null 2>&1 &
until on 0 iperf3 -c "$network.2" -n 1 >/dev/null 2>&1; do
    kill -0 $! || die "iperf3 -s ended"
done

echo "# all_reduce of $size among $hosts hosts at $rate, beside one TCP stream; MB/s"
printf '%5s %10s %14s %7s\n' round iperf3 "kolo's busbw" ratio
for ((round = 1; round <= rounds; round++)); do
    one=$(stream)
    bus=$(all_reduce)
    awk -v round="$round" -v one="$one" -v bus="$bus" \
        'BEGIN { printf "%5d %10.1f %14.1f %7.3f\n", round, one, bus, bus / one }' | tee -a "$folder/rounds"
done
awk '{ print $4 }' "$folder/rounds" | sort -n | awk '{ r[NR] = $1 } END { printf "# median ratio: %.3f\n", r[int((NR + 1) / 2)] }'
