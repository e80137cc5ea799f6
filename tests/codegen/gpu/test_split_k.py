"""Parts of K that are summed separately, where they do not divide K."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import replace
from typing import Any

import pytest
import torch

from qcompile.codegen.gpu.gemm import tiles
from qcompile.codegen.gpu.gemm.pack import pack_gpu, unpack_gpu
from qcompile.codegen.gpu.gemm.render import arguments_of, kernel, name_of, render
from qcompile.codegen.gpu.gemm.spec import KernelSpec, reference
from qcompile.codegen.gpu.gemm.tile import Tile
from qcompile.errors import UnsupportedError
from qcompile.formats.activations import activation_format
from qcompile.formats.registry import gpu_packing, weight_format
from qcompile.targets import TARGETS, TUNED_ON
from tests.codegen.gpu.test_gemm import IN_GROUPS, number_format, packing_of, weight
from tests.support.cases import first
from tests.support.compiled import Record
from tests.support.interpreted import interpreted

N, ROWS = 32, 4
INTEGERS = ("qoq_channel", "qoq_g128", "w8_sym_channel")
FLOATS = ("w4_asym_g128_int8", "nested_8_4", "mxfp4_a8", "w4_asym_g128", "mxfp4", "bf16")
SHAPES = ((4096, 11008), (3584, 18944), (1536, 8960), (896, 4864), (5120, 2880), (5120, 13824), (2304, 2048))
"""Of models that people use."""


def guarded(part: torch.Tensor) -> torch.Tensor:
    """A copy that lies right before a page that nobody may read: whoever reads on ends the interpreter's process."""
    size = part.numel() * part.element_size()
    before = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, before + mmap.PAGESIZE)
    place = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + before
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(place), mmap.PAGESIZE, 0) == 0
    result = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=before - size)
    return result.view(part.dtype).view(part.shape).copy_(part)


def made(spec: KernelSpec, packed: dict[str, torch.Tensor], x: list[torch.Tensor]) -> torch.Tensor:
    """What the kernel makes of rows of x, launched twice: the second finds the workspace as the first left it."""
    from qcompile.codegen.gpu.gemm.render import load

    given: dict[str, Any] = {**packed, **dict(zip(("x", "x_scale", "x_sum"), x, strict=False)), "M": len(x[0])}
    given |= {name: torch.zeros(items, dtype=dtype) for name, (items, dtype) in spec.workspace(len(x[0])).items()}
    if spec.gemv:
        given |= {name: given[name].view(torch.int32) for name in ("x", "w", "low") if name in given}
    given |= {name: guarded(part) for name, part in given.items() if isinstance(part, torch.Tensor)}
    for _ in range(2):
        given["out"] = torch.full((len(x[0]), spec.n), float("nan"))
        load(spec)[spec.grid(len(x[0]))](*(given[a.name] for a in arguments_of(spec)))
    return given["out"]


def interpret_integers(*formats: str) -> None:
    """Sums of integers: the same bits in any steps and parts."""
    torch.manual_seed(0)
    k = 1280  # ten blocks
    for format in formats:
        packed = pack_gpu(weight_format(format).quantize(weight(N, k)), format)
        x = activation_format("int8").quantize(torch.randn(ROWS, k), 0)
        gemv = [Tile(1, 8, unroll=4, warps=1, stages=stages) for stages in (1, 2, 3, 4)]
        gemv += [Tile(3, 32, unroll=8, stages=2), Tile(1, 16, unroll=16, stages=1)]
        cuts = [Tile(16, 32, unroll=2), Tile(16, 32, unroll=2, split_k=2), Tile(16, 32, unroll=2, split_k=3), *gemv]
        result = [made(KernelSpec(format, N, k, cut, inline_asm=False, out="f32"), packed, x) for cut in cuts]
        want = reference(x, weight_format(format).dequantize(unpack_gpu(packed, format), k))
        assert (result[0] - want).norm() / want.norm() < 1e-5
        assert all(torch.equal(result[0], each) for each in result[1:]), format


