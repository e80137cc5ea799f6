"""Search tiles for mixtures of experts on this GPU: every candidate is checked, then timed; the fastest go to a file.

    python benchmarks/gpu_tune_experts.py out.json [format ...]

Weights are those of one layer of gpt-oss-20b and of Qwen3-30B-A3B: gate and up together, and down. A candidate is right
if its outputs have the bits of the tile that codegen/gpu/gemm/expert_tiles.py has. What is timed is a graph of launches
for tokens that chose experts at random, anew for each launch, so that weights come from memory. TUNE_SECONDS (540) ends
the search. The fastest are also printed as entries of codegen/gpu/gemm/expert_tiles_h200.json.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.gpu_common import Launch, facts, graph_us, launch
from qcompile.codegen.gpu.gemm import render as gemm_render
from qcompile.codegen.gpu.gemm import spec as gemm
from qcompile.codegen.gpu.gemm import tiles
from qcompile.codegen.gpu.gemm.pack import pack_gpu
from qcompile.codegen.gpu.gemm.spec import KernelSpec
from qcompile.codegen.gpu.gemm.tile import DECODE_TOKENS, Tile
from qcompile.codegen.gpu.gemm.tile_table import TunedFor, entry_line
from qcompile.codegen.gpu.operands import grid_size
from qcompile.codegen.gpu.sorted_slots import BlocksSpec
from qcompile.codegen.sizes import power_of_two
from qcompile.errors import UnsupportedError
from qcompile.formats.activations import activation_format
from qcompile.formats.registry import gpu_kernel, gpu_packing, weight_format
from qcompile.targets import TUNED_ON

FORMATS = {  # of kernels, with their packings and activations
    "mxfp4_a8": ("mxfp4_int8", "int8_g128"),
    "qoq_g128": ("qoq_g128", "int8"),
    "w4_asym_g128": ("w4_asym_g128", "bf16"),
    "w4_asym_g128_int8": ("w4_asym_g128_int8", "int8_g128"),
}
TOKENS = {1: (1, 2, 4), 16: (8, 16, 64), 64: (512,)}
"""Measured rows of a step by slots of a program."""
LAUNCHES, STRIDE, MOST = 8, 32, 512


@dataclass(frozen=True)
class Weight:
    """Experts' weights of [rows, k] each; inputs are a row a slot (`by_slot`) or a token."""

    experts: int
    slots: int
    rows: int
    k: int
    by_slot: bool


WEIGHTS = (
    Weight(32, 4, 5760, 2880, False),
    Weight(32, 4, 2880, 2880, True),
    Weight(128, 8, 1536, 2048, False),
    Weight(128, 8, 2048, 768, True),
)
Job = tuple[str, Weight, int]


def candidates(format: str, k: int, tokens: int) -> Iterator[Tile]:
    """Tiles that may serve; that of codegen/gpu/gemm/expert_tiles.py is not among them."""
    if tokens == 1 and not gpu_kernel(format).float_sum:
        for rows, warps, each, stages in itertools.product((8, 16), (1, 2, 4), (2, 4, 8), (1, 2, 3, 4)):
            if rows * stages <= 32:
                yield Tile(1, rows, unroll=each * warps, warps=warps, stages=stages, prefetch_bytes=128)
    elif tokens == 1:
        for rows, warps, stages in itertools.product((8, 16, 32), (1, 2, 4), (2, 3, 4, 5, 6, 8)):
            if rows >= 8 * warps:
                yield Tile(1, rows, warps=warps, stages=stages, prefetch_bytes=128)
    else:
        cuts = ((32, 2), (32, 4), (64, 2), (64, 4), (64, 8), (128, 4), (128, 8))
        for (rows, warps), stages, unroll in itertools.product(cuts, (2, 3, 4, 6, 8), (1, 2)):
            yield Tile(tokens, rows, unroll=unroll, warps=warps, stages=stages, prefetch_bytes=128)


def spec_of(format: str, weight: Weight, tile: Tile) -> KernelSpec:
    """The kernel, as plans have it."""
    gated = "" if weight.by_slot else "silu"
    width = weight.rows // 2 if gated else weight.rows
    experts = gemm.Experts(weight.experts, weight.slots, weight.by_slot, weight.slots * width, STRIDE)
    packing, activation = FORMATS[format]
    k = gpu_packing(packing).padded_inputs(weight.k)
    options: dict[str, Any] = {"out": "f32", "width": width, "gated": gated, "experts": experts}
    return KernelSpec(format, weight.experts * weight.rows, k, tile, x_groups=activation == "int8_g128", **options)


