"""The CPU GEMM kernels against numpy, on every instruction set this machine can run.

The kernels' headers are compiled with `gemm_harness.cpp` and called through ctypes. Weights are packed here,
from the description of the layouts, independently of `qcompile.formats`.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from qcompile.ops import UNARY
from qcompile.targets import cpu_flags
from tests.support.harness import ISAS, TRIED, Gemm, Q8Act, aligned

FORMATS = [
    "f32", "bf16", "w4_asym_g128_bf16", "w8_sym_channel", "w4_asym_g128", "qoq_g128", "qoq_channel", "mxfp4",
    "w8_sym_channel_x128", "w4_asym_g128_x128", "qoq_g128_x128", "qoq_channel_x128", "mxfp4_x128",
    "nested_8_4", "nested_8_4_x128", "mix_4_8", "mix_4_8_x128",
    "nvfp4", "nvfp4_x128", "nvfp4_bf16",
    "w4_asym_g32", "w4_asym_g64", "w8_sym_g32", "w8_sym_g128", "w4_asym_g32_x128", "w8_sym_g64_x128",
    "w4_asym_g32_bf16", "w4_asym_g64_bf16", "w3_asym_g128_bf16",
    "w2_trellis_g128_bf16", "w3_trellis_g128_bf16", "w4_trellis_g128_bf16",
]  # fmt: skip
FLOAT_FORMATS = ["f32", *(fmt for fmt in FORMATS if fmt.endswith("bf16"))]
INT_FORMATS = [fmt for fmt in FORMATS if fmt not in FLOAT_FORMATS]
SMALL_GROUPS = {"w4_asym_g32": 32, "w4_asym_g64": 64, "w8_sym_g32": 32, "w8_sym_g64": 64, "w8_sym_g128": 128}
SUMS = {"mxfp4": 32, "nvfp4": 32, "w4_asym_g128": 128, "qoq_g128": 128, "nested_8_4": 128, "mix_4_8": 128}
SUMS |= dict.fromkeys(SMALL_GROUPS, 32)
STORE, ADD, GATED, LOGITS = range(4)


def to_bf16(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def ceil_to(x: int, step: int) -> int:
    return -(-x // step) * step


def blocks(rows: np.ndarray) -> np.ndarray:
    """[np, a] -> [nb, a, 16]: for each a, the values of a block's 16 rows are adjacent."""
    return rows.reshape(-1, 16, rows.shape[1]).transpose(0, 2, 1)


