#!/bin/sh
# Builds a Debian package with the program kolo and the C library: target/debian/kolo_*.deb. Needs
# cargo and cargo-deb (cargo install cargo-deb).
#
#     scripts/debian.sh
#
# Variables:
#   FEATURES  features of the program and the library: cuda, redis, tls; default: cuda
#   BUILT     a folder with the program and the libraries; the script then builds nothing
set -eu

if [ $# != 0 ]; then
    echo "usage: $0" >&2
    exit 2
fi
cd "$(dirname "$0")/.."

built=${CARGO_TARGET_DIR:-target}/dist
staged=${CARGO_TARGET_DIR:-target}/release/debian
if [ -z "${BUILT:-}" ]; then
    features=
    for feature in $(echo "${FEATURES-cuda}" | tr , ' '); do
        features=$features,kolo-capi/$feature,kolo-cli/$feature
    done
    cargo build --profile dist --package kolo-capi --package kolo-cli --features "${features#,}"
    BUILT=$built
fi
rm -rf "$staged"
mkdir -p "$staged/usr/bin" target/debian
BUILT=$BUILT DESTDIR=$staged scripts/install.sh /usr
install -m 755 "$BUILT/kolo" "$staged/usr/bin/kolo"
strip --strip-debug "$staged/usr/bin/kolo"
cargo deb --package kolo-cli --no-build --no-strip --output target/debian/
