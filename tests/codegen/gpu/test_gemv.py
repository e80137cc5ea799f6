"""GPU kernels that take rows by themselves: GEMV without the tensor cores, norms and quantization."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from qcompile.codegen.gpu.gemm import tiles
from qcompile.codegen.gpu.gemm.pack import pack_gpu, unpack_gpu
from qcompile.codegen.gpu.gemm.render import arguments_of, kernel
from qcompile.codegen.gpu.gemm.spec import KernelSpec, reference
from qcompile.codegen.gpu.gemm.tile import Tile
from qcompile.codegen.gpu.rows import RowSpec
from qcompile.formats.activations import activation_format
from qcompile.formats.registry import weight_format
from qcompile.ops.epilogues import gate
from qcompile.targets import TARGETS
from tests.codegen.gpu.test_gemm import IN_GROUPS, packing_of, weight
from tests.support.compiled import Record
from tests.support.interpreted import interpreted


def interpret_gemv() -> None:
    """GEMV, without the tensor cores: the bits of the kernels for a large M, and gated epilogues."""
    from qcompile.codegen.gpu.gemm.render import load

    torch.manual_seed(0)
    n, k = 32, 1024
    cases: list[dict[str, Any]] = [
        {"residual": True, "width": 28},
        {"residual": True, "width": 28, "biased": 21},
        {"gated": "silu", "width": 16},
    ]
    for format in ("qoq_channel", "qoq_g128", "w8_sym_channel"):
        packed = pack_gpu(weight_format(format).quantize(weight(n, k)), format)
        x = activation_format("int8").quantize(torch.randn(4, k), 0)
        for options in cases:
            width = options["width"]
            bias, residual = torch.randn(n), torch.randn(4, width)
            bias[options.get("biased", n) :] = math.nan  # is not read
            result = []
            gemv = Tile(1, 32, unroll=2, warps=1, stages=1), Tile(3, 8, unroll=2, stages=3), Tile(1, 16, unroll=4)
            for cut in (Tile(16, 32, unroll=2), *gemv):
                spec = KernelSpec(format, n, k, cut, bias=True, inline_asm=False, out="f32", **options)
                given: dict[str, Any] = {**packed, **dict(zip(("x", "x_scale", "x_sum"), x, strict=True))}
                given |= {"out": torch.full((4, width), float("nan")), "bias": bias, "residual": residual, "M": 4}
                if spec.gemv:
                    given |= {"x": x[0].view(torch.int32), "w": packed["w"].view(torch.int32)}
                if spec.gemv and spec.gated:
                    spec = replace(spec, amax=True)
                    given["amax"] = torch.full((4, n // cut.rows), float("nan"))
                load(spec)[spec.grid(4)](*(given[a.name] for a in arguments_of(spec)))
                result.append(given["out"])
                if spec.amax:
                    assert torch.equal(given["amax"], given["out"].abs().unflatten(1, (-1, cut.rows // 2)).amax(2))
            assert not result[0].isnan().any()
            assert all(torch.equal(result[0], each) for each in result[1:]), (format, options)
            if "gated" in options:
                y = reference(x, weight_format(format).dequantize(unpack_gpu(packed, format), k), bias)
                want = gate(y.float(), "silu", width).double()
                assert (result[0] - want).norm() / want.norm() < 1e-5


def interpret_gemv_floats() -> None:
    """GEMV with float accumulators: parts of K, and groups within them, in the order of the other kernels."""
    from qcompile.codegen.gpu.gemm.render import load

    torch.manual_seed(0)
    n, k = 32, 1024
    residual, bias = torch.randn(4, 28), torch.randn(n)
    for format, number_format, far in (
        ("w4_asym_g128_int8", "w4_asym_g128", False),
        ("nested_8_4", "nested_8_4", False),
        ("mxfp4_a8", "mxfp4", False),
        ("mxfp4_a8", "mxfp4", True),
    ):
        w = weight(n, k)
        w[7, 5] = 900 if far else 0  # of mxfp4 another loop takes these rows
        parts = weight_format(number_format).quantize(w)
        packed = pack_gpu(parts, packing_of(format))
        for x_groups, count in ((False, 1), (False, 4), (True, 2)):
            x = activation_format("int8_g128" if x_groups else "int8").quantize(torch.randn(4, k), 0)
            result = []
            gemv = [Tile(tokens, rows, sliced_k=count, warps=1, stages=2) for tokens, rows in ((1, 32), (3, 8))]
            for cut in (Tile(16, 32, split_k=count), *gemv):
                options = {"bias": True, "residual": True, "width": 28, "out": "f32", "x_groups": x_groups}
                spec = KernelSpec(format, n, k, cut, inline_asm=False, **options)
                given: dict[str, Any] = {**packed, **dict(zip(("x", "x_scale", "x_sum"), x, strict=True))}
                given |= {"out": torch.full((4, 28), float("nan")), "bias": bias, "residual": residual, "M": 4}
                given |= {name: torch.zeros(*how[:1], dtype=how[1]) for name, how in spec.workspace(4).items()}
                if spec.gemv:
                    words = {name: given[name].view(torch.int32) for name in ("x", "w", "low") if name in given}
                    given |= words
                load(spec)[spec.grid(4)](*(given[a.name] for a in arguments_of(spec)))
                result.append(given["out"])
            assert all(torch.equal(result[0], each) for each in result[1:]), (format, far, x_groups, count)
            want = reference(x, weight_format(number_format).dequantize(parts, k)[:28], bias[:28], residual)
            assert (result[0] - want).norm() / want.norm() < 1e-5


def interpret_parts() -> None:
    """A row quantized in parts, by the amax of other parts or in groups: the reference's bits, as all at once."""
    from qcompile.codegen.gpu import compile as gpu_compile

    torch.manual_seed(0)
    x = torch.randn(3, 768)
    for name, amax_parts in (("int8", 48), ("int8_g128", 0), ("int4_clip", 48)):
        format = activation_format(name)
        whole = RowSpec(768, 768, 768, out="q8", top=format.top, group=format.group, reach=format.reach)
        result = []
        for spec, grid in ((whole, (3, 1, 1)), (replace(whole, width=256, blocks=3, amax_parts=amax_parts), (3, 3, 1))):
            given = {"x": x, "out": torch.empty(3, 768, dtype=torch.int8), "out_scale": torch.full((3, 6), 0.0)}
            given["amax"] = x.abs().unflatten(1, (48, 16)).amax(2)
            kernel = spec.kernel(80)
            gpu_compile.load(kernel)[grid](*(given[a.name] for a in kernel.arguments))
            result.append((given["out"], given["out_scale"]))
        assert all(torch.equal(one, other) for one, other in zip(*result, strict=True))
        assert torch.equal(result[0][0], format.quantize(x, 0)[0])


