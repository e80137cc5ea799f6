"""GPU GEMM kernels without a GPU: packing, numerics in Triton's interpreter, ahead-of-time compilation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from benchmarks.gpu_common import launch
from qcompile.codegen.gpu.gemm import tiles
from qcompile.codegen.gpu.gemm.pack import GPU_PACKING, pack_gpu, unpack_gpu
from qcompile.codegen.gpu.gemm.render import arguments_of, kernel, name_of, render
from qcompile.codegen.gpu.gemm.spec import KernelSpec, reference
from qcompile.codegen.gpu.gemm.tile import DECODE_TOKENS, WS_MIN_TOKENS, Tile
from qcompile.errors import UnsupportedError
from qcompile.formats.activations import activation_format
from qcompile.formats.mixed import MIX_4_8
from qcompile.formats.registry import GPU_KERNELS, format_of_packing, gpu_kernel, weight_format
from qcompile.targets import TARGETS, TUNED_ON
from tests.support.compiled import Record
from tests.support.interpreted import interpreted, needs_triton

_KERNELS = [kernel for kernel in GPU_KERNELS.values() if not kernel.mixed]
FORMATS = tuple(kernel.name for kernel in _KERNELS if kernel.name == kernel.packing.name)
"""Packings that have kernels of their name."""
PACKINGS = tuple(dict.fromkeys(kernel.packing.name for kernel in _KERNELS))
WITH_INT8 = tuple(kernel.name for kernel in _KERNELS if kernel.name != kernel.packing.name)
"""Kernels that read with int8 activations what is packed for bf16 ones, or with more to it."""
IN_GROUPS = tuple(kernel.name for kernel in GPU_KERNELS.values() if kernel.float_sum and not kernel.float_x)
"""Kernels that take activations in groups of 128."""
BF16_UNPACK_FORMATS = tuple(kernel.name for kernel in _KERNELS if kernel.by_plane)
INTERPRETED = (Tile(16, 32, sliced_k=2, split_k=2), Tile(32, 32), Tile(16, 32, fused_planes=False))


def number_format(packing: str) -> str:
    return format_of_packing(packing).name


def packing_of(format: str) -> str:
    """What kernels of a format read."""
    return gpu_kernel(format).packing.name


def weight(n: int, k: int) -> torch.Tensor:
    """Random rows off centre, so that zero points matter."""
    return torch.randn(n, k) * 0.02 + 0.01 * torch.rand(n, 1)


def test_shapes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="multiple of 32 outputs"):
        KernelSpec("qoq_channel", 48, 512, Tile(16, 32))
    with pytest.raises(UnsupportedError, match="does not divide"):
        KernelSpec("qoq_channel", 64, 512, Tile(16, 32, sliced_k=8))
    with pytest.raises(UnsupportedError, match="no GPU packing"):
        KernelSpec("f32", 64, 512, Tile(16, 32))
    with pytest.raises(UnsupportedError, match="does not divide"):
        KernelSpec("qoq_channel", 64, 512, Tile(1, 64))
    with pytest.raises(UnsupportedError, match="in groups of 128"):
        KernelSpec("qoq_g128", 64, 512, Tile(16, 32, unroll=2), x_groups=True)


def interpret() -> None:
    """Every format and kind of tile against the reference; run in a process that has TRITON_INTERPRET set."""
    torch.manual_seed(0)
    for format, far in [*((format, False) for format in (*FORMATS, *WITH_INT8)), ("mxfp4_a8", True)]:
        packing = packing_of(format)
        w = weight(32, 1024)
        w[7, 5] = 900 if far else 0  # of mxfp4 another loop takes these rows
        parts = weight_format(number_format(packing)).quantize(w)
        packed = pack_gpu(parts, packing)
        dense = weight_format(number_format(packing)).dequantize(unpack_gpu(packed, packing), 1024)
        for cut in INTERPRETED:
            tile = replace(cut, unroll=2 if format == "qoq_g128" else 1)
            spec = KernelSpec(format, 32, 1024, tile, True, True, False)
            spec = replace(spec, out="f32") if cut.tokens == 32 else replace(spec, width=29, biased=26)
            interpret_one(spec, "bf16" if spec.layout.float_x else "int8", packed, dense)
            if format in IN_GROUPS:
                interpret_one(replace(spec, x_groups=True), "int8_g128", packed, dense)


def interpret_one(spec: KernelSpec, activation: str, packed: dict[str, torch.Tensor], dense: torch.Tensor) -> None:
    """Two launches of a kernel against the reference, for 21 rows."""
    from qcompile.codegen.gpu.gemm.render import load

    x = activation_format(activation).quantize(torch.randn(21, spec.k), 0)
    width, dtype = spec.width or spec.n, {"f32": torch.float32, "bf16": torch.bfloat16}[spec.out]
    biased = spec.biased or width
    bias, residual = torch.randn(biased), torch.randn(21, width).to(dtype)
    # What a kernel reads after the bias shows in the result.
    given = {**packed, "bias": torch.cat([bias, torch.full((32,), math.nan)]), "residual": residual}
    given |= dict(zip(("x", "x_scale", "x_sum"), x, strict=False))
    given |= {name: torch.zeros(items, dtype=dtype) for name, (items, dtype) in spec.workspace(21).items()}
    for _ in range(2):  # the second launch finds the workspace as the first left it
        given["out"] = torch.full((21, width), float("nan"), dtype=dtype)
        load(spec)[spec.grid(21)](*(21 if a.name == "M" else given[a.name] for a in arguments_of(spec)))
        want = reference(x, dense[:width], torch.nn.functional.pad(bias, (0, width - biased)), residual)
        error = (given["out"].double() - want).norm() / want.norm()
        assert error < 5e-3, (spec, error)


def interpret_mix() -> None:
    """Rows of 8 and of 4 bits, of 8 alone and of 4 alone, to their columns; per token and in groups."""
    for fraction in (0.3, 1.0, 0.0):
        wide = torch.rand(80) < fraction
        parts = MIX_4_8.quantize_rows(weight(80, 1024), wide)
        result = GPU_PACKING.mixed(wide, False, 1024)
        types = {"groups": torch.int32, "columns": torch.int32}
        packed = {role: blob.view(types.get(role, torch.int8)) for role, blob in result.blobs(parts).items()}
        dense = weight_format("mix_4_8").dequantize(parts, 1024)
        for cut in INTERPRETED:
            spec = KernelSpec("mix_4_8", 16 * result.blocks, 1024, cut, True, True, False, width=80, wide=result.wide)
            interpret_one(spec, "int8", packed, dense)
            interpret_one(replace(spec, x_groups=True), "int8_g128", packed, dense)


@pytest.mark.parametrize("format", [*IN_GROUPS, "w4_asym_g128", "mxfp4", "bf16"])
@pytest.mark.parametrize("shape", [(4096, 4096), (6144, 4096), (4096, 14336), (96, 512), (28672, 4096)])
def test_floats_are_summed_in_one_order_for_any_number_of_rows(format: str, shape: tuple[int, int]) -> None:
    cuts = [tiles.choose_batch_invariant(format, *shape, tokens) for tokens in (1, 8, 9, 16, 17, 64, 65, 300, 512)]
    many = [cut for cut in cuts if not cut.gemv]
    gemv = cuts[: len(cuts) - len(many)]  # groups are whole there, and their floats summed side by side
    assert {cut.sliced_k for cut in many} == {1} and {cut.split_k for cut in gemv} <= {1}
    assert len({cut.sliced_k * cut.split_k * cut.serial_k for cut in cuts}) == 1
    assert len({cut.rows % 64 for cut in many}) == 1  # one kind of tensor core instruction
    # Of many inputs a single row is faster with the tensor cores, where programs share them.
    assert (len(gemv) == 1) == (format in ("nested_8_4", "w4_asym_g128_int8", "mxfp4_a8") and shape[1] < 14336)


def interpret_orders() -> None:
    """A row's bits where sums of groups are exact and their float sum is not, by kernels for few rows and for many."""
    from qcompile.codegen.gpu.gemm.render import load

    torch.manual_seed(0)
    n, k = 64, 1024
    for format, far in (("nested_8_4", False), ("w4_asym_g128_a8", False), ("mxfp4_a8", False), ("mxfp4_a8", True)):
        packing = packing_of(format)
        w = weight(n, k)
        w[7, 5] = 900 if far else 0
        packed = pack_gpu(weight_format(number_format(packing)).quantize(w), packing)
        x = activation_format("int8").quantize(torch.randn(17, k), 0)
        result = []
        for cut in (Tile(16, 64, split_k=2), Tile(32, 64, split_k=2), Tile(64, 64, split_k=2, unroll=2)):
            spec = KernelSpec(format, n, k, cut, inline_asm=False, out="f32")
            given = {**packed, **dict(zip(("x", "x_scale"), x, strict=False)), "out": torch.empty(17, n), "M": 17}
            given |= {name: torch.zeros(items, dtype=dtype) for name, (items, dtype) in spec.workspace(17).items()}
            load(spec)[spec.grid(17)](*(given[a.name] for a in arguments_of(spec)))
            result.append(given["out"])
        assert torch.equal(result[0], result[1]) and torch.equal(result[0], result[2])


