#!/bin/sh
# Runs the checks that need a GPU, on a machine without Rust and without a network.
#
#     scripts/gpu-check.sh --pack FOLDER                 with Rust: builds the checks into FOLDER
#     FOLDER/gpu-check.sh --run FOLDER --out REPORT      with a GPU: writes REPORT.json and REPORT.md
#
# --run needs a driver and python3. The comparison with Gloo and NCCL also needs PyTorch, the backend a
# C++ compiler, and the checks of races and accesses compute-sanitizer. The kernels are compiled by
# CUDA's run-time compiler, which PyTorch has, or are prebuilt. The report names what is missing. It
# takes nine minutes at most.
#
# If the machine with the GPU has no C++ compiler, --pack can also build PyTorch's backend: set
# KOLO_GPU_PYTHON to a Python of the same version with the same PyTorch.
#
# The exit status is 0 if all checks that ran passed, 1 if one failed, 2 for wrong arguments, and 3 if
# no check ran.
set -eu

usage() {
    sed -n '2,5s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

here=$(cd "$(dirname "$0")" && pwd)

for argument; do
    [ -n "$argument" ] || usage
done
if [ $# = 4 ] && [ "$1" = --run ] && [ "$3" = --out ]; then
    if ! command -v python3 >/dev/null; then
        echo "NOTHING WAS RUN: there is no python3" >&2
        exit 3
    fi
    exec python3 "$here/gpu_check.py" "$2" "$4"
fi
if [ $# != 2 ] || [ "$1" != --pack ]; then
    usage
fi

mkdir -p "$2"
folder=$(cd "$2" && pwd)
cd "$here/.."
if [ ! -f Cargo.toml ]; then
    echo "$0: --pack is for kolo's repository" >&2
    exit 2
fi
built=${CARGO_TARGET_DIR:-$PWD/target}

cargo build --release --package kolo-cli --features cuda
cargo build --release --package kolo-capi --features cuda
# Says where the tests are, in JSON.
tests=$(cargo test --package kolo --lib --features cuda --no-run --message-format=json |
    sed -n 's/.*"target":{"kind":\["[^]]*lib".*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)

for part in bin lib include torch peers python; do
    rm -rf "${folder:?}/$part"
    mkdir "$folder/$part"
done
cp "$built/release/kolo" "$folder/bin/kolo"
cp "$tests" "$folder/bin/unit-tests"
strip "$folder/bin/kolo" "$folder/bin/unit-tests"
cp "$built/release/libkolo.a" "$folder/lib/"
strip --strip-debug "$folder/lib/libkolo.a"
gzip -9n "$folder/lib/libkolo.a"
cp include/kolo.h "$folder/include/"
for part in csrc src tests examples setup.py pyproject.toml README.md; do
    cp -r "torch/$part" "$folder/torch/"
done
find "$folder/torch" -name __pycache__ -prune -exec rm -rf {} + -o -name '*.so' -exec rm {} + -o -name '*.egg-info' -prune -exec rm -rf {} +
cp cli/peers/device.py "$folder/peers/"
cp "$here/gpu-check.sh" "$here/gpu_check.py" "$folder/"
chmod +x "$folder/gpu-check.sh"
git describe --always --dirty --abbrev=12 --exclude='*' >"$folder/COMMIT" 2>/dev/null || echo unknown >"$folder/COMMIT"
# What PyTorch's backend is built and tested with.
if ! python3 -m pip install --quiet --disable-pip-version-check --target "$folder/python" pytest ninja 'setuptools>=77' wheel; then
    echo "without pytest, ninja and setuptools: where they are missing, the PyTorch backend will not be run" >&2
fi
rm -rf "$folder/site"
if [ -n "${KOLO_GPU_PYTHON:-}" ]; then
    KOLO_TORCH_CPP=1 KOLO_LIBRARY=$built/release/libkolo.a PYTHONPATH=$folder/python PATH=$folder/python/bin:$PATH \
        "$KOLO_GPU_PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
        --target "$folder/site" ./torch
    strip "$folder"/site/torch_kolo/*.so
fi
find "$folder/python" -name __pycache__ -prune -exec rm -rf {} +
size=$(du -sm "$folder" | cut -f 1)
echo "$folder: $size MiB"
if [ "$size" -gt 60 ]; then
    echo "that is more than 60 MiB" >&2
    exit 1
fi
