#!/bin/sh
# Everything that only a GPU can show, on a machine without Rust and without a network.
#
#     scripts/gpu-check.sh --pack FOLDER                 where there is Rust: builds what is to be run, and puts it there
#     FOLDER/gpu-check.sh --run FOLDER --out REPORT      where there is a GPU: runs it, and writes REPORT.json and REPORT.md
#
# To run, a driver and python3 are enough for kolo itself; what compares it with Gloo and NCCL needs
# PyTorch, its backend also a C++ compiler, the kernels CUDA's run-time compiler (PyTorch brings it;
# else prebuilt ones are used), races and accesses that are wrong compute-sanitizer. What is missing
# is in the report. It takes nine minutes at most.
#
# Where there is no C++ compiler beside the GPU, --pack can build PyTorch's backend as well:
# KOLO_GPU_PYTHON is a Python of the version that is there, with the PyTorch that is there.
#
# Ends with 0 if all that was run passed, with 1 if something failed, with 2 if it was called
# wrongly, with 3 if nothing was run.
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
    KOLO_LIBRARY=$built/release/libkolo.a PYTHONPATH=$folder/python PATH=$folder/python/bin:$PATH \
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
