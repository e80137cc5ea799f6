"""Search tile choices on this GPU: every candidate is checked, then timed; the fastest go to a JSON file.

    python benchmarks/gpu_tune.py out.json [format ...]

The fastest is also printed as an entry of codegen/gpu/gemm/tiles_h200.json. The kernels of the largest class serve any
larger M: they are measured at each M of LARGE, with few candidates, beside torch's product of int8 matrices (cuBLAS).
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.gpu_common import Problem, facts, graph_us, spec_for
from qcompile.codegen.gpu.gemm import render as gemm_render
from qcompile.codegen.gpu.gemm.spec import KernelSpec
from qcompile.codegen.gpu.gemm.tile import DECODE_TOKENS, Tile
from qcompile.codegen.gpu.gemm.tile_table import TunedFor, entry_line
from qcompile.codegen.gpu.gemm.tiles import choose
from qcompile.errors import UnsupportedError
from qcompile.formats.registry import gpu_kernel
from qcompile.targets import TUNED_ON

SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (28672, 4096))
LARGE = (2048, 8192)
TOKENS = {1: (1,), 16: (8, 16), 32: (32,), 64: (64,), 128: (128,), 256: (256,), 512: (512,), 1024: LARGE}
"""Measured M by class of M."""

FORMATS = ("qoq_channel", "qoq_g128", "w4_asym_g128", "w8_sym_channel", "mxfp4")
IN_GROUPS = ("nested_8_4", "w4_asym_g128_int8", "mix_4_8", "mxfp4_a8")
"""Formats that are searched with activations in groups of 128, as recipes have them."""
ERROR = 4e-3


def gemv_tiles(format: str, n: int, k: int) -> Iterator[Tile]:
    """Candidates for M = 1 without the tensor cores; all use PDL. A thread has 16 bytes of a row and block."""
    quads = 8 if format == "w8_sym_channel" else 4
    if format in IN_GROUPS:  # sums in as many parts as the decode class has
        decode = choose(format, n, k, DECODE_TOKENS)
        parts = decode.sliced_k * decode.split_k
        for rows, warps, stages in itertools.product((8, 16, 32), (1, 2, 4, 8), (2, 3, 4, 5, 6, 7)):
            if 1 <= rows * parts / (8 * warps) <= 4:
                yield Tile(1, rows, parts, 1, 1, warps, stages, 128)
        return
    for rows, warps, stages in itertools.product((8, 16, 32), (1, 2, 4, 8), (1, 2, 3, 4)):
        unroll = 32 * warps // quads
        if rows * stages <= 32 and k // 128 % unroll == 0:
            yield Tile(1, rows, 1, 1, unroll, warps, stages, 128)


def decode_tiles() -> Iterator[Tile]:
    """Candidates for M up to 16, with sliced_k or split_k."""
    for (slices, warps), stages, unroll, splits in itertools.product(((4, 4), (4, 8)), (3, 4, 6), (1, 2, 4), (1, 2)):
        yield Tile(16, 32, slices, splits, unroll, warps, stages)
    for (rows, warps), stages, unroll, splits in itertools.product(
        ((64, 4), (128, 4), (128, 8)), (3, 4, 6), (1, 2, 4), (1, 2, 4, 8)
    ):
        yield Tile(16, rows, 1, splits, unroll, warps, stages)


def prefill_tiles(tokens: int) -> Iterator[Tile]:
    """Candidates for a class of M above 16."""
    cuts: tuple[tuple[int, int, int], ...]
    splits: tuple[int, ...] = (1, 2, 4)
    if tokens == 64:
        cuts = ((64, 64, 4), (64, 128, 8), (64, 128, 4), (32, 64, 4), (32, 128, 4))
    elif tokens == 128:
        cuts = ((64, 64, 4), (64, 128, 8), (64, 128, 4), (128, 64, 4), (128, 128, 4), (128, 128, 8))
    else:
        cuts = ((128, 128, 8), (128, 64, 4), (128, 128, 4), (64, 128, 4), (64, 128, 8), (256, 64, 4))
        cuts += ((128, 256, 8), (256, 128, 8), (64, 64, 4), (256, 64, 8))
        splits = (1, 2, 4) if tokens == 256 else (1,)
    unrolls = (1, 2, 4) if tokens <= 64 else (1, 2)
    for (m, rows, warps), stages, unroll, split in itertools.product(cuts, (2, 3, 4, 5), unrolls, splits):
        yield Tile(m, rows, 1, split, unroll, warps, stages)


def overlapped_tiles(tokens: int) -> Iterator[Tile]:
    """Candidates for a class of M from 16 on that overlap unpacking within each warp."""
    cuts: tuple[tuple[int, ...], ...]
    if tokens == DECODE_TOKENS:
        cuts = ((64, 4, 32), (64, 4, 64), (128, 4, 16), (128, 4, 32), (128, 8, 32), (256, 8, 16))
        for (rows, warps, unpack_k), split, unroll in itertools.product(cuts, (1, 2, 4, 8), (1, 2, 4)):
            yield Tile(16, rows, 1, split, unroll, warps, 1, 128, unpack_k=unpack_k)
        return
    cuts = ((32, 64, 4, 64), (64, 64, 4, 32), (64, 128, 8, 32), (64, 128, 4, 32), (128, 64, 4, 32), (128, 128, 8, 32))
    cuts += ((128, 256, 8, 32), (256, 128, 8, 16), (256, 128, 8, 32))
    splits = (1, 2, 4) if tokens <= 512 else (1,)
    for (m, rows, warps, unpack_k), split, unroll in itertools.product(cuts, splits, (1, 2, 4)):
        if m <= max(tokens, 64) and (m * rows <= 64 * 64 or unroll <= 2):
            yield Tile(m, rows, 1, split, unroll, warps, 1, unpack_k=unpack_k)


def warp_specialized_tiles(tokens: int, unroll: int) -> Iterator[Tile]:
    """Warp-specialized candidates for a class of M from 16 on; all use PDL."""
    cuts: tuple[tuple[int, int, int], ...] = ((16, 64, 4), (16, 128, 8))
    depths = (3, 4, 6, 8)
    splits: tuple[int, ...] = (1, 2, 4, 8)
    if tokens > DECODE_TOKENS:
        cuts = ((32, 64, 4), (32, 128, 8), (64, 64, 4), (64, 128, 8), (128, 64, 4), (128, 128, 8))
        depths, splits = (2, 3, 4, 6), (1, 2, 4) if tokens <= 256 else (1,)
    for (m, rows, warps), stages, split in itertools.product(cuts, depths, splits):
        if m <= max(tokens, 64) and (m == 128 or tokens < 512):
            tile = Tile(m, rows, 1, split, unroll, warps, stages, 128, unpack_k=128)
            yield from (tile, replace(tile, token_halves=True)) if m == 128 else (tile,)


def large_tiles(unroll: int) -> Iterator[Tile]:
    """Candidates for the largest class of M."""
    for (m, rows, warps), stages in itertools.product(((128, 128, 4), (128, 128, 8), (128, 256, 8)), (3, 4)):
        yield Tile(m, rows, 1, 1, unroll, warps, stages)
    for m, stages in ((128, 4), (128, 6), (256, 4), (256, 5)):
        tile = Tile(m, 128, 1, 1, unroll, 8, stages, unpack_k=128)
        yield from (tile, replace(tile, persistent=True), replace(tile, prefetch_bytes=128))


def candidates(format: str, n: int, k: int, tokens: int) -> list[KernelSpec]:
    """Kernels that could serve a weight [n, k] for a class of M."""
    result = []
    if tokens == 1:
        if not gpu_kernel(format).gemv:
            return []
        return [KernelSpec(format, n, k, tile, x_groups=format in IN_GROUPS) for tile in gemv_tiles(format, n, k)]
    least = gpu_kernel(format).min_unroll
    whole = decode_tiles() if tokens == DECODE_TOKENS else prefill_tiles(tokens)
    tiles = itertools.chain(whole, overlapped_tiles(tokens), warp_specialized_tiles(tokens, least))
    for tile in large_tiles(least) if tokens >= max(TOKENS) else tiles:
        programs = n // tile.rows * tile.split_k * max(1, tokens // tile.tokens)
        if tile.stages * tile.unroll * tile.sliced_k > 48 or not (programs >= 64 and (programs <= 1100 or tokens > 64)):
            continue
        if tile.split_k > 1 and programs > 600:
            continue
        try:
            spec = spec_for(format, n, k, tokens, format in IN_GROUPS, tile)
        except UnsupportedError:
            continue
        if 16_000 < tile.stages * spec.step_bytes <= TUNED_ON.shared_bytes:
            result.append(spec)
    return result


def with_prefetch(spec: KernelSpec) -> list[KernelSpec]:
    """`spec` with programmatic dependent launch, and more or less of the weights prefetched."""
    part = spec.k_parts.blocks // spec.tile.split_k * 32 * spec.layout.row_bytes
    most = 1 << (part.bit_length() - 1)
    sizes = sorted({min(size, most) for size in (4096, 16384)})
    return [replace(spec, tile=replace(spec.tile, prefetch_bytes=size)) for size in sizes]


def compile_one(spec: KernelSpec) -> bool:
    """Into the cache of kernels, in a process of its own."""
    try:
        return gemm_render.compile_for(spec, 90).shared_bytes <= TUNED_ON.shared_bytes
    except Exception:
        return False


def measure(problem: Problem, specs: list[KernelSpec], tokens: int) -> list[tuple[float, KernelSpec]]:
    """(microseconds, kernel) of the candidates that are right, fastest first."""
    x = problem.activations(tokens)
    out = torch.empty(tokens, problem.n, dtype=torch.bfloat16, device="cuda")
    rows = torch.randperm(tokens, device="cuda")[:64]  # of all parts of tiles
    result = []
    for spec in specs:
        out.fill_(float("nan"))
        try:
            launches = problem.launches(spec, x, out, 90)
            launches[0]()
            error = problem.relative_error([t[rows] for t in x], out[rows])
            if error > ERROR:
                print("wrong", error, spec, flush=True)
                continue
            result.append((graph_us(launches, 3, 24), spec))
        except Exception as reason:
            print("failed", spec.tile, str(reason)[:120], flush=True)
    return sorted(result, key=lambda pair: pair[0])


def plain_us(n: int, k: int, tokens: int) -> float:
    """Microseconds of torch's product of int8 matrices, without scales."""
    x, w = (torch.randint(-127, 128, (rows, k), dtype=torch.int8, device="cuda") for rows in (tokens, n))
    return graph_us([lambda: torch._int_mm(x, w.T)], 3, 24)


