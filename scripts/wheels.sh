#!/usr/bin/env bash
# Builds the wheels and the source distribution of torch_kolo into torch/dist, and checks them.
#
#     scripts/wheels.sh [PLATFORM...]        default: x86_64 aarch64
#
# The wheels are for every Python from 3.10 and every PyTorch from 2.7. x86_64 and aarch64 are Linux
# with glibc 2.28 or newer (py3-none-manylinux_2_28); zig links against that glibc, also for the
# other architecture. windows is Windows on x86-64 (py3-none-win_amd64), and needs mingw-w64. Needs
# cargo, rustup, python3 and the network; installs its tools into target/wheels.
#
# Variables:
#   FEATURES  features of the library: cuda, redis, tls; default: cuda
set -euo pipefail
cd "$(dirname "$0")/.."

platforms=("$@")
[ $# != 0 ] || platforms=(x86_64 aarch64)
tools=$PWD/target/wheels
[ -x "$tools/bin/twine" ] || {
    python3 -m venv "$tools"
    "$tools/bin/pip" install --quiet build auditwheel twine cargo-zigbuild ziglang
}
PATH=$tools/bin:$PATH
rm -rf torch/dist torch/build

python -m build --sdist torch
for platform in "${platforms[@]}"; do
    features=(--package kolo-capi --features "${FEATURES-cuda}")
    rm -rf torch/build
    if [ "$platform" = windows ]; then
        target=x86_64-pc-windows-gnu
        rustup target add $target
        CARGO_PROFILE_DIST_STRIP=symbols cargo build --profile dist "${features[@]}" --target $target
        library=kolo.dll tag=win_amd64
    else
        target=$platform-unknown-linux-gnu
        rustup target add "$target"
        CARGO_PROFILE_DIST_STRIP=symbols cargo zigbuild --profile dist "${features[@]}" --target "$target.2.28"
        library=libkolo.so tag=manylinux_2_28_$platform
    fi
    library=$(realpath "${CARGO_TARGET_DIR:-target}/$target/dist/$library")
    KOLO_LIBRARY=$library KOLO_PLATFORM=$tag python -m build --wheel torch
done

twine check --strict torch/dist/*
for wheel in torch/dist/*linux*.whl; do
    [ -f "$wheel" ] || continue
    shown=$(auditwheel show "$wheel")
    echo "$shown"
    platform=${wheel##*-none-}
    grep -q "\"${platform%.whl}\"" <<<"$shown" || {
        echo "$0: $wheel does not fit its platform" >&2
        exit 1
    }
done
ls -l torch/dist
