#!/usr/bin/env python3
"""Check that the units compiled for one instruction set keep their code to themselves.

A unit compiled with, say, -mavx512f must not define an inline function that other units define too: the linker
keeps one of them, and if it is the AVX-512 form, older machines crash. So everything such a unit defines must be
local or in the namespace of its instruction set, slimrt::cpu::<isa>.

usage: check_isa_symbols.py BUILD_DIRECTORY
"""

import re
import subprocess
import sys
from pathlib import Path

FOLDER = re.compile(r"slimrt_isa_(\w+)\.dir$")


def objects(build: Path) -> dict[Path, str]:
    """The object files of every instruction set, with its name."""
    found: dict[Path, str] = {}
    for folder in build.rglob("slimrt_isa_*.dir"):
        if match := FOLDER.match(folder.name):
            found |= {path: match[1] for pattern in ("*.o", "*.obj") for path in folder.rglob(pattern)}
    return found


def strangers(path: Path, isa: str) -> list[str]:
    """Global, weak and unique symbols that `path` defines outside slimrt::cpu::<isa>."""
    listing = subprocess.run(["nm", "--defined-only", path], check=True, capture_output=True, text=True).stdout
    own = re.compile(rf"_Z(?:Z|TV|TI|TS|GV)*NK?6slimrt3cpu{len(isa)}{isa}")
    shared = []
    for line in listing.splitlines():
        kind, name = line.split()[-2:]
        visible = kind.isupper() or kind in "uvw"
        if visible and not own.match(name):
            shared.append(name)
    return shared


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    found = objects(Path(sys.argv[1]))
    if not found:
        print(f"no object files of slimrt_isa_* below {sys.argv[1]}", file=sys.stderr)
        return 2
    bad = [f"{path}: {name}" for path, isa in sorted(found.items()) for name in strangers(path, isa)]
    for line in bad:
        print(line, file=sys.stderr)
    print(f"{len(found)} object files, {len(bad)} symbols outside their namespace")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
