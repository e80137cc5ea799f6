"""Weights as compressed-tensors stores them (vllm-project/compressed-tensors, compressors/pack_quantized and others).

NAME.weight [outputs, inputs] is (code - zero) * scale in float32. NAME.weight_scale is [outputs, groups].

- `pack-quantized`: NAME.weight_packed int32 [outputs, inputs * bits / 32] has earlier inputs in lower bits, without
  gaps, and 2^(bits - 1) is added to each code. NAME.weight_shape has the numbers of outputs and inputs. If the scheme
  is not symmetric, NAME.weight_zero_point int32 [outputs * bits / 32, groups] is packed in the same way; with strategy
  `tensor` it is int8 [1], and nothing is added. If groups may have inputs in any order (releases up to 0.9),
  NAME.weight_g_idx int32 [inputs] is the group of each input, or -1 everywhere for groups of consecutive inputs.
- `nvfp4-pack-quantized`: NAME.weight_packed uint8 [outputs, inputs / 2], two E2M1 codes a byte, the earlier input in
  the low half; NAME.weight_scale, E4M3 [outputs, inputs / 16]; NAME.weight_global_scale f32 [1], by which scales are
  divided.
- `mxfp4-pack-quantized`: NAME.weight_packed as there; NAME.weight_scale, uint8 [outputs, inputs / 32], is the exponent
  of a power of two, plus 127. `mxfp8-quantized` has such scales of NAME.weight, 8-bit floats.
- `int-quantized`, `float-quantized`, `naive-quantized`: NAME.weight is int8 or 8-bit floats. NAME.weight_zero_point,
  if present, has the same type and the shape of the scales. With strategy `block`, NAME.weight_scale has a factor for
  each block of rows and columns.

Modules may differ: see compressed_targets.py. The recipe decides how activations and the cache are rounded, so stored
scales for these have no effect. Anything else that changes the model's function (rotations, sparsity) is refused.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qcompile.checkpoints.checkpoint import StoredCheckpoint
from qcompile.checkpoints.stored.compressed_targets import ModuleSchemes, module_schemes
from qcompile.checkpoints.stored.groups import (
    ACTIVATIONS,
    WORD,
    Find,
    Groups,
    dequantize,
    e2m1_shape,
    forget,
    from_fp8,
    from_mxfp8,
    groups_of,
    nibbles,
    one_of,
    require,
    require_none_left,
    unpack_filled,
    words_of,
)
from qcompile.errors import UnsupportedError, UsageError
from qcompile.formats.mxfp4 import MXFP4
from qcompile.formats.nvfp4 import NVFP4

METHOD = "compressed-tensors"
STATUS = ("compressed", "frozen")
"""What a configuration says of codes that are stored. Early releases wrote `frozen`, and of rounded floats too: those
leave scales behind, which are refused."""
PACKED = "pack-quantized"
NVFP4_PACKED = "nvfp4-pack-quantized"
MXFP4_PACKED = "mxfp4-pack-quantized"
E2M1_PACKED = {NVFP4_PACKED: ("tensor_group", NVFP4.group), MXFP4_PACKED: ("group", MXFP4.group)}
"""Formats with two E2M1 codes a byte, what their scales belong to, and the inputs in a group."""
MXFP8 = "mxfp8-quantized"
FORMATS = (PACKED, "int-quantized", "float-quantized", "naive-quantized", MXFP8, *E2M1_PACKED)
NUMBERS = {"int": torch.int8, "float": torch.float8_e4m3fn}
"""Types of stored weights that are not packed, by what the configuration calls them."""
REST = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale")


@dataclass(frozen=True)
class CompressedScheme:
    """How weights are stored. A scale covers `group` inputs of one output (0: all), the whole tensor, or a
    `block` of rows and columns.
    """

    format: str
    kind: str
    bits: int
    symmetric: bool
    group: int
    whole: bool = False
    ordered: bool = False
    block: tuple[int, int] | None = None

    def groups(self, inputs: int) -> tuple[int, int]:
        """(inputs in a group, groups) of a weight."""
        size = self.group or inputs
        return size, -(-inputs // size)


# ---- the configuration -----------------------------------------------------------------------------


def compressed_tensors(quantization: dict[str, Any]) -> Find:
    """The reader for a checkpoint with this `quantization_config`. Raises UnsupportedError, UsageError."""
    one_of(METHOD, "quantization_status", quantization.get("quantization_status") or STATUS[0], STATUS)
    for key, inner in (("sparsity_config", "format"), ("transform_config", "config_groups")):
        if not _says_nothing(quantization.get(key), inner):
            raise UnsupportedError(f"{METHOD} checkpoints with a {key} are not read")
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        raise UsageError(f"config_groups of the checkpoint's {METHOD} weights do not say how they are stored")
    format = quantization.get("format")
    schemes = [(name, group.get("targets"), _scheme(name, group, format)) for name, group in groups.items()]
    return functools.partial(_find, schemes=module_schemes(schemes))


def _says_nothing(value: Any, key: str) -> bool:
    """Whether `value` is empty, or an object with an empty or "dense" entry `key`."""
    return not value or (isinstance(value, dict) and value.get(key, value) in (None, {}, "dense"))


def _scheme(name: str, group: dict[str, Any], format: Any) -> CompressedScheme:
    """The scheme of one of `config_groups`, called `name`."""
    format = one_of(METHOD, "format", group.get("format") or format, FORMATS)
    if group.get("output_activations"):
        raise UnsupportedError(f"{METHOD} weights with output_activations ({name}) are not read")
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise UsageError(f"config_groups of the checkpoint's {METHOD} weights: {name} has no weights")
    if format in E2M1_PACKED:
        return _float_scheme(format, weights, 4, *E2M1_PACKED[format])
    if format == MXFP8:
        return _float_scheme(format, weights, 8, "group", MXFP4.group)
    kinds = ("int",) if format in (PACKED, "int-quantized") else ("float",) if format == "float-quantized" else ()
    kind = one_of(METHOD, "type", weights.get("type", "int"), kinds or tuple(NUMBERS))
    bits = one_of(METHOD, "num_bits", weights.get("num_bits", 8), tuple(range(2, 9)) if format == PACKED else (8,))
    symmetric = one_of(METHOD, "symmetric", weights.get("symmetric", True), (True, False))
    size: Any = weights.get("group_size")
    inferred = "tensor" if size is None else "channel" if size == -1 else "group"
    strategies = ("group", "channel", "tensor") if format == PACKED else ("group", "channel", "tensor", "block")
    strategy = one_of(METHOD, "strategy", weights.get("strategy") or inferred, strategies)
    grouped = strategy == "group"
    if grouped and (type(size) is not int or size < 1):
        raise UsageError(f"group_size of the checkpoint's {METHOD} weights is {size}; it must be a number of inputs")
    if strategy == "block":
        one_of(METHOD, "symmetric", symmetric, (True,))
        return CompressedScheme(format, kind, bits, True, 0, block=_block(weights.get("block_structure")))
    ordered = grouped and weights.get("actorder") in ("group", "dynamic")
    return CompressedScheme(format, kind, bits, symmetric, size if grouped else 0, strategy == "tensor", ordered)


def _block(sides: Any) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    if not (isinstance(sides, list) and len(sides) == 2 and all(type(side) is int and side > 0 for side in sides)):
        raise UsageError(
            f"block_structure of the checkpoint's {METHOD} weights is {sides}; rows and columns belong there"
        )
    return sides[0], sides[1]


def _float_scheme(format: str, weights: dict[str, Any], bits: int, strategy: str, group: int) -> CompressedScheme:
    """The scheme of floats with scales of their own type; UnsupportedError for what is stored in another way."""
    choices = {"num_bits": (bits,), "type": ("float",), "symmetric": (True,), "group_size": (group,)}
    for key, values in choices.items():
        one_of(METHOD, key, weights.get(key, values[0]), values)
    one_of(METHOD, "strategy", weights.get("strategy") or strategy, (strategy,))
    return CompressedScheme(format, "float", bits, True, group)


# ---- the weights -----------------------------------------------------------------------------------


def _find(checkpoint: StoredCheckpoint, schemes: ModuleSchemes[CompressedScheme]) -> None:
    for name in list(checkpoint):
        stem, packed = name.removesuffix("_packed"), name.endswith("_packed")
        if not stem.endswith(".weight") or not (packed or checkpoint.entries[name].dtype.itemsize == 1):
            continue
        scheme = schemes.scheme(stem.removesuffix(".weight"))
        add = _ADD.get(scheme.format)
        if packed and add:
            add(checkpoint, stem, scheme)
        elif not packed and not add:
            _add_plain(checkpoint, stem, scheme)
    forget(checkpoint, ACTIVATIONS)
    require_none_left(checkpoint, tuple(f".{ending}" for ending in REST))


def _add_packed(checkpoint: StoredCheckpoint, name: str, scheme: CompressedScheme) -> None:
    """Add the weight `name`, computed from NAME_packed and its other tensors."""
    bits = scheme.bits
    outputs, _ = words_of(checkpoint, f"{name}_packed")
    inputs = _inputs(checkpoint, name, outputs)
    require(checkpoint, f"{name}_packed", (outputs, -(-inputs * bits // WORD)), torch.int32)
    size, count = scheme.groups(inputs)
    require(checkpoint, f"{name}_scale", _sides(checkpoint, name, scheme, (outputs, count)))
    parts = {"words": f"{name}_packed", "scales": f"{name}_scale", "shape": f"{name}_shape"}
    if not scheme.symmetric:
        if scheme.whole:
            require(checkpoint, f"{name}_zero_point", checkpoint.entries[f"{name}_scale"].shape, torch.int8)
        else:
            require(checkpoint, f"{name}_zero_point", (-(-outputs * bits // WORD), count), torch.int32)
        parts["zeros"] = f"{name}_zero_point"
    if scheme.ordered or (scheme.group and f"{name}_g_idx" in checkpoint):
        require(checkpoint, f"{name}_g_idx", (inputs,), torch.int32)
        parts["index"] = f"{name}_g_idx"

    def make(*tensors: Tensor) -> Tensor:
        named = dict(zip(parts, tensors, strict=True))
        named.pop("shape")
        return from_packed(name, inputs, bits, size, **named)

    checkpoint.add(name, (outputs, inputs), tuple(parts.values()), make)


def _sides(
    checkpoint: StoredCheckpoint, name: str, scheme: CompressedScheme, sides: tuple[int, ...]
) -> tuple[int, ...]:
    """The shape of the scales of the weight `name`: `sides`, or that of one scale of the whole weight."""
    if not scheme.whole:
        return sides
    entry = checkpoint.entries.get(f"{name}_scale")
    return () if entry is not None and not entry.shape else (1,)


def _inputs(checkpoint: StoredCheckpoint, name: str, outputs: int) -> int:
    """The number of inputs of the weight `name` according to NAME_shape."""
    entry = checkpoint.entries.get(f"{name}_shape")
    if entry is None or entry.shape != (2,) or entry.dtype not in (torch.int32, torch.int64):
        raise UsageError(f"tensor {name}_shape is missing or no pair of whole numbers")
    rows, inputs = checkpoint.map(f"{name}_shape", entry).tolist()
    if rows != outputs or inputs < 1:
        raise UsageError(f"tensor {name}_shape says [{rows}, {inputs}]; {name}_packed has {outputs} outputs")
    return int(inputs)


def from_packed(
    name: str,
    inputs: int,
    bits: int,
    size: int,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    index: Tensor | None = None,
) -> Tensor:
    """Words [outputs, inputs * bits / 32] and NAME's other tensors -> the weight NAME, float32 [outputs, inputs]."""
    outputs, middle = len(words), 2 ** (bits - 1)  # the middle is added to each code and each packed zero
    zero: Tensor | int = middle
    if zeros is not None and scales.dim() < 2:
        zero = (zeros.to(torch.int32) + middle).expand(outputs, 1)
    elif zeros is not None:
        zero = _codes(zeros, bits, 0)[:outputs]
    groups: Groups = size
    if index is not None and not bool((index == -1).all()):
        groups = groups_of(f"{name}_g_idx", index, size, scales.shape[1])
    scales = scales if scales.dim() == 2 else scales.expand(outputs, 1)
    return dequantize(inputs, lambda band: _codes(words[band], bits, 1)[:, :inputs], scales, zero, groups)


