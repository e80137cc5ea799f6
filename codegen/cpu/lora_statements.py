"""C++ statements of the calls for adapters: calls of the kernels in templates/lora.h."""

from __future__ import annotations

from typing import Protocol

from qcompile.codegen.cpu.barriers import Barriers
from qcompile.codegen.cpu.cpp import gate_kind, ident, unary_kind
from qcompile.codegen.lora_calls import GateRows, LoraExpand, LoraShrink, adapted
from qcompile.codegen.program import Program

_FACTORS = {"f32": "float", "bf16": "uint16_t"}


class Writing(Protocol):
    """What is needed of Statements."""

    program: Program
    barriers: Barriers
    gates: dict[str, None]

    def mine(self, name: str) -> str: ...


def lora_shrink(statements: Writing, call: LoraShrink, _: int) -> list[str]:
    """A x of the rows that have adapters, split over the threads by rows."""
    program = statements.program
    where = f"lora, {call.site}, b, share(b.tokens, s.w), {ident(call.x)}, {call.k}"
    out = f"s.w, {ident(call.out)}, {program.buffer(call.out).stride}"
    return [
        f"const bool {adapted(call.site)} = lora_active(lora, {call.site}, b);",
        f"if ({adapted(call.site)}) lora_shrink<{_FACTORS[call.factors]}>({where}, {out});",
    ]


def lora_expand(statements: Writing, call: LoraExpand, _: int) -> list[str]:
    """What adapters add, split over the threads by columns."""
    x, out = statements.program.buffer(call.x), statements.program.buffer(call.out)
    where = f"lora, {call.site}, b, share({-(-out.width // 16)}, s.w), {ident(call.x)}, {x.stride}"
    return [
        f"if ({adapted(call.site)}) lora_expand<{_FACTORS[call.factors]}>({where}, {ident(call.out)}, {out.stride});"
    ]


def gate_rows(statements: Writing, call: GateRows, index: int) -> list[str]:
    """The gate over what a gemm and adapters computed, unless the gemm has computed it."""
    program = statements.program
    x, out = program.buffer(call.x), program.buffer(call.out)
    where = f"{statements.mine(call.out)}, {ident(call.x)}, {x.stride}, {out.width}, {ident(call.out)}"
    line = f"gate_rows<{unary_kind(call.kind)}>({where});"
    return [f"if ({adapted(call.site)}) {line}" if statements.barriers.gate_of(index - 2) else line]


def gated_by(statements: Writing, gate: GateRows, gemm: str) -> list[str]:
    """Let the gemm in the C++ variable `gemm` compute `gate` if no row has an adapter."""
    out = statements.program.buffer(gate.out)
    how = f"{gemm}.epilogue = kGated, {gemm}.act = {gate_kind(gate.kind, statements.gates)}"
    lines = [f"{how}, {gemm}.out = {ident(out.name)}, {gemm}.out_stride = {out.stride};"]
    if out.width != out.stride:
        lines.append(f"pad_rows({statements.mine(out.name)}, {ident(out.name)}, {out.width});")
    return [f"if (!{adapted(gate.site)}) {{", *(f"  {line}" for line in lines), "}"]
