"""Launches of attention and of appends to the KV cache (kernels: attention.py, attention_merge.py, append.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from qcompile.codegen.calls import Attention, RopeAppend, RopeHeads
from qcompile.codegen.gpu import fused
from qcompile.codegen.gpu.append import AppendSpec, HeadNorm, StagedSpec
from qcompile.codegen.gpu.attention import AttentionSpec
from qcompile.codegen.gpu.attention_merge import MergeSpec
from qcompile.codegen.gpu.attention_splits import GROUP_SPLITS, MOST_QUERIES
from qcompile.codegen.gpu.attention_variants import far_variants, for_queries, prefill_variants, unpacked_variant
from qcompile.codegen.gpu.context import PlanContext, amax_ref, single_launch, weight_refs
from qcompile.codegen.gpu.gemm import tiles
from qcompile.codegen.gpu.kv_pages import GpuKV
from qcompile.codegen.gpu.latent_launches import latent_attention
from qcompile.codegen.gpu.launches import Launch, Variant
from qcompile.codegen.gpu.operands import CacheRef, CountRef, Grid, GridSize, InputRef, Operands, ScratchRef
from qcompile.codegen.gpu.unpack_pages import UnpackSpec, unpacked_operands
from qcompile.errors import UnsupportedError
from qcompile.formats.kv import HIER_GROUP

APPENDED = ((8, 1), (128, 4), (0, 8))
"""Most rows of a step (0: any number), and the tokens per program that append them fastest on an H200."""
ROUNDING = ((8, 4, 8), (0, 2, 0))
"""Most rows of a step (0: any number), AppendSpec.shares, and fewest programs per row and KV head."""
_OF_PROMPTS: Operands = {
    "query_start": InputRef("prompt_start"),
    "block_table": InputRef("block_table", ("decoding", "table_stride")),
}
"""Operands of kernels for the sequences behind those that decode."""


def _page_args(layer: int) -> Operands:
    """Operands of every kernel that accesses pages."""
    args: Operands = {name: InputRef(name) for name in ("positions", "block_table")}
    args |= {name: CacheRef(layer) for name in ("kv", "kv_words", "kv_full")}
    return args | {"table_stride": CountRef("table_stride")}


def _staging_args(kv: GpuKV) -> Operands:
    """Operands of kernels that access the staging buffer for keys and values of prompts."""
    args: Operands = {name: InputRef(name) for name in ("row_sequence", "query_start")}
    args["staged"] = ScratchRef("staged", 4 * kv.heads * kv.dim, ("room",))
    return args | {"first_row": CountRef("decoding_tokens")}


# ---- appends ---------------------------------------------------------------------------------------


def append(context: PlanContext, c: RopeAppend | fused.NormedAppend) -> Iterator[Launch]:
    """The launches that rotate queries and keys, and append keys and values to the cache."""
    call, norms = (c.append, {"q": c.norm_q, "k": c.norm_k}) if isinstance(c, fused.NormedAppend) else (c, {})
    spec = _append_spec(context, call, HeadNorm.of(norms.get("q")), HeadNorm.of(norms.get("k")))
    args: Operands = {"x": context.ref(call.qkv), **_page_args(call.layer), "row_sequence": InputRef("row_sequence")}
    args |= weight_refs(
        inv_freq=call.inv_freq, center=call.center, query_table=call.query_table, query_weight=call.query_weight
    )
    for part, norm in norms.items():
        if norm is not None:
            args |= weight_refs(**{f"{part}_weight": norm.weight, f"{part}_bias": norm.bias})
    args["M"] = CountRef("tokens")
    if not context.hierarchical:
        yield Launch(c.name, "tokens", _append_variants(context, spec, args))
        return
    rounding = ((most, replace(spec, shares=shares, rounding=each * spec.kv.heads)) for most, shares, each in ROUNDING)
    variants = (_append_variant(context, one, most, args) for most, one in rounding)
    yield Launch(c.name, "decoding_tokens", tuple(variants))
    yield from _append_staged(context, c.name, replace(spec, staged=True), args)


def rope_heads(context: PlanContext, c: RopeHeads) -> Iterator[Launch]:
    """The launch that changes heads by position in place."""
    factors = {"query_table": c.table, "query_weight": c.weight}
    spec = AppendSpec(
        kv=GpuKV("kv16", 0, c.head_dim),
        stride=context.buffer(c.x).stride,
        q_offset=c.offset,
        k_offset=0,
        v_offset=0,
        appends=False,
        times=tuple(name for name, weight in factors.items() if weight is not None),
        **_head_fields(context, c),
    )
    args: Operands = {"x": context.ref(c.x), "positions": InputRef("positions"), "M": CountRef("tokens")}
    args |= weight_refs(inv_freq=c.inv_freq, center=c.center, **factors)
    yield Launch(c.name, "tokens", _append_variants(context, spec, args))


def _head_fields(context: PlanContext, c: RopeAppend | RopeHeads) -> dict[str, Any]:
    """The fields of AppendSpec that say what happens to each head."""
    return {
        "heads": c.heads,
        "rotary_dim": c.rotary_dim if c.inv_freq is not None else 0,
        "scaling": c.scaling,
        "interleaved": c.interleaved,
        "hadamard": c.block,
        "centered": c.center is not None,
        "inline_asm": context.inline_asm,
    }


def _append_spec(context: PlanContext, c: RopeAppend, norm_q: HeadNorm | None, norm_k: HeadNorm | None) -> AppendSpec:
    return AppendSpec(
        kv=context.kvs[c.layer],
        stride=context.buffer(c.qkv).stride,
        q_offset=c.q_offset,
        k_offset=c.k_offset,
        v_offset=c.v_offset,
        norm_q=norm_q,
        norm_k=norm_k,
        times=tuple(name for name in ("query_table", "query_weight") if getattr(c, name) is not None),
        **_head_fields(context, c),
    )


def _append_variants(context: PlanContext, spec: AppendSpec, args: Operands) -> tuple[Variant, ...]:
    """Variants by number of rows, with more tokens per program for more rows."""
    return tuple(_append_variant(context, replace(spec, tokens=tokens), most, args) for most, tokens in APPENDED)


def _append_variant(context: PlanContext, spec: AppendSpec, most: int, args: Operands) -> Variant:
    """A variant for up to `most` rows: one program per head and spec.tokens tokens."""
    rows = "prompt_tokens" if spec.staged else "decoding_tokens" if spec.rounds else "tokens"
    grid: Grid = (GridSize(rows, spec.tokens), spec.programs, 1)
    return Variant(spec.kernel(context.capability), grid, args, most)


def _append_staged(context: PlanContext, name: str, spec: AppendSpec, args: Operands) -> Iterator[Launch]:
    """Appends of prompts: stages keys and values, as they may not all fit the ring, then rounds groups."""
    args = args | _staging_args(spec.kv)
    yield Launch(f"{name}.fresh", "prompt_tokens", _append_variants(context, spec, args))
    rounding = StagedSpec(spec.kv, to_ring=False)
    grid: Grid = (GridSize("prompt_queries", HIER_GROUP), rounding.programs, GridSize("prompts"))
    kernel = rounding.kernel(context.capability)
    yield single_launch(f"{name}.round", "prompt_tokens", kernel, grid, args | _OF_PROMPTS)


# ---- attention -------------------------------------------------------------------------------------


def attention(context: PlanContext, c: Attention, measured: bool = False) -> Iterator[Launch]:
    """The launches of attention. With `measured`, those for decoding store magnitudes of 2 parts of each head."""
    args = _attention_args(context, c)
    if c.value is not None:
        assert not measured
        yield from latent_attention(context, c, args, _OF_PROMPTS)
        return
    base, out = _attention_spec(context, c), context.buffer(c.out)
    if out.stride != c.heads * c.head_dim:
        values = f"{c.heads} heads of {c.head_dim} are {c.heads * c.head_dim} values"
        raise UnsupportedError(f"{values}, which GPU kernels do not fill up to {out.stride}: build for a CPU target")
    assert out.dtype != "q8"
    whole = replace(base, cut="whole", out=out.dtype)
    for work, specs in (("near", prefill_variants(whole)), ("far", far_variants(whole, context.target.capability))):
        variants = [
            Variant(spec.kernel(context.capability), spec.prompt_grid, args | _OF_PROMPTS, most) for most, spec in specs
        ]
        yield Launch(f"{c.name}.{work}", work, tuple(variants))
    yield from _unpacked_attention(context, c, whole, args)
    for work, spec in tiles.decode_attention(base, context.limits).items():
        name = c.name if work == "coarse" else f"{c.name}.{work}"
        yield Launch(name, work, tuple(_decode_variants(context, spec, args)))
    yield from _merges(context, c, args, measured)
    if context.hierarchical:
        yield _copy_to_ring(context, c)


def _unpacked_attention(context: PlanContext, c: Attention, whole: AttentionSpec, args: Operands) -> Iterator[Launch]:
    """Launches for steps of prompts that unpack pages before attention, where there are such kernels."""
    spec = unpacked_variant(whole, context.target.capability)
    if spec is None:
        return
    args = args | _OF_PROMPTS | unpacked_operands(spec.kv)
    before = UnpackSpec(spec.kv, window=spec.window, chunk=spec.chunk)
    yield single_launch(f"{c.name}.unpack", "unpacked", before.kernel(), before.grid, args)
    yield single_launch(f"{c.name}.unpacked", "far_unpacked", spec.kernel(context.capability), spec.prompt_grid, args)


def _attention_spec(context: PlanContext, c: Attention) -> AttentionSpec:
    """What the attention kernels of a call have in common."""
    return AttentionSpec(
        context.kvs[c.layer],
        c.heads,
        context.buffer(c.q).stride,
        c.scale,
        c.softcap,
        context.split,
        # Centered keys shift all scores of a query by one constant, which changes softmax only with a cap or sinks.
        centered=bool(c.center and (c.softcap or c.sinks)),
        inline_asm=context.inline_asm,
        bias_positions=context.program.max_position if c.key_bias else 0,
        sinks=c.sinks is not None,
        window=c.window,
        chunk=c.chunk,
    )


def _attention_args(context: PlanContext, c: Attention) -> Operands:
    """Operands of all attention and merge kernels of a call."""
    args: Operands = {"q": context.ref(c.q, column=c.q_offset), "out": context.ref(c.out), **_page_args(c.layer)}
    args |= {"splits": CountRef("slots"), "query_start": InputRef("query_start")}
    args |= weight_refs(center=c.center, key_bias=c.key_bias, sinks=c.sinks)
    args |= _staging_args(context.kvs[c.layer]) if context.hierarchical else {}
    counts = ("decoding_tokens", "slots")
    args["parts"] = ScratchRef("parts", 4 * c.heads * c.value_dim, counts)
    args["stats"] = ScratchRef("stats", 8 * c.heads, counts)
    return args


def _decode_variants(context: PlanContext, base: AttentionSpec, args: Operands) -> list[Variant]:
    """Variants for up to MOST_QUERIES query positions per sequence; fewer positions have fewer rows per program."""
    variants: list[Variant] = []
    for queries in range(1, MOST_QUERIES + 1):
        spec = for_queries(base, queries)
        programs, parts = -(-queries // spec.queries), "shares" if spec.multi_split else "slots"
        grid: Grid = (base.kv.heads * programs, GridSize("decoding"), GridSize(parts))
        variants.append(Variant(spec.kernel(context.capability), grid, args, queries))
    # Drop a variant if the next one has the same kernel and grid.
    same = zip_longest(variants, variants[1:])
    return [a for a, b in same if b is None or (a.kernel, a.grid) != (b.kernel, b.grid)]


def _merges(context: PlanContext, c: Attention, args: Operands, measured: bool) -> Iterator[Launch]:
    """Kernels that merge splits; if the result is `measured`, they also store each head's magnitudes."""
    kv, out = context.kvs[c.layer], context.buffer(c.out).dtype
    assert out != "q8"
    if measured:
        args = args | {"amax": amax_ref(2 * c.heads)}
    base = MergeSpec(
        kv,
        c.heads,
        split=context.split,
        amax=measured,
        sinks=c.sinks is not None,
        out=out,
        window=c.window,
        chunk=c.chunk,
    )
    for leaves, extra in ((1, ""), (kv.leaves, "fine_"))[: 1 + bool(context.limits.fine_splits)]:
        kinds = ((1, True), (1, False), (2, True))
        specs = [replace(base, level=level, final=final, leaves=leaves) for level, final in kinds]
        one, part, groups = (spec.kernel(context.capability) for spec in specs)
        rows = GridSize("decoding_tokens")
        first = Variant(one, (rows, specs[0].programs, 1), args, GROUP_SPLITS)
        more = Variant(part, (rows, c.heads, GridSize(f"{extra}merged", GROUP_SPLITS)), args)
        yield Launch(f"{c.name}.{extra}merge", f"{extra}merged", (first, more))
        yield single_launch(f"{c.name}.{extra}groups", f"{extra}groups", groups, (rows, c.heads, 1), args)


def _copy_to_ring(context: PlanContext, c: Attention) -> Launch:
    """After attention of prompts: copies the newest staged groups to the ring."""
    spec = StagedSpec(context.kvs[c.layer], to_ring=True)
    args = {**_page_args(c.layer), **_staging_args(spec.kv), "M": CountRef("tokens")}
    grid: Grid = (GridSize("prompt_tokens", spec.tokens), spec.programs, 1)
    return single_launch(f"{c.name}.keep", "prompt_tokens", spec.kernel(context.capability), grid, args)
