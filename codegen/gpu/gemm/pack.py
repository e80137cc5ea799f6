"""Packing of weights for the GPU's GEMM templates, from the parts of a weight (formats/weight.py).

Codes are stored in blocks of 32 rows by B inputs, [N / 32][K / B][32 rows][bytes of a row], so that a program streams
contiguous memory. B is 128, but 256 for w4_asym_g128 and 64 for bf16. One row of a block, bit 0 being the lowest:

    qoq_channel     byte j (0..63): bits 0-3 q[j] - 8, bits 4-7 q[j + 64] - 8, two's complement
    qoq_g128        byte j (0..63): bits 0-3 q[j], bits 4-7 q[j + 64]; the same for w4_asym_g128_int8
    nested_8_4      two tensors: upper nibbles (w; with groups a w4_asym_g128_int8 weight) and lower nibbles (low)
    w4_asym_g128    16 bits j (0..63), little endian: bits 4i .. 4i + 3 are q[j + 64 i]
    mxfp4, nvfp4    16 bits j (0..31), little endian: bits 4i .. 4i + 3 are the E2M1 code of input j + 32 i
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
    nvfp4              [K / 64][N]: byte i the E4M3 scale of the inputs 16 i to 16 i + 15

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

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from qcompile.codegen.packing import MixedPacking, Packing
from qcompile.errors import UnsupportedError
from qcompile.formats.activations import INTEGERS, activation_format
from qcompile.formats.asymmetric import GPU_NIBBLES
from qcompile.formats.blocks import as_blob, blob_bytes
from qcompile.formats.gpu import (
    BLOCK_ROWS,
    MIX_ROWS,
    MXFP4_DOWNSCALE,
    RANGE_ROWS,
    GpuCodes,
    GpuPacking,
    GpuWords,
    padded_outputs,
)
from qcompile.formats.mixed import EIGHT_BIT_ZERO, MIX_4_8
from qcompile.formats.registry import (
    format_of_packing,
    gpu_kernel_for,
    gpu_packing,
    is_row_major,
    packing_of,
    weight_format,
)
from qcompile.formats.rounding import Parts, groups_of
from qcompile.formats.symmetric import GPU_BYTES

_MIN_EXPONENT, _MAX_EXPONENT = 2 + MXFP4_DOWNSCALE, 128 + MXFP4_DOWNSCALE
"""Smallest and largest (biased) exponents of scales for which that is exact."""
_MAX_SCALE_LOG2 = 120
"""log2 of the largest scale of w4_asym_g128 for bf16 activations: kernels multiply by 64 times the scale."""
_MAX_RESCALE_LOG2 = 64
"""log2 of the largest factor by which integer mxfp4 kernels rescale an accumulator from one P to another."""
_ITEM_SHAPE = (4, 8, 4)
"""A block of inputs in mxfp4_int8: groups of 32 inputs, items per group, inputs per item."""


def _readable(format: str, activation: str) -> str | None:
    """Another packing that kernels for these activations can read."""
    others = weight_format(format).gpu.alternatives(activation_format(activation))
    return others[0].packing.name if others else None


def pack_gpu(parts: Parts, packing_name: str) -> dict[str, Tensor]:
    """The parts of a weight, packed, by the names of kernel arguments: w, w_scale, w_zero, groups, ranges, low.

    Outputs are padded with zeros to padded_outputs, inputs to padded_inputs.
    """
    format, packing = format_of_packing(packing_name), gpu_packing(packing_name)
    n, k = parts[0].shape
    more = padded_outputs(n) - n
    if more:
        parts = [pad(part, (*(0, 0) * (part.dim() - 1), 0, more)) for part in parts]
    packing.check_shape(n + more, packing.padded_inputs(k))
    named = format.named([_pad_inputs(part, k, format.group, packing) for part in parts])
    packed = {"w": pack_codes(named["codes"], packing)}
    if packing.row_scale:
        packed["w_scale"] = named["scale"].float().contiguous()
    if packing.row_zero:
        packed["w_zero"] = (named["zero"].to(torch.int16) - 8).to(torch.int8)
    packed |= _WORDS[packing.words](named)
    if packing.tensor_scale:
        packed["tensor_scale"] = named["scale"][:1].contiguous()
    if packing.low:
        packed["low"] = pack_codes(named["low"], packing)
    return packed


def _pad_inputs(part: Tensor, k: int, group: int, packing: GpuPacking) -> Tensor:
    """A part of a weight of k inputs, codes [n, k] or values of groups [n, groups], zero-padded to padded_inputs."""
    if part.dim() == 1:
        return part
    inputs = packing.padded_inputs(k)
    return pad(part, (0, (inputs if part.shape[1] == k else groups_of(inputs, group)) - part.shape[1]))


def packed_gpu_bytes(n: int, k: int, packing_name: str) -> dict[str, int]:
    """Bytes of each part of pack_gpu for a weight [n, k], in its order, rounded up to multiples of 64."""
    packing = gpu_packing(packing_name)
    n, k = padded_outputs(n), packing.padded_inputs(k)
    packing.check_shape(n, k)
    codes = n * k * packing.codes.bits // 8
    words = 4 * n * (k // packing.word_inputs) if packing.words is not GpuWords.NONE else 0
    sizes = {
        "w": codes,
        "w_scale": 4 * n * packing.row_scale,
        "w_zero": n * packing.row_zero,
        "groups": words,
        "ranges": words * packing.has_ranges,
        "tensor_scale": 4 * packing.tensor_scale,
        "low": codes * packing.low,
    }
    return {name: blob_bytes(size) for name, size in sizes.items() if size}


def pack_codes(codes: Tensor, packing: GpuPacking) -> Tensor:
    """Codes [n, k] in the block layout of a packing."""
    planes, inputs = packing.planes, packing.block
    n, k = codes.shape
    if packing.codes is GpuCodes.PERMUTED_E2M1:
        codes = _permuted_e2m1(codes).view(n, k // inputs, *_ITEM_SHAPE).permute(0, 1, 4, 3, 2).contiguous()
    blocks = codes.view(n // BLOCK_ROWS, BLOCK_ROWS, k // inputs, planes, inputs // planes).transpose(1, 2).contiguous()
    if planes == 1:
        return blocks.squeeze(3)
    if packing.codes is GpuCodes.SIGNED_NIBBLES:
        blocks = blocks ^ 8  # q - 8 in two's complement
    if planes == 2:
        return (blocks[..., 0, :] | (blocks[..., 1, :] << 4)).view(torch.int8)
    low = blocks[..., 0, :] | (blocks[..., 1, :] << 4)
    high = blocks[..., 2, :] | (blocks[..., 3, :] << 4)
    return torch.stack((low, high), -1).view(torch.int16).squeeze(-1)


def _permuted_e2m1(codes: Tensor) -> Tensor:
    """E2M1 codes with the bits of mxfp4_int8; -0 becomes 0."""
    exponent = codes >> 1 & 3
    permuted = (codes & 1 ^ (exponent == 0)) << 3 | (codes & 8) >> 1 | exponent
    return permuted.masked_fill_(codes == 8, 8)


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


def _byte_words(values: Tensor) -> Tensor:
    """uint8 [n, 4 * words] -> words [words, n]."""
    return values.contiguous().view(torch.int32).t().contiguous()


_WORDS: dict[GpuWords, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    GpuWords.NONE: lambda named: {},
    GpuWords.STEPS: lambda named: {"groups": _step_words(named["group_scale"], named["zero"])},
    GpuWords.BF16_SCALES: lambda named: {"groups": _bf16_words(named["codes"], named["scale"], named["zero"])},
    GpuWords.SCALES: lambda named: {"groups": scale_words(named["scale"], named["zero"])},
    GpuWords.BF16_POWERS: lambda named: {"groups": _byte_words(_exponents(named["codes"], named["exponent"]))},
    GpuWords.POWERS_AND_RANGES: lambda named: {
        "groups": _byte_words(named["exponent"]),
        "ranges": _ranges(named["codes"], named["exponent"]),
    },
    GpuWords.E4M3_SCALES: lambda named: {"groups": _byte_words(named["group_scale"])},
}
"""Words of groups, by what they hold, from the parts of a weight by role."""


def _unpack_steps(words: Tensor) -> dict[str, Tensor]:
    halves = torch.stack((words & 0xFFFF, (words >> 16) & 0xFFFF), -1).flatten(1)
    step, shift = halves & 255, halves >> 8
    return {"group_scale": step.to(torch.uint8), "zero": (shift // step.clamp_min(1)).to(torch.uint8)}


_PARTS_OF_WORDS: dict[GpuWords, Callable[[Tensor], dict[str, Tensor]]] = {
    GpuWords.NONE: lambda words: {},
    GpuWords.STEPS: _unpack_steps,
    GpuWords.BF16_SCALES: lambda words: {
        "scale": (words & -65536).view(torch.float32),
        "zero": (words & 127).to(torch.uint8),
    },
    GpuWords.SCALES: lambda words: {"scale": (words & -256).view(torch.float32), "zero": (words & 255).to(torch.uint8)},
    GpuWords.BF16_POWERS: lambda words: {"exponent": words.view(torch.uint8)},
    GpuWords.POWERS_AND_RANGES: lambda words: {"exponent": words.view(torch.uint8)},
    GpuWords.E4M3_SCALES: lambda words: {"group_scale": words.view(torch.uint8)},
}
"""Parts of a weight by role, from the words [n, groups] of a packing."""


def unpack_gpu(packed: dict[str, Tensor], packing_name: str) -> Parts:
    """The inverse of pack_gpu, for tests and inspection; group scales are as rounded for the kernels."""
    packing = gpu_packing(packing_name)
    named = {"codes": _unpack_codes(packed["w"], packing)}
    if packing.row_scale:
        named["scale"] = packed["w_scale"]
    if packing.row_zero:
        named["zero"] = (packed["w_zero"].to(torch.int16) + 8).to(torch.uint8)
    if "groups" in packed:
        named |= _PARTS_OF_WORDS[packing.words](packed["groups"].t().contiguous())
    if packing.tensor_scale:
        named["scale"] = packed["tensor_scale"]
    if packing.low:
        named["low"] = _unpack_codes(packed["low"], packing)
    return [named[role] for role in format_of_packing(packing_name).roles]


def _unpack_codes(blocks: Tensor, packing: GpuPacking) -> Tensor:
    planes = packing.planes
    if planes > 1:
        bytes_ = blocks.view(torch.uint8).unflatten(-1, (-1, planes // 2))
        nibbles = torch.stack((bytes_ & 15, bytes_ >> 4), -1).flatten(-2)  # [..., items, planes]
        blocks = nibbles.transpose(-1, -2).flatten(-2)
        if packing.codes is GpuCodes.SIGNED_NIBBLES:
            blocks = blocks ^ 8
    codes = blocks.transpose(1, 2).flatten(0, 1).flatten(1).contiguous()
    if packing.codes is GpuCodes.PERMUTED_E2M1:
        n, k = codes.shape
        codes = codes.view(n, k // 128, *_ITEM_SHAPE[::-1]).permute(0, 1, 4, 3, 2).reshape(n, k)
        exponent = codes & 3
        codes = (codes & 4) << 1 | exponent << 1 | codes >> 3 ^ (exponent == 0)
    return codes


def gpu_blobs(parts: Parts, format: str, activation: str) -> dict[str, Tensor]:
    """pack_gpu's parts as flat uint8 blobs, for weights with this activation format."""
    if is_row_major(format, activation):
        packed = {"w": parts[0].float()}
    else:
        packed = pack_gpu(parts, gpu_kernel_for(format, activation).packing.name)
    return {name: as_blob(part) for name, part in packed.items()}


