"""Number formats: how each one rounds, what it reads back as, and how a CPU kernel wants it packed.

This module is the single source of truth for every format; kernels, references and reports follow it. A weight is
`[N, K]` (N output features, K inputs). Rounding is half to even throughout. Asymmetric ranges always include 0, so
that zero is exact; zero points are integers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qcompile.formats.rounding import asymmetric, by_group, symmetric

PAGE_TOKENS = 64
"""Positions per KV page, and the block size of every attention reduction."""
ROW_BLOCK = 16
K_BLOCK = 32
ACTIVATION_GROUP = 128
"""Inputs that share a scale in activation types with several scales per row."""
QOQ_RANGE = 119
"""QServe 3.1: int8 codes within ±119 stay within int8 after rounding in 4-bit groups and scaling back."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX_EXPONENT = 2

Parts = list[Tensor]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Format:
    """A weight format. `bits` per weight; `group` is the number of inputs that share a scale (0: the whole row).

    `roles` name the parts that quantize_weight returns, codes first. `sum_group` is the number of activation codes in
    one sum, as needed to subtract the zero points (0: the whole row).
    """

    name: str
    bits: int
    group: int
    roles: tuple[str, ...]
    sum_group: int = 0
    source: str = ""

    @property
    def code_bits(self) -> int:
        """Bits per weight in one of its code planes."""
        return self.bits // sum(role in PLANES for role in self.roles)


PLANES = ("codes", "low")
"""Roles of parts that hold one code per weight."""

FORMATS = {
    f.name: f
    for f in (
        Format("f32", 32, 0, ("codes",)),
        Format("bf16", 16, 0, ("codes",)),
        Format("w8_sym_channel", 8, 0, ("codes", "scale"), source="SmoothQuant; QServe 4"),
        Format("w4_asym_g128", 4, 128, ("codes", "scale", "zero"), 128, "AWQ; MixLLM 3.1"),
        Format("qoq_g128", 4, 128, ("codes", "group_scale", "zero", "scale"), 128, "QServe 3.1"),
        Format("qoq_channel", 4, 0, ("codes", "zero", "scale"), source="QServe 3.1, one level"),
        Format("mxfp4", 4, 32, ("codes", "exponent"), 32, "OCP MX 1.0; ML-SpecQD III-D"),
        Format("nested_8_4", 8, 128, ("codes", "scale", "zero", "low"), 128, "QuantSpec IV, on weights"),
        Format("mix_4_8", 8, 128, ("codes", "scale", "zero", "wide"), 128, "MixLLM 3.1; see formats/mix.py"),
    )
}
PART_OF = {"nested_4": ("nested_8_4", "w4_asym_g128")}
"""Formats that read part of another format's tensors: the stored format, and the format of its first parts."""
NESTED_STEPS = 8
"""Steps of a nested weight's lower nibble per step of its upper nibble."""


@dataclass(frozen=True)
class Activation:
    """An activation type: floats of `dtype`, or integers within ±`top` with a scale (symmetric, dynamic).

    A scale covers `group` inputs (0: the whole row). Codes of the last group lie within ±`last_top`, which may keep
    more bits for channels reordered to the end. 4-bit codes are stored one per byte, for the int8 dot products.
    """

    name: str
    dtype: torch.dtype
    top: int = 0
    group: int = 0
    last_top: int = 0
    source: str = ""


ACTIVATIONS = {
    a.name: a
    for a in (
        Activation("f32", torch.float32),
        Activation("bf16", torch.bfloat16),
        Activation("int8", torch.int8, 127, 0, 127, "SmoothQuant; QServe 4"),
        Activation("int8_g128", torch.int8, 127, ACTIVATION_GROUP, 127, "MixLLM 3.1"),
        Activation("int4", torch.int8, 7, 0, 7, "QuaRot 4"),
        Activation("int4_g128", torch.int8, 7, ACTIVATION_GROUP, 7, "Atom 4.2"),
        Activation("int4_g128_outlier128", torch.int8, 7, ACTIVATION_GROUP, 127, "Atom 4.1: outliers last, in int8"),
    )
}
INTEGER_ACTIVATIONS = tuple(a.name for a in ACTIVATIONS.values() if a.top)
HIERARCHICAL = {"kv_hier": 8, "kv_hier4": 4}
"""Cache formats with the same layout (QuantSpec 4.2), and how many bits of the rounded part they read."""
HIER_GROUP = 128
"""Positions of a hierarchical cache that are rounded together, with shared scales for keys."""
KV_BITS = {"kv32": 32, "kv16": 16, "kv8": 8, "kv4": 4} | dict.fromkeys(HIERARCHICAL, 16)
"""Bits of a key or value at the time it is appended."""


