"""4-bit weights in groups as GPTQ and AWQ store them; see checkpoints/stored/gptq.py and awq.py.

Scales stay in float32, although their tools write float16: engines round them to the type of the activations.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qcompile.checkpoints.stored.awq import AWQ_SHIFTS
from qcompile.exports.layout import StoredLayout, pack_words
from qcompile.formats.asymmetric import W4_ASYM_G32, W4_ASYM_G64, W4_ASYM_G128
from qcompile.formats.weight import WeightFormat


def _gptq(parts: dict[str, Tensor], group: int) -> dict[str, Tensor]:
    """Codes uint8 [n, k], scale f32 [n, groups] and zero uint8 [n, groups]."""
    codes = parts["codes"].T
    return {
        "qweight": pack_words(codes, 0),
        "qzeros": pack_words(parts["zero"].T, 1),
        "scales": parts["scale"].T,
        "g_idx": torch.arange(len(codes), dtype=torch.int32) // group,
    }


def _gptq_config(floats: Sequence[str], head: str | None, group: int) -> dict[str, Any]:
    """In "gptq_v2" zero points are stored as they are; the older form cannot hold a zero point of 0.

    The output head is never rounded (`lm_head`); a `dynamic` rule leaves other linears as they are.
    """
    left: dict[str, Any] = {f"-:^{re.escape(name)}$": {} for name in floats if name != head}
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group,
        "sym": False,
        "desc_act": False,
        "lm_head": False,
        "checkpoint_format": "gptq_v2",
        "pack_dtype": "int32",
    } | ({"dynamic": left} if left else {})


def _awq(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Codes uint8 [n, k], scale f32 [n, groups] and zero uint8 [n, groups]."""
    return {
        "qweight": pack_words(parts["codes"].T, 1, AWQ_SHIFTS),
        "qzeros": pack_words(parts["zero"].T, 1, AWQ_SHIFTS),
        "scales": parts["scale"].T,
    }


def _awq_config(floats: Sequence[str], head: str | None, group: int) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": list(floats),
    }


_GROUPS = (W4_ASYM_G128, W4_ASYM_G64, W4_ASYM_G32)
GPTQ: dict[WeightFormat, StoredLayout] = {
    kind: StoredLayout(
        partial(_gptq, group=kind.group), partial(_gptq_config, group=kind.group), inputs=kind.group, outputs=8
    )
    for kind in _GROUPS
}
AWQ: dict[WeightFormat, StoredLayout] = {
    kind: StoredLayout(_awq, partial(_awq_config, group=kind.group), inputs=kind.group, outputs=8) for kind in _GROUPS
}
