#!/usr/bin/env bash
# torchrun on two hosts: the agents find each other, start again after a process has died, and go on
# with other hosts than before.
# shellcheck source-path=SCRIPTDIR
source "$(dirname "$0")/hosts.sh"

command -v torchrun >/dev/null || not_run "$0: torchrun is missing"
resume=${RESUME:-$(dirname "$kolo")/examples/resume}
[ -x "$resume" ] || die "$resume is missing: cargo build --example resume"
# Nothing of the test waits for this long; an agent waits until its peers have left.
export PATIENCE=400 OMP_NUM_THREADS=1 TORCHELASTIC_ERROR_FILE=$folder/error.json

# Starts the agent of a host with arguments; its output is in $folder/agentHOST.
agent() {
    local host=$1
    shift
    on "$host" timeout --kill-after=10 "$PATIENCE" torchrun --rdzv-backend c10d --rdzv-endpoint node0:29400 \
        --rdzv-id "$job" --rdzv-conf join_timeout=300,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3 --local-addr "node$host" --no-python \
        "$@" >"$folder/agent$host" 2>&1 &
    agents[host]=$!
}

# Waits for an agent to end without an error.
agent_ends() {
    wait "${agents[$1]}" || {
        tail -n 30 "$folder/agent0" "$folder/agent1" >&2
        die "the agent of node$1 failed"
    }
    cp "$folder/agent$1" "$folder/output"
}

# Waits until the program has done a number of steps.
steps() {
    local last=0 i
    for ((i = 0; i < 3000; i++)); do
        [ ! -s "$folder/state" ] || read -r last _ <"$folder/state"
        if [ "${last:-0}" -ge "$1" ]; then return; fi
        sleep 0.1
    done
    tail -n 30 "$folder/agent0" "$folder/agent1" >&2
    die "step $1 was not reached, but ${last:-0}"
}

# Waits until rank 0 of the program has printed a text, on whichever host it is.
says() {
    local i
    for ((i = 0; i < 3000; i++)); do
        if grep -hq -- "$1" "$folder/agent0" "$folder/agent1"; then return; fi
        sleep 0.1
    done
    tail -n 30 "$folder/agent0" "$folder/agent1" >&2
    die "the program has not said \"$1\""
}

# The processes of the program on a host.
workers() {
    local pid
    for pid in $(ip netns pids "$BED-$1"); do
        if [ "$(readlink "/proc/$pid/exe")" = "$(readlink -f "$resume")" ]; then echo "$pid"; fi
    done
}

agents=()
job=once
for host in 0 1; do agent "$host" --nnodes 2 --nproc-per-node 2 "$kolo" bench all_reduce --sizes 8,1M --check; done
agent_ends 0
expect "4 ranks on 2 hosts"
expect "Out of bounds values : 0 OK"
agent_ends 1

# A process on one host is killed: both agents start all of theirs again, which continue.
job=restart
for host in 0 1; do agent "$host" --nnodes 2 --nproc-per-node 2 --max-restarts 2 "$resume" "$folder/state" 60 100; done
steps 10
kill -KILL "$(workers 1 | head -1)"
for host in 0 1; do agent_ends "$host"; done
cat "$folder/agent0" "$folder/agent1" >"$folder/output"
expect "from step 0 on with 4 ranks on 2 hosts"
expect "from step [1-9][0-9]* on with 4 ranks on 2 hosts"
expect "60 steps: all parts done once"

# A host is lost: the program continues on the other one, with half the ranks. The host comes back, and
# the program continues on both. It does not end by itself, however long the agents take.
rm "$folder/state"
job=elastic
# An agent that joins later would wait for what the other one says in the first round only.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
elastic=(--nnodes 1:2 --nproc-per-node 2 --max-restarts 5 --monitor-interval 0.5 "$resume" "$folder/state" 100000000 100)
for host in 0 1; do agent "$host" "${elastic[@]}"; done
says "from step 0 on with 4 ranks on 2 hosts"
steps 10
# The agent and its processes at once, as where a host fails.
ip netns pids "$BED-1" | xargs -r kill -KILL 2>/dev/null || true
wait "${agents[1]}" || true
says "from step [1-9][0-9]* on with 2 ranks on 1 hosts"
agent 1 "${elastic[@]}"
says "from step [1-9][0-9]* on with 4 ranks on 2 hosts"
read -r last _ <"$folder/state"
steps $((last + 10))
for host in 0 1; do ip netns pids "$BED-$host" | xargs -r kill -KILL 2>/dev/null || true; done
wait "${agents[@]}" 2>/dev/null || true

# One process continues without a launcher, and finds that each part of the work was done once.
read -r last _ <"$folder/state"
launch "$resume" "$folder/state" $((last + 5))
expect "from step $last on with 1 ranks on 1 hosts"
expect "$((last + 5)) steps: all parts done once"
echo "passed: torchrun, 4 ranks on 2 hosts, again after a death, 2 ranks on 1 host, and 4 again"
