#!/usr/bin/env bash
# Builds the wheels and the source distribution of torch_kolo into torch/dist, and checks them.
#
#     scripts/wheels.sh [ARCHITECTURE...]        default: x86_64 aarch64
#
# The wheels are for Linux with glibc 2.28 or newer, for every Python from 3.10 and every PyTorch
# from 2.7 (py3-none-manylinux_2_28). zig links them against that glibc, also for the other
# architecture. Needs cargo, rustup, python3 and the network; installs its tools into target/wheels.
#
# Variables:
#   FEATURES  features of the library: cuda, redis, tls; default: cuda
set -euo pipefail
cd "$(dirname "$0")/.."

architectures=("$@")
[ $# != 0 ] || architectures=(x86_64 aarch64)
tools=$PWD/target/wheels
[ -x "$tools/bin/twine" ] || {
    python3 -m venv "$tools"
    "$tools/bin/pip" install --quiet build auditwheel twine cargo-zigbuild ziglang
}
PATH=$tools/bin:$PATH
rm -rf torch/dist torch/build

python -m build --sdist torch
for architecture in "${architectures[@]}"; do
    target=$architecture-unknown-linux-gnu
    rustup target add "$target"
    CARGO_PROFILE_RELEASE_STRIP=symbols cargo zigbuild --release --package kolo-capi --features "${FEATURES-cuda}" --target "$target.2.28"
    rm -rf torch/build
    library=$(realpath "${CARGO_TARGET_DIR:-target}/$target/release/libkolo.so")
    KOLO_LIBRARY=$library KOLO_PLATFORM=manylinux_2_28_$architecture python -m build --wheel torch
done

twine check --strict torch/dist/*
for wheel in torch/dist/*.whl; do
    shown=$(auditwheel show "$wheel")
    echo "$shown"
    platform=${wheel##*-none-}
    grep -q "\"${platform%.whl}\"" <<<"$shown" || {
        echo "$0: $wheel does not fit its platform" >&2
        exit 1
    }
done
ls -l torch/dist
