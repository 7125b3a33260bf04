#!/usr/bin/env python3
"""What nvcc made of the CUDA kernels' hot loops: nothing is run, and no GPU is needed.

usage: sass.py MODULE > tests/cuda_sass.txt     MODULE: slimrt/_core*.so, compiled for sm_80 alone, as .ci/run does

A loop is hot if it multiplies matrices (HMMA, IMMA) or copies to shared memory in the background (LDGSTS, UBLKCP), not
only in a loop within it. A line a kernel, of numbers and its name:

    registers, bytes of stack
    mma     instructions of the loops that multiply, without loops within them, for each product
    copy    the same of the loop that copies most dearly, for each 16 bytes; 0 where there are bulk copies, or none
    local   loads and stores of the stack in hot loops and those within them: what registers have no room for
    fence   MEMBAR of all the device, and CCTL.IVALL, which throws the first-level cache away
    call    CALL: divisions of 64 bits, and the rare ends of floats'
    divide  divisions of integers

Needs cuobjdump and nvdisasm (pip's nvidia-cuda-cuobjdump and -nvdisasm, or a toolkit) and c++filt.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:\{ )?(?:@(!?U?P\w+)\s+)?([A-Z0-9_.]+)(.*)")
LABEL = re.compile(r"\.L_x_\d+")
PRODUCT = re.compile(r"[HI]MMA\b")
COPY = re.compile(r"LDGSTS\b")
HOT = re.compile(r"([HI]MMA|LDGSTS|UBLKCP)\b")
# What hot loops should not have, by column.
COLD = {
    "local": re.compile(r"(LDL|STL)\b"),
    "fence": re.compile(r"(MEMBAR\.\w+\.(GPU|SYS)|CCTL\.IVALL)\b"),
    "call": re.compile(r"CALL\b.*__cuda_(?!sm70_warpsync)"),
    "divide": re.compile(r"I2F(\.\w+)*\.RP\b"),  # how an integer's reciprocal begins
}
COLUMNS = ("registers", "stack", "mma", "copy", *COLD)


def output(*command: str | Path, folder: str | None = None) -> str:
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def tool(name: str) -> str:
    """A program of NVIDIA's wheels, or of a toolkit; "" without it."""
    try:
        for path in files(f"nvidia-cuda-{name}") or []:
            if path.name == name:
                return str(path.locate())
    except PackageNotFoundError:
        pass
    return shutil.which(name) or ""


@dataclass
class Kernel:
    architecture: str
    name: str  # as the linker has it
    listing: str


def kernels(module: Path) -> Iterator[Kernel]:
    """Of every architecture. Takes a quarter of a minute, most of it nvdisasm's."""
    with tempfile.TemporaryDirectory() as folder:
        output(tool("cuobjdump"), "-xelf", "all", module.resolve(), folder=folder)
        for cubin in sorted(Path(folder).glob("*.cubin")):
            listing = output(tool("nvdisasm"), "-c", cubin)
            for body in listing.split("\t.section\t.text.")[1:]:
                yield Kernel(cubin.name.split(".")[-2], body.split(",")[0], body.split("\t.section\t")[0])


def resources(module: Path) -> dict[tuple[str, str], tuple[int, int, int]]:
    """Registers, bytes of stack and of static shared memory, by architecture and the linker's name of a kernel."""
    listing = output(tool("cuobjdump"), "-res-usage", module)
    found, architecture = {}, ""
    for line in re.findall(r"arch = \w+|Function \w+:\n.*", listing):
        if line.startswith("arch"):
            architecture = line.split()[-1]
        elif numbers := re.search(r"Function (\w+):\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+)", line):
            found[architecture, numbers[1]] = int(numbers[2]), int(numbers[3]), int(numbers[4])
    return found


def release(module: Path) -> str:
    """Of the nvcc that compiled a module, "13.0"."""
    found = re.search(rb"Cuda compilation tools, release (\d+\.\d+)", module.read_bytes())
    return found[1].decode() if found else "unknown"