def specs_of(job: Job) -> list[KernelSpec]:
    """The kernel that plans have, first, and the others."""
    format, weight, tokens = job
    k = gpu_packing(FORMATS[format][0]).padded_inputs(weight.k)
    result = [spec_of(format, weight, tiles.choose_for_experts(format, weight.rows, k, tokens, TUNED_ON))]
    floats = result[0].layout.float_x  # sums are as exact as the tensor cores' instruction, which depends on the tile
    for tile in candidates(format, k, tokens):
        fitted = tiles.fit_tile(format, weight.rows, k, tile, TUNED_ON)
        if fitted is None or (floats and (tile.rows < 64 or tile.warps % 4)):
            continue
        try:
            spec = spec_of(format, weight, fitted)
        except UnsupportedError:
            continue
        if spec not in result and fitted.stages * spec.step_bytes <= TUNED_ON.shared_bytes:
            result.append(spec)
    return result


def compile_one(spec: KernelSpec) -> int | None:
    """Registers spilled, or None where it does not compile; into the cache of kernels, in a process of its own."""
    try:
        return gemm_render.compile_for(spec, 90).spill_bytes
    except Exception:
        return None


def chosen(weight: Weight, tokens: int, step: int) -> dict[str, Tensor]:
    """Experts of `tokens` rows, and their slots in order; each `step` has other experts than the one before."""
    index = torch.full((tokens, STRIDE), 1 << 20, dtype=torch.int32, device="cuda")
    if tokens * weight.slots <= weight.experts:  # all others
        order = torch.randperm(weight.experts, device="cuda").roll(-step * weight.slots * tokens)
        index[:, : weight.slots] = order[: tokens * weight.slots].view(tokens, weight.slots)
    else:
        index[:, : weight.slots] = torch.rand(tokens, weight.experts, device="cuda").argsort(1)[:, : weight.slots]
    return {"index": index}


