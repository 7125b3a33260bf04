#!/usr/bin/env bash
# Runs the tests on emulated AArch64 CPUs. Usage: tests/aarch64.sh BUILD_DIR [pytest arguments]
# CPUS: which, each `cpu` or `cpu/page size` as qemu names them; none: compiles, and runs nothing yet. Needs Debian (or what
# has its tools and archive), what builds slimrt (installed here if missing), and 400 MB in BUILD_DIR, which stay for the
# next run. docs/testing.md.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 1 ] || { sed -n '2,5s/^# //p' "$0"; exit 2; }
mkdir -p "$1"
build=$(realpath "$1") root=$(realpath "$1")/root venv=$(realpath "$1")/venv
shift

# quietly LOG COMMAND...: shows what it said only if it fails.
quietly() {
    local log=$build/$1.log
    shift
    "$@" >"$log" 2>&1 || { tail -20 "$log"; echo "aarch64: failed: $*" >&2; exit 1; }
}

install_tools() {
    local packages=()
    command -v aarch64-linux-gnu-g++ >/dev/null || packages+=(g++-aarch64-linux-gnu)
    command -v qemu-aarch64-static >/dev/null || packages+=(qemu-user-static)
    [ ${#packages[@]} -gt 0 ] || return 0
    [ "$(id -u)" = 0 ] || { echo "aarch64: install ${packages[*]} first (apt-get install ${packages[*]})" >&2; exit 1; }
    echo "aarch64: installing ${packages[*]}"
    quietly apt-get sh -c "apt-get update && apt-get install -y --no-install-recommends ${packages[*]}"
}

# A Python for AArch64: Debian's packages, unpacked; apt works in a folder of its own and needs no root.
unpack_python() {
    local apt=$build/apt
    mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" && touch "$apt/status"
    local options=(-o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User= -o Debug::NoLocking=1
        -o "Dir::State=$apt" -o "Dir::State::lists=$apt/lists" -o "Dir::State::status=$apt/status" -o "Dir::Cache=$apt/cache")
    quietly apt-update apt-get "${options[@]}" update
    quietly apt-packages apt-get "${options[@]}" install --download-only --no-install-recommends -y python3 libstdc++6
    rm -rf "$root" && mkdir -p "$root"
    for package in "$apt"/cache/archives/*.deb; do dpkg-deb -x "$package" "$root"; done
    rm -rf "$apt"
}

# A virtual environment whose `python` is the emulator: subprocesses that tests start by sys.executable are emulated too.
make_venv() {
    local version
    version=$(basename "$(readlink "$root/usr/bin/python3")")
    rm -rf "$venv" && mkdir -p "$venv/bin" "$venv/lib/$version/site-packages"
    echo "home = $root/usr/bin" >"$venv/pyvenv.cfg"
    printf '#!/bin/sh\nexec qemu-aarch64-static -L "%s" -0 "%s" "%s" "$@"\n' \
        "$root" "$venv/bin/python" "$root/usr/bin/$version" >"$venv/bin/python"
    chmod +x "$venv/bin/python"
    python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*p["dependencies"], *p["optional-dependencies"]["test"], sep="\n")' >"$build/requirements.txt"
    quietly pip python -m pip install --no-compile --target "$venv/lib/$version/site-packages" -r "$build/requirements.txt" \
        --only-binary=:all: --implementation cp --python-version "${version#python}" \
        --platform manylinux_2_31_aarch64 --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64
}

# The module, and a package of links to the sources, so that a change of those needs no installation.
build_core() {
    python -c 'import nanobind, cmake, ninja' 2>/dev/null || quietly pip-build python -m pip install 'nanobind>=3.1,<4' 'cmake>=3.28' ninja
    local include  # told, since CMake 4.4.5 looks for it among AArch64's headers alone
    include=$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')
    quietly cmake python -m cmake -S . -B "$build/core" -G Ninja -DCMAKE_MAKE_PROGRAM="$(command -v ninja)" \
        -DCMAKE_TOOLCHAIN_FILE="$PWD/cmake/aarch64-linux.cmake" -DPython_EXECUTABLE="$(command -v python)" \
        -DPython_INCLUDE_DIR="$include" -DSLIMRT_CUDA=OFF -DSLIMRT_PCH=ON -DSKBUILD_PROJECT_VERSION=0.0.0+aarch64
    quietly compile python -m cmake --build "$build/core" --parallel 2
    local package
    package=$(echo "$venv"/lib/python3*/site-packages)/slimrt
    rm -rf "$package" && mkdir "$package"
    for file in python/slimrt/*; do ln -s "$PWD/$file" "$package/"; done
    rm -f "$package"/_core*.so
    cp "$build"/core/_core*.so "$package/"
}

install_tools
if [ ! -e "$build/python.done" ]; then
    unpack_python
    make_venv
    touch "$build/python.done"
fi
build_core

# To compile Python is slow too: of tests, what the same version of Python has compiled for another machine is as good.
export OPENBLAS_NUM_THREADS=1 PYTHONPYCACHEPREFIX=${PYTHONPYCACHEPREFIX:-$build/pycache}
unset PYTHONDONTWRITEBYTECODE
failed=0
newer=$(qemu-aarch64-static -cpu help | grep -oE 'neoverse-(v1|n2)' | xargs || true)  # those of newer emulators
for cpu in ${CPUS-cortex-a53 cortex-a76 max max,sve=off,sme=off $newer cortex-a76/16384}; do
    export QEMU_CPU=${cpu%%/*} QEMU_PAGESIZE=4096
    [ "$cpu" = "$QEMU_CPU" ] || QEMU_PAGESIZE=${cpu##*/}
    "$venv/bin/python" -c "import os, slimrt._core as core; pages = os.sysconf('SC_PAGE_SIZE')
print('== $cpu:', *core.ops.backends(), flush=True)
if pages != $QEMU_PAGESIZE: raise SystemExit(f'aarch64: this qemu has pages of {pages} bytes, not $QEMU_PAGESIZE (7.2 has them)')"
    "$venv/bin/python" -m pytest -m "not oracle and not nightly and not unemulated" -p no:cacheprovider "$@" || failed=1
done
exit $failed