def test_numerics_in_the_interpreter() -> None:
    interpreted(__name__, "interpret()", "interpret_mix()", "interpret_orders()")


@pytest.mark.parametrize("capability", [80, 89, 90, 100])
@pytest.mark.parametrize("format", [*FORMATS, *WITH_INT8, "mix_4_8"])
def test_compiles_ahead_of_time(format: str, capability: int, compiled: Record) -> None:
    ahead = 4096 if capability >= 90 and format != "mix_4_8" else 0
    unroll = 2 if format == "qoq_g128" else 1
    tile = Tile(16, 64, split_k=4, unroll=unroll, stages=3, prefetch_bytes=ahead, fused_planes=capability == 90)
    two_widths = {"width": 4000, "wide": 448} if format == "mix_4_8" else {}
    spec = KernelSpec(format, 4096, 4096, tile, bias=True, x_groups=format in IN_GROUPS, **two_widths)
    built = compiled(kernel(spec), capability)
    assert built.spill_bytes == 0
    kind = "bf16" if spec.layout.float_x else "s8"
    if capability == 100:
        synchronous = any("mma.sync" in name for name in built.matrix)
        kind = kind if synchronous else "kind::" + ("f16" if spec.layout.float_x else "i8")
    assert any(kind in name for name in built.matrix), built.matrix
    if capability == 90:
        assert any(name.startswith("wgmma") for name in built.matrix)