def interpret_floats(*formats: str) -> None:
    """Float accumulators: GEMV kernels give the bits of the other kernels with as many parts."""
    torch.manual_seed(0)
    every = [(name, far) for name in formats for far in (False, True) if not far or name == "mxfp4_a8"]
    for format, far in every:
        packing = packing_of(format)
        k = 1408 if format in IN_GROUPS and format != "w4_asym_g128_a8" else 1280
        w = weight(N, k)
        w[7, k - 5] = 900 if far else 0  # of mxfp4 another loop takes these rows
        packed = pack_gpu(weight_format(number_format(packing)).quantize(w), packing)
        dense = weight_format(number_format(packing)).dequantize(unpack_gpu(packed, packing), k)
        for x_groups, count in ((False, 3), (False, 4), (True, 2)) if format in IN_GROUPS else ((False, 2), (False, 3)):
            cuts = [Tile(16, 32, split_k=count)]
            if format != "mxfp4_a8":
                cuts += [Tile(16, 32, serial_k=count), Tile(32, 32, serial_k=count)]
            if format in IN_GROUPS and count in (2, 4):  # a power of two side by side
                cuts += [Tile(1, 32, sliced_k=count, warps=1, stages=stages) for stages in (2, 8)]
                cuts.append(Tile(3, 8, sliced_k=count, warps=1, stages=3))
            specs = [KernelSpec(format, N, k, cut, inline_asm=False, out="f32", x_groups=x_groups) for cut in cuts]
            kind = "bf16" if specs[0].layout.float_x else "int8_g128" if x_groups else "int8"
            x = activation_format(kind).quantize(torch.randn(ROWS, k), 0)
            assert all(spec.k_parts.longer for spec in specs) or format == "bf16", specs
            result = [made(spec, packed, x) for spec in specs]
            want = reference(x, dense)
            # bf16 weights and activations are multiplied exactly; sums are float32.
            assert (result[0] - want).norm() / want.norm() < 1e-5, (format, count)
            assert all(torch.equal(result[0], each) for each in result[1:]), (format, far, x_groups, count)


@pytest.mark.parametrize("format", first(("qoq_g128", "nested_8_4", "mxfp4"), (*INTEGERS, *FLOATS)))
def test_numerics_in_the_interpreter(format: str) -> None:
    interpreted(__name__, f"interpret_{'integers' if format in INTEGERS else 'floats'}({format!r})")


@pytest.mark.parametrize(
    "spec",
    [
        KernelSpec(
            "qoq_g128", 4096, 11008, Tile(16, 64, split_k=4, unroll=2, stages=4, prefetch_bytes=128, unpack_k=128)
        ),
        KernelSpec(
            "mxfp4_a8", 512, 2944, Tile(16, 64, split_k=4, stages=4, prefetch_bytes=128, unpack_k=128), x_groups=True
        ),
        KernelSpec("w4_asym_g128", 512, 11008, Tile(16, 64, split_k=4, stages=3, prefetch_bytes=128, unpack_k=128)),
        KernelSpec("w4_asym_g128", 512, 2304, Tile(128, 128, split_k=4, warps=8, stages=1, unpack_k=32)),
        KernelSpec("mxfp4", 512, 2816, Tile(256, 128, split_k=4, warps=8, unroll=2, stages=1, unpack_k=16)),
        KernelSpec(
            "w4_asym_g128", 512, 11008, Tile(128, 128, serial_k=4, warps=8, stages=2, prefetch_bytes=128, unpack_k=128)
        ),
        KernelSpec("mxfp4_a8", 512, 2944, Tile(64, 128, serial_k=4, warps=8, stages=6, unpack_k=128), x_groups=True),
        KernelSpec(
            "nested_8_4", 4096, 2944, Tile(1, 8, sliced_k=4, warps=2, stages=7, prefetch_bytes=128), x_groups=True
        ),
    ],
    ids=name_of,
)
def test_kernels_of_parts_that_differ_compile(spec: KernelSpec, compiled: Record) -> None:
    assert spec.k_parts.longer
    if spec.tile.unpack_k in (16, 32):  # no interpreter takes these
        source = render(replace(spec, out="f32"))
        assert f"start = pk * BLOCKS + tl.minimum(pk, {spec.k_parts.longer})" in source
        assert "range(part_blocks" in source and "< part_blocks" in source and "< BLOCKS" not in source
    assert compiled(kernel(replace(spec, out="f32")), 90).spill_bytes == 0


def test_a_single_row_of_a_small_or_an_odd_weight_has_a_kernel_of_its_own() -> None:
    for format in INTEGERS:
        for n, k in (*SHAPES, (151936, 1024), (151936, 896), (256, 256)):
            if format != "qoq_g128" or k % 256 == 0:
                tile = tiles.choose_batch_invariant(format, n, gpu_packing(format).padded_inputs(k), 1)
                assert tile.tokens == 1 and n // tile.rows * tile.warps >= min(
                    n // 8 * 4, 8 * TUNED_ON.multiprocessors
                ), (
                    n,
                    k,
                    tile,
                )


def test_large_m_uses_serial_k_where_there_are_programs_enough() -> None:
    for format in ("w4_asym_g128", "nested_8_4", "mix_4_8", "bf16"):
        cuts = {rows: tiles.choose_batch_invariant(format, 4096, 4096, rows) for rows in (16, 64, 256, 512)}
        few = 4 if format == "bf16" else 1  # 64 rows take 128 programs of 32 rows
        assert [cuts[rows].serial_k for rows in (16, 64, 256, 512)] == [1, few, 4, 4], format
        assert cuts[16].split_k == 4 and cuts[64].split_k == 4 // few and cuts[256].split_k == cuts[512].split_k == 1
    # Parts of a large K are split where programs would be small.
    assert tiles.choose_batch_invariant("bf16", 4096, 14336, 64).split_k == 4
    assert tiles.choose_batch_invariant("qoq_g128", 4096, 4096, 512).serial_k == 1  # integers have no order
    assert tiles.choose_batch_invariant("w4_asym_g128", 4096, 4096, 512, TARGETS["a100"]).serial_k == 1
    for tile in (
        Tile(16, 32, serial_k=2, split_k=2),
        Tile(1, 8, serial_k=2),
        Tile(64, 64, serial_k=2, stages=1, unpack_k=32),
    ):
        with pytest.raises(UnsupportedError):
            KernelSpec("w4_asym_g128_int8", 512, 4096, tile)
    with pytest.raises(UnsupportedError, match="serial_k"):
        KernelSpec("qoq_channel", 512, 4096, Tile(64, 64, serial_k=2))


