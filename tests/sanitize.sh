#!/usr/bin/env bash
# Runs the suite on a core built with AddressSanitizer and UBSan. Usage: tests/sanitize.sh [BUILD_DIR [build|all]]
# build: compiles, and runs nothing yet. all: every case (tests/shares.py).
# Needs slimrt's Python dependencies, the extra `test`, and cmake, ninja and nanobind (installed here if missing).
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build/sanitized}
python -c 'import nanobind, cmake, ninja' 2>/dev/null || python -m pip install -q 'nanobind>=3.1,<4' 'cmake>=3.28' ninja

python -m cmake -S . -B "$build" -G Ninja -DCMAKE_MAKE_PROGRAM="$(command -v ninja)" -DCMAKE_BUILD_TYPE=Release \
    -DPython_EXECUTABLE="$(command -v python)" -DSLIMRT_SANITIZE=address,undefined -DSLIMRT_PCH=ON -DSLIMRT_CUDA=OFF -DSKBUILD_PROJECT_VERSION=0.0.0+sanitized >/dev/null
python -m cmake --build "$build" --parallel 2 >"$build/log" || { grep -A20 FAILED: "$build/log"; exit 1; }
[ "${2:-}" != build ] || exit 0
"$build/kv_cache_test"

# A package of links to the sources, so that the instrumented module is the one that is imported.
package=$build/package/slimrt
rm -rf "$package" && mkdir -p "$package"
for file in python/slimrt/*; do ln -s "$PWD/$file" "$package/"; done
rm -f "$package"/_core*.so
cp "$build"/_core*.so "$package/"

export PYTHONPATH="$PWD/$build/package"
case $build in /*) export PYTHONPATH="$build/package" ;; esac
# Two frames of where memory was allocated: to remember thirty takes a quarter of the time. Findings have whole stacks.
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:malloc_context_size=2 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
preload="$(g++ -print-file-name=libasan.so):$(g++ -print-file-name=libstdc++.so)"
chosen="not oracle and not unsanitized and not nightly"
share=(--share)
[ "${2:-}" != all ] || share=()
LD_PRELOAD="$preload" python -m pytest -n auto "${share[@]}" -m "$chosen" -p no:cacheprovider
# What Python allocates is watched too, objects of the bindings among it, which are small: slow, so in these alone.
LD_PRELOAD="$preload" PYTHONMALLOC=malloc python -m pytest -n auto -m "$chosen" -p no:cacheprovider @tests/quick.txt \
    tests/test_sampler.py tests/test_model_concurrency.py
