"""Attention over latents on GPUs: interpreted against the graph's reference, in any steps, and compiled."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qcompile.codegen.gpu.append import AppendSpec
from qcompile.codegen.gpu.attention_latent import LatentSpec, shape_for
from qcompile.codegen.gpu.attention_merge import MergeSpec
from qcompile.codegen.gpu.kv_pages import GpuKV
from qcompile.codegen.gpu.latent_launches import ALL_SPLITS
from qcompile.codegen.gpu.plan import make_plan
from qcompile.codegen.gpu.router import EverySpec
from qcompile.codegen.gpu.sorted_slots import BlocksSpec
from qcompile.errors import UnsupportedError
from qcompile.targets import TARGETS
from tests.support.cases import first
from tests.support.compiled import Record
from tests.support.gluon_machine import launch
from tests.support.graphs import latent, step_inputs
from tests.support.interpreted import interpreted
from tests.support.lowering import gpu_program
from tests.support.tiny import Chunk

VOCAB = 64
NEAR = {"bf16 kv16": 0.005, "w8a8 kv16": 0.015, "bf16 kv8": 0.005, "bf16 kv4": 0.02}
"""Relative errors: values are rounded to bf16, or to codes, which may fall on the other side of an edge."""


def lowered(recipe: str, format: str, **shape: Any) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """The last graph of a decoder with latent attention, its program, and its packed weights."""
    sizes = {"vocab": VOCAB, "hidden": 64, "heads": 8, "plain": 32, "turned": 16, "narrow": 32, "rank": 64} | shape
    return gpu_program(latent(**sizes), recipe, {"cache.format": format})


def interpret_steps(recipe: str, format: str, length: int = 80, **shape: Any) -> None:
    """A long text beside a short one, as the reference has them; the long one's rows in any step, of any length and
    with others, have the same bits."""
    from tests.support.gpu_interpreter import Interpreter

    graph, program, blobs = lowered(recipe, format, **shape)
    assert program.kv.value is not None
    plan = make_plan(program, TARGETS["h200"], split=64, inline_asm=False)
    ids = torch.randint(0, VOCAB, (2, length), generator=torch.Generator().manual_seed(1))
    inputs = step_inputs(ids, None, graph)
    want = graph.run(*inputs)[0].view(2, length, -1)
    pages = inputs[3].tolist()
    machine = Interpreter(program, plan, blobs, rows=224)
    chunks = [Chunk(ids[s, :end].tolist(), 0, pages[s]) for s, end in ((0, length), (1, 9))]
    every, _ = machine.step(chunks)  # programs for prompts
    got, wanted = every[:length], torch.cat((want[0], want[1, :9]))
    error = ((every.double() - wanted).norm() / wanted.norm()).item()
    assert error < NEAR[f"{recipe} {format}"], error
    again = Interpreter(program, plan, blobs, rows=224)
    begun = length - 30
    for start, end in ((0, begun), (begun, begun + 1), (begun + 1, length - 4), (length - 4, length)):
        again.forget()
        part, _ = again.step([Chunk(ids[0, start:end].tolist(), start, pages[0])])
        # Here products of bf16 with few slots are summed by another kernel than with many; on a GPU none differs.
        assert torch.allclose(part, got[start:end], rtol=0, atol=1e-5), (start, end)
    alone = again.step([Chunk(ids[0, -1:].tolist(), length - 1, pages[0]), Chunk(ids[1, :1].tolist(), 0, pages[1])])[0]
    assert torch.allclose(alone[0], got[-1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", first(("w8a8 kv16",), NEAR))
def test_steps_over_latents_interpreted(case: str) -> None:
    interpreted(__name__, f"interpret_steps({', '.join(map(repr, case.split()))})")


def test_odd_sizes_interpreted() -> None:
    """Features that fill no block, and more heads than a program's rows; a window, capped scores, sinks and biases."""
    more = "window=30, softcap=2.0, more_scores=True"
    interpreted(__name__, f"interpret_steps('bf16', 'kv8', 66, heads=36, rank=96, turned=8, plain=64, {more})")


