"""What products in flight read is not written: machine code is read for it, and refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from qcompile.codegen.gpu import compile as gpu_compile
from qcompile.codegen.gpu import sass
from qcompile.codegen.gpu.gemm.render import compile_for, kernel
from qcompile.codegen.gpu.gemm.spec import Experts, KernelSpec
from qcompile.codegen.gpu.gemm.tile import Tile
from qcompile.errors import UnsupportedError
from tests.support.cases import first
from tests.support.interpreted import needs_triton

CHOSEN = Experts(16, 8, True, 8 * 2048, 32)
PLAIN = (
    KernelSpec("mxfp4", 32768, 768, Tile(64, 128, 1, 1, 1, 8, 4), out="f32", width=2048, experts=CHOSEN),
    KernelSpec("w4_asym_g128", 512, 1280, Tile(128, 64, 1, 1, 1, 4, 3)),
)
"""Kernels with loops that Triton pipelines, and with weights unpacked in registers."""


SASS = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LOP3.LUT R8, R4, 0xf, R2, 0xea, !PT ;
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR8], R24, gsb0 ;
        /*0030*/                   {}
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x{} ;
        /*0050*/              @P0  BRA `(.L_x_1) ;
        /*0060*/                   EXIT ;
"""


@pytest.mark.parametrize(
    ("between", "left", "wrong"),
    [
        ("IMAD.MOV.U32 R12, RZ, RZ, R3 ;", 0, None),
        ("IMAD.MOV.U32 R11, RZ, RZ, R3 ;", 0, "IMAD.MOV.U32"),
        ("@P1  LDS.128 R8, [R3] ;", 0, "LDS.128"),
        ("LDS.64 R6, [R3] ;", 0, None),
        ("LDS.64 R7, [R3] ;", 0, "LDS.64"),
        ("STS [R8], R3 ;", 0, None),
        ("NOP ;", 1, "LOP3.LUT"),  # the next iteration writes what this one's MMA reads
    ],
)
def test_a_write_to_what_a_product_in_flight_reads_is_found(between: str, left: int, wrong: str | None) -> None:
    for product in ("HGMMA", "IGMMA"):
        result = sass.overwritten(sass.parse(SASS.format(between, left).replace("HGMMA", product)))
        assert (result and result[0]) == wrong


def test_machine_code_that_writes_what_is_in_flight_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    needs_triton()
    monkeypatch.setenv("QCOMPILE_CACHE", str(tmp_path))
    monkeypatch.setattr(sass, "overwritten", lambda code: ("MOV", "R8, R3"))
    with pytest.raises(UnsupportedError, match="lets MOV R8, R3 write what the tensor cores still read"):
        compile_for(PLAIN[1], 90)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("spec", first(PLAIN[:1], PLAIN), ids=lambda spec: spec.format)
def test_loops_that_triton_pipelines_wait_for_the_last_mma_of_an_iteration(spec: KernelSpec) -> None:
    """It reads weights where the next ones would go. Elsewhere than on sm_90 instructions see to that themselves."""
    needs_triton()
    compile_for(spec, 90)
    whole = kernel(spec)
    hasty = replace(whole, source=whole.source.replace("        acc = after_mma(acc)\n", ""))
    assert hasty.source != whole.source
    for each, left in ((whole, 0), (hasty, 1)):
        ptx = gpu_compile.build(each, 90).asm["ptx"]
        last = ptx.rindex("wgmma.mma_async")
        body = ptx[ptx.rindex("$L__BB", 0, last) : ptx.index("bra", last)]
        assert body.count("wgmma.commit_group") - body.count("wgmma.wait_group") == left
    # A pass through registers would cost those that keep sums elsewhere.
    assert all(gpu_compile.build(n, 100).asm["ttgir"].count("=f,0") == 0 for n in (whole, hasty))


def test_what_triton_pipelines_is_refused_too_where_it_does_not_wait(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    needs_triton()
    monkeypatch.setenv("QCOMPILE_CACHE", str(tmp_path))
    result = kernel(PLAIN[1])
    hasty = replace(result, source=result.source.replace("        acc = after_mma(acc)\n", ""))
    with pytest.raises(UnsupportedError, match="write what the tensor cores still read"):
        gpu_compile.compile_kernel(hasty, 90)
    assert not list(tmp_path.iterdir())
