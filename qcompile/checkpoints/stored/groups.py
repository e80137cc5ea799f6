"""Weights in groups of inputs that share a scale and a zero point: how AWQ and GPTQ store them.

NAME.weight [outputs, inputs] is (code - zero) * scale. Products are taken in float32, where they are exact if scales
have 16 bits; other programs round them to 16.

- `awq`, version "gemm" (casper-hansen/AutoAWQ, awq/modules/linear/gemm.py): NAME.qweight int32 [inputs, outputs / 8],
  4 bits a code, from the lowest of a word on those of outputs 0, 2, 4, 6, 1, 3, 5, 7; NAME.qzeros int32 [groups,
  outputs / 8] in the same order; NAME.scales [groups, outputs].
- `gptq` (AutoGPTQ/AutoGPTQ, auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py): NAME.qweight int32
  [inputs * bits / 32, outputs], earlier inputs in lower bits; NAME.qzeros int32 [groups, outputs * bits / 32], earlier
  outputs in lower bits, each zero less one; NAME.scales [groups, outputs]; NAME.g_idx int32 [inputs], the group of each
  input. In "gptq_v2" (ModelCloud/GPTQModel, gptqmodel/utils/model.py) zeros are stored as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qcompile.checkpoints.checkpoint import StoredCheckpoint
from qcompile.errors import UnsupportedError, UsageError

WORD = 32
"""Bits of the integers that codes are packed in."""
AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)
"""Where the codes of eight consecutive outputs lie in a word of AWQ's."""
BAND = 1024
"""Outputs that are unpacked at once, a multiple of those in a word: there is no second tensor of the weight's size."""

Find = Callable[[StoredCheckpoint], None]
Groups = int | Tensor
"""Inputs in a group, the last of which may be short; or the group of each input, int64 [inputs]."""


# ---- codes and groups ------------------------------------------------------------------------------


def shifts(bits: int) -> range:
    """Where codes of `bits` lie in a word that holds them in their order."""
    return range(0, WORD, bits)


