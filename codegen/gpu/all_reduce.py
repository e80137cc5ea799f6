"""Sums over the GPUs of a divided model, by row kernels that exchange through peer memory (peer_memory.py).

A sum of few rows is one kernel, beside the norm that follows: each GPU sends its parts of the rows to all, where each
number carries the number of the sum, and all GPUs compute the same. Sums of many rows are three kernels: each GPU sends
its parts of a row to the row's owner (SendSpec), the owner sums the row and computes the norm, and all collect what it
sends them (CollectSpec). So a GPU sends its share of the rows instead of all, and computes norms of its share. All add
in the order of ranks, element by element, and norms are the same kernel but for where the row comes from: the bits
depend neither on timing nor on the number of rows.

With many rows, each GPU may have only its own rows of the sum itself, where only later sums add it. All sums of a
program divide few rows from many by the same number, so a sum that adds such rows owns the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from qcompile.codegen.gpu import fused
from qcompile.codegen.gpu.context import PlanContext, weight_refs
from qcompile.codegen.gpu.exchange import (
    RowArray,
    RowExchange,
    exchange_facts,
    peer_arguments,
    peer_operands,
    places,
)
from qcompile.codegen.gpu.kernel import Argument, Kernel, render_template
from qcompile.codegen.gpu.launches import Launch, Variant
from qcompile.codegen.gpu.operands import CountRef, GridSize
from qcompile.codegen.gpu.peer_memory import PeerLayout
from qcompile.codegen.gpu.planned_sums import Sum, added_to, peer_layout, result_of, sent_arrays
from qcompile.codegen.gpu.row_launches import norm_fields, written_to
from qcompile.codegen.gpu.rows import RowSpec
from qcompile.targets import has_pdl

_POINTERS = {"f32": "*fp32", "bf16": "*bf16", "q8": "*i8"}


def _warps(block: int) -> int:
    return min(max(block // 512, 1), 8)


@dataclass(frozen=True)
class SendSpec:
    """Sends each row of x, f32 [rows, width], to the row's owner. `x_stride` is in elements."""

    width: int
    x_stride: int
    layout: PeerLayout

    @property
    def block(self) -> int:
        """Elements that a program handles."""
        return 1 << (self.width - 1).bit_length()

    def kernel(self, capability: int, asm: bool = True) -> Kernel:
        """The kernel for a compute capability. Without `asm` it is for Triton's interpreter."""
        name = f"send_rows_{self.layout.ranks}"
        arguments = [Argument("x", "*fp32"), *peer_arguments(self.layout.ranks)]
        facts = exchange_facts(self.layout, capability, asm)
        source = render_template("send_rows.py.jinja", spec=self, name=name, arguments=arguments, **facts)
        return Kernel(name, source, tuple(arguments), _warps(self.block), 1, has_pdl(capability))


@dataclass(frozen=True)
class CollectSpec:
    """Stores what the owners of the other rows have sent: `arrays`, of these types of elements."""

    arrays: tuple[RowArray, ...]
    types: tuple[str, ...]
    layout: PeerLayout

    def kernel(self, capability: int, asm: bool = True) -> Kernel:
        """The kernel for a compute capability. Without `asm` it does not wait, for Triton's interpreter."""
        name = f"collect_rows_{self.layout.ranks}"
        arguments = [Argument(array.name, of) for array, of in zip(self.arrays, self.types, strict=True)]
        arguments += peer_arguments(self.layout.ranks)
        facts = exchange_facts(self.layout, capability, asm) | {"array_places": places(self.arrays)}
        source = render_template("collect_rows.py.jinja", name=name, arguments=arguments, **facts)
        warps = _warps(max(array.block for array in self.arrays))
        return Kernel(name, source, tuple(arguments), warps, 1, has_pdl(capability))


# ---- launches --------------------------------------------------------------------------------------


def all_reduce(context: PlanContext, c: Sum) -> Iterator[Launch]:
    """The launches of a sum over ranks, and of the norm that follows it, by the number of rows."""
    layout, x, out = peer_layout(context), context.buffer(c.x), context.buffer(result_of(c))
    width, asm = x.width, context.inline_asm
    spec, args = RowSpec(width, x.stride, 0), {"x": context.ref(c.x), "tokens": CountRef(out.rows)}
    args |= {"out": context.ref(out.name)} | peer_operands(layout.ranks)
    if out.dtype == "q8":
        args |= {"out_scale": context.ref(out.name, "scale"), "out_sum": context.ref(out.name, "sums")}
    other, total = added_to(c), None
    if isinstance(c, fused.SumNorm):
        spec = RowSpec(width, x.stride, 0, **norm_fields(c.norm))
        args |= weight_refs(weight=c.norm.weight, bias=c.norm.bias)
        total = context.buffer(c.total)
        args["total"] = context.ref(total.name)
    if other is not None:
        args["added"] = context.ref(other)
    spec = written_to(context, out.name, spec)
    added = context.buffer(other).stride if other is not None else 0
    owned = RowExchange(layout, "owned", added, total.stride if total else 0, sent_arrays(context, c), asm)
    few, rows = layout.few_rows, GridSize(out.rows)

    def of_many(name: str, kernel: Kernel) -> Launch:
        nothing = Variant(None, (1, 1, 1), {}, few)
        return Launch(f"{c.name}.{name}", out.rows, (nothing, Variant(kernel, (rows, 1, 1), args)))

    yield of_many("send", SendSpec(width, x.stride, layout).kernel(context.capability, asm))
    packed = _packed(context, c, layout, RowExchange(layout, "packed", added, asm=asm))
    kernel = spec.kernel(context.capability, owned)
    many = Variant(kernel, (GridSize(out.rows, divisor=layout.ranks), 1, 1), args)
    yield Launch(c.name, out.rows, (replace(packed, args=args | packed.args), many))
    if isinstance(c, fused.SumNorm):
        kernel = replace(spec, x_stride=context.buffer(c.total).stride).kernel(context.capability)
        stored = args | {"x": context.ref(c.total)}
        yield Launch(f"{c.name}.norm", out.rows, (Variant(kernel, (rows, 1, 1), stored, few),))
    types = {"out": _POINTERS[out.dtype], "out_scale": "*fp32", "out_sum": "*i32", "total": "*fp32"}
    collect = CollectSpec(owned.arrays, tuple(types[array.name] for array in owned.arrays), layout)
    yield of_many("collect", collect.kernel(context.capability, asm))


def _packed(context: PlanContext, c: Sum, layout: PeerLayout, exchange: RowExchange) -> Variant:
    """The variant of a sum of few rows, which stores the sum itself."""
    x, out = context.buffer(c.x), context.buffer(c.total if isinstance(c, fused.SumNorm) else c.out)
    part = layout.spread or x.width
    spec = RowSpec(part, x.stride, out.stride, blocks=x.width // part)
    grid = (GridSize(out.rows), spec.blocks, 1)
    return Variant(spec.kernel(context.capability, exchange), grid, {"out": context.ref(out.name)}, layout.few_rows)
