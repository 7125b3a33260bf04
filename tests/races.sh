#!/usr/bin/env bash
# Looks for races between the threads of CUDA kernels: the emulator of tests/cuda_host, its kernels built with
# ThreadSanitizer. Usage: tests/races.sh BUILD_DIR (made, if it is not there)
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1
tests="absorbed cuda_attention cuda_fusion cuda_host cuda_linear cuda_rows"
cmake -S . -B "$build" -DSLIMRT_PYTHON=OFF -DSLIMRT_CUDA=OFF -DSLIMRT_EMULATOR=ON -DSLIMRT_EMULATOR_RACES=ON >/dev/null
# shellcheck disable=SC2086
cmake --build "$build" --parallel 2 --target $(printf '%s_test ' $tests) >/dev/null

printf '%s\n' $tests | xargs -P "$(nproc)" -I{} sh -c \
    "timeout 1800 $build/emulated/{}_test >$build/emulated/{}.txt 2>&1 || { cat $build/emulated/{}.txt; exit 1; }"
