#!/usr/bin/env python3
"""Cycles of a kernel's inner loop on ARM, as scheduling models of LLVM have it: nothing is run.

usage: cycles.py OBJECT FUNCTION BYTES     one loop, of which an iteration reads BYTES of weights
       cycles.py --table BUILD_DIRECTORY   all products of the AArch64 build, as docs/arm.md has them
       cycles.py --stack BUILD_DIRECTORY   fails if an inner loop of its products by dot products accesses the stack

FUNCTION is a name without namespace and parameters: row_product<WeightQ8_0, 1, 1>. Of its innermost loops the one with
the most multiply-adds counts. Needs llvm-mca and llvm-objdump from version 17 on (Debian: llvm-19), --stack only the
objdump that a cross compiler has. The model
neoverse-n1 stands for the Cortex-A76, the same core, which decodes 4 instructions a cycle; LLVM's cortex-a76 is the
older A57, its apple-m1 a core of 2013. Apple's figure is a bound: 4 vector instructions, 3 loads, 2 stores and 8
instructions a cycle.
"""

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# Heading: what llvm-mca is told.
MODELS = {
    "A76": ["-mcpu=neoverse-n1", "-dispatch=4"],
    "V1": ["-mcpu=neoverse-v1"],
    "A55": ["-mcpu=cortex-a55"],
}
ITERATIONS = 200

# Products of one instruction, integers and floats: vectors of 16 bytes.
INTEGER_MACS = [
    (r"(sdot|udot|usdot)\b", 16),
    (r"(smmla|ummla|usmmla)\b", 32),
    (r"(smull2?|smlal2?|umull2?|umlal2?)\s+v\d+\.8h", 8),
    (r"(smull2?|smlal2?)\s+v\d+\.4s", 4),
    (r"(mul|mla)\b.*\.8h", 8),
]
FLOAT_MACS = [(r"fmla\b.*\.4s", 4), (r"fmla\b.*\.2s", 2)]
VECTOR = re.compile(r"\b[vqdsh]\d+\b")

# Of --table: weight, the function of one token, that of the tile of most tokens, bytes of a weight.
PRODUCTS = [
    *(
        (
            name,
            f"row_product<Weight{name}, {{rows}}, 1>",
            rf"panel_tile<PanelKind<{group}, {has_min}, \w+, \w+, \d+>, \d, 4\b",
            bytes_of / block,
        )
        for name, bytes_of, block, group, has_min in [
            ("Q8_0", 34, 32, 32, "false"),
            ("Q4_0", 18, 32, 32, "false"),
            ("Q4_K", 144, 256, 32, "true"),
            ("Q5_K", 176, 256, 32, "true"),
            ("Q6_K", 210, 256, 16, "false"),
        ]
    ),
    *(
        (name, f"float_dots<{stored}, {{rows}}>", rf"float_p\w+_(tiles?|panels)<{stored}\b", bytes_of)
        for name, stored, bytes_of in [("F16", "Half", 2), ("BF16", "BFloat16", 2), ("F32", "float", 4)]
    ),
]


class Trouble(Exception):
    """What, where, and what to do."""


@cache
def tool(name: str) -> str:
    """The newest llvm tool there is."""
    for version in range(30, 16, -1):
        if found := shutil.which(f"{name}-{version}"):
            return found
    raise Trouble(f"cycles: no {name}-17 or newer here: install llvm-19 (apt-get install llvm-19)")