def interpret_every_expert() -> None:
    """Slots in the order of experts, as sorting finds it."""
    import triton.runtime  # noqa: F401  (chooses the interpreter)

    from qcompile.codegen.gpu import compile as gpu_compile

    experts, tokens = 5, 7
    index = torch.full((tokens, 32), -1, dtype=torch.int32)
    gpu_compile.load(EverySpec(experts, 32).kernel(80))[(tokens, 1, 1)](index)
    assert torch.equal(index[:, :experts], torch.arange(experts, dtype=torch.int32).expand(tokens, -1))
    result = []
    for every in (False, True):
        spec = BlocksSpec(experts, experts, 32, 4, 16, every)
        order = torch.full((tokens * experts,), -1, dtype=torch.int32)
        blocks = torch.full((spec.list, 3), -1, dtype=torch.int32)
        gpu_compile.load(spec.kernel(80))[(experts, 1, 1)](index, order, blocks, tokens)
        result.append((order, blocks[blocks[:, 0] >= 0]))
    for sorted_one, direct in zip(*result, strict=True):
        assert torch.equal(sorted_one, direct)


def test_every_expert_interpreted() -> None:
    interpreted(__name__, "interpret_every_expert()")


def interpret_merge() -> None:
    """Many splits, more than are loaded at a time, by programs of a part of the features; unwritten ones are NaN."""
    import triton.runtime  # noqa: F401  (chooses the interpreter)

    from qcompile.codegen.gpu import compile as gpu_compile

    torch.manual_seed(1)
    kv, heads, splits = GpuKV("kv16", 1, 320, value=(64, 320)), 2, 38
    spec = MergeSpec(kv, heads, split=8, most_splits=ALL_SPLITS)
    assert spec.dim_parts == 2
    positions = torch.tensor([300, 5, 263], dtype=torch.int32)
    parts, out = torch.randn(3, heads, splits, 256), torch.full((3, heads, 256), math.nan)
    stats = torch.stack((torch.randint(-5, 5, (3, heads, splits)).float(), 1 + torch.rand(3, heads, splits)), -1)
    for token, last in enumerate((positions // 8).tolist()):
        parts[token, :, last + 1 :] = stats[token, :, last + 1 :] = math.nan
    gpu_compile.load(spec.kernel(80))[(3, spec.programs, 1)](parts, stats, out, positions, splits)
    weight = torch.exp2(stats[..., 0].nan_to_num(-99)).double()
    wanted = (parts.nan_to_num() * weight[..., None]).sum(2) / (stats[..., 1].nan_to_num() * weight).sum(2)[..., None]
    assert ((out - wanted).norm() / wanted.norm()).item() < 1e-6  # sums of 38 float32 numbers


def test_merges_of_many_splits_interpreted() -> None:
    interpreted(__name__, "interpret_merge()")


# ---- warp groups (support/gluon_machine.py) ----------------------------------------------------------


class Steps:
    """Rows of sequences, of `counts` each, the last at the end of `contexts`; behind it, pages hold no numbers."""

    SPLIT = 128

    def __init__(self, heads: int, counts: list[int], contexts: list[int], **more: Any) -> None:
        torch.manual_seed(1)
        self.heads, self.counts = heads, counts
        kv = GpuKV("kv16", 1, 192, value=(64, 192))
        spec = LatentSpec(kv, heads, heads * 192, 192**-0.5, split=self.SPLIT, **more)
        self.spec = shape_for(spec, 90, TARGETS["h200"].shared_bytes)
        per_sequence = -(-max(contexts) // 64) + 1
        self.table = torch.randperm(len(counts) * per_sequence, dtype=torch.int32).view(len(counts), -1)
        self.pages = torch.randn(self.table.numel(), 64, 192).bfloat16()
        for sequence, end in enumerate(contexts):
            self.pages[self.table[sequence, end // 64], end % 64 :] = math.nan
        self.q, self.sinks = torch.randn(sum(counts), heads * 192), torch.linspace(-2, 12, heads)
        ranges = [torch.arange(end - count, end) for count, end in zip(counts, contexts, strict=True)]
        self.positions = torch.cat(ranges).int()
        self.start = torch.tensor([0, *counts]).cumsum(0).int()
        self.splits = -(-max(contexts) // self.SPLIT)

    def run(self, spec: LatentSpec) -> dict[str, Tensor]:
        """What a kernel writes."""
        result = {"out": torch.full((len(self.q), self.heads, 128), math.nan)}
        places = len(self.q), self.heads, self.splits
        result |= {"parts": torch.full((*places, 128), math.nan), "stats": torch.full((*places, 2), math.nan)}
        given = {"q": self.q, "kv": self.pages, "positions": self.positions, "query_start": self.start, **result}
        given |= {"block_table": self.table, "sinks": self.sinks}
        programs = -(-max(self.counts) * self.heads // spec.rows) + 1  # one more than any sequence has rows for
        grid = (programs, len(self.counts), 1 if spec.cut == "whole" else self.splits)
        launch(spec.kernel(90), grid, {**given, "table_stride": self.table.shape[1], "splits": self.splits})
        return result

    def merged(self, result: dict[str, Tensor]) -> Tensor:
        """Partial results of splits, added in order."""
        best, (parts, stats) = torch.full((len(self.q), self.heads), -1e30), (result["parts"], result["stats"])
        total, acc = torch.zeros_like(best), torch.zeros(*best.shape, 128)
        for split in range(self.splits):
            m, count, part = stats[:, :, split, 0], stats[:, :, split, 1], parts[:, :, split]
            seen = m.isfinite()
            higher = torch.where(seen, torch.maximum(best, m), best)
            fade, grow = torch.exp2(best - higher), torch.where(seen, torch.exp2(m - higher), 0.0)
            total = total * fade + torch.where(seen, count * grow, 0.0)
            acc = acc * fade[..., None] + torch.where(seen[..., None], part * grow[..., None], 0.0)
            best = higher
        total += torch.exp2(self.sinks * math.log2(math.e) - best) if self.spec.sinks else 0.0
        return acc * (1 / total)[..., None]

    def wanted(self) -> Tensor:
        """In float64."""
        result, spec = [], self.spec
        for sequence, (begin, end) in enumerate(zip(self.start[:-1], self.start[1:], strict=True)):
            keys = self.pages[self.table[sequence].long()].flatten(0, 1).double().nan_to_num()
            q = self.q[begin:end].double().unflatten(1, (self.heads, 192))
            score = torch.einsum("qhd,td->qht", q, keys) * spec.scale
            score = spec.softcap * torch.tanh(score / spec.softcap) if spec.softcap else score
            position, past = self.positions[begin:end, None], torch.arange(len(keys))
            hidden = past > position
            hidden = hidden | (past <= position - spec.window) if spec.window else hidden
            hidden = hidden | (past < position - position % spec.chunk) if spec.chunk else hidden
            score = score.masked_fill(hidden[:, None], -math.inf)
            if spec.sinks:
                score = torch.cat((score, self.sinks.double().expand(len(q), -1)[..., None]), -1)
            result.append(score.softmax(-1)[..., : len(keys)] @ keys[:, 64:])
        return torch.cat(result)


SCORES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 100, "sinks": True},
    "chunk": {"chunk": 52},
    "cap": {"softcap": 9.0},
}


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("heads", [24, 128])
def test_warp_groups_over_latents(heads: int, scores: str) -> None:
    """Both cuts against float64, and to the bit against each other; programs without rows, and of several positions."""
    steps = Steps(heads, [3, 1, 2], [300, 1, 130], **SCORES[scores])
    assert steps.spec.warp_specialized
    want, merged = steps.wanted(), steps.merged(steps.run(steps.spec))
    whole = steps.run(replace(steps.spec, cut="whole"))["out"]
    assert ((merged - want).norm() / want.norm()).item() < WARP_GROUPS_ERROR
    # The exponential of a sink is NumPy's in one, and torch's in the other.
    assert torch.allclose(whole, merged, rtol=1e-6, atol=1e-9) if steps.spec.sinks else torch.equal(whole, merged)


WARP_GROUPS_ERROR = 4e-3
"""Queries and weights of values are rounded to bf16."""


def test_a_row_of_warp_groups_has_its_bits_alone() -> None:
    steps = Steps(24, [3, 2], [200, 70])
    together = steps.run(replace(steps.spec, cut="whole"))["out"]
    alone = Steps(24, [3, 2], [200, 70])
    alone.q, alone.positions = steps.q[2:3].contiguous(), steps.positions[2:3].contiguous()
    alone.counts, alone.start = [1], torch.tensor([0, 1], dtype=torch.int32)
    assert torch.equal(alone.run(replace(steps.spec, cut="whole"))["out"][0], together[2])


def test_decoding_in_order_is_planned_if_every_layer_has_it() -> None:
    program = lowered("bf16", "kv16", rank=128, turned=64)[1]
    plan = make_plan(program, TARGETS["h200"])
    assert plan.ordered_programs == [-(-8 * queries // 64) for queries in range(1, 17)]
    [coarse], [ordered] = ([x for x in plan.launches if x.by == by] for by in ("coarse", "ordered"))
    for variant in ordered.variants:
        assert variant.code and {argument.name for argument in variant.code.arguments} <= set(variant.args)
    assert not replace(plan, launches=(*plan.launches, coarse)).ordered_programs
    assert not make_plan(program, TARGETS["a100"]).ordered_programs


def test_what_warp_groups_do_not_take() -> None:
    """Other sizes and codes have the kernel that all GPUs have."""
    sizes = (("kv16", 576, 64, {}, True), ("kv8", 576, 64, {}, False), ("kv16", 544, 32, {}, False))
    for format, dim, value, more, taken in (*sizes, ("kv16", 576, 64, {"bias_positions": 9}, False)):
        kv = GpuKV(format, 1, dim, value=(value, dim))
        spec = LatentSpec(kv, 16, 16 * dim, 0.1, **more)
        assert shape_for(spec, 90, TARGETS["h200"].shared_bytes).warp_specialized == taken
        assert not shape_for(spec, 80, TARGETS["a100"].shared_bytes).warp_specialized


@pytest.mark.parametrize(
    ("target", "heads", "format"),
    [
        *((target, 128, "kv8") for target in ("a100", "l40s", "h200", "b200")),
        *(("h200", 16, format) for format in ("kv16", "kv4")),
        *(("a100", 16, format) for format in ("kv16", "kv4")),
    ],
)
def test_compiled_for_every_architecture(target: str, heads: int, format: str, compiled: Record) -> None:
    """At DeepSeek-V3's sizes: matrix instructions, and shared memory that fits."""
    gpu = TARGETS[target]
    kv = GpuKV(format, 1, 576, value=(64, 576))
    for cut in ("split", "whole"):
        spec = LatentSpec(kv, heads, heads * 576 + 576, 0.1, cut=cut)  # type: ignore[arg-type]
        spec = shape_for(spec, gpu.capability, gpu.shared_bytes)
        result = compiled(spec.kernel(gpu.capability), gpu.capability)
        assert result.matrix and result.shared_bytes <= gpu.shared_bytes


@pytest.mark.parametrize("format", ["kv16", "kv8", "kv4"])
def test_appends_are_compiled(format: str, compiled: Record) -> None:
    kv = GpuKV(format, 1, 576, value=(64, 576))
    for tokens in (1, 8):
        spec = AppendSpec(kv, 128, 129 * 576, 0, 128 * 576, None, rotary_dim=64, tokens=tokens)
        compiled(spec.kernel(90), 90)


def test_other_shapes_are_refused() -> None:
    for heads, dim, value in ((2, 576, (64, 576)), (1, 576, (64, 500)), (1, 1088, (64, 1088)), (1, 33, (8, 33))):
        with pytest.raises(UnsupportedError, match="GPU attention takes one key head"):
            GpuKV("kv16", heads, dim, value=value)
