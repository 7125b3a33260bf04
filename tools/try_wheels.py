# SPDX-License-Identifier: Apache-2.0
"""Runs tests with Linux wheels on Debian 11's libraries: glibc 2.31 and the libstdc++ of GCC 10, whatever is installed.

    python tools/try_wheels.py dist/slimrt-*manylinux*.whl -- tests/test_kernels.py tests/test_parity.py

Debian 11 has no Python that slimrt runs on, so Debian 12's is compiled against its libraries, with a loader and a
search path that lead to them alone; that nothing else is mapped is looked at first. Needs what build_wheels.py needs,
and for AArch64 qemu-user-static.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from build_wheels import GLIBC_MINOR, LINUX, OLD_PACKAGES, ROOT, Linux, apt, old_libraries, run, tool

SOURCE = ("bookworm", "python3.11")
VERSION = "3.11"
PACKAGES = (*OLD_PACKAGES, "zlib1g-dev")
MAPPED = """
import os, re, sys, slimrt._core
mapped = set(re.findall(r" (/.*\\.so[.0-9]*)$", open("/proc/self/maps").read(), re.M))
other = [one for one in mapped if not one.startswith(sys.argv[1])]
print("Python", sys.version.split()[0], os.confstr("CS_GNU_LIBC_VERSION"), *slimrt._core.ops.backends(), flush=True)
if other or not any("libstdc++" in one for one in mapped):
    sys.exit(f"try_wheels: mapped: {sorted(mapped)}")
"""


def machine_of(wheel: Path) -> Linux:
    for target in LINUX.values():
        if wheel.name.endswith(f"_{target.machine}.whl"):
            return target
    raise SystemExit(f"try_wheels: {wheel.name} is for none of {', '.join(LINUX)}")


def compile_python(target: Linux, root: Path, work: Path) -> Path:
    """The interpreter, or what starts it under the emulator, in the folder where it was compiled."""
    build = work / f"python-{target.debian}"
    native = target.machine == os.uname().machine
    python = build / ("python" if native else "emulated")
    if (build / "done").exists():
        return python
    shutil.rmtree(build, ignore_errors=True)
    build.mkdir(parents=True)
    suite, package = SOURCE
    command = apt(work / "source", target.debian, f"deb-src {{}} {suite} main")
    run("env", "-C", work, *command, "source", "--download-only", package)
    (archive,) = work.glob(f"{package}_*.orig.tar.*")
    run("tar", "-xf", archive, "-C", build, "--strip-components=1")
    libraries = [root / "lib" / target.triple, root / "usr" / "lib" / target.triple]
    (loader,) = libraries[0].glob("ld-linux*.so.*")
    compiler = [tool(target, "gcc"), f"--sysroot={root}", f"-B{libraries[1]}"]
    linker = [*(f"-L{one} -Wl,-rpath,{one}" for one in libraries), "-Wl,--disable-new-dtags"]
    linker.append(f"-Wl,-dynamic-linker,{loader}")
    options = [f"CC={' '.join(compiler)}", f"LDFLAGS={' '.join(linker)}", "OPT=-O1 -DNDEBUG", "MODULE_BUILDTYPE=static"]
    options += [f"PKG_CONFIG_LIBDIR={libraries[1]}/pkgconfig", "--without-ensurepip", "--disable-test-modules"]
    if not native:
        options += [f"--host={target.triple}", f"--build={os.uname().machine}-linux-gnu"]
        options += [f"--with-build-python=python{VERSION}", "ac_cv_file__dev_ptmx=no", "ac_cv_file__dev_ptc=no"]
        options += ["ac_cv_buggy_getaddrinfo=no"]
    run("env", "-C", build, "./configure", "-q", *options)
    modules = build / "Modules"
    os.replace(modules / "Setup.stdlib", modules / "Setup.local")  # setup.py would find this system's headers
    run("env", "-C", build, "make", "-j2", "python", "platform")
    if not native:
        python.write_text(f'#!/bin/sh\nexec qemu-{target.machine}-static -0 "$0" "{build}/python" "$@"\n')
        python.chmod(0o755)
    (build / "done").touch()
    return python


def install(wheel: Path, target: Linux, site: Path) -> None:
    """The wheel and what it and its tests need, as a machine of that age takes them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    levels = [f"2_{minor}" for minor in range(GLIBC_MINOR, 16, -1)] + ["2014"]
    platforms = [f"--platform=manylinux{'_' * ('_' in one)}{one}_{target.machine}" for one in levels]
    options = ["--no-compile", "--only-binary=:all:", "--implementation=cp", f"--python-version={VERSION}"]
    pip = [sys.executable, "-m", "pip", "install", "-q", "--upgrade", "--target", site, *options, *platforms]
    run(*pip, *needed)
    run(*pip, "--no-deps", "--force-reinstall", wheel)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "old", help="builds, kept for the next time")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:split])
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    for wheel in args.wheels:
        target = machine_of(wheel)
        root = old_libraries(target, work, PACKAGES)
        python = compile_python(target, root, work)
        site = work / f"site-{target.debian}"
        install(wheel.resolve(), target, site)
        environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONPYCACHEPREFIX": str(work / "pycache")}
        pytest = "-m pytest -p no:cacheprovider -p no:faulthandler".split()  # the latter gets no stack in the emulator
        for command in (["-c", MAPPED, str(work)], [*pytest, *sys.argv[split + 1 :]]):
            if subprocess.run([python, *command], cwd=ROOT, env=environment, check=False).returncode:
                raise SystemExit(f"try_wheels: failed with {wheel.name}")


if __name__ == "__main__":
    main()
