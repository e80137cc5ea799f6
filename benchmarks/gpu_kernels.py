"""GEMM kernels on this GPU: checked first, then timed beside what the libraries offer, in one run.

    python benchmarks/gpu_kernels.py [out.json] [--formats=w4_asym_g128,mxfp4] [--shapes=4096x11008,...]

Kernels have the tiles that codegen/gpu/gemm/tiles.py chooses, or, for shapes that are named, the batch-invariant ones
that steps run: float accumulators then have as many splits of K for every M. Times are microseconds per launch by CUDA
graph replay, the launch gap included, weights rotated through more than five times the L2, activations already
quantized; medians over replays.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.gpu_common import ROTATED_BYTES, Launch, Problem, facts, graph_us, spec_for
from qcompile.codegen.gpu.gemm import render as gemm_render
from qcompile.codegen.gpu.gemm.spec import KernelSpec
from qcompile.codegen.gpu.gemm.tile import DECODE_TOKENS
from qcompile.codegen.gpu.gemm.tiles import choose_batch_invariant

SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (28672, 4096))
Shapes = tuple[tuple[int, int], ...]
Formats = tuple[tuple[str, bool], ...]
FORMATS: Formats = (
    ("qoq_channel", False),
    ("qoq_g128", False),
    ("w4_asym_g128", False),
    ("w8_sym_channel", False),
    ("nested_8_4", False),
    ("w4_asym_g128_int8", False),  # also what a nested weight's upper nibbles are read by
    ("w4_asym_g128_int8", True),
    ("mix_4_8", True),
    ("mxfp4", False),
    ("mxfp4_a8", True),
)
"""Kernels by format, and whether activations have scales in groups of 128."""
TOKENS = tuple(2**i for i in range(13))
TABLE = (1, 16, 64, 256, 1024, 4096)
STEPS = (32, 64, 500)
"""Numbers of rows past the decode class: their kernels are compared with those of the class bit by bit."""
MOST_ERROR = 4e-3
"""Rounding to bf16 alone is worth 1.7e-3; rounding a scaled 4-bit weight to bf16 as much again."""


def ceilings() -> dict[str, float]:
    """What this GPU does at best: GB/s read and copied, TFLOPS and TOPS, and the microseconds of an empty launch."""
    big = torch.randint(-100, 100, (2**29,), dtype=torch.int32, device="cuda")
    other = torch.empty_like(big)
    numbers = torch.randn(2**29, device="cuda")
    read_us = graph_us([lambda: numbers.sum()] * 2, 5)
    copy_us = graph_us([lambda: other.copy_(big)] * 2, 5)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    a8 = torch.randint(-127, 128, (8192, 8192), dtype=torch.int8, device="cuda")
    product_us = graph_us([lambda: a @ a.t()] * 2, 9)
    product8_us = graph_us([lambda: torch._int_mm(a8, a8.t())] * 2, 9)
    one = torch.zeros(1, device="cuda")
    flops, size = 2 * 8192**3, big.numel() * 4
    return {
        "read_gb_s": size / read_us / 1e3,
        "copy_gb_s": 2 * size / copy_us / 1e3,
        "bf16_tflops": flops / product_us / 1e6,
        "int8_tops": flops / product8_us / 1e6,
        "one_element_kernel_us": graph_us([lambda: one.zero_()] * 100),
    }


class Rivals:
    """Library products for a weight [n, k]: bf16 cuBLAS, fp8 `_scaled_mm` with scales per row, int8 `_int_mm`."""

    def __init__(self, n: int, k: int) -> None:
        self.k = k
        w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02
        self.bf16 = self._copies(w)
        self.fp8 = self._copies((w * 1000).to(torch.float8_e4m3fn))
        self.int8 = self._copies((w * 1000).to(torch.int8))
        self.w_scale = torch.ones(1, n, device="cuda")

    @staticmethod
    def _copies(w: torch.Tensor) -> list[torch.Tensor]:
        return [w.clone() for _ in range(ROTATED_BYTES // (w.numel() * w.element_size()) + 1)]

    def times(self, tokens: int) -> dict[str, float | None]:
        """Microseconds of each rival; None where it does not take so few rows."""
        x = torch.randn(tokens, self.k, device="cuda", dtype=torch.bfloat16)
        x8, xf = (x * 30).to(torch.int8), x.to(torch.float8_e4m3fn)
        scale = torch.ones(tokens, 1, device="cuda")
        launches: dict[str, list[Launch]] = {
            "bf16 cuBLAS": [partial(torch.matmul, x, w.t()) for w in self.bf16],
            "fp8 _scaled_mm": [
                partial(torch._scaled_mm, xf, w.t(), scale, self.w_scale, out_dtype=torch.bfloat16) for w in self.fp8
            ],
            "int8 _int_mm": [partial(torch._int_mm, x8, w.t()) for w in self.int8],
        }
        return {name: _time_or_none(each, *_effort(tokens)) for name, each in launches.items()}


def _time_or_none(launches: list[Launch], *effort: int) -> float | None:
    try:
        return graph_us(launches, *effort)
    except RuntimeError:
        return None


def check(problem: Problem, spec: KernelSpec, tokens: int) -> float:
    """Relative error of a launch on fresh inputs into a poisoned output, the second after another launch."""
    worst = 0.0
    for launch_number in range(2):
        x = problem.activations(tokens)
        out = torch.full((tokens, problem.n), float("nan"), dtype=torch.bfloat16, device="cuda")
        problem.launches(spec, x, out, 90)[launch_number % len(problem.copies)]()
        worst = max(worst, problem.relative_error(x, out))
    return worst


def rows_that_depend_on_m(problem: Problem) -> int:
    """Outputs that differ in any bit between M = 16 and another M, each by the kernel that a step of M rows runs."""
    x = problem.activations(max(STEPS))
    whole = _product(problem, [t[:DECODE_TOKENS].contiguous() for t in x])
    result = 0
    for tokens in (*range(1, DECODE_TOKENS), *STEPS):
        part, least = _product(problem, [t[:tokens].contiguous() for t in x]), min(tokens, DECODE_TOKENS)
        result += int((part[:least].view(torch.int16) != whole[:least].view(torch.int16)).sum())
    return result


def _product(problem: Problem, x: list[torch.Tensor]) -> torch.Tensor:
    tokens = x[0].shape[0]
    out = torch.full((tokens, problem.n), float("nan"), dtype=torch.bfloat16, device="cuda")
    problem.launches(step_spec(problem.format, problem.n, problem.k, tokens, problem.x_groups), x, out, 90)[0]()
    return out


def step_spec(format: str, n: int, k: int, tokens: int, x_groups: bool) -> KernelSpec:
    """The batch-invariant kernel that a step of `tokens` rows runs: floats are summed as in the decode class."""
    spec = spec_for(format, n, k, tokens, x_groups)
    return replace(spec, tile=choose_batch_invariant(format, spec.n, k, tokens))


def measured_spec(format: str, n: int, k: int, tokens: int, x_groups: bool) -> KernelSpec:
    """The kernel that is timed."""
    return (spec_for if (n, k) in SHAPES else step_spec)(format, n, k, tokens, x_groups)


def measure(format: str, x_groups: bool, n: int, k: int) -> dict[str, Any]:
    """Errors and times of one format and shape at every M."""
    problem = Problem(format, n, k, x_groups)
    rows = []
    for tokens in TOKENS:
        spec = measured_spec(format, n, k, tokens, x_groups)
        error = check(problem, spec, tokens)
        if not error < MOST_ERROR:
            print(f"WRONG: {format} [{n}, {k}], M = {tokens}: relative error {error:.2e} with {spec.tile}", flush=True)
        x = problem.activations(tokens)
        out = torch.empty(tokens, n, dtype=torch.bfloat16, device="cuda")
        us = graph_us(problem.launches(spec, x, out, 90), *_effort(tokens))
        rows.append({"M": tokens, "us": us, "relative_error": error, "tile": vars(spec.tile)})
    differ = rows_that_depend_on_m(problem)
    return {"format": format, "x_groups": x_groups, "N": n, "K": k, "depend_on_m": differ, "times": rows}


def _effort(tokens: int) -> tuple[int, int]:
    """Replays, and the least launches in one."""
    return (25, 64) if tokens <= 256 else (9, 16)


def compile_one(spec: KernelSpec) -> None:
    """Into the cache of kernels, in a process of its own."""
    gemm_render.compile_for(spec, 90)


def compile_all(formats: Formats, shapes: Shapes) -> None:
    """Every kernel that will be measured or compared."""
    weights = [(format, groups, n, k) for format, groups in formats for n, k in shapes]
    specs = {measured_spec(format, n, k, tokens, groups) for format, groups, n, k in weights for tokens in TOKENS}
    few = (1, 2, 3, DECODE_TOKENS)
    specs |= {step_spec(format, n, k, tokens, groups) for format, groups, n, k in weights for tokens in (*few, *STEPS)}
    with ProcessPoolExecutor(15, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, specs))


def main() -> None:
    options = dict(a[2:].split("=", 1) for a in sys.argv[1:] if a.startswith("--"))
    named = {name: text.split(",") for name, text in options.items()}
    paths = [Path(a) for a in sys.argv[1:] if not a.startswith("--")]
    formats = tuple(each for each in FORMATS if each[0] in named.get("formats", [each[0]]))
    shapes = tuple((int(n), int(k)) for n, k in (text.split("x") for text in named.get("shapes", []))) or SHAPES
    compile_all(formats, shapes)
    results: dict[str, Any] = {**facts(), "ceilings": ceilings(), "rivals": [], "kernels": []}
    print({name: round(value, 1) for name, value in results["ceilings"].items()})
    print(f"{'N, K':>13} {'':26}" + "".join(f"{'M=' + str(m):>9}" for m in TABLE))
    for n, k in shapes:
        rivals = Rivals(n, k)
        times = {tokens: rivals.times(tokens) for tokens in TOKENS}
        results["rivals"].append({"N": n, "K": k, "times": [{"M": m, **each} for m, each in times.items()]})
        for name in times[1]:
            _print(f"{n}, {k}", name, [times[m][name] for m in TABLE])
        del rivals
        for format, x_groups in formats:
            result = measure(format, x_groups, n, k)
            results["kernels"].append(result)
            us = {row["M"]: row["us"] for row in result["times"]}
            slower = [m for m in TOKENS if us[m] >= (times[m]["bf16 cuBLAS"] or 0)]
            worst = max(row["relative_error"] for row in result["times"])
            note = f"error {worst:.1e}, depend on M {result['depend_on_m']}, slower than cuBLAS at {slower}"
            name = format + (" x_groups" if x_groups else "")
            _print(f"{n}, {k}", name, [us[m] for m in TABLE], note)
            torch.cuda.empty_cache()
        for path in paths:
            path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def _print(shape: str, name: str, us: list[float | None], note: str = "") -> None:
    cells = "".join(f"{value:9.2f}" if value else f"{'-':>9}" for value in us)
    print(f"{shape:>13} {name:26}{cells} {note}", flush=True)


if __name__ == "__main__":
    main()