def groups_of(k: int, group: int) -> int:
    """Number of groups of `group` inputs that cover k; the last may be short. 0 means one group."""
    return -(-k // group) if group else 1


# ---- rounding -----------------------------------------------------------------------------------


def _quantize_qoq_g128(w: Tensor) -> Parts:
    """QServe 3.1: int8 per channel within ±119, then uint4 with integer scale and zero per 128."""
    level, scale = symmetric(w, QOQ_RANGE)
    grouped = by_group(level.float(), 128)
    low, high = grouped.amin(-1, keepdim=True).clamp_(max=0), grouped.amax(-1, keepdim=True).clamp_(min=0)
    step = torch.round((high - low) / 15).clamp_(1, 255)
    zero = torch.round(-low / step).clamp_(0, 15)
    codes = (torch.round(grouped / step) + zero).clamp_(0, 15).to(torch.uint8)
    codes = codes.flatten(1)[:, : w.shape[1]].contiguous()
    return [codes, step.squeeze(-1).to(torch.uint8), zero.squeeze(-1).to(torch.uint8), scale.squeeze(-1)]


def _quantize_w4_g128(w: Tensor) -> Parts:
    codes, scale, zero = asymmetric(by_group(w.float(), 128), 4, keep=True)
    return [codes.flatten(1)[:, : w.shape[1]].contiguous(), scale.squeeze(-1), zero.squeeze(-1)]


def nested_low(w: Tensor, codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The lower nibbles uint8 [N, K] that bring a w4_asym_g128 weight closest to w [N, K].

    A lower nibble l adds (l - 8) / 8 of the upper nibble's step, so it reaches one step down and 7/8 of a step up. The
    upper nibble may be rounded away from the nearest code, as in GPTQ, and the 8-bit value can still be nearest to w.
    """
    step = _spread(scale, 128, w.shape[1])
    left = w.float() / step - (codes.float() - _spread(zero.float(), 128, w.shape[1]))
    return (torch.round(left * NESTED_STEPS).clamp_(-8, 7) + 8).to(torch.uint8)


def _quantize_nested(w: Tensor) -> Parts:
    upper = _quantize_w4_g128(w)
    return [*upper, nested_low(w, *upper)]


def _quantize_qoq_channel(w: Tensor) -> Parts:
    codes, scale, zero = asymmetric(w, 4)
    return [codes, zero.squeeze(-1), scale.squeeze(-1)]


def _quantize_w8(w: Tensor) -> Parts:
    codes, scale = symmetric(w, 127)
    return [codes, scale.squeeze(-1)]


def e2m1_codes(x: Tensor) -> Tensor:
    """f32 [...] -> 4-bit codes (sign, two exponent bits, one mantissa bit); ties to even, saturating."""
    size = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for index in range(7):
        edge = (E2M1[index] + E2M1[index + 1]) / 2
        code += (size >= edge) if index % 2 else (size > edge)
    return code + 8 * (torch.signbit(x) & (code > 0)).to(torch.uint8)


def e2m1_values(codes: Tensor) -> Tensor:
    """4-bit codes uint8 [...] -> f32 values. E2M1 is convex in the code, so it is the maximum of three lines."""
    negative = codes >= 8
    size = codes.float() - 8.0 * negative.float()
    value = torch.maximum(torch.maximum(size / 2, size - 2), 2 * size - 8)
    return torch.where(negative, -value, value)


def mx_exponent(largest: Tensor) -> Tensor:
    """Exponents of the scales of MXFP4 groups, given their largest magnitudes.

    OCP MX 1.0 6.3 uses floor(log2 largest) - 2, which puts largest at 4..8 scales and clamps it to 6. From 7 on, the
    clamping error exceeds rounding, and the next power of two (which puts it at 3.5..4) loses less.
    """
    exponent = torch.frexp(largest).exponent - 1 - E2M1_MAX_EXPONENT
    exponent = exponent + (torch.ldexp(largest, -exponent) >= 7).int()
    return exponent.clamp_(-126, 127)


def _quantize_mxfp4(w: Tensor) -> Parts:
    grouped = by_group(w.float(), 32)
    exponent = mx_exponent(grouped.abs().amax(-1, keepdim=True))
    codes = e2m1_codes(torch.ldexp(grouped, -exponent))
    biased = (exponent.squeeze(-1) + 127).to(torch.uint8)
    return [codes.flatten(1)[:, : w.shape[1]].contiguous(), biased]


_QUANTIZE: dict[str, Callable[[Tensor], Parts]] = {
    "f32": lambda w: [w.float()],
    "bf16": lambda w: [w.to(torch.bfloat16)],
    "w8_sym_channel": _quantize_w8,
    "w4_asym_g128": _quantize_w4_g128,
    "qoq_g128": _quantize_qoq_g128,
    "qoq_channel": _quantize_qoq_channel,
    "mxfp4": _quantize_mxfp4,
    "nested_8_4": _quantize_nested,
}


def quantize_weight(w: Tensor, format: str) -> Parts:
    """w [N, K] rounded to nearest in `format`; returns the parts in the order of FORMATS[format].roles.

    Codes are [N, K], independent of their packing; scales and zeros are [N] or [N, groups].
    """
    return _QUANTIZE[format](w)


def weight_parts(shape: Shape, format: str) -> list[tuple[Shape, torch.dtype]]:
    """Shapes and dtypes of quantize_weight's result for a weight of `shape` [N, K]."""
    n, k = shape
    spec = FORMATS[format]
    g = groups_of(k, spec.group)
    codes = {"f32": torch.float32, "bf16": torch.bfloat16, "w8_sym_channel": torch.int8}.get(format, torch.uint8)
    grouped: Shape = (n, g) if spec.group else (n,)
    kinds: dict[str, tuple[Shape, torch.dtype]] = {
        "codes": (shape, codes),
        "low": (shape, torch.uint8),
        "wide": ((n,), torch.bool),
        "scale": ((n,) if format == "qoq_g128" else grouped, torch.float32),
        "zero": (grouped, torch.uint8),
        "group_scale": ((n, g), torch.uint8),
        "exponent": ((n, g), torch.uint8),
    }
    return [kinds[role] for role in spec.roles]


def _spread(part: Tensor, group: int, k: int) -> Tensor:
    """[N, groups] -> [N, K], each entry repeated over its group."""
    return part.repeat_interleave(group, 1)[:, :k]


def dequantize_weight(parts: Parts, format: str, k: int) -> Tensor:
    """The f32 [N, K] that the parts of `format` represent."""
    named = dict(zip(FORMATS[format].roles, parts, strict=True))
    codes = named["codes"].float()
    if format in ("f32", "bf16"):
        return codes
    if format == "w8_sym_channel":
        return codes * named["scale"][:, None]
    if format == "qoq_channel":
        return (codes - named["zero"][:, None]) * named["scale"][:, None]
    if format == "nested_8_4":
        codes = codes + (named["low"].float() - 8) / NESTED_STEPS
    if format in ("w4_asym_g128", "nested_8_4", "mix_4_8"):
        return (codes - _spread(named["zero"], 128, k)) * _spread(named["scale"], 128, k)
    if format == "qoq_g128":
        level = (codes - _spread(named["zero"], 128, k)) * _spread(named["group_scale"], 128, k)
        return level * named["scale"][:, None]
    return torch.ldexp(e2m1_values(named["codes"]), _spread(named["exponent"].int() - 127, 32, k))


# ---- activations --------------------------------------------------------------------------------


def activation_parts(shape: Shape, kind: str, group: int) -> list[tuple[Shape, torch.dtype]]:
    """Shapes and dtypes of quantize_activation's result for x of `shape` [..., K]."""
    spec = ACTIVATIONS[kind]
    if not spec.top:
        return [(shape, spec.dtype)]
    *rows, k = shape
    scales = (*rows, groups_of(k, spec.group)) if spec.group else tuple(rows)
    return [(shape, spec.dtype), (scales, torch.float32), ((*rows, groups_of(k, group)), torch.int32)]


def _padded_groups(x: Tensor, group: int) -> Tensor:
    """[..., K] -> [..., groups, group], the last group zero-padded; group 0 means all of K."""
    group = group or x.shape[-1]
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % group)).unflatten(-1, (-1, group))


