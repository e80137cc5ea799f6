"""Turns the calls of a Program into kernel launches, choosing kernels for their formats and shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from qcompile import ops
from qcompile.codegen import program as p
from qcompile.codegen.gpu.append import AppendSpec, HeadNorm, StagedSpec, fused_part
from qcompile.codegen.gpu.attention import (
    GROUP_SPLITS,
    MIN_LEAF_POSITIONS,
    MOST_QUERIES,
    AttentionSpec,
    GpuKV,
    MergeSpec,
    far_variants,
    for_queries,
    prefill_variants,
)
from qcompile.codegen.gpu.experts import Experts
from qcompile.codegen.gpu.gemm import spec as gemm
from qcompile.codegen.gpu.gemm import tiles
from qcompile.codegen.gpu.gemm.pack import kernel_of, packing_of, padded_inputs, padded_outputs
from qcompile.codegen.gpu.launches import MOST_ROWS, Launch, Plan, Ref, Size, Variant
from qcompile.codegen.gpu.reads import Reads
from qcompile.codegen.gpu.rows import MAX_WIDTH, Columns, GatherSpec, HadamardSpec, RowSpec, in_blocks
from qcompile.codegen.gpu.sample import choosing
from qcompile.errors import PassError, UnsupportedError
from qcompile.formats.kv import HIER_GROUP
from qcompile.formats.rounding import groups_of
from qcompile.targets import Target

APPENDED = ((8, 1), (128, 4), (0, 8))
"""Most rows of a step (0: any number), and the tokens per program that append them fastest on an H200."""
ROUNDING = ((8, 4, 8), (0, 2, 0))
"""Most rows of a step (0: any number), AppendSpec.shares, and fewest programs per row and KV head."""
QUANTIZE_PART, MIN_PART = 1024, 32
"""Most and fewest elements per program if several programs quantize one row: powers of two."""
_OF_PROMPTS: dict[str, Ref] = {
    "query_start": ["input", "prompt_start"],
    "block_table": ["input", "block_table", "decoding", "table_stride"],
}
"""What kernels for the sequences behind those that decode are given."""
_Shape = tuple[str, int, int]  # packing, N, K


def kv_of(program: p.Program) -> GpuKV:
    """The layout of a program's KV pages for GPU kernels. UnsupportedError for formats without kernels."""
    return GpuKV(program.kv.format, program.kv.kv_heads, program.kv.head_dim, program.kv.page_tokens)