OVERLAPPED_PERSISTENT = Tile(256, 128, 1, 1, 1, 8, 1, unpack_k=16, persistent=True)
IN_TURN = Tile(128, 128, warps=8, stages=1, unpack_k=32, serial_k=4)
COPIED = Tile(256, 128, warps=8, stages=4, unpack_k=64)
OVERLAPPED = (
    KernelSpec(
        "w4_asym_g128", 28672, 4096, Tile(256, 128, 1, 1, 1, 8, 1, unpack_k=16), gated="silu", width=14336, bias=True
    ),
    KernelSpec("w4_asym_g128", 4096, 4096, Tile(64, 64, 1, 4, 2, 4, 1, unpack_k=32), residual=True, out="f32"),
    KernelSpec("mxfp4", 4096, 4096, Tile(128, 128, 1, 2, 2, 8, 1, unpack_k=32), bias=True, width=4000),
    KernelSpec("w4_asym_g128", 4096, 4096, Tile(16, 64, 1, 4, 2, 4, 1, 128, unpack_k=32), residual=True, out="f32"),
    KernelSpec("w4_asym_g128", 14336, 4096, Tile(128, 64, 1, 1, 1, 4, 1, unpack_k=32)),
    KernelSpec("w4_asym_g128", 5120, 5120, Tile(64, 64, 1, 4, 1, 4, 1, unpack_k=32), bias=True),
    KernelSpec("w4_asym_g128", 28672, 4096, OVERLAPPED_PERSISTENT, gated="silu", width=14336),
    KernelSpec("mxfp4", 14336, 4096, replace(OVERLAPPED_PERSISTENT, unroll=2), residual=True, bias=True),
    KernelSpec("w4_asym_g128", 6144, 4096, replace(IN_TURN, unroll=2, unpack_k=16, persistent=True), bias=True),
    KernelSpec(
        "w4_asym_g128", 4096, 11008, replace(IN_TURN, unpack_k=16, prefetch_bytes=128), residual=True, out="f32"
    ),
    KernelSpec("mxfp4", 4096, 14336, replace(IN_TURN, unroll=4, prefetch_bytes=128), residual=True, out="f32"),
    KernelSpec("bf16", 28672, 4096, replace(COPIED, persistent=True), gated="silu", width=14336, out="f32"),
    KernelSpec("bf16", 4096, 11008, replace(COPIED, prefetch_bytes=128, split_k=4), width=4090),
    KernelSpec("bf16", 6144, 4096, replace(COPIED, tokens=128, serial_k=2, stages=7), bias=True),
    KernelSpec(
        "bf16",
        4096,
        11008,
        replace(COPIED, tokens=128, serial_k=4, stages=7, persistent=True),
        residual=True,
        out="f32",
    ),
)
"""Kernels that unpack or copy weights while the tensor cores work."""
PERSISTENT = Tile(128, 128, 1, 1, 1, 8, 6, unpack_k=128, persistent=True)
WARP_SPECIALIZED = (
    KernelSpec(
        "nested_8_4", 28672, 4096, Tile(128, 128, 1, 1, 1, 8, 4, unpack_k=128), gated="silu", width=14336, bias=True
    ),
    KernelSpec(
        "w4_asym_g128_int8",
        4096,
        4096,
        Tile(64, 128, 1, 4, 1, 8, 6, unpack_k=128),
        True,
        True,
        out="f32",
        x_groups=True,
    ),
    KernelSpec(
        "mix_4_8", 4160, 4096, Tile(128, 64, 1, 2, 1, 4, 4, unpack_k=128), True, width=4096, wide=448, x_groups=True
    ),
    KernelSpec(
        "mix_4_8", 4160, 4096, Tile(16, 64, 1, 4, 1, 4, 4, 128, unpack_k=128), True, width=4096, wide=448, x_groups=True
    ),
    KernelSpec("mix_4_8", 4160, 4096, Tile(128, 128, 1, 1, 1, 8, 6, unpack_k=128), width=4096, wide=448, x_groups=True),
    KernelSpec(
        "mix_4_8", 4096, 4096, Tile(128, 128, 1, 2, 1, 8, 4, unpack_k=128, token_halves=True), width=4090, wide=4096
    ),
    KernelSpec("mxfp4_a8", 4096, 4096, Tile(16, 64, 1, 4, 1, 4, 4, 128, unpack_k=128), bias=True, x_groups=True),
    KernelSpec(
        "mxfp4_a8", 4096, 4096, Tile(128, 64, 1, 2, 1, 4, 4, unpack_k=128, token_halves=True), True, True, x_groups=True
    ),
    KernelSpec(
        "mxfp4_a8", 4096, 4096, Tile(128, 128, 1, 1, 1, 8, 6, unpack_k=128, token_halves=True), gated="silu", width=2000
    ),
    KernelSpec("mxfp4_a8", 28672, 4096, PERSISTENT, gated="silu", width=14336, x_groups=True),
    KernelSpec("w4_asym_g128_int8", 14336, 4096, PERSISTENT, residual=True, x_groups=True),
    KernelSpec("nested_8_4", 14336, 4096, replace(PERSISTENT, stages=5), bias=True, width=14000, x_groups=True),
    KernelSpec("mxfp4_a8", 4096, 2944, Tile(64, 128, 1, 1, 1, 8, 6, unpack_k=128, serial_k=4), True, x_groups=True),
    KernelSpec(
        "w4_asym_g128_int8",
        4096,
        3584,
        Tile(128, 128, 1, 1, 1, 8, 6, unpack_k=128, serial_k=4, token_halves=True),
        x_groups=True,
    ),
    KernelSpec(
        "w4_asym_g128", 4096, 11008, Tile(128, 128, 1, 1, 1, 8, 2, 128, unpack_k=128, serial_k=4), residual=True
    ),
    KernelSpec("qoq_g128", 4096, 11008, Tile(16, 64, 1, 8, 2, 4, 4, 128, unpack_k=128), residual=True, out="f32"),
    KernelSpec("qoq_channel", 4096, 4096, Tile(16, 64, 1, 4, 1, 4, 4, 128, unpack_k=128), True, True, out="f32"),
    KernelSpec(
        "qoq_g128", 28672, 4096, Tile(16, 64, 1, 1, 2, 4, 8, 128, unpack_k=128), gated="silu", width=14336, amax=True
    ),
    KernelSpec("qoq_g128", 4096, 14336, Tile(128, 128, 1, 2, 2, 8, 6, 128, unpack_k=128), residual=True, width=4000),
    KernelSpec("w8_sym_channel", 4096, 14336, Tile(64, 128, 1, 2, 1, 8, 5, 128, unpack_k=128), residual=True),
    KernelSpec("nested_8_4", 4096, 4096, Tile(16, 128, 1, 4, 1, 8, 4, 128, unpack_k=128), residual=True, x_groups=True),
    KernelSpec("w4_asym_g128", 28672, 4096, Tile(16, 64, 1, 1, 1, 4, 3, 128, unpack_k=128), gated="silu", width=14336),
    KernelSpec("w4_asym_g128", 4096, 14336, Tile(64, 128, 1, 4, 1, 8, 3, 128, unpack_k=128), residual=True, out="f32"),
    KernelSpec("w4_asym_g128", 4096, 11008, Tile(8, 64, 1, 4, 1, 4, 3, 128, unpack_k=128), residual=True, out="f32"),
    KernelSpec("mxfp4", 4096, 4096, Tile(16, 64, 1, 4, 1, 4, 3, 128, unpack_k=128), bias=True, width=4000),
    KernelSpec("mxfp4", 28672, 4096, Tile(8, 64, 1, 1, 1, 4, 4, 128, unpack_k=128), gated="silu", width=14336),
    KernelSpec("w4_asym_g128_a8", 4096, 4096, Tile(16, 64, 1, 4, 1, 4, 3, 128, unpack_k=128), residual=True),
    KernelSpec("w4_asym_g128_a8", 4096, 4096, Tile(64, 64, 1, 4, 1, 4, 2, unpack_k=128), bias=True, x_groups=True),
    KernelSpec("w4_asym_g128_a8", 4096, 4096, Tile(8, 64, 1, 4, 1, 4, 2, 128, unpack_k=128), bias=True, x_groups=True),
    KernelSpec(
        "w4_asym_g128_int8", 4096, 11008, Tile(8, 64, 1, 4, 1, 4, 6, 128, unpack_k=128), out="f32", x_groups=True
    ),
    KernelSpec(
        "qoq_g128", 28672, 4096, Tile(8, 64, 1, 1, 2, 4, 8, 128, unpack_k=128), gated="silu", width=14336, amax=True
    ),
    KernelSpec("qoq_g128", 4096, 14336, Tile(8, 64, 1, 8, 2, 4, 4, 128, unpack_k=128), residual=True, width=4000),
    KernelSpec("mix_4_8", 4160, 4096, Tile(8, 64, 1, 4, 1, 4, 4, 128, unpack_k=128), True, width=4096, wide=448),
    KernelSpec("mxfp4_a8", 4096, 4096, Tile(8, 64, 1, 4, 1, 4, 4, 128, unpack_k=128), bias=True, x_groups=True),
)
"""Warp-specialized kernels."""


