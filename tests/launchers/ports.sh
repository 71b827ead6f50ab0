#!/usr/bin/env bash
# KOLO_PORTS between hosts: all ports at which ranks and the store listen lie in the range. Once with
# IPv4 and once on hosts that have IPv6 only.
# shellcheck source-path=SCRIPTDIR
source "$(dirname "$0")/hosts.sh"

bed=$root/tests/hosts/bed.sh
export KOLO_PORTS=23000-23007
export KOLO_JOB_ID=ports

# Ends the ranks of a run.
end() {
    kill "$@" 2>/dev/null || true
    wait "$@" 2>/dev/null || true
}

# Starts 2 ranks on each host, whose launcher names rank 0's host and no port, and reads where they
# listen while they work.
check() {
    local at_host=$1 rank ranks=() ports i
    for rank in 0 1 2 3; do
        RANK=$rank WORLD_SIZE=4 MASTER_ADDR=$at_host ip netns exec "$BED-$((rank / 2))" \
            "$kolo" bench all_reduce --sizes 1M --iters 1000000 >"$folder/rank$rank" 2>&1 &
        ranks+=($!)
    done
    # For longer than the ranks try, so that their errors are seen.
    for ((i = 0; i < 700; i++)); do
        # The head is printed when all ranks have connected.
        if grep -q "4 ranks on 2 hosts" "$folder/rank0"; then break; fi
        sleep 0.2
    done
    grep -q "4 ranks on 2 hosts" "$folder/rank0" || {
        tail -n 5 "$folder"/rank* >&2
        die "the ranks do not connect at $at_host"
    }
    ports=$(for i in 0 1; do ip netns exec "$BED-$i" ss -Htln; done | awk '{ sub(/.*:/, "", $4); print $4 }' | sort -n)
    end "${ranks[@]}"
    [ "$(wc -l <<<"$ports")" -ge 4 ] || die "fewer than 4 ports are open: $ports"
    for i in $ports; do
        if [ "$i" -lt 23000 ] || [ "$i" -gt 23007 ]; then die "port $i is not in $KOLO_PORTS: $ports"; fi
    done
    echo "passed: at $at_host the ranks listen at ${ports//$'\n'/ }"
}

check "$NETWORK.1"
"$bed" down
IPV6=1 "$bed" up 2
check "$(IPV6=1 "$bed" address 0)"

# All ports are taken: the error names the range.
export KOLO_PORTS=23000-23000 RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1
if "$kolo" bench all_reduce --sizes 8 >"$folder/output" 2>&1; then die "one port is enough for a store and a rank"; fi
expect "all 1 are taken"