def ordered(weight: Weight, index: Tensor, tokens: int) -> tuple[dict[str, Tensor], int]:
    """Slots by expert in blocks of `tokens`, and programs for them."""
    rows = len(index)
    few = max(DECODE_TOKENS, min(DECODE_TOKENS * weight.experts // weight.slots, MOST))
    spec = BlocksSpec(weight.experts, weight.slots, STRIDE, tokens, MOST if tokens > DECODE_TOKENS else few)
    made = {"order": torch.zeros(rows * weight.slots, dtype=torch.int32, device="cuda")}
    made["blocks"] = torch.zeros((spec.list, 3), dtype=torch.int32, device="cuda")
    given = {"index": index, "M": rows, **made}
    if spec.in_chunks:
        experts = power_of_two(weight.experts)
        sizes = {"counts": experts * spec.chunks, "before": experts * spec.chunks, "totals": experts}
        given |= {name: torch.zeros(size, dtype=torch.int32, device="cuda") for name, size in sizes.items()}
        for kernel, grid in spec.chunk_kernels(90):
            launch(kernel, 90, (grid_size(grid[0], {"tokens": rows}), 1, 1), given)()
    else:
        launch(spec.kernel(90), 90, (weight.experts, 1, 1), given)()
    torch.cuda.synchronize()
    return made, grid_size(spec.grid, {"tokens": rows})


class Problem:
    """Weights of a format, and steps of activations to multiply them by."""

    def __init__(self, format: str, weight: Weight) -> None:
        packing, self.activation = FORMATS[format]
        self.weight = weight
        self.k = gpu_packing(packing).padded_inputs(weight.k)
        parts = [
            pack_gpu(weight_format(kind).quantize(torch.randn(weight.rows, weight.k, device="cuda") * 0.05), packing)
            for kind in [packing.removesuffix("_int8")]
            for _ in range(weight.experts)
        ]
        self.packed = {role: self._joined(role, [part[role] for part in parts]) for role in parts[0]}

    def _joined(self, role: str, parts: list[Tensor]) -> Tensor:
        """What is packed by rows one after another, or, of groups, next to each other in each line."""
        if role not in ("groups", "ranges"):
            return torch.cat([part.reshape(-1) for part in parts])
        return torch.cat([part.reshape(-1, self.weight.rows) for part in parts], 1).contiguous()

    def steps(self, rows: int, tokens: int) -> list[tuple[dict[str, Any], int]]:
        """Arguments and programs of LAUNCHES launches."""
        weight, result = self.weight, []
        for step in range(LAUNCHES):
            given: dict[str, Any] = chosen(weight, rows, step)
            values = torch.zeros(rows * weight.slots if weight.by_slot else rows, self.k, device="cuda")
            values[:, : weight.k].normal_()
            x = activation_format(self.activation).quantize(values, 0)
            given |= dict(zip(("x", "x_scale", "x_sum"), x, strict=False))
            programs = rows * weight.slots
            if tokens > 1:
                made, programs = ordered(weight, given["index"], tokens)
                given |= made
            width = weight.rows if weight.by_slot else weight.rows // 2
            given["out"] = torch.zeros((rows, weight.slots, width), device="cuda")
            result.append((self.packed | given, programs))
        return result


def measure(problem: Problem, specs: list[KernelSpec], rows: int, tokens: int) -> dict[KernelSpec, float]:
    """Microseconds of each kernel that is right."""
    steps, result = problem.steps(rows, tokens), {}
    want = None
    for spec in specs:
        steps[0][0]["out"].fill_(float("nan"))
        launches: list[Launch] = [
            launch(gemm_render.kernel(spec), 90, (programs, problem.weight.rows // spec.tile.rows, 1), given)
            for given, programs in steps
        ]
        launches[0]()
        torch.cuda.synchronize()
        bits = steps[0][0]["out"].view(torch.int32).clone()
        want = bits if want is None else want
        if not torch.equal(bits, want) or bool(steps[0][0]["out"].isnan().any()):
            print("wrong", rows, spec, flush=True)
            continue
        result[spec] = graph_us(launches, 5, 16)
    return result


def main() -> None:
    start, limit = time.time(), float(os.environ.get("TUNE_SECONDS", "540"))
    torch.manual_seed(0)
    formats = sys.argv[2:] or list(FORMATS)
    jobs: list[Job] = [
        (format, weight, tokens)
        for format in formats
        for tokens in TOKENS
        for weight in WEIGHTS
        if tokens > 1 or gpu_kernel(format).gemv
    ]
    specs = {job: specs_of(job) for job in jobs}
    results: list[dict[str, Any]] = []
    with ProcessPoolExecutor(15, mp_context=get_context("spawn")) as pool:
        ready = {job: pool.map(compile_one, specs[job], chunksize=2) for job in jobs}
        for format, weight, tokens in jobs:
            if time.time() - start > limit:
                print("out of time before", format, weight, tokens)
                break
            job = (format, weight, tokens)
            good = [spec for spec, spilled in zip(specs[job], ready[job], strict=True) if spilled == 0]
            problem = Problem(format, weight)
            taken = {rows: measure(problem, good, rows, tokens) for rows in TOKENS[tokens]}
            kept = [spec for spec in good if all(spec in each for each in taken.values())]
            score = {spec: sum(each[spec] / min(each.values()) for each in taken.values()) for spec in kept}
            ranked = sorted(kept, key=score.__getitem__)
            rows = [{"tile": vars(s.tile), "us": {m: each[s] for m, each in taken.items()}} for s in ranked[:8]]
            row = {"format": format, "weight": vars(weight), "tokens": tokens, "candidates": len(good)}
            before = {m: each[good[0]] for m, each in taken.items()}
            results.append(row | {"before": before, "tile_before": vars(good[0].tile), "ranked": rows})
            print(
                f"{time.time() - start:4.0f}s", *job, len(good), {m: round(u, 1) for m, u in before.items()}, flush=True
            )
            tuned_for = TunedFor(format, tokens, weight.rows, problem.k)
            for spec in ranked[:3]:
                print(entry_line(tuned_for, spec.tile, [each[spec] for each in taken.values()]), flush=True)
            del problem
            Path(sys.argv[1]).write_text(json.dumps({**facts(), "results": results}))
        pool.shutdown(cancel_futures=True)


if __name__ == "__main__":
    main()