@dataclass
class Loop:
    """The instructions of one iteration, the branch last."""

    code: list[str]

    def macs(self) -> int:
        """Multiply-adds; where integers are multiplied, floats only scale their sums."""
        return self._sum(INTEGER_MACS) or self._sum(FLOAT_MACS)

    def _sum(self, counts: list[tuple[str, int]]) -> int:
        return sum(next((macs for pattern, macs in counts if re.match(pattern, line)), 0) for line in self.code)

    def spills(self) -> int:
        """Accesses to the stack."""
        return sum(bool(re.match(r"(ld|st)\w*\b.*\[sp\b", line)) for line in self.code)

    def apple_bound(self) -> float:
        loads = stores = vectors = 0
        for line in self.code:
            name = line.split()[0]
            if name.startswith("prfm"):
                loads += 1
            elif name.startswith("ld"):
                loads += 2 if name.startswith("ldp") and re.search(r"\bq\d+", line) else 1
                vectors += bool(re.search(r"\}\[|^ld1r|^ld[234]\b", line))  # into lanes: a vector instruction too
            elif name.startswith("st"):
                stores += 1
            elif VECTOR.search(line) and not re.match(r"movi\b.*#0(x0+)?$", line):
                vectors += 1
        return max(vectors / 4, loads / 3, stores / 2, len(self.code) / 8)

    def cycles(self, model: list[str]) -> float:
        assembly = "\n".join(self.code) + "\n"
        command = [tool("llvm-mca"), "-mtriple=aarch64", "-mattr=+dotprod,+i8mm", f"-iterations={ITERATIONS}"]
        command += ["-instruction-info=0", "-resource-pressure=0", "-noalias=true", *model]
        said = subprocess.run(command, input=assembly, capture_output=True, text=True)
        total = re.search(r"Total Cycles:\s+(\d+)", said.stdout)
        if not total:
            raise Trouble(f"cycles: llvm-mca {' '.join(model)} does not take this loop:\n{said.stderr}")
        return int(total[1]) / ITERATIONS


def short(name: str) -> str:
    """A demangled name without result, namespaces and parameters."""
    name = re.sub(r"slimrt::cpu::\w+::|\(anonymous namespace\)::", "", name)
    name = re.sub(r"\s*\[clone [^]]*\]", "", name)
    match = re.match(r"(?:[\w:*& ]+ )?([\w:]+(?:<.*>)?)\(", name)
    return match[1] if match else name


