"""What the compile gate reads in machine code and PTX."""

from __future__ import annotations

import pytest

from benchmarks.kernels import sass

CODE = """
        /*0000*/  MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/  IADD3 R2, R2, 0x1, RZ ;
        /*0020*/  ISETP.GE.AND P0, PT, R2, R3, PT ;
.L_x_1:
        /*0030*/  IADD3 R4, R4, 0x1, RZ ;
        /*0040*/  @!P1 BRA `(.L_x_1) ;
        /*0050*/  @!P0 BRA P2, `(.L_x_0) ;
        /*0060*/  @P3 BRA `(.L_x_2) ;
.L_x_2:
        /*0070*/  EXIT ;
.L_x_3:
        /*0080*/  BRA `(.L_x_3);
        /*0090*/  NOP;
        /*00a0*/  NOP;
"""


def test_loops_of_machine_code_are_counted() -> None:
    assert sass.parse(CODE) == sass.Program(9, (5, 2))


LOAD, STORE, BARRIER = "ld.global.v4.b32 {%r1}, [%rd1];", "st.global.v4.b32 [%rd2], {%r1};", "bar.sync 0;"


@pytest.mark.parametrize(
    ("step", "unordered"),
    [
        ([LOAD, LOAD, BARRIER, STORE, STORE], False),
        ([LOAD, STORE], True),
        ([BARRIER, LOAD, STORE], True),
        ([LOAD, BARRIER, LOAD, STORE], True),
        ([LOAD, STORE, BARRIER, STORE], True),
        ([LOAD, BARRIER], True),
    ],
)
def test_stores_before_a_barrier_are_seen(step: list[str], unordered: bool) -> None:
    ptx = "\n".join(["ld.param.b64 %rd1;", "$L__BB0_1:", *step, "bra $L__BB0_1;", "$L__BB0_2:", STORE])
    assert sass.writes_before_all_is_read(ptx) == unordered
