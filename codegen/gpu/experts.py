"""Launches of mixtures of experts: routing, sorting of slots by expert, and grouped GEMMs over the sorted slots.

A slot is one (token, chosen expert) pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qcompile import ops
from qcompile.codegen import program as p
from qcompile.codegen.gpu.gemm import expert_tiles
from qcompile.codegen.gpu.gemm import spec as gemm
from qcompile.codegen.gpu.gemm.pack import kernel_of, packing_of, padded_inputs
from qcompile.codegen.gpu.launches import MOST_ROWS, Launch, Plan, Ref, Size, Variant
from qcompile.codegen.gpu.reads import Reads
from qcompile.codegen.gpu.router import BlocksSpec, CombineSpec, RouteSpec, RouteStep, ScoresSpec
from qcompile.codegen.gpu.rows import RowSpec
from qcompile.errors import UnsupportedError
from qcompile.formats.activations import activation_format
from qcompile.formats.rounding import groups_of
from qcompile.targets import Target

SCORED = ((8, 1), (16, 2), (0, 4))
"""Most rows of a step (0: any number), and tokens per program of the router's scores."""
SMALL_BLOCK, LARGE_BLOCK = gemm.DECODE_TOKENS, 64
"""Slots per program of the grouped GEMM: while an expert gets at most SMALL_BLOCK on average, and beyond that."""
MEDIUM_ROWS = 64
"""Most rows of an intermediate class, because programs that sort slots scan the most rows of their class."""
GEMV_ROWS = 4
"""Most rows of a step that runs one GEMV per slot, as few slots share an expert."""


