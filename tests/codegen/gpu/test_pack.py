"""Weights packed for GPU kernels: what comes back of them, and where each bit is."""

from __future__ import annotations

import pytest
import torch

from qcompile.codegen.gpu.gemm.pack import GPU_PACKING, MIX_ROWS, pack_gpu, packed_gpu_bytes, unpack_gpu
from qcompile.codegen.packing import CPU_PACKING
from qcompile.errors import UnsupportedError
from qcompile.formats.mixed import MIX_4_8
from qcompile.formats.registry import weight_format
from tests.codegen.gpu.test_gemm import PACKINGS, number_format, weight


@pytest.mark.parametrize("format", PACKINGS)
def test_packing_round_trip(format: str) -> None:
    torch.manual_seed(0)
    parts = weight_format(number_format(format)).quantize(weight(64, 512))
    if format == "mxfp4_int8":
        parts[0][parts[0] == 8] = 0  # it has no -0
    packed = pack_gpu(parts, format)
    sizes = {name: -(-part.nbytes // 64) * 64 for name, part in packed.items()}
    assert list(sizes.items()) == list(packed_gpu_bytes(64, 512, format).items())
    for part, got in zip(parts, unpack_gpu(packed, format), strict=True):
        if format == "w4_asym_g128" and part.is_floating_point():
            part = part.to(torch.bfloat16).float()
        if format in ("w4_asym_g128_int8", "nested_8_4") and part.is_floating_point():
            torch.testing.assert_close(got, part, rtol=2**-16, atol=0)  # 15 bits of mantissa are kept
        else:
            assert torch.equal(part, got)


def test_outputs_are_filled_up_to_whole_blocks() -> None:
    parts = weight_format("qoq_g128").quantize(weight(40, 256))
    back = unpack_gpu(pack_gpu(parts, "qoq_g128"), "qoq_g128")
    dense = weight_format("qoq_g128").dequantize(back, 256)
    assert dense.shape == (64, 256) and not dense[40:].any()
    assert torch.equal(dense[:40], weight_format("qoq_g128").dequantize(parts, 256))


@pytest.mark.parametrize("fraction", [0.0, 0.2, 1.0])
def test_rows_of_two_widths_are_packed_apart(fraction: float) -> None:
    torch.manual_seed(0)
    wide = torch.rand(80) < fraction
    parts = MIX_4_8.quantize_rows(weight(80, 256), wide)
    result = GPU_PACKING.mixed(wide, False, 256)
    blobs = result.blobs(parts)
    assert {role: blob.numel() for role, blob in blobs.items()} == result.sizes
    columns = blobs["columns"].view(torch.int32)
    assert columns.numel() == 16 * result.blocks and result.wide % MIX_ROWS == result.blocks % 4 == 0
    real = columns[columns >= 0]
    assert sorted(real.tolist()) == list(range(80)) and wide[real].sum() == (columns[: result.wide] >= 0).sum()


@pytest.mark.parametrize("format", PACKINGS)
def test_packed_bits(format: str) -> None:
    """One code at a time lands where the packing's description says."""
    codes = torch.zeros(32, 256, dtype=torch.uint8)
    codes[3, 128 + 70] = 5
    side = torch.ones(32, 2)
    parts = {
        "qoq_channel": [codes, torch.full((32,), 8, dtype=torch.uint8), torch.ones(32)],
        "qoq_g128": [codes, side.byte(), side.byte(), torch.ones(32)],
        "w4_asym_g128": [codes, side, side.byte()],
        "w4_asym_g128_int8": [codes, side, side.byte()],
        "nested_8_4": [codes, side, side.byte(), codes],
        "mxfp4": [codes, torch.ones(32, 8, dtype=torch.uint8)],
        "mxfp4_int8": [codes, torch.ones(32, 8, dtype=torch.uint8)],
        "nvfp4": [codes, torch.ones(32, 16, dtype=torch.uint8), torch.ones(1)],
        "bf16": [codes.to(torch.bfloat16)],
        "w8_sym_channel": [codes.char(), torch.ones(32)],
    }[format]
    packed = pack_gpu(parts, format)["w"]
    if format == "bf16":
        assert packed[0, 3, 3, 6] == 5
        return
    row = packed[0, -1, 3].view(torch.uint8).tolist()
    if format == "w8_sym_channel":
        assert row[70] == 5
    elif format in ("mxfp4", "nvfp4"):
        assert row[2 * 6 + 1] == 5  # input 6 + 2 * 32: bits 8 to 11 of the seventh 16-bit item
    elif format == "mxfp4_int8":
        assert row == [0x88] * 13 + [0x8A] + [0x88] * 50  # 1.5 * 2^(2 - 1), where 4 + 2 + 2 * 32 is beside zeros
    elif format == "w4_asym_g128":
        assert row[2 * 6 + 1] == 5 << 4  # input 6 + 3 * 64: bits 12 to 15 of the seventh 16-bit item
    else:
        rest = 8 if format == "qoq_channel" else 0
        assert row[6] == (5 ^ rest) << 4 | rest


def test_scales_leave_room_for_what_kernels_multiply_them_by() -> None:
    """Kernels multiply codes by 2^94 times the scale: a code in its place reads as a bf16 multiple of 2^-126."""
    codes = torch.zeros(32, 128, dtype=torch.uint8)
    codes[0, 0], codes[1, 40], codes[2, 70] = 5, 1, 8  # -0 is no weight
    exponent = torch.full((32, 4), 255, dtype=torch.uint8)
    exponent[0, 0], exponent[1, 1] = 160, 33
    words = pack_gpu([codes, exponent], "mxfp4")["groups"].t().contiguous().view(torch.uint8)
    assert words[0].tolist() == [160, 127, 127, 127] and words[1].tolist() == [127, 34, 127, 127]
    assert (words[2:] == 127).all()
    codes[4, 127] = 9
    with pytest.raises(UnsupportedError, match=r"weight \[32, 128\] in mxfp4: GPU kernels need .* at most 2\^33"):
        pack_gpu([codes, exponent], "mxfp4")
    codes, scale = torch.zeros(32, 256, dtype=torch.uint8), torch.full((32, 2), 2.0**120)
    assert pack_gpu([codes, scale, codes[:, :2]], "w4_asym_g128")["groups"].shape == (2, 32)
    scale[31, 1] *= 1.01
    with pytest.raises(UnsupportedError, match=r"weight \[32, 256\] in w4_asym_g128: .* at most 2\^120"):
        pack_gpu([codes, scale, codes[:, :2]], "w4_asym_g128")
    # As integers they have their exponents as they are.
    assert pack_gpu([codes, exponent], "mxfp4_int8")["groups"][0, 4] == -1


def test_a_weight_is_packed_anew_for_other_activations() -> None:
    assert GPU_PACKING.name("w4_asym_g128", "bf16") != GPU_PACKING.name("w4_asym_g128", "int8")
    assert GPU_PACKING.name("qoq_g128", "int4") == GPU_PACKING.name("qoq_g128", "int8")
    assert GPU_PACKING.readable("w4_asym_g128", "int8") == GPU_PACKING.name("w4_asym_g128", "bf16")
    assert GPU_PACKING.readable("w4_asym_g128", "bf16") is None
    assert GPU_PACKING.readable("mxfp4", "bf16") is None
    assert GPU_PACKING.name("mxfp4", "bf16") != GPU_PACKING.name("mxfp4", "int8_g128")


def test_powers_of_two_of_a_group_are_brought_to_one() -> None:
    torch.manual_seed(0)
    w = weight(192, 512)
    w[70, 5], w[3, :32] = 900, 0  # far from its neighbours; of no power at all
    codes, exponent = weight_format("mxfp4").quantize(w)
    ranges = pack_gpu([codes, exponent], "mxfp4_int8")["ranges"].t()
    assert (ranges[:, 0] < 0).tolist() == [row // 64 == 1 for row in range(192)] and (ranges[:, 1:] >= 0).all()
    differ = (powers_of(ranges) != exponent).nonzero().tolist()
    assert differ == [[3, 0], [70, 1], [70, 2], [70, 3]]
    assert CPU_PACKING.name("w4_asym_g128", "bf16") == CPU_PACKING.name("w4_asym_g128", "int8")


def powers_of(ranges: torch.Tensor) -> torch.Tensor:
    """Exponents of inputs in groups of 32 by the words of mxfp4_int8 [n, groups]."""
    return ((ranges[..., None] >> 23 & 255) + ((ranges[..., None] >> torch.arange(0, 16, 4)) & 15).log2()).flatten(1)


def test_powers_of_two_stay_where_they_can() -> None:
    """Those of 64 rows change together, where one of them must, and not by more than sums can follow."""
    torch.manual_seed(0)
    w = weight(192, 1024)
    w[3, 512:] *= 1e4
    w[130, 256:384] *= 2.0**-70
    codes, exponent = weight_format("mxfp4").quantize(w)
    ranges = pack_gpu([codes, exponent], "mxfp4_int8")["ranges"].t()
    assert torch.equal(powers_of(ranges), exponent.float())
    negative = (ranges < 0).view(3, 64, 8)
    assert (negative == negative[:, :1]).all()
    assert negative[0, 0].nonzero().flatten().tolist() == [4] and not negative[1].any() and negative[2, 0, 0]
    base = (ranges >> 23 & 255)[:64]
    assert ((base.diff(dim=1) != 0) <= negative[0, :, 1:]).all() and base[3, 4] > base[3, 3]
