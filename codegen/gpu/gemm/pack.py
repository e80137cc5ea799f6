"""Packing of weights for the GPU's GEMM templates, from the parts of a weight (formats/weight.py).

Codes are stored in blocks of 32 rows by B inputs, [N / 32][K / B][32 rows][bytes of a row], so that a program streams
contiguous memory. B is 128, but 256 for w4_asym_g128 and 64 for bf16. One row of a block, bit 0 being the lowest:

    qoq_channel     byte j (0..63): bits 0-3 q[j] - 8, bits 4-7 q[j + 64] - 8, two's complement
    qoq_g128        byte j (0..63): bits 0-3 q[j], bits 4-7 q[j + 64]; the same for w4_asym_g128_int8
    nested_8_4      two tensors: upper nibbles (w; with groups a w4_asym_g128_int8 weight) and lower nibbles (low)
    w4_asym_g128    16 bits j (0..63), little endian: bits 4i .. 4i + 3 are q[j + 64 i]
    mxfp4           16 bits j (0..31), little endian: bits 4i .. 4i + 3 are the E2M1 code of input j + 32 i
    w8_sym_channel  byte j (0..127): q[j]
    bf16            value j (0..63)

Weights in f32 (routers of experts) are row-major.

A mix_4_8 weight stores its 8-bit rows (wide) like a w8_sym_channel weight and its 4-bit rows (w) like a
w4_asym_g128_int8 weight. All rows, 8-bit ones first, have words of the latter format (groups) and the index of their
output column (columns, int32 [rows]); rows that pad either width to a multiple of MIX_ROWS have -1.

Each group has one 32-bit word per row, rows innermost, so that a program's rows are contiguous:

    qoq_g128           [K / 256][N]: bits 0-7 step, 8-15 zero * step of the even group; 16-23, 24-31 of the odd one
    w4_asym_g128       [K / 128][N]: bits 0-15 -(128 + zero) as bf16, exact; 16-31 the scale rounded to bf16
    w4_asym_g128_int8  [K / 128][N]: bits 0-7 zero; the rest the scale's upper 24 bits, rounded (within 2^-16);
                       the same for nested_8_4
    mxfp4              [K / 128][N]: byte i the exponent of the inputs 32 i to 32 i + 31

mxfp4_int8 is mxfp4 for integer kernels, which unpack by byte permutations (unpack.jinja). It has the same words, but
16-bit item j (0..31) holds inputs 32 (j % 4) + 4 (j / 4) + i in bits 4i .. 4i + 3. A code is e in bits 0-1, the sign in
bit 2 and m in bit 3: 2^(e - 1), or with m 1.5 times that, and 0 if e is 0. Each group has a second word (ranges): bits
23-30 are the exponent of a power of two P such that the scale of each 32 inputs is 2^0 to 2^3 times P, and bits
4i .. 4i + 3 are that factor for inputs 32 i to 32 i + 31. P is kept from group to group as long as possible; where it
changes in any of 64 rows (RANGE_ROWS), the words of all 64 are negative. If some group of a row has no such P, or the
P of a row are more than 2^64 apart, the words of the first group are negative for all its 64 rows.

Each row has a scale f32 [N], and in qoq_channel also zero - 8 as int8 [N].

A packing is named after its number format, with a suffix if it is a different one for int8 activations. For bf16
activations scales are rounded to bf16, as their products with the codes are anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from qcompile.codegen.packing import Mixed, Packing
from qcompile.errors import UnsupportedError
from qcompile.formats.activations import activation_format
from qcompile.formats.blocks import as_blob
from qcompile.formats.mixed import EIGHT_BIT_ZERO
from qcompile.formats.registry import weight_format
from qcompile.formats.rounding import Parts, groups_of

BLOCK_ROWS = 32
MIX_ROWS = 64
_LARGE_N = 4096


@dataclass(frozen=True)
class _Packing:
    format: str  # of the weight
    block: int  # inputs packed together
    planes: int  # codes per item: input j of each plane shares an item
    inputs: int  # K must be a multiple of it


_PACKINGS = {
    "qoq_channel": _Packing("qoq_channel", 128, 2, 128),
    "qoq_g128": _Packing("qoq_g128", 128, 2, 256),
    "w4_asym_g128": _Packing("w4_asym_g128", 256, 4, 256),
    "w4_asym_g128_int8": _Packing("w4_asym_g128", 128, 2, 128),
    "nested_8_4": _Packing("nested_8_4", 128, 2, 128),
    "mxfp4": _Packing("mxfp4", 128, 4, 128),
    "mxfp4_int8": _Packing("mxfp4", 128, 4, 128),
    "mix_4_8": _Packing("mix_4_8", 128, 2, 128),  # by gpu_mixed
    "w8_sym_channel": _Packing("w8_sym_channel", 128, 1, 128),
    "bf16": _Packing("bf16", 64, 1, 64),
}

RANGE_ROWS = 64
"""Rows that share the flags (sign bits) of mxfp4_int8 ranges: those of one consumer warp group."""
MXFP4_DOWNSCALE = 32
"""log2 by which bf16 kernels scale mxfp4 weights down, so that one product both converts and scales a code."""
_MIN_EXPONENT, _MAX_EXPONENT = 2 + MXFP4_DOWNSCALE, 128 + MXFP4_DOWNSCALE
"""Smallest and largest (biased) exponents of scales for which that is exact."""
_MAX_SCALE_LOG2 = 120
"""log2 of the largest scale of w4_asym_g128 for bf16 activations: kernels multiply by 64 times the scale."""
_MAX_RESCALE_LOG2 = 64
"""log2 of the largest factor by which integer mxfp4 kernels rescale an accumulator from one P to another."""
_ITEM_SHAPE = (4, 8, 4)
"""A block of inputs in mxfp4_int8: groups of 32 inputs, items per group, inputs per item."""
_SCALE_WORD_PACKINGS = ("w4_asym_g128_int8", "nested_8_4")
"""Packings whose group words hold a zero point and the upper 24 bits of a scale."""


def packing_of(format: str, activation: str) -> str:
    """The packing of a weight in `format` for an activation format.

    UnsupportedError if there are no GPU kernels for them.
    """
    if format == activation == "f32":  # routers of experts
        return "f32"
    integers = activation_format(activation).is_integer
    name = f"{format}_int8" if format in ("w4_asym_g128", "mxfp4") and integers else format
    floats = activation == "bf16" and name in ("w4_asym_g128", "bf16", "mxfp4")
    # Activations with a scale per group need kernels that sum per group.
    grouped = integers and name in ("w4_asym_g128_int8", "nested_8_4", "mxfp4_int8", "mix_4_8")
    if name not in _PACKINGS or not (floats or grouped or (activation in ("int8", "int4") and name != "bf16")):
        raise UnsupportedError(f"weights in {format} with activations in {activation} have no GPU kernels")
    return name


def kernel_of(packing: str, activation: str) -> str:
    """The format of the GEMM kernels (triton.KernelSpec) for a packing and an activation type."""
    name = packing.removesuffix("_int8") if packing == "mxfp4_int8" else packing
    return f"{name}_a8" if name in ("w4_asym_g128", "mxfp4") and activation != "bf16" else name


def _readable(format: str, activation: str) -> str | None:
    """Another packing that these kernels can read: for integer activations, w4_asym_g128 as packed for bf16."""
    return {"w4_asym_g128_int8": "w4_asym_g128"}.get(packing_of(format, activation))


def check_shape(n: int, k: int, format: str) -> None:
    """UnsupportedError unless the GPU kernels have a packing for a weight [n, k] in `format`."""
    if format not in _PACKINGS:
        raise UnsupportedError(f"format {format} has no GPU packing; there are {', '.join(_PACKINGS)}")
    inputs = _PACKINGS[format].inputs
    if n % BLOCK_ROWS or k % inputs:
        raise UnsupportedError(
            f"weight [{n}, {k}] in {format}: GPU kernels need a multiple of {BLOCK_ROWS} outputs and {inputs} inputs"
        )


def padded_inputs(k: int, packing: str) -> int:
    """Inputs of a packed weight of k inputs, in whole blocks; the activations at the padding are zero."""
    step = _PACKINGS[packing].inputs
    return -(-k // step) * step


def padded_outputs(n: int) -> int:
    """Rows of a packed weight of n outputs: whole blocks, or whole tiles of 128 rows if n is large."""
    step = BLOCK_ROWS if n <= _LARGE_N else 4 * BLOCK_ROWS
    return n if n % BLOCK_ROWS == 0 else -(-n // step) * step


def pack_gpu(parts: Parts, format: str) -> dict[str, Tensor]:
    """The parts of a weight, packed, by the names of kernel arguments: w, w_scale, w_zero, groups, low, ranges.

    Outputs are padded with zeros to padded_outputs, inputs to padded_inputs.
    """
    n, k = parts[0].shape
    more = padded_outputs(n) - n
    if more:
        parts = [pad(part, (*(0, 0) * (part.dim() - 1), 0, more)) for part in parts]
    check_shape(n + more, padded_inputs(k, format), format)
    parts = [_pad_inputs(part, k, format) for part in parts]
    named = weight_format(_PACKINGS[format].format).named(parts)
    packed = {"w": pack_codes(named["codes"], format)}
    if format == "bf16":
        return packed
    if format in ("mxfp4", "mxfp4_int8"):
        exponent = named["exponent"] if format == "mxfp4_int8" else _exponents(named["codes"], named["exponent"])
        packed["groups"] = exponent.contiguous().view(torch.int32).t().contiguous()
        if format == "mxfp4_int8":
            packed["ranges"] = _ranges(named["codes"], named["exponent"])
        return packed
    if format == "w4_asym_g128":
        packed["groups"] = _bf16_words(named["codes"], named["scale"], named["zero"])
        return packed
    if format in _SCALE_WORD_PACKINGS:
        packed["groups"] = scale_words(named["scale"], named["zero"])
        if "low" in named:
            packed["low"] = pack_codes(named["low"], format)
        return packed
    packed["w_scale"] = named["scale"].float().contiguous()
    if format == "qoq_channel":
        packed["w_zero"] = (named["zero"].to(torch.int16) - 8).to(torch.int8)
    elif format == "qoq_g128":
        packed["groups"] = _step_words(named["group_scale"], named["zero"])
    return packed


def _pad_inputs(part: Tensor, k: int, packing: str) -> Tensor:
    """A part of a weight of k inputs, codes [n, k] or values of groups [n, groups], zero-padded to padded_inputs."""
    if part.dim() == 1:
        return part
    inputs, group = padded_inputs(k, packing), weight_format(_PACKINGS[packing].format).group
    return pad(part, (0, (inputs if part.shape[1] == k else groups_of(inputs, group)) - part.shape[1]))


def packed_gpu_bytes(n: int, k: int, format: str) -> dict[str, int]:
    """Bytes of each part of pack_gpu for a weight [n, k], in its order, rounded up to multiples of 64."""
    n, k = padded_outputs(n), padded_inputs(k, format)
    check_shape(n, k, format)
    codes = {"bf16": 2 * n * k, "w8_sym_channel": n * k}.get(format, n * k // 2)
    sizes = {"w": codes}
    if format in ("qoq_channel", "qoq_g128", "w8_sym_channel"):
        sizes["w_scale"] = 4 * n
    if format == "qoq_channel":
        sizes["w_zero"] = n
    if "g128" in format or format in (*_SCALE_WORD_PACKINGS, "mxfp4", "mxfp4_int8"):
        sizes["groups"] = 4 * n * (k // 256 if format == "qoq_g128" else k // 128)
    if format == "mxfp4_int8":
        sizes["ranges"] = sizes["groups"]
    if format == "nested_8_4":
        sizes["low"] = codes
    return {name: -(-size // 64) * 64 for name, size in sizes.items()}


def pack_codes(codes: Tensor, format: str) -> Tensor:
    """Codes [n, k] in the block layout of a packing."""
    planes, inputs = _PACKINGS[format].planes, _PACKINGS[format].block
    n, k = codes.shape
    if format == "mxfp4_int8":
        codes = _permuted_e2m1(codes).view(n, k // inputs, *_ITEM_SHAPE).permute(0, 1, 4, 3, 2).contiguous()
    blocks = codes.view(n // BLOCK_ROWS, BLOCK_ROWS, k // inputs, planes, inputs // planes).transpose(1, 2).contiguous()
    if planes == 1:
        return blocks.squeeze(3)
    if format == "qoq_channel":
        blocks = blocks ^ 8  # q - 8 in two's complement
    if planes == 2:
        return (blocks[..., 0, :] | (blocks[..., 1, :] << 4)).view(torch.int8)
    low = blocks[..., 0, :] | (blocks[..., 1, :] << 4)
    high = blocks[..., 2, :] | (blocks[..., 3, :] << 4)
    return torch.stack((low, high), -1).view(torch.int16).squeeze(-1)


def _permuted_e2m1(codes: Tensor) -> Tensor:
    """E2M1 codes with the bits of mxfp4_int8; -0 becomes 0."""
    exponent = codes >> 1 & 3
    found = (codes & 1 ^ (exponent == 0)) << 3 | (codes & 8) >> 1 | exponent
    return found.masked_fill_(codes == 8, 8)


def scale_words(scale: Tensor, zero: Tensor) -> Tensor:
    """Words [groups, n] of scales [n, groups], rounded to their upper 24 bits, and zero points."""
    words = (scale.float().contiguous().view(torch.int32) + 128) & -256
    return (words | zero.to(torch.int32)).t().contiguous()


def _scale_error(codes: Tensor, format: str, power: int) -> UnsupportedError:
    n, k = codes.shape
    return UnsupportedError(f"weight [{n}, {k}] in {format}: GPU kernels need scales of at most 2^{power}")


def _bf16_words(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Words [groups, n] of codes [n, k], scales and zero points [n, groups]; UnsupportedError for scales too large."""
    if (scale > 2.0**_MAX_SCALE_LOG2).any():
        raise _scale_error(codes, "w4_asym_g128", _MAX_SCALE_LOG2)
    high = scale.to(torch.bfloat16).contiguous().view(torch.int16).to(torch.int32) << 16
    low = (-128 - zero.float()).to(torch.bfloat16).view(torch.int16).to(torch.int32) & 0xFFFF
    return (high | low).t().contiguous()


