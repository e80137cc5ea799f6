"""Decode attention over paged caches on this GPU: checked first, then timed beside SDPA, in one run.

    python benchmarks/gpu_attention.py [out.json] [--formats=kv4,...]   the cuts of codegen/gpu/gemm/tiles.py
    python benchmarks/gpu_attention.py --search [out.json] every candidate
    python benchmarks/gpu_attention.py --scores [out.json] sinks and biases by position beside neither

Times are microseconds per launch (attention and the merge of its splits) by CUDA graph replay, caches rotated
through more than five times the L2; medians over replays. 32 query heads, 8 KV heads of 128.
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
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.gpu_common import ROTATED_BYTES, Launch, facts, graph_us, launch
from qcompile.codegen.gpu import compile as gpu_compile
from qcompile.codegen.gpu.attention import AttentionSpec
from qcompile.codegen.gpu.attention_merge import MergeSpec
from qcompile.codegen.gpu.attention_splits import GROUP_SPLITS, NEAR_SPLITS, SplitLimits
from qcompile.codegen.gpu.attention_variants import far_variants, for_queries, prefill_variants
from qcompile.codegen.gpu.gemm import tiles
from qcompile.codegen.gpu.kv_pages import GpuKV
from qcompile.formats.kv import HIER_GROUP, PAGE_TOKENS, RING_GROUPS
from qcompile.runtime.cuda.counts import AttentionWork, attention_counts
from qcompile.targets import TUNED_ON

HEADS, KV_HEADS, DIM = 32, 8, 128
RING_ENTRIES = 2 * RING_GROUPS * HIER_GROUP // PAGE_TOKENS
CASES = ((1, 8192), (1, 65536), (1, 131072), (16, 4096), (64, 1024), (64, 4096))
FORMATS = ("kv4", "kv8", "kv16", "kv_hier4", "kv_hier")
DECODE = ("few", "fine", "coarse")
"""Kernels of the decode class by how much work there is (codegen/gpu/gemm/tiles.py); not every format has all."""
LONG = ((512, 512), (512, 1024), (512, 4096), (512, 16384), (128, 4096), (32, 8192))
"""(rows, context) of steps of prompts."""
SCORES: dict[str, dict[str, Any]] = {"plain": {}, "sinks": {"sinks": True}, "biases": {"bias_positions": 8192}}
"""What scores have more to them."""
MOST_ERROR = 4e-3
"""Queries and weights of values are rounded to bf16, over a hierarchical cache queries twice."""


def limits_of(kv: GpuKV) -> SplitLimits:
    """The limits by which decode attention is divided on this GPU."""
    return SplitLimits(kv, TUNED_ON.multiprocessors)


def specs_for(format: str, queries: int, **more: Any) -> dict[str, AttentionSpec]:
    """The kernels for `queries` positions a sequence, by how much work there is; "whole" and "far" (of more than
    NEAR_SPLITS splits) are those of prompts."""
    kv = GpuKV(format, KV_HEADS, DIM)
    base = AttentionSpec(kv, HEADS, HEADS * DIM, DIM**-0.5, split=tiles.split_positions(kv))
    result = {
        work: for_queries(replace(spec, **more), queries)
        for work, spec in tiles.decode_attention(base, limits_of(kv)).items()
    }
    whole = replace(base, cut="whole", **more)
    variants = {"whole": prefill_variants(whole), "far": far_variants(whole, 90)}
    return result | {
        work: next(one for most, one in each if not most or queries <= most) for work, each in variants.items()
    }


def work_of(kv: GpuKV, batch: int, context: int, split: int) -> str:
    """How much work a step has."""
    counts = attention_counts(
        limits_of(kv).facts, AttentionWork(-(-context // split), batch, batch, 1), AttentionWork()
    )
    return next(work for work in DECODE if counts[work])


class Cache:
    """Random pages of `batch` sequences, in as many copies as rotation needs, in shuffled order."""

    def __init__(self, kv: GpuKV, batch: int, context: int) -> None:
        self.kv, self.batch, self.context = kv, batch, context
        pages = batch * context // kv.page_tokens
        size = pages * kv.heads * kv.block_bytes
        self.table = torch.randperm(pages, device="cuda", dtype=torch.int32).view(batch, -1)
        self.copies = [self._random(pages) for _ in range(max(2, min(ROTATED_BYTES // size + 1, 48)))]

    def _random(self, pages: int) -> Tensor:
        kv, shape = self.kv, (pages, self.kv.heads, self.kv.block_bytes)
        if kv.bits == 16:
            values = torch.randn(pages, kv.heads, kv.block_bytes // 2, device="cuda", dtype=torch.bfloat16)
            return values.view(torch.int8)
        memory = torch.randint(-128, 128, shape, device="cuda", dtype=torch.int8)
        scale = (0.5 + torch.rand(pages, kv.heads, 2 * kv.page_tokens, device="cuda")) * 3 / 2**kv.bits
        words = scale.view(torch.int32) & -256 | torch.randint(0, 2**kv.bits, scale.shape, device="cuda").int()
        memory[..., 2 * kv.part_bytes :] = words.view(torch.int8)
        return memory

    def dense(self, copy: Tensor, sequence: int) -> tuple[Tensor, Tensor]:
        """Keys and values f32 [heads, context, dim] of a sequence."""
        kv = self.kv
        blocks = copy[self.table[sequence].long()].transpose(0, 1)  # [heads, pages, bytes]
        items = blocks[..., : 2 * kv.part_bytes].contiguous().view(torch.int16).unflatten(-1, (2, -1))
        if kv.bits == 16:
            values = items.view(torch.bfloat16).unflatten(-1, (kv.page_tokens, kv.dim)).float()
        else:
            k = items[:, :, 0].unflatten(-1, (kv.page_tokens, kv.width))
            v = items[:, :, 1].unflatten(-1, (kv.width, kv.page_tokens)).transpose(-1, -2)
            both = torch.stack((k, v), 2).int()  # [heads, pages, 2, page tokens, width]
            codes = torch.cat([both >> kv.bits * plane & 2**kv.bits - 1 for plane in range(kv.planes)], -1)
            words = blocks[..., 2 * kv.part_bytes :].contiguous().view(torch.int32).unflatten(-1, (2, kv.page_tokens))
            values = (codes.float() - (words & 255).float()[..., None]) * (words & -256).view(torch.float32)[..., None]
        k, v = values.unbind(2)  # each [heads, pages, page tokens, dim]
        return k.flatten(1, 2), v.flatten(1, 2)


class HierCache(Cache):
    """Random rings and rounded pages, which kv_hier reads whole and kv_hier4 in part."""

    def __init__(self, kv: GpuKV, batch: int, context: int) -> None:
        self.kv, self.batch, self.context = kv, batch, context
        self.rings, pages = batch * RING_ENTRIES, batch * context // kv.page_tokens
        rings = torch.arange(self.rings, device="cuda", dtype=torch.int32).view(batch, -1)
        # A group's first page holds the scales of its keys, its second their least values.
        firsts = self.rings + 2 * torch.randperm(pages // 2, device="cuda", dtype=torch.int32)
        rounded = torch.stack((firsts, firsts + 1), -1).view(batch, -1)
        self.table = torch.cat((rings, rounded), 1).contiguous()
        size = (self.rings + pages) * kv.heads * kv.block_bytes
        self.copies = [self._random(self.rings + pages) for _ in range(max(2, min(ROTATED_BYTES // size + 1, 48)))]

    def _random(self, pages: int) -> Tensor:
        kv, shape = self.kv, (pages, self.kv.heads, self.kv.block_bytes)
        memory = torch.randint(-128, 128, shape, device="cuda", dtype=torch.int8)
        ring = torch.randn(self.rings, kv.heads, kv.block_bytes // 2, device="cuda", dtype=torch.bfloat16)
        memory[: self.rings] = ring.view(torch.int8)
        rounded = memory[self.rings :]

        def put(at: int, low: float, high: float, items: int) -> None:
            values = low + (high - low) * torch.rand(*rounded.shape[:2], items, device="cuda")
            rounded[..., at : at + 4 * items] = values.view(torch.int8)

        words = 2 * kv.part_bytes
        put(words, 0.1, 0.3, kv.page_tokens)
        put(words + 4 * kv.page_tokens, 6.0, 9.0, kv.page_tokens)
        scale, least = (
            low + (high - low) * torch.rand(len(rounded) // 2, kv.heads, kv.dim // 2, 1, 2, device="cuda")
            for low, high in ((0.1, 0.3), (-2.0, -1.0))
        )
        keys = torch.cat((16 * scale, least - 16.5 * scale), 3).half().flatten(2).view(torch.int8)
        rounded[..., kv.key_word_bytes : kv.key_word_bytes + 4 * kv.dim] = keys.repeat_interleave(2, 0)
        return memory

    def dense(self, copy: Tensor, sequence: int) -> tuple[Tensor, Tensor]:
        """Keys and values f32 [heads, context, dim] as the last group of positions reads them."""
        kv, tokens = self.kv, self.kv.page_tokens
        table = self.table[sequence].long()
        blocks = copy[table[RING_ENTRIES:]].transpose(0, 1)  # [heads, pages, bytes]

        def codes(at: int) -> tuple[Tensor, Tensor]:
            items = blocks[..., at : at + 2 * kv.part_bytes].contiguous().view(torch.int16).unflatten(-1, (2, -1))
            k = items[:, :, 0].unflatten(-1, (tokens, kv.width)).int()
            v = items[:, :, 1].unflatten(-1, (kv.width, tokens)).transpose(-1, -2).int()
            k, v = (torch.cat([x >> 4 * plane & 15 for plane in range(4)], -1).float() for x in (k, v))
            return k, v  # each [heads, pages, page tokens, dim]

        def floats(at: int, items: int) -> Tensor:
            return blocks[..., at : at + 4 * items].contiguous().view(torch.float32)

        k, v = codes(0)
        if kv.format == "kv_hier":
            k, v = (upper + (lower - 8) / 16 for upper, lower in zip((k, v), codes(kv.lower_bytes), strict=True))
        halves = floats(kv.key_word_bytes, kv.dim).view(torch.half).float().unflatten(-1, (-1, 2, 2))
        factor, added = (halves[..., which, :].flatten(2)[:, :, None] for which in range(2))
        words = 2 * kv.part_bytes
        v = floats(words, tokens)[..., None] * (v - floats(words + 4 * tokens, tokens)[..., None])
        k, v = (factor * (1 + (k + 0.5) / 16) + added).flatten(1, 2), v.flatten(1, 2)
        newest = torch.arange(self.context - 2 * HIER_GROUP, self.context, device="cuda")
        for x, side in ((k, 0), (v, 1)):
            x[:, newest] = self._ring(copy, sequence, newest, side).transpose(0, 1).float()
        return k, v

    def _ring(self, copy: Tensor, sequence: int, positions: Tensor, side: int) -> Tensor:
        """What the ring has in the places of positions, bf16 [positions, heads, dim]; keys are side 0, values 1."""
        tokens, dim = self.kv.page_tokens, self.kv.dim
        pages = self.table[sequence].long()[2 * (positions // tokens % (RING_ENTRIES // 2)) + side]
        blocks = copy.view(torch.bfloat16)[..., : tokens * dim].unflatten(-1, (tokens, dim))
        return blocks[pages, :, positions % tokens]

    def staged(self, copy: Tensor, rows: int) -> Tensor:
        """Keys and values of the last `rows` positions of each sequence, as a step of them has them."""
        last = torch.arange(self.context - rows, self.context, device="cuda")
        result = [[self._ring(copy, s, last, side) for side in range(2)] for s in range(self.batch)]
        return torch.cat([torch.stack(both, 1) for both in result]).contiguous()


def _run(launches: Iterable[Launch]) -> None:
    for each in launches:
        each()


class Problem:
    """A step of `queries` rows a sequence over a cache."""

    def __init__(self, cache: Cache, queries: int) -> None:
        self.cache, self.queries = cache, queries
        tokens = cache.batch * queries
        self.q = torch.randn(tokens, HEADS * DIM, device="cuda")
        last = torch.arange(cache.context - queries, cache.context, device="cuda", dtype=torch.int32)
        self.positions = last.repeat(cache.batch)
        self.query_start = torch.arange(cache.batch + 1, device="cuda", dtype=torch.int32) * queries
        self.out = torch.full((tokens, HEADS * DIM), math.nan, device="cuda")
        self.staged = cache.staged(cache.copies[0], queries) if isinstance(cache, HierCache) else None
        self.sinks = torch.linspace(-2.0, 12.0, HEADS, device="cuda")
        slope = 2.0 ** torch.linspace(-1.0, -8.0, HEADS, device="cuda")  # linear, as ALiBi's are
        self.key_bias = slope[:, None] * torch.arange(8192, device="cuda")

    def launches(self, spec: AttentionSpec) -> list[Launch]:
        """One launch for each copy of the cache."""
        cache, tokens = self.cache, len(self.positions)
        splits, leaves = -(-cache.context // spec.split), spec.kv.leaves if spec.cut == "leaf" else 1
        slots = splits * leaves
        parts = torch.full((tokens * HEADS * slots * DIM,), math.nan, device="cuda")
        stats = torch.full((tokens * HEADS * slots * 2,), math.nan, device="cuda")
        given: dict[str, Any] = {"q": self.q, "positions": self.positions, "query_start": self.query_start}
        given |= {"block_table": cache.table, "parts": parts, "stats": stats, "out": self.out}
        given |= {"table_stride": cache.table.shape[1], "splits": slots, "staged": self.staged}
        given |= {"sinks": self.sinks, "key_bias": self.key_bias}
        tiles_of_rows = -(-self.queries // spec.queries)
        most = slots
        if spec.multi_split:
            work = AttentionWork(splits, tokens, cache.batch, self.queries)
            counts = attention_counts({**limits_of(spec.kv).facts, "fine_splits": 0}, work, AttentionWork())
            most = counts["shares"]
        todo = [(spec.kernel(90), (KV_HEADS * tiles_of_rows, cache.batch, min(slots, most)))]
        if spec.cut == "whole":
            programs = -(-tiles_of_rows // 2) if spec.paired else tiles_of_rows
            todo = [(spec.kernel(90), (programs, KV_HEADS, cache.batch))]
        else:
            several = splits > GROUP_SPLITS
            merge = MergeSpec(spec.kv, HEADS, 1, not several, spec.split, leaves, sinks=spec.sinks)
            todo.append((merge.kernel(90), (tokens, merge.programs, -(-splits // GROUP_SPLITS))))
            if several:
                todo.append((replace(merge, level=2, final=True).kernel(90), (tokens, HEADS, 1)))
        result: list[Launch] = []
        for copy in cache.copies:
            items = copy.view(torch.bfloat16 if spec.kv.bits == 16 else torch.int16)
            words = torch.float32 if spec.kv.hierarchical else torch.int32
            pages = {"kv": items, "kv_words": copy.view(words), "kv_full": copy.view(torch.bfloat16)}
            all_ = [launch(kernel, 90, grid, {**given, **pages}) for kernel, grid in todo]
            result.append(partial(_run, all_))
        return result

    def relative_error(self, spec: AttentionSpec) -> float:
        """Of `out` as the first copy of the cache left it, over the last group of the first and the last sequence."""
        worst = 0.0
        for sequence in {0, self.cache.batch - 1}:
            k, v = self.cache.dense(self.cache.copies[0], sequence)
            count, end = min(self.queries, HIER_GROUP), (sequence + 1) * self.queries
            rows = slice(end - count, end)
            q = self.q[rows].view(count, KV_HEADS, -1, DIM)
            score = torch.einsum("qhgd,htd->hgqt", q.double(), k.double()) * DIM**-0.5
            if spec.bias_positions:
                bias = self.key_bias.double().view(KV_HEADS, -1, 1, 8192)
                score += bias[..., : self.cache.context] - bias[..., self.positions[rows].long()].transpose(-1, -2)
            past = torch.arange(self.cache.context, device="cuda") > self.positions[rows][:, None]
            weight = score.masked_fill(past, -math.inf)
            if spec.sinks:
                sink = self.sinks.double().view(KV_HEADS, -1, 1, 1).expand(*weight.shape[:-1], 1)
                weight = torch.cat((weight, sink), -1)
            weight = weight.softmax(-1)[..., : self.cache.context]
            want = torch.einsum("hgqt,htd->qhgd", weight, v.double()).reshape(count, -1)
            error = ((self.out[rows] - want).norm() / want.norm()).item()
            worst = max(worst, error if error == error else math.inf)
        return worst


def sdpa_us(batch: int, context: int, queries: int, backend: Any) -> float | None:
    """torch's attention on bf16 keys and values, heads of a KV head folded into queries where it has no GQA."""
    size = batch * KV_HEADS * context * DIM * 4
    copies = max(2, min(ROTATED_BYTES // size + 1, 48))
    k, v = (
        [torch.randn(batch, KV_HEADS, context, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
        for _ in range(2)
    )
    q = torch.randn(batch, HEADS, queries, DIM, device="cuda", dtype=torch.bfloat16)

    def one(k: Tensor, v: Tensor) -> Launch:
        def attend() -> object:
            with torch.nn.attention.sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

        return attend

    try:
        return graph_us([one(*pair) for pair in zip(k, v, strict=True)])
    except RuntimeError:
        return None


def long_steps(formats: Iterable[str]) -> list[dict[str, Any]]:
    """Steps of many rows of a sequence, as of prompts."""
    result = []
    for format, (rows, context) in itertools.product(formats, LONG):
        kv = GpuKV(format, KV_HEADS, DIM)
        problem = Problem((HierCache if kv.hierarchical else Cache)(kv, 1, context), rows)
        spec = specs_for(format, rows)["far" if context > NEAR_SPLITS * tiles.split_positions(kv) else "whole"]
        launches = problem.launches(spec)
        launches[0]()
        error = problem.relative_error(spec)
        us = graph_us(launches, 9, 16)
        result.append({"rows": rows, "context": context, "format": format, "us": us, "relative_error": error})
        note = f"error {error:.1e} {'' if error < MOST_ERROR else 'WRONG'}"
        print(f"{rows:3} rows to {context:6} {format:8} {us:8.1f} us  {note}", flush=True)
    return result


def candidates(search: bool) -> list[dict[str, Any]]:
    """Cuts to be measured: that of codegen/gpu/gemm/tiles.py, or all."""
    if not search:
        return [{}]
    return [{"split": s, "stages": n} for s, n in itertools.product((256, 512), (1, 2, 3, 4))]


def more_scores(formats: Iterable[str], cases: Iterable[tuple[int, int]]) -> list[dict[str, Any]]:
    """Steps of one row a sequence with what SCORES has, one after the other in two rounds, the shorter time of each."""
    result = []
    for (batch, context), format in itertools.product(cases, formats):
        kv = GpuKV(format, KV_HEADS, DIM)
        cache = (HierCache if kv.hierarchical else Cache)(kv, batch, context)
        problem, ready = Problem(cache, 1), {}
        row: dict[str, Any] = {"batch": batch, "context": context, "format": format, "kv_heads": KV_HEADS}
        for name, more in SCORES.items():
            spec = specs_for(format, 1, **more)[work_of(kv, batch, context, tiles.split_positions(kv))]
            ready[name] = problem.launches(spec)
            ready[name][0]()
            row[f"{name}_error"] = problem.relative_error(spec)
            row[f"{name}_rows_that_differ"] = rows_that_differ(cache, format, **more)
        times = [{name: graph_us(launches) for name, launches in ready.items()} for _ in range(2)]
        row |= {f"{name}_us": min(each[name] for each in times) for name in ready}
        print(" ".join(f"{k} {round(v, 5) if isinstance(v, float) else v}" for k, v in row.items()), flush=True)
        result.append(row)
        del cache, problem, ready
        torch.cuda.empty_cache()
    return result


def rows_that_differ(cache: Cache, format: str, **more: Any) -> int:
    """Rows of five queries with bits that depend on how attention is cut, or on how many queries a step has."""
    five = Problem(cache, 5)
    outputs = []
    prompts = specs_for(format, 512, **more)
    for spec in (*specs_for(format, 5, **more).values(), prompts["whole"], prompts["far"]):
        five.out.fill_(math.nan)
        five.launches(spec)[0]()
        outputs.append(five.out.view(cache.batch, 5, -1).clone())
    one = Problem(cache, 1)
    one.q = five.q.view(cache.batch, 5, -1)[:, 4].contiguous()
    for spec in (spec for work, spec in specs_for(format, 1, **more).items() if work in DECODE):
        one.launches(spec)[0]()
        outputs.append(torch.cat((outputs[0][:, :4], one.out[:, None]), 1))
    return sum(int((out != outputs[0]).any(-1).sum()) for out in outputs)


def compile_one(spec: AttentionSpec) -> bool:
    """Into the cache of kernels, in a process of its own."""
    try:
        return gpu_compile.compile_kernel(spec.kernel(90), 90).shared_bytes <= 227 * 1024
    except Exception:
        return False


def main() -> None:
    search, paths = "--search" in sys.argv, [a for a in sys.argv[1:] if not a.startswith("--")]
    backends = torch.nn.attention.SDPBackend
    if "--scores" in sys.argv:
        result = {**facts(), "scores": more_scores(FORMATS, ((1, 8192), (64, 1024)))}
        for path in paths:
            Path(path).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        return
    results: dict[str, Any] = {**facts(), "rivals": [], "kernels": [], "bits": []}
    cuts, asked = candidates(search), (1,) if search else (1, 5)
    named = [a.split("=", 1)[1].split(",") for a in sys.argv if a.startswith("--formats=")]
    formats = named[0] if named else FORMATS
    specs = [
        spec
        for format, queries, cut in itertools.product(formats, asked, cuts)
        for work, spec in specs_for(format, queries, **cut).items()
        if work in DECODE
    ]
    with ProcessPoolExecutor(15, mp_context=get_context("spawn")) as pool:
        usable = dict(zip(specs, pool.map(compile_one, specs), strict=True))
    for batch, context in CASES:
        for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION") if not search else ("CUDNN_ATTENTION",):
            us = sdpa_us(batch, context, 1, getattr(backends, name))
            results["rivals"].append({"batch": batch, "context": context, "name": name, "us": us})
            print(f"{batch:3} {context:7} {name:22} {us if us is None else round(us, 1)}", flush=True)
        torch.cuda.empty_cache()
        for format in formats:
            kv = GpuKV(format, KV_HEADS, DIM)
            cache = (HierCache if kv.hierarchical else Cache)(kv, batch, context)
            for queries, cut in itertools.product(asked, cuts):
                work = work_of(kv, batch, context, cut.get("split", tiles.split_positions(kv)))
                spec = specs_for(format, queries, **cut)[work]
                if not usable[spec]:
                    continue
                problem = Problem(cache, queries)
                launches = problem.launches(spec)
                launches[0]()
                error = problem.relative_error(spec)
                us = graph_us(launches, 9 if search else 25)
                row = {"batch": batch, "context": context, "format": format, "queries": queries, "us": us}
                results["kernels"].append({**row, "relative_error": error, "cut": cut or None})
                note = f"error {error:.1e} {'' if error < MOST_ERROR else 'WRONG'} {cut or ''}"
                print(f"{batch:3} {context:7} {format:8} q{queries} {us:8.1f} us  {note}", flush=True)
            if not search:
                differ = rows_that_differ(cache, format)
                row = {"batch": batch, "context": context, "format": format, "rows_that_differ": differ}
                results["bits"].append(row)
                print(f"{batch:3} {context:7} {format:5} rows with different bits: {differ}", flush=True)
            del cache
            torch.cuda.empty_cache()
            for path in paths:
                Path(path).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if not search:
        results["long_steps"] = long_steps(formats)
        for path in paths:
            Path(path).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
