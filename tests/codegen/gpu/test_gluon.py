"""Kernels written in Gluon, run without a GPU (support/gluon_machine.py), against references in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from qcompile.codegen.gpu import kernel as gpu_kernel
from qcompile.codegen.gpu.attention import AttentionSpec
from qcompile.codegen.gpu.gemm.pack import GPU_PACKING, pack_gpu, unpack_gpu
from qcompile.codegen.gpu.gemm.render import kernel
from qcompile.codegen.gpu.gemm.spec import KernelSpec, reference
from qcompile.codegen.gpu.gemm.tile import Tile
from qcompile.codegen.gpu.kernel import Kernel
from qcompile.codegen.gpu.kv_pages import GpuKV
from qcompile.codegen.gpu.unpack_pages import UnpackSpec, unpacked_block_bytes
from qcompile.errors import UnsupportedError
from qcompile.formats.activations import activation_format
from qcompile.formats.mixed import MIX_4_8
from qcompile.formats.registry import weight_format
from qcompile.ops import GATE_BLOCK
from tests.codegen.gpu.test_gemm import BF16_UNPACK_FORMATS, IN_GROUPS, number_format, packing_of, weight
from tests.support.cases import first
from tests.support.gluon_machine import Deadlock, launch

SMALL = Tile(16, 64, split_k=2, stages=3, unpack_k=128)
WHOLE = Tile(64, 128, warps=8, stages=3, unpack_k=128)
FORMATS = (
    *("qoq_channel", "qoq_g128", "w8_sym_channel", "nested_8_4", "mix_4_8", *BF16_UNPACK_FORMATS),
    *("w4_asym_g128_int8", "w4_asym_g128_a8", "mxfp4_a8"),
)
PERSISTENT = Tile(128, 128, warps=8, stages=3, unpack_k=128, token_halves=True, persistent=True)
TILES = {
    "8 rows": replace(SMALL, tokens=8),
    "16 rows": SMALL,
    "16 rows, PDL": replace(SMALL, prefetch_bytes=128),
    "64 rows": WHOLE,
    "halves": replace(WHOLE, tokens=128, token_halves=True),
}
MOST_ERROR = 4e-3
"""Rounding to bf16 alone is worth 1.7e-3; rounding a scaled 4-bit weight to bf16 as much again."""


class Weight:
    """A random weight [n, k], packed for kernels of `format`; some of its rows have exponents far apart if `far`."""

    def __init__(self, format: str, n: int, k: int, far: bool = False) -> None:
        torch.manual_seed(0)
        self.format, self.n, self.k, packing = format, n, k, packing_of(format)
        w = weight(n, k)
        w[7, 5] = 900 if far else w[7, 5]
        if format == "mix_4_8":
            wide = torch.rand(n) < 0.3
            parts, result = MIX_4_8.quantize_rows(w, wide), GPU_PACKING.mixed(wide, False, k)
            types = {"groups": torch.int32, "columns": torch.int32}
            self.packed = {role: blob.view(types.get(role, torch.int8)) for role, blob in result.blobs(parts).items()}
            self.shape: dict[str, Any] = {"n": 16 * result.blocks, "width": n, "wide": result.wide}
            self.dense = weight_format(format).dequantize(parts, k)
        else:
            self.packed = pack_gpu(weight_format(number_format(packing)).quantize(w), packing)
            self.dense = weight_format(number_format(packing)).dequantize(unpack_gpu(self.packed, packing), k)
            self.shape = {"n": n}

    def spec(self, tile: Tile, **more: Any) -> KernelSpec:
        """The kernel for a tile, which takes as many blocks a step as the format wants."""
        unroll = 2 if self.format == "qoq_g128" else tile.unroll
        return KernelSpec(format=self.format, k=self.k, tile=replace(tile, unroll=unroll), **{**self.shape, **more})

    def product(self, spec: KernelSpec, x: Sequence[Tensor], launches: int = 2, **given: Tensor) -> Tensor:
        """What a kernel makes of rows `x`, as the last of some launches leaves it."""
        rows = len(x[0])
        given = {**self.packed, **dict(zip(("x", "x_scale", "x_sum"), x, strict=False)), **given}
        given |= {name: torch.zeros(items, dtype=dtype) for name, (items, dtype) in spec.workspace(rows).items()}
        for _ in range(launches):  # a later launch finds the workspace as the one before left it
            given["out"] = torch.full((rows, spec.width or spec.n), math.nan, dtype=given["residual"].dtype)
            launch(kernel(spec), spec.grid(rows), {**given, "M": rows})
        return given["out"]


def check(weight: Weight, spec: KernelSpec, rows: int = 21) -> None:
    """A product of `rows` rows against the reference."""
    kind = "bf16" if spec.layout.float_x else "int8_g128" if spec.x_groups else "int8"
    x, width = activation_format(kind).quantize(torch.randn(rows, spec.k), 0), spec.width or spec.n
    dtype = torch.float32 if spec.out == "f32" else torch.bfloat16
    bias, residual = torch.randn(2 * width if spec.gated else width), torch.randn(rows, width).to(dtype)
    biased = spec.biased or len(bias)
    bias[biased:] = math.nan  # is not read
    result = weight.product(spec, x, bias=bias, residual=residual)
    bias[biased:] = 0
    added = (bias if spec.bias else None, residual if spec.residual else None)
    if spec.gated:
        y = reference(x, weight.dense, bias if spec.bias else None).unflatten(-1, (-1, 2, GATE_BLOCK))
        want = (torch.nn.functional.silu(y[..., 0, :]) * y[..., 1, :]).flatten(-2)
    else:
        want = reference(x, weight.dense[:width], *added)
    error = ((result.double() - want).norm() / want.norm()).item()
    assert error < MOST_ERROR, (spec, error)


def has_kernel(format: str, tile: Tile) -> bool:
    widths = {"width": 4000, "wide": 448} if format == "mix_4_8" else {}
    try:
        KernelSpec(format, 4096, 4096, replace(tile, unroll=2 if format == "qoq_g128" else 1), **widths)
    except UnsupportedError:
        return False
    return True


CASES = [(f, name) for f in FORMATS for name, tile in TILES.items() if has_kernel(f, tile)]


@pytest.mark.parametrize(
    ("format", "tile"),
    first({case for case in CASES if case[1] == "16 rows" or case[0] in ("mxfp4_a8", "w4_asym_g128")}, CASES),
)
def test_products_of_warp_groups(format: str, tile: str) -> None:
    one = Weight(format, 128, 1024)
    check(one, one.spec(TILES[tile], bias=True, residual=True))
    if not one.spec(TILES[tile]).mixed:
        check(one, one.spec(TILES[tile], bias=True, residual=True, width=120, biased=101))
    if format in IN_GROUPS:
        check(one, one.spec(TILES[tile], x_groups=True, out="f32", bias=True, residual=True))


def test_formats_have_these_kernels() -> None:
    counts = {format: sum(f == format for f, _ in CASES) for format in FORMATS}
    assert all(count >= 3 for count in counts.values()) and sum(counts.values()) >= 40, counts


@pytest.mark.parametrize("tile", ["16 rows", "64 rows", "halves"])
def test_exponents_far_apart(tile: str) -> None:
    far = Weight("mxfp4_a8", 128, 1024, far=True)
    check(far, far.spec(TILES[tile], x_groups=True))


OVERLAPPED = {
    "a chunk": Tile(128, 128, warps=8, stages=1, unpack_k=32),
    "less": Tile(256, 128, warps=8, stages=1, unpack_k=16),
    "split": Tile(64, 64, split_k=2, stages=1, unpack_k=32, prefetch_bytes=128),
    "persistent": Tile(256, 128, warps=8, stages=1, unpack_k=16, persistent=True),
    "parts in turn": Tile(128, 128, warps=8, stages=1, unpack_k=32, serial_k=2, persistent=True),
}


@pytest.mark.parametrize("tile", OVERLAPPED)
@pytest.mark.parametrize("format", BF16_UNPACK_FORMATS)
def test_products_that_overlap_unpacking(format: str, tile: str) -> None:
    # Parts in turn are unequally long.
    k, unroll = 1280 if "parts" in tile else 1024, 2 if format == "mxfp4" else 1
    one, cut = Weight(format, 128, k), replace(OVERLAPPED[tile], unroll=unroll)
    check(one, one.spec(cut, bias=True, residual=True))
    check(one, one.spec(cut, gated="silu", width=64), 3)


PLAIN = Tile(256, 128, warps=8, stages=3, unpack_k=64)
COPIED = {
    "whole": replace(PLAIN, tokens=128),
    "split": replace(PLAIN, split_k=2, prefetch_bytes=128),
    "in four": replace(PLAIN, tokens=128, split_k=4),
    "persistent": replace(PLAIN, persistent=True),
    "parts in turn": replace(PLAIN, tokens=128, serial_k=2),
    "parts in turn, persistent": replace(PLAIN, tokens=128, stages=6, serial_k=2, persistent=True),
}


@pytest.mark.parametrize("tile", COPIED)
def test_products_that_overlap_copies(tile: str) -> None:
    one = Weight("bf16", 128, 1088 if "part" in tile or tile == "split" else 1024)  # parts of unequal lengths
    check(one, one.spec(COPIED[tile], bias=True, residual=True))
    check(one, one.spec(COPIED[tile], gated="silu", width=64, out="f32"), 3)


def test_last_tiles_are_halved_where_most_programs_would_idle() -> None:
    """Of 134 tiles for 132 programs the last two are four halves, one of them without rows."""
    one = Weight("bf16", 67 * 128, 256)
    check(one, one.spec(COPIED["persistent"]), 260)


@pytest.mark.parametrize("format", ["nested_8_4", "mxfp4_a8", "mix_4_8"])
def test_persistent_programs(format: str) -> None:
    """Several tiles a program, and their last ones not full."""
    one = Weight(format, 384, 512)
    check(one, one.spec(PERSISTENT), 150)


MANY = Tile(256, 128, warps=8, stages=3, unpack_k=128)


@pytest.mark.parametrize("format", ["qoq_channel", "qoq_g128", "w8_sym_channel"])
def test_many_tokens_of_integer_sums(format: str) -> None:
    """Tiles that are stored 64 tokens at a time, the last of them not full; persistent programs, of several tiles; and
    the bits of tiles of few tokens."""
    one = Weight(format, 256, 512)
    check(one, one.spec(MANY, bias=True, residual=True, out="f32"), 70)
    check(one, one.spec(replace(MANY, persistent=True), gated="silu", width=128), 290)
    x = activation_format("int8").quantize(torch.randn(270, 512), 0)
    many, few = (one.spec(tile, out="f32") for tile in (MANY, replace(SMALL, split_k=1)))
    result = one.product(many, x, 1, residual=torch.zeros(1))
    rows = [0, 63, 64, 255, 256, 269]
    alone = one.product(few, [part[rows].contiguous() for part in x], 1, residual=torch.zeros(1))
    assert torch.equal(result[rows], alone)


@pytest.mark.parametrize("format", ["nested_8_4", "w4_asym_g128", "mix_4_8"])
def test_parts_of_k_one_after_the_other(format: str) -> None:
    """With parts that are not equally long."""
    one = Weight(format, 128, 1280)
    tile = Tile(64, 128, warps=8, stages=2, unpack_k=128, serial_k=4)
    check(one, one.spec(tile, out="f32", residual=True))


@pytest.mark.parametrize("format", ["qoq_g128", "nested_8_4", "mix_4_8"])
def test_a_row_has_its_bits_whatever_else_is_in_the_step(format: str) -> None:
    """Sums of groups are exact, and added in the order of the inputs, by tiles for few rows and for many."""
    one = Weight(format, 64, 1024)
    x = activation_format("int8").quantize(torch.randn(70, 1024), 0)
    result = []
    for tile, rows in ((SMALL, 1), (SMALL, 17), (replace(SMALL, tokens=64), 70), (replace(SMALL, split_k=1), 3)):
        spec = one.spec(tile, out="f32")
        if tile.split_k == 1 and spec.float_sum:
            continue
        out = one.product(spec, [part[:rows].contiguous() for part in x], residual=torch.zeros(1))
        result.append(out[:1])
    assert all(torch.equal(result[0], each) for each in result[1:])


class Prompt:
    """Rows of several sequences, of `counts` each, the last at the end of `contexts`, over random pages."""

    def __init__(self, format: str, size: tuple[int, int, int], counts: list[int], contexts: list[int]) -> None:
        torch.manual_seed(1)
        heads, kv_heads, dim = size
        self.kv, self.heads, rows = GpuKV(format, kv_heads, dim), heads, sum(counts)
        self.counts, per_sequence = counts, -(-max(contexts) // 64) + 1
        pages = len(counts) * per_sequence
        self.table = torch.randperm(pages, dtype=torch.int32).view(len(counts), -1)
        self.memory, self.k, self.v = random_pages(self.kv, pages)
        self.q, self.sinks = torch.randn(rows, heads * dim), torch.linspace(-2, 12, heads)
        ranges = [torch.arange(end - count, end) for count, end in zip(counts, contexts, strict=True)]
        self.positions = torch.cat(ranges).int()
        self.start = torch.tensor([0, *counts]).cumsum(0).int()

    def attend(self, spec: AttentionSpec) -> Tensor:
        return self.attend_by(spec.kernel(90), spec)

    def attend_by(self, kernel: Kernel, spec: AttentionSpec) -> Tensor:
        """What a kernel makes of the rows."""
        out = torch.full_like(self.q, math.nan)
        given = {"q": self.q, "kv": self.memory, "kv_words": self.memory, "positions": self.positions, "out": out}
        given |= {"query_start": self.start, "block_table": self.table, "sinks": self.sinks}
        given |= {"table_stride": self.table.shape[1], **(self.unpacked(spec) if spec.unpacked else {})}
        programs = -(-max(self.counts) // spec.queries)
        grid = (programs, self.kv.heads, len(self.counts))
        launch(kernel, grid, given)
        return out

    def unpacked(self, spec: AttentionSpec) -> dict[str, Any]:
        """What the kernel before attention makes of the pages; memory that it does not write is no numbers."""
        pages = self.table.shape[1] - 1  # the table has one more, which no row sees
        blocks = len(self.counts) * pages * self.kv.heads
        memory = torch.full((blocks * unpacked_block_bytes(self.kv),), -1, dtype=torch.int8)
        given = dict.fromkeys(("unpacked_keys", "unpacked_values", "unpacked_scales"), memory) | {"unpacked": pages}
        before = UnpackSpec(self.kv, window=spec.window, chunk=spec.chunk)
        pages_of = {"kv": self.memory, "kv_words": self.memory, "block_table": self.table}
        rows = {"positions": self.positions, "query_start": self.start, "table_stride": self.table.shape[1]}
        launch(before.kernel(), (pages, self.kv.heads, len(self.counts)), given | pages_of | rows)
        return given

    def wanted(self, spec: AttentionSpec) -> Tensor:
        """In float64."""
        result = []
        for sequence, (begin, end) in enumerate(zip(self.start[:-1], self.start[1:], strict=True)):
            pages = self.table[sequence].long()
            k, v = (x[pages].transpose(0, 1).flatten(1, 2).double() for x in (self.k, self.v))  # [heads, tokens, dim]
            q = self.q[begin:end].view(-1, self.kv.heads, self.heads // self.kv.heads, self.kv.dim).double()
            score = torch.einsum("qhgd,htd->hgqt", q, k) * spec.scale
            score = spec.softcap * torch.tanh(score / spec.softcap) if spec.softcap else score
            position, past = self.positions[begin:end, None], torch.arange(k.shape[1])
            hidden = past > position
            hidden = hidden | (past <= position - spec.window) if spec.window else hidden
            hidden = hidden | (past < position - position % spec.chunk) if spec.chunk else hidden
            score = score.masked_fill(hidden, -math.inf)
            if spec.sinks:
                sinks = self.sinks.double().view(self.kv.heads, -1, 1, 1).expand(*score.shape[:-1], 1)
                score = torch.cat((score, sinks), -1)
            weights = score.softmax(-1)[..., : k.shape[1]]
            result.append(torch.einsum("hgqt,htd->qhgd", weights, v).flatten(1))
        return torch.cat(result)


def random_pages(kv: GpuKV, pages: int) -> tuple[Tensor, Tensor, Tensor]:
    """Memory of pages, and the keys and the values in it, [pages, heads, tokens, dim]."""
    shape = (pages, kv.heads, kv.page_tokens)
    if kv.bits == 16:
        both = torch.randn(pages, kv.heads, 2, kv.page_tokens, kv.dim).bfloat16()
        return both, both[:, :, 0].float(), both[:, :, 1].float()
    memory = torch.randint(-128, 128, (pages, kv.heads, kv.block_bytes), dtype=torch.int8)
    items = memory[..., : 2 * kv.part_bytes].contiguous().view(torch.int16).unflatten(-1, (2, -1))
    k = items[:, :, 0].unflatten(-1, (kv.page_tokens, kv.width))
    v = items[:, :, 1].unflatten(-1, (kv.width, kv.page_tokens)).transpose(-1, -2)
    scale = (0.5 + torch.rand(*shape[:2], 2, kv.page_tokens)) * 3 / 2**kv.bits
    zero = torch.randint(0, 2**kv.bits, scale.shape)
    words = scale.view(torch.int32) & -256 | zero.int()
    memory[..., 2 * kv.part_bytes :] = words.flatten(2).view(torch.int8)
    scale, result = (words & -256).view(torch.float32), []
    for part, x in enumerate((k, v)):
        codes = torch.cat([x.int() >> kv.bits * plane & 2**kv.bits - 1 for plane in range(kv.planes)], -1)
        result.append((codes.float() - zero[:, :, part, :, None]) * scale[:, :, part, :, None])
    return memory, *result


def prompt_spec(prompt: Prompt, **more: Any) -> AttentionSpec:
    base = AttentionSpec(prompt.kv, prompt.heads, prompt.heads * prompt.kv.dim, prompt.kv.dim**-0.5, cut="whole")
    return replace(base, query_rows=64, warp_specialized=True, stages=3, **more)


SCORES = {
    "plain": {},
    "window": {"window": 100},
    "wide window": {"window": 1000, "sinks": True},
    "chunk": {"chunk": 52},
    "cap": {"softcap": 9.0},
}
SIZES = {"groups of 4": (8, 2, 128), "groups of 7": (7, 1, 64), "single heads": (2, 2, 64)}
UNEVEN = ([20, 1, 3, 40], [300, 65, 3, 1100])
"""Programs without rows in their second group, without any rows, and with several splits."""


CACHES = [(format, scores, size) for format in ("kv16", "kv8", "kv4") for scores in SCORES for size in SIZES]
FIRST = (
    *(case for case in CACHES if case[0] == "kv16" and (case[1] == "plain" or case[2] == "groups of 7")),
    *(("kv8", "wide window", "groups of 4"), ("kv8", "chunk", "single heads"), ("kv8", "cap", "groups of 7")),
    *(("kv4", "plain", "groups of 4"), ("kv4", "window", "groups of 7"), ("kv4", "cap", "single heads")),
)


@pytest.mark.parametrize(("format", "scores", "size"), first(FIRST, CACHES))
def test_attention_of_warp_groups(format: str, scores: str, size: str) -> None:
    prompt = Prompt(format, SIZES[size], *UNEVEN)
    spec = prompt_spec(prompt, **SCORES[scores])
    want, result = prompt.wanted(spec), prompt.attend(spec)
    error = ((result - want).norm() / want.norm()).item()
    assert error < MOST_ERROR, error
    if format != "kv16" and (size == "groups of 7" or scores == "plain"):
        assert torch.equal(prompt.attend(replace(spec, unpacked=True)), result)


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize(("format", "scores"), [("kv16", "window"), ("kv4", "plain")])
def test_attention_of_warp_groups_with_large_heads(format: str, scores: str, chained: bool) -> None:
    """Leaves of half a page, summed apart and one after the other, where maxima of leaves are far apart."""
    prompt = Prompt(format, (4, 2, 256), *UNEVEN)
    prompt.kv, prompt.q = replace(prompt.kv, chained=chained), prompt.q * 4
    spec = prompt_spec(prompt, split=256, unpacked=format != "kv16", **SCORES[scores])
    error = ((prompt.attend(spec) - prompt.wanted(spec)).norm() / prompt.wanted(spec).norm()).item()
    assert error < MOST_ERROR, error


def test_many_splits_are_merged_by_groups() -> None:
    prompt = Prompt("kv16", (4, 1, 64), [3], [64 * 140])
    spec = prompt_spec(prompt)
    want = prompt.wanted(spec)
    assert ((prompt.attend(spec) - want).norm() / want.norm()).item() < MOST_ERROR


@pytest.mark.parametrize(("format", "unpacked"), [("kv16", False), ("kv4", False), ("kv4", True)])
def test_rows_that_are_not_written_do_not_count(format: str, unpacked: bool) -> None:
    """Values past the last position are no numbers: they were another sequence's."""
    prompt = Prompt(format, (4, 1, 64), [5], [70])
    page = prompt.memory[prompt.table[0, 1].long()]
    if format == "kv16":
        page[:, 1, 6:] = math.nan
    else:
        page[:, 2 * prompt.kv.part_bytes :].view(torch.float32).unflatten(-1, (2, 64))[..., 6:] = math.nan
    result = prompt.attend(prompt_spec(prompt, unpacked=unpacked))
    want = Prompt(format, (4, 1, 64), [5], [70]).wanted(prompt_spec(prompt))
    assert ((result - want).norm() / want.norm()).item() < MOST_ERROR


