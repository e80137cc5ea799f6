"""Launches of routers of experts, and of sums over a token's slots (kernels: codegen/gpu/router.py)."""

from __future__ import annotations

from collections.abc import Iterator

from qcompile.codegen.calls import Combine, EveryExpert, Gemm
from qcompile.codegen.gpu import fused
from qcompile.codegen.gpu.context import PlanContext, single_launch, weight_refs
from qcompile.codegen.gpu.launches import Launch, Variant
from qcompile.codegen.gpu.operands import CountRef, GridSize, Operands
from qcompile.codegen.gpu.router import CombineSpec, EverySpec, RouteSpec, RouteStep, ScoresSpec
from qcompile.errors import UnsupportedError

SCORED = ((8, 1), (16, 2))
"""Most rows of a step, and tokens per program of the router's scores. Larger steps have programs of MOST_TOKENS."""
MOST_TOKENS = 4
CACHED_BYTES = 1 << 24
"""Most bytes of x that an L2 cache holds while programs read all of x for each few rows of w: with more, programs that
share rows of x run together."""


def scores(context: PlanContext, c: Gemm) -> Iterator[Launch]:
    """The launch of a router's linear in float32."""
    if c.epilogue != "store" or c.out is None:
        raise UnsupportedError(f"a linear in f32 that ends in {c.epilogue} has no GPU kernel")
    x, out = context.buffer(c.x), context.buffer(c.out)
    args: Operands = {"x": context.ref(c.x), "out": context.ref(c.out), "M": CountRef(x.rows)}
    args |= weight_refs(**c.weights, bias=c.bias)
    variants = []
    cached = CACHED_BYTES // (4 * c.k)
    sizes = [(most, tokens, False) for most, tokens in (*SCORED, (cached, MOST_TOKENS)) if most <= cached]
    for most, tokens, rows_first in (*sizes, (0, MOST_TOKENS, True)):
        spec = ScoresSpec(c.n, c.k, x.stride, out.stride, c.bias is not None, tokens, rows_first)
        kernel = spec.kernel(context.capability)
        variants.append(Variant(kernel, spec.grid(GridSize(x.rows, tokens)), args, most))
    yield Launch(c.name, x.rows, tuple(variants))


def route_chain(context: PlanContext, c: fused.RouteChain) -> Iterator[Launch]:
    """The launch of consecutive steps of a router."""
    made = {step.out: place for place, step in enumerate(c.steps)}
    steps: list[RouteStep] = []
    args: Operands = {}
    for place, (step, stored) in enumerate(zip(c.steps, c.stored, strict=True)):
        stride, out = context.buffer(step.x).stride if step.x else 0, context.buffer(step.out)
        index = None if step.index is None else context.buffer(step.index)
        steps.append(
            RouteStep(
                step.kind,
                step.width,
                out.width,
                eps=step.eps,
                floor=step.floor,
                groups=step.groups,
                keep=step.keep,
                count=step.count,
                tolerance=step.tolerance,
                x=made.get(step.x) if step.x else None,
                index=None if step.index is None else made.get(step.index),
                x_stride=stride,
                index_stride=index.stride if index else 0,
                out_stride=out.stride if stored else 0,
            )
        )
        args |= weight_refs(**{f"x{place}": step.table})
        if step.x:
            args[f"x{place}"] = context.ref(step.x, column=step.x_offset)
        args[f"out{place}"] = context.ref(step.out)
        if step.index is not None:
            args[f"index{place}"] = context.ref(step.index)
    kernel = RouteSpec(tuple(steps)).kernel(context.capability)
    yield single_launch(c.name, "tokens", kernel, (GridSize("tokens"), 1, 1), args)


def every_expert(context: PlanContext, c: EveryExpert) -> Iterator[Launch]:
    """The launch that chooses all experts for every token."""
    kernel = EverySpec(c.experts, context.buffer(c.out).stride).kernel(context.capability)
    yield single_launch(c.name, "tokens", kernel, (GridSize("tokens"), 1, 1), {"out": context.ref(c.out)})


def combine(context: PlanContext, c: Combine | fused.CombineAdd) -> Iterator[Launch]:
    """The launch of sums over a token's slots. If there is one, it may add another buffer."""
    other, results = (c.other, 1) if isinstance(c, fused.CombineAdd) else (None, c.results)
    buffers = {"x": c.x, "out": c.out, "scores": c.scores, "other": other}
    strides = {role: context.buffer(name).stride if name else 0 for role, name in buffers.items()}
    width = context.buffer(c.out).width // results
    spec = CombineSpec(c.slots, width, strides["x"], strides["out"], strides["scores"], strides["other"], results)
    args: Operands = {role: context.ref(name) for role, name in buffers.items() if name}
    kernel = spec.kernel(context.capability)
    rows = context.buffer(c.out).rows
    yield single_launch(c.name, rows, kernel, (GridSize(rows), spec.programs, 1), args)