def _codes(words: Tensor, bits: int, dim: int) -> Tensor:
    """int32 words that are filled without gaps, the last ones in part -> at least as many codes as they hold."""
    missing = -words.shape[dim] % bits if WORD % bits else 0
    sides = [missing if axis == dim else side for axis, side in enumerate(words.shape)]
    return unpack_filled(torch.cat((words, words.new_zeros(sides)), dim) if missing else words, bits, dim)


def _add_nvfp4(checkpoint: StoredCheckpoint, name: str, scheme: CompressedScheme) -> None:
    """Make the weight `name` of NAME_packed, NAME_scale and NAME_global_scale.

    The scale of activations that may be stored beside them rounds activations, which the recipe decides.
    """
    outputs, inputs = e2m1_shape(checkpoint, name, f"{name}_packed", NVFP4.group, torch.float8_e4m3fn)
    total = checkpoint.entries.get(f"{name}_global_scale")
    require(checkpoint, f"{name}_global_scale", () if total is not None and not total.shape else (1,), torch.float32)
    parts = [f"{name}_packed", f"{name}_scale", f"{name}_global_scale"]
    ignored = f"{name.removesuffix('weight')}input_global_scale"
    parts += [ignored] if ignored in checkpoint else []

    def make(packed: Tensor, scales: Tensor, global_scale: Tensor, *_: Tensor) -> Tensor:
        return from_nvfp4(packed, scales, global_scale)

    checkpoint.add(name, (outputs, inputs), tuple(parts), make)


