"""Kernels of prompts' attention on this GPU, over sequences of unequal lengths: the same bits by every kernel.

    python benchmarks/gpu_attention_bits.py [out.json] ["--heads=groups of 4,large heads"]

Each case is a step of several sequences of which some have many rows, some one and one none. Every kernel of
codegen/gpu/attention_variants.py's `far_variants` must give the bits of the kernel of the fewest rows a program, for
all formats, sizes of heads and groups and what scores may have; so must that over pages that a kernel has unpacked
before (unpack_pages.py). In steps of few rows a sequence, so must the kernels for decoding with the merges of their
splits, and the kernel of the fewest rows must give what float64 gives, nearly. Then steps of many rows are timed by
each of these kernels, and steps that mix a prompt with decoding, beside the prompt alone and the decoding alone by its
own kernels.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import gpu_attention
from benchmarks.gpu_attention import Cache, Problem, compile_one, limits_of, work_of
from benchmarks.gpu_common import Launch, facts, graph_us, launch
from qcompile.codegen.gpu.attention import AttentionSpec
from qcompile.codegen.gpu.attention_merge import MergeSpec
from qcompile.codegen.gpu.attention_splits import GROUP_SPLITS
from qcompile.codegen.gpu.attention_variants import far_variants, for_queries, unpacked_variant
from qcompile.codegen.gpu.gemm import tiles
from qcompile.codegen.gpu.kv_pages import GpuKV
from qcompile.codegen.gpu.unpack_pages import UnpackSpec, unpacked_block_bytes

FORMATS = ("kv16", "kv8", "kv4")
HEADS = {
    "groups of 4": (32, 8, 128),
    "groups of 7": (28, 4, 128),
    "single heads": (8, 8, 64),
    "groups of 8": (32, 4, 64),
    "large heads": (16, 2, 256),
    "large heads padded": (8, 4, 192),
    "large heads chained": (16, 2, 256),
    "large heads padded and chained": (8, 4, 192),
    "heads of 512": (16, 2, 512),
    "heads of 320": (8, 4, 320),
    "heads of 512 chained": (16, 2, 512),
}
"""Query heads, KV heads and features; the leaves of a split are `chained` where the name says so (GpuKV)."""
SCORES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 1000},
    "small window": {"window": 20, "sinks": True},
    "cap": {"softcap": 30.0},
}
DECODED = ((5, 9000), (1, 5), (2, 640), (0, 64), (4, 8191), (3, 130))
"""(rows, last position + 1) of the sequences of a step that decodes; of one, splits are merged in groups."""
MOST_ERROR = 1e-2
"""Queries, weights of values and values are rounded to bf16: 0.007 in Triton's interpreter, which cuts them off."""
UNEVEN = ((600, 9000), (1, 5), (77, 640), (0, 64), (1, 8191), (130, 130), (1000, 1500))
"""(rows, last position + 1) of the sequences of a step."""
TIMED = ("groups of 4", "large heads", "large heads chained", "heads of 512")
"""Heads for which long steps are timed."""
LONG = tuple(itertools.product((512, 1024, 2048, 4096), (4096, 16384, 32768)))
"""(rows, last position + 1) of steps of one sequence."""
MIXED = ((512, 4096), *[(1, 1024)] * 63), ((256, 1024), *[(1, 4096)] * 16)


def _run(launches: Iterable[Launch]) -> None:
    for each in launches:
        each()