@cache
def functions(path: Path, gnu: str = "") -> dict[str, list[tuple[int, str]]]:
    """Of an object: each function's instructions with their addresses. gnu: a disassembler that names only one of
    several functions of the same code."""
    disassembler = [gnu] if gnu else [tool("llvm-objdump"), "--show-all-symbols"]
    command = [*disassembler, "-d", "-C", "--no-show-raw-insn", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Trouble(f"cycles: {done.stderr.strip()}")
    found: dict[str, list[tuple[int, str]]] = {}
    code: list[tuple[int, str]] = []
    for line in done.stdout.splitlines():
        if heading := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            if code:  # else: another name of the same code
                code = []
            found[short(heading[1]) + " (cold)" * (".cold" in heading[1])] = code
        elif instruction := re.match(r"\s*([0-9a-f]+):\s+(.*)$", line):
            code.append((int(instruction[1], 16), instruction[2].strip().replace("\t", " ")))
    return found


BRANCH = re.compile(r"(b(?:\.\w+)?|cbn?z|tbn?z)\s+(.*,\s*)?(?:0x)?([0-9a-f]+)$")
NOTES = re.compile(r"\s*(<.*>|//).*$")  # what a disassembler says beside an instruction
SUMS_IN_REGISTERS = re.compile(r"row_product<.*, 1>|float_dots<|panel_tile<.*, 4, |float_panel_tiles<")


def inner_loops(code: list[tuple[int, str]]) -> list[Loop]:
    """What lies between a branch backwards and where it goes, without another such, or a return, inside."""
    code = [(address, NOTES.sub("", line)) for address, line in code]
    at = {address: i for i, (address, _) in enumerate(code)}
    spans = []
    for i, (address, line) in enumerate(code):
        branch = BRANCH.match(line)
        if branch and int(branch[3], 16) <= address and int(branch[3], 16) in at:
            first = at[int(branch[3], 16)]
            if not any(line == "ret" for _, line in code[first:i]):  # else what is rarely needed goes back from the end
                spans.append((first, i))
    inner = [a for a in spans if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
    loops = []
    for first, last in inner:
        lines = [line for _, line in code[first : last + 1]]
        loops.append(Loop([BRANCH.sub(lambda b: f"{b[1]} {b[2] or ''}#-4", line) for line in lines]))
    return loops


def hottest(path: Path, names: list[str]) -> Loop:
    """Of some functions' inner loops the one with the most multiply-adds."""
    found = functions(path)
    for name in set(names) - set(found):
        like = sorted(other for other in found if other.split("<")[0] == name.split("<")[0]) or sorted(found)
        raise Trouble(f"cycles: {path} has no '{name}', but: " + "; ".join(like[:20]))
    loops = [loop for name in names for loop in inner_loops(found[name]) if loop.macs()]
    if not loops:
        raise Trouble(f"cycles: no inner loop multiplies in {path}: {'; '.join(names)}")
    return max(loops, key=Loop.macs)


def report(loop: Loop, bytes_read: float) -> str:
    lines = [f"{len(loop.code)} instructions, {loop.macs()} multiply-adds, {loop.spills()} accesses to the stack"]
    for heading, cycles in [*((name, loop.cycles(model)) for name, model in MODELS.items())] + [
        ("Apple, at least", loop.apple_bound())
    ]:
        per_byte = f"{cycles / bytes_read:8.3f} a byte" if bytes_read else ""
        lines.append(f"{heading:16}{cycles:8.1f} cycles{per_byte}{loop.macs() / cycles:8.1f} MAC a cycle")
    return "\n".join(lines)


def forms(path: Path, name: str) -> list[tuple[str, str]]:
    """What the object has of a function that takes some rows at a time, and how many those are."""
    found = [(name.format(rows=1), "")]
    if "{rows}" in name:
        found += [(name.format(rows=rows), f", {rows} rows") for rows in range(2, 9)]
    return [(form, rows) for form, rows in found if form in functions(path)]


def on_the_stack(build: Path) -> list[str]:
    """Loops that keep sums in memory, at up to half the speed: a loop behind them that is not unrolled is enough."""
    gnu = shutil.which("aarch64-linux-gnu-objdump") or ""
    found, n_loops = [], 0
    for path in sorted(build.rglob("slimrt_isa_neon_*.dir/cpu/linear*.cpp.o")):
        for name, code in functions(path, gnu).items():
            loops = [loop for loop in inner_loops(code) if loop.macs()] if SUMS_IN_REGISTERS.match(name) else []
            if loops and (spills := (loop := max(loops, key=Loop.macs)).spills()):
                found.append(f"{path.name}, {name}: {spills} accesses to the stack for {loop.macs()} multiply-adds")
            n_loops += len(loops)
    if n_loops == 0:
        raise Trouble(f"cycles: no loop of a product below {build}: build it for AArch64 first")
    return found


def table(build: Path) -> str:
    """Cycles a byte of one token, multiply-adds a cycle of many, and accesses to the stack of both."""
    objects = sorted(build.rglob("slimrt_isa_*.dir/cpu/linear*.cpp.o"))
    if not objects:
        raise Trouble(f"cycles: no slimrt_isa_*.dir/cpu/linear*.cpp.o below {build}: build it for AArch64 first")
    isas: dict[str, list[str]] = {}  # by the rest of the line: instruction sets of the same code share one
    for product, of_one, of_many, bytes_of in PRODUCTS:
        for path in objects:
            isa = path.parts[-3].removeprefix("slimrt_isa_").removesuffix(".dir")
            tiles = [name for name in functions(path) if re.match(of_many, name)]
            if not tiles:
                continue  # of an instruction set that has another's floats
            many = hottest(path, tiles)
            for form, rows in forms(path, of_one):
                one = hottest(path, [form])
                bytes_read = one.macs() * bytes_of
                cells = [f"{one.cycles(model) / bytes_read:.2f}" for model in MODELS.values()]
                cells += [f"{one.apple_bound() / bytes_read:.2f}"]
                cells += [f"{many.macs() / many.cycles(MODELS[cpu]):.1f}" for cpu in ("A76", "V1")]
                line = " | ".join([product + rows, *cells, f"{one.spills()}, {many.spills()}"])
                isas.setdefault(line, []).append(isa)
    headings = ["weights", *MODELS, "Apple, at least", "many tokens, A76: MAC a cycle", "V1"]
    headings += ["stack", "instruction sets"]
    lines = [headings, ["---"] * len(headings), *([line, ", ".join(names)] for line, names in isas.items())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    arguments = sys.argv[1:]
    try:
        if len(arguments) == 2 and arguments[0] == "--table":
            print(table(Path(arguments[1])))
        elif len(arguments) == 2 and arguments[0] == "--stack":
            found = on_the_stack(Path(arguments[1]))
            print(*found, sep="\n", end="\n" * bool(found))
            return bool(found)
        elif len(arguments) == 3:
            print(report(hottest(Path(arguments[0]), [arguments[1]]), float(arguments[2])))
        else:
            print(__doc__, file=sys.stderr)
            return 2
    except Trouble as trouble:
        print(trouble, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