@pytest.mark.parametrize("spec", OVERLAPPED, ids=lambda spec: f"{spec.format}-{spec.tile.unpack_k}")
def test_weights_stay_in_registers_until_the_tensor_cores_are_done_with_them(
    spec: KernelSpec, compiled: Record
) -> None:
    """The assembler does not see to it: no instruction may write what a product in flight still reads."""
    built = compiled(kernel(spec), 90)
    assert all("bf16" in name and name.startswith("wgmma") for name in built.matrix)
    # Halves of a last tile have sums of their own, beside which the assembler keeps room for those of whole ones.
    assert built.spill_bytes <= (88 if spec.persistent else 0)
    # Sums are stored as they lie: only a counter is stored to other warps.
    stores = {name: count for name, count in built.ptx.items() if name.startswith("st.shared")}
    assert sum(stores.values()) == (spec.tile.split_k > 1) and not any(".v" in name for name in stores)
    assert not built.overwritten
    order = built.order
    assert max(filter(None, order)) == (2 if spec.tile.unpack_k == 16 else 1)
    # The assembler makes warps wait for each product where it does not see through what goes on meanwhile.
    assert sum(pair == (None, 0) for pair in itertools.pairwise(order)) <= 3
    assert order.count(None) >= (8 if spec.format == "bf16" else 16)


