#!/usr/bin/env bash
# Makes several hosts of one machine: network namespaces, joined by a bridge, or by one for each rail.
# Both ends of each host's cables are limited to RATE. Needs root and iproute2.
#
#     tests/hosts/bed.sh up 4                   # hosts 0 to 3, with the addresses 10.213.79.1 to .4
#     tests/hosts/bed.sh on 2 COMMAND...        # runs a command on host 2
#     tests/hosts/bed.sh start 2 COMMAND...     # starts 2 ranks of a command on each host, and waits
#     tests/hosts/bed.sh sent 2                 # bytes that host 2 has sent and received
#     tests/hosts/bed.sh uplink 1               # bytes that rack 1 has sent and received (RACKS)
#     tests/hosts/bed.sh between 1 2            # bytes that host 1 has sent to host 2 (a pair of SLOW)
#     tests/hosts/bed.sh down
#
# `start` shows the output of rank 0; of another rank only if it fails. `start 1,3` starts one rank on
# host 0 and three on host 1.
#
# Variables:
#   BED     the name of the bed, so that several can exist; default: kolo-bed
#   RATE    of each host's link, as tc writes it; default: 1gbit; `none` does not limit it. One for
#           each rail may be given, as in 1gbit,100mbit
#   SLOW    hosts whose links have another rate, and pairs of hosts that exchange packets at another one,
#           as in 3:50mbit,1-2:100mbit
#   RAILS   interfaces of each host, in networks of their own: eth0, eth1, ...; default: 1
#   RACKS   deals the hosts to this many racks in turns. Each rack has a bridge, and an uplink to the bridge
#           that joins the racks. `start` tells the ranks their rack, unless TOPOLOGY is none; default: 1
#   UPLINK  rate of both ends of each uplink, as RATE; default: none
#   SITES   deals the hosts to this many sites in turns: DELAY and LOSS are between sites only; default: each
#           host is a site
#   ORDER   the hosts to which `start` deals the ranks, as in 2,0,1,3; default: 0,1,2,...
#   TURNS   if set, `start` deals the ranks over the hosts in turns: rank 0 on host 0, rank 1 on host 1
#   BURST   bytes that a link catches up after a pause; default: 128kb
#   DELAY   of each packet between two hosts, as in 5ms, which is a round trip of 10 ms; default: none
#   LOSS    the part of the packets between hosts that is lost, as in 1%; default: none
#   KEEP_WINDOWS  if set, connections keep their congestion windows while they are idle
#   NETWORK the first three bytes of the addresses; default: 10.213.79. The third byte grows by one
#           with each rail
#   IPV6    if set, the hosts have no IPv4 address, and fd00:213:79::1 to ::4 instead
#
# With DELAY or LOSS, a program (`wire.rs`, for which rustc is needed) carries the packets in place of
# the bridge and the cables. It limits what a host receives to RATE.
set -euo pipefail

bed=${BED:-kolo-bed} rails=${RAILS:-1} racks=${RACKS:-1} network=${NETWORK:-10.213.79}
IFS=, read -ra rates <<<"${RATE:-1gbit}"
IFS=, read -ra slow <<<"${SLOW:-}"
folder=$(cd "$(dirname "$0")" && pwd)

die() {
    echo "bed.sh: $*" >&2
    exit 1
}

usage() {
    sed -n '5,11s/^# *//p' "$0" >&2
    exit 2
}

hosts() {
    ip netns list | awk -v prefix="$bed-" 'index($1, prefix) == 1 && substr($1, length(prefix) + 1) ~ /^[0-9]+$/' | wc -l
}

# The address of a host, on a rail.
address() {
    local rail=${2:-0}
    if [ -n "${IPV6:-}" ]; then
        echo "fd00:213:$((79 + rail))::$(($1 + 1))"
    else
        echo "${network%.*}.$((${network##*.} + rail)).$(($1 + 1))"
    fi
}

on() {
    local host=$1
    shift
    ip netns exec "$bed-$host" "$@"
}

# Limits one end of a cable to a rate. The bursts are short, so that the link does not catch up after a
# pause. The queue is like that of a switch.
shape() {
    if [ "$3" = none ]; then return; fi
    tc -n "$1" qdisc add dev "$2" root tbf rate "$3" burst "${BURST:-128kb}" limit 1mb || die "this kernel cannot shape (tbf)"
}

# Makes the bridges of a namespace, one for each rail.
bridges() {
    local rail
    for ((rail = 0; rail < rails; rail++)); do
        ip -n "$1" link add "bridge$rail" type bridge || die "a bridge cannot be made here"
        ip -n "$1" link set "bridge$rail" up
    done
}