def interpret_norms() -> None:
    """A norm that is quantized multiplies the scales: codes are those of the row without it, whatever its size."""
    from qcompile.codegen.gpu import compile as gpu_compile

    torch.manual_seed(0)
    x = torch.randn(4, 192) * torch.tensor([[1.0], [1e-3], [1e3], [0.0]])
    weight = torch.randn(192)
    for group, weighted in ((0, True), (0, False), (64, True)):
        spec = RowSpec(192, 192, 192, norm="rms", eps=1e-6, weight=weighted, out="q8", group=group)
        given = {"x": x, "weight": weight, "out": torch.empty(4, 192, dtype=torch.int8)}
        given["out_scale"] = torch.empty(4, spec.scales)
        kernel = spec.kernel(80)
        gpu_compile.load(kernel)[(4, 1, 1)](*(given[a.name] for a in kernel.arguments))
        row = (x * weight if weighted else x).unflatten(1, (spec.scales, -1))
        steps = row.abs().amax(2, keepdim=True) / 127
        codes = torch.where(steps > 0, row / steps, 0.0)
        # A quotient beside a half may round either way.
        assert (given["out"].unflatten(1, (spec.scales, -1)) - codes).abs().max() <= 0.5001
        norm = torch.rsqrt(x.double().square().mean(1, keepdim=True) + 1e-6)
        want = torch.where(steps[..., 0] > 0, steps[..., 0] * norm, norm)
        assert torch.allclose(given["out_scale"].double(), want, rtol=1e-6)


def interpret_rows_behind_the_last() -> None:
    """Positions go on beyond the context where rounds compute what is forgotten; behind their table is other memory."""
    from qcompile.codegen.gpu import compile as gpu_compile

    memory = torch.randn(8, 96, generator=torch.Generator().manual_seed(2))
    memory[5:] = torch.nan
    result, index = torch.zeros(4, 96), torch.tensor([0, 4, 5, 7], dtype=torch.int32)
    gpu_compile.load(RowSpec(96, 96, 96, indexed=True, last=4).kernel(80))[(4, 1, 1)](memory, result, index)
    assert torch.equal(result, memory[[0, 4, 4, 4]])


def test_numerics_in_the_interpreter() -> None:
    calls = "interpret_gemv()", "interpret_gemv_floats()", "interpret_parts()", "interpret_norms()"
    interpreted(__name__, *calls, "interpret_rows_behind_the_last()")


@pytest.mark.parametrize("target", ["a100", "h200", "b200"])
def test_gemv_kernels_keep_loads_in_flight_in_registers(target: str, compiled: Record) -> None:
    gpu, capability = TARGETS[target], TARGETS[target].capability
    cases = [("qoq_g128", 4096, 14336, rows) for rows in (1, 2, 3)] + [("qoq_channel", 4096, 14336, 3)]
    cases += [("qoq_g128", 28672, 4096, 1), ("w8_sym_channel", 4096, 4096, 3), ("w8_sym_channel", 4096, 14336, 1)]
    cases += [(format, n, 4096, 1) for format in ("nested_8_4", "w4_asym_g128_int8", "mxfp4_a8") for n in (4096, 28672)]
    cases = [(*case, case[0] in IN_GROUPS) for case in cases] + [("w4_asym_g128_int8", 28672, 4096, 1, False)]
    for format, n, k, rows, x_groups in cases:
        spec = KernelSpec(format, n, k, tiles.choose(format, n, k, rows, gpu), out="f32", x_groups=x_groups)
        assert spec.gemv and spec.tile.tokens == rows
        built = compiled(kernel(spec), capability)
        assert built.spill_bytes == 0 and any(name.startswith("dp4a") for name in built.ptx)
        # Programs of one warp with PDL: 16 have the registers of a multiprocessor.
        assert not (spec.pdl and spec.tile.warps == 1) or 16 * 32 * built.registers <= 1 << 16
