"""The instructions that unpack a GPU's cache, run one by one: Triton's interpreter runs what stands in for them."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from qcompile.codegen.gpu.attention import AttentionSpec
from qcompile.codegen.gpu.gemm.pack import pack_codes
from qcompile.codegen.gpu.gemm.render import render
from qcompile.codegen.gpu.gemm.spec import KernelSpec
from qcompile.codegen.gpu.gemm.tile import Tile
from qcompile.codegen.gpu.kv_pages import GpuKV
from qcompile.formats.registry import gpu_packing
from tests.support.ptx import Words, bytes_of, floats, run, words

PAIRS = 512


def instructions(format: str) -> dict[str, str]:
    """PTX by the name of the function that is nothing else."""
    return instructions_of(AttentionSpec(GpuKV(format, 8, 128), 32, 4096, 0.1).kernel(90).source)


def instructions_of(source: str) -> dict[str, str]:
    """The same for a kernel's source."""
    asm = r'inline_asm_elementwise\(\s*("""|")(.*?)\2'
    result = re.findall(r"def (\w+)\([^)]*\):\n(?:(?!\ndef ).)*?" + asm, source, re.DOTALL)
    return {name: asm for name, _, asm in result}


def drawn() -> Words:
    return np.random.default_rng(1).integers(0, 1 << 32, PAIRS, dtype=np.uint32)


def parts_of(x: Words, bits: int, plane: int) -> np.ndarray:
    """Codes [n, 2] of a plane of the two items of each word."""
    return np.stack((x & 0xFFFF, x >> 16), -1) >> bits * plane & (1 << bits) - 1


@pytest.mark.parametrize(("format", "bits"), [("kv4", 4), ("kv8", 8)])
def test_codes_become_keys_and_values_less_zero_points(format: str, bits: int) -> None:
    """All sums of a code and a negative zero point are exact."""
    asm, items = instructions(format), drawn()
    zero = parts_of(drawn()[::-1].copy(), bits, 0).astype(np.float64)
    for plane in range(16 // bits):
        code, times = parts_of(items, bits, plane).astype(np.float64), 16 if bits == 4 and plane % 2 else 1
        key = floats(run(asm[f"key_plane{plane}"], 1, items, words(-1024 - times * zero, "f16x2"))[0], "f16x2")
        assert (key == times * (code - zero)).all()
        less = words((-128 if bits == 4 else 128) - zero, "bf16x2")
        value = floats(run(asm[f"value_plane{plane}"], 1, items, less)[0], "bf16x2")
        assert (value == code - zero).all()


@pytest.mark.parametrize("format", ["kv_hier4", "kv_hier"])
def test_halves_of_codes_become_keys_and_values(format: str) -> None:
    make = np.random.default_rng(3)
    asm, upper, lower = instructions(format), drawn(), drawn()[::-1].copy()
    scale, less = make.uniform(0.1, 9, (PAIRS, 2)), make.uniform(-99, 9, (PAIRS, 2))
    factor, added = words(16 * scale, "f16x2"), words(less - 16.5 * scale, "f16x2")
    both = run(asm["bytes_of"], 2, upper, lower) if format == "kv_hier" else []
    # What Triton's interpreter runs instead says what results are divided by.
    plain = AttentionSpec(GpuKV(format, 8, 128), 32, 4096, 0.1, inline_asm=False).kernel(90).source
    units = [float(unit) for unit in re.findall(r"& 15\)\.to\(tl\.float32\) \* (\S+)", plain)]
    for plane in range(4):
        items = both[plane % 2] if both else upper
        u, low = (parts_of(x, 4, plane).astype(np.float64) for x in (upper, lower))
        # Lower halves are kept 8 up; without them a code is that of the middle.
        code = 16 * u + (low if both else 8)
        want = floats(factor, "f16x2") * (1 + code / 256) + floats(added, "f16x2")
        key = floats(run(asm[f"key_plane{plane}"], 1, items, factor, added)[0], "f16x2")
        assert (key == want.astype(np.float16)).all()
        exact = scale * (u + (low - 8) / 16 if both else u) + less
        # Three roundings to fp16, of terms up to 16.5 scales, or 31.5, and the least value.
        assert (np.abs(key - exact) < 2**-11 * (48 * scale + 2 * np.abs(less))).all()
        value = floats(run(asm[f"value_plane{plane}"], 1, items)[0], "f16x2")
        assert (value == (1024 + code if both else u * units[plane])).all()


def picked(codes: np.ndarray) -> Words:
    """Items [planes, n] of E2M1 codes [planes, n, 4], as mxfp4_int8 has them."""
    weight = torch.zeros(32, 128 * PAIRS, dtype=torch.uint8)
    inputs = np.arange(4)[:, None, None] * 32 + np.arange(PAIRS)[:, None] * 128 + np.arange(4)
    weight[0, torch.from_numpy(inputs.ravel())] = torch.from_numpy(codes.astype(np.uint8).ravel())
    return pack_codes(weight, gpu_packing("mxfp4_int8"))[0, :, 0, :4].numpy().astype(np.uint16).astype(np.uint32).T


def tables_of(source: str, m: Words) -> list[Words]:
    """What codes of a plane pick bytes of, by the source of a kernel."""
    result = dict(re.findall(r"^    (three|first0|second0|third0|fourth0)(?:, _)? = (.*)$", source, re.MULTILINE))
    named = {"m": m.astype(np.int64)}
    named["three"] = eval(result["three"], {}, named)
    broadcast = re.compile(r"tl\.broadcast\((.*?)(?:\[:, None\])?, b\)")
    terms = [broadcast.fullmatch(result[f"{name}0"])[1] for name in ("first", "second", "third", "fourth")]
    return [(eval(term, {}, named) & 0xFFFFFFFF).astype(np.uint32) for term in terms]


TWICE = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])
"""The values of E2M1 codes."""