# The namespace with the bridges of a host.
bridges_of() {
    if [ "$racks" -gt 1 ]; then echo "$bed-rack$(($1 % racks))"; else echo "$bed-switch"; fi
}

# Limits what a host sends to another one to a rate.
shape_pair() {
    local class=1:$(($2 + 2))
    of_sender() { tc -n "$bed-$1" "$2" add dev eth0 "${@:3}" || die "this kernel cannot shape by receiver (htb, u32)"; }
    if ! tc -n "$bed-$1" qdisc show dev eth0 | grep -q htb; then
        tc -n "$bed-$1" qdisc del dev eth0 root
        of_sender "$1" qdisc root handle 1: htb default 1
        of_sender "$1" class parent 1: classid 1:1 htb rate "${rates[0]}" burst "${BURST:-128kb}" quantum 60000
    fi
    of_sender "$1" class parent 1: classid "$class" htb rate "$3" burst "${BURST:-128kb}" quantum 60000
    of_sender "$1" filter parent 1: protocol ip u32 match ip dst "$(address "$2")/32" flowid "$class"
}

# Joins a host to the bridge of a rail.
cable() {
    local port=port$1-$2 rate=${rates[$2]:-${rates[-1]}} at link
    at=$(bridges_of "$1")
    for link in "${slow[@]}"; do [ "${link%%:*}" != "$1" ] || rate=${link#*:}; done
    ip link add "eth$2" netns "$bed-$1" type veth peer name "$port" netns "$at" || die "a veth cannot be made here"
    ip -n "$bed-$1" addr add "$(address "$1" "$2")/$3" dev "eth$2" ${IPV6:+nodad}
    ip -n "$bed-$1" link set "eth$2" up
    ip -n "$at" link set "$port" master "bridge$2" up
    shape "$bed-$1" "eth$2" "$rate"
    shape "$at" "$port" "$rate"
}

up() {
    local count=$1 i rail bits=24 at link one other rate
    [ "$(id -u)" = 0 ] || die "network namespaces are made by root only: run it with sudo"
    for program in ip tc; do command -v "$program" >/dev/null || die "$program is missing: apt install iproute2"; done
    [ "$(hosts)" = 0 ] || die "the hosts exist already: $0 down"
    [ -z "${IPV6:-}" ] || bits=64
    # What is half made is removed.
    trap down EXIT
    ip netns add "$bed-switch" || die "network namespaces cannot be made here"
    if [ -n "${DELAY:-}${LOSS:-}" ]; then
        [ "$racks$rails${SLOW:-}" = 11 ] || die "DELAY and LOSS go with neither RACKS nor RAILS nor SLOW"
        wire "$count"
    else
        bridges "$bed-switch"
    fi
    [ "$racks" = 1 ] || [ "$rails" = 1 ] || die "RACKS does not go with RAILS"
    for ((i = 0; racks > 1 && i < racks; i++)); do
        at=$bed-rack$i
        ip netns add "$at"
        bridges "$at"
        ip link add uplink netns "$at" type veth peer name "rack$i" netns "$bed-switch" || die "a veth cannot be made here"
        ip -n "$at" link set uplink master bridge0 up
        ip -n "$bed-switch" link set "rack$i" master bridge0 up
        shape "$at" uplink "${UPLINK:-none}"
        shape "$bed-switch" "rack$i" "${UPLINK:-none}"
    done
    for ((i = 0; i < count; i++)); do
        ip netns add "$bed-$i"
        ip -n "$bed-$i" link set lo up
        [ -z "${KEEP_WINDOWS:-}" ] || on "$i" sysctl -q net.ipv4.tcp_slow_start_after_idle=0
        if [ -n "${DELAY:-}${LOSS:-}" ]; then
            ip -n "$bed-switch" link set "host$i" netns "$bed-$i" name eth0 txqueuelen 10000
            ip -n "$bed-$i" addr add "$(address "$i")/$bits" dev eth0 ${IPV6:+nodad}
            ip -n "$bed-$i" link set eth0 up
            shape "$bed-$i" eth0 "${rates[0]}"
        else
            for ((rail = 0; rail < rails; rail++)); do cable "$i" "$rail" "$bits"; done
        fi
    done
    for link in "${slow[@]}"; do
        IFS=-: read -r one other rate <<<"$link"
        [ -n "$rate" ] || continue
        shape_pair "$one" "$other" "$rate"
        shape_pair "$other" "$one" "$rate"
    done
    trap - EXIT
}

# Starts the program that carries the packets, and waits until it has made the interfaces.
wire() {
    local program
    command -v rustc >/dev/null || die "rustc is missing, which compiles the wire that delays and loses packets"
    program=$(mktemp -d)
    rustc -O --edition 2024 -o "$program/wire" "$folder/wire.rs"
    ip netns exec "$bed-switch" "$program/wire" "$1" "${DELAY:-0ms}" "${LOSS:-0%}" "${rates[0]}" "${SITES:-0}" </dev/null >/dev/null 2>"$program/said" &
    while ! ip -n "$bed-switch" link show "host$(($1 - 1))" >/dev/null 2>&1; do
        kill -0 $! 2>/dev/null || die "$(cat "$program/said")"
        sleep 0.05
    done
    # The running program does not need its file.
    rm -r "$program"
}

# All processes run inside the namespaces, and end with them.
down() {
    local name
    for name in $(ip netns list | awk -v prefix="$bed-" 'index($1, prefix) == 1 { print $1 }'); do
        ip netns pids "$name" | xargs -r kill -KILL 2>/dev/null || true
        ip netns del "$name" || true
    done
}

# Bytes of a host's link, sent and received.
sent() {
    on "$1" cat /sys/class/net/eth0/statistics/tx_bytes /sys/class/net/eth0/statistics/rx_bytes 2>/dev/null | xargs ||
        ip -n "$bed-$1" -s link show eth0 | awk '/TX:/ { getline; tx = $1 } /RX:/ { getline; rx = $1 } END { print tx, rx }'
}

# Bytes of a rack's uplink, sent and received.
uplink() {
    ip -n "$bed-rack$1" -s link show uplink | awk '/TX:/ { getline; tx = $1 } /RX:/ { getline; rx = $1 } END { print tx, rx }'
}

# Bytes that a host has sent to another one, if SLOW has the pair.
between() {
    tc -n "$bed-$1" -s class show dev eth0 classid "1:$(($2 + 2))" | awk '$1 == "Sent" { print $2 }'
}

start() {
    local each=$1 count host local_rank place places=() order rank=0 secret job folder status=0 at_host topology=()
    shift
    count=$(hosts)
    [ "$count" -gt 0 ] || die "there are no hosts: $0 up 4"
    IFS=, read -ra each <<<"$each"
    IFS=, read -ra order <<<"${ORDER:-$(seq -s, 0 $((count - 1)))}"
    for host in "${order[@]}"; do
        for ((local_rank = 0; local_rank < ${each[host]:-${each[0]}}; local_rank++)); do
            places+=("$host $local_rank")
        done
    done
    if [ -n "${TURNS:-}" ]; then mapfile -t places < <(printf '%s\n' "${places[@]}" | sort --stable -k2,2n); fi
    # Without a secret, ranks listen only to their own host.
    secret=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
    job=bed$(od -An -N6 -tx1 /dev/urandom | tr -d ' \n')
    at_host=$(address "${order[0]}")
    [ -z "${IPV6:-}" ] || at_host="[$at_host]"
    folder=$(mktemp -d)
    local pids=()
    # shellcheck disable=SC2064 # the folder of this start
    trap "rm -rf '$folder'" EXIT
    for place in "${places[@]}"; do
        read -r host local_rank <<<"$place"
        if [ "$racks" -gt 1 ] && [ "${TOPOLOGY:-}" != none ]; then topology=("KOLO_TOPOLOGY=rack$((host % racks))"); fi
        KOLO_RANK=$rank KOLO_WORLD_SIZE=${#places[@]} KOLO_LOCAL_RANK=$local_rank \
            KOLO_LOCAL_WORLD_SIZE=${each[host]:-${each[0]}} KOLO_STORE=tcp://$at_host:29777 \
            KOLO_JOB_ID=$job KOLO_SECRET=$secret \
            on "$host" env "${topology[@]}" "$@" >"$folder/$rank" 2>&1 &
        pids+=($!)
        rank=$((rank + 1))
    done
    for ((rank = 0; rank < ${#places[@]}; rank++)); do
        wait "${pids[rank]}" || {
            status=$?
            echo "bed.sh: rank $rank ended with status $status:" >&2
            tail -5 "$folder/$rank" >&2
        }
    done
    cat "$folder/0"
    return "$status"
}

command=${1:-}
shift || true
case $command in
    up) up "${1:-4}" ;;
    down) down ;;
    on | start) [ $# -ge 2 ] || usage; "$command" "$@" ;;
    between) [ $# = 2 ] || usage; between "$1" "$2" ;;
    sent | uplink | address) [ $# = 1 ] || usage; "$command" "$@" ;;
    *) usage ;;
esac