@dataclass
class Experts:
    """State while the launches of a program are made: what earlier calls have left in scratch memory."""

    program: p.Program
    plan: Plan
    target: Target
    inline_asm: bool
    ref: Callable[..., Ref]
    reads: Reads
    ordered: tuple[str, int] | None = None  # buffer of expert indices whose slots are sorted, number of experts
    quantized: tuple[Any, ...] | None = None  # buffer whose rows are quantized, and how (_quantize_key)

    def wrote(self, out: str | None) -> None:
        """Note that a call writes the buffer `out`, which outdates what was derived from it."""
        if self.ordered and self.ordered[0] == out:
            self.ordered = None
        if self.quantized and self.quantized[0] == out:
            self.quantized = None

    # ---- routers ------------------------------------------------------------------------------

    def scores(self, c: p.Gemm) -> Iterator[Launch]:
        """A router's linear in float32."""
        if c.epilogue != "store" or c.out is None:
            raise UnsupportedError(f"a linear in f32 that ends in {c.epilogue} has no GPU kernel")
        x, out = self.program.buffer(c.x), self.program.buffer(c.out)
        args: dict[str, Ref] = {"x": self.ref(c.x), "out": self.ref(c.out), "M": ["count", x.rows]}
        args |= {role: ["weight", name] for role, name in c.weights.items()}
        args |= {} if c.bias is None else {"bias": ["weight", c.bias]}
        variants = []
        for most, tokens in SCORED:
            spec = ScoresSpec(c.n, c.k, x.stride, out.stride, c.bias is not None, tokens)
            label = self.plan.add(spec.kernel(self.target.capability))
            variants.append(Variant(label, ([x.rows, tokens], spec.programs, 1), args, most))
        yield Launch(c.name, x.rows, tuple(variants))

    def route(self, calls: Sequence[p.Route]) -> Iterator[Launch]:
        """Consecutive routing steps, fused into one kernel as long as none writes where another reads or writes."""
        for call in calls:
            self.wrote(call.out)
        chain: list[p.Route] = []
        for call in calls:
            if chain and not self._is_fusable([*chain, call]):
                yield self._route_launch(chain)
                chain = []
            chain.append(call)
        yield self._route_launch(chain)

    def _stored(self, chain: Sequence[p.Route]) -> list[bool]:
        """For each step, whether its result is read outside the chain and must be stored."""
        last = self.program.calls.index(chain[0]) + len(chain) - 1
        return [self.reads.last(call.out) > last for call in chain]

    def _is_fusable(self, chain: Sequence[p.Route]) -> bool:
        """Whether the steps fit one kernel: none stores to memory that another program may still read."""
        written = [call.out for call, kept in zip(chain, self._stored(chain), strict=True) if kept]
        made = {call.out for call in chain}
        read = [name for call in chain for name in (call.x, call.index) if name is not None and name not in made]
        whole = not any(call.x in made and call.x_offset for call in chain)
        return whole and len(made) == len(chain) and self.reads.disjoint(written, read)

    def _route_launch(self, chain: Sequence[p.Route]) -> Launch:
        made = {call.out: place for place, call in enumerate(chain)}
        steps, args = [], {}
        for place, (call, kept) in enumerate(zip(chain, self._stored(chain), strict=True)):
            x, out = self.program.buffer(call.x), self.program.buffer(call.out)
            index = None if call.index is None else self.program.buffer(call.index)
            known = made.get(call.x), None if call.index is None else made.get(call.index)
            stride = out.stride if kept else 0
            strides = (x.stride, index.stride if index else 0, stride)
            steps.append(RouteStep(call.kind, call.width, out.width, call.numbers, *known, *strides))
            args[f"x{place}"] = self.ref(call.x, column=call.x_offset)
            args[f"out{place}"] = self.ref(call.out)
            if call.index is not None:
                args[f"index{place}"] = self.ref(call.index)
        label = self.plan.add(RouteSpec(tuple(steps)).kernel(self.target.capability))
        return Launch(chain[0].name, "tokens", (Variant(label, ("tokens", 1, 1), args),))

    # ---- experts ------------------------------------------------------------------------------

    def gemm(self, c: p.ExpertGemm) -> Iterator[Launch]:
        """A linear of the experts as a grouped GEMM, after quantizing inputs and sorting slots unless that is done."""
        if c.rows % 32:
            raise UnsupportedError(f"experts of {c.n} outputs: GPU kernels take multiples of 32")
        packing = packing_of(c.format, c.activation)
        if packing == "f32":
            raise UnsupportedError("experts in f32 have no GPU kernels")
        k = padded_inputs(c.k, packing)
        yield from self._quantize(c, k)
        classes = self._classes(c)
        gemv = self._has_gemv(c)
        if self.ordered != (c.index, c.experts):
            yield self._order(c, classes)
        kind, out = activation_format(c.activation), self.program.buffer(c.out)
        format = kernel_of(packing, c.activation)
        stride = self.program.buffer(c.index).stride
        experts = gemm.Experts(c.experts, c.slots, c.x_slots > 1, out.stride, stride)
        args = self._input(c, k) | {role: ["weight", name] for role, name in c.weights.items()}
        args |= {"out": self.ref(c.out), "order": ["work", "order"], "blocks": ["work", "blocks"]}
        args["index"] = self.ref(c.index)
        args |= {} if c.bias is None else {"bias": ["weight", c.bias]}
        variants = []
        blocks: list[tuple[int, int, Size]] = [(spec.most, spec.tokens, spec.grid) for spec in classes]
        for most, tokens, programs in [(GEMV_ROWS, 1, ["tokens", 1, c.slots, 0])] * gemv + blocks:
            tile = expert_tiles.choose(format, c.rows, k, tokens, self.target)
            if not self.inline_asm and tokens == 1:  # the interpreter runs programs serially
                tile = replace(tile, rows=32)
            options: dict[str, Any] = {"bias": c.bias is not None, "inline_asm": self.inline_asm, "out": "f32"}
            options |= {
                "width": c.n,
                "x_groups": kind.group > 0,
                "experts": experts,
                "multiprocessors": self.target.multiprocessors,
            }
            options |= {"gated": ops.GATED.get(c.epilogue, ""), "limit": c.limit, "offset": c.offset}
            spec = gemm.KernelSpec(format, c.experts * c.rows, k, tile, **options)
            grid: tuple[Size, Size, Size] = (programs, c.rows // tile.rows, 1)
            variants.append(Variant(self.plan.add(gemm.kernel(spec)), grid, args, most % MOST_ROWS))
        yield Launch(c.name, "tokens", tuple(variants))

    def _has_gemv(self, c: p.ExpertGemm) -> bool:
        """Whether all expert linears that use this index have GEMV kernels."""
        calls = [each for each in self.program.calls if isinstance(each, p.ExpertGemm) and each.index == c.index]
        return all(kernel_of(packing_of(e.format, e.activation), e.activation) in gemm.GEMV_FORMATS for e in calls)

    def _classes(self, c: p.ExpertGemm) -> list[BlocksSpec]:
        """Kernels that sort slots, by most rows of a step, with the block size that the GEMM uses."""
        stride = self.program.buffer(c.index).stride
        few = max(SMALL_BLOCK, min(SMALL_BLOCK * c.experts // c.slots, MOST_ROWS))
        found = {SMALL_BLOCK: SMALL_BLOCK, min(MEDIUM_ROWS, few): SMALL_BLOCK, few: SMALL_BLOCK}
        if few < MOST_ROWS:
            found[MOST_ROWS] = LARGE_BLOCK
        return [BlocksSpec(c.experts, c.slots, stride, tokens, most) for most, tokens in found.items()]

    def _order(self, c: p.ExpertGemm, classes: Sequence[BlocksSpec]) -> Launch:
        args: dict[str, Ref] = {"index": self.ref(c.index), "M": ["count", "tokens"]}
        args["order"] = self.plan.need("order", 4 * c.slots, "tokens")
        args["blocks"] = self.plan.need("blocks", 12 * max(spec.list for spec in classes))
        self.ordered = (c.index, c.experts)
        variants = [
            Variant(self.plan.add(spec.kernel(self.target.capability)), (c.experts, 1, 1), args, spec.most % MOST_ROWS)
            for spec in classes
        ]
        if self._has_gemv(c):
            variants.insert(0, Variant("", (0, 0, 0), {}, GEMV_ROWS))
        return Launch(f"{c.name}.order", "tokens", tuple(variants))

    def _input(self, c: p.ExpertGemm, k: int) -> dict[str, Ref]:
        """The quantized inputs, rows padded to k; nothing writes the padding, so it stays zero."""
        kind, slots = activation_format(c.activation), c.x_slots
        name, size = f"expert_x_{c.k}_{k}_{c.activation}", kind.dtype.itemsize
        found = {"x": self.plan.need(name, slots * k * size, "tokens")}
        if kind.top:
            scales = groups_of(k, kind.group)
            found["x_scale"] = self.plan.need(f"{name}_scale", 4 * slots * scales, "tokens")
            found["x_sum"] = self.plan.need("expert_x_sum", 4 * slots, "tokens")
        return found

    def _quantize(self, c: p.ExpertGemm, k: int) -> Iterator[Launch]:
        b = self.program.buffer(c.x)
        if b.dtype != "f32" or (c.x_slots > 1 and b.stride != c.x_slots * c.k):
            found = f"{c.x_slots} slots of {c.k} {b.dtype} in rows of {b.stride}"
            raise UnsupportedError(f"expert kernels read f32 slots without padding between them, not {found}")
        how = self._quantize_key(c, k)
        if self.quantized == how:
            return
        self.quantized = how
        spec, into = self._quantize_spec(c, k)
        spec = replace(spec, x_stride=b.stride if c.x_slots == 1 else c.k)
        grid: tuple[Size, Size, Size] = (["tokens", 1, c.x_slots, 0], 1, 1)
        label = self.plan.add(spec.kernel(self.target.capability))
        yield Launch(f"{c.name}.round", "tokens", (Variant(label, grid, into | {"x": self.ref(c.x)}),))

    def _quantize_key(self, c: p.ExpertGemm, k: int) -> tuple[Any, ...]:
        return c.x, c.x_slots, c.k, k, c.activation

    def _quantize_spec(self, c: p.ExpertGemm, k: int) -> tuple[RowSpec, dict[str, Ref]]:
        """A kernel that quantizes rows of c.k elements for the experts, and its arguments except the rows."""
        kind, into = activation_format(c.activation), self._input(c, k)
        spec = RowSpec(c.k, 0, k, out="q8" if kind.top else c.activation)
        if not kind.top:
            return spec, {"out": into["x"]}
        scales = groups_of(k, kind.group)
        filled = scales if scales != groups_of(c.k, kind.group) else 0
        spec = replace(spec, top=kind.top, group=kind.group, last_top=kind.last_top, row_scales=filled)
        spec = replace(spec, sums=not kind.group)
        return spec, {"out": into["x"], "out_scale": into["x_scale"], "out_sum": into["x_sum"]}

    def quantized_by(self, norm: p.Norm) -> tuple[RowSpec, dict[str, Ref]] | None:
        """The quantization of a norm's rows, to be fused into the norm, if the next experts read them; else None."""
        calls = self.program.calls
        c = next((call for call in calls[calls.index(norm) + 1 :] if isinstance(call, p.ExpertGemm)), None)
        b = self.program.buffer(norm.out)
        if c is None or (c.x, c.x_slots, c.k, b.dtype) != (norm.out, 1, b.width, "f32"):
            return None
        packing = packing_of(c.format, c.activation)
        if packing == "f32":
            return None
        k = padded_inputs(c.k, packing)
        self.quantized = self._quantize_key(c, k)
        return self._quantize_spec(c, k)

    def addend(self, c: p.Combine, after: p.Call | None) -> str | None:
        """The buffer that `after` adds to the sum over a token's slots, if one kernel can do both; else None.

        Nothing else may read the sum, and the result must not overlap the slots or scores in memory.
        """
        if not isinstance(after, p.Elementwise) or after.kind != "add" or after.weight is not None:
            return None
        other = after.other if after.x == c.out else after.x
        if (
            other is None
            or other == c.out
            or c.out not in (after.x, after.other)
            or after.x_offset
            or after.other_offset
        ):
            return None
        read = [c.x, *([c.scores] if c.scores else [])]
        return other if self.reads.alone(after, c.out) and self.reads.disjoint([after.out], read) else None

    def combine(self, c: p.Combine, after: p.Elementwise | None, other: str | None) -> Iterator[Launch]:
        """The sum over a token's slots; with `after`, the buffer `other` is added to it."""
        x, out = self.program.buffer(c.x), self.program.buffer(after.out if after else c.out)
        stride = 0 if c.scores is None else self.program.buffer(c.scores).stride
        added = 0 if other is None else self.program.buffer(other).stride
        spec = CombineSpec(c.slots, self.program.buffer(c.out).width, x.stride, out.stride, stride, added)
        args = {"x": self.ref(c.x), "out": self.ref(out.name)}
        args |= {role: self.ref(name) for role, name in (("scores", c.scores), ("other", other)) if name is not None}
        grid: tuple[Size, Size, Size] = ("tokens", spec.programs, 1)
        yield Launch(c.name, "tokens", (Variant(self.plan.add(spec.kernel(self.target.capability)), grid, args),))