def codes_of(count: int) -> np.ndarray:
    """Random E2M1 codes [planes, n, count] without -0, which there is none of."""
    codes = np.random.default_rng(4).integers(0, 16, (4, PAIRS, count))
    codes[codes == 8] = 0
    return codes


def items_of(codes: np.ndarray) -> list[Words]:
    """Two items a word, of codes [planes, n, 4]."""
    nibbles = picked(codes)
    return [nibbles[i] | nibbles[i + 1] << 16 for i in (0, 2)]


@pytest.mark.parametrize("tile", [Tile(64, 128, 1, 1, 1, 8, 6, unpack_k=128), Tile(16, 64)])
def test_values_of_four_bits_become_integers(tile: Tile) -> None:
    """Twice an E2M1 value and a power of two, of four codes of each item."""
    codes = codes_of(4)
    items = items_of(codes)
    spec = KernelSpec("mxfp4_a8", 4096, 4096, tile, x_groups=True)
    times = 1 << np.random.default_rng(2).integers(0, 4, (4, PAIRS), dtype=np.uint32)
    tables = [each for m in times for table in tables_of(render(spec), m) for each in [table] * 4]
    result = run(instructions_of(render(spec))["unpack"], 4, *items, *tables)
    for plane in range(4):
        want = TWICE[codes[plane]] * times[plane][:, None]
        assert (bytes_of(result[plane]) == want).all()


def test_values_of_four_bits_are_multiplied_at_once() -> None:
    """Sums of each plane's eight codes times x, of two items of each."""
    codes, draw = codes_of(8), np.random.default_rng(5)
    x = draw.integers(0, 1 << 32, (4, 2, PAIRS), dtype=np.uint32)
    spec = KernelSpec("mxfp4_a8", 4096, 4096, Tile(1, 8, warps=1, prefetch_bytes=128), x_groups=True)
    asm = instructions_of(render(spec))["plane_sums"]
    result = run(asm, 4, *items_of(codes[..., :4]), *items_of(codes[..., 4:]), *x.reshape(8, PAIRS))
    for plane in range(4):
        both = np.concatenate((bytes_of(x[plane, 0]), bytes_of(x[plane, 1])), -1)
        assert (result[plane].view(np.int32) == (TWICE[codes[plane]] * both).sum(-1)).all()


TO_BF16 = [
    Tile(128, 128, 1, 1, 2, 8, 1, unpack_k=32),
    Tile(128, 64, 1, 1, 1, 4, 3, unpack_k=128),
    Tile(8, 64, stages=3, unpack_k=128),
]


@pytest.mark.parametrize("tile", TO_BF16)
def test_values_of_four_bits_become_bf16(tile: Tile) -> None:
    """E2M1 values of each plane times powers of two, the least, 1 and the most: all of that is exact."""
    source = render(KernelSpec("mxfp4", 4096, 4096, tile))
    asm, items = instructions_of(source), drawn()
    (more,) = set(re.findall(r"& 255\) \+ (\d+)\) \* 128", source))
    (downscale,) = re.findall(r"^ *acc \*= ([\d.]+)$", source, re.MULTILINE)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.concatenate((values, -values))
    for exponent in (34, 127, 160):
        scale = np.full(PAIRS, (exponent + int(more)) * 128 * 65537, np.uint32)
        for plane in range(4):
            result = floats(run(asm[f"unpack{plane}"], 1, items, scale)[0], "bf16x2") * float(downscale)
            assert (result == values[parts_of(items, 4, plane)] * 2.0 ** (exponent - 127)).all()


@pytest.mark.parametrize("tile", TO_BF16)
def test_codes_of_four_bits_become_bf16(tile: Tile) -> None:
    """(q - zero) scale of each plane's codes, rounded once, whatever the scale is."""
    asm, items = instructions_of(render(KernelSpec("w4_asym_g128", 4096, 4096, tile))), drawn()
    draw = np.random.default_rng(6)
    zero, scale = draw.integers(0, 16, PAIRS), 2.0 ** draw.uniform(-120, 120, PAIRS)
    low, high = (words(np.stack((x, x), -1), "bf16x2") for x in (-128.0 - zero, scale))
    minus, more = run(asm["parts_of"], 2, low & 0xFFFF | high & 0xFFFF0000)
    rounded = floats(high, "bf16x2")
    for plane in range(4):
        # An item's words are given twice, of the two rows that a thread has.
        result = run(asm[f"unpack{plane}"], 1, items, minus, minus, more, more)[0]
        exact = (parts_of(items, 4, plane) - zero[:, None]) * rounded
        assert (floats(result, "bf16x2") == floats(words(exact, "bf16x2"), "bf16x2")).all()