def main() -> None:
    start, limit = time.time(), float(os.environ.get("TUNE_SECONDS", "540"))
    formats = sys.argv[2:] or FORMATS + IN_GROUPS
    classes = [int(c) for c in os.environ.get("TUNE_CLASSES", "1,16,32,64,128,256,512,1024").split(",")]
    jobs = [(f, n, k, c) for c in classes for f in formats for n, k in SHAPES]
    specs = {job: candidates(*job) for job in jobs}
    results: list[dict[str, Any]] = []
    spawn = get_context("spawn")
    with ProcessPoolExecutor(15, mp_context=spawn) as pool, ProcessPoolExecutor(8, mp_context=spawn) as quick:
        ready = {job: pool.map(compile_one, specs[job], chunksize=2) for job in jobs}
        for job in jobs:
            if time.time() - start > limit:
                print("out of time before", job)
                break
            good = [s for s, ok in zip(specs[job], ready[job], strict=True) if ok]
            problem = Problem(*job[:3], x_groups=job[0] in IN_GROUPS)
            if job[3] == max(TOKENS):
                plain = {m: plain_us(*job[1:3], m) for m in LARGE}
                results.append({"job": job, "kind": "torch._int_mm", "us": plain})
                print(*job, "torch._int_mm", plain, flush=True)
            for tokens in TOKENS[job[3]]:
                ranked = measure(problem, good, tokens)
                more = [
                    e for _, spec in ranked[:4] if not (spec.gemv or spec.tile.unpack_k) for e in with_prefetch(spec)
                ]
                list(quick.map(compile_one, more))
                ranked_early = measure(problem, more, tokens)
                for name, pairs in (("alone", ranked), ("early", ranked_early)):
                    best = [(us, vars(s.tile)) for us, s in pairs[:12]]
                    results.append({"job": job, "M": tokens, "kind": name, "ranked": best})
                    print(f"{time.time() - start:4.0f}s", *job, "M", tokens, name, len(pairs), flush=True)
                    tuned_for = TunedFor(job[0], job[3], job[1], job[2])
                    print(*(entry_line(tuned_for, s.tile, [us], tokens) for us, s in pairs[:1]), flush=True)
            del problem
            Path(sys.argv[1]).write_text(json.dumps({**facts(), "results": results}))
        pool.shutdown(cancel_futures=True)


if __name__ == "__main__":
    main()