def pack_inputs(codes: np.ndarray, step: int) -> np.ndarray:
    """[np, kp] -> [nb, kp/step, 16, step]."""
    n, k = codes.shape
    return codes.reshape(n // 16, 16, k // step, step).transpose(0, 2, 1, 3)


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """[np, kp] codes 0..15 -> [nb, kp/8, 16, 4]; byte j holds inputs 8b+j (low) and 8b+4+j (high)."""
    eights = pack_inputs(codes, 8)
    return eights[..., :4] | eights[..., 4:] << 4


def pack_three_bits(codes: np.ndarray) -> np.ndarray:
    """[np, kp] codes 0..7 -> [nb, kp/32, 3, 16, 4]: two lines of the upper two bits of two lines of nibbles each, and
    one line with the lowest bits of all four."""
    lines = pack_nibbles(codes).reshape(len(codes) // 16, -1, 4, 16, 4)
    upper, lowest = lines >> 1 & 0b00110011, lines & 0b00010001
    pairs = [upper[:, :, line] << 2 | upper[:, :, line + 1] for line in (0, 2)]
    single = sum(lowest[:, :, line] << line for line in range(4))
    return np.stack([*pairs, single], 2).astype(np.uint8)


@dataclass
class Weight:
    """Packed buffers by role, and the float64 matrix [np, kp] they represent."""

    buffers: dict[str, np.ndarray]
    value: np.ndarray
    keep: list[np.ndarray] = field(default_factory=list)


def random_weight(fmt: str, n: int, kp: int, k: int, rng: np.random.Generator) -> Weight:
    """A random weight, including the padding rows of the last block; inputs k.. are multiplied by zero activations."""
    rows = ceil_to(n, 16)
    fmt = fmt.removesuffix("_x128")
    if fmt.startswith("nvfp4"):
        return random_nvfp4(rows, kp, k, rng)
    if "trellis" in fmt:
        return random_trellis(int(fmt[1]), rows, kp, rng)
    size = SMALL_GROUPS.get(fmt.removesuffix("_bf16"), 128)
    groups = ceil_to(kp, size) // size
    group_of = np.arange(kp) // size
    if fmt.startswith("w8_sym_g"):
        q = rng.integers(-128, 128, (rows, kp))
        q[:2] = [[127], [-128]]
        scales = rng.uniform(0.5, 2, (rows, groups)).astype(np.float32)
        buffers = {"codes": pack_inputs((q + 128).astype(np.uint8), 4), "scale": blocks(scales)}
        return Weight(buffers, q * scales[:, group_of].astype(float))
    if fmt in ("f32", "bf16"):
        w = rng.standard_normal((rows, kp)).astype(np.float32)
        w[:, k:] = 0
        if fmt == "f32":
            return Weight({"codes": blocks(w)}, w.astype(np.float64))
        return Weight({"codes": pack_inputs(to_bf16(w), 2)}, from_bf16(to_bf16(w)).astype(np.float64))
    if fmt == "w8_sym_channel":
        q = rng.integers(-127, 128, (rows, kp))
        q[:2] = [[127], [-127]]
        scale = rng.uniform(0.5, 2, rows).astype(np.float32)
        return Weight(
            {"codes": pack_inputs((q + 128).astype(np.uint8), 4), "scale": scale},
            q * scale[:, None].astype(float),
        )
    q = rng.integers(0, 16, (rows, kp)).astype(np.uint8)
    q[:2] = [[7], [15]] if fmt == "mxfp4" else [[15], [0]]  # the largest and the least operands: sums must fit too
    if fmt == "mix_4_8":
        return random_mix(n, kp, rng)
    if fmt.startswith("w3"):
        q //= 2
    codes = pack_three_bits(q) if fmt.startswith("w3") else pack_nibbles(q)
    if fmt == "mxfp4":
        element = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
        exponent = rng.integers(118, 130, (rows, kp // 32)).astype(np.uint8)
        value = element[q] * np.repeat(np.exp2(exponent - 127.0), 32, axis=1)
        return Weight({"codes": codes, "exponent": blocks(exponent)}, value)
    if fmt == "qoq_channel":
        zero, scale = rng.integers(0, 16, rows).astype(np.uint8), rng.uniform(0.5, 2, rows).astype(np.float32)
        value = (q.astype(float) - zero[:, None]) * scale[:, None].astype(float)
        return Weight({"codes": codes, "zero": zero, "scale": scale}, value)
    zero = rng.integers(0, 8 if fmt.startswith("w3") else 16, (rows, groups)).astype(np.uint8)
    zero[:2] = [[0], [7 if fmt.startswith("w3") else 15]]
    difference = q.astype(float) - zero[:, group_of]
    if fmt == "qoq_g128":
        group_scale = rng.integers(1, 9, (rows, groups)).astype(np.uint8)  # 8 * 15 stays within 127
        scale = rng.uniform(0.5, 2, rows).astype(np.float32)
        value = difference * group_scale[:, group_of] * scale[:, None].astype(float)
        buffers = {"codes": codes, "zero": blocks(zero), "group_scale": blocks(group_scale), "scale": scale}
        return Weight(buffers, value)
    scale_g = rng.uniform(0.5, 2, (rows, groups)).astype(np.float32)
    buffers = {"codes": codes, "zero": blocks(zero), "scale": blocks(scale_g)}
    if fmt == "nested_8_4":
        low = rng.integers(0, 16, (rows, kp)).astype(np.uint8)
        buffers["low"] = pack_nibbles(low)
        difference += (low - 8.0) / 8
    return Weight(buffers, difference * scale_g[:, group_of].astype(float))


def random_trellis(bits: int, rows: int, kp: int, rng: np.random.Generator) -> Weight:
    """Any bits are a path. Row r of block b of a sequence of 64 rows is at the place 4 r + b."""
    codes = rng.integers(0, 256, (ceil_to(rows, 64) // 64, kp, 8 * bits)).astype(np.uint8)
    stream = np.unpackbits(codes, axis=-1, bitorder="little")
    value = np.empty((rows, kp))
    for row in range(rows):
        first = bits * (4 * (row % 16) + row // 16 % 4)
        window = stream[row // 64][:, (first + np.arange(12)) % (64 * bits)].astype(np.uint64)
        hashed = (window @ (1 << np.arange(12, dtype=np.uint64)) * 2095692331 + 3164817360) % 2**32
        value[row] = hashed.astype("<u4").view(np.uint8).reshape(-1, 4).sum(1, dtype=np.int64) - 510
    scale = to_bf16(rng.uniform(0.5, 2, (rows, ceil_to(kp, 128) // 128)) / 100)
    buffers = {"codes": codes, "group_scale": blocks(scale).astype("<u2")}
    return Weight(buffers, value * np.repeat(from_bf16(scale).astype(float), 128, 1)[:, :kp])


def random_nvfp4(rows: int, kp: int, k: int, rng: np.random.Generator) -> Weight:
    q = rng.integers(0, 16, (rows, kp)).astype(np.uint8)
    q[:2] = [[7], [15]]
    element = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    bits = rng.integers(0, 127, (rows, ceil_to(k, 16) // 16)).astype(np.uint8)
    step = torch.from_numpy(bits).view(torch.float8_e4m3fn).double().numpy()
    value = np.zeros((rows, kp))
    value[:, :k] = (element[q] * np.repeat(np.pad(step, ((0, 0), (0, kp // 16 - step.shape[1]))), 16, axis=1))[:, :k]
    scale = np.full(rows, 300.0, np.float32)
    return Weight({"codes": pack_nibbles(q), "group_scale": blocks(bits), "scale": scale}, value / 300)


def random_mix(rows: int, kp: int, rng: np.random.Generator) -> Weight:
    """A mix_4_8 weight with about a third of the rows in 8 bits, blocks and columns in random order."""
    order = rng.permutation(rows)
    split = rows // 3
    wide_rows, narrow_rows = (np.sort(part) for part in (order[:split], order[split:]))
    items = []
    for wide, part in ((True, wide_rows), (False, narrow_rows)):
        padded = np.pad(part, (0, -len(part) % 16), constant_values=-1).reshape(-1, 16)
        items += [(wide, block) for block in padded]
    items = [items[i] for i in rng.permutation(len(items))]
    groups = ceil_to(kp, 128) // 128
    group_of = np.arange(kp) // 128
    value = np.zeros((rows, kp))
    codes, zeros, scales = [], [], []
    for wide, block in items:
        q = rng.integers(-127, 128, (16, kp)) if wide else rng.integers(0, 16, (16, kp))
        zero = np.zeros((16, groups), int) if wide else rng.integers(0, 16, (16, groups))
        scale = rng.uniform(0.5, 2, (16, groups)).astype(np.float32) / (16 if wide else 1)
        packed = pack_inputs((q + 128).astype(np.uint8), 4) if wide else pack_nibbles(q.astype(np.uint8))
        codes.append(packed.reshape(-1))
        zeros.append(blocks(zero.astype(np.uint8)))
        scales.append(blocks(scale))
        real = block >= 0
        value[block[real]] = ((q - zero[:, group_of]) * scale[:, group_of].astype(float))[real]
    return Weight(
        {
            "codes": np.concatenate(codes),
            "zero": np.concatenate(zeros),
            "scale": np.concatenate(scales),
            "columns": np.stack([block for _, block in items]).astype(np.int32),
            "starts": np.cumsum([0, *(2 if wide else 1 for wide, _ in items)]).astype(np.int32),
        },
        value,
    )


@dataclass
class Activation:
    """A kernel's activation input, and the float64 matrix [m, kp] it represents."""

    x: np.ndarray | None
    q8: tuple[np.ndarray, np.ndarray, np.ndarray] | None
    value: np.ndarray

    def rows(self, index: slice) -> Activation:
        x = None if self.x is None else aligned(self.x[index])
        q8 = None if self.q8 is None else tuple(aligned(part[index]) for part in self.q8)
        return Activation(x, q8, self.value[index])  # type: ignore[arg-type]


def random_activation(fmt: str, m: int, kp: int, k: int, rng: np.random.Generator) -> Activation:
    if fmt not in INT_FORMATS:
        x = rng.standard_normal((m, kp)).astype(np.float32)
        x[:, k:] = 0
        if fmt == "f32":
            return Activation(aligned(x), None, x.astype(np.float64))
        return Activation(aligned(to_bf16(x)), None, from_bf16(to_bf16(x)).astype(np.float64))
    q = rng.integers(-127, 128, (m, kp)).astype(np.int8)
    q[0, : k // 2], q[-1, k // 2 : k] = 127, -127  # extremes that would expose saturating instructions
    q[:, k:] = 0
    grouped = fmt.endswith("_x128")
    scale = rng.uniform(0.01, 0.02, (m, ceil_to(kp, 128) // 128 if grouped else 1)).astype(np.float32)
    group = SUMS.get(fmt.removesuffix("_x128"), 128 if grouped else kp)
    padded = np.zeros((m, ceil_to(kp, group)), np.int32)
    padded[:, :kp] = q
    sums = padded.reshape(m, -1, group).sum(2, dtype=np.int32)
    value = q * np.repeat(scale.astype(float), 128 if grouped else kp, axis=1)[:, :kp]
    return Activation(None, (aligned(q), scale, np.ascontiguousarray(sums)), value)


def run(
    library: ctypes.CDLL,
    fmt: str,
    weight: Weight,
    act: Activation,
    n: int,
    k: int,
    epilogue: int = STORE,
    bias: np.ndarray | None = None,
    residual: np.ndarray | None = None,
    threads: int = 1,
    parts: tuple[int, int, int] = (0, 0, 0),
    gating: tuple[int, float, float] = (0, math.inf, 0.0),
) -> np.ndarray:
    """Result [m, n] (n/2 columns for GATED); the threads' shares are computed one after another."""
    m, kp = act.value.shape
    columns = n // 2 if epilogue == GATED else n
    out = np.full((m, columns + 3), np.nan, np.float32)
    buffers: dict[str, Any] = {name: aligned(array) for name, array in weight.buffers.items()}
    g = Gemm(m=m, n=n, k=k, epilogue=epilogue, out=out.ctypes.data, out_stride=columns + 3)
    g.parts[:] = parts
    g.act, g.limit, g.offset = gating
    for name, array in buffers.items():
        setattr(g, name, array.ctypes.data)
    if "columns" in buffers:
        g.blocks = len(buffers["columns"])
    if bias is not None:
        g.bias = bias.ctypes.data
    if residual is not None:
        g.residual, g.residual_stride = residual.ctypes.data, residual.shape[1]
    q8 = Q8Act()
    if act.q8 is not None:
        q8 = Q8Act(*(part.ctypes.data for part in act.q8), act.q8[2].shape[1], act.q8[1].shape[1])
    x = ctypes.c_void_p(act.x.ctypes.data if act.x is not None else None)
    scratch = aligned(np.zeros(library.harness_scratch_bytes(kp), np.uint8))
    for tid in range(threads):
        scratch[...] = 0xFF  # results must not depend on scratch contents
        code = library.harness_gemm(
            FORMATS.index(fmt),
            ctypes.byref(g),
            x,
            ctypes.byref(q8),
            tid,
            threads,
            ctypes.c_void_p(scratch.ctypes.data),
        )
        assert code == 0
    assert np.isnan(out[:, columns:]).all(), "wrote beyond the last column"
    return out[:, :columns]


def tolerance(fmt: str, act: Activation, weight: Weight, n: int) -> np.ndarray:
    """[m, n] bound on the rounding error of float accumulation.

    Every addition in a chain rounds once, by at most 2^-24 of the partial sum, which is bounded by the sum of
    magnitudes. With random signs, the error of c additions grows like sqrt(c); 4 * c^0.5 leaves a margin. Integer
    formats add once per group.
    """
    magnitude = np.abs(act.value) @ np.abs(weight.value[:n]).T
    if fmt.startswith("nvfp4_x") or fmt == "nvfp4":
        return 8 * np.sqrt(act.value.shape[1] / 16) * 2.0**-24 * magnitude
    by_chunk = fmt.startswith("mxfp4") or fmt.removesuffix("_x128") in SMALL_GROUPS
    additions = act.value.shape[1] / 32 if by_chunk else 2.0 + act.value.shape[1] / 128
    if fmt in FLOAT_FORMATS:
        additions = act.value.shape[1]
    return 4 * np.sqrt(additions) * 2.0**-24 * magnitude


CASES = [(1, 40, 96), (3, 40, 200), (8, 32, 128), (17, 40, 330), (30, 48, 512), (61, 16, 200)]


@pytest.mark.parametrize("isa", TRIED)
@pytest.mark.parametrize("fmt", FORMATS)
def test_matches_float64(harness: Callable[[str], ctypes.CDLL], isa: str, fmt: str) -> None:
    library = harness(isa)
    for m, n, k in CASES:
        rng = np.random.default_rng([m, n, k])
        kp = ceil_to(k, 32)
        weight = random_weight(fmt, n, kp, k, rng)
        act = random_activation(fmt, m, kp, k, rng)
        want = act.value @ weight.value[:n].T
        got = run(library, fmt, weight, act, n, k)
        error = np.abs(got - want) / tolerance(fmt, act, weight, n)
        assert error.max() <= 1, f"M={m} N={n} K={k}: {error.max():.2f} of the tolerance"


@pytest.mark.parametrize("isa", TRIED)
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_row_depends_on_nothing_else(harness: Callable[[str], ctypes.CDLL], isa: str, fmt: str) -> None:
    """Results are bitwise the same for every M, whatever the neighbouring rows, and for every thread count."""
    library = harness(isa)
    n, k, kp = 104, 300, 320
    rng = np.random.default_rng(7)
    weight = random_weight(fmt, n, kp, k, rng)
    act = random_activation(fmt, 53, kp, k, rng)
    whole = run(library, fmt, weight, act, n, k)
    for m in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 17, 24, 25, 33, 34, 40, 48):
        np.testing.assert_array_equal(run(library, fmt, weight, act.rows(slice(53 - m, 53)), n, k), whole[53 - m :])
    for threads in (2, 3, 5):
        np.testing.assert_array_equal(run(library, fmt, weight, act, n, k, threads=threads), whole)
        parted = run(library, fmt, weight, act, n, k, threads=threads, parts=(2, 1, 1))
        np.testing.assert_array_equal(parted, whole)


def of_every_isa(
    harness: Callable[[str], ctypes.CDLL], fmt: str, change: Callable[[Weight], None]
) -> Iterator[np.ndarray]:
    """Results of one GEMM on each instruction set this machine supports, widest vectors last."""
    for isa in ISAS:
        # AMX sums bfloat16 products in its own order.
        if ISAS[isa][1] <= cpu_flags() and not (isa == "amx" and fmt in ("bf16", "w4_asym_g128_bf16")):
            rng = np.random.default_rng(3)
            weight = random_weight(fmt, 40, 416, 400, rng)
            change(weight)
            yield run(harness(isa), fmt, weight, random_activation(fmt, 29, 416, 400, rng), 40, 400)


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if fmt != "f32"])
def test_instruction_sets_agree_bitwise(harness: Callable[[str], ctypes.CDLL], fmt: str) -> None:
    first, *rest = of_every_isa(harness, fmt, lambda weight: None)
    for other in rest:
        np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp4_x128"])
def test_scales_that_are_no_normal_numbers(harness: Callable[[str], ctypes.CDLL], fmt: str) -> None:
    """Scales 2^-128 and 2^-127 of the doubled element: negligible next to large scales, exact by themselves."""

    def tiny(weight: Weight) -> None:
        exponent = weight.buffers["exponent"]
        exponent.flat[::3] = np.arange(exponent.flat[::3].size) % 3

    def all_tiny(weight: Weight) -> None:
        weight.buffers["exponent"][...] = 1

    for change in (tiny, all_tiny):
        first, *rest = of_every_isa(harness, fmt, change)
        assert first.any() and np.isfinite(first).all()
        for other in rest:
            np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize("isa", TRIED)
@pytest.mark.parametrize("fmt", ["bf16", "w4_asym_g128_bf16", "w4_asym_g32_bf16"])
def test_tiny_activations_do_not_depend_on_the_kernel(
    harness: Callable[[str], ctypes.CDLL], isa: str, fmt: str
) -> None:
    """Some instructions flush numbers below 2^-126 to zero: such rows still have the same bits for every M."""
    library = harness(isa)
    n, k = 48, 256
    rng = np.random.default_rng(9)
    weight = random_weight(fmt, n, k, k, rng)
    x = rng.standard_normal((37, k)) * np.exp2(np.arange(37)[:, None] * 2 - 135.0)
    act = Activation(aligned(to_bf16(x.astype(np.float32))), None, x)
    whole = run(library, fmt, weight, act, n, k)
    assert whole[-10:].all()
    for m in (1, 2, 5, 20, 33):
        np.testing.assert_array_equal(run(library, fmt, weight, act.rows(slice(37 - m, 37)), n, k), whole[37 - m :])
    for row in range(37):
        one = run(library, fmt, weight, act.rows(slice(row, row + 1)), n, k)
        np.testing.assert_array_equal(one[0], whole[row])


@pytest.mark.parametrize("isa", TRIED)
@pytest.mark.parametrize("m", [1, 5, 30])
def test_epilogues(harness: Callable[[str], ctypes.CDLL], isa: str, m: int) -> None:
    library = harness(isa)
    rng = np.random.default_rng(m)
    n, k, kp = 80, 96, 96
    weight = random_weight("w8_sym_channel", 96, kp, k, rng)
    act = random_activation("w8_sym_channel", m, kp, k, rng)
    act = Activation(None, (act.q8[0], act.q8[1] * np.float32(1e-3), act.q8[2]), act.value)  # type: ignore[index]
    bias = rng.standard_normal(96).astype(np.float32)
    y = run(library, "w8_sym_channel", weight, act, n, k)
    np.testing.assert_array_equal(run(library, "w8_sym_channel", weight, act, n, k, bias=bias), y + bias[:n])
    residual = rng.standard_normal((m, n + 5)).astype(np.float32)
    added = run(library, "w8_sym_channel", weight, act, n, k, epilogue=ADD, bias=bias, residual=residual)
    np.testing.assert_array_equal(added, residual[:, :n] + (y + bias[:n]))
    # Blocks are gate 0, up 0, gate 1, up 1, gate 2, up 2; the 40 columns are 16 + 16 + 8.
    full = run(library, "w8_sym_channel", weight, act, 96, k).astype(np.float64).reshape(m, 3, 2, 16)
    gate, up = full[:, :, 0].reshape(m, 48), full[:, :, 1].reshape(m, 48)
    got = run(library, "w8_sym_channel", weight, act, 80, k, epilogue=GATED)
    # Relative error: exp 1.2e-7, then an addition, a division and a product with 6e-8 each.
    np.testing.assert_allclose(got, (gate / (1 + np.exp(-gate)) * up)[:, :40], rtol=4e-7)
    limit, offset = float(np.abs(up).mean()), 0.5
    kept = np.minimum(gate, limit), np.clip(up, -limit, limit) + offset
    for number, kind in enumerate(UNARY):
        got = run(library, "w8_sym_channel", weight, act, 80, k, epilogue=GATED, gating=(number, limit, offset))
        want = UNARY[kind](torch.from_numpy(kept[0])).numpy() * kept[1]
        # Near 0 the absolute error dominates: erf's 1.5e-7 times values of this size, twice.
        np.testing.assert_allclose(got, want[:, :40], rtol=1e-6, atol=4e-7 * limit * limit)


@pytest.mark.parametrize("isa", TRIED)
@pytest.mark.parametrize("fmt", ["w8_sym_channel", "mix_4_8", "bf16"])
def test_the_lowest_of_the_largest_logits_is_found(harness: Callable[[str], ctypes.CDLL], isa: str, fmt: str) -> None:
    """Ties made by a dominating bias, -1 for non-finite rows; with and without storing logits."""
    library = harness(isa)
    m, n, k = 5, 75, 96
    rng = np.random.default_rng(11)
    weight, act = random_weight(fmt, n, k, k, rng), random_activation(fmt, m, k, k, rng)
    logits = run(library, fmt, weight, act, n, k)
    buffers: dict[str, Any] = {name: aligned(array) for name, array in weight.buffers.items()}
    q8 = Q8Act()
    if act.q8 is not None:
        q8 = Q8Act(*(part.ctypes.data for part in act.q8), act.q8[2].shape[1], act.q8[1].shape[1])
    x = ctypes.c_void_p(act.x.ctypes.data if act.x is not None else None)
    scratch, best = aligned(np.zeros(library.harness_scratch_bytes(k), np.uint8)), aligned(np.zeros(128 * 15, np.uint8))
    top, places = float(logits.max()), rng.permutation(n)[:9]
    biases = [np.zeros(96, np.float32) for _ in range(4)]
    biases[1][:n] = np.inf
    biases[2][places] = 1e30  # ties
    biases[3][places[:4]] = np.nan
    assert np.isfinite(top)
    for bias, threads, wanted in ((b, t, w) for b in biases for t in (1, 2, 3) for w in (True, False)):
        out = np.full((m, n), np.nan, np.float32)
        g = Gemm(m=m, n=n, k=k, epilogue=LOGITS, out=out.ctypes.data if wanted else None, out_stride=n)
        for name, array in buffers.items():
            setattr(g, name, array.ctypes.data)
        g.blocks = len(buffers["columns"]) if "columns" in buffers else 0
        g.bias = bias.ctypes.data
        result = np.full(m, -1, np.int32)
        pointers = (ctypes.byref(q8), threads, *(ctypes.c_void_p(a.ctypes.data) for a in (scratch, best, result)))
        assert library.harness_logits(FORMATS.index(fmt), ctypes.byref(g), x, *pointers) == 0
        want = logits + bias[:n]
        finite = np.isfinite(want.max(-1))  # max is NaN if any is
        np.testing.assert_array_equal(result, np.where(finite, want.argmax(-1), -1))
        if wanted:
            np.testing.assert_array_equal(out, want)
