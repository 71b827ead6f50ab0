#!/bin/bash
# Measures the cost of communication in a step of ResNet-18, and how much of it the overlap with the
# backward pass hides: two ranks of one thread, with 32 images of 32 pixels each. Prints the median
# images/s of all ranks together for each setting, in interleaved rounds.
#
#     docs/training/overlap.sh [--links] [resnet]
#
# With --links the ranks are in two network namespaces, joined by a link of 1 Gb/s (as root; needs
# iproute2 and openssl).
set -euo pipefail
links=no
[ "${1:-}" != --links ] || { links=yes; shift; }
resnet=${1:-target/debug/resnet}
rounds=${ROUNDS:-3}
steps=${STEPS:-16}
runs=$(mktemp -d)
ways="--no-communication --no-overlap --compress=none"
[ $links = no ] || ways="$ways --bucket-mb=4 --compress=bf16 --compress=power-sgd2"

finish() {
    rm -rf "$runs"
    [ $links = no ] || for space in kolo-a kolo-b; do ip netns delete $space 2>/dev/null || true; done
}
trap finish EXIT

if [ $links = yes ]; then
    # Without a common secret, the ranks would listen only to their own machine.
    KOLO_SECRET=$(openssl rand -hex 32)
    export KOLO_SECRET
    for space in kolo-a kolo-b; do ip netns add $space; done
    ip link add kolo-a type veth peer name kolo-b
    for end in a:1 b:2; do
        ip link set kolo-${end%:*} netns kolo-${end%:*}
        ip -n kolo-${end%:*} addr add 10.99.0.${end#*:}/24 dev kolo-${end%:*}
        ip -n kolo-${end%:*} link set kolo-${end%:*} up
        ip -n kolo-${end%:*} link set lo up
        ip netns exec kolo-${end%:*} tc qdisc add dev kolo-${end%:*} root tbf rate 1gbit burst 256kb latency 50ms
    done
fi

train() { # way, folder
    local arguments="--dummy --images $((64 * steps)) -a resnet18 --image-size 32 -p 1 -j 2 --seed 1 --threads 1 --epochs 1 $1 --output $2"
    if [ $links = no ]; then
        "$resnet" $arguments --nproc 2 -b 64 >/dev/null
    else
        local pids=() pid
        for rank in 0 1; do
            local space=kolo-a
            [ $rank = 0 ] || space=kolo-b
            KOLO_HOST=$space ip netns exec $space "$resnet" $arguments -b 32 --world-size 2 --rank $rank \
                --dist-url tcp://10.99.0.1:29511 >/dev/null &
            pids+=($!)
        done
        # Check each status: a rank that fails ends the measurement.
        for pid in "${pids[@]}"; do wait "$pid"; done
    fi
}

for round in $(seq "$rounds"); do
    for way in $ways; do
        train "$way" "$runs/$way$round"
    done
done
for way in $ways; do
    # The first steps start threads and rebuild buckets.
    for round in $(seq "$rounds"); do
        grep '"kind":"step"' "$runs/$way$round/metrics.jsonl" | tail -n +4
    done | sed 's/.*"images_per_s":\([0-9.]*\).*"waiting":\([0-9.e-]*\).*"overlap":\([0-9.e-]*\).*/\1 \2 \3/' | sort -n |
        awk -v way="$way" '{ speed[NR] = $1; waiting += $2; overlap += $3 }
            END { printf "%-22s %7.2f images/s, %5.1f %% waiting, %5.1f %% of communication overlapped\n",
                  way, speed[int((NR + 1) / 2)], 100 * waiting / NR, 100 * overlap / NR }'
done
