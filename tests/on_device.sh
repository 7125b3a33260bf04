#!/usr/bin/env bash
# Builds the tests of single kernels in C++ for the GPU at hand, and runs them there: every kernel against float64, as
# tests/emulated.sh has them run on the emulator. Usage: tests/on_device.sh BUILD_DIR
set -euo pipefail
cd "$(dirname "$0")/.."
cmake -S . -B "$1" -DSLIMRT_CUDA=ON -DSLIMRT_CUDA_ARCHS=native -DSLIMRT_PYTHON=OFF
cmake --build "$1" --parallel --target device_tests
failed=0
for test in absorbed cuda_attention cuda_fusion cuda_linear cuda_rows; do
    echo "$test"
    "$1/device/$test" >"$1/device/$test.txt" 2>&1 || { tail -n 20 "$1/device/$test.txt" && failed=1; }
done
exit $failed
