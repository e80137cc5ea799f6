"""Render a Program to C++: one self-contained source text that becomes the artifact's library.

The kernels are ordinary headers in templates/cpu, included as text. Everything that depends on the model is in
model.cpp.jinja and in the statements that `_Renderer` writes for each call of the program.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from qcompile.artifact.abi import CPU_ABI
from qcompile.codegen import program as p
from qcompile.codegen.cpu import flow
from qcompile.errors import UnsupportedError
from qcompile.formats.activations import activation_format
from qcompile.formats.registry import weight_format
from qcompile.ops import GATED
from qcompile.targets import Target

MAX_HEAD_DIM = 1024
_TEMPLATES = Path(__file__).parent / "templates"
_INCLUDE = re.compile(r'^#include "(?P<name>[\w.]+)"$')
_KV = {"kv32": "kKv32", "kv16": "kKv16", "kv8": "kKv8", "kv4": "kKv4", "kv_hier": "kKvHier", "kv_hier4": "kKvHier4"}
_UNARY = {
    "silu": "kSilu",
    "gelu": "kGelu",
    "gelu_tanh": "kGeluTanh",
    "gelu_quick": "kGeluQuick",
    "relu": "kRelu",
    "relu2": "kRelu2",
    "tanh": "kTanh",
    "sigmoid": "kSigmoid",
    "mish": "kMish",
    "elu": "kElu",
}
_ROLE_TYPES = {"scale": "float", "columns": "int32_t", "starts": "int32_t"}
"""C++ element type of packed weight parts by role; uint8_t for the others."""
_EPILOGUE = {"store": "kStore", "logits": "kLogits", "add": "kAdd"} | dict.fromkeys(GATED, "kGated")
FEW_ELEMENTS = 12288
"""Rowwise work of up to this many elements is computed redundantly by every thread instead of split plus a barrier.

A barrier and the other threads' rows take 0.5 to 1.5 us without a shared cache; a norm does 512 elements in 0.15 us.
"""
OWN_ROWS = 64
"""Capacity, in rows, of a thread's private copies of buffers."""


def render(program: p.Program, target: Target) -> str:
    """The C++ source of `program`'s library for `target`.

    Raises UnsupportedError naming the call when a shape has no kernel.
    """
    return _Renderer(program, target).text()


@dataclass(frozen=True)
class _RopeTable:
    """A table of cos and sin shared by all layers with the same rotation; `offset` is in floats per token."""

    name: str
    offset: int
    weight: int
    rotary_dim: int
    scaling: float


@dataclass(frozen=True)
class _RenderedCall:
    name: str
    lines: tuple[str, ...]
    sync: str
    first_output: bool


