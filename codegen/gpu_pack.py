"""Packing of weights for the GPU's GEMM templates, from the parts of qcompile.numerics.quantize_weight.

Codes lie in blocks of 32 rows by B inputs: [N / 32][K / B][32 rows][bytes of a row], so that what a program
streams is contiguous. B is 128, for w4_asym_g128 256. Within one row of a block, bit 0 the lowest:

    qoq_channel     byte j (0..63): bits 0-3 q[j] - 8, bits 4-7 q[j + 64] - 8, two's complement
    qoq_g128        byte j (0..63): bits 0-3 q[j], bits 4-7 q[j + 64]; w4_asym_g128_int8 alike
    nested_8_4      two planes, of upper nibbles (w, with groups a w4_asym_g128_int8 weight) and lower ones (low)
    w4_asym_g128    16 bits j (0..63), little endian: bits 4i .. 4i + 3 are q[j + 64 i]
    mxfp4           16 bits j (0..31), little endian: bits 4i .. 4i + 3 are the E2M1 code of input j + 32 i
    w8_sym_channel  byte j (0..127): q[j]
    bf16            value j (0..63)

Weights in f32, of routers of experts, are row-major.

A mix_4_8 weight has its rows of 8 bits first (wide), as a w8_sym_channel weight, then those of 4 (w), as a
w4_asym_g128_int8 weight; the words of all rows are the latter's (groups), and each row carries the output column it
is for (columns, int32 [rows], -1 where rows of a width are filled up to a multiple of MIX_ROWS).

Per group, one 32-bit word each, with rows innermost so that a program's rows are contiguous:

    qoq_g128           [K / 256][N]: bits 0-7 step, 8-15 zero * step of the even group; 16-23, 24-31 of the odd one
    w4_asym_g128       [K / 128][N]: bits 0-15 -(128 + zero) as bf16, exact; 16-31 the scale rounded to bf16
    w4_asym_g128_int8  [K / 128][N]: bits 0-7 zero; the rest the scale's upper 24 bits, rounded (within 2^-16);
                         nested_8_4 alike
    mxfp4              [K / 128][N]: byte i the exponent of the inputs 32 i to 32 i + 31

mxfp4_int8 has the same words, and its codes and another word a group as byte permutations and integers want them
(unpack.jinja). Item j (0..31) has inputs 32 (j % 4) + 4 (j / 4) + i in bits 4i .. 4i + 3; a code e of two bits, a sign
and a bit m is 2^(e - 1) or, with m, 1.5 times that where e is not 0, and 0 where it is. Of the words (ranges) bits
23-30 are the exponent of a power of two such that those of all inputs are 2^0 to 2^3 times it, and bits 4 i to 4 i + 3
what they are times it. It stays from group to group while it can: where it does not in some of 64 rows, their words are
negative. Where it cannot be so in some group of a row, or a row's powers are more than 2^64 apart, the first words of
its 64 rows are.

Per row: scales f32 [N]; of qoq_channel also zero - 8 as int8 [N].

A packing has the name of its number format, but for what meets int8 activations. Where weights
meet bf16 activations their scales are rounded to bf16, as their products with the codes are anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from qcompile.codegen.packing import Mixed, Packing
from qcompile.errors import UnsupportedError
from qcompile.mix import EIGHT_BIT_ZERO
from qcompile.numerics import FORMATS, INTEGER_ACTIVATIONS, Parts, as_blob, groups_of

BLOCK_ROWS = 32
MIX_ROWS = 64
_WIDE = 4096


@dataclass(frozen=True)
class _Packing:
    format: str  # of numerics
    block: int  # inputs packed together
    planes: int  # parts of a block whose codes share an item
    inputs: int  # K is a multiple of it


_PACKINGS = {
    "qoq_channel": _Packing("qoq_channel", 128, 2, 128),
    "qoq_g128": _Packing("qoq_g128", 128, 2, 256),
    "w4_asym_g128": _Packing("w4_asym_g128", 256, 4, 256),
    "w4_asym_g128_int8": _Packing("w4_asym_g128", 128, 2, 128),
    "nested_8_4": _Packing("nested_8_4", 128, 2, 128),
    "mxfp4": _Packing("mxfp4", 128, 4, 128),
    "mxfp4_int8": _Packing("mxfp4", 128, 4, 128),
    "mix_4_8": _Packing("mix_4_8", 128, 2, 128),  # by gpu_mix
    "w8_sym_channel": _Packing("w8_sym_channel", 128, 1, 128),
    "bf16": _Packing("bf16", 64, 1, 64),
}

RANGE_ROWS = 64
"""Rows that share the range flags of mxfp4_int8: those of one consumer warp group."""
MXFP4_DOWNSCALE = 32
"""bf16 kernels use mxfp4 weights times 2^-32, so that one product both converts a code and scales it."""
_LEAST, _MOST = 2 + MXFP4_DOWNSCALE, 128 + MXFP4_DOWNSCALE
"""Least and largest (biased) exponents of scales for which that is exact."""
_LARGEST = 120
"""Exponent of the largest scale of w4_asym_g128 for bf16: kernels multiply by 64 times the scale."""
_FARTHEST = 64
"""Accumulators are rescaled from one exponent to another at most this far from it."""
_IN_ITEMS = (4, 8, 4)
"""Shape of a block of inputs: planes of 32 inputs, items of a plane, inputs of an item."""
_SCALED_WORDS = ("w4_asym_g128_int8", "nested_8_4")
"""Packings whose words hold a zero point and the upper 24 bits of a scale."""


def packing_of(format: str, activation: str) -> str:
    """The packing of a weight in `format` that meets activations of a type of numerics.ACTIVATIONS.

    UnsupportedError where there are no GPU kernels.
    """
    if format == activation == "f32":  # routers of experts
        return "f32"
    integers = activation in INTEGER_ACTIVATIONS
    name = f"{format}_int8" if format in ("w4_asym_g128", "mxfp4") and integers else format
    floats = activation == "bf16" and name in ("w4_asym_g128", "bf16", "mxfp4")
    # Activations in groups need sums in groups.
    grouped = integers and name in ("w4_asym_g128_int8", "nested_8_4", "mxfp4_int8", "mix_4_8")
    if name not in _PACKINGS or not (floats or grouped or (activation in ("int8", "int4") and name != "bf16")):
        raise UnsupportedError(f"weights in {format} with activations in {activation} have no GPU kernels")
    return name


def kernel_of(packing: str, activation: str) -> str:
    """The format of the GEMM kernels (triton.KernelSpec) that read a packing with such activations."""
    name = packing.removesuffix("_int8") if packing == "mxfp4_int8" else packing
    return f"{name}_a8" if name in ("w4_asym_g128", "mxfp4") and activation != "bf16" else name


def _readable(format: str, activation: str) -> str | None:
    """What another packing serves too: of w4_asym_g128 that for bf16 activations."""
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
    """Inputs of a packed weight of k inputs: whole blocks. What they are filled up with meets activations of zero."""
    step = _PACKINGS[packing].inputs
    return -(-k // step) * step


def padded_outputs(n: int) -> int:
    """Rows of a packed weight of n outputs: whole blocks, and whole tiles where there are many."""
    step = BLOCK_ROWS if n <= _WIDE else 4 * BLOCK_ROWS
    return n if n % BLOCK_ROWS == 0 else -(-n // step) * step


def pack_gpu(parts: Parts, format: str) -> dict[str, Tensor]:
    """The parts of a weight, packed, by the names of the kernels' arguments: w, w_scale, w_zero, groups, low.

    Outputs are filled up with zeros to padded_outputs, inputs to padded_inputs.
    """
    n, k = parts[0].shape
    more = padded_outputs(n) - n
    if more:
        parts = [pad(part, (*(0, 0) * (part.dim() - 1), 0, more)) for part in parts]
    check_shape(n + more, padded_inputs(k, format), format)
    parts = [_padded_inputs(part, k, format) for part in parts]
    named = dict(zip(FORMATS[_PACKINGS[format].format].roles, parts, strict=True))
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
    if format in _SCALED_WORDS:
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


def _padded_inputs(part: Tensor, k: int, packing: str) -> Tensor:
    """A part of a weight of k inputs, codes [n, k] or what is of groups [n, groups], with zeros for further inputs."""
    if part.dim() == 1:
        return part
    inputs, group = padded_inputs(k, packing), FORMATS[_PACKINGS[packing].format].group
    return pad(part, (0, (inputs if part.shape[1] == k else groups_of(inputs, group)) - part.shape[1]))


def packed_gpu_bytes(n: int, k: int, format: str) -> dict[str, int]:
    """Bytes of each part of pack_gpu for a weight [n, k] in its order, filled up to a multiple of 64."""
    n, k = padded_outputs(n), padded_inputs(k, format)
    check_shape(n, k, format)
    codes = {"bf16": 2 * n * k, "w8_sym_channel": n * k}.get(format, n * k // 2)
    sizes = {"w": codes}
    if format in ("qoq_channel", "qoq_g128", "w8_sym_channel"):
        sizes["w_scale"] = 4 * n
    if format == "qoq_channel":
        sizes["w_zero"] = n
    if "g128" in format or format in (*_SCALED_WORDS, "mxfp4", "mxfp4_int8"):
        sizes["groups"] = 4 * n * (k // 256 if format == "qoq_g128" else k // 128)
    if format == "mxfp4_int8":
        sizes["ranges"] = sizes["groups"]
    if format == "nested_8_4":
        sizes["low"] = codes
    return {name: -(-size // 64) * 64 for name, size in sizes.items()}


def pack_codes(codes: Tensor, format: str) -> Tensor:
    """Codes [n, k] in the blocks of a packing."""
    planes, inputs = _PACKINGS[format].planes, _PACKINGS[format].block
    n, k = codes.shape
    if format == "mxfp4_int8":
        codes = _permuted_e2m1(codes).view(n, k // inputs, *_IN_ITEMS).permute(0, 1, 4, 3, 2).contiguous()
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
    """E2M1 codes as mxfp4_int8 has them. There is no -0."""
    exponent = codes >> 1 & 3
    found = (codes & 1 ^ (exponent == 0)) << 3 | (codes & 8) >> 1 | exponent
    return found.masked_fill_(codes == 8, 8)


def scale_words(scale: Tensor, zero: Tensor) -> Tensor:
    """Words [groups, n] of the upper 24 bits of scales [n, groups], rounded, and zero points."""
    words = (scale.float().contiguous().view(torch.int32) + 128) & -256
    return (words | zero.to(torch.int32)).t().contiguous()


def _scale_error(codes: Tensor, format: str, power: int) -> UnsupportedError:
    n, k = codes.shape
    return UnsupportedError(f"weight [{n}, {k}] in {format}: GPU kernels need scales of at most 2^{power}")


def _bf16_words(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Words [groups, n] of codes [n, k], scales and zero points [n, groups]; UnsupportedError for scales too large."""
    if (scale > 2.0**_LARGEST).any():
        raise _scale_error(codes, "w4_asym_g128", _LARGEST)
    high = scale.to(torch.bfloat16).contiguous().view(torch.int16).to(torch.int32) << 16
    low = (-128 - zero.float()).to(torch.bfloat16).view(torch.int16).to(torch.int32) & 0xFFFF
    return (high | low).t().contiguous()


