"""Lint: what may include and import what (docs/architecture.md).

Each layer of csrc/ includes only what stands before it, and #ifdef stays in core/. Each package of python/slimrt
imports only packages that stand before it, no modules import each other around a circle, and slimrt.core alone imports
slimrt._core. Imports inside functions count like any other.
"""

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

LAYERS = ["core", "kernels", "cache", "model", "engine", "bench", "bindings"]
INCLUDE = re.compile(r'^\s*#\s*include\s+"([a-z_]+)/')
CONDITIONAL = re.compile(r"^\s*#\s*(if|ifdef|ifndef|elif)\b")

# Those of a row do not import each other; "" is the face of the package, slimrt/__init__.py.
PACKAGES = [
    ["errors", "plumbing", "core", "info"],
    ["results"],
    ["modes", "tokenizer", "machine"],
    ["modelfile"],
    ["cache", "folding"],
    ["runtime"],
    ["generation"],
    ["measure"],
    ["speech", "forecast"],
    ["converter", "tasks"],
    ["text_generation"],
    ["openai"],
    ["model"],
    [""],
    ["server"],
    ["integrations"],
    ["cli"],
    ["__main__"],
]
RANK = {name: rank for rank, row in enumerate(PACKAGES) for name in row}


def csrc_problems(root: Path) -> list[str]:
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


def imported(tree: ast.AST, modules: set[str]) -> Iterator[tuple[int, str]]:
    """The line and module of every import of slimrt; `from a import b` is a.b where that is a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names if name.name.split(".")[0] == "slimrt")
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield node.lineno, "."
            elif (node.module or "").split(".")[0] == "slimrt":
                for name in node.names:
                    inner = f"{node.module}.{name.name}"
                    yield node.lineno, inner if inner in modules or inner == "slimrt._core" else str(node.module)


def python_problems(root: Path) -> list[str]:
    """Every violation below root/python/slimrt as "file:line: what is wrong", or the circle that there is."""
    paths = sorted((root / "python" / "slimrt").rglob("*.py"))
    names = {path: ".".join(path.relative_to(root / "python").with_suffix("").parts) for path in paths}
    names = {path: name.removesuffix(".__init__") for path, name in names.items()}
    found, graph = [], dict[str, set[str]]()
    for path, name in names.items():
        own = package_of(name)
        if own not in RANK:
            found.append(f"{path.relative_to(root)}: package '{own}' has no place in the order: give it one")
            continue
        for line, module in imported(ast.parse(path.read_text()), set(names.values())):
            where = f"{path.relative_to(root)}:{line}"
            package = package_of(module)
            if module == ".":
                found.append(f"{where}: imports are absolute here")
            elif package == "_core":
                if name != "slimrt.core":
                    found.append(f"{where}: slimrt.core alone imports slimrt._core")
            elif package not in RANK:
                found.append(f"{where}: imports an unknown package '{package}'")
            elif package != own and RANK[package] >= RANK[own]:
                found.append(f"{where}: package '{own or 'slimrt'}' must not import '{package or 'slimrt'}'")
            elif module != name:
                graph.setdefault(name, set()).add(module)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found.append(f"modules import each other: {' -> '.join(error.args[1])}")
    return found


def package_of(module: str) -> str:
    """The name below slimrt that a module belongs to."""
    return (module + ".").split(".")[1]


if __name__ == "__main__":
    root = Path(__file__).resolve().parent.parent
    violations = csrc_problems(root) + python_problems(root)
    order = " -> ".join(", ".join(name or "slimrt" for name in row) for row in PACKAGES)
    print("\n".join(violations) or f"layers: {' -> '.join(LAYERS)} hold; packages: {order} hold")
    sys.exit(bool(violations))
