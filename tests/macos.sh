#!/usr/bin/env bash
# Compiles csrc for macOS on Apple silicon, where a warning is an error; links and runs nothing. Usage: tests/macos.sh BUILD_DIR
# Needs cmake, ninja, nanobind and ziglang of PyPI (installed here if missing).
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# = 1 ] || { sed -n '2,3s/^# //p' "$0"; exit 2; }
mkdir -p "$1"
build=$(realpath "$1")
python -c 'import nanobind, cmake, ninja, ziglang' 2>/dev/null ||
    python -m pip install -q 'nanobind>=3.1,<4' 'cmake>=3.28' ninja ziglang==0.17.1

ZIG=$(python -c 'import pathlib, ziglang; print(pathlib.Path(ziglang.__file__).parent / "zig")')
export ZIG ZIG_GLOBAL_CACHE_DIR=$build/zig CCACHE_COMPILERTYPE=clang CCACHE_COMPILERCHECK="$ZIG version"
{
    python -m cmake -S . -B "$build" -G Ninja -DCMAKE_MAKE_PROGRAM="$(command -v ninja)" -DCMAKE_BUILD_TYPE=Debug \
        -DCMAKE_TOOLCHAIN_FILE="$PWD/cmake/aarch64-macos.cmake" -DCMAKE_CXX_FLAGS_DEBUG="-O0 -g0" -DCMAKE_COMPILE_WARNING_AS_ERROR=ON \
        -DPython_EXECUTABLE="$(command -v python)" -DSLIMRT_CUDA=OFF -DSKBUILD_PROJECT_VERSION=0.0.0+macos
    bindings=(csrc/bindings/*.cpp)
    bindings=("${bindings[@]/#/CMakeFiles/_core.dir/}")
    ninja -C "$build" -j 2 -k 0 slimrt_engine slimrt_cuda "${bindings[@]/%/.o}"
} >"$build/log" 2>&1 || { grep -E 'error|warning' "$build/log" || tail -20 "$build/log"; exit 1; }
