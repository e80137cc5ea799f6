"""Render a Program to C++: one self-contained source text that becomes the artifact's library.

The kernels are ordinary headers in templates/, included as text. What depends on the model is in model.cpp.jinja and in
the statements of each call (statements.py), with a barrier between calls where threads must wait (barriers.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from qcompile.artifact.abi import CPU_ABI
from qcompile.artifact.layout import ADAPTER_TABLE
from qcompile.codegen.buffers import PAD, Buffer
from qcompile.codegen.calls import AllReduce, Embed, ExpertGemm, Gemm
from qcompile.codegen.cpu import flow
from qcompile.codegen.cpu.barriers import Barriers
from qcompile.codegen.cpu.cpp import code_range, f32, ident, rows_kind, string
from qcompile.codegen.cpu.headers import Headers
from qcompile.codegen.cpu.statements import Statements, rope_stride
from qcompile.codegen.feature_calls import only_for_features
from qcompile.codegen.program import Program
from qcompile.codegen.sizes import round_up
from qcompile.codegen.state_calls import RecurrenceStep
from qcompile.errors import UnsupportedError
from qcompile.formats.registry import weight_format
from qcompile.formats.states import LOG_TOKENS
from qcompile.targets import Target

MAX_HEAD_DIM = 1024
FEW_ELEMENTS = 12288
"""Rowwise work of up to this many elements is computed redundantly by every thread instead of split plus a barrier.

A barrier and the other threads' rows take 0.5 to 1.5 us without a shared cache; a norm does 512 elements in 0.15 us.
"""
OWN_ROWS = 64
"""Capacity, in rows, of a thread's private copies of buffers."""
_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class _RenderedCall:
    """The statements of a call, the condition for a barrier after it, and whether only outputs follow from it on.

    hidden: the buffer and the width of its inputs, if these are the model's final hidden states.
    """

    name: str
    lines: tuple[str, ...]
    sync: str
    first_output: bool
    hidden: tuple[str, int] | None


def render(program: Program, target: Target) -> str:
    """The C++ source of `program`'s library for `target`.

    Raises UnsupportedError naming the call when a shape has no kernel.
    """
    if program.kv.head_dim > MAX_HEAD_DIM:
        raise UnsupportedError(
            f"head dimension {program.kv.head_dim} is above {MAX_HEAD_DIM}, the most there are kernels for"
        )
    program = flow.separate_buffers(program)
    barriers = Barriers(program)
    statements = Statements(program, barriers)
    calls = _rendered_calls(program, barriers, statements)
    return (
        _environment()
        .get_template("model.cpp.jinja")
        .render(
            program=program,
            target=target,
            calls=calls,
            description=_description(program, target),
            kv_format=program.kv.kind.cpu_latent if program.kv.value else program.kv.kind.cpu_name,
            format_headers=_format_headers(program),
            call_headers=tuple(statements.headers),
            gates=tuple(statements.gates),
            headers=Headers(_TEMPLATES),
            ident=ident,
            place=lambda buffer: _place(buffer, barriers),
            share_conditions=barriers.conditions,
            lora_table=statements.index.get(ADAPTER_TABLE),
            **_sums(program),
            **_sizes(program, statements),
        )
    )


def _format_headers(program: Program) -> list[str]:
    """Headers of weight formats that gemm.h does not include, in order."""
    formats = [weight_format(c.format) for c in program.calls if isinstance(c, Gemm | ExpertGemm)]
    return list(dict.fromkeys(header for format in formats for header in format.cpu_headers))


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(f32=f32, round_up=round_up, c_string=string)
    return environment


def _rendered_calls(program: Program, barriers: Barriers, statements: Statements) -> list[_RenderedCall]:
    outputs = [flow.writes_outputs(program, call) for call in program.calls]
    features = only_for_features(program.calls)
    rendered = []
    for index, call in enumerate(program.calls):
        first = outputs[index] and all(outputs[index:]) and not any(outputs[:index])
        hidden = (call.x, call.k) if isinstance(call, Gemm) and call.name == program.head else None
        lines = statements.of(index)
        if index in features:
            lines = ["if (m.features) {", *(f"  {line}" for line in lines), "}"]
        rendered.append(_RenderedCall(call.name, tuple(lines), barriers.after(index), first, hidden))
    return rendered


