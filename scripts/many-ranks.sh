#!/usr/bin/env bash
# Starts many ranks on this machine, and reports what each of them costs: time to start, descriptors,
# memory, threads, and the connections that had to be tried again.
#
#     scripts/many-ranks.sh [RANKS [OP [KOLO]]]
#
# OP is an operation of `kolo bench`, of 8 bytes. Reads KOLO_* variables: KOLO_TRANSPORT=tcp has all
# ranks use TCP. Fails if a rank fails, if the job takes longer than LIMIT seconds (default 600), if
# more connections fail than there are ranks, or if more segments are sent again than there are
# connections.
set -euo pipefail

ranks=${1:-256} op=${2:-all_reduce} kolo=${3:-target/release/kolo}
limit=${LIMIT:-600}

die() {
    echo "many-ranks.sh: $*" >&2
    exit 1
}

[ -x "$kolo" ] || die "there is no program $kolo: cargo build --release, or say where it is"
ulimit -n "$(ulimit -Hn)"
folder=$(mktemp -d)
job=
finish() {
    [ -z "$job" ] || kill "$job" 2>/dev/null || true
    rm -rf "$folder"
}
trap finish EXIT
trap 'exit 130' INT TERM

# The counters of the system's TCP, by name.
counters() {
    for file in /proc/net/snmp /proc/net/netstat; do
        awk '{ if ($1 == name) for (i = 2; i <= NF; i++) print $1 names[i], $i; else { name = $1; for (i = 2; i <= NF; i++) names[i] = $i } }' \
            "$file"
    done | sort
}

sizes=(--sizes 8)
[ "$op" != barrier ] || sizes=()
counters >"$folder/before"
began=$(date +%s.%N)
KOLO_START_TIMEOUT=${KOLO_START_TIMEOUT:-${limit}s} KOLO_TIMEOUT=${KOLO_TIMEOUT:-${limit}s} \
    timeout "$limit" "$kolo" run --no-prefix -n "$ranks" -- \
    "$kolo" bench "$op" "${sizes[@]}" --warmup 0 --iters 1 >"$folder/out" 2>"$folder/err" &
job=$!

# The first line comes when all ranks are connected.
until grep -q "$ranks ranks" "$folder/out"; do
    kill -0 "$job" 2>/dev/null || die "the job ended: $(tail -3 "$folder/err")"
    sleep 0.05
done
started=$(date +%s.%N)

# The processes of the ranks are the children of `kolo run`, which is the child of `timeout`.
parent=$(pgrep -P "$job" | head -1)
pgrep -P "$parent" -f " bench " >"$folder/pids"
while read -r pid; do
    descriptors=$(ls "/proc/$pid/fd" 2>/dev/null | wc -l) || true
    pss=$(awk '/^Pss:/ { print $2 }' "/proc/$pid/smaps_rollup" 2>/dev/null) || true
    threads=$(ls "/proc/$pid/task" 2>/dev/null | wc -l) || true
    [ -z "$pss" ] || echo "$descriptors $pss $threads"
done <"$folder/pids" >"$folder/costs"

wait "$job" || die "the job failed: $(tail -3 "$folder/err")"
job=
ended=$(date +%s.%N)
counters >"$folder/after"

awk -v ranks="$ranks" -v began="$began" -v started="$started" -v ended="$ended" '
    { descriptors += $1; pss += $2; threads += $3 }
    $1 > most { most = $1 }
    $2 > largest { largest = $2 }
    END {
        if (!NR) { print "no rank could be examined"; exit 1 }
        printf "%d ranks: start %.2f s, whole job %.2f s\n", ranks, started - began, ended - began
        printf "descriptors of a rank: %.1f, at most %d\n", descriptors / NR, most
        printf "memory of a rank (PSS): %.2f MiB, at most %.2f; all %.0f MiB\n", pss / NR / 1024, largest / 1024, pss / 1024
        printf "threads of a rank: %.1f; %d of %d ranks examined\n", threads / NR, NR, ranks
    }' "$folder/costs"
awk '/^ *[0-9]/ { print "time of a call: " $6 " us, by " $NF }' "$folder/out"
# A busy machine lets TCP send a segment again although none was lost.
join "$folder/before" "$folder/after" | awk -v ranks="$ranks" '
    $1 ~ /^(Tcp:AttemptFails|Tcp:RetransSegs|Tcp:ActiveOpens|TcpExt:ListenOverflows|TcpExt:ListenDrops)$/ {
        grown[$1] = $3 - $2
        print $1, grown[$1]
    }
    END {
        opened = grown["Tcp:ActiveOpens"]
        failed = grown["Tcp:AttemptFails"] + grown["TcpExt:ListenOverflows"] + grown["TcpExt:ListenDrops"]
        exit failed > ranks || grown["Tcp:RetransSegs"] > (opened > ranks ? opened : ranks)
    }' || die "more connections failed than there are ranks, or more segments were sent again than there are connections"
