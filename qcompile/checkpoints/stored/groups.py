"""Weights in groups of inputs that share a scale and a zero point: unpack them, and check how they are stored.

NAME.weight [outputs, inputs] is (code - zero) * scale. Products are computed in float32, where they are exact if scales
have 16 bits; other programs round them to 16 bits. AWQ, GPTQ and compressed-tensors store weights this way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qcompile.checkpoints.checkpoint import StoredCheckpoint
from qcompile.errors import UnsupportedError, UsageError, shown

WORD = 32
"""Bits of the integers that codes are packed in."""
BAND = 1024
"""Outputs that are unpacked at once, a multiple of those in a word or tile: no second tensor of the weight's size."""
E8M0_GROUP = 32
"""Inputs that share a power of two in formats of OCP MX."""
ACTIVATIONS = (
    ".input_scale",
    ".input_zero_point",
    ".activation_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".prob_scale",
)
"""Endings of names of scales by which activations and the cache are rounded, as the recipe decides."""
Find = Callable[[StoredCheckpoint], None]
"""Adds the weights of a checkpoint that are stored in few bits, with a function that computes each."""
Groups = int | Tensor
"""Inputs in a group, the last of which may be short; or the group of each input, int64 [inputs]."""


# ---- codes and groups ------------------------------------------------------------------------------


def shifts(bits: int) -> range:
    """First bits of the codes of `bits` bits in a word that holds them in order."""
    return range(0, WORD, bits)