def _add_mxfp4(checkpoint: StoredCheckpoint, name: str, scheme: CompressedScheme) -> None:
    """Make the weight `name` of NAME_packed and NAME_scale."""
    shape = e2m1_shape(checkpoint, name, f"{name}_packed", MXFP4.group, torch.uint8)
    checkpoint.add(name, shape, (f"{name}_packed", f"{name}_scale"), from_mxfp4_rows)


def from_mxfp4_rows(packed: Tensor, exponents: Tensor) -> Tensor:
    """Two E2M1 codes a byte uint8 [n, k / 2], exponents uint8 [n, k / 32], plus 127 -> float32 [n, k]."""
    codes = nibbles(packed)
    return MXFP4.dequantize([codes, exponents], codes.shape[1])


def from_nvfp4(packed: Tensor, scales: Tensor, global_scale: Tensor) -> Tensor:
    """Two E2M1 codes a byte uint8 [n, k / 2], E4M3 scales [n, k / 16], f32 [1] -> float32 [n, k].

    value = code * (scale / global scale), in float32, as compressed-tensors computes it.
    """
    codes = nibbles(packed)
    parts = [codes, scales.view(torch.uint8), global_scale.reshape(1)]
    return NVFP4.dequantize(parts, codes.shape[1])


def _add_plain(checkpoint: StoredCheckpoint, name: str, scheme: CompressedScheme) -> None:
    """Replace the stored 8-bit weight `name` by the weight computed from it and its other tensors."""
    entry = checkpoint.entries[name]
    if entry.dtype != NUMBERS[scheme.kind] or len(entry.shape) != 2 or 0 in entry.shape:
        stored = f"{entry.dtype} of shape {list(entry.shape)}"
        raise UsageError(f"tensor {name} is {stored}; a matrix of {NUMBERS[scheme.kind]} belongs there")
    outputs, inputs = entry.shape
    if scheme.block is not None:
        rows, columns = scheme.block
        require(checkpoint, f"{name}_scale", (-(-outputs // rows), -(-inputs // columns)))
        checkpoint.add(name, entry.shape, (name, f"{name}_scale"), functools.partial(from_fp8, block=[rows, columns]))
        return
    size, count = scheme.groups(inputs)
    if scheme.format == MXFP8:
        require(checkpoint, f"{name}_scale", (outputs, count), torch.uint8)
        checkpoint.add(name, entry.shape, (name, f"{name}_scale"), from_mxfp8)
        return
    sides = _sides(checkpoint, name, scheme, (outputs, count))
    require(checkpoint, f"{name}_scale", sides)
    parts: tuple[str, ...] = (name, f"{name}_scale")
    if not scheme.symmetric or f"{name}_zero_point" in checkpoint:
        require(checkpoint, f"{name}_zero_point", sides, entry.dtype)
        parts = (*parts, f"{name}_zero_point")

    def make(codes: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
        zero = 0 if zeros is None else zeros.expand(outputs, count)
        return dequantize(inputs, codes.__getitem__, scales.expand(outputs, count), zero, size)

    checkpoint.add(name, entry.shape, parts, make)


_ADD = {PACKED: _add_packed, NVFP4_PACKED: _add_nvfp4, MXFP4_PACKED: _add_mxfp4}
"""What adds a weight, by format; others are not packed."""
