#!/usr/bin/env bash
# Measures every algorithm of all_reduce among hosts on a network of known speed, for comparison with
# `kolo plan --simulate`. Each host is a network namespace of this machine with one rank. A bridge
# joins them, and both ends of each cable are limited to RATE.
#
#     cli/peers/algorithms.sh [KOLO [OPTIONS OF kolo bench all_reduce]]
#
# Needs root and iproute2. Reads KOLO_* variables and HOSTS ("2 4 8"), RATE, SIZES, ALGORITHMS, ITERS
# and BURST. With KEEP_WINDOWS, connections keep their congestion windows while they are idle.
# Prints a line for each number of hosts, algorithm and size: the median of the samples in
# microseconds.
set -euo pipefail

kolo=${1:-target/release/kolo}
options=("${@:2}")
network=10.213.79
rate=${RATE:-1gbit} sizes=${SIZES:-8,1K,8K,64K,512K,1M,8M,64M}
read -ra worlds <<<"${HOSTS:-2 4 8}"
read -ra algorithms <<<"${ALGORITHMS:-ring double-tree recursive-doubling halving-doubling direct binomial}"

die() {
    echo "algorithms.sh: $*" >&2
    exit 1
}

[ "$(id -u)" = 0 ] || die "network namespaces are made by root only: run it with sudo"
for program in ip tc; do
    command -v "$program" >/dev/null || die "$program is missing: apt install iproute2"
done
[ -x "$kolo" ] || die "there is no program $kolo: cargo build --release, or say where it is"
most=$(printf '%s\n' "${worlds[@]}" | sort -n | tail -1)

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
    tc -n "$1" qdisc add dev "$2" root tbf rate "$rate" burst "${BURST:-128kb}" limit 1mb || die "this kernel cannot shape (tbf)"
}

ip netns add "$id-switch" || die "network namespaces cannot be made here"
ip -n "$id-switch" link add bridge type bridge || die "a bridge cannot be made here"
ip -n "$id-switch" link set bridge up
for ((i = 0; i < most; i++)); do
    ip netns add "$id-$i"
    ip -n "$id-$i" link set lo up
    if [ -n "${KEEP_WINDOWS:-}" ]; then
        ip netns exec "$id-$i" sysctl -q net.ipv4.tcp_slow_start_after_idle=0
    fi
    ip link add eth0 netns "$id-$i" type veth peer name "port$i" netns "$id-switch" || die "a veth cannot be made here"
    ip -n "$id-$i" addr add "$network.$((i + 1))/24" dev eth0
    ip -n "$id-$i" link set eth0 up
    ip -n "$id-switch" link set "port$i" master bridge up
    shape "$id-$i" eth0
    shape "$id-switch" "port$i"
done

# Without a secret, ranks listen only to their own host.
secret=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
port=29800
for hosts in "${worlds[@]}"; do
    for algorithm in "${algorithms[@]}"; do
        ranks=() port=$((port + 1))
        for ((i = 0; i < hosts; i++)); do
            KOLO_RANK=$i KOLO_WORLD_SIZE=$hosts KOLO_STORE=tcp://$network.1:$port KOLO_JOB_ID=$id KOLO_SECRET=$secret \
                ip netns exec "$id-$i" "$kolo" bench all_reduce --sizes "$sizes" --warmup 1 --iters "${ITERS:-5}" \
                --algorithm "$algorithm" "${options[@]}" >"$folder/kolo$i" 2>&1 &
            ranks+=($!)
        done
        for ((i = 0; i < hosts; i++)); do
            wait "${ranks[$i]}" || die "rank $i fails: $(tail -3 "$folder/kolo$i")"
        done
        # Size, and the median of the calls in place.
        awk -v hosts="$hosts" -v algorithm="$algorithm" '/^ *[0-9]+ +[0-9]+ +f32 / { print hosts, algorithm, $1, $16 }' "$folder/kolo0"
    done
done