def quantize_activation(x: Tensor, kind: str, group: int) -> Parts:
    """x [..., K] -> [x] for floats, or for integers [codes int8, scale f32 [...] or [..., groups], sums int32].

    codes = round(x * (1 / scale)), where scale = max |x| / top over a row or a group as in ACTIVATIONS[kind]. The
    reciprocal is taken once in f32, as in the kernels. `sums` [..., K/group] add up `group` codes each (0: all).
    """
    spec = ACTIVATIONS[kind]
    if not spec.top:
        return [x.to(spec.dtype)]
    grouped = _padded_groups(x.float(), spec.group)
    top: Any = float(spec.top)
    if spec.last_top != spec.top:
        last = torch.arange(grouped.shape[-2], device=x.device)[:, None] == grouped.shape[-2] - 1
        top = torch.where(last, float(spec.last_top), top)
    scale = grouped.abs().amax(-1, keepdim=True) / top
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    codes = torch.round(grouped * (1.0 / scale)).clamp(-top, top).to(torch.int8).flatten(-2)[..., : x.shape[-1]]
    sums = _padded_groups(codes, group).sum(-1, dtype=torch.int32)
    return [codes.contiguous(), scale.squeeze(-1) if spec.group else scale[..., 0, 0], sums]


def dequantize_activation(parts: Parts) -> Tensor:
    """The f32 [..., K] that the parts of quantize_activation represent."""
    values = parts[0].float()
    if len(parts) == 1:
        return values
    scale = parts[1]
    if scale.dim() == values.dim():
        return values * scale.repeat_interleave(ACTIVATION_GROUP, -1)[..., : values.shape[-1]]
    return values * scale[..., None]


