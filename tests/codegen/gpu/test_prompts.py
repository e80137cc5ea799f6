"""Attention of prompts after many positions, with queries as the rows of MMAs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from qcompile.codegen.gpu.attention import AttentionSpec
from qcompile.codegen.gpu.attention_variants import far_variants, unpacked_variant
from qcompile.codegen.gpu.gemm import tiles
from qcompile.codegen.gpu.kv_pages import GpuKV
from qcompile.codegen.gpu.plan import make_plan
from qcompile.runtime.step import Rows, pages_for
from qcompile.targets import TARGETS
from tests.codegen.gpu.test_step import RECIPES, SHAPE, lowered
from tests.support.cases import first
from tests.support.compiled import Record
from tests.support.graphs import decoder, step_inputs
from tests.support.interpreted import interpreted
from tests.support.tiny import Chunk

WIDE = {"heads": 2, "kv_heads": 1, "head_dim": 64, "hidden": 64, "ffn": 64}
MIXED: dict[str, Any] = WIDE | {"vocab": 40, "hidden": 128, "ffn": 128, "layers": 1}
UNEVEN = {"heads": 4, "kv_heads": 2, "head_dim": 48, "hidden": 64, "ffn": 64}
BOTH = {"sinks": True, "key_bias": True}
WAYS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "kv16": ("bf16", "kv16", WIDE),
    "kv16 of 48": ("bf16", "kv16", {**UNEVEN, **BOTH}),
    "kv8": ("w8a8", "kv8", WIDE),
    "kv8 of 48": ("w8a8", "kv8", {**UNEVEN, "softcap": 2.0, "key_bias": True, "chunk": 70}),
    "kv4": ("qserve", "kv4", WIDE),
    "kv4 of 48": ("qserve", "kv4", {**UNEVEN, "window": 70, **BOTH}),
    "kv4 of 160": ("qserve", "kv4", {**WIDE, "head_dim": 160, "softcap": 2.0}),
    "kv16 of 512": ("bf16", "kv16", {**WIDE, "head_dim": 512}),
    "kv16 of 320": ("bf16", "kv16", {**WIDE, "head_dim": 320, "window": 70, **BOTH}),
    "kv8 of 320": ("w8a8", "kv8", {**WIDE, "head_dim": 320, "softcap": 2.0, "chunk": 70, "sinks": True}),
    "kv4 of 320": ("qserve", "kv4", {**WIDE, "head_dim": 320, "window": 70, **BOTH}),
    "kv4 of 512": ("qserve", "kv4", {**WIDE, "head_dim": 512}),
    "kv_hier": ("bf16", "kv_hier", WIDE),
    "kv_hier of 48": ("bf16", "kv_hier", {**UNEVEN, "window": 150, "chunk": 200, **BOTH}),
}


def interpret_prompt(way: str) -> None:
    """Steps of two texts by both orders of operands: the reference's results, with the same bits."""
    from qcompile.codegen.gpu import attention_variants
    from tests.support.gpu_interpreter import Interpreter

    recipe, format, more = WAYS[way]
    attention_variants.FEW_FAR_ROWS = attention_variants.FEW_LARGE_ROWS = dict.fromkeys((16, 8, 4), 17)
    graph, program, blobs = lowered(recipe, passes={"cache.format": format}, **more)
    length, begun, split = (400, 361, 128) if format == "kv_hier" else (160, 121, 64)
    ids = torch.randint(0, SHAPE["vocab"], (1, length), generator=torch.Generator().manual_seed(2))
    want = graph.run(*step_inputs(ids, None, graph))[0]
    pages = list(range(pages_for(length, 64, 384 if format == "kv_hier" else 0)))
    plan = make_plan(program, TARGETS["h200"], split=split, inline_asm=False)
    assert any("_whole" in name and "B operands" in kernel.source for name, kernel in plan.kernels.items())
    far = [launch for launch in plan.launches if launch.by == "far"]
    assert all([variant.most for variant in launch.variants[:-1]] == [17] for launch in far) and far
    spare = max(pages) + 1
    machine = Interpreter(program, plan, blobs, rows=448, pages=spare + len(pages) + 1)
    other = Chunk(ids[0, :19].tolist(), 0, list(range(spare, spare + len(pages))))
    machine.fill([Chunk(ids[0, :begun].tolist(), 0, pages)])

    def step(end: int, near: int) -> torch.Tensor:
        """A text's rows from `begun` to `end`, after those of another."""
        machine.near = near
        machine.forget()
        return machine.step([other, Chunk(ids[0, begun:end].tolist(), begun, pages)])[0]

    for end in (begun + 18, length):  # a part of a program's rows, or several programs
        result, usual = step(end, 0), step(end, 100)
        assert torch.equal(result, usual)
        expected = want[[*range(19), *range(begun, end)]]
        error = ((result.double() - expected).norm() / expected.norm()).item()
        assert error < RECIPES[recipe], error
        assert torch.equal(step(end - 1, 0), result[:-1])  # a row's result does not depend on its neighbours