@pytest.mark.parametrize("spec", WARP_SPECIALIZED, ids=lambda spec: f"{spec.format}-{spec.tile.tokens}")
def test_warp_specialized_kernels_compile(spec: KernelSpec, compiled: Record) -> None:
    built = compiled(kernel(spec), 90)
    programs = 1 if spec.tile.warps == 8 else 2  # of a multiprocessor
    assert built.threads == 32 * (spec.tile.warps + 4)
    assert built.registers * built.threads * programs <= 1 << 16 and built.shared_bytes * programs <= 226 * 1024
    # Mixed weights have two loops, and columns to scatter to; where programs last those of mxfp4_a8 are two, too.
    loops = spec.mixed or (spec.persistent and spec.format == "mxfp4_a8")
    # While a part is summed, the sum of the parts before it (64 numbers a thread) may wait in memory.
    assert built.spill_bytes <= (24 if loops else 4 * 64 if spec.tile.serial_k > 1 and spec.tile.tokens == 128 else 0)
    kind = "f32.bf16.bf16" if spec.layout.float_x else "s32.s8.s8"
    assert built.matrix and all(kind in name and name.startswith("wgmma") for name in built.matrix)
    waits = [count for name, count in built.ptx.items() if name.startswith("griddepcontrol")]
    assert sum(waits) == (2 if spec.pdl else 0)
    assert not built.overwritten and built.order.count(None) >= 4