def _exponents(codes: Tensor, exponent: Tensor) -> Tensor:
    """Exponents of mxfp4 scales, uint8 [n, k / 32], for bf16 kernels: that of 1 if all codes are 0, at least 2^-93.

    UnsupportedError for scales above 2^33.
    """
    used = ((codes & 7) != 0).view(len(codes), -1, 32).any(-1)
    if (used & (exponent > _MAX_EXPONENT)).any():
        raise _scale_error(codes, "mxfp4", _MAX_EXPONENT - 127)
    return torch.where(used, exponent.clamp_min(_MIN_EXPONENT), 127)


def _ranges(codes: Tensor, exponent: Tensor) -> Tensor:
    """The ranges [groups, n] of mxfp4_int8 for E2M1 codes [n, k]; 32 inputs that are all zero fit any P."""
    n, k = codes.shape
    blocks, more = -(-n // RANGE_ROWS), -n % RANGE_ROWS
    used = pad(((codes & 7) != 0).view(n, k // 128, 4, 32).any(-1), (0, 0, 0, 0, 0, more))
    powers = torch.where(used, pad(exponent.view(n, k // 128, 4).to(torch.int32), (0, 0, 0, 0, 0, more)), 0)
    most = torch.where(used, powers, 255).amin(-1)  # bounds of the exponent of a group's P
    least = (powers.amax(-1) - 3).clamp_min(1)
    too_far = (least > most) | (most.clamp_max(254).amin(1) < least.amax(1) - _MAX_RESCALE_LOG2)[:, None]
    far = too_far.view(blocks, -1).any(1)
    chosen, changes = _stable_powers(least.t().view(-1, blocks, RANGE_ROWS), most.t().view(-1, blocks, RANGE_ROWS))
    changes &= ~far
    changes[0] = far
    chosen = chosen.flatten(1)
    shifts = (powers - chosen.t()[..., None]).clamp(0, 3) + torch.arange(0, 16, 4, device=codes.device)
    words = chosen << 23 | (torch.ones_like(powers) << shifts).sum(-1, dtype=torch.int32).t()
    words |= changes.to(torch.int32).repeat_interleave(RANGE_ROWS, 1) << 31
    return words[:, :n].contiguous()


def _stable_powers(least: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
    """Exponents [groups, blocks, rows] within bounds, and flags [groups, blocks] of changes from the previous group.

    All rows of a block change together, and only if one of them must.
    """
    chosen, changes = least.clone(), torch.zeros_like(least[..., 0], dtype=torch.bool)
    high = most[0]
    for group in range(1, len(least)):
        low, high = torch.maximum(chosen[group - 1], least[group]), torch.minimum(high, most[group])
        changes[group] = (low > high).any(-1)
        chosen[group] = torch.where(changes[group, :, None], least[group], low)
        high = torch.where(changes[group, :, None], most[group], high)
    for group in range(len(least) - 1, 0, -1):
        chosen[group - 1] = torch.where(changes[group, :, None], chosen[group - 1], chosen[group])
    return chosen, changes


def _step_words(step: Tensor, zero: Tensor) -> Tensor:
    half = step.to(torch.int32) | (zero.to(torch.int32) * step.to(torch.int32)) << 8
    return (half[:, 0::2] | half[:, 1::2] << 16).t().contiguous()


def unpack_gpu(packed: dict[str, Tensor], format: str) -> Parts:
    """The inverse of pack_gpu, for tests and inspection; group scales are as rounded for the kernels."""
    codes = _unpack_codes(packed["w"], format)
    if format == "bf16":
        return [codes]
    if format == "w8_sym_channel":
        return [codes, packed["w_scale"]]
    if format == "qoq_channel":
        return [codes, (packed["w_zero"].to(torch.int16) + 8).to(torch.uint8), packed["w_scale"]]
    words = packed["groups"].t().contiguous()
    if format in ("mxfp4", "mxfp4_int8"):
        return [codes, words.view(torch.uint8)]
    if format == "w4_asym_g128":
        return [codes, (words & -65536).view(torch.float32), (words & 127).to(torch.uint8)]
    if format in _SCALE_WORD_PACKINGS:
        found = [codes, (words & -256).view(torch.float32), (words & 255).to(torch.uint8)]
        return [*found, _unpack_codes(packed["low"], format)] if "low" in packed else found
    halves = torch.stack((words & 0xFFFF, (words >> 16) & 0xFFFF), -1).flatten(1)
    step, shift = halves & 255, halves >> 8
    return [codes, step.to(torch.uint8), (shift // step.clamp_min(1)).to(torch.uint8), packed["w_scale"]]


def _unpack_codes(blocks: Tensor, format: str) -> Tensor:
    planes = _PACKINGS[format].planes
    if planes > 1:
        bytes_ = blocks.view(torch.uint8).unflatten(-1, (-1, planes // 2))
        nibbles = torch.stack((bytes_ & 15, bytes_ >> 4), -1).flatten(-2)  # [..., items, planes]
        blocks = nibbles.transpose(-1, -2).flatten(-2)
        if format == "qoq_channel":
            blocks = blocks ^ 8
    codes = blocks.transpose(1, 2).flatten(0, 1).flatten(1).contiguous()
    if format == "mxfp4_int8":
        n, k = codes.shape
        codes = codes.view(n, k // 128, *_ITEM_SHAPE[::-1]).permute(0, 1, 4, 3, 2).reshape(n, k)
        exponent = codes & 3
        codes = (codes & 4) << 1 | exponent << 1 | codes >> 3 ^ (exponent == 0)
    return codes


def gpu_blobs(parts: Parts, format: str, activation: str) -> dict[str, Tensor]:
    """pack_gpu's parts as flat uint8 blobs, for weights with this activation type."""
    packing = packing_of(format, activation)
    packed = {"w": parts[0].float()} if packing == "f32" else pack_gpu(parts, packing)
    return {name: as_blob(part) for name, part in packed.items()}


def _gpu_sizes(n: int, k: int, format: str, activation: str) -> dict[str, int]:
    packing = packing_of(format, activation)
    return {"w": -(-4 * n * k // 64) * 64} if packing == "f32" else packed_gpu_bytes(n, k, packing)


def gpu_mixed(marked: Tensor, pairs: bool, k: int) -> Mixed:
    """The packing of a mix_4_8 weight of k inputs whose rows `marked` [N] have 8 bits. `pairs` does not matter here."""
    eight, four = _pad_rows(marked.nonzero()[:, 0]), _pad_rows((~marked).nonzero()[:, 0])
    rows, inputs = len(eight) + len(four), k
    k = padded_inputs(k, "mix_4_8")
    check_shape(rows, k, "mix_4_8")
    sizes = {"wide": len(eight) * k, "w": len(four) * k // 2, "groups": 4 * rows * (k // 128), "columns": 4 * rows}
    sizes = {role: -(-size // 64) * 64 for role, size in sizes.items() if size}

    def blobs(parts: Parts) -> dict[str, Tensor]:
        codes, scale, zero = (_pad_inputs(part, inputs, "mix_4_8") for part in parts[:3])
        order = torch.cat((eight, four))
        real, source = (order >= 0)[:, None], order.clamp(min=0)
        # Rows that pad a tile have a scale of zero.
        scale, zero, codes = torch.where(real, scale[source], 0.0), zero[source], codes[source]
        wide = (codes[: len(eight)].to(torch.int16) - EIGHT_BIT_ZERO).to(torch.int8)
        found = {
            "wide": pack_codes(wide, "w8_sym_channel"),
            "w": pack_codes(codes[len(eight) :], "w4_asym_g128_int8"),
            "groups": scale_words(scale, zero),
            "columns": order.int(),
        }
        return {role: as_blob(found[role]) for role in sizes}

    return Mixed(sizes, blobs, rows // 16, len(eight))


def _pad_rows(rows: Tensor) -> Tensor:
    """Row indices, padded with -1 to whole tiles."""
    return torch.nn.functional.pad(rows, (0, -len(rows) % MIX_ROWS), value=-1)


GPU_PACKING = Packing(packing_of, _gpu_sizes, gpu_blobs, _readable, gpu_mixed)