def round_trip_kv(x: Tensor, format: str) -> Tensor:
    """Keys or values [..., D] as read back from a cache of `format`: quantized per head and token, asymmetric.

    Source: QServe 3.2 (dynamic, per head, scale and zero stored in the page).
    """
    bits = KV_BITS[format]
    if bits == 32:
        return x.clone()
    if bits == 16:
        return x.to(torch.bfloat16).to(x.dtype)
    codes, scale, zero = asymmetric(x, bits)
    return ((codes.float() - zero.float()) * scale).to(x.dtype)


def round_trip_hier(x: Tensor, dim: int, bits: int) -> Tensor:
    """x with one range along `dim`, rounded to 4 bits and, if `bits` is 8, its residual to 4 more.

    value = scale * (u + l / 16) + zero with u in 0..15, l in -8..7. Source: QuantSpec 4.2, where zero is the minimum.
    """
    low = x.amin(dim, keepdim=True)
    scale = (x.amax(dim, keepdim=True) - low) / 15
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    t = (x - low) / scale
    upper = torch.round(t).clamp_(0, 15)
    lower = torch.round((t - upper) * 16).clamp_(-8, 7) if bits == 8 else torch.zeros_like(t)
    return scale * (upper + lower / 16) + low


def read_hier(k: Tensor, v: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Keys and values [T, Hk, D] up to a query's position, as that query reads them from a hierarchical cache.

    All groups of 128 but its own and the previous one are rounded: keys per channel and group, values per position.
    """
    old = max(0, (len(k) - 1) // HIER_GROUP - 1) * HIER_GROUP
    keys = round_trip_hier(k[:old].unflatten(0, (-1, HIER_GROUP)), 1, bits).flatten(0, 1)
    return torch.cat([keys, k[old:]]), torch.cat([round_trip_hier(v[:old], -1, bits), v[old:]])


# ---- packing for CPU kernels --------------------------------------------------------------------
#
# Rows are grouped in blocks of 16 (one 512-bit register of int32 sums), inputs in blocks of 32; both are padded with
# zero weights. All instruction sets use the same packing.
#   f32   [row block][k][16 rows]
#   bf16  [row block][k / 2][16 rows][2 inputs]
#   int8  [row block][k / 4][16 rows][4 inputs], code + 128, since the dot product takes unsigned operands
#   4 bit [row block][k / 8][16 rows][4 bytes]: byte j holds input 8b + j in its low nibble, 8b + 4 + j in its high one
#   nested: two 4-bit planes, upper nibbles (codes) and lower nibbles (low), each packed like a w4_asym_g128 weight
#   per row [rows]; per group [row block][group][16 rows]


def padded_rows(n: int) -> int:
    """Number of rows of a packed weight with n output features."""
    return -(-n // ROW_BLOCK) * ROW_BLOCK


def padded_inputs(k: int) -> int:
    """Number of inputs of a packed weight with k inputs, and of the activations it is multiplied with."""
    return -(-k // K_BLOCK) * K_BLOCK


def pack_codes(codes: Tensor, format: str) -> Tensor:
    """Codes [N, K] of a plane in the packed order of `format`, padded with zero weights."""
    n, k = codes.shape
    if format == "w8_sym_channel":
        codes = (codes.to(torch.int16) + 128).to(torch.uint8)
    fill = 128 if format == "w8_sym_channel" else 0
    pad = (0, padded_inputs(k) - k, 0, padded_rows(n) - n)
    if any(pad):
        codes = torch.nn.functional.pad(codes, pad, value=fill)
    blocks = codes.unflatten(0, (-1, ROW_BLOCK))  # [row block, 16, K]
    if format == "f32":
        return blocks.transpose(1, 2)
    if format in ("bf16", "w8_sym_channel"):
        return blocks.unflatten(2, (-1, 2 if format == "bf16" else 4)).transpose(1, 2)
    nibbles = blocks.unflatten(2, (-1, 2, 4))  # [row block, 16, K/8, low or high, 4]
    return (nibbles[..., 0, :] | (nibbles[..., 1, :] << 4)).transpose(1, 2)


def _pack_side(part: Tensor) -> Tensor:
    """[N] or [N, groups] -> per row or [row block][group][16]."""
    n = part.shape[0]
    pad = padded_rows(n) - n
    if part.dim() == 1:
        return torch.nn.functional.pad(part, (0, pad))
    return torch.nn.functional.pad(part, (0, 0, 0, pad)).unflatten(0, (-1, ROW_BLOCK)).transpose(1, 2)


def as_blob(t: Tensor) -> Tensor:
    """The bytes of `t`, row-major, as flat uint8 zero-padded to a multiple of 64."""
    flat = t.contiguous().flatten().view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % 64))


def pack_vector(value: Tensor) -> Tensor:
    """A vector [N] as an f32 blob padded to whole row blocks: biases, norm weights, rotary frequencies."""
    return as_blob(torch.nn.functional.pad(value.float(), (0, padded_rows(value.shape[0]) - value.shape[0])))


def packed_vector_bytes(n: int) -> int:
    """Size in bytes of pack_vector for n values."""
    return 4 * padded_rows(n)


def pack_weight(parts: Parts, format: str) -> dict[str, Tensor]:
    """The parts of a weight as flat uint8 blobs by role, each padded to a multiple of 64 bytes."""
    roles = FORMATS[format].roles
    return {
        role: as_blob(pack_codes(part, format) if role in PLANES else _pack_side(part))
        for role, part in zip(roles, parts, strict=True)
    }


def packed_bytes(n: int, k: int, format: str) -> dict[str, int]:
    """Size in bytes of each blob of pack_weight for a weight [n, k]."""
    sizes = {}
    for role, (shape, dtype) in zip(FORMATS[format].roles, weight_parts((n, k), format), strict=True):
        if role in PLANES:
            raw = padded_rows(n) * padded_inputs(k) * FORMATS[format].code_bits // 8
        else:
            raw = padded_rows(n) * (shape[1] if len(shape) > 1 else 1) * dtype.itemsize
        sizes[role] = -(-raw // 64) * 64
    return sizes


def unpack_codes(blob: Tensor, n: int, k: int, format: str) -> Tensor:
    """Codes [n, k] unpacked from a blob of pack_weight with a role in PLANES (for tests and inspection)."""
    rows, inputs = padded_rows(n), padded_inputs(k)
    flat = blob[: rows * inputs * FORMATS[format].code_bits // 8]
    if format in ("f32", "bf16"):
        wide = flat.view(ACTIVATIONS[format].dtype)
        per = 1 if format == "f32" else 2
        codes = wide.view(-1, inputs // per, ROW_BLOCK, per).transpose(1, 2).reshape(rows, inputs)
    elif format == "w8_sym_channel":
        codes = (flat.to(torch.int16) - 128).to(torch.int8)
        codes = codes.view(-1, inputs // 4, ROW_BLOCK, 4).transpose(1, 2).reshape(rows, inputs)
    else:
        packed = flat.view(-1, inputs // 8, ROW_BLOCK, 4).transpose(1, 2)
        codes = torch.stack((packed & 15, packed >> 4), -2).reshape(rows, inputs)
    return codes[:n, :k]


def unpack_weight(blobs: dict[str, Tensor], n: int, k: int, format: str) -> Parts:
    """The parts of a weight [n, k] unpacked from the blobs of pack_weight by role."""
    parts = zip(FORMATS[format].roles, weight_parts((n, k), format), strict=True)
    return [
        unpack_codes(blobs[role], n, k, format) if role in PLANES else _unpack_side(blobs[role], shape, dtype)
        for role, (shape, dtype) in parts
    ]


def _unpack_side(blob: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
    rows, groups = padded_rows(shape[0]), shape[1] if len(shape) > 1 else 1
    values = blob[: rows * groups * dtype.itemsize].view(dtype)
    if len(shape) > 1:
        values = values.view(-1, groups, ROW_BLOCK).transpose(1, 2).reshape(rows, groups)
    return values[: shape[0]]
