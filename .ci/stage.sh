# Every file in .ci/stages/ sources this one: it stops at the first error, works in the root of the
# repository, and prints each command.
#
# The comment of a stage says what the stage shows. "needs:" lists the set-ups (setup.sh) without
# which the stage cannot run, "uses:" those without which a part of it cannot.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Says loudly what is missing here.
not_run() {
    local -
    set +x
    echo "NOT RUN: $*"
}

# Builds what the arguments name with all features, from the crates that the stage `tests` builds.
# Cargo chooses the features of crates for all tests of the packages, so one of them is built, too.
build_as_tests() {
    cargo build --all-features --test processes "$@"
}

# Runs a program of another project beside kolo's. It has three attempts, and each failure is shown.
peer() {
    local attempt
    for attempt in 1 2; do
        if "$@"; then return; fi
        echo "attempt $attempt of 3 failed: $*"
    done
    "$@"
}

# Runs a small training example on a backend of torch.distributed.
torch_training() {
    GLOO_SOCKET_IFNAME=lo python torch/examples/imagenet/main.py --dummy --dummy-images 48 --image-size 64 \
        --batch-size 8 --epochs 1 --workers 1 --checkpoint "" --dist-url "file://$(mktemp -u)" \
        --world-size 1 --rank 0 --multiprocessing-distributed --dist-backend "$1"
}

set -x