@pytest.mark.parametrize("format", [name for name, kernel in GPU_KERNELS.items() if kernel.few_rows])
def test_up_to_eight_rows_have_kernels_of_their_own(format: str) -> None:
    """They sum in the same order, but for integers, in GEMV kernels and in those without unpack_k."""
    classes = tiles.token_classes(format)
    assert classes[classes.index(WS_MIN_TOKENS) + 1] == DECODE_TOKENS
    for n, k in ((4096, 4096), (6144, 4096), (3584, 18944), (512, 1280)):
        few, more = (tiles.choose_batch_invariant(format, n, k, most) for most in (WS_MIN_TOKENS, DECODE_TOKENS))
        assert few == (replace(more, tokens=WS_MIN_TOKENS) if more.unpack_k == 128 else more)
        for gpu in ("a100", "l40s", "b200"):  # elsewhere the class of 16 does both
            elsewhere = [
                tiles.choose_batch_invariant(format, n, k, most, TARGETS[gpu])
                for most in (WS_MIN_TOKENS, DECODE_TOKENS)
            ]
            assert elsewhere[0] == elsewhere[1]
    two_widths = {"width": 4000, "wide": 448} if format == "mix_4_8" else {}
    spec = KernelSpec(format, 4096, 4096, tiles.choose_batch_invariant(format, 4096, 4096, WS_MIN_TOKENS), **two_widths)
    decode = replace(spec, tile=replace(spec.tile, tokens=16))
    assert spec.tile.tokens == WS_MIN_TOKENS and name_of(spec) != name_of(decode) and not spec.gemv and spec.decode
    for each in (
        (spec, decode) if format in BF16_UNPACK_FORMATS else ()
    ):  # tokens and words of a block are copied at once
        loop = render(each).split("for group in range(")[1].split("mbarrier_arrive(full")[0]
        assert loop.count("async_load(xs.") == loop.count("async_load(gs.") == 1
    for wrong in ({"tokens": 4}, {"unpack_k": 32, "stages": 1}):
        with pytest.raises(UnsupportedError):
            replace(spec, tile=replace(spec.tile, **wrong))