class Code:
    """A kernel's instructions and loops. Where only a warp goes that has diverged is left out."""

    def __init__(self, listing: str):
        self.code: list[tuple[str, str, str]] = []  # predicate, operation, the rest
        labels: dict[str, int] = {}
        for line in listing.splitlines():
            if found := INSTRUCTION.match(line):
                self.code.append((found[1] or "", found[2], found[3]))
            elif line.startswith(".L_x_"):
                labels[line.rstrip(":")] = len(self.code)
        self._make_blocks(labels)
        self._order()
        self._find_loops()

    def _targets(self, i: int, labels: dict[str, int]) -> list[int]:
        """Instructions that may come after one, in a warp that has not diverged."""
        predicate, operation, rest = self.code[i]
        kind = operation.split(".")[0]
        targets = [labels[label] for label in LABEL.findall(rest) if label in labels]
        leaves = kind == "CALL" and targets  # to a label: how a loop is left together
        if not (leaves or kind in ("BRA", "BRX", "BRXU", "EXIT", "RET")) or operation == "BRA.DIV":
            return [i + 1]
        if kind == "BRX" or operation == "BRA.CONV" or not (predicate or re.match(r"\s*!?U?P\w*,", rest)):
            return targets
        return [*targets, i + 1]

    def _make_blocks(self, labels: dict[str, int]) -> None:
        after = [self._targets(i, labels) for i in range(len(self.code))]
        starts = {0, *labels.values(), *(t for i, to in enumerate(after) if to != [i + 1] for t in (*to, i + 1))}
        self.starts = sorted(start for start in starts if start < len(self.code))
        block_at = {start: block for block, start in enumerate(self.starts)}
        self.ends = [*self.starts[1:], len(self.code)]
        self.next = [[block_at[t] for t in after[end - 1] if t in block_at] for end in self.ends]

    def _order(self) -> None:
        """Blocks that can be reached, each before those that it leads to but for loops; and dominators."""
        seen, stack, done = {0}, [(0, iter(self.next[0]))], []
        while stack:
            block, rest = stack[-1]
            to = next((b for b in rest if b not in seen), None)
            if to is None:
                done.append(block)
                stack.pop()
            else:
                seen.add(to)
                stack.append((to, iter(self.next[to])))
        order = done[::-1]
        place = {block: i for i, block in enumerate(order)}
        self.before: dict[int, list[int]] = defaultdict(list)
        for block in order:
            for to in self.next[block]:
                self.before[to].append(block)
        dominator = {0: 0}

        def meet(a: int, b: int) -> int:
            while a != b:
                a, b = (dominator[a], b) if place[a] > place[b] else (a, dominator[b])
            return a

        changed = True
        while changed:
            changed = False
            for block in order[1:]:
                known = [b for b in self.before[block] if b in dominator]
                new = known[0]
                for b in known[1:]:
                    new = meet(new, b)
                changed |= dominator.get(block) != new
                dominator[block] = new
        self.order, self.dominator = order, dominator

    def _dominates(self, a: int, b: int) -> bool:
        while b not in (a, 0):
            b = self.dominator[b]
        return a == b

    def _find_loops(self) -> None:
        """Of each the blocks that no inner loop has, and all of them."""
        loops: dict[int, set[int]] = {}
        for block in self.order:
            for head in self.next[block]:
                if not self._dominates(head, block):
                    continue
                loop, stack = loops.setdefault(head, {head}), [block]
                while stack:
                    if (b := stack.pop()) not in loop:
                        loop.add(b)
                        stack += self.before[b]
        inner: dict[int, int] = {}
        for head, loop in sorted(loops.items(), key=lambda item: -len(item[1])):
            inner.update(dict.fromkeys(loop, head))
        self.loops = [([b for b in loop if inner[b] == head], loop) for head, loop in loops.items()]

    def instructions(self, blocks: Iterable[int]) -> list[str]:
        return [of + rest for block in blocks for _, of, rest in self.code[self.starts[block] : self.ends[block]]]


def count(pattern: re.Pattern[str], instructions: list[str]) -> int:
    return sum(bool(pattern.match(instruction)) for instruction in instructions)


def measure(code: Code) -> dict[str, float] | None:
    """What COLUMNS has, from "mma" on; none if no loop is hot."""
    loops = [(code.instructions(own), blocks) for own, blocks in code.loops]
    hot = [(own, blocks) for own, blocks in loops if count(HOT, own)]
    if not hot:
        return None
    products = [own for own, _ in hot if count(PRODUCT, own)]
    copies = [len(own) / count(COPY, own) for own, _ in hot if count(COPY, own) and not count(PRODUCT, own)]
    n = sum(count(PRODUCT, own) for own in products)
    within = code.instructions(set().union(*(blocks for _, blocks in hot)))
    return {
        "mma": round(sum(map(len, products)) / n, 1) if n else 0,
        "copy": round(max(copies), 1) if copies else 0,
        **{name: count(pattern, within) for name, pattern in COLD.items()},
    }


def plain_names(names: list[str]) -> list[str]:
    """few_kernel<Q8_0Weight, 1, 8, false>: no namespaces, no parameters."""
    listing = output("c++filt", *names)
    return [
        re.sub(r"\(anonymous namespace\)::|slimrt::|cuda::|^void ", "", name).split("(")[0]
        for name in listing.splitlines()
    ]


Table = dict[str, dict[str, float]]


def table(module: Path, of: Iterable[Kernel]) -> Table:
    """Of every kernel with a hot loop: "sm_80 few_kernel<...>" to its COLUMNS."""
    used, found = resources(module), []
    for kernel in of:
        if HOT.search(kernel.listing) and (numbers := measure(Code(kernel.listing))):
            registers, stack, _ = used[kernel.architecture, kernel.name]
            found.append((kernel, {"registers": registers, "stack": stack, **numbers}))
    names = plain_names([kernel.name for kernel, _ in found])
    return {f"{kernel.architecture} {name}": numbers for name, (kernel, numbers) in zip(names, found, strict=True)}


def write(module: Path) -> None:
    """As read() has it."""
    print("nvcc", release(module))
    print(*COLUMNS, "kernel")
    for name, numbers in sorted(table(module, kernels(module)).items()):
        print(*numbers.values(), name)


def read(path: Path) -> tuple[str, Table]:
    """The release of nvcc that a table is of, and the table."""
    first, columns, *lines = path.read_text().splitlines()
    names, numbers = columns.split()[:-1], [line.split(maxsplit=len(COLUMNS)) for line in lines]
    return first.split()[1], {line[-1]: dict(zip(names, map(float, line), strict=False)) for line in numbers}


def worse(is_now: Table, budgets: Table) -> list[str]:
    """What is more than it may be, in words."""
    return [
        f"{name}: {column} {value:g}, may be {budgets[name][column]:g}"
        for name, numbers in is_now.items()
        if name in budgets
        for column, value in numbers.items()
        if value > budgets[name][column]
    ]


if __name__ == "__main__":
    write(Path(sys.argv[1]))