def unpack(words: Tensor, places: Sequence[int], dim: int) -> Tensor:
    """int32 words -> int32 codes. `places` are the first bits of a word's codes; `dim` grows by their number."""
    shape = [-1 if axis == dim + 1 else 1 for axis in range(words.dim() + 1)]
    spread = words.unsqueeze(dim + 1) >> torch.tensor(places, dtype=torch.int32).view(shape)
    return spread.bitwise_and_(2 ** (WORD // len(places)) - 1).flatten(dim, dim + 1)


def unpack_filled(words: Tensor, bits: int, dim: int) -> Tensor:
    """int32 words that codes of `bits` bits fill without gaps, in order -> int32 codes; `dim` grows by 32 / bits.

    Some codes of 3 bits lie in two words. Three words hold 32 of them: the words are a multiple of three.
    """
    if WORD % bits == 0:
        return unpack(words, shifts(bits), dim)
    starts = torch.arange(0, WORD * bits, bits, dtype=torch.int32)
    word, place = starts // WORD, starts % WORD
    first = (WORD - place).clamp(max=bits)  # bits of a code in its first word
    shape = [-1 if axis == dim + 1 else 1 for axis in range(words.dim() + 1)]
    blocks = words.unflatten(dim, (-1, bits))
    low = (blocks.index_select(dim + 1, word) >> place.view(shape)) & ((1 << first) - 1).view(shape)
    high = blocks.index_select(dim + 1, (word + 1).clamp(max=bits - 1)) & ((1 << (bits - first)) - 1).view(shape)
    return (low | high << first.view(shape)).flatten(dim, dim + 1)


def nibbles(packed: Tensor) -> Tensor:
    """Two codes a byte, the earlier one in the low half, uint8 [n, k / 2] -> codes uint8 [n, k]."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(1)


def dequantize(
    inputs: int, codes: Callable[[slice], Tensor], scales: Tensor, zeros: Tensor | int, groups: Groups
) -> Tensor:
    """(code - zero) * scale as float32 [outputs, inputs], a band of outputs at a time.

    `codes(band)` are the codes of a band of outputs [outputs in the band, inputs]; `scales` and `zeros` are
    [outputs, groups].
    """
    value = torch.empty(len(scales), inputs)
    for start in range(0, len(scales), BAND):
        band = slice(start, min(start + BAND, len(scales)))
        zero = zeros if isinstance(zeros, int) else _by_input(zeros[band].to(torch.float32), groups, inputs)
        value[band] = codes(band)
        value[band].sub_(zero).mul_(_by_input(scales[band].to(torch.float32), groups, inputs))
    return value


def _by_input(part: Tensor, groups: Groups, inputs: int) -> Tensor:
    """[outputs, groups] -> [outputs, inputs]: for each input the value of its group."""
    if isinstance(groups, Tensor):
        return part.index_select(1, groups)
    return part.repeat_interleave(groups, 1)[:, :inputs]


def groups_of(name: str, index: Tensor, size: int, count: int) -> Groups:
    """The groups that `index` [inputs], the stored tensor `name`, assigns to inputs; there are `count` groups.

    Returns `size` if each group has `size` consecutive inputs. Raises UsageError for a group that does not exist.
    """
    index = index.to(torch.int64)
    if len(index) and not 0 <= int(index.min()) <= int(index.max()) < count:
        raise UsageError(f"tensor {name} holds {int(index.min())} to {int(index.max())}; there are {count} groups")
    return size if torch.equal(index, torch.arange(len(index)) // size) else index


def from_fp8(codes: Tensor, scales: Tensor, block: list[int]) -> Tensor:
    """8-bit floats [..., n, k] and a factor for each `block` of rows and columns -> float32 [..., n, k]."""
    value = codes.to(torch.float32)
    rows, columns = block
    factors = scales.to(torch.float32).reshape(*codes.shape[:-2], -1, -(-codes.shape[-1] // columns))
    factors = factors.repeat_interleave(columns, -1)[..., : codes.shape[-1]]
    for index in range(factors.shape[-2]):  # one row of blocks at a time, to avoid a second tensor of the weight's size
        value[..., index * rows : (index + 1) * rows, :] *= factors[..., index : index + 1, :]
    return value


def from_mxfp8(codes: Tensor, exponents: Tensor) -> Tensor:
    """8-bit floats [n, k], exponents uint8 [n, k / 32], plus 127 -> float32 [n, k]."""
    powers = torch.exp2(exponents.to(torch.float32) - 127)  # 255 stands for NaN, and becomes infinity
    return from_fp8(codes, powers, [1, E8M0_GROUP])


# ---- checks of what is stored ----------------------------------------------------------------------


def require(checkpoint: StoredCheckpoint, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> None:
    """Raise UsageError unless tensor `name` exists with this shape and `dtype` (None: floats of 16 bits or more)."""
    wanted = f"{dtype or 'floats'} of shape {list(shape)}"
    entry = checkpoint.entries.get(name)
    if entry is None:
        raise UsageError(
            f"tensor {name} is missing from {checkpoint.directory}; {wanted} belongs there: download the file again"
        )
    right = entry.dtype.is_floating_point and entry.dtype.itemsize > 1 if dtype is None else entry.dtype == dtype
    if not right or entry.shape != tuple(shape):
        raise UsageError(f"tensor {name} is {entry.dtype} of shape {list(entry.shape)}; {wanted} belongs there")


def longer(shape: Sequence[int]) -> list[int]:
    """The sides of `shape` other than 1: one factor may be stored with several shapes."""
    return [side for side in shape if side != 1]


def forget(checkpoint: StoredCheckpoint, endings: tuple[str, ...]) -> None:
    """Hide the tensors with names that end with one of `endings`: they are no part of a weight."""
    for name in [name for name in checkpoint if name.endswith(endings)]:
        del checkpoint.entries[name]


def require_none_left(checkpoint: StoredCheckpoint, endings: tuple[str, ...]) -> None:
    """Raise UsageError if a tensor with a name that ends with one of `endings` is left: it would be ignored."""
    for name in checkpoint:
        if name.endswith(endings):
            raise UsageError(f"tensor {name} belongs to no weight that is stored in few bits")


def words_of(checkpoint: StoredCheckpoint, name: str) -> tuple[int, int]:
    """The shape of tensor `name`. Raises UsageError unless it is an int32 matrix that is not empty."""
    entry = checkpoint.entries[name]
    if entry.dtype != torch.int32 or len(entry.shape) != 2 or 0 in entry.shape:
        raise UsageError(f"tensor {name} is {entry.dtype} of shape {list(entry.shape)}; an int32 matrix belongs there")
    return entry.shape[0], entry.shape[1]


def e2m1_shape(
    checkpoint: StoredCheckpoint, name: str, packed: str, group: int, scales: torch.dtype
) -> tuple[int, int]:
    """The outputs and inputs of the weight `name`; the tensor `packed` has its codes, two a byte.

    Raises UsageError unless `packed` is a uint8 matrix, and NAME_scale has the type `scales` and an entry for each
    output and `group` inputs.
    """
    entry = checkpoint.entries[packed]
    if entry.dtype != torch.uint8 or len(entry.shape) != 2 or 0 in entry.shape:
        raise UsageError(f"tensor {packed} is {entry.dtype} of shape {list(entry.shape)}; a uint8 matrix is needed")
    outputs, inputs = entry.shape[0], 2 * entry.shape[1]
    scale = checkpoint.entries.get(f"{name}_scale")
    shape = (outputs, -(-inputs // group))
    if scale is None or (scale.dtype, scale.shape) != (scales, shape):
        kind = str(scales).removeprefix("torch.")
        raise UsageError(f"tensor {name}_scale is missing or not {kind} of shape {list(shape)}")
    return outputs, inputs


def one_of(method: str, key: str, value: Any, choices: tuple[Any, ...]) -> Any:
    """`value`, in lower case if it is text. Raises UnsupportedError unless it is one of `choices`."""
    value = value.lower() if isinstance(value, str) else value
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return value
    texts = " or ".join(str(choice) for choice in choices)
    raise UnsupportedError(f"{method} weights with {key} {_told(value)} are not read, only {texts}")


def _told(value: Any) -> str:
    """A value of a configuration for a message: as it is if it is short and printable."""
    text = shown(value) if isinstance(value, int | list | dict) else str(value)
    return text if len(text) <= 60 and text.isprintable() else shown(value)


def group_size(method: str, value: Any) -> int:
    """`value` as a group size: a number of inputs, or -1 for all inputs. Raises UsageError for anything else."""
    if type(value) is not int or (value < 1 and value != -1):
        raise UsageError(
            f"group_size of the checkpoint's {method} weights is {_told(value)}; "
            "it must be a number of inputs, or -1 for all inputs"
        )
    return value


def require_plain(method: str, quantization: dict[str, Any]) -> None:
    """Raise UnsupportedError if weights are packed in other words, or stored with an adapter or a rotation."""
    one_of(method, "pack_dtype", quantization.get("pack_dtype") or "int32", ("int32",))
    for key in ("adapter", "rotation"):
        if quantization.get(key):
            raise UnsupportedError(f"{method} weights with {key} are not read")


def require_uniform(method: str, quantization: dict[str, Any]) -> None:
    """Raise UnsupportedError if modules are stored in different ways, or as `require_plain` says."""
    require_plain(method, quantization)
    modules = quantization.get("dynamic") or {}
    others = [name for name in modules if not name.startswith("-:")] if isinstance(modules, dict) else [modules]
    if others:  # "-:PATTERN" leaves modules as they are
        raise UnsupportedError(f"{method} weights are not read where modules differ: dynamic has {others[0]}")