@pytest.mark.parametrize("format", [*FORMATS, *WITH_INT8, "mix_4_8"])
def test_seventeen_rows_are_not_multiplied_as_sixty_four(format: str) -> None:
    classes = tiles.token_classes(format)
    assert classes[classes.index(DECODE_TOKENS) :][:3] == [DECODE_TOKENS, 32, 64]
    for n, k in ((4096, 4096), (28672, 4096), (3584, 18944), (512, 1280)):
        for tokens in (17, 32):
            assert tiles.choose_batch_invariant(format, n, k, tokens).tokens == 32
        assert tiles.choose_batch_invariant(format, n, k, 33) == tiles.choose_batch_invariant(format, n, k, 64)


def test_halves_are_multiplied_by_one_call_each() -> None:
    """Codes of all planes in one operand, but for exponents far apart, of which each has a sum of its own."""
    halves = Tile(128, 128, 1, 1, 1, 8, 6, unpack_k=128, token_halves=True)
    source = render(KernelSpec("mxfp4_a8", 4096, 4096, halves, x_groups=True))
    steady, far = (
        source.split("def consumer0")[1].split("power = tl.load(ranges")[1],
        source.split("tl.full((64,), 0x1111")[1],
    )
    assert steady.split("def consumer1")[0].count("warpgroup_mma(q0") == 2 and "concat_k(q0, q1)" in steady
    assert far.split("power = ")[0].count("warpgroup_mma(") == 8 and "concat_k(" not in far.split("power = ")[0]
    assert "concat_k(" not in render(
        KernelSpec("mxfp4_a8", 4096, 4096, replace(halves, token_halves=False), x_groups=True)
    )


def test_persistent_kernels_have_one_program_for_each_multiprocessor() -> None:
    spec = KernelSpec("w4_asym_g128_int8", 14336, 4096, PERSISTENT, x_groups=True)
    assert tiles.choose(spec.format, spec.n, spec.k, 1024) == spec.tile
    assert spec.grid(1024) == spec.grid(1) == (TUNED_ON.multiprocessors, 1, 1)
    assert f"for tile in range(tl.program_id(0), token_tiles * 112, {TUNED_ON.multiprocessors}):" in render(spec)
    # The interpreter takes a kernel that has a program for each tile.
    assert replace(spec, inline_asm=False).grid(1024) == (8, 112, 1)
    # Tiles with serial_k, and grids of few tiles, are not persistent.
    assert tiles.choose_batch_invariant(spec.format, 4096, 4096, 1024).serial_k == 4
    for n in (4096, 14400):
        assert not tiles.choose_batch_invariant(spec.format, n, 4096, 1024).persistent
    for wrong in ({"rows": 64, "warps": 4}, {"split_k": 2}, {"prefetch_bytes": 128}, {"unpack_k": 0}, {"tokens": 64}):
        with pytest.raises(UnsupportedError):
            replace(spec, tile=replace(PERSISTENT, **wrong))


def packed_for(spec: KernelSpec) -> dict[str, torch.Tensor]:
    """A random weight's parts on the GPU, by the kernel's arguments."""
    if not spec.mixed:
        w = weight(spec.n, spec.k).cuda()
        w[70, 5] = 900  # of mxfp4 another loop takes these rows
        parts = weight_format(number_format(spec.packing)).quantize(w)
        return {name: part.cuda() for name, part in pack_gpu(parts, packing_of(spec.format)).items()}
    wide = torch.arange(spec.width) % 10 == 0 if spec.wide < spec.n else torch.ones(spec.width, dtype=torch.bool)
    result = GPU_PACKING.mixed(wide, False, spec.k)
    assert (result.wide, 16 * result.blocks) == (spec.wide, spec.n)
    blobs = result.blobs(MIX_4_8.quantize_rows(weight(spec.width, spec.k), wide))
    types = {"groups": torch.int32, "columns": torch.int32}
    return {role: blob.view(types.get(role, torch.int8)).cuda() for role, blob in blobs.items()}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels that overlap unpacking have no interpreter")
