#!/usr/bin/env bash
# Runs the tests of the CUDA backend without a GPU, by the emulator of tests/cuda_host. Usage: tests/emulated.sh BUILD_DIR [all]
# BUILD_DIR: a CMake build folder with SLIMRT_EMULATOR=ON. all: every case (tests/shares.py). Tests marked slow_emulated are
# left out; a GPU runs them too (python -m pytest -k cuda), and those of thousands of rows ("long").
set -euo pipefail
cd "$(dirname "$0")/.."
emulated=$(realpath "$1")/emulated

# All cores: nproc itself would say OMP_NUM_THREADS. The longest first.
printf '%s\n' cuda_linear cuda_attention cuda_fusion cuda_rows absorbed cuda_backend cuda_host cuda_plans |
    xargs -P "$(env -u OMP_NUM_THREADS nproc)" -I{} sh -c "$emulated/{}_test >$emulated/{}.txt 2>&1 || { cat $emulated/{}.txt; exit 1; }"
diff tests/cuda_plans.txt "$emulated/cuda_plans.txt"

# A package of links to the sources, so that the emulating module is the one that is imported.
package=$emulated/package/slimrt
rm -rf "$package" && mkdir -p "$package"
for file in python/slimrt/*; do ln -s "$PWD/$file" "$package/"; done
rm -f "$package"/_core*.so
cp "$emulated"/_core*.so "$package/"
share=(--share)
[ "${2:-}" != all ] || share=()
PYTHONPATH="$emulated/package" python -m pytest -n auto "${share[@]}" -m "not slow_emulated and not nightly" -k "cuda and not long" -p no:cacheprovider \
    tests/test_cuda.py tests/test_cuda_appends.py tests/test_placement.py tests/test_cuda_launches.py tests/test_cuda_layers.py tests/test_cuda_libraries.py tests/test_latent.py tests/test_kernels.py tests/test_kernels_*.py
# Rows in as many parts as large devices have.
SLIMRT_EMULATED_PROCESSORS=132 PYTHONPATH="$emulated/package" python -m pytest -n auto "${share[@]}" -k "skipped_within_the_budget and cuda" \
    -p no:cacheprovider tests/test_kernels_attention.py
# Whole rows again, as devices without clusters have them.
SLIMRT_EMULATED_CAPABILITY=80 PYTHONPATH="$emulated/package" python -m pytest -n auto -k "wide_heads and (bf16 or q8)" \
    -p no:cacheprovider tests/test_cuda.py