def make_plan(program: p.Program, target: Target, split: int = 0, inline_asm: bool = True) -> Plan:
    """The plan of a program for a GPU.

    Attention splits have `split` positions; 0 takes the number from codegen/gpu/gemm/tiles.py. `inline_asm` False gives
    kernels for Triton's interpreter. Raises UnsupportedError naming the call that has no GPU kernel.
    """
    kv = kv_of(program)
    split = split or tiles.split_positions(kv)
    kv = replace(kv, leaves=max(1, min(kv.leaves, split // MIN_LEAF_POSITIONS)))
    maker = _Maker(program, Plan(target, kv, split), inline_asm)
    for call, after in zip_longest(program.calls, program.calls[1:]):
        maker.add(call, after)
    maker.plan.add_feedback()
    return maker.plan


class _Maker:
    def __init__(self, program: p.Program, plan: Plan, inline_asm: bool) -> None:
        self.program, self.plan, self.asm = program, plan, inline_asm
        # Without inline assembly, kernels are rendered for a capability without programmatic dependent launch (PDL).
        self.target = plan.target if inline_asm else replace(plan.target, capability=80)
        self.capability = self.target.capability
        self.gated: dict[str, str] = {}  # buffers with bf16 gate and up columns: the activation
        self.amax_parts: dict[str, dict[int, Any]] = {}  # by buffer quantized next: most rows -> amax values per row
        self.norms: dict[str, p.NormHeads] = {}  # norms to fuse into the next append, by part (q, k)
        self.staged_layer: int | None = None  # the layer whose keys and values are in the staging buffer
        self.amax_from_merge: set[str] = set()  # buffers whose amax merge kernels store (not prefill kernels)
        self.reads = Reads(program)
        self.experts = Experts(program, plan, self.target, inline_asm, self.ref, self.reads)
        self.route_chain: list[p.Route] = []  # consecutive steps of a router so far
        self.next_call: p.Call | None = None  # the call after the current one
        self.result: str | None = None  # the buffer that the current call writes
        self.fused_next: p.Call | None = None  # a call that was fused into the one before it

    def add(self, call: p.Call, after: p.Call | None) -> None:
        """Append the launches of one call; `after` is the next call, which may quantize its result."""
        changed = next(iter(call.writes), None)
        self.experts.wrote(changed)
        if call is self.fused_next:
            return
        self.next_call, self.result = after, changed
        if isinstance(call, p.Gemm | p.Attention) and (rounded := self.reads.rounded(call, after)):
            self.result, self.fused_next = rounded, after
        elif isinstance(call, p.Gemm | p.Attention) and isinstance(after, p.Quantize) and after.x == call.out:
            spec = self.written(after.out, RowSpec(self.program.buffer(after.out).width, 0, 0))
            if not (spec.group or spec.sums or spec.width % MIN_PART):
                self.amax_parts[after.x] = {}
        if isinstance(call, p.Route):
            self.route_chain.append(call)
            if isinstance(after, p.Route):
                return
        make: Callable[[Any], Iterator[Launch]] = getattr(self, f"_{call.kernel}", self._unknown)
        for read in call.reads:
            if read in self.gated and not isinstance(call, (p.Quantize, p.Hadamard)):
                raise PassError("codegen", call.name, "GPU kernels read a gated value only to turn or quantize it")
        try:
            self.plan.launches += make(call)
        except UnsupportedError as error:
            raise PassError("codegen", call.name, str(error)) from error

    def _unknown(self, call: p.Call) -> Iterator[Launch]:
        raise UnsupportedError(f"operator {call.kernel} has no GPU kernel yet")

    # ---- operands -----------------------------------------------------------------------------

    def ref(self, name: str, part: str = "", column: int = 0) -> Ref:
        """Address of a buffer from `column` on, or of a q8 buffer's `scale` or `sums` (`part`)."""
        b = self.program.buffer(name)
        extra = {"": 0, "scale": b.stride, "sums": b.stride + 4 * b.scales}[part]
        return [b.rows, b.offset + extra, *([4 * column] if column else [])]

    def rows(self, spec: RowSpec, name: str, x: Ref, out: str, more: dict[str, Ref]) -> Launch:
        """A launch of a row kernel, spec.blocks programs for each row of `out`."""
        kernel = spec.kernel(self.capability)
        b = self.program.buffer(out)
        args = {"x": x, "out": self.ref(out)}
        if b.dtype == "q8":
            args |= {"out_scale": self.ref(out, "scale"), "out_sum": self.ref(out, "sums")}
        args |= more
        grid: tuple[Size, Size, Size] = (b.rows, spec.blocks, 1)
        return Launch(name, b.rows, (Variant(self.plan.add(kernel), grid, args),))

    def written(self, out: str, base: RowSpec) -> RowSpec:
        """`base`, writing to the buffer `out` in its dtype, with the sum of codes if the row has only one."""
        b = self.program.buffer(out)
        if b.dtype != "q8":
            return replace(base, out=b.dtype, out_stride=b.stride)
        # GEMMs with one scale per row subtract zero points at the end by this sum; those with groups do not need it.
        kind, sums = b.kind, b.groups == 1 and not b.kind.group
        more: dict[str, Any] = {"top": kind.top, "group": kind.group, "last_top": kind.last_top}
        more["row_scales"] = b.scales if b.scales != groups_of(b.width, kind.group) else 0
        return replace(base, out="q8", out_stride=b.stride, sums=sums, **more)

    def plain(self, x: str, out: str, **more: Any) -> RowSpec:
        """A row kernel from buffer x to buffer out."""
        b = self.program.buffer(x)
        if b.dtype != "f32":
            raise UnsupportedError(f"GPU row kernels read f32, not {b.dtype}")
        width = more.pop("width", self.program.buffer(out).width)
        return self.written(out, RowSpec(width, b.stride, 0, **more))

    # ---- one method per kernel ----------------------------------------------------------------

    def _embed(self, c: p.Embed) -> Iterator[Launch]:
        width = self.program.buffer(c.out).width
        index, last = {"tokens": ("token_ids", 0), "positions": ("positions", c.vocab - 1)}[c.index]
        spec = self.written(c.out, RowSpec(width, width, 0, c.table_dtype, indexed=True, last=last, factor=c.scale))
        yield self.rows(spec, c.name, ["weight", c.table], c.out, {"index": ["input", index]})

    def _norm(self, c: p.Norm) -> Iterator[Launch]:
        norm: dict[str, Any] = {"norm": c.kind, "eps": c.eps}
        norm |= {"weight": c.weight is not None, "bias": c.bias is not None}
        spec, args = self.plain(c.x, c.out, **norm), _vectors(c.weight, c.bias)
        if found := self.experts.quantized_by(c):
            rounding, refs = found
            spec = replace(rounding, x_stride=spec.x_stride, plain_stride=spec.out_stride, **norm)
            args |= {"plain": self.ref(c.out), **refs}
        yield self.rows(spec, c.name, self.ref(c.x, column=c.x_offset), c.out, args)

    def _gather(self, c: p.Gather) -> Iterator[Launch]:
        out = self.program.buffer(c.out)
        strides = [self.program.buffer(name).stride for name in c.sources]
        spec = GatherSpec(out.width, out.stride, tuple(map(Columns, c.widths, strides)))
        args: dict[str, Ref] = {"out": self.ref(c.out), "index": ["weight", c.index]}
        for number, (name, column) in enumerate(zip(c.sources, c.offsets, strict=True)):
            args[f"x{number}"] = self.ref(name, column=column)
        label = self.plan.add(spec.kernel(self.capability))
        yield Launch(c.name, out.rows, (Variant(label, (out.rows, spec.programs, 1), args),))

    def _norm_heads(self, c: p.NormHeads) -> Iterator[Launch]:
        part = fused_part(c, self.program.calls[self.program.calls.index(c) + 1 :])
        if part and part not in self.norms:
            self.norms[part] = c
            return
        if c.by_head:
            raise UnsupportedError("a norm by head has no GPU kernel but in what appends those heads")
        weights = {"weight": c.weight is not None, "bias": c.bias is not None}
        spec = self.plain(c.x, c.x, width=c.width, norm=c.kind, eps=c.eps, blocks=c.heads, **weights)
        place = self.ref(c.x, column=c.x_offset)
        yield self.rows(spec, c.name, place, c.x, {"out": place, **_vectors(c.weight, c.bias)})

    def _quantize(self, c: p.Quantize) -> Iterator[Launch]:
        act = self.gated.get(c.x, "")
        if act:
            width = self.program.buffer(c.out).width
            spec = self.written(c.out, RowSpec(width, 2 * width, 0, "bf16", gated=act))
        else:
            spec = self.plain(c.x, c.out)
        launch = self.rows(spec, c.name, self.ref(c.x), c.out, {})
        known = [self._parts_variant(launch, spec, most, count) for most, count in self.amax_parts.get(c.x, {}).items()]
        part = math.gcd(spec.width, QUANTIZE_PART)
        if spec.group and part < spec.width and part % spec.group == 0 and not act and spec.last_top == spec.top:
            known.append(self._parts_variant(launch, spec, gemm.DECODE_TOKENS))
        full = replace(launch, variants=(*known, *launch.variants))
        by_class = [replace(full, by="decode_tokens"), replace(launch, by="other_tokens")]
        yield from by_class if c.x in self.amax_from_merge else [full]

    def _parts_variant(self, launch: Launch, spec: RowSpec, most: int, amax_parts: int = 0) -> Variant:
        """For up to `most` rows, several programs per row: parts are whole groups, or the row's amax is known."""
        parts = spec.width // math.gcd(spec.width, QUANTIZE_PART)
        kernel = replace(spec, width=spec.width // parts, blocks=parts, amax_parts=amax_parts).kernel(self.capability)
        whole = launch.variants[0]
        args = whole.args | {"amax": ["work", "amax"]} if amax_parts else whole.args
        return Variant(self.plan.add(kernel), (whole.grid[0], parts, 1), args, most)

    def _hadamard(self, c: p.Hadamard) -> Iterator[Launch]:
        b, act = self.program.buffer(c.out), self.gated.get(c.x, "")
        direct = b.dtype == "f32"
        if direct and b.stride != b.width:
            raise UnsupportedError(f"{b.width} columns are not whole blocks")
        stride = 2 * b.width if act else self.program.buffer(c.x).stride
        kernel = HadamardSpec(b.width, stride, c.block, c.core_order, act).kernel(self.capability)
        out = self.ref(c.out) if direct else self.plan.need("turned", 4 * b.width, b.rows)
        args: dict[str, Ref] = {"x": self.ref(c.x), "out": out, "core": ["weight", c.core]}
        yield Launch(c.name, b.rows, (Variant(self.plan.add(kernel), (b.rows, 1, 1), args),))
        if not direct:
            yield self.rows(self.written(c.out, RowSpec(b.width, b.width, 0)), f"{c.name}.quantize", out, c.out, {})

    def _route(self, c: p.Route) -> Iterator[Launch]:
        chain, self.route_chain = self.route_chain, []
        yield from self.experts.route(chain)

    def _expert_gemm(self, c: p.ExpertGemm) -> Iterator[Launch]:
        yield from self.experts.gemm(c)

    def _combine(self, c: p.Combine) -> Iterator[Launch]:
        other = self.experts.addend(c, self.next_call)
        after = self.next_call if other is not None and isinstance(self.next_call, p.Elementwise) else None
        self.fused_next = after
        yield from self.experts.combine(c, after, other)

    def _take_rows(self, c: p.TakeRows) -> Iterator[Launch]:
        spec = self.plain(c.x, c.out, indexed=True)
        yield self.rows(spec, c.name, self.ref(c.x), c.out, {"index": ["input", "output_rows"]})

    def _elementwise(self, c: p.Elementwise) -> Iterator[Launch]:
        more: dict[str, Any] = {"scale": {"factor": c.factor}, "shift": {"offset": c.factor}}.get(c.kind, {})
        if c.kind == "clamp":
            more = {"low": c.low, "high": c.high}
        refs: dict[str, Ref] = _vectors(c.weight, None)
        if c.kind in ("add", "mul", "mul_row"):
            more |= {"binary": c.kind, "weight": c.weight is not None}
            if c.other is not None:
                more["other_stride"] = self.program.buffer(c.other).stride
                refs["other"] = self.ref(c.other, column=c.other_offset)
        elif not more:
            if c.kind not in (*ops.model.UNARY, "xielu"):
                raise UnsupportedError(f"there is no GPU kernel {c.kind}")
            more["unary"] = c.kind
            if c.weight is not None:
                refs = {"curve": ["weight", c.weight]}
        more |= {} if "binary" in more else in_blocks(self.program.buffer(c.out).width, MAX_WIDTH)
        yield self.rows(self.plain(c.x, c.out, **more), c.name, self.ref(c.x, column=c.x_offset), c.out, refs)

    def _gemm(self, c: p.Gemm) -> Iterator[Launch]:
        x = self.program.buffer(c.x)
        if c.format == "f32":
            yield from self.experts.scores(c)
            return
        activation = x.activation if x.dtype == "q8" else x.dtype
        packed = c.packing or packing_of(c.format, activation)
        packing = kernel_of(packed, activation)
        n = 16 * c.blocks or padded_outputs(c.n)
        k = padded_inputs(c.k, packed)
        if x.stride != k:
            raise UnsupportedError(f"{c.k} inputs are filled up to {x.stride} for another weight, this one takes {k}")
        act = ops.GATED.get(c.epilogue)
        scattered = act is not None and bool(c.blocks)  # rows of gate and up are apart: the GEMM cannot fuse the gate
        if act is not None and c.out is not None and scattered:
            self.gated[c.out] = act
        options = {
            "bias": c.bias is not None,
            "residual": c.residual is not None,
            "inline_asm": self.asm,
            "out": "bf16" if scattered or self.result != c.out else "f32",
            "width": c.n // 2 if act and not scattered else 0 if n == c.n and not c.blocks else c.n,
            "gated": "" if scattered else act or "",
            "wide": c.wide,
            "x_groups": x.dtype == "q8" and x.kind.group > 0,
        }
        stored = c.n // 2 if act else c.n
        stride = stored if self.result is None or scattered else self.program.buffer(self.result).stride
        if stride != stored:
            # Columns after the outputs get zeros, but there is no bias for them; kernels that scatter rows skip them.
            if act or (not c.blocks and (c.bias is not None or stride > n)):
                raise UnsupportedError(f"{stored} outputs are not whole blocks")
            options["width"] = stride
        refs: dict[str, Ref] = {"x": self.ref(c.x), "M": ["count", x.rows]}
        refs |= {role: ["weight", name] for role, name in c.weights.items()}
        refs["out"] = ["input", "logits"] if self.result is None else self.ref(self.result)
        if x.dtype == "q8":
            refs |= {"x_scale": self.ref(c.x, "scale"), "x_sum": self.ref(c.x, "sums")}
        refs |= _vectors(None, c.bias)
        if c.residual is not None:
            refs["residual"] = self.ref(c.residual)
        amax = self.amax_parts.get(c.out or "") if act and not scattered else None
        shape, classes = (packing, n, k), tiles.token_classes(packing)
        variants = [self._gemm_variant(shape, most, x.rows, refs, options, amax) for most in classes]
        yield Launch(c.name, x.rows, tuple(variants))
        if c.out is None:
            yield from choosing(self.plan, c.name, c.n, self.capability)

    def _gemm_variant(
        self, shape: _Shape, most: int, rows: str, refs: dict[str, Ref], options: dict[str, Any], amax: Any
    ) -> Variant:
        """For up to `most` rows (0: any number); `amax`, if any, gets the number of partial amax values per row."""
        packing, n, k = shape
        tile = tiles.choose_batch_invariant(packing, n, k, most or tiles.LARGE_M, self.target)
        if not self.asm and tile.gemv:
            tile = replace(tile, rows=32)  # the interpreter runs programs one after the other, so fewer are faster
        spec = gemm.KernelSpec(packing, n, k, tile, multiprocessors=self.target.multiprocessors, **options)
        # A split-K kernel resets integer sums to zero for the next launch, float ones not: two workspaces.
        places = {"sums": "float_sums" if spec.float_sum else "sums", "arrived": "arrived"}
        for name, (items, dtype) in spec.workspace(most or MOST_ROWS).items():
            self.plan.need(places[name], items * dtype.itemsize)
        grid: tuple[Size, Size, Size] = ([rows, tile.tokens], *spec.grid(1)[1:])
        if spec.persistent:
            grid = spec.grid(1)
        work: dict[str, Ref] = {name: ["work", place] for name, place in places.items()}
        if amax is not None and spec.amax_parts:
            spec, amax[most] = replace(spec, amax=True), spec.amax_parts
            work["amax"] = self.plan.need("amax", 4 * spec.amax_parts, "tokens")
        return Variant(self.plan.add(gemm.kernel(spec)), grid, refs | work, most)

    def _logits(self, c: p.Logits) -> Iterator[Launch]:
        b = self.program.buffer(c.x)
        spec = RowSpec(x_stride=b.stride, out_stride=b.width, **in_blocks(b.width))
        args: dict[str, Ref] = {"x": self.ref(c.x), "out": ["input", "logits"]}
        variant = Variant(self.plan.add(spec.kernel(self.capability)), (b.rows, spec.blocks, 1), args)
        yield Launch(c.name, b.rows, (variant,))
        yield from choosing(self.plan, c.name, b.width, self.capability)

    def _rope_append(self, c: p.RopeAppend) -> Iterator[Launch]:
        spec = AppendSpec(
            self.plan.kv,
            c.heads,
            self.program.buffer(c.qkv).stride,
            c.q_offset,
            c.k_offset,
            c.v_offset,
            c.rotary_dim if c.inv_freq is not None else 0,
            c.scaling,
            c.interleaved,
            c.block,
            c.center is not None,
            self.asm,
            norm_q=HeadNorm.of(self.norms.get("q")),
            norm_k=HeadNorm.of(self.norms.get("k")),
            times=tuple(name for name in ("query_table", "query_weight") if getattr(c, name) is not None),
        )
        args = {"x": self.ref(c.qkv), **self._step_args(c.layer), "row_sequence": ["input", "row_sequence"]}
        given = (name for name in ("inv_freq", "center", *spec.times) if getattr(c, name) is not None)
        args |= {name: ["weight", getattr(c, name)] for name in given}
        for part, norm in self.norms.items():
            args |= {f"{part}_{role}": ref for role, ref in _vectors(norm.weight, norm.bias).items()}
        self.norms = {}
        args["M"] = ["count", "tokens"]
        if self.plan.kv.hierarchical:
            every = []
            for most, shares, each in ROUNDING:
                one = replace(spec, shares=shares, rounding=each * spec.kv.heads)
                every.append(self._append_variant(one, most, args))
            yield Launch(c.name, "decoding_tokens", tuple(every))
            yield from self._append_staged(c, replace(spec, staged=True), args)
        else:
            every = [self._append_variant(replace(spec, tokens=tokens), most, args) for most, tokens in APPENDED]
            yield Launch(c.name, "tokens", tuple(every))

    def _append_variant(self, spec: AppendSpec, most: int, args: dict[str, Ref]) -> Variant:
        """A variant for up to `most` rows: one program per head and spec.tokens tokens."""
        rows = "prompt_tokens" if spec.staged else "decoding_tokens" if spec.rounds else "tokens"
        each: Size = [rows, spec.tokens] if spec.tokens > 1 else rows
        return Variant(self.plan.add(spec.kernel(self.capability)), (each, spec.programs, 1), args, most)

    def _append_staged(self, c: p.RopeAppend, spec: AppendSpec, args: dict[str, Ref]) -> Iterator[Launch]:
        """Appends of prompts: stages keys and values, as they may not all fit the ring, then rounds groups."""
        self.staged_layer = c.layer
        args = args | self._staged_args()
        every = [self._append_variant(replace(spec, tokens=tokens), most, args) for most, tokens in APPENDED]
        yield Launch(f"{c.name}.fresh", "prompt_tokens", tuple(every))
        rounding = StagedSpec(spec.kv, to_ring=False)
        grid: tuple[Size, Size, Size] = (["prompt_queries", HIER_GROUP], rounding.programs, "prompts")
        variant = Variant(self.plan.add(rounding.kernel(self.capability)), grid, args | _OF_PROMPTS)
        yield Launch(f"{c.name}.round", "prompt_tokens", (variant,))

    def _copy_to_ring(self, c: p.Attention) -> Iterator[Launch]:
        """After attention of prompts: copies the newest staged groups to the ring."""
        if self.staged_layer != c.layer:
            raise UnsupportedError("attention over a hierarchical cache reads once what its layer has just appended")
        self.staged_layer, spec = None, StagedSpec(self.plan.kv, to_ring=True)
        args = {**self._step_args(c.layer), **self._staged_args(), "M": ["count", "tokens"]}
        grid: tuple[Size, Size, Size] = (["prompt_tokens", spec.tokens], spec.programs, 1)
        variant = Variant(self.plan.add(spec.kernel(self.capability)), grid, args)
        yield Launch(f"{c.name}.keep", "prompt_tokens", (variant,))

    def _staged_args(self) -> dict[str, Ref]:
        kv, names = self.plan.kv, ("row_sequence", "query_start")
        staged = self.plan.need("staged", MOST_ROWS * 4 * kv.heads * kv.dim)
        return {"staged": staged, "first_row": ["count", "decoding_tokens"], **{n: ["input", n] for n in names}}

    def _attention(self, c: p.Attention) -> Iterator[Launch]:
        kv, stride = self.plan.kv, self.program.buffer(c.q).stride
        result = self.result or c.out
        base = AttentionSpec(kv, c.heads, stride, c.scale, c.window, c.softcap, self.plan.split, inline_asm=self.asm)
        # Centered keys shift all scores of a query by one constant, which changes softmax only with a cap or sinks.
        base = replace(base, centered=bool(c.center and (c.softcap or c.sinks)), sinks=c.sinks is not None)
        base = replace(base, bias_positions=self.program.max_position if c.key_bias else 0)
        args = {"q": self.ref(c.q, column=c.q_offset), "out": self.ref(result), **self._step_args(c.layer)}
        args |= {"splits": ["count", "slots"], "query_start": ["input", "query_start"]}
        args |= {name: ["weight", getattr(c, name)] for name in ("center", "key_bias", "sinks")}
        args |= self._staged_args() if kv.hierarchical else {}
        for name, size in (("parts", c.heads * kv.dim * 4), ("stats", c.heads * 8)):
            args[name] = self.plan.need(name, size, "decoding_tokens", "slots")
        if self.program.buffer(result).stride != c.heads * kv.dim:
            raise UnsupportedError(f"{c.heads} heads of {kv.dim} are not whole blocks")
        out: Any = self.program.buffer(result).dtype
        whole = replace(base, cut="whole", out=out)
        for work, specs in (
            ("near", prefill_variants(whole)),
            ("far", far_variants(whole, self.plan.target.capability)),
        ):
            variants = [
                Variant(self.plan.add(spec.kernel(self.capability)), spec.prompt_grid, args | _OF_PROMPTS, most)
                for most, spec in specs
            ]
            yield Launch(f"{c.name}.{work}", work, tuple(variants))
        for work, spec in tiles.decode_attention(base, self.plan.limits).items():
            name = c.name if work == "coarse" else f"{c.name}.{work}"
            yield Launch(name, work, tuple(self._decode_attention(spec, args)))
        yield from self._merges(c, args, out)
        if kv.hierarchical:
            yield from self._copy_to_ring(c)

    def _merges(self, c: p.Attention, args: dict[str, Ref], out: Any) -> Iterator[Launch]:
        """Kernels that merge splits; if the result is quantized next, they also store each head's amax."""
        kv, amax = self.plan.kv, self.amax_parts.get(c.out)
        if amax is not None:
            args = args | {"amax": self.plan.need("amax", 8 * c.heads, "tokens")}
            amax[gemm.DECODE_TOKENS] = 2 * c.heads
            self.amax_from_merge.add(c.out)
        base = MergeSpec(kv, c.heads, window=c.window, split=self.plan.split, amax=amax is not None)
        base = replace(base, sinks=c.sinks is not None, out=out)
        for leaves, extra in ((1, ""), (kv.leaves, "fine_"))[: 1 + bool(self.plan.limits.fine_splits)]:
            kinds = ((1, True), (1, False), (2, True))
            specs = [replace(base, level=level, final=final, leaves=leaves) for level, final in kinds]
            one, part, groups = (self.plan.add(spec.kernel(self.capability)) for spec in specs)
            rows = "decoding_tokens"
            first = Variant(one, (rows, specs[0].programs, 1), args, GROUP_SPLITS)
            more = Variant(part, (rows, c.heads, [f"{extra}merged", GROUP_SPLITS]), args)
            yield Launch(f"{c.name}.{extra}merge", f"{extra}merged", (first, more))
            yield Launch(f"{c.name}.{extra}groups", f"{extra}groups", (Variant(groups, (rows, c.heads, 1), args),))

    def _decode_attention(self, base: AttentionSpec, args: dict[str, Ref]) -> list[Variant]:
        """Variants for up to MOST_QUERIES query positions per sequence; fewer positions have fewer rows per program."""
        found: list[Variant] = []
        for queries in range(1, MOST_QUERIES + 1):
            spec = for_queries(base, queries)
            programs, parts = -(-queries // spec.queries), "shares" if spec.multi_split else "slots"
            grid: tuple[Size, Size, Size] = (base.kv.heads * programs, "decoding", parts)
            found.append(Variant(self.plan.add(spec.kernel(self.capability)), grid, args, queries))
        # Drop a variant if the next one has the same kernel and grid.
        same = zip_longest(found, found[1:])
        return [a for a, b in same if b is None or (a.kernel, a.grid) != (b.kernel, b.grid)]

    def _step_args(self, layer: int) -> dict[str, Ref]:
        """Arguments of every kernel that accesses pages."""
        names = {name: ["input", name] for name in ("positions", "block_table")}
        pages: dict[str, Ref] = {name: ["kv", layer] for name in ("kv", "kv_words", "kv_full")}
        return {**names, **pages, "table_stride": ["count", "table_stride"]}


def _vectors(weight: str | None, bias: str | None) -> dict[str, Ref]:
    """References to a weight vector and a bias, if they exist."""
    named = {"weight": weight, "bias": bias}
    return {role: ["weight", name] for role, name in named.items() if name is not None}