# Every option of scores, and every cache but that of 4 bits, which steps below have.
FIRST = ("kv16", "kv8 of 48", "kv_hier of 48", "kv8 of 320")


@pytest.mark.parametrize("way", first(FIRST, WAYS))
def test_queries_as_rows_interpreted(way: str) -> None:
    interpreted(__name__, f"interpret_prompt({way!r})")


def interpret_mixed_steps(recipe: str) -> None:
    """Texts that decode in front of a prompt: by kernels of their own, with the bits of the prompt's kernels.

    Over a hierarchical cache one that decodes and the prompt each begin a group, for which they round an older one.
    """
    from tests.support.gpu_machine import HostLaunch, Machine

    torch.manual_seed(0)
    hierarchical = recipe == "quantspec"
    machine = Machine(decoder(**MIXED), recipe, pages=60 if hierarchical else 9, split=128 if hierarchical else 64)
    target, launched = machine.target, []
    HostLaunch.watch = launched.append
    # Computed, and after the step: two texts of few rows and a prompt.
    ends = ((382, 386), (69, 70), (250, 290)) if hierarchical else ((147, 149), (69, 70), (70, 110))
    texts = [[(7 * i + 3 * k) % MIXED["vocab"] for i in range(400)] for k in range(3)]
    each = target.limits.pages_for(ends[0][1])
    pages = [range(k * each, (k + 1) * each) for k in range(3)]
    for text, place, (begun, _) in zip(texts, pages, ends, strict=True):
        for start in range(0, begun, 64):
            target.step([Rows(text[start : min(start + 64, begun)], start, place, 0)], logits=False)

    def step(order: list[int]) -> tuple[list[torch.Tensor], set[str]]:
        launched.clear()
        rows = [Rows(texts[i][slice(*ends[i])], ends[i][0], pages[i], ends[i][1] - ends[i][0]) for i in order]
        _, logits = target.step(rows, logits=True)
        parts = torch.from_numpy(logits.copy()).split([row.outputs for row in rows])
        cuts = {name.split("-")[0].split("_")[-1] for name in launched if name.startswith("attention")}
        return [parts[order.index(i)] for i in range(3)], cuts

    def next_tokens() -> torch.Tensor:
        """Of a step behind: over the keys and values that the last one has left."""
        rows = [Rows(texts[i][end : end + 1], end, pages[i], 1) for i, (_, end) in enumerate(ends)]
        return torch.from_numpy(target.step(rows, logits=True)[1].copy())

    early, _ = step([0, 1, 2])  # later steps would find what this one has rounded
    left = next_tokens()
    for near in (1,) if hierarchical else (1, 100):
        target.plan["near_splits"] = near
        want, cuts = step([2, 0, 1])
        assert cuts == {"whole"}
        assert all(torch.equal(*pair) for pair in zip(early, want, strict=True))
        assert torch.equal(next_tokens(), left)
        for fine, decoding, order in ((0, "split", [0, 1, 2]), (100, "leaf", [1, 0, 2])):
            target.plan["fine_splits"] = fine
            result, cuts = step(order)
            assert cuts == {"whole", decoding}
            assert all(torch.equal(*pair) for pair in zip(result, want, strict=True))
        result, _ = step([0, 2, 1])  # one in front of the prompt, one behind it
        assert all(torch.equal(*pair) for pair in zip(result, want, strict=True))


@pytest.mark.parametrize("recipe", first(("qserve", "quantspec"), ["qserve", "bf16", "quantspec"]))
def test_decoding_beside_prompts_interpreted(recipe: str) -> None:
    interpreted(__name__, f"interpret_mixed_steps({recipe!r})")


def far(format: str, heads: int, kv_heads: int, dim: int, capability: int = 90, **more: Any) -> AttentionSpec:
    """The kernel for any number of rows."""
    kv = GpuKV(format, kv_heads, dim)
    base = AttentionSpec(kv, heads, heads * dim, 0.1, split=tiles.split_positions(kv), cut="whole", **more)
    return far_variants(base, capability)[-1][1]


