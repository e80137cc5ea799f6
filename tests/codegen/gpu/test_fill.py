"""Padding of the activations that GPU GEMMs read: nothing else may lie there, as a NaN times a zero weight is a NaN."""

from __future__ import annotations

import pytest

from qcompile.codegen.calls import Gemm
from qcompile.codegen.program import Program
from tests.support.graphs import decoder
from tests.support.lowering import gpu_program


def shared(program: Program) -> list[str]:
    """Float buffers that GEMMs read past their width, and that share memory with another kind of buffer."""
    read = {call.x for call in program.calls if isinstance(call, Gemm)}
    result = []
    for name in sorted(read):
        x = program.buffer(name)
        if x.dtype == "q8" or x.width == x.stride:
            continue
        others = (b for b in program.buffers if b.rows == x.rows and (b.dtype, b.width) != (x.dtype, x.width))
        if any(b.offset < x.offset + x.row_bytes and x.offset < b.offset + b.row_bytes for b in others):
            result.append(name)
    return result


@pytest.mark.parametrize("recipe", ["bf16", "w4a16"])
def test_padding_of_floats_is_nothing_elses_memory(recipe: str) -> None:
    program = gpu_program(decoder(hidden=48), recipe)[1]
    odd = [b for b in program.buffers if b.width == 48 and b.dtype == "bf16"]
    assert odd and not shared(program)