@pytest.mark.parametrize(
    "spec", OVERLAPPED + WARP_SPECIALIZED, ids=lambda spec: f"{spec.format}-{spec.tile.unpack_k}-{spec.tile.tokens}"
)
def test_rows_have_the_bits_of_the_decode_class(spec: KernelSpec) -> None:
    needs_triton()
    torch.manual_seed(0)
    given = packed_for(spec)
    width, dtype = spec.width or spec.n, {"f32": torch.float32, "bf16": torch.bfloat16}[spec.out]
    given["bias"] = torch.randn(spec.n, device="cuda")
    given["amax"] = torch.full((300, max(spec.amax_parts, 1)), float("nan"), device="cuda")
    for tokens in (1, 5, 17, 300):
        x = torch.randn(tokens, spec.k, device="cuda")
        kind = "bf16" if spec.layout.float_x else "int8_g128" if spec.x_groups else "int8"
        given |= dict(zip(("x", "x_scale", "x_sum"), activation_format(kind).quantize(x, 0), strict=False))
        given["residual"], result = torch.randn(tokens, width, device="cuda").to(dtype), []
        unroll = spec.layout.min_unroll
        few = replace(spec, tile=Tile(16, 64, 1, spec.parts, unroll, 4, 3), amax=False)
        for each in (few, spec, spec):
            work = each.workspace(tokens).items()
            given |= {name: torch.zeros(items, dtype=kind, device="cuda") for name, (items, kind) in work}
            given["out"] = torch.full((tokens, width), float("nan"), dtype=dtype, device="cuda")
            launch(kernel(each), 90, each.grid(tokens), {**given, "M": tokens})()
            result.append(given["out"])
        assert not result[0].isnan().any() and torch.equal(result[0], result[1]) and torch.equal(result[0], result[2])
        if spec.amax:
            stored = result[0].float().abs().unflatten(1, (spec.amax_parts, -1)).amax(2)
            assert torch.equal(given["amax"][:tokens].to(dtype), stored.to(dtype))


@pytest.mark.parametrize("shape", [(192, 1152), (64, 128), (128, 384), (96, 512), (4160, 4096), (14336, 4096)])
def test_weights_of_any_shape_are_summed_in_as_many_parts_for_any_number_of_rows(shape: tuple[int, int]) -> None:
    cuts = [
        tiles.choose_batch_invariant("mxfp4_a8", *shape, tokens)
        for tokens in (1, 16, 17, 65, 129, 300, 600, tiles.LARGE_M)
    ]
    assert len({cut.sliced_k * cut.split_k * cut.serial_k for cut in cuts}) == 1


def test_other_targets_and_odd_weights_have_no_unpack_k() -> None:
    assert (
        tiles.choose("w4_asym_g128", 4096, 4096, 512).unpack_k
        and not tiles.choose("w4_asym_g128", 4096, 4096, 512, TARGETS["a100"]).unpack_k
    )
    whole, odd = (tiles.choose_batch_invariant("mxfp4", 28672, k, 512) for k in (4096, 1152))
    assert whole.unpack_k and not odd.unpack_k and odd.split_k == whole.split_k
    assert not tiles.choose("w4_asym_g128_a8", 4096, 4096, 512).unpack_k
    for format, tile in (
        ("qoq_channel", Tile(64, 64, unpack_k=32, stages=1)),
        ("mxfp4", Tile(64, 64, unpack_k=64, stages=1, unroll=2)),
        ("nested_8_4", Tile(64, 64, unpack_k=64, stages=4)),
        ("nested_8_4", Tile(128, 256, warps=16, unpack_k=128, stages=4)),
        ("mxfp4_a8", Tile(64, 64, unpack_k=64, stages=4)),
    ):
        with pytest.raises(UnsupportedError, match="no kernel that overlaps unpacking"):
            KernelSpec(format, 4096, 4096, tile)


def test_source_is_golden(golden: Callable[[str, str], None]) -> None:
    spec = KernelSpec("qoq_g128", 4096, 4096, Tile(16, 64, split_k=4, unroll=2, prefetch_bytes=4096))
    golden("gemm_qoq_g128.txt", render(spec))