def test_copies_of_bf16_weights_overlap_where_there_are_programs_enough() -> None:
    """Of 256 rows, or 128 and then parts of K in turn, or of half as many if those last ones are halved."""
    cuts = {
        (n, k, rows): tiles.choose_batch_invariant("bf16", n, k, rows)
        for n, k in ((28672, 4096), (4096, 14336), (1536, 8960), (1024, 4096), (4160, 4096))
        for rows in (128, 256, 512)
    }
    sizes = {key: tile.tokens for key, tile in cuts.items() if tile.unpack_k == 64}
    large, small = {(28672, 4096, rows): 256 for rows in (256, 512)}, {(4096, 14336, rows): 128 for rows in (256, 512)}
    assert sizes == large | small
    assert cuts[28672, 4096, 512].persistent and not cuts[28672, 4096, 256].persistent
    assert cuts[4096, 14336, 512].serial_k == 4 and cuts[4096, 14336, 512].stages == 7
    for wrong in (
        {"unpack_k": 32},
        {"warps": 4},
        {"stages": 2},
        {"tokens": 256, "serial_k": 4},
        {"persistent": True, "prefetch_bytes": 128},
        {"tokens": 512},
    ):
        tile = replace(Tile(128, 128, warps=8, stages=4, unpack_k=64), **wrong)  # type: ignore[arg-type]
        with pytest.raises(UnsupportedError, match="bf16 has no kernel"):
            KernelSpec("bf16", 4096, 4096, tile)


def test_a_part_without_inputs_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="does not divide"):
        KernelSpec("qoq_channel", 64, 384, Tile(16, 32, split_k=4))
    with pytest.raises(UnsupportedError, match="does not divide"):
        KernelSpec("qoq_channel", 64, 640, Tile(16, 32, sliced_k=4))


@pytest.mark.parametrize(
    "format", ["qoq_g128", "qoq_channel", "w4_asym_g128", "w4_asym_g128_int8", "mxfp4_a8", "mxfp4"]
)
def test_weights_of_any_shape_have_programs_for_all_multiprocessors(format: str) -> None:
    """Or as many parts as are worth while; and floats the same parts for any number of rows."""
    for n, k in SHAPES:
        k = gpu_packing("mxfp4_int8" if format == "mxfp4_a8" else format).padded_inputs(k)
        specs = [
            KernelSpec(format, n, k, tiles.choose_batch_invariant(format, n, k, rows))
            for rows in (1, 16, 64, 300, 2048)
        ]
        decode = specs[1]
        most = tiles.MAX_SPLIT_K[not decode.float_sum]
        programs = n // decode.tile.rows * decode.tile.split_k
        few = decode.parts >= most and decode.tile.rows == 64
        assert programs >= TUNED_ON.multiprocessors or few or k < 2 * decode.parts * tiles.MIN_SPLIT_INPUTS, decode
        if decode.float_sum:
            assert len({spec.k_parts.starts for spec in specs}) == 1, specs


EVERY = (*FLOATS, "w4_asym_g128_a8", "mix_4_8", *INTEGERS)
SMALL = ((64, 768), (96, 1280), (4160, 2560), (320, 5376))


@pytest.mark.parametrize("target", ["a100", "l40s", "h200", "b200"])
@pytest.mark.parametrize("format", EVERY)
def test_cuts_fit_the_gpu_and_begin_where_others_do(format: str, target: str) -> None:
    """All of a weight's, by class of M: a row's bits are by where parts of the inputs begin."""
    gpu = TARGETS[target]
    for n, k in (*SHAPES, *SMALL):
        k = gpu_packing(packing_of(format)).padded_inputs(k)
        if format == "mix_4_8" and n % 64:
            continue
        specs = [
            KernelSpec(format, n, k, tiles.choose_batch_invariant(format, n, k, most or tiles.LARGE_M, gpu), width=n)
            for most in tiles.token_classes(format)
        ]
        assert format in INTEGERS or len({spec.k_parts.starts for spec in specs}) == 1, (n, k)
        for spec in specs:
            tile = spec.tile
            assert tile.stages * spec.step_bytes <= gpu.shared_bytes, (n, k, tile)
            if gpu.capability != 90:
                assert (tile.unpack_k, tile.serial_k, tile.fused_planes) == (0, 1, False)
            if gpu.capability < 90:
                assert tile.prefetch_bytes == 0
