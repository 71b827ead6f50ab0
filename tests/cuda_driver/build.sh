#!/usr/bin/env bash
# Compiles the fake CUDA driver to libcuda.so.1 in the folder that is given.
set -euo pipefail

folder=$1
source=$(dirname "$0")/driver.cpp
mkdir -p "$folder"
g++ -std=c++17 -O2 -g -fPIC -shared -pthread -ffp-contract=off -Wall -Wno-unknown-pragmas -Wno-unused-variable \
    -x c++ "$source" -o "$folder/libcuda.so.1" -Wl,-soname,libcuda.so.1 -ldl
