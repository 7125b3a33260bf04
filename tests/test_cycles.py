# SPDX-License-Identifier: Apache-2.0
"""tools/cycles.py: what it takes for the inner loop, and what it counts there. Models are LLVM's."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PATH = ROOT / "tools" / "cycles.py"
spec = importlib.util.spec_from_file_location("cycles", PATH)
cycles = importlib.util.module_from_spec(spec)
sys.modules["cycles"] = cycles  # dataclasses look there
spec.loader.exec_module(cycles)

NESTED = [
    (0x00, "mov x0, #0x0"),
    (0x04, "ldp q0, q1, [x1], #0x20"),
    (0x08, "sdot v2.4s, v0.16b, v1.16b"),
    (0x0C, "str q2, [sp, #0x10]"),
    (0x10, "b.ne 0x4 <f+0x4>"),
    (0x14, "fmla v3.4s, v2.4s, v4.4s"),
    (0x18, "cbnz x2, 0x0 <f>"),
    (0x1C, "ret"),
]


def test_the_loop_is_the_innermost():
    [loop] = cycles.inner_loops(NESTED)
    assert loop.code == ["ldp q0, q1, [x1], #0x20", "sdot v2.4s, v0.16b, v1.16b", "str q2, [sp, #0x10]", "b.ne #-4"]
    assert loop.macs() == 16 and loop.spills() == 1
    assert loop.apple_bound() == pytest.approx(2 / 3)  # two loads of three a cycle


def test_what_returns_is_no_loop():
    [loop] = cycles.inner_loops(
        [*NESTED[:7], (0x1C, "ret"), (0x20, "fmla v0.4s, v1.4s, v2.4s"), (0x24, "b 0x14 <f+0x14>")]
    )
    assert loop.code[0] == "ldp q0, q1, [x1], #0x20"


@pytest.mark.parametrize(
    ("code", "macs"),
    [
        (["smmla v0.4s, v1.16b, v2.16b", "fmla v0.4s, v1.4s, v2.4s"], 32),  # floats only scale
        (["fmla v0.4s, v1.4s, v2.s[1]", "fmla v0.4s, v1.4s, v2.4s"], 8),
        (["smull v0.8h, v1.8b, v2.8b", "smlal2 v0.8h, v1.16b, v2.16b", "mla v0.8h, v1.8h, v2.8h"], 24),
        (["smlal v0.4s, v1.4h, v2.4h", "smlal2 v0.4s, v1.8h, v2.8h"], 8),  # by what they add to
        (["sdot v0.4s, v1.16b, v2.4b[3]", "ldr q0, [x0]"], 16),
    ],
)
def test_multiply_adds(code, macs):
    assert cycles.Loop(code).macs() == macs


def test_names_without_namespace_and_parameters():
    name = "void slimrt::cpu::neon::row_product<slimrt::cpu::neon::WeightQ8_0, 1, 1>(unsigned char const*, long)"
    assert cycles.short(name) == "row_product<WeightQ8_0, 1, 1>"
    assert cycles.short("slimrt::cpu::neon::busy(unsigned int, long, float*)") == "busy"
    inner = "void (anonymous namespace)::score_head<(anonymous namespace)::RowsOf<slimrt::cpu::neon::Half> >(long)"
    assert cycles.short(inner) == "score_head<RowsOf<Half> >"


def test_the_table_names_functions_and_types_of_the_sources():
    kernels = ROOT / "csrc" / "kernels" / "cpu"
    sources = "\n".join(path.read_text() for path in sorted(kernels.glob("linear*.h")))
    types = sources + (kernels / "simd.h").read_text()
    for weight, of_one, of_many, _ in cycles.PRODUCTS:
        function, stored = re.match(r"(\w+)<(\w+)", of_one).groups()
        assert re.search(rf"\b{function}\(", sources), of_one
        assert stored == "float" or f"struct {stored} {{" in types, of_one
        if kind := re.match(r"panel_tile<PanelKind<(\d+), (\w+)", of_many):
            body = sources.split(f"struct Weight{weight} {{")[1].split("};")[0]
            assert f"group = {kind[1]}," in body and f"has_min = {kind[2]}," in body, weight
            assert re.search(r"\bpanel_tile\(const Panel<Kind, V, Ops>", sources)
