#!/usr/bin/env bash
# Builds the wheels and the source distributions of pykolo and torch_kolo into python/dist and
# torch/dist, and checks them.
#
#     scripts/wheels.sh [PLATFORM...]        default: x86_64 aarch64
#
# The wheels are for every Python from 3.10, and that of torch_kolo for every platform and every
# PyTorch from 2.7. x86_64 and aarch64 are Linux with glibc 2.28 or newer (py3-none-manylinux_2_28);
# zig links against that glibc, also for the other architecture. x86_64-musl and aarch64-musl are Linux
# with musl, such as Alpine (py3-none-musllinux_1_2). windows is Windows on x86-64 (py3-none-win_amd64),
# and needs mingw-w64. Needs cargo, rustup, python3 with its headers and the network; installs its tools
# into target/wheels.
#
# Variables:
#   PACKAGES  python, torch; default: both
#   FEATURES  features of the library and the program: cuda, redis, tls; default: cuda
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
read -ra packages <<<"${PACKAGES-python torch}"
case " ${packages[*]} " in *" python "*) ;; *) platforms=() ;; esac
# What a platform cannot run here, it cannot ask for its man pages: another platform's are the same.
pages=$tools/man
rm -rf "$pages"
features=()
for crate in kolo-capi kolo-cli; do
    features+=(--package "$crate")
    for feature in $(tr , ' ' <<<"${FEATURES-cuda}"); do features+=(--features "$crate/$feature"); done
done
linux=("${features[@]}")
case ,${FEATURES-cuda}, in *,cuda,*) linux+=(--package kolo-nccl) nccl=1 ;; *) nccl= ;; esac
# The same sources give the same wheels, whatever the folder and the time.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH
export RUSTFLAGS="${RUSTFLAGS:-} --remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=/cargo --remap-path-prefix=$PWD=/kolo"
export CARGO_PROFILE_DIST_STRIP=symbols CARGO_PROFILE_DIST_DEBUG=0

for package in "${packages[@]}"; do
    rm -rf "$package/dist" "$package/build"
    python -m build --sdist "$package"
    [ "$package" = python ] || python -m build --wheel "$package"
done
for platform in "${platforms[@]}"; do
    if [ "$platform" = windows ]; then
        target=x86_64-pc-windows-gnu
        rustup target add $target
        cargo build --profile dist "${features[@]}" --target $target
        tag=win_amd64 c=
    elif [ "${platform%-musl}" != "$platform" ]; then
        target=${platform%-musl}-unknown-linux-musl
        rustup target add "$target"
        # A shared library needs a shared musl.
        RUSTFLAGS="$RUSTFLAGS -C target-feature=-crt-static" cargo zigbuild --profile dist "${linux[@]}" --target "$target"
        tag=musllinux_1_2_${platform%-musl} c=${platform%-musl}-linux-musl
    else
        target=$platform-unknown-linux-gnu
        rustup target add "$target"
        cargo zigbuild --profile dist "${linux[@]}" --target "$target.2.28"
        tag=manylinux_2_28_$platform c=$platform-linux-gnu.2.28
    fi
    # zig compiles C for Linux. Debian keeps a part of Python's headers, which fit all, in a folder of the
    # machine.
    mkdir -p "$tools/include"
    ln -sfn "/usr/include/$(uname -m)-linux-gnu" "$tools/include/${platform%-musl}-linux-gnu"
    cc="$tools/bin/python -m ziglang cc -target $c -idirafter $tools/include"
    built=$(realpath "${CARGO_TARGET_DIR:-target}/$target/dist")
    if [ "$platform" != windows ]; then
        "$built/kolo" man "$pages" 2>/dev/null || [ -d "$pages" ] || cargo run --package kolo-cli -- man "$pages"
    fi
    rm -rf python/build
    CC=$cc LDSHARED="$cc -shared" KOLO_FEATURES=${FEATURES-cuda} KOLO_BUILT=$built KOLO_PLATFORM=$tag KOLO_MAN=$pages python -m build --wheel python
done

for package in "${packages[@]}"; do
    twine check --strict "$package"/dist/*
    for wheel in "$package"/dist/*linux*.whl; do
        [ -f "$wheel" ] || continue
        platform=${wheel##*-none-}
        case $platform in
            # auditwheel knows musl by its name on Alpine, and would look for it among glibc's libraries.
            musl*)
                shown=$(auditwheel show --ldpaths /nowhere "$wheel")
                libraries='"libc.so": '
                found=$(grep -o '"lib[^"]*": ' <<<"$shown")
                ;;
            *)
                shown=$(auditwheel show "$wheel")
                libraries=\"${platform%.whl}\"
                found=$(grep -o "$libraries" <<<"$shown" | head -1)
                ;;
        esac
        echo "$shown"
        [ "$found" = "$libraries" ] || {
            echo "$0: $wheel does not fit its platform" >&2
            exit 1
        }
        grep -q "pykolo/_fast.abi3.so" <<<"$(python -m zipfile -l "$wheel")" || {
            echo "$0: $wheel has no pykolo._fast: install Python's headers" >&2
            exit 1
        }
        [ -z "$nccl" ] || grep -q "lib/kolo/libnccl.so.2" <<<"$(python -m zipfile -l "$wheel")" || {
            echo "$0: $wheel has no libnccl.so.2" >&2
            exit 1
        }
    done
    ls -l "$package/dist"
done
