"""Activation buffers that need memory of their own on GPUs: rows padded to whole blocks of K, and routers' results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from qcompile.codegen.buffers import Buffer
from qcompile.codegen.calls import Gemm, Route
from qcompile.codegen.program import Program
from qcompile.codegen.sizes import round_up
from qcompile.formats.registry import gpu_packing, packing_of, weight_format

ALIGNMENT = 64
"""Buffers begin at multiples of this many bytes per row."""


def padded_program(program: Program) -> Program:
    """`program` with the buffers that GEMMs read padded to the K of their packed weights.

    Padded buffers lie behind all others, where nothing else is written, so that their padding keeps the zeros of new
    memory. Padded buffers of the same kind share memory if their lifetimes are disjoint. Results of routers lie there
    too: fused steps of a router must not store where another step reads.
    """
    strides = {call.out: program.buffer(call.out).stride for call in program.calls if isinstance(call, Route)}
    strides |= _strides(program)
    end = {"tokens": program.arena_bytes("tokens"), "outputs": program.arena_bytes("outputs")}
    free: dict[tuple[object, ...], list[tuple[int, int]]] = {}  # (last use, offset) by kind of buffer
    moved: dict[str, Buffer] = {}
    for name, stride in strides.items():
        first, last = _life(program, name)
        b = program.buffer(name)
        b = replace(b, pad=stride, group=stride if b.group >= b.width else b.group)  # one sum per row stays one
        places = free.setdefault((b.rows, b.dtype, b.activation, b.width, b.group, b.stride), [])
        offset = next((at for until, at in places if until < first), None)
        if offset is None:
            offset = round_up(end[b.rows], ALIGNMENT)
            end[b.rows] = offset + b.row_bytes
        else:
            places[:] = [place for place in places if place[1] != offset]
        places.append((last, offset))
        moved[name] = replace(b, offset=offset)
    return replace(program, buffers=tuple(moved.get(b.name, b) for b in program.buffers))


def _strides(program: Program) -> Mapping[str, int]:
    """The padded widths of buffers that need padding, in the order in which they are read."""
    strides: dict[str, int] = {}
    for call in program.calls:
        if isinstance(call, Gemm) and not weight_format(call.format).gpu.row_major:
            x = program.buffer(call.x)
            packing = call.packing or packing_of(call.format, x.activation if x.dtype == "q8" else x.dtype)
            stride = gpu_packing(packing).padded_inputs(call.k)
            # Integers at the padding are multiplied with codes of zero. Floats may be NaN, which zero does not hide.
            shared_padding = x.dtype != "q8" and x.width < stride
            if stride != x.stride or shared_padding:
                strides[x.name] = max(strides.get(x.name, 0), stride)
    return strides


def _life(program: Program, buffer: str) -> tuple[int, int]:
    """The first and the last call that uses a buffer; consecutive steps of a router count as the first of them."""
    places = [place for place, call in enumerate(program.calls) if buffer in call.reads or buffer in call.writes]
    first = places[0]
    while first and isinstance(program.calls[first], Route) and isinstance(program.calls[first - 1], Route):
        first -= 1
    return first, places[-1]