class _Renderer:
    def __init__(self, program: p.Program, target: Target) -> None:
        program = flow.separate_buffers(program)
        self.program, self.target = program, target
        self.index = {name: i for i, name in enumerate(program.weights)}
        self.own = flow.own_buffers(program)
        self.shares = {i: share for i in range(len(program.calls)) if (share := flow.producer_share(program, i))}
        conditions = dict.fromkeys(share.condition for share in self.shares.values())
        self.conditions = {condition: f"own_columns{number}" for number, condition in enumerate(conditions)}
        self.widest = max(p.round_up(width, p.PAD) for width in _widths(program))
        self.few_rows = min(OWN_ROWS, max(1, FEW_ELEMENTS // self.widest))
        self.ropes: dict[tuple[str, int, float], _RopeTable] = {}
        if program.kv.head_dim > MAX_HEAD_DIM:
            raise UnsupportedError(
                f"head dimension {program.kv.head_dim} is above {MAX_HEAD_DIM}, the most there are kernels for"
            )

    def text(self) -> str:
        """The whole source."""
        env = Environment(
            loader=FileSystemLoader(_TEMPLATES),
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        env.filters.update(f32=_f32, round_up=p.round_up, c_string=_c_string)
        calls = [self.call(i, call) for i, call in enumerate(self.program.calls)]
        tables = list(self.ropes.values())
        last = tables[-1] if tables else None
        return env.get_template("model.cpp.jinja").render(
            program=self.program,
            target=self.target,
            calls=calls,
            rope_tables=tables,
            rope_floats=last.offset + _rope_stride(last.rotary_dim) if last else 0,
            kv_format=_KV[self.program.kv.format],
            few_rows=self.few_rows,
            own_rows=OWN_ROWS,
            widest=self.widest,
            expert_k=max((c.k for c in self.program.calls if isinstance(c, p.ExpertGemm)), default=0),
            expert_n=max((c.rows for c in self.program.calls if isinstance(c, p.ExpertGemm)), default=0),
            description=self.description(),
            curved=any(isinstance(c, p.Elementwise) and c.kind == "xielu" for c in self.program.calls),
            headers=_Headers(),
            ident=_ident,
            place=self.place,
            share_conditions=self.conditions,
        )

    def description(self) -> str:
        """What qc_describe returns."""
        kv = self.program.kv
        data = {
            "abi": CPU_ABI,
            "isa": self.target.isa,
            "vocab_size": self.program.vocab_size,
            "max_position": self.program.max_position,
            "weights": len(self.program.weights),
            "kv": {
                "format": kv.format,
                "layers": kv.layers,
                "page_tokens": kv.page_tokens,
                "page_bytes": kv.page_bytes,
                **({"ring_tokens": kv.ring_tokens} if kv.hierarchical else {}),
            },
            "calls": [call.name for call in self.program.calls],
        }
        return json.dumps(data, sort_keys=True)

    def place(self, buffer: p.Buffer) -> str:
        """The C++ expression for a buffer's address."""
        where = f"{_kind(buffer)}, {buffer.offset}, {self.is_own(buffer.name)}"
        if buffer.dtype == "q8":
            kind = buffer.kind
            how = f"{buffer.group}, {kind.group or buffer.stride}, {_f32(kind.top)}, {_f32(kind.last_top)}"
            return f"s.q8({where}, {buffer.stride}, {{{how}}})"
        return f"s.rows<{'float' if buffer.dtype == 'f32' else 'uint16_t'}>({where})"

    def is_own(self, name: str) -> str:
        """The C++ condition for private copies of a buffer when rows are few: not where its columns are split."""
        made = next((i for i in self.shares if name in self.program.calls[i].writes), None)
        return f"!{self.producer_condition(made)}" if made is not None and name in self.own else _bool(name in self.own)

    def producer_condition(self, index: int) -> str:
        """The C++ name of the condition under which the producer threads quantize their columns in call `index`."""
        return self.conditions[self.shares[index].condition]

    def call(self, index: int, call: p.Call) -> _RenderedCall:
        """The statements of one call, and the condition for a barrier after it."""
        write: Callable[..., list[str]] = getattr(self, f"_{call.kernel}")
        numbered = p.Gemm | p.Attention | p.ExpertGemm | p.Quantize
        lines = write(call, index) if isinstance(call, numbered) else write(call)
        calls = self.program.calls
        outputs = [flow.writes_outputs(self.program, c) for c in calls]
        first = outputs[index] and all(outputs[index:]) and not any(outputs[:index])
        return _RenderedCall(call.name, tuple(lines), self.sync(index), first)

    def sync(self, index: int) -> str:
        """The C++ condition for a barrier after call `index`: none after what each thread computed for itself."""
        calls = self.program.calls
        call = calls[index]
        if index + 1 == len(calls):
            return "false"  # the step ends with a barrier
        if isinstance(call, p.RopeAppend):
            return "!s.by_head()" if isinstance(calls[index + 1], p.Attention) else "true"
        if self._by_head(index):
            return "!s.by_head()"
        if index + 1 in self.shares:
            return f"!{self.producer_condition(index + 1)}"
        private = [name for name in call.writes if name in self.own]
        if private and not self._overwritten_early(index):
            shared = f"{self.producer_condition(index)} || " if index in self.shares else ""
            return f"{shared}!s.few[{_kind(self.program.buffer(private[0]))}]"
        return "true"

    def _by_head(self, index: int) -> bool:
        """Whether call `index` computes q, k and v such that each thread can compute those of its own heads.

        The thread then proceeds to their attention without a barrier, unless that overwrites what others still read.
        """
        call, rope = self.program.calls[index], self._rope_after(index)
        if rope is None or not isinstance(call, p.Gemm) or call.blocks or call.out != rope.qkv or rope.head_dim % 32:
            return False
        attention = self.program.calls[index + 2]
        if not isinstance(attention, p.Attention) or attention.q != rope.qkv:
            return False
        ends = (rope.q_offset, rope.k_offset, rope.v_offset, call.n)
        widths = [end - start for start, end in pairwise(ends)]
        each = [heads * rope.head_dim for heads in (rope.heads, rope.kv_heads, rope.kv_heads)]
        if rope.q_offset or widths != each or call.epilogue != "store":
            return False
        return not self._overwritten_early(index)

    def _rope_after(self, index: int) -> p.RopeAppend | None:
        """The call after `index` if it is a RopeAppend."""
        after = self.program.calls[index + 1 : index + 2]
        return after[0] if after and isinstance(after[0], p.RopeAppend) else None

    def _overwritten_early(self, index: int) -> bool:
        """Whether, without a barrier after call `index`, a faster thread may overwrite what the call still reads."""
        call = self.program.calls[index]
        # Private buffers are safe: with few rows each thread has a copy, otherwise a barrier follows.
        shared = isinstance(call, p.Gemm)
        read = [self.program.buffer(name) for name in call.reads if shared or name not in self.own]
        for place, call in enumerate(self.program.calls[index + 1 :], start=index + 1):
            written = [self.program.buffer(name) for name in call.writes if name not in self.own]
            if any(flow.overlap(target, source) for target in written for source in read):
                return True
            if not call.writes or (written and not (self._by_head(place) or isinstance(call, p.RopeAppend))):
                return False  # a barrier follows this call, or it ends the step
            read += [self.program.buffer(name) for name in call.reads if name not in self.own]
        return False

    # ---- statements, one method per kernel --------------------------------------------------------

    def weight(self, name: str | None, ctype: str = "float") -> str:
        """The C++ expression for a weight's address (nullptr for None)."""
        return "nullptr" if name is None else f"s.weight<{ctype}>({self.index[name]})"

    def mine(self, name: str) -> str:
        """The C++ expression for the rows of buffer `name` that this thread computes."""
        return f"s.mine({_kind(self.program.buffer(name))}, {_bool(name in self.own)})"

    def _embed(self, c: p.Embed) -> list[str]:
        ids = "b.token_ids" if c.index == "tokens" else "b.positions"
        table = self.weight(c.table, "float" if c.table_dtype == "f32" else "uint16_t")
        width = self.program.buffer(c.out).width
        return [f"embed({self.mine(c.out)}, {ids}, {table}, {width}, {_f32(c.scale)}, {_ident(c.out)});"]

    def _norm(self, c: p.Norm) -> list[str]:
        kind = {"rms": "kRms", "layer": "kLayer"}[c.kind]
        x, width = self.program.buffer(c.x), self.program.buffer(c.out).width
        where = f"{_ident(c.x)} + {c.x_offset}, {x.stride}, {_bool(x.width != width)}, {width}"
        weights = f"{self.weight(c.weight)}, {self.weight(c.bias)}, {_f32(c.eps)}"
        return [f"norm<{kind}>({self.mine(c.out)}, {where}, {weights}, s.w, {_ident(c.out)});"]

    def _gather(self, c: p.Gather) -> list[str]:
        places = zip(c.sources, c.offsets, c.widths, strict=True)
        from_ = [f"{{{_ident(x)} + {at}, {self.program.buffer(x).stride}, {width}}}" for x, at, width in places]
        index, width = self.weight(c.index, "int32_t"), self.program.buffer(c.out).width
        return [f"gather({self.mine(c.out)}, {{{', '.join(from_)}}}, {index}, {width}, {_ident(c.out)});"]

    def _norm_heads(self, c: p.NormHeads) -> list[str]:
        kind = {"rms": "kRms", "layer": "kLayer"}[c.kind]
        where = f"{_ident(c.x)}, {self.program.buffer(c.x).stride}, {c.x_offset}, {c.heads}, {c.width}"
        weights = f"{self.weight(c.weight)}, {self.weight(c.bias)}, {c.width if c.by_head else 0}, {_f32(c.eps)}"
        return [f"norm_heads<{kind}>({self.mine(c.x)}, {where}, {weights});"]

    def _quantize(self, c: p.Quantize, index: int) -> list[str]:
        width = self.program.buffer(c.x).width
        line = f"quantize({self.mine(c.out)}, {_ident(c.x)}, {width}, {_ident(c.out)});"
        if index not in self.shares:
            return [line]
        share = f"b.tokens, {self.shares[index].range}"
        return [
            f"if ({self.producer_condition(index)}) quantize_share({share}, {_ident(c.x)}, {width}, {_ident(c.out)});",
            f"else {line}",
        ]

    def _hadamard(self, c: p.Hadamard) -> list[str]:
        where = f"{self.mine(c.out)}, {_ident(c.x)}, {self.program.buffer(c.x).width}, {c.block}"
        return [f"hadamard<{c.core_order}>({where}, {self.weight(c.core)}, s.w, {_ident(c.out)});"]

    def _take_rows(self, c: p.TakeRows) -> list[str]:
        width = self.program.buffer(c.x).width
        return [f"take_rows({self.mine(c.out)}, b.output_rows, {_ident(c.x)}, {width}, {_ident(c.out)});"]

    def _elementwise(self, c: p.Elementwise) -> list[str]:
        x = f"{self.mine(c.out)}, {_ident(c.x)} + {c.x_offset}, {self.program.buffer(c.x).stride}, "
        x += str(self.program.buffer(c.out).width)
        if c.kind in _UNARY:
            return [f"apply<{_UNARY[c.kind]}>({x}, {_ident(c.out)});"]
        if c.kind == "xielu":
            return [f"xielu({x}, {self.weight(c.weight)}, {_ident(c.out)});"]
        if c.kind in ("scale", "shift"):
            return [f"{c.kind}_by({x}, {_f32(c.factor)}, {_ident(c.out)});"]
        if c.kind == "clamp":
            return [f"clamp({x}, {_bound(c.low, '-')}, {_bound(c.high, '')}, {_ident(c.out)});"]
        if c.kind not in ("add", "mul", "mul_row"):
            raise UnsupportedError(f"{c.name}: there is no elementwise kernel {c.kind}")
        if c.other is not None:
            operand = f"{_ident(c.other)} + {c.other_offset}, {self.program.buffer(c.other).stride}"
        else:
            operand = f"{self.weight(c.weight)}, 0"
        return [f"{c.kind}({x}, {operand}, {_ident(c.out)});"]

    def _gemm(self, c: p.Gemm, index: int) -> list[str]:
        x = self.program.buffer(c.x)
        if x.dtype == "q8" and x.group != (weight_format(c.format).sum_group or x.kind.group or x.stride):
            raise UnsupportedError(f"{c.name}: {c.format} needs activation sums other than over {x.group} inputs")
        count = "b.tokens" if x.rows == "tokens" else "b.outputs"
        var = f"g{index}"
        lines = [f"Gemm {var}{{{count}, {c.n}, {c.k}, {self.weight(c.weights['codes'], 'void')}}};"]
        for role, name in c.weights.items():
            if role != "codes":
                lines.append(f"{var}.{role} = {self.weight(name, _ROLE_TYPES.get(role, 'uint8_t'))};")
        if c.blocks:
            lines.append(f"{var}.blocks = {c.blocks};")
            lines += [f"{var}.parts[{i}] = {units};" for i, units in enumerate(c.runs) if units]
        if c.bias is not None:
            lines.append(f"{var}.bias = {self.weight(c.bias)};")
        lines.append(f"{var}.epilogue = {_EPILOGUE[c.epilogue]};")
        if c.epilogue in GATED:
            lines.append(f"{var}.act = {_UNARY[GATED[c.epilogue]]};")
        if c.residual is not None:
            residual = self.program.buffer(c.residual)
            lines.append(f"{var}.residual = {_ident(c.residual)}, {var}.residual_stride = {residual.stride};")
        out = None if c.out is None else self.program.buffer(c.out)
        target, stride = ("b.logits", "kVocab") if out is None else (_ident(out.name), str(out.stride))
        lines.append(f"{var}.out = {target}, {var}.out_stride = {stride};")
        if out is None:
            lines.append(f"{var}.best = s.best();")
        rope = self._rope_after(index)
        if rope is not None and self._by_head(index):
            q, k = (rope.k_offset - rope.q_offset) // 32, (rope.v_offset - rope.k_offset) // 32
            lines.append(f"if (s.by_head()) {var}.parts[0] = {q}, {var}.parts[1] = {k};")
        suffix = "_bf16" if x.dtype == "bf16" and c.format not in ("bf16", "f32") else ""
        if x.dtype == "q8" and x.kind.group:
            suffix = "_x128"
        lines.append(f"gemm_{c.format}{suffix}({var}, {_ident(c.x)}, s.w);")
        if out is not None and out.width != out.stride:
            lines.append(f"pad_rows({self.mine(out.name)}, {_ident(out.name)}, {out.width});")
        return lines

    def _route(self, c: p.Route) -> list[str]:
        x = self.program.buffer(c.x)
        where = f"{self.mine(c.out)}, {_ident(c.x)} + {c.x_offset}, {x.stride}"
        out = self.program.buffer(c.out)
        if c.kind == "top_k":
            return [f"top_k({where}, {c.width}, {out.width}, {_ident(c.out)});"]
        if c.kind == "pick":
            return [f"pick({where}, {_ident(str(c.index))}, {out.width}, {_ident(c.out)});"]
        name = {"softmax": "softmax_rows"}.get(c.kind, c.kind)
        numbers = [_f32(n) if c.kind == "normalize" else str(int(n)) for n in c.numbers]
        return [f"{name}({', '.join((where, str(out.width), *numbers, _ident(c.out)))});"]

    def _expert_gemm(self, c: p.ExpertGemm, index: int) -> list[str]:
        x, out, e = self.program.buffer(c.x), self.program.buffer(c.out), f"e{index}"
        kind = activation_format(c.activation)
        x_slot, gated = c.k if c.x_slots > 1 else 0, c.epilogue != "store"
        lines = [
            f"Experts {e}{{b.tokens, {c.slots}, {c.experts}, {_ident(c.x)}, {x.stride}, {x_slot}, {_ident(c.index)},",
            f"          {{0, {2 * c.n if gated else c.n}, {c.k}, {self.weight(c.weights['codes'], 'void')}}}}};",
            f"{e}.out = {_ident(c.out)}, {e}.out_stride = {out.stride}, {e}.gemm.epilogue = {_EPILOGUE[c.epilogue]};",
        ]
        if gated:
            lines.append(f"{e}.gemm.act = {_UNARY[GATED[c.epilogue]]}, {e}.gemm.offset = {_f32(c.offset)};")
        if c.limit is not None:
            lines.append(f"{e}.gemm.limit = {_f32(c.limit)};")
        for role, name in c.weights.items():
            ctype = _ROLE_TYPES.get(role, "uint8_t")
            step = c.strides[role] // (4 if ctype == "float" else 1)
            lines.append(f"{e}.{role} = {step};")
            if role != "codes":
                lines.append(f"{e}.gemm.{role} = {self.weight(name, ctype)};")
        if c.bias is not None:
            lines.append(f"{e}.gemm.bias = {self.weight(c.bias)}, {e}.bias = {c.rows};")
        rows = "Q8Rows" if kind.top else "uint16_t" if c.activation == "bf16" else "float"
        suffix = "_x128" if kind.group else "_bf16" if rows == "uint16_t" and c.format not in ("bf16", "f32") else ""
        padded = p.round_up(c.k, p.PAD)
        group, scales = p.round_up(c.group or padded, p.PAD), kind.group or padded
        how = f"{{{group}, {scales}, {_f32(kind.top)}, {_f32(kind.last_top)}}}"
        call = f"gemm_{c.format}{suffix}(g, x, w);"
        run = f"[](const Gemm& g, const auto& x, const Worker& w) {{ {call} }}"
        lines.append(f"expert_gemm<{rows}>({e}, {how}, s.w, (char*)s.w.scratch + kOwnScratchBytes,")
        return [*lines, f"            {run});"]

    def _combine(self, c: p.Combine) -> list[str]:
        x, width = self.program.buffer(c.x), self.program.buffer(c.out).width
        scores = "nullptr" if c.scores is None else _ident(c.scores)
        where = f"{self.mine(c.out)}, {_ident(c.x)}, {x.stride}, {c.slots}, {width}"
        return [f"combine({where}, {scores}, {_ident(c.out)});"]

    def _logits(self, c: p.Logits) -> list[str]:
        x = self.program.buffer(c.x)
        copied = f"copy_rows({self.mine(c.x)}, {_ident(c.x)}, {x.stride}, kVocab, s.logits());"
        return [copied, "m.team->sync(tid);", "s.look_for_best();"]

    def _rope_append(self, c: p.RopeAppend) -> list[str]:
        table = "nullptr"
        if c.inv_freq is not None:
            table = self._rope_table(c.inv_freq, c.rotary_dim, c.scaling).name
        stride = self.program.buffer(c.qkv).stride
        where = f"{_ident(c.qkv)}, {stride}, {c.q_offset}, {c.k_offset}, {c.v_offset}, {c.heads}"
        times = [self.weight(c.query_table), self.weight(c.query_weight)] if c.query_table or c.query_weight else []
        more = [str(c.block), self.weight(c.center), *times] if c.block or c.center or times else []
        rope = f"{{{', '.join([table, str(c.rotary_dim), _bool(c.interleaved), *more])}}}"
        return [f"s.append({{{where}, {rope}, b.positions, b.query_start}}, {c.layer});"]

    def _rope_table(self, inv_freq: str, rotary_dim: int, scaling: float) -> _RopeTable:
        key = (inv_freq, rotary_dim, scaling)
        if key not in self.ropes:
            offset = sum(_rope_stride(table.rotary_dim) for table in self.ropes.values())
            name = f"rope{len(self.ropes)}"
            self.ropes[key] = _RopeTable(name, offset, self.index[inv_freq], rotary_dim, scaling)
        return self.ropes[key]

    def _attention(self, c: p.Attention, index: int) -> list[str]:
        q = self.program.buffer(c.q)
        where = f"{_ident(c.q)}, {q.stride}, {c.q_offset}, {_ident(c.out)}, {c.heads}"
        extra = f"{self.weight(c.sinks)}, {self.weight(c.key_bias)}, kMaxPosition, {self.weight(c.center)}"
        how = f"{_f32(c.scale)}, {c.window}, {_f32(c.softcap)}, {extra}"
        columns = self._new_columns(c) if self.program.kv.hierarchical else ""
        return [f"s.attend({{{where}, {how}, b.sequences, b.positions, b.query_start{columns}}}, {c.layer}, {index});"]

    def _new_columns(self, c: p.Attention) -> str:
        """Columns, in q's rows, of the keys and values that attention appends to a hierarchical cache."""
        new = next(a for a in self.program.calls if isinstance(a, p.RopeAppend) and a.layer == c.layer)
        if new.qkv != c.q:
            raise UnsupportedError(f"{c.name}: {self.program.kv.format} needs queries, keys and values in one buffer")
        return f", {new.k_offset}, {new.v_offset}"


class _Headers:
    """Expands headers from templates/cpu and their includes, each once; system includes stay."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def __call__(self, *names: str) -> str:
        return "".join(self._expand(name) for name in names)

    def _expand(self, name: str) -> str:
        if name in self.seen:
            return ""
        self.seen.add(name)
        lines = [f"// ---- {name} ".ljust(100, "-") + "\n"]
        for line in (_TEMPLATES / name).read_text(encoding="utf-8").splitlines(keepends=True):
            included = _INCLUDE.match(line.rstrip())
            if included:
                lines.append(self._expand(included["name"]))
            elif line.strip() != "#pragma once":
                lines.append(line)
        return "".join(lines)


def _widths(program: p.Program) -> list[int]:
    return [b.width for b in program.buffers] + [c.k for c in program.calls if isinstance(c, p.Gemm | p.ExpertGemm)]


# ---- C++ literals and identifiers -----------------------------------------------------------------


def _kind(buffer: p.Buffer) -> str:
    return {"tokens": "kTokens", "outputs": "kOutputs"}[buffer.rows]


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _ident(name: str) -> str:
    """A C++ identifier for a buffer."""
    return "v_" + re.sub(r"\W", "_", name)


def _f32(value: float) -> str:
    """The float32 nearest to `value`, as a C++ literal that parses back exactly."""
    text = format(struct.unpack("f", struct.pack("f", value))[0], ".9g")
    return text + ("f" if any(c in text for c in ".e") else ".0f")


def _bound(value: float | None, sign: str) -> str:
    """A clamp bound; None is infinity with `sign`."""
    return f"{sign}__builtin_inff()" if value is None else _f32(value)


def _c_string(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _rope_stride(rotary_dim: int) -> int:
    return 2 * p.round_up(rotary_dim // 2, 8)