def _gpu_sizes(n: int, k: int, format: str, activation: str) -> dict[str, int]:
    if is_row_major(format, activation):
        return {"w": blob_bytes(4 * n * k)}
    return packed_gpu_bytes(n, k, gpu_kernel_for(format, activation).packing.name)


def gpu_mixed(marked: Tensor, pairs: bool, k: int) -> MixedPacking:
    """The packing of a mix_4_8 weight of k inputs; its rows `marked` [N] have 8 bits. `pairs` has no effect on GPUs."""
    eight, four = _pad_rows(marked.nonzero()[:, 0]), _pad_rows((~marked).nonzero()[:, 0])
    rows, inputs = len(eight) + len(four), k
    packing = gpu_kernel_for(MIX_4_8.name, INTEGERS[0].name).packing
    k = packing.padded_inputs(k)
    packing.check_shape(rows, k)
    sizes = {"wide": len(eight) * k, "w": len(four) * k // 2, "groups": 4 * rows * (k // 128), "columns": 4 * rows}
    sizes = {role: blob_bytes(size) for role, size in sizes.items() if size}

    def blobs(parts: Parts) -> dict[str, Tensor]:
        codes, scale, zero = (_pad_inputs(part, inputs, MIX_4_8.group, packing) for part in parts[:3])
        order = torch.cat((eight, four))
        real, source = (order >= 0)[:, None], order.clamp(min=0)
        # Rows that pad a tile have a scale of zero.
        scale, zero, codes = torch.where(real, scale[source], 0.0), zero[source], codes[source]
        wide = (codes[: len(eight)].to(torch.int16) - EIGHT_BIT_ZERO).to(torch.int8)
        packed = {
            "wide": pack_codes(wide, GPU_BYTES),
            "w": pack_codes(codes[len(eight) :], GPU_NIBBLES),
            "groups": scale_words(scale, zero),
            "columns": order.int(),
        }
        return {role: as_blob(packed[role]) for role in sizes}

    return MixedPacking(sizes, blobs, rows // 16, len(eight))


def _pad_rows(rows: Tensor) -> Tensor:
    """Row indices, padded with -1 to whole tiles."""
    return torch.nn.functional.pad(rows, (0, -len(rows) % MIX_ROWS), value=-1)


GPU_PACKING = Packing(packing_of, _gpu_sizes, gpu_blobs, _readable, gpu_mixed)