def _hidden_width(program: Program) -> int:
    """Width of the final hidden states that the library can give; 0 if it cannot."""
    return next((call.k for call in program.calls if isinstance(call, Gemm) and call.name == program.head), 0)


def _sums(program: Program) -> dict[str, Any]:
    """The sums over ranks: the calls, floats of the widest row, and whether one has only rows with logits."""
    sums = [call for call in program.calls if isinstance(call, AllReduce)]
    buffers = [program.buffer(call.x) for call in sums]
    widest = max((buffer.stride for buffer in buffers), default=0)
    return {"sums": sums, "sum_floats": widest, "late_sums": any(buffer.rows == "outputs" for buffer in buffers)}


def _sizes(program: Program, statements: Statements) -> dict[str, Any]:
    """Sizes of scratch memory and of private copies, and the tables of cos and sin."""
    experts = [call for call in program.calls if isinstance(call, ExpertGemm)]
    widths = [b.width for b in program.buffers] + [c.k for c in program.calls if isinstance(c, Gemm | ExpertGemm)]
    widest = max(round_up(width, PAD) for width in widths)
    tables = list(statements.ropes.values())
    return {
        "state_keys": max((call.key_dim for call in program.calls if isinstance(call, RecurrenceStep)), default=0),
        "logged_rows": LOG_TOKENS,
        "few_rows": min(OWN_ROWS, max(1, FEW_ELEMENTS // widest)),
        "own_rows": OWN_ROWS,
        "widest": widest,
        "expert_k": max((call.k for call in experts), default=0),
        "expert_n": max((call.rows for call in experts), default=0),
        "hidden_width": _hidden_width(program),
        "embed_width": _embed_width(program),
        "rope_tables": tables,
        "rope_floats": tables[-1].offset + rope_stride(tables[-1].rotary_dim) if tables else 0,
    }


def _description(program: Program, target: Target) -> str:
    """What qc_describe returns."""
    kv, sums = program.kv, _sums(program)
    data = {
        "abi": CPU_ABI,
        "isa": target.isa,
        "vocab_size": program.vocab_size,
        "max_position": program.max_position,
        "weights": len(program.weights),
        "embed_width": _embed_width(program),
        "hidden_width": _hidden_width(program),
        **({"features": program.features} if program.features else {}),
        "kv": {
            "format": kv.format,
            "layers": kv.layers,
            "page_tokens": kv.page_tokens,
            "page_bytes": kv.page_bytes,
            **({"ring_tokens": kv.ring_tokens} if kv.hierarchical else {}),
        },
        "calls": [call.name for call in program.calls],
        **({"slot_bytes": program.states.slot_bytes} if program.states.layers else {}),
        **({"sum_floats": sums["sum_floats"], "ranks": sums["sums"][0].ranks} if sums["sums"] else {}),
        **({"plans_embeds": True} if sums["sums"] and _embed_width(program) else {}),
    }
    return json.dumps(data, sort_keys=True)


def _embed_width(program: Program) -> int:
    """Width of embeddings that rows may have in place of those of their tokens; 0 if they cannot."""
    return next((program.buffer(c.out).width for c in program.calls if isinstance(c, Embed) and c.given), 0)


def _place(buffer: Buffer, barriers: Barriers) -> str:
    """The C++ expression for a buffer's address."""
    where = f"{rows_kind(buffer)}, {buffer.offset}, {barriers.is_own(buffer.name)}"
    if buffer.dtype == "q8":
        kind = buffer.kind
        how = f"{buffer.group}, {kind.group or buffer.stride}, {code_range(kind)}"
        return f"s.q8({where}, {buffer.stride}, {{{how}}})"
    return f"s.rows<{'float' if buffer.dtype == 'f32' else 'uint16_t'}>({where})"
