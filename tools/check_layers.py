"""Lint: each layer of csrc/ includes only what stands before it, and #ifdef stays in core/ (docs/architecture.md)."""

import re
import sys
from pathlib import Path

LAYERS = ["core", "kernels", "cache", "model", "engine", "bindings"]
INCLUDE = re.compile(r'^\s*#\s*include\s+"([a-z_]+)/')
CONDITIONAL = re.compile(r"^\s*#\s*(if|ifdef|ifndef|elif)\b")


def problems(root: Path) -> list[str]:
    """Every violation below root/csrc as "file:line: what is wrong"."""
    found = []
    for path in sorted((root / "csrc").rglob("*")):
        if path.suffix not in {".cpp", ".h", ".cu", ".cuh"}:
            continue
        layer = path.relative_to(root / "csrc").parts[0]
        for number, line in enumerate(path.read_text().splitlines(), 1):
            where = f"{path.relative_to(root)}:{number}"
            include = INCLUDE.match(line)
            if include and include[1] not in LAYERS:
                found.append(f"{where}: includes an unknown layer '{include[1]}'")
            elif include and LAYERS.index(include[1]) > LAYERS.index(layer):
                found.append(f"{where}: layer '{layer}' must not include '{include[1]}'")
            if CONDITIONAL.match(line) and layer != "core":
                found.append(f"{where}: no conditional compilation outside core/: make it a file")
    return found


if __name__ == "__main__":
    violations = problems(Path(__file__).resolve().parent.parent)
    print("\n".join(violations) or f"layers: {' -> '.join(LAYERS)} hold")
    sys.exit(bool(violations))
