"""GPTQ weights (AutoGPTQ/AutoGPTQ, auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py).

NAME.qweight int32 [inputs * bits / 32, outputs] has earlier inputs in lower bits. NAME.qzeros int32
[groups, outputs * bits / 32] has earlier outputs in lower bits, and each zero point less one. NAME.scales is
[groups, outputs], and NAME.g_idx int32 [inputs] is the group of each input. Codes of 3 bits fill three words without
gaps, 32 at a time. In "gptq_v2" (ModelCloud/GPTQModel,
gptqmodel/utils/model.py) zero points are stored as they are. Where the configuration says `sym`, all zero points are
2^(bits - 1): files that store them in the way of the other version were published, and mean what `sym` says. Modules
may differ: see gptq_rules.py. Weights in the order of a kernel have other tensors: see marlin.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qcompile.checkpoints.checkpoint import StoredCheckpoint
from qcompile.checkpoints.stored.gptq_rules import ModuleRules, module_rules
from qcompile.checkpoints.stored.groups import (
    WORD,
    Find,
    dequantize,
    group_size,
    groups_of,
    one_of,
    require,
    require_none_left,
    require_plain,
    unpack_filled,
    words_of,
)
from qcompile.errors import UsageError

MARLIN = "marlin"
VERSIONS = ("gptq", "gptq_v2", MARLIN)
"""Ways in which weights are packed, the usual one first."""


@dataclass(frozen=True)
class GptqScheme:
    """How a checkpoint stores its weights: `size` inputs in a group (-1: all), and whether zero points are `less_one`.

    `ordered` is the configuration's desc_act: whether groups may be in any order, None if it does not say. With
    `symmetric` (its `sym`) all zero points are in the middle of the codes.
    """

    bits: int
    size: int
    less_one: bool
    ordered: bool | None
    symmetric: bool = False

    @property
    def middle(self) -> int:
        """The zero point of symmetric weights."""
        return int(2 ** (self.bits - 1))

    def group(self, inputs: int) -> int:
        """Inputs in a group of a weight with `inputs` inputs."""
        return inputs if self.size < 0 else self.size


def gptq(quantization: dict[str, Any], tiled: Callable[[dict[str, Any]], Find]) -> Find:
    """The reader for a checkpoint with this `quantization_config`: `tiled` for codes in Marlin's order.

    Raises UnsupportedError, UsageError.
    """
    require_plain("gptq", quantization)
    if version(quantization) == MARLIN:
        return tiled(quantization)
    return functools.partial(_find_gptq, rules=module_rules(quantization, _scheme))


def version(quantization: Mapping[str, Any]) -> str:
    """How this `quantization_config` says that weights are packed. Raises UnsupportedError for another way."""
    get = quantization.get
    stated = get("checkpoint_format") or get("format") or VERSIONS[0]
    flag = one_of("gptq", "is_marlin_format", get("is_marlin_format") or False, (True, False))
    return str(one_of("gptq", "checkpoint_format", MARLIN if flag else stated, VERSIONS))


def _scheme(quantization: Mapping[str, Any]) -> GptqScheme:
    """How this `quantization_config` says that weights are stored."""
    get = quantization.get
    bits = one_of("gptq", "bits", get("bits"), (2, 3, 4, 8))
    ordered = one_of("gptq", "desc_act", get("desc_act"), (True, False, None))
    symmetric = one_of("gptq", "sym", get("sym"), (True, False, None))
    size = group_size("gptq", get("group_size"))
    return GptqScheme(bits, size, version(quantization) == VERSIONS[0], ordered, bool(symmetric))


def _find_gptq(checkpoint: StoredCheckpoint, rules: ModuleRules[GptqScheme]) -> None:
    checkpoint.linears = True
    for name in list(checkpoint):
        stem = name.removesuffix(".qweight")
        if stem == name:
            continue
        scheme = rules.scheme(stem)
        words, outputs = words_of(checkpoint, name)
        inputs = words * WORD // scheme.bits
        if any(count * scheme.bits % WORD and WORD % scheme.bits for count in (inputs, outputs)):
            raise UsageError(
                f"tensor {name} has {words} words and {outputs} outputs, which codes of 3 bits do not fill"
            )
        count = -(-inputs // scheme.group(inputs))
        require(checkpoint, f"{stem}.qzeros", (count, -(-outputs * scheme.bits // WORD)), torch.int32)
        require(checkpoint, f"{stem}.scales", (count, outputs))
        parts: tuple[str, ...] = (name, f"{stem}.qzeros", f"{stem}.scales")
        if scheme.ordered or f"{stem}.g_idx" in checkpoint:
            require(checkpoint, f"{stem}.g_idx", (inputs,), torch.int32)
            parts = (*parts, f"{stem}.g_idx")
        make = functools.partial(from_gptq, stem, scheme)
        checkpoint.add(f"{stem}.weight", (outputs, inputs), parts, make)
    for name, entry in checkpoint.entries.items():
        if name.endswith(".B") and entry.dtype == torch.int32:
            raise UsageError(f"tensor {name} is in Marlin's order: say so in checkpoint_format of config.json (marlin)")
    require_none_left(checkpoint, (".qzeros", ".scales", ".g_idx"))


def from_gptq(
    name: str, scheme: GptqScheme, words: Tensor, zeros: Tensor, scales: Tensor, index: Tensor | None = None
) -> Tensor:
    """NAME's tensors as float32 [outputs, inputs].

    `words` int32 [inputs * bits / 32, outputs], `zeros` int32 [groups, outputs * bits / 32], `scales` [groups, outputs]
    and `index` int32 [inputs]. Raises UsageError for values that programs read differently: a zero point of 0 that is
    stored less one (the subtraction borrows from the neighbour, or gives 0 or 2^bits), groups in an order that the
    configuration denies, and zero points of symmetric weights that no version stores.
    """
    bits, (count, outputs) = scheme.bits, scales.shape
    inputs = len(words) * WORD // bits
    size = scheme.group(inputs)
    groups = size if index is None else groups_of(f"{name}.g_idx", index, size, count)
    if scheme.ordered is False and isinstance(groups, Tensor):
        raise UsageError(f"tensor {name}.g_idx has its inputs' groups in another order, and desc_act is false")
    zero = _zeros(name, scheme, unpack_filled(zeros, bits, 1)[:, :outputs])

    def codes(band: slice) -> Tensor:
        return unpack_filled(words[:, band], bits, 0).T

    return dequantize(inputs, codes, scales.T, zero if isinstance(zero, int) else zero.T, groups)


def _zeros(name: str, scheme: GptqScheme, stored: Tensor) -> Tensor | int:
    """The zero points that NAME.qzeros, unpacked to `stored`, stands for; one number if all are the same by the scheme.

    Programs that add one to zero points and programs that take symmetric weights to have the middle both exist, so
    symmetric weights are only read if what is stored is the middle, or the middle less one.
    """
    if scheme.symmetric:
        if not any(bool((stored == wanted).all()) for wanted in (scheme.middle - 1, scheme.middle)):
            raise UsageError(
                f"tensor {name}.qzeros holds zero points {int(stored.min())} to {int(stored.max())}, and sym is true, "
                f"which means {scheme.middle} everywhere: correct sym in the quantization_config"
            )
        return scheme.middle
    if scheme.less_one and bool((stored == 2**scheme.bits - 1).any()):
        raise UsageError(f"tensor {name}.qzeros holds zero points less one below 0, which programs read differently")
    return stored + scheme.less_one
