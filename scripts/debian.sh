#!/bin/sh
# Builds a Debian package with the program kolo, its man pages and completions, the C library, and NCCL's functions:
# target/debian/kolo_*.deb. Needs cargo and cargo-deb (cargo install cargo-deb).
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

staged=${CARGO_TARGET_DIR:-target}/release/debian
rm -rf "$staged"
mkdir -p target/debian
PROGRAM=1 DESTDIR=$staged scripts/install.sh /usr
gzip -9n "$staged"/usr/share/man/man1/*
cargo deb --package kolo-cli --no-build --no-strip --output target/debian/
