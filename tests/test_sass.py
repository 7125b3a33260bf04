# SPDX-License-Identifier: Apache-2.0
"""tests/sass.py: which loop an instruction is in, and what is counted there, on listings as nvdisasm writes them."""

from __future__ import annotations

import pytest

import sass

pytestmark = pytest.mark.unsanitized

COPIES = """
        S2R R0, SR_TID.X ;
        I2F.RP R1, R2 ;
.L_x_1:
        IADD3 R4, R4, 0x10, RZ ;
        LDGSTS.E.BYPASS.128 [R3], [R4.64] ;
        LDGSTS.E.BYPASS.128 [R3+0x100], [R4.64+0x100] ;
        @P1 BRA `(.L_x_3) ;
.L_x_2:
        @P0 BRA `(.L_x_1) ;
        BRA.DIV ~URZ, `(.L_x_4) ;
        EXIT ;
.L_x_3:
        IADD3 R5, R5, 0x1, RZ ;
        BRA `(.L_x_2) ;
.L_x_4:
        CALL.REL.NOINC `($__internal_0_$__cuda_sm20_div_s64) ;
        BRA `(.L_x_1) ;
"""


def code(listing: str) -> sass.Code:
    lines = enumerate(listing.strip("\n").splitlines())
    return sass.Code("\n".join(line if line.startswith(".L") else f"        /*{i:04x}*/ {line}" for i, line in lines))


def with_line(line: str, after: str, listing: str = COPIES) -> dict[str, float]:
    at = listing.index(after) + len(after)
    measured = sass.measure(code(f"{listing[:at]}\n        {line} ;{listing[at:]}"))
    assert measured
    return measured


def test_a_loop_has_what_lies_elsewhere_too_and_nothing_before_or_after_it():
    """Seven instructions, two of them behind its end; not the call where only a warp goes that has diverged."""
    assert sass.measure(code(COPIES)) == {"mma": 0, "copy": 3.5, "local": 0, "fence": 0, "call": 0, "divide": 0}


@pytest.mark.parametrize(
    ("column", "line"),
    [
        ("local", "STL.64 [R1+0x8], R2"),
        ("local", "LDL.LU R2, [R1]"),
        ("fence", "MEMBAR.ALL.GPU"),
        ("fence", "MEMBAR.SC.GPU"),
        ("fence", "CCTL.IVALL"),
        ("call", "CALL.REL.NOINC `($__internal_0_$__cuda_sm20_div_s64)"),
        ("divide", "I2F.U32.RP R1, R2"),
        ("divide", "I2F.RP R1, R2"),
    ],
)
def test_what_a_loop_should_not_have(column, line):
    assert with_line(line, "IADD3 R4, R4, 0x10, RZ ;")[column] == 1
    assert with_line(line, "IADD3 R5, R5, 0x1, RZ ;")[column] == 1
    assert with_line(line, "S2R R0, SR_TID.X ;")[column] == 0
    assert with_line(line, "IADD3 R4, R4, 0x10, RZ ;")["copy"] == 4


WARPSYNC = "CALL.REL.NOINC `($__internal_4_$__cuda_sm70_warpsync)"


@pytest.mark.parametrize("line", ["MEMBAR.ALL.CTA", "I2F.S8 R1, R2", WARPSYNC])
def test_what_it_may_have(line):
    measured = with_line(line, "IADD3 R4, R4, 0x10, RZ ;")
    assert [measured[column] for column in sass.COLD] == [0, 0, 0, 0]


def test_loops_within_loops():
    """Products are their loop's, what a loop should not have is also that of the loop around it."""
    measured = sass.measure(
        code("""
.L_x_1:
        HMMA.16816.F32 R4, R8, R12, R4 ;
.L_x_2:
        STL [R1], R2 ;
        @P0 BRA `(.L_x_2) ;
        @P1 CALL.REL.NOINC `(.L_x_3) ;
        BRA `(.L_x_1) ;
.L_x_3:
        CCTL.IVALL ;
        EXIT ;
""")
    )
    assert measured == {"mma": 3, "copy": 0, "local": 1, "fence": 0, "call": 0, "divide": 0}


def test_branches_by_tables():
    measured = sass.measure(
        code("""
.L_x_1:
        BRX R2 -0x10 (*"BRANCH_TARGETS .L_x_2,.L_x_3"*) ;
.L_x_2:
        IMMA.16832.S8.S8 R4, R8.ROW, R12.COL, R4 ;
.L_x_3:
        @!P0 BRA `(.L_x_1) ;
        EXIT ;
""")
    )
    assert measured and measured["mma"] == 3


def test_more_than_a_budget_is_told():
    budget = {"sm_80 a": {"registers": 64.0, "copy": 9.5}}
    assert sass.worse({"sm_80 a": {"registers": 63, "copy": 9.5}, "sm_89 a": {"copy": 10}}, budget) == []
    assert sass.worse({"sm_80 a": {"registers": 64, "copy": 9.6}}, budget) == ["sm_80 a: copy 9.6, may be 9.5"]
