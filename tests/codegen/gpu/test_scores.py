"""Attention by GPU kernels with changed scores: sinks, which count in sums alone, and biases by position."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qcompile.codegen.gpu.attention import AttentionSpec
from qcompile.codegen.gpu.attention_splits import SplitLimits
from qcompile.codegen.gpu.attention_variants import for_queries
from qcompile.codegen.gpu.compile import triton_version
from qcompile.codegen.gpu.gemm import tiles
from qcompile.codegen.gpu.kv_pages import GpuKV
from qcompile.codegen.gpu.plan import make_plan
from qcompile.targets import TARGETS
from tests.codegen.gpu.test_attention import CENTERED, interpret_hierarchical
from tests.codegen.gpu.test_step import RECIPES, SHAPE, lowered
from tests.support.compiled import Record
from tests.support.graphs import step_inputs
from tests.support.interpreted import interpreted
from tests.support.tiny import Chunk

assert CENTERED and interpret_hierarchical  # called by the process that interprets

BOTH = {"sinks": True, "key_bias": True}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "kv16": ("bf16", {"heads": 2, "kv_heads": 2, "head_dim": 48, "hidden": 64, "ffn": 64, **BOTH}),
    "kv8": ("w8a8", {"heads": 3, "kv_heads": 1, "softcap": 2.0, "key_bias": True}),
    "kv4": ("qserve", {"window": 70, **BOTH}),
}


def interpret_scores(format: str) -> None:
    """Rows of a long step, of decode steps in any cut, and alone: as the reference, with the same bits."""
    from tests.support.gpu_interpreter import Interpreter

    recipe, more = WAYS[format]
    graph, program, blobs = lowered(recipe, passes={"cache.format": format}, **more)
    length, last = 149, 6
    ids = torch.randint(0, SHAPE["vocab"], (1, length), generator=torch.Generator().manual_seed(2))
    inputs = step_inputs(ids, None, graph)
    want, pages = graph.run(*inputs)[0][-last:], inputs[3].tolist()[0]
    machine = Interpreter(program, make_plan(program, TARGETS["h200"], split=64, inline_asm=False), blobs, rows=192)
    other = Chunk(ids[0, :5].tolist(), 0, [len(pages)])

    def newest(first: int, *others: Chunk) -> torch.Tensor:
        machine.forget()
        chunk = Chunk(ids[0, first:].tolist(), first, pages)
        rows = sum(len(each.tokens) for each in others) + length - first
        return machine.step([*others, chunk], range(rows - min(last, length - first), rows))[0]

    machine.fill([Chunk(ids[0, :121].tolist(), 0, pages)])
    long = newest(121, other)
    assert torch.equal(newest(length - last), long)
    for machine.fine, machine.shares in ((100, 1), (0, 1)):
        assert torch.equal(newest(length - last, other), long)
    assert torch.equal(newest(length - 1), long[-1:])
    error = ((long.double() - want).norm() / want.norm()).item()
    assert error < RECIPES[recipe], error


@pytest.mark.parametrize("format", WAYS)
def test_sinks_and_biases_by_position_interpreted(format: str) -> None:
    interpreted(__name__, f"interpret_scores({format!r})")


def test_both_over_a_hierarchical_cache_interpreted() -> None:
    """Keys are less their mean besides, which is seen against sinks."""
    interpreted(__name__, "interpret_hierarchical('kv_hier4', **{**CENTERED, **BOTH, 'softcap': 0.0, 'rotary': False})")


def test_only_what_ends_sums_reads_sinks() -> None:
    """Whatever takes the place of a sum does not have them yet, or they would weigh several times."""
    plain, plan = (make_plan(lowered("bf16", **more)[1], TARGETS["h200"]) for more in ({}, {"sinks": True}))
    readers = {v.kernel for launch in plan.launches for v in launch.variants if _reads(plan, v.kernel, "sinks")}
    assert {kernel.rsplit("-", 1)[0].split("_", 1)[0] for kernel in readers} == {"attention", "merge"}
    assert all("whole" in kernel if kernel.startswith("attention") else "part" not in kernel for kernel in readers)
    same = set(plain.kernels) & set(plan.kernels)
    assert same == set(plain.kernels) - {kernel for kernel in plain.kernels if _ends(kernel)}


def _reads(plan: Any, kernel: str, name: str) -> bool:
    return any(argument.name == name for argument in plan.kernels[kernel].arguments)


def _ends(kernel: str) -> bool:
    return "_whole" in kernel or ("merge" in kernel and "part" not in kernel)


@pytest.mark.parametrize("format", ["kv4", "kv16", "kv_hier"])
def test_decode_kernels_with_both_compile_without_spills(format: str, compiled: Record) -> None:
    kv = GpuKV(format, 32, 128)  # heads of their own, as those of models with linear biases
    base = AttentionSpec(kv, 32, 4096, 0.1, split=tiles.split_positions(kv), bias_positions=2048, sinks=True)
    most = 0 if triton_version().startswith("3.6.") else 256
    for work, spec in tiles.decode_attention(base, SplitLimits(kv, TARGETS["h200"].multiprocessors)).items():
        assert compiled(for_queries(spec, 1).kernel(90), 90).spill_bytes <= most, work
