#!/usr/bin/env bash
# Makes the fake CUDA driver, libcuda.so.1, and its kernels in the folder that is given.
set -euo pipefail

folder=$1
source=$(dirname "$0")
mkdir -p "$folder"
# Replaced at once: a program may be running with the former files.
new=$(mktemp -d "$folder/new.XXXXXX")
trap 'rm -rf "$new"' EXIT
g++ -std=c++17 -O2 -g -fPIC -shared -ffp-contract=off -Wall -Wno-unknown-pragmas -Wno-unused-variable \
    -x c++ "$source/kernels.cpp" -o "$new/libkolo_fake_kernels.so" -ldl
manifest=$source/Cargo.toml
target=$(cargo metadata --no-deps --format-version 1 --manifest-path "$manifest" |
    sed -n 's/.*"target_directory":"\([^"]*\)".*/\1/p')
cargo build --locked --manifest-path "$manifest"
cp "$target/debug/libkolo_fake_driver.so" "$new/libcuda.so.1"
mv -f "$new"/*.so* "$folder/"
