"""Launches of attention over latents (kernels: codegen/gpu/attention_latent.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from qcompile.codegen.calls import Attention
from qcompile.codegen.gpu.attention_latent import LatentSpec, shape_for
from qcompile.codegen.gpu.attention_merge import MergeSpec
from qcompile.codegen.gpu.attention_splits import MOST_QUERIES
from qcompile.codegen.gpu.context import PlanContext, single_launch
from qcompile.codegen.gpu.kernel import Kernel
from qcompile.codegen.gpu.launches import Launch, Variant
from qcompile.codegen.gpu.operands import Grid, GridSize, Operands, Size
from qcompile.errors import UnsupportedError

ALL_SPLITS = 1 << 20
"""More splits than a context has: they are merged in order, without groups."""


def latent_attention(context: PlanContext, c: Attention, args: Operands, of_prompts: Operands) -> Iterator[Launch]:
    """The launches of attention `c` over latents. All its kernels have `args`, those for prompts also `of_prompts`."""
    if context.buffer(c.out).dtype != "f32" or context.buffer(c.out).stride != c.heads * c.value_dim:
        raise UnsupportedError(
            f"{c.heads} heads of {c.value_dim} in {context.buffer(c.out).dtype} are not whole blocks"
        )
    spec = LatentSpec(
        context.kvs[c.layer],
        c.heads,
        context.buffer(c.q).stride,
        c.scale,
        c.softcap,
        context.split,
        inline_asm=context.inline_asm,
        bias_positions=context.program.max_position if c.key_bias else 0,
        sinks=c.sinks is not None,
        window=c.window,
        chunk=c.chunk,
    )
    spec = shape_for(spec, context.capability, context.target.shared_bytes)
    whole = replace(spec, cut="whole")
    grid: Grid = (whole.programs("prompt_queries"), GridSize("prompts"), 1)
    for work in ("near", "far"):
        kernel = whole.kernel(context.capability)
        yield single_launch(f"{c.name}.{work}", work, kernel, grid, args | of_prompts)
    programs = [-(-queries * c.heads // spec.rows) for queries in range(1, MOST_QUERIES + 1)]

    def by_queries(kernel: Kernel, splits: Size) -> tuple[Variant, ...]:
        grids: list[Grid] = [(each, GridSize("decoding"), splits) for each in programs]
        return tuple(Variant(kernel, grid, args, queries) for queries, grid in enumerate(grids, 1))

    yield Launch(c.name, "coarse", by_queries(spec.kernel(context.capability), GridSize("slots")))
    if spec.warp_specialized:
        yield Launch(f"{c.name}.ordered", "ordered", by_queries(whole.kernel(context.capability), 1))
    merge = MergeSpec(
        spec.kv,
        c.heads,
        split=context.split,
        sinks=spec.sinks,
        most_splits=ALL_SPLITS,
        window=c.window,
        chunk=c.chunk,
    )
    grid = (GridSize("decoding_tokens"), merge.programs, 1)
    yield single_launch(f"{c.name}.merge", "merged", merge.kernel(context.capability), grid, args)