FAULTS = {
    "a stage is never released": ("mbarrier.arrive(empty.index(here))\n                sum", "sum", Deadlock),
    "skipped leaves are not": ("tl.where(latest < 0, program_begun, (latest + LEAF) // LEAF)", "0", Deadlock),
    "sums before they are there": ("product0 = warpgroup_mma_wait(1, (product0,))", "", TypeError),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_machine_notices(fault: str) -> None:
    """What a GPU would answer with a wrong number, or not at all."""
    good, bad, error = FAULTS[fault]
    prompt = Prompt("kv16", (4, 1, 64), [20], [900])
    spec = prompt_spec(prompt, window=400)
    kernel = spec.kernel(90)
    assert good in kernel.source
    with pytest.raises(error):
        prompt.attend_by(replace(kernel, source=kernel.source.replace(good, bad)), spec)


def test_a_stage_that_is_released_too_early_is_overwritten() -> None:
    """The tensor cores read their operands until a product is waited for."""
    prompt = Prompt("kv16", (4, 1, 64), [20], [500])
    spec = prompt_spec(prompt)
    kernel = spec.kernel(90)
    release = "mbarrier.arrive(empty.index(here))\n"
    given = kernel.source.replace(
        "score, here = next_score, stage\n", "score, here, behind = next_score, stage, phase\n"
    )
    at = given.index("product0 = warpgroup_mma_wait")
    late = given.index(release, at)
    source = given[:late] + given[late + len(release) :].lstrip(" ")
    early = source[:at] + release + " " * 16 + "mbarrier.wait(empty.index(here), behind)\n" + " " * 16 + source[at:]
    want = prompt.wanted(spec)
    try:
        result = prompt.attend_by(replace(kernel, source=early), spec)
    except Deadlock:
        return
    assert ((result - want).norm() / want.norm()).item() > MOST_ERROR


NAMES = "{% from 'gluon_names.jinja' import gluon_names %}{{ gluon_names(barrier=true, reinterpret=true) }}"


@pytest.mark.parametrize("version", ["3.6", "3.9"])
def test_functions_have_the_names_of_the_installed_triton(version: str) -> None:
    """Triton 3.9 also keeps the old name of async_load, for a function that only raises."""
    old = SimpleNamespace(async_copy_global_to_shared="load", thread_barrier="barrier", _reinterpret="reinterpret")
    new = SimpleNamespace(
        async_load="load", async_copy_global_to_shared="removed", barrier="barrier", reinterpret="reinterpret"
    )
    gluon = old if version == "3.6" else new
    gluon.shared_memory_descriptor = gluon
    result: dict[str, Any] = {"async_copy": gluon, "tl": gluon}
    exec(gpu_kernel.templates().from_string(NAMES).render(), result)
    assert (result["async_load"], result["block_barrier"], result["reinterpret"]) == ("load", "barrier", "reinterpret")
