"""Kernels by the facts of their target: multiprocessors and shared memory (qcompile/targets.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qcompile.codegen.gpu.attention_splits import SplitLimits
from qcompile.codegen.gpu.gemm import tiles
from qcompile.codegen.gpu.gemm.render import kernel
from qcompile.codegen.gpu.gemm.spec import KernelSpec
from qcompile.codegen.gpu.gemm.tile import DECODE_TOKENS
from qcompile.codegen.gpu.kv_pages import GpuKV
from qcompile.targets import TARGETS
from tests.support.compiled import Record

GPUS = {name: target for name, target in TARGETS.items() if target.kind == "cuda"}


def test_each_gpu_states_its_facts() -> None:
    for gpu in GPUS.values():
        facts = (gpu.capability, gpu.multiprocessors, gpu.shared_bytes, gpu.memory_gb_s, gpu.int8_tops)
        assert all(fact > 0 for fact in (*facts, gpu.bf16_tflops, gpu.f32_tflops)), gpu.name
    assert {gpu.multiprocessors for gpu in GPUS.values()} == {108, 132, 142, 148}


@pytest.mark.parametrize(
    ("n", "k", "split_k"),
    [
        (8192, 8192, {"a100": 1, "h200": 2, "l40s": 2, "b200": 2}),  # 128 programs without split_k
        (9216, 3072, {"a100": 1, "h200": 1, "l40s": 1, "b200": 2}),  # 144 programs
    ],
)
def test_k_is_split_where_multiprocessors_would_be_idle(n: int, k: int, split_k: dict[str, int]) -> None:
    for name, parts in split_k.items():
        assert tiles.choose("bf16", n, k, DECODE_TOKENS, GPUS[name]).split_k == parts, name


def test_small_gemvs_take_more_warps_where_multiprocessors_would_have_few() -> None:
    stages = {name: tiles.choose("qoq_channel", 2048, 2048, 1, GPUS[name]).stages for name in ("a100", "b200")}
    assert stages == {"a100": 1, "b200": 4}


def test_gpus_of_as_many_multiprocessors_have_the_same_tiles() -> None:
    for format in ("bf16", "qoq_channel", "mxfp4"):
        for most in tiles.token_classes(format):
            rows = most or tiles.LARGE_M
            h100, h200 = (
                tiles.choose_batch_invariant(format, 8192, 8192, rows, GPUS[name]) for name in ("h100", "h200")
            )
            assert h100 == h200


def test_decode_attention_is_divided_by_multiprocessors() -> None:
    kv = GpuKV("kv4", 8, 128)
    limits = {name: SplitLimits(kv, gpu.multiprocessors) for name, gpu in GPUS.items()}
    assert {name: each.shares for name, each in limits.items()} == {
        **{"a100": 108, "l40s": 142, "h100": 132, "h200": 132, "b200": 148}
    }
    assert limits["a100"].fine_splits < limits["h200"].fine_splits == 48 < limits["b200"].fine_splits
    hierarchical = replace(kv, format="kv_hier")
    assert SplitLimits(hierarchical, 132).few_splits == 12 and SplitLimits(hierarchical, 148).few_splits == 13


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("format", ["bf16", "qoq_g128", "mix_4_8"])
def test_kernels_for_many_rows_fit_shared_memory(format: str, target: str, compiled: Record) -> None:
    """Those take the most of it. test_split_k.py checks the estimate for all formats, shapes and classes of M."""
    gpu = GPUS[target]
    widths = {"width": 4000, "wide": 448} if format == "mix_4_8" else {}
    for rows in (64, tiles.LARGE_M):
        tile = tiles.choose_batch_invariant(format, 4096, 4096, rows, gpu)
        spec = KernelSpec(format, 4096, 4096, tile, multiprocessors=gpu.multiprocessors, **widths)  # type: ignore[arg-type]
        assert compiled(kernel(spec), gpu.capability).shared_bytes <= gpu.shared_bytes, tile


@pytest.mark.parametrize("target", GPUS)
def test_tiles_of_experts_fit_shared_memory(target: str) -> None:
    gpu = GPUS[target]
    for format in ("bf16", "qoq_g128", "w4_asym_g128", "mxfp4_a8"):
        for n, k, slots in ((5760, 3072, 16), (1536, 2048, 64), (2048, 768, 64)):
            tile = tiles.choose_for_experts(format, n, k, slots, gpu)
            step = KernelSpec(format, n, k, tile).step_bytes
            assert tile.stages * step <= gpu.shared_bytes, tile