def _exponents(codes: Tensor, exponent: Tensor) -> Tensor:
    """Those of mxfp4, uint8 [n, k / 32], for E2M1 codes [n, k]: of groups of zeros that of 1, too small ones 2^-93.

    UnsupportedError where scales are more than 2^33.
    """
    used = ((codes & 7) != 0).view(len(codes), -1, 32).any(-1)
    if (used & (exponent > _MOST)).any():
        raise _scale_error(codes, "mxfp4", _MOST - 127)
    return torch.where(used, exponent.clamp_min(_LEAST), 127)


def _ranges(codes: Tensor, exponent: Tensor) -> Tensor:
    """Words [groups, n] of mxfp4_int8 for E2M1 codes [n, k]; inputs that are all zero have any power of two."""
    n, k = codes.shape
    blocks, more = -(-n // RANGE_ROWS), -n % RANGE_ROWS
    used = pad(((codes & 7) != 0).view(n, k // 128, 4, 32).any(-1), (0, 0, 0, 0, 0, more))
    powers = torch.where(used, pad(exponent.view(n, k // 128, 4).to(torch.int32), (0, 0, 0, 0, 0, more)), 0)
    most = torch.where(used, powers, 255).amin(-1)  # what the power of a group may be at most, and at least
    least = (powers.amax(-1) - 3).clamp_min(1)
    too_far = (least > most) | (most.clamp_max(254).amin(1) < least.amax(1) - _FARTHEST)[:, None]
    far = too_far.view(blocks, -1).any(1)
    chosen, changes = _held_powers(least.t().view(-1, blocks, RANGE_ROWS), most.t().view(-1, blocks, RANGE_ROWS))
    changes &= ~far
    changes[0] = far
    chosen = chosen.flatten(1)
    shifts = (powers - chosen.t()[..., None]).clamp(0, 3) + torch.arange(0, 16, 4, device=codes.device)
    words = chosen << 23 | (torch.ones_like(powers) << shifts).sum(-1, dtype=torch.int32).t()
    words |= changes.to(torch.int32).repeat_interleave(RANGE_ROWS, 1) << 31
    return words[:, :n].contiguous()


def _held_powers(least: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
    """Powers [groups, blocks, rows] within bounds, and [groups, blocks] where a row's is not that of the group before.

    Rows of a block change together, and only where one of them must.
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
    """The parts that pack_gpu was given (tests and inspection); scales of groups as rounded for the kernels."""
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
    if format in _SCALED_WORDS:
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
        codes = codes.view(n, k // 128, *_IN_ITEMS[::-1]).permute(0, 1, 4, 3, 2).reshape(n, k)
        exponent = codes & 3
        codes = (codes & 4) << 1 | exponent << 1 | codes >> 3 ^ (exponent == 0)
    return codes


def gpu_blobs(parts: Parts, format: str, activation: str) -> dict[str, Tensor]:
    """pack_gpu's parts as flat uint8 blobs, for weights that meet such activations."""
    packing = packing_of(format, activation)
    packed = {"w": parts[0].float()} if packing == "f32" else pack_gpu(parts, packing)
    return {name: as_blob(part) for name, part in packed.items()}


def _gpu_sizes(n: int, k: int, format: str, activation: str) -> dict[str, int]:
    packing = packing_of(format, activation)
    return {"w": -(-4 * n * k // 64) * 64} if packing == "f32" else packed_gpu_bytes(n, k, packing)


def gpu_mixed(marked: Tensor, pairs: bool, k: int) -> Mixed:
    """The packing of a weight of k inputs whose rows `marked` [N] have 8 bits; `pairs` are no matter: rows scatter."""
    eight, four = _padded_rows(marked.nonzero()[:, 0]), _padded_rows((~marked).nonzero()[:, 0])
    rows, inputs = len(eight) + len(four), k
    k = padded_inputs(k, "mix_4_8")
    check_shape(rows, k, "mix_4_8")
    sizes = {"wide": len(eight) * k, "w": len(four) * k // 2, "groups": 4 * rows * (k // 128), "columns": 4 * rows}
    sizes = {role: -(-size // 64) * 64 for role, size in sizes.items() if size}

    def blobs(parts: Parts) -> dict[str, Tensor]:
        codes, scale, zero = (_padded_inputs(part, inputs, "mix_4_8") for part in parts[:3])
        order = torch.cat((eight, four))
        real, source = (order >= 0)[:, None], order.clamp(min=0)
        # What fills a tile up has a scale of zero.
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


def _padded_rows(rows: Tensor) -> Tensor:
    """Numbers of rows, and -1 up to whole tiles."""
    return torch.nn.functional.pad(rows, (0, -len(rows) % MIX_ROWS), value=-1)


GPU_PACKING = Packing(packing_of, _gpu_sizes, gpu_blobs, _readable, gpu_mixed)