@pytest.mark.parametrize("format", ["kv4", "kv8", "kv_hier"])
def test_both_products_are_of_all_features_at_once(format: str, compiled: Record) -> None:
    """As wgmma, in two programs a multiprocessor, with no more than sums of whole splits spilled."""
    spec = replace(far(format, 32, 8, 128), warp_specialized=False, stages=1)
    result = compiled(spec.kernel(90), 90)
    halves = "f16" if format == "kv_hier" else "bf16"
    assert f"wgmma.mma_async.sync.aligned.m64n128k16.f32.{halves}.{halves}" in result.matrix
    assert all("m64n128k16" in one or "m64n64k16" in one for one in result.matrix)
    assert result.threads == 128 and result.shared_bytes <= 113 * 1024
    assert result.spill_bytes <= 600


@pytest.mark.parametrize("more", [{}, {"window": 1000, "sinks": True}, {"softcap": 30.0}], ids=str)
@pytest.mark.parametrize("format", ["kv4", "kv8", "kv16", "kv4 unpacked", "kv8 unpacked"])
def test_consumers_share_what_producers_unpack(format: str, more: dict[str, Any], compiled: Record) -> None:
    """Two groups of rows and the producer in one program, with no more than sums of whole splits spilled."""
    format, *unpacked = format.split()
    spec = replace(far(format, 28, 4, 128, **more), warp_specialized=True, unpacked=bool(unpacked), stages=4)
    assert spec.queries == 2 * (64 // 7)
    result = compiled(spec.kernel(90), 90)
    keys = "bf16" if format == "kv16" else "f16"
    wanted = {f"m64n64k16.f32.{keys}.{keys}", "m64n128k16.f32.bf16.bf16"}
    assert {one.removeprefix("wgmma.mma_async.sync.aligned.") for one in result.matrix} == wanted
    assert result.threads == 384 and result.shared_bytes <= 227 * 1024
    # Two of three sums of 64 values a thread, which change once a split; versions of Triton differ by a fifth.
    assert result.spill_bytes <= 700


def test_where_programs_are_not_warp_specialized() -> None:
    """Where keys are not as the kernel's layouts have them, or scores need what it does not have."""
    for spec in (
        far("kv8", 8, 8, 128),
        far("kv4", 8, 2, 64, window=100, sinks=True),
        far("kv16", 7, 1, 64, softcap=9.0),
    ):
        assert spec.warp_specialized
    for spec in (
        far("kv8", 8, 8, 96),
        far("kv_hier", 8, 8, 128),
        far("kv16", 8, 8, 128, centered=True),
        far("kv4", 8, 8, 128, bias_positions=100),
        far("kv16", 8, 8, 128, inline_asm=False),
    ):
        assert spec.query_rows == 64 and not spec.warp_specialized
    kv = GpuKV("kv16", 8, 128)
    for split, groups in ((256, True), (128, False)):  # leaves of a half and a quarter of a page
        short = AttentionSpec(kv, 8, 1024, 0.1, split=split, cut="whole")
        assert far_variants(short, 90)[-1][1].warp_specialized == groups


def test_rounded_pages_take_fewer_rows_of_short_steps() -> None:
    """Programs of twice as many rows are half as many; keys that are not unpacked are loaded once for both."""
    for format, rows in (("kv4", [128, 256, 0]), ("kv8", [128, 256, 0]), ("kv16", [64, 0])):
        kv = GpuKV(format, 8, 128)
        base = AttentionSpec(kv, 32, 4096, 0.1, split=tiles.split_positions(kv), cut="whole")
        assert [most for most, _ in far_variants(base, 90)] == rows


def test_large_heads_take_eight_warps() -> None:
    """Programs of eight warps replace those of pairs of blocks, where steps have enough rows for them."""
    for format, rows, stages in (("kv4", 256, 1), ("kv8", 256, 1), ("kv16", 128, 3)):
        kv = GpuKV(format, 2, 256)
        base = AttentionSpec(kv, 16, 4096, 0.1, split=tiles.split_positions(kv), cut="whole")
        (most, few), (rest, many), *groups = far_variants(base, 90)
        assert (most, few.rows, few.query_rows, rest) == (rows, 8, 0, 512 if format == "kv16" else 0)
        assert (many.query_rows, many.queries, many.warps, many.stages) == (64, 8, 8, stages) and not many.paired
        # Programs of two groups of rows load pages that are unpacked before, or need not be.
        unpacked = unpacked_variant(base, 90)
        specs = [spec for _, spec in groups] + ([unpacked] if unpacked else [])
        assert [(spec.unpacked, spec.queries, spec.warps) for spec in specs] == [(format != "kv16", 16, 4)]
        assert not any(spec.query_rows for _, spec in far_variants(base, 80))


@pytest.mark.parametrize("format", ["kv4", "kv8", "kv16"])
def test_large_heads_have_registers_for_the_accumulators_of_a_row(format: str, compiled: Record) -> None:
    """As wgmma, in one program a multiprocessor, with no more than sums of whole splits spilled."""
    spec = replace(far(format, 16, 2, 256), warp_specialized=False, stages=3 if format == "kv16" else 1)
    result = compiled(spec.kernel(90), 90)
    assert result.matrix and all("wgmma" in one for one in result.matrix)
    assert result.threads == 256 and result.shared_bytes <= 227 * 1024
    # 240 to 352 bytes a thread, of 512 for sums of a split and of all splits; by four warps 1,290 to 1,520.
    assert result.spill_bytes <= 500


def test_pages_of_prompts_are_unpacked_before_attention_where_all_layers_have_that() -> None:
    _, program, _ = lowered("qserve", passes={"cache.format": "kv4"}, **WIDE)
    plan = make_plan(program, TARGETS["h200"])
    unpacking = [launch.by for launch in plan.launches if "unpacked" in launch.by]
    assert unpacking == ["unpacked", "far_unpacked"] * (len(unpacking) // 2) and unpacking
    block = 2 * 64 * 64 * 2 + 2 * 64 * 4  # keys and values of 64 features, and two numbers of each of 64 tokens
    assert plan.scratch["unpacked"] == (block, ("unpacked_room",)) and plan.unpacked_pages == (1 << 28) // block
    written = json.loads(plan.to_json({label: {} for label in plan.kernels}, program, {}))
    assert written["unpacked_pages"] == 8 * 2 * -(-program.max_position // 64)  # of eight prompts that are as long
    fewer = [launch for launch in plan.launches if launch.by != "far_unpacked"]
    assert replace(plan, launches=tuple(fewer)).unpacked_pages == 0
    for recipe, format, target in (("bf16", "kv16", "h200"), ("qserve", "kv4", "a100")):
        _, program, _ = lowered(recipe, passes={"cache.format": format}, **WIDE)
        plan = make_plan(program, TARGETS[target])
        assert plan.unpacked_pages == 0 and not any("unpacked" in launch.by for launch in plan.launches)


def test_where_queries_are_not_the_rows() -> None:
    """Where no GPU has shown that the bits are the same, a group does not fit, or codes do not come in pairs."""
    assert far("kv4", 32, 8, 128).query_rows == 64
    for spec in (
        far("kv4", 32, 8, 128, capability=80),
        far("kv16", 65, 1, 64),
        far("kv_hier", 4, 2, 256),
        far("kv4", 4, 2, 100),
        far("kv_hier4", 4, 2, 64),
    ):
        assert not spec.query_rows
    assert replace(far("kv16", 28, 4, 128), warp_specialized=False).queries == 9


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("format", ["kv4", "kv16"])
def test_warp_groups_have_registers_for_sums_of_large_heads(format: str, chained: bool, compiled: Record) -> None:
    """A program takes a multiprocessor, with no more than sums of whole splits spilled."""
    kv = GpuKV(format, 2, 256, chained=chained)
    base = AttentionSpec(kv, 16, 4096, 0.1, split=tiles.split_positions(kv), cut="whole")
    result = compiled((unpacked_variant(base, 90) or far_variants(base, 90)[-1][1]).kernel(90), 90)
    keys = "bf16" if format == "kv16" else "f16"
    # Leaves that are summed apart have products of a quarter of the features each.
    wanted = {f"m64n32k16.f32.{keys}.{keys}", f"m64n{256 if chained else 64}k16.f32.bf16.bf16"}
    assert {one.removeprefix("wgmma.mma_async.sync.aligned.") for one in result.matrix} == wanted
    assert result.threads == 384 and result.shared_bytes <= 227 * 1024
    # Two of three sums of 128 values a thread, which change once a split; versions of Triton differ by a fifth.
    assert result.spill_bytes <= 1500