class Step(Problem):
    """A step of sequences with the given (rows, last position + 1) over one cache; outputs start as no numbers."""

    def __init__(self, cache: Cache, lengths: tuple[tuple[int, int], ...], heads: int) -> None:
        kv = cache.kv
        self.cache, self.lengths, self.heads = cache, lengths, heads
        counts = torch.tensor([0, *(count for count, _ in lengths)])
        tokens = int(counts.sum())
        self.q = torch.randn(tokens, heads * kv.dim, device="cuda")
        positions = torch.cat([torch.arange(end - count, end) for count, end in lengths])
        self.positions = positions.int().cuda()
        self.query_start = counts.cumsum(0).int().cuda()
        self.out = torch.empty(tokens + 1, heads * kv.dim, device="cuda")
        self.sinks = torch.linspace(-2.0, 12.0, heads, device="cuda")

    def given(self, copy: torch.Tensor) -> dict[str, Any]:
        """Arguments of kernels over a copy of the cache, by name."""
        items = copy.view(torch.bfloat16 if self.cache.kv.bits == 16 else torch.int16)
        given: dict[str, Any] = {"q": self.q, "kv": items, "kv_words": copy.view(torch.int32), "out": self.out}
        given |= {"positions": self.positions, "query_start": self.query_start, "block_table": self.cache.table}
        return given | {"table_stride": self.cache.table.shape[1], "sinks": self.sinks}

    def launch_of(self, spec: AttentionSpec, copy: torch.Tensor) -> Launch:
        """Of a prompt's kernel over a copy of the cache."""
        given = self.given(copy)
        before = [self.unpacking(spec, given)] if spec.unpacked else []
        blocks = -(-max(count for count, _ in self.lengths) // spec.queries)
        grid = blocks, spec.kv.heads * spec.value_parts, len(self.lengths)
        each = [*before, launch(spec.kernel(90), 90, grid, given)]
        return partial(_run, each)

    def decode(self, spec: AttentionSpec) -> torch.Tensor:
        """What a kernel for decoding writes, with the merges of its splits, and one row after the last."""
        kv, tokens = spec.kv, len(self.positions)
        splits = -(-max(end for _, end in self.lengths) // spec.split)
        leaves = kv.leaves if spec.cut == "leaf" else 1
        self.out.fill_(math.nan)
        given = self.given(self.cache.copies[0]) | {"splits": splits * leaves}
        for name, size in (("parts", kv.dim), ("stats", 2)):
            given[name] = torch.full((tokens * self.heads * splits * leaves * size,), math.nan, device="cuda")
        programs = kv.heads * -(-max(count for count, _ in self.lengths) // spec.queries)
        shares = 3 if spec.multi_split else splits * leaves
        each = [launch(spec.kernel(90), 90, (programs, len(self.lengths), shares), given)]
        merge = MergeSpec(kv, self.heads, 1, splits <= GROUP_SPLITS, spec.split, leaves, sinks=spec.sinks)
        merge = replace(merge, window=spec.window, chunk=spec.chunk)
        each.append(launch(merge.kernel(90), 90, (tokens, merge.programs, -(-splits // GROUP_SPLITS)), given))
        if not merge.final:
            groups = replace(merge, level=2, final=True)
            each.append(launch(groups.kernel(90), 90, (tokens, groups.programs, 1), given))
        _run(each)
        torch.cuda.synchronize()
        return self.out.clone()

    def error(self, spec: AttentionSpec, result: torch.Tensor) -> float:
        """The relative error of rows of a sequence beside float64, of the sequence with the largest."""
        kv, worst = spec.kv, 0.0
        for sequence, (count, end) in enumerate(self.lengths):
            if not count:
                continue
            begin = int(self.query_start[sequence])
            k, v = (x[:, :end].double() for x in self.cache.dense(self.cache.copies[0], sequence))
            q = self.q[begin : begin + count].double().view(count, kv.heads, -1, kv.dim)
            score = torch.einsum("qhgd,htd->hgqt", q, k) * spec.scale
            score = spec.softcap * (score / spec.softcap).tanh() if spec.softcap else score
            past = torch.arange(end, device="cuda") - self.positions[begin : begin + count, None]
            hidden = (past > 0) | (past <= -spec.window) if spec.window else past > 0
            sink = self.sinks.double().view(kv.heads, -1, 1, 1).expand(*score.shape[:-1], 1)
            sink = sink if spec.sinks else torch.full_like(sink, -math.inf)
            weight = torch.cat((score.masked_fill(hidden, -math.inf), sink), -1).softmax(-1)[..., :-1]
            want = torch.einsum("hgqt,htd->qhgd", weight, v).reshape(count, -1)
            worst = max(worst, float((result[begin : begin + count] - want).norm() / want.norm()))
        return worst

    def unpacking(self, spec: AttentionSpec, given: dict[str, Any]) -> Launch:
        """Of the kernel before that of `spec`; `given` gets where it writes."""
        kv, pages = spec.kv, -(-max(end for _, end in self.lengths) // spec.kv.page_tokens)
        size = len(self.lengths) * pages * kv.heads * unpacked_block_bytes(kv)
        memory = torch.full((size,), -1, device="cuda", dtype=torch.int8)
        given |= dict.fromkeys(("unpacked_keys", "unpacked_values", "unpacked_scales"), memory) | {"unpacked": pages}
        unpack = UnpackSpec(kv, window=spec.window, chunk=spec.chunk)
        return launch(unpack.kernel(), 90, (pages, kv.heads, len(self.lengths)), given)

    def output(self, spec: AttentionSpec) -> torch.Tensor:
        """What a kernel writes, with one row after the last."""
        self.out.fill_(math.nan)
        self.launch_of(spec, self.cache.copies[0])()
        torch.cuda.synchronize()
        return self.out.clone()


def kernels(format: str, heads: str, **more: Any) -> list[AttentionSpec]:
    """That of the fewest rows a program, then the others."""
    count, kv_heads, dim = HEADS[heads]
    kv = GpuKV(format, kv_heads, dim, chained=heads.endswith("chained"))
    base = AttentionSpec(kv, count, count * dim, dim**-0.5, split=tiles.split_positions(kv), cut="whole", **more)
    every = [spec for _, spec in far_variants(base, 90)]
    unpacked = unpacked_variant(base, 90)
    return [*every, unpacked] if unpacked else every


def name_of(spec: AttentionSpec) -> str:
    """What results call a kernel."""
    if spec.warp_specialized:
        return "warp groups, unpacked before" if spec.unpacked else "warp groups"
    return f"{spec.query_rows or spec.rows} rows"


def bits(format: str, heads: str, scores: str) -> dict[str, Any]:
    """Rows with other bits than the kernel of the fewest rows gives, and rows written that were not asked for."""
    first, *others = kernels(format, heads, **SCORES[scores])
    cache = Cache(first.kv, len(UNEVEN), 9024)
    step = Step(cache, UNEVEN, first.heads)
    want = step.output(first)
    assert want[:-1].isfinite().all() and want[-1].isnan().all()
    row: dict[str, Any] = {"format": format, "heads": heads, "scores": scores, "kernels": {}}
    for spec in others:
        result = step.output(spec)
        differ = (result.view(torch.int32) != want.view(torch.int32)).any(-1)
        row["kernels"][name_of(spec)] = int(differ.sum())
    return row


def decoding_kernels(first: AttentionSpec) -> dict[str, AttentionSpec]:
    """The kernels for decoding of the rows of DECODED, by how much work there is."""
    base, rows = replace(first, cut="split", octets=2), max(count for count, _ in DECODED)
    every = tiles.decode_attention(base, limits_of(first.kv))
    return {work: for_queries(spec, rows) for work, spec in every.items()}


def decoding(format: str, heads: str, scores: str) -> dict[str, Any]:
    """As `bits`, of kernels for decoding; and the error of the kernel of the fewest rows."""
    first = kernels(format, heads, **SCORES[scores])[0]
    step = Step(Cache(first.kv, len(DECODED), 9024), DECODED, first.heads)
    want = step.output(first)
    row: dict[str, Any] = {"format": format, "heads": heads, "scores": scores, "error": step.error(first, want)}
    row["kernels"] = {}
    for work, spec in decoding_kernels(first).items():
        differ = (step.decode(spec).view(torch.int32) != want.view(torch.int32)).any(-1)
        row["kernels"][f"{work}, {spec.rows} rows"] = int(differ.sum())
    return row


def long(format: str, heads: str) -> list[dict[str, Any]]:
    """Microseconds of steps by the kernels of many rows, and of the kernel that unpacks pages before."""
    result = []
    for rows, end in LONG:
        some = [spec for spec in kernels(format, heads) if spec.query_rows]
        cache = Cache(some[0].kv, 1, end)
        step = Step(cache, ((rows, end),), some[0].heads)
        row: dict[str, Any] = {"format": format, "heads": heads, "rows": rows, "context": end}
        for spec in some:
            row[name_of(spec)] = graph_us([step.launch_of(spec, copy) for copy in cache.copies], 9, 8)
            if spec.unpacked:
                given = {"kv": cache.copies[0], "kv_words": cache.copies[0], "table_stride": cache.table.shape[1]}
                given |= {"positions": step.positions, "query_start": step.query_start, "block_table": cache.table}
                row["of these, unpacking"] = graph_us([step.unpacking(spec, given)], 9, 8)
        pairs = rows * end - rows * (rows - 1) // 2
        row["TFLOP/s"] = 4e-6 * pairs * some[0].heads * some[0].kv.dim / min(row[name_of(spec)] for spec in some)
        print(row, flush=True)
        result.append(row)
        torch.cuda.empty_cache()
    return result


def mixed(format: str) -> list[dict[str, Any]]:
    """Microseconds of steps that mix a prompt with decoding."""
    result = []
    for lengths in MIXED:
        first, *others = kernels(format, "groups of 4")
        context = max(end for _, end in lengths)
        cache = Cache(first.kv, len(lengths), context)
        row: dict[str, Any] = {"format": format, "prompt": lengths[0], "decoding": [len(lengths) - 1, *lengths[1]]}
        for part, some in (("mixed", lengths), ("prompt", lengths[:1]), ("decoding", lengths[1:])):
            step = Step(cache, some, first.heads)
            for spec in (first, *others):
                row[f"{part}, {name_of(spec)}"] = graph_us([step.launch_of(spec, copy) for copy in cache.copies], 9, 16)
        rows, end = lengths[1]
        of_decoding = Cache(first.kv, len(lengths) - 1, end)
        base = replace(first, cut="split", octets=2)
        spec = tiles.decode_attention(base, limits_of(first.kv))[work_of(first.kv, len(lengths) - 1, end, base.split)]
        decode = Problem(of_decoding, rows)
        row["decoding, its own"] = graph_us(decode.launches(for_queries(spec, rows)), 9, 16)
        print(row, flush=True)
        result.append(row)
        torch.cuda.empty_cache()
    return result


def main() -> None:
    gpu_attention.ROTATED_BYTES = 1  # Two copies do.
    named = [a.partition("=")[2].split(",") for a in sys.argv[1:] if a.startswith("--heads=")]
    some_heads = named[0] if named else list(HEADS)
    cases = list(itertools.product(FORMATS, some_heads, SCORES))
    specs = [spec for format, heads, scores in cases for spec in kernels(format, heads, **SCORES[scores])]
    specs += [each for spec in specs if not spec.query_rows for each in decoding_kernels(spec).values()]
    with ProcessPoolExecutor(15, mp_context=get_context("spawn")) as pool:
        assert all(pool.map(compile_one, specs)), "a kernel was not compiled"
    results: dict[str, Any] = {
        **facts(),
        "uneven": UNEVEN,
        "decoded": DECODED,
        "bits": [],
        "decoding": [],
        "long": [],
        "mixed": [],
    }
    for case in cases:
        results["bits"].append(bits(*case))
        print(results["bits"][-1], flush=True)
        results["decoding"].append(decoding(*case))
        print(results["decoding"][-1], flush=True)
        torch.cuda.empty_cache()
    timed = [heads for heads in TIMED if heads in some_heads]
    results["long"] = [row for format in FORMATS for heads in timed for row in long(format, heads)]
    results["mixed"] = [row for format in FORMATS for row in mixed(format)] if not named else []
    for path in (a for a in sys.argv[1:] if not a.startswith("--")):
        Path(path).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    every = results["bits"] + results["decoding"]
    wrong = [row for row in every if any(row["kernels"].values()) or row.get("error", 0.0) > MOST_ERROR]
    print(f"{len(every)} cases, {len(wrong)} with different bits or errors")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
