# What .ci/run and .ci/long have in common: stages, what they need, and the summary. It is sourced.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The disk may be small, and builds are most of the time. Nothing is built again here after a change, nothing is debugged, nothing
# is installed twice, and what optimises across crates makes programs faster, not different.
export CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=line-tables-only PIP_NO_CACHE_DIR=1
export CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_DEBUG=none

log=$(mktemp)
times=$(mktemp)
slurm=
munge_pid=

finish() {
    local status=$? file
    # What still runs in the background, Redis among it.
    jobs -p | xargs -r kill 2>/dev/null || true
    if [ -n "$slurm" ]; then
        for file in "$slurm/slurmd.pid" "$slurm/slurmctld.pid" "$munge_pid"; do
            [ ! -f "$file" ] || stop "$file"
        done
        as_root rm -rf "$slurm"
    fi
    if [ $status != 0 ]; then
        echo "FAILED: ${stage:-start}"
    fi
    rm -f "$log" "$log".* "$times"
    exit $status
}
trap finish EXIT

# A stage: its name, then its command. What it prints is kept for the counts.
stage() {
    stage=$1
    shift
    local began=$SECONDS
    echo "=== $stage: $*"
    "$@" 2>&1 </dev/null | tee -a "$log"
    echo "$((SECONDS - began)) $stage" >>"$times"
    echo "=== $stage: passed in $((SECONDS - began)) s, $(free_space) free"
}

free_space() {
    df -h --output=avail . | tail -1 | tr -d ' '
}

# A program of another project, run beside ours: it has three attempts, and each failure is shown.
peer() {
    local attempt
    for attempt in 1 2; do
        if "$@"; then return; fi
        echo "attempt $attempt of 3 failed: $*"
    done
    "$@"
}

# What is missing here, said loudly.
not_run() {
    echo "NOT RUN: $*" | tee -a "$log"
}

# What took how long, how many tests passed, and what did not run.
summary() {
    local passed
    passed=$(grep -oE '^test result: ok\. [0-9]+ passed|^[0-9]+ passed(,| in)' "$log" | sed 's/[^0-9]*\([0-9]*\).*/\1/' |
        awk '{ n += $1 } END { print n + 0 }')
    echo
    echo "=== the longest stages, in seconds"
    sort -rn "$times" | head -15
    echo "=== all $(wc -l <"$times") stages passed in $((SECONDS / 60)) min $((SECONDS % 60)) s: $passed tests"
    if grep "NOT RUN: " "$log"; then
        echo "=== $(grep -c "NOT RUN: " "$log") not run"
    fi
}

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

# A daemon by the file with its number. It writes its state down before it ends, and removes the file then.
stop() {
    as_root kill "$(cat "$1")" 2>/dev/null || return 0
    for _ in $(seq 100); do
        [ -f "$1" ] || return 0
        sleep 0.1
    done
}

# ---- What the stages need ----

install_packages() {
    export DEBIAN_FRONTEND=noninteractive
    as_root apt-get update -qq &&
        as_root apt-get install -y -qq --no-install-recommends \
            redis-server openmpi-bin libopenmpi-dev mpich libmpich-dev iproute2 slurm-wlm munge openssl python3-venv \
            gcc g++ binutils pkg-config valgrind >/dev/null
}

# SLURM on this machine alone, so that there is a real srun; with a configuration and folders of its own.
start_slurm() {
    if timeout 20 srun -n 1 true 2>/dev/null; then return; fi
    local host
    host=$(hostname -s)
    slurm=$(mktemp -d)
    chmod 755 "$slurm"
    mkdir "$slurm/controller" "$slurm/node"
    export SLURM_CONF=$slurm/slurm.conf
    cat >"$SLURM_CONF" <<END
ClusterName=one
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
StateSaveLocation=$slurm/controller
SlurmdSpoolDir=$slurm/node
SlurmctldPidFile=$slurm/slurmctld.pid
SlurmdPidFile=$slurm/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SlurmdParameters=config_overrides
NodeName=$host NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes=$host Default=YES MaxTime=INFINITE State=UP
END
    if ! pgrep munged >/dev/null; then
        as_root mkdir -p /run/munge && as_root chown munge /run/munge || return
        munge_pid=/run/munge/kolo-ci.pid
        as_root runuser -u munge -- /usr/sbin/munged --pid-file "$munge_pid" || return
    fi
    as_root slurmctld -f "$SLURM_CONF" && as_root slurmd -f "$SLURM_CONF" || return
    for _ in $(seq 30); do
        if timeout 20 srun -n 1 true 2>/dev/null; then return; fi
        sleep 1
    done
    return 1
}

# PyTorch, for torchrun, the comparison and the PyTorch backend.
install_torch() {
    python3 -m venv target/torch &&
        target/torch/bin/pip install --quiet 'torch==2.15.*' torchvision safetensors numpy pytest ninja setuptools wheel &&
        target/torch/bin/torchrun --help >/dev/null
}

# NVIDIA's run-time compiler, which needs no GPU.
install_nvrtc() {
    python3 -m venv target/nvrtc && target/nvrtc/bin/pip install --quiet 'nvidia-cuda-nvrtc-cu12>=12.8'
}

install_miri() {
    rustup toolchain install nightly --profile minimal --component miri --component rust-src
}

# In the background: what it prints is shown, and how it ended known, when it is waited for by `prepared NAME`.
declare -A preparations
prepare() {
    "$1" >"$log.$1" 2>&1 </dev/null &
    preparations[$1]=$!
}

# Whether what was prepared in the background is there.
prepared() {
    local status=0
    wait "${preparations[$1]}" || status=$?
    cat "$log.$1"
    rm -f "$log.$1"
    return $status
}

start_redis() {
    local port=$((20000 + RANDOM % 10000))
    redis-server --port "$port" --bind 127.0.0.1 --save '' >/dev/null &
    for _ in $(seq 100); do
        if redis-cli -p "$port" ping >/dev/null 2>&1; then
            export KOLO_TEST_REDIS=redis://127.0.0.1:$port
            return
        fi
        sleep 0.1
    done
    return 1
}

# torch_kolo, into the PyTorch on the PATH.
install_backend() {
    pip install --no-deps --no-build-isolation --force-reinstall ./torch
}

# A small run of the training example on a backend of torch.distributed.
torch_training() {
    GLOO_SOCKET_IFNAME=lo python torch/examples/imagenet/main.py --dummy --dummy-images 48 --image-size 64 --batch-size 8 --epochs 1 \
        --workers 1 --checkpoint "" --dist-url "file://$(mktemp -u)" --world-size 1 --rank 0 --multiprocessing-distributed \
        --dist-backend "$1"
}
