#!/bin/sh
# Builds the C library and installs it under a prefix: the header, the static and the shared
# library, and kolo.pc for pkg-config. Needs cargo alone.
#
#     scripts/install.sh PREFIX
#
# Variables:
#   DESTDIR   a folder that precedes the prefix where files are written; kolo.pc does not name it
#   PROFILE   cargo's profile; default: release
#   FEATURES  features of the library: cuda, redis, tls; default: cuda, which needs nothing of CUDA
#             to build or to start
#   BUILT     a folder with libraries that cargo has built already; the script then builds nothing
set -eu

if [ $# != 1 ] || [ -z "$1" ]; then
    echo "usage: $0 PREFIX" >&2
    exit 2
fi
case $1 in
    /*) prefix=$1 ;;
    *) prefix=$PWD/$1 ;;
esac
cd "$(dirname "$0")/.."

profile=${PROFILE:-release}
case $profile in
    dev | test) built=debug ;;
    *) built=$profile ;;
esac
built=${BUILT:-${CARGO_TARGET_DIR:-target}/$built}
[ -n "${BUILT:-}" ] || cargo build --package kolo-capi --profile "$profile" --features "${FEATURES-cuda}"
version=$(cargo pkgid --package kolo-capi | sed 's/.*[#@]//')
case $version in
    0.*) abi=${version%.*} ;;
    *) abi=${version%%.*} ;;
esac

to=${DESTDIR:-}$prefix
mkdir -p "$to/include" "$to/lib/pkgconfig"
install -m 644 include/kolo.h "$to/include/kolo.h"
install -m 644 "$built/libkolo.a" "$to/lib/libkolo.a"
case $(uname -s) in
    Darwin)
        install -m 755 "$built/libkolo.dylib" "$to/lib/libkolo.$version.dylib"
        ln -sf "libkolo.$version.dylib" "$to/lib/libkolo.$abi.dylib"
        ln -sf "libkolo.$abi.dylib" "$to/lib/libkolo.dylib"
        private="-framework CoreFoundation -lobjc -liconv -lm"
        ;;
    *)
        install -m 755 "$built/libkolo.so" "$to/lib/libkolo.so.$version"
        ln -sf "libkolo.so.$version" "$to/lib/libkolo.so.$abi"
        ln -sf "libkolo.so.$abi" "$to/lib/libkolo.so"
        private="-lpthread -ldl -lm"
        ;;
esac
cat >"$to/lib/pkgconfig/kolo.pc" <<END
prefix=$prefix
libdir=\${prefix}/lib
includedir=\${prefix}/include

Name: kolo
Description: Collective communication for processes
Version: $version
Libs: -L\${libdir} -lkolo
Libs.private: $private
Cflags: -I\${includedir}
END
echo "kolo $version is in $to"
