#!/bin/sh
# Runs the checks that need a GPU, on a machine without Rust and without a network.
#
#     scripts/gpu-check.sh --pack FOLDER                 with Rust: builds the checks into FOLDER
#     FOLDER/gpu-check.sh --run FOLDER --out REPORT --parts first
#     FOLDER/gpu-check.sh --run FOLDER --out REPORT --parts second
#                                                        with a GPU: write REPORT.json, .md and .log
#     FOLDER/gpu-check.sh --list                         names the parts, for --parts NAME,...
#
# A call of --run ends within nine minutes. It adds to the report that is there, and replaces the
# parts that it runs again. The report is written after each part, so a call that is ended leaves
# what it has found.
#
# --run needs a driver and python3. The comparison with Gloo and NCCL also needs PyTorch, and the
# check of accesses compute-sanitizer. The kernels are compiled by CUDA's run-time compiler, which
# PyTorch has, or are prebuilt. The report names what is missing.
#
# --pack builds PyTorch's backend for Python 3.12 and PyTorch 2.11, if python3.12 is there: it
# installs PyTorch into the target folder, 5 GB. Set KOLO_GPU_PYTHON to a Python that has another
# PyTorch, or to "" for no backend. A machine with the GPU for which none was built needs a C++
# compiler.
#
# The exit status is 0 if all checks that ran passed, 1 if one failed, 2 for wrong arguments, and 3 if
# no check ran. The last lines name each part and test that failed, and why.
set -eu

usage() {
    sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

here=$(cd "$(dirname "$0")" && pwd)

for argument; do
    [ -n "$argument" ] || usage
done
case ${1:-} in
--run | --list)
    if ! command -v python3 >/dev/null; then
        echo "NOTHING WAS RUN: there is no python3" >&2
        exit 3
    fi
    exec python3 "$here/gpu_check.py" "$@"
    ;;
--pack) [ $# = 2 ] || usage ;;
*) usage ;;
esac

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

for part in bin torch peers python; do
    rm -rf "${folder:?}/$part"
    mkdir "$folder/$part"
done
cp "$built/release/kolo" "$folder/bin/kolo"
cp "$tests" "$folder/bin/unit-tests"
# Names of functions stay, for stacks.
strip --strip-debug "$folder/bin/kolo" "$folder/bin/unit-tests"
gzip -9n "$folder/bin/unit-tests"
for part in csrc src tests examples setup.py pyproject.toml README.md MANIFEST.in; do
    cp -r "torch/$part" "$folder/torch/"
done
find "$folder/torch" -name __pycache__ -prune -exec rm -rf {} + -o -name '*.so' -exec rm {} + -o -name '*.egg-info' -prune -exec rm -rf {} +
cp cli/peers/device.py "$folder/peers/"
cp "$here/gpu-check.sh" "$here"/gpu_*.py "$folder/"
chmod +x "$folder/gpu-check.sh"
git describe --always --dirty --abbrev=12 --exclude='*' >"$folder/COMMIT" 2>/dev/null || echo unknown >"$folder/COMMIT"
# What PyTorch's backend is built and tested with, and pykolo, which has its library.
install() {
    KOLO_BUILT=$built/release python3 -m pip install --quiet --disable-pip-version-check --target "$folder/python" pytest ninja 'setuptools>=77' wheel ./python "$@"
}
# py-spy shows the native stacks of Python processes. It is not there for every platform.
if ! install py-spy; then
    rm -rf "$folder/python"
    mkdir "$folder/python"
    if ! install; then
        echo "without pytest, ninja and setuptools: where they are missing, the PyTorch backend will not be run" >&2
    fi
fi

# A virtual environment is kept for the next time.
python_of_gpu() {
    if ! command -v python3.12 >/dev/null || ! python3.12 -c '' 2>/dev/null; then
        echo "without PyTorch's backend: there is no python3.12, and KOLO_GPU_PYTHON names no other Python" >&2
        return
    fi
    if [ ! -f "$built/gpu-python/complete" ]; then
        rm -rf "$built/gpu-python"
        if ! python3.12 -m venv "$built/gpu-python" >&2 ||
            ! "$built/gpu-python/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.11.0 >&2; then
            echo "without PyTorch's backend: PyTorch 2.11 cannot be installed" >&2
            return
        fi
        touch "$built/gpu-python/complete"
    fi
    echo "$built/gpu-python/bin/python"
}

rm -rf "$folder/site"
python=${KOLO_GPU_PYTHON-$(python_of_gpu)}
if [ -n "$python" ]; then
    KOLO_TORCH_CPP=1 PYTHONPATH=$folder/python PATH=$folder/python/bin:$PATH \
        "$python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
        --target "$folder/site" ./torch
    strip "$folder"/site/torch_kolo/*.so
fi
find "$folder/python" -name __pycache__ -prune -exec rm -rf {} +
size=$(du -sm "$folder" | cut -f 1)
packed=$(($(tar -C "$folder" -cf - . | gzip | wc -c) >> 20))
echo "$folder: $size MiB, and $packed MiB as a .tar.gz"
if [ "$packed" -gt 60 ]; then
    echo "as a .tar.gz that is more than 60 MiB" >&2
    exit 1
fi
