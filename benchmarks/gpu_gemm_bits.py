"""GEMM kernels for many rows on this GPU: the bits of the decode class, with every epilogue.

    python benchmarks/gpu_gemm_bits.py [out.json] [--formats=bf16,mxfp4]

Every kernel that steps of ROWS rows run (the batch-invariant tiles of codegen/gpu/gemm/tiles.py) is compared with that
of 16 rows over the same rows, for weights with and without parts of K: `differ` counts outputs of which any bit is
another.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import gpu_common
from benchmarks.gpu_common import Problem, facts
from benchmarks.gpu_kernels import compile_one
from qcompile.codegen.gpu.gemm.spec import KernelSpec
from qcompile.codegen.gpu.gemm.tile import DECODE_TOKENS
from qcompile.codegen.gpu.gemm.tiles import choose_batch_invariant

FORMATS = {"bf16": False, "w4_asym_g128": False, "mxfp4": False, "w4_asym_g128_int8": True, "nested_8_4": True}
"""Formats with sums of floats, and whether activations have scales in groups of 128."""
INTEGERS = dict.fromkeys(("qoq_g128", "qoq_channel", "w8_sym_channel"), False)
"""The same for formats with sums of integers, which have tiles of 256 tokens."""
SHAPES = ((6144, 4096), (4096, 4096), (4096, 11008), (14336, 4096), (22016, 2048))
EPILOGUES: dict[str, dict[str, Any]] = {
    "plain": {"out": "bf16"},
    "residual": {"residual": True, "out": "f32"},
    "bias": {"bias": True, "out": "f32"},
    "gated": {"gated": "silu", "out": "f32"},
}
ROWS = (64, 129, 256, 300, 512, 2051, 8192)


def spec_of(format: str, n: int, k: int, epilogue: str, rows: int) -> KernelSpec:
    """The kernel for a step of `rows` rows."""
    more = dict(EPILOGUES[epilogue])
    if "gated" in more:
        more["width"] = n // 2
    groups = (FORMATS | INTEGERS)[format]
    return KernelSpec(format, n, k, choose_batch_invariant(format, n, k, rows), x_groups=groups, **more)


def compare(problem: Problem, epilogue: str) -> dict[int, int]:
    """By number of rows, the outputs that differ from those of the decode class."""
    n, k = problem.n, problem.k
    x = problem.activations(max(ROWS))
    decode = spec_of(problem.format, n, k, epilogue, DECODE_TOKENS)
    width, dtype = decode.width or n, torch.float32 if decode.out == "f32" else torch.bfloat16
    given = {"bias": torch.randn(n, device="cuda"), "residual": torch.randn(max(ROWS), width, device="cuda")}

    def product(spec: KernelSpec, rows: int) -> torch.Tensor:
        out = torch.full((rows, width), math.nan, dtype=dtype, device="cuda")
        problem.launches(spec, [part[:rows].contiguous() for part in x], out, 90, given)[0]()
        return out.float()

    want = product(decode, max(ROWS))
    assert want.isfinite().all()
    result = {rows: product(spec_of(problem.format, n, k, epilogue, rows), rows) for rows in ROWS}
    return {rows: int((out.view(torch.int32) != want[:rows].view(torch.int32)).sum()) for rows, out in result.items()}


def main() -> None:
    gpu_common.ROTATED_BYTES = 0  # One copy of a weight does.
    named = [a.split("=", 1)[1].split(",") for a in sys.argv[1:] if a.startswith("--formats=")]
    cases = list(itertools.product(named[0] if named else FORMATS | INTEGERS, SHAPES))
    every = {spec_of(f, n, k, e, m) for f, (n, k) in cases for e in EPILOGUES for m in (DECODE_TOKENS, *ROWS)}
    with ProcessPoolExecutor(15, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, every))
    results: dict[str, Any] = {**facts(), "rows": ROWS, "differ": []}
    for format, (n, k) in cases:
        problem = Problem(format, n, k, (FORMATS | INTEGERS)[format])
        for epilogue in EPILOGUES:
            row = {"format": format, "N": n, "K": k, "epilogue": epilogue, "differ": compare(problem, epilogue)}
            results["differ"].append(row)
            print(row, flush=True)
    for path in [a for a in sys.argv[1:] if not a.startswith("--")]:
        Path(path).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    wrong = [row for row in results["differ"] if any(row["differ"].values())]
    print(f"{len(results['differ'])} cases, {len(wrong)} with outputs that differ")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