def unpack(words: Tensor, places: Sequence[int], dim: int) -> Tensor:
    """int32 words -> int32 codes, as many times longer along `dim` as there are `places` (first bits) in a word."""
    shape = [-1 if axis == dim + 1 else 1 for axis in range(words.dim() + 1)]
    spread = words.unsqueeze(dim + 1) >> torch.tensor(places, dtype=torch.int32).view(shape)
    return spread.bitwise_and_(2 ** (WORD // len(places)) - 1).flatten(dim, dim + 1)


def dequantize(
    inputs: int, codes: Callable[[slice], Tensor], scales: Tensor, zeros: Tensor | int, groups: Groups
) -> Tensor:
    """(code - zero) * scale as float32 [outputs, inputs], a band of outputs at a time.

    `codes` gives those of some outputs [some, inputs]; `scales` and `zeros` are [outputs, groups].
    """
    value = torch.empty(len(scales), inputs)
    for start in range(0, len(scales), BAND):
        band = slice(start, min(start + BAND, len(scales)))
        zero = zeros if isinstance(zeros, int) else _by_input(zeros[band].to(torch.float32), groups, inputs)
        value[band] = codes(band)
        value[band].sub_(zero).mul_(_by_input(scales[band].to(torch.float32), groups, inputs))
    return value


def _by_input(part: Tensor, groups: Groups, inputs: int) -> Tensor:
    """[outputs, groups] -> [outputs, inputs], to each input what belongs to its group."""
    if isinstance(groups, Tensor):
        return part.index_select(1, groups)
    return part.repeat_interleave(groups, 1)[:, :inputs]


def groups_of(name: str, index: Tensor, size: int, count: int) -> Groups:
    """What `index` [inputs], a tensor called `name`, says: the group of each input, one of `count`.

    It is `size` where the groups are of so many inputs each in their order. UsageError if there is no such group.
    """
    index = index.to(torch.int64)
    if len(index) and not 0 <= int(index.min()) <= int(index.max()) < count:
        raise UsageError(f"tensor {name} holds {int(index.min())} to {int(index.max())}; there are {count} groups")
    return size if torch.equal(index, torch.arange(len(index)) // size) else index


# ---- what belongs there ----------------------------------------------------------------------------


def require(checkpoint: StoredCheckpoint, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> None:
    """UsageError unless tensor `name` is there, of this shape, and of `dtype`, or of floats where there is none."""
    wanted = f"{dtype or 'floats'} of shape {list(shape)}"
    entry = checkpoint.entries.get(name)
    if entry is None:
        raise UsageError(f"tensor {name} is missing from {checkpoint.directory}; {wanted} belongs there")
    right = entry.dtype.is_floating_point and entry.dtype.itemsize > 1 if dtype is None else entry.dtype == dtype
    if not right or entry.shape != tuple(shape):
        raise UsageError(f"tensor {name} is {entry.dtype} of shape {list(entry.shape)}; {wanted} belongs there")


def require_none_left(checkpoint: StoredCheckpoint, endings: tuple[str, ...]) -> None:
    """UsageError if there are tensors yet whose names end so: they mean something that would be left out."""
    for name in checkpoint:
        if name.endswith(endings):
            raise UsageError(f"tensor {name} belongs to no weight that is stored in few bits")


def words_of(checkpoint: StoredCheckpoint, name: str) -> tuple[int, int]:
    """The shape of tensor `name`, which must be an int32 matrix that is not empty."""
    entry = checkpoint.entries[name]
    if entry.dtype != torch.int32 or len(entry.shape) != 2 or 0 in entry.shape:
        raise UsageError(f"tensor {name} is {entry.dtype} of shape {list(entry.shape)}; an int32 matrix belongs there")
    return entry.shape[0], entry.shape[1]


def one_of(method: str, key: str, value: Any, choices: tuple[Any, ...]) -> Any:
    """`value` if it is one of `choices`, in lower case if it is text; UnsupportedError otherwise."""
    value = value.lower() if isinstance(value, str) else value
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return value
    texts = " or ".join(str(choice) for choice in choices)
    raise UnsupportedError(f"{method} weights with {key} {value} are not read, only {texts}")


def group_size(method: str, value: Any) -> int:
    """`value` as a group size; UsageError unless it is a number of inputs or -1, which stands for all."""
    if type(value) is not int or (value < 1 and value != -1):
        raise UsageError(f"group_size of the checkpoint's {method} weights is {value}; a number of inputs, or -1, goes")
    return value


def _plain(method: str, quantization: dict[str, Any]) -> None:
    """UnsupportedError where modules differ in how they are stored, or something is to be added to what they do."""
    one_of(method, "pack_dtype", quantization.get("pack_dtype") or "int32", ("int32",))
    for key in ("adapter", "rotation"):
        if quantization.get(key):
            raise UnsupportedError(f"{method} weights with {key} are not read")
    modules = quantization.get("dynamic") or {}
    others = [name for name in modules if not name.startswith("-:")] if isinstance(modules, dict) else [modules]
    if others:  # "-:PATTERN" leaves modules as they are
        raise UnsupportedError(f"{method} weights are not read where modules differ: dynamic has {others[0]}")


# ---- AWQ -------------------------------------------------------------------------------------------


def awq(quantization: dict[str, Any]) -> Find:
    """What finds the weights of a checkpoint whose `quantization_config` with the method `awq` this is."""
    get = quantization.get
    one_of("awq", "bits", get("bits", get("w_bit", 4)), (4,))
    one_of("awq", "zero_point", get("zero_point", True), (True,))
    for key in ("version", "format", "checkpoint_format"):  # what AutoAWQ and GPTQModel call it
        one_of("awq", key, get(key) or "gemm", ("gemm",))
    if get("backend") == "llm-awq":
        raise UnsupportedError("awq weights with backend llm-awq are not read")
    _plain("awq", quantization)
    return functools.partial(_find_awq, size=group_size("awq", get("group_size", get("q_group_size", 128))))


def _find_awq(checkpoint: StoredCheckpoint, size: int) -> None:
    for name in list(checkpoint):
        stem = name.removesuffix(".qweight")
        if stem == name:
            continue
        inputs, words = words_of(checkpoint, name)
        group = inputs if size < 0 else size
        count = -(-inputs // group)
        require(checkpoint, f"{stem}.qzeros", (count, words), torch.int32)
        require(checkpoint, f"{stem}.scales", (count, words * len(AWQ_SHIFTS)))
        make = functools.partial(from_awq, group=group)
        parts = (name, f"{stem}.qzeros", f"{stem}.scales")
        checkpoint.add(f"{stem}.weight", (words * len(AWQ_SHIFTS), inputs), parts, make)
    require_none_left(checkpoint, (".qzeros", ".scales"))


def from_awq(words: Tensor, zeros: Tensor, scales: Tensor, group: int) -> Tensor:
    """Words [inputs, outputs / 8], [groups, outputs / 8], scales [groups, outputs] -> f32 [outputs, inputs]."""

    def codes(band: slice) -> Tensor:
        each = len(AWQ_SHIFTS)
        return unpack(words[:, band.start // each : band.stop // each], AWQ_SHIFTS, 1).T

    return dequantize(len(words), codes, scales.T, unpack(zeros, AWQ_SHIFTS, 1).T, group)


# ---- GPTQ ------------------------------------------------------------------------------------------


def gptq(quantization: dict[str, Any]) -> Find:
    """What finds the weights of a checkpoint whose `quantization_config` with the method `gptq` this is."""
    get = quantization.get
    bits = one_of("gptq", "bits", get("bits"), (4, 8))
    version = get("checkpoint_format") or get("format") or "gptq"
    version = one_of("gptq", "checkpoint_format", version, ("gptq", "gptq_v2"))
    one_of("gptq", "is_marlin_format", bool(get("is_marlin_format")), (False,))
    ordered = one_of("gptq", "desc_act", get("desc_act"), (True, False, None))
    _plain("gptq", quantization)
    size = group_size("gptq", get("group_size"))
    return functools.partial(_find_gptq, bits=bits, size=size, less=version == "gptq", ordered=ordered)


def _find_gptq(checkpoint: StoredCheckpoint, bits: int, size: int, less: bool, ordered: bool | None) -> None:
    for name in list(checkpoint):
        stem = name.removesuffix(".qweight")
        if stem == name:
            continue
        words, outputs = words_of(checkpoint, name)
        inputs = words * WORD // bits
        group = inputs if size < 0 else size
        count = -(-inputs // group)
        require(checkpoint, f"{stem}.qzeros", (count, -(-outputs * bits // WORD)), torch.int32)
        require(checkpoint, f"{stem}.scales", (count, outputs))
        parts: tuple[str, ...] = (name, f"{stem}.qzeros", f"{stem}.scales")
        if ordered or f"{stem}.g_idx" in checkpoint:
            require(checkpoint, f"{stem}.g_idx", (inputs,), torch.int32)
            parts = (*parts, f"{stem}.g_idx")
        make = functools.partial(from_gptq, name=stem, bits=bits, group=group, less=less, ordered=ordered)
        checkpoint.add(f"{stem}.weight", (outputs, inputs), parts, make)
    require_none_left(checkpoint, (".qzeros", ".scales", ".g_idx"))


def from_gptq(
    words: Tensor,
    zeros: Tensor,
    scales: Tensor,
    index: Tensor | None = None,
    *,
    name: str,
    bits: int,
    group: int,
    less: bool,
    ordered: bool | None = None,
) -> Tensor:
    """Words [inputs * bits / 32, outputs] and the rest of NAME's tensors -> float32 [outputs, inputs].

    `less` says that zeros are stored less one, and `ordered` whether the groups of inputs may lie in any order. Raises
    UsageError for what programs read differently: a zero of 0 less one (which borrows from its neighbours, or does not,
    and becomes 0 or 2^bits), and groups in another order than they are said to be.
    """
    count, outputs = scales.shape
    inputs = len(words) * WORD // bits
    groups = group if index is None else groups_of(f"{name}.g_idx", index, group, count)
    if ordered is False and isinstance(groups, Tensor):
        raise UsageError(f"tensor {name}.g_idx has its inputs' groups in another order, and desc_act is false")
    zero = unpack(zeros, shifts(bits), 1)[:, :outputs]
    if less and bool((zero == 2**bits - 1).any()):
        raise UsageError(f"tensor {name}.qzeros holds zero points less one below 0, which programs read differently")
    return dequantize(inputs, lambda band: unpack(words[:, band], shifts(bits), 0).T, scales.T, (zero + less).T, groups)
