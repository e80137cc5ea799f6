"""C++ statements of each call of a program: calls of the kernels in templates/."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qcompile.codegen.buffers import PAD
from qcompile.codegen.calls import (
    AllReduce,
    Attention,
    Call,
    Combine,
    Elementwise,
    Embed,
    EveryExpert,
    ExpertGemm,
    Gather,
    Gemm,
    Hadamard,
    Logits,
    Mean,
    Norm,
    NormHeads,
    QuantizeRows,
    RopeAppend,
    RopeHeads,
    Route,
    TakeRows,
)
from qcompile.codegen.cpu import feature_statements, lora_statements
from qcompile.codegen.cpu.barriers import Barriers
from qcompile.codegen.cpu.cpp import boolean, bound, code_range, f32, gate_kind, ident, rows_kind, unary_kind
from qcompile.codegen.program import Program
from qcompile.codegen.sizes import round_up
from qcompile.codegen.state_calls import MOST_TAPS, ConvStep, RecurrenceStep
from qcompile.errors import UnsupportedError
from qcompile.formats.activations import activation_format
from qcompile.formats.registry import weight_format
from qcompile.ops import CURVES, GATED, UNARY

_ROLE_TYPES = {"scale": "float", "columns": "int32_t", "starts": "int32_t"}
"""C++ element type of packed weight parts by role; uint8_t for the others."""
_STATES = {"f32": "kStateF32", "bf16": "kStateBf16", "int8": "kStateInt8"}
_EPILOGUE = {"store": "kStore", "logits": "kLogits", "add": "kAdd"} | dict.fromkeys(GATED, "kGated")


@dataclass(frozen=True)
class RopeTable:
    """A table of cos and sin shared by all layers with the same rotation; `offset` is in floats per token."""

    name: str
    offset: int
    weight: int
    rotary_dim: int
    scaling: float


def _recurrence_calls(c: RecurrenceStep, args: str) -> list[str]:
    """The calls of a recurrence, with that which logs keys and decay when all threads have done their tiles."""
    apart = (
        [] if c.stored == "f32" else [f"if (states.has_many()) m.pool->sync(tid), recurrence_log({args}, states, s.w);"]
    )
    return [f"recurrence_step({args}, states, s.w);", *apart]


def rope_stride(rotary_dim: int) -> int:
    """Floats per token of a table of cos and sin."""
    return 2 * round_up(rotary_dim // 2, 8)


class Statements:
    """Writes the statements of calls. `ropes` are the tables of cos and sin that calls written so far read.

    `headers` are those that only these calls need, besides those that every model includes. `gates`: see `gate_kind`.
    """

    def __init__(self, program: Program, barriers: Barriers) -> None:
        self.program, self.barriers = program, barriers
        self.index = {name: i for i, name in enumerate(program.weights)}
        self.ropes: dict[tuple[str, int, float], RopeTable] = {}
        self.headers: dict[str, None] = {}
        self.gates: dict[str, None] = {}

    def of(self, index: int) -> list[str]:
        """The statements of call `index`. UnsupportedError naming the call if it has no kernel."""
        call = self.program.calls[index]
        write: Callable[[Call, int], list[str]] | None = getattr(self, f"_{call.kernel}", None)
        if write is None:
            raise UnsupportedError(f"{call.name}: there is no CPU kernel {call.kernel}")
        return write(call, index)

    def weight(self, name: str | None, ctype: str = "float") -> str:
        """The C++ expression for a weight's address (nullptr for None)."""
        return "nullptr" if name is None else f"s.weight<{ctype}>({self.index[name]})"

    def mine(self, name: str) -> str:
        """The C++ expression for the rows of buffer `name` that this thread computes."""
        return f"s.mine({rows_kind(self.program.buffer(name))}, {boolean(name in self.barriers.own)})"

    def _embed(self, c: Embed, _: int) -> list[str]:
        ids = "b.token_ids" if c.index == "tokens" else "b.positions"
        types = {"f32": "float", "bf16": "uint16_t", "f16": "Half", "i8": "uint8_t"}
        tables = [self.weight(c.table, types[c.table_dtype]), *([self.weight(c.row_scale)] if c.row_scale else [])]
        width, place = self.program.buffer(c.out).width, f"{self.mine(c.out)}, {ids}, {', '.join(tables)}"
        statements = [f"embed({place}, {width}, {f32(c.scale)}, {ident(c.out)});"]
        if c.given:
            statements += [f"embed_given({self.mine(c.out)}, b.embeds, {width}, {f32(c.given)}, {ident(c.out)});"]
        return statements

    def _norm(self, c: Norm, _: int) -> list[str]:
        kind = {"rms": "kRms", "layer": "kLayer"}[c.kind]
        x, width = self.program.buffer(c.x), self.program.buffer(c.out).width
        where = f"{ident(c.x)} + {c.x_offset}, {x.stride}, {boolean(x.width != width)}, {width}"
        weights = f"{self.weight(c.weight)}, {self.weight(c.bias)}, {f32(c.eps)}"
        return [f"norm<{kind}>({self.mine(c.out)}, {where}, {weights}, s.w, {ident(c.out)});"]

    def _gather(self, c: Gather, _: int) -> list[str]:
        places = zip(c.sources, c.offsets, c.widths, strict=True)
        from_ = [f"{{{ident(x)} + {at}, {self.program.buffer(x).stride}, {width}}}" for x, at, width in places]
        index, width = self.weight(c.index, "int32_t"), self.program.buffer(c.out).width
        return [f"gather({self.mine(c.out)}, {{{', '.join(from_)}}}, {index}, {width}, {ident(c.out)});"]

    def _norm_heads(self, c: NormHeads, _: int) -> list[str]:
        kind = {"rms": "kRms", "layer": "kLayer"}[c.kind]
        where = f"{ident(c.x)}, {self.program.buffer(c.x).stride}, {c.x_offset}, {c.heads}, {c.width}"
        weights = f"{self.weight(c.weight)}, {self.weight(c.bias)}, {c.width if c.by_head else 0}, {f32(c.eps)}"
        return [f"norm_heads<{kind}>({self.mine(c.x)}, {where}, {weights});"]

    def _quantize(self, c: QuantizeRows, index: int) -> list[str]:
        width = self.program.buffer(c.x).width
        line = f"quantize({self.mine(c.out)}, {ident(c.x)}, {width}, {ident(c.out)});"
        if index not in self.barriers.shares:
            return [line]
        produced = self.barriers.producer_condition(index)
        share = f"b.tokens, {self.barriers.shares[index].range}"
        return [
            f"if ({produced}) quantize_share({share}, {ident(c.x)}, {width}, {ident(c.out)});",
            f"else {line}",
        ]

    def _hadamard(self, c: Hadamard, _: int) -> list[str]:
        where = f"{self.mine(c.out)}, {ident(c.x)}, {self.program.buffer(c.x).width}, {c.block}"
        return [f"hadamard<{c.core_order}>({where}, {self.weight(c.core)}, s.w, {ident(c.out)});"]

    def _take_rows(self, c: TakeRows, _: int) -> list[str]:
        width = self.program.buffer(c.x).width
        return [f"take_rows({self.mine(c.out)}, b.output_rows, {ident(c.x)}, {width}, {ident(c.out)});"]

    def _elementwise(self, c: Elementwise, _: int) -> list[str]:
        x = f"{self.mine(c.out)}, {ident(c.x)} + {c.x_offset}, {self.program.buffer(c.x).stride}, "
        x += str(self.program.buffer(c.out).width)
        if c.kind in UNARY:
            return [f"apply<{unary_kind(c.kind)}>({x}, {ident(c.out)});"]
        if c.kind in CURVES:
            self.headers[f"{c.kind}.h"] = None
            return [f"{c.kind}({x}, {self.weight(c.weight)}, {ident(c.out)});"]
        if c.kind in ("scale", "shift"):
            return [f"{c.kind}_by({x}, {f32(c.factor)}, {ident(c.out)});"]
        if c.kind == "clamp":
            return [f"clamp({x}, {bound(c.low, '-')}, {bound(c.high, '')}, {ident(c.out)});"]
        if c.kind in ("power", "add_row"):
            self.headers["formulas.h"] = None
        if c.kind == "power":
            return [f"power<{round(2 * c.factor)}>({x}, {ident(c.out)});"]
        if c.kind not in ("add", "mul", "add_row", "mul_row"):
            raise UnsupportedError(f"{c.name}: there is no elementwise kernel {c.kind}")
        if c.other is not None:
            operand = f"{ident(c.other)} + {c.other_offset}, {self.program.buffer(c.other).stride}"
        else:
            operand = f"{self.weight(c.weight)}, 0"
        return [f"{c.kind}({x}, {operand}, {ident(c.out)});"]

    _lora_shrink, _lora_expand = lora_statements.lora_shrink, lora_statements.lora_expand
    _gate_rows = lora_statements.gate_rows
    _read_features, _write_features = feature_statements.read_features, feature_statements.write_features

    def _all_reduce(self, c: AllReduce, _: int) -> list[str]:
        x = self.program.buffer(c.x)
        rows = "b.tokens" if x.rows == "tokens" else "b.outputs"
        return [f"all_reduce(s, {ident(c.x)}, (int64_t){rows} * {x.stride}, {ident(c.out)});"]

    def _mean(self, c: Mean, _: int) -> list[str]:
        self.headers["formulas.h"] = None
        x = f"{ident(c.x)} + {c.x_offset}, {self.program.buffer(c.x).stride}, {c.width}"
        return [f"mean({self.mine(c.out)}, {x}, {self.program.buffer(c.out).width}, {ident(c.out)});"]

    def _gemm(self, c: Gemm, index: int) -> list[str]:
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
            lines.append(f"{var}.act = {gate_kind(GATED[c.epilogue], self.gates)};")
        if c.residual is not None:
            residual = self.program.buffer(c.residual)
            lines.append(f"{var}.residual = {ident(c.residual)}, {var}.residual_stride = {residual.stride};")
        out = None if c.out is None else self.program.buffer(c.out)
        target, stride = ("b.logits", "kVocab") if out is None else (ident(out.name), str(out.stride))
        lines.append(f"{var}.out = {target}, {var}.out_stride = {stride};")
        if out is None:
            lines.append(f"{var}.best = s.best();")
        rope = self.barriers.rope_after(index)
        if rope is not None and rope.v_offset is not None and self.barriers.by_head(index):
            q, k = (rope.k_offset - rope.q_offset) // 32, (rope.v_offset - rope.k_offset) // 32
            lines.append(f"if (s.by_head({rope.kv_heads})) {var}.parts[0] = {q}, {var}.parts[1] = {k};")
        if gate := self.barriers.gate_of(index):
            lines += lora_statements.gated_by(self, gate, var)
        kernel = weight_format(c.format).cpu_kernel(x.kind)
        lines.append(f"{kernel}({var}, {ident(c.x)}, s.w);")
        if out is not None and out.width != out.stride:
            lines.append(f"pad_rows({self.mine(out.name)}, {ident(out.name)}, {out.width});")
        return lines

    def _route(self, c: Route, _: int) -> list[str]:
        if c.kind == "bound_choice":
            kept = f"{ident(str(c.index))}, {self.program.buffer(c.out).width}"
            return [f"bound_choice({self.mine(c.out)}, {kept}, {c.width - 1}, {ident(c.out)});"]
        if c.x is None:
            where = f"{self.mine(c.out)}, {self.weight(c.table)}, 0"
        else:
            where = f"{self.mine(c.out)}, {ident(c.x)} + {c.x_offset}, {self.program.buffer(c.x).stride}"
        out = self.program.buffer(c.out)
        if c.kind == "top_k":
            return [f"top_k({where}, {c.width}, {out.width}, {ident(c.out)});"]
        if c.kind == "pick":
            return [f"pick({where}, {ident(str(c.index))}, {out.width}, {ident(c.out)});"]
        if c.kind == "near_share":
            chosen = f"{ident(str(c.index))}, {out.width}, {f32(c.tolerance)}"
            return [f"near_share({where}, {c.width}, {chosen}, {ident(c.out)});"]
        name = {"softmax": "softmax_rows"}.get(c.kind, c.kind)
        given = {"normalize": (f32(c.eps), f32(c.floor)), "limit_groups": (str(c.groups), str(c.keep), str(c.count))}
        numbers = given.get(c.kind, ())
        return [f"{name}({', '.join((where, str(out.width), *numbers, ident(c.out)))});"]

    def _every_expert(self, c: EveryExpert, _: int) -> list[str]:
        return [f"every_expert({self.mine(c.out)}, {c.experts}, {ident(c.out)});"]

    def _expert_gemm(self, c: ExpertGemm, index: int) -> list[str]:
        x, out, e = self.program.buffer(c.x), self.program.buffer(c.out), f"e{index}"
        kind = activation_format(c.activation)
        x_slot, gated = c.k if c.x_slots > 1 else 0, c.epilogue != "store"
        lines = [
            f"Experts {e}{{b.tokens, {c.slots}, {c.experts}, {ident(c.x)}, {x.stride}, {x_slot}, {ident(c.index)},",
            f"          {{0, {2 * c.n if gated else c.n}, {c.k}, {self.weight(c.weights['codes'], 'void')}}}}};",
            f"{e}.out = {ident(c.out)}, {e}.out_stride = {out.stride}, {e}.gemm.epilogue = {_EPILOGUE[c.epilogue]};",
        ]
        if gated:
            lines.append(
                f"{e}.gemm.act = {gate_kind(GATED[c.epilogue], self.gates)}, {e}.gemm.offset = {f32(c.offset)};"
            )
        if c.limit is not None:
            lines.append(f"{e}.gemm.limit = {f32(c.limit)};")
        for role, name in c.weights.items():
            ctype = _ROLE_TYPES.get(role, "uint8_t")
            step = c.strides[role] // (4 if ctype == "float" else 1)
            lines.append(f"{e}.{role} = {step};")
            if role != "codes":
                lines.append(f"{e}.gemm.{role} = {self.weight(name, ctype)};")
        if c.bias is not None:
            lines.append(f"{e}.gemm.bias = {self.weight(c.bias)}, {e}.bias = {c.rows};")
        rows = "Q8Rows" if kind.is_integer else "uint16_t" if kind.dtype.itemsize == 2 else "float"
        padded = round_up(c.k, PAD)
        group, scales = round_up(c.group or padded, PAD), kind.group or padded
        how = f"{{{group}, {scales}, {code_range(kind)}}}"
        call = f"{weight_format(c.format).cpu_kernel(kind)}(g, x, w);"
        run = f"[](const Gemm& g, const auto& x, const Worker& w) {{ {call} }}"
        lines.append(f"expert_gemm<{rows}>({e}, {how}, s.w, (char*)s.w.scratch + kOwnScratchBytes,")
        lines.append(f"            {run});")
        if out.width != out.stride:
            lines.append(f"pad_rows({self.mine(out.name)}, {ident(out.name)}, {out.width});")
        return lines

    def _combine(self, c: Combine, _: int) -> list[str]:
        x, width = self.program.buffer(c.x), self.program.buffer(c.out).width // c.results
        if c.results > 1:
            self.headers["formulas.h"] = None
            read = f"{ident(c.x)}, {x.stride}, {ident(str(c.scores))}, {self.program.buffer(str(c.scores)).stride}"
            return [f"mix({self.mine(c.out)}, {read}, {c.slots}, {c.results}, {width}, {ident(c.out)});"]
        scores = "nullptr" if c.scores is None else ident(c.scores)
        where = f"{self.mine(c.out)}, {ident(c.x)}, {x.stride}, {c.slots}, {width}"
        return [f"combine({where}, {scores}, {ident(c.out)});"]

    def _conv_step(self, c: ConvStep, _: int) -> list[str]:
        if c.width > MOST_TAPS:
            raise UnsupportedError(f"{c.name}: a convolution of {c.width} taps, more than {MOST_TAPS}, has no kernel")
        x = f"{ident(c.x)} + {c.x_offset}, {self.program.buffer(c.x).stride}"
        weights = f"{self.weight(c.weight)}, {self.weight(c.bias)}"
        blocks = f"share({round_up(c.features, 16) // 16}, s.w)"
        return [f"conv_step({{{x}, {ident(c.out)}, {c.features}, {c.width}, {weights}, {c.state}}}, states, {blocks});"]

    def _recurrence_step(self, c: RecurrenceStep, index: int) -> list[str]:
        def place(name: str | None, offset: int) -> str:
            return "{}" if name is None else f"{{{ident(name)} + {offset}, {self.program.buffer(name).stride}}}"

        places = ((c.q, c.q_offset), (c.k, c.k_offset), (c.v, c.v_offset), (c.decay, c.decay_offset))
        inputs = ", ".join(place(*each) for each in (*places, (c.gain, c.gain_offset)))
        sizes = f"{c.heads}, {c.key_heads}, {c.key_dim}, {c.value_dim}, {boolean(c.by_key)}, {boolean(c.delta)}"
        rates = f"{self.weight(c.rates)}, {boolean(c.rates_by_key)}"
        rest = f"    {sizes}, {rates}, {c.state}, {_STATES[c.stored]}}};"
        return [f"const RecurrenceArgs r{index}{{{inputs}, {ident(c.out)},", rest, *_recurrence_calls(c, f"r{index}")]

    def _logits(self, c: Logits, _: int) -> list[str]:
        x = self.program.buffer(c.x)
        copied = f"copy_rows({self.mine(c.x)}, {ident(c.x)}, {x.stride}, kVocab, s.logits());"
        return [copied, "m.pool->sync(tid);", "s.look_for_best();"]

    def _rope_append(self, c: RopeAppend, _: int) -> list[str]:
        table = "nullptr"
        if c.inv_freq is not None:
            table = self._rope_table(c.inv_freq, c.rotary_dim, c.scaling).name
        stride = self.program.buffer(c.qkv).stride
        v_offset = c.k_offset if c.v_offset is None else c.v_offset  # the kernel does not read it in the first case
        where = f"{ident(c.qkv)}, {stride}, {c.q_offset}, {c.k_offset}, {v_offset}, {c.heads}"
        times = [self.weight(c.query_table), self.weight(c.query_weight)] if c.query_table or c.query_weight else []
        more = [str(c.block), self.weight(c.center), *times] if c.block or c.center or times else []
        rope = f"{{{', '.join([table, str(c.rotary_dim), boolean(c.interleaved), *more])}}}"
        return [f"s.append({{{where}, {rope}, b.positions, b.query_start}}, {c.layer});"]

    def _rope_heads(self, c: RopeHeads, _: int) -> list[str]:
        table = "nullptr"
        if c.inv_freq is not None:
            table = self._rope_table(c.inv_freq, c.rotary_dim, c.scaling).name
        weights = ", ".join(self.weight(name) for name in (c.center, c.table, c.weight))
        rope = f"{{{table}, {c.rotary_dim}, {boolean(c.interleaved)}, {c.block}, {weights}}}"
        where = f"{ident(c.x)}, {self.program.buffer(c.x).stride}, {c.offset}, {c.heads}, {c.head_dim}"
        return [f"rope_heads({{{where}, {rope}, b.positions}}, {self.mine(c.x)});"]

    def _rope_table(self, inv_freq: str, rotary_dim: int, scaling: float) -> RopeTable:
        key = (inv_freq, rotary_dim, scaling)
        if key not in self.ropes:
            offset = sum(rope_stride(table.rotary_dim) for table in self.ropes.values())
            name = f"rope{len(self.ropes)}"
            self.ropes[key] = RopeTable(name, offset, self.index[inv_freq], rotary_dim, scaling)
        return self.ropes[key]

    def _attention(self, c: Attention, index: int) -> list[str]:
        q = self.program.buffer(c.q)
        where = f"{ident(c.q)}, {q.stride}, {c.q_offset}, {ident(c.out)}, {c.heads}"
        extra = f"{self.weight(c.sinks)}, {self.weight(c.key_bias)}, kMaxPosition, {self.weight(c.center)}"
        how = f"{f32(c.scale)}, {c.window}, {c.chunk}, {f32(c.softcap)}, {extra}"
        columns = self._new_columns(c) if self.program.kv.hierarchical else ""
        if c.value is not None:
            columns = f", 0, 0, {c.value[0]}, {c.value_dim}"
        return [f"s.attend({{{where}, {how}, b.sequences, b.positions, b.query_start{columns}}}, {c.layer}, {index});"]

    def _new_columns(self, c: Attention) -> str:
        """Columns, in q's rows, of the keys and values that attention appends to a hierarchical cache."""
        new = next(a for a in self.program.calls if isinstance(a, RopeAppend) and a.layer == c.layer)
        first = next(a for a in self.program.calls if isinstance(a, Attention) and a.layer == c.layer)
        if first != c:
            reason = "attends to keys of an earlier layer, which has overwritten the newest ones by then"
            raise UnsupportedError(f"{c.name}: {reason} in a {self.program.kv.format} cache; take another cache format")
        if new.qkv != c.q:
            raise UnsupportedError(f"{c.name}: {self.program.kv.format} needs queries, keys and values in one buffer")
        return f", {new.k_offset}, {new.v_offset}"
