"""Weights as compressed-tensors stores them, which vLLM and transformers read; see checkpoints/stored/compressed.py.

Scales stay in float32: vLLM rounds them to the type of the activations when it loads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qcompile.exports.layout import WORD, StoredLayout, pack_halves, pack_words
from qcompile.formats.activations import INT8
from qcompile.formats.asymmetric import W4_ASYM_G32, W4_ASYM_G64, W4_ASYM_G128
from qcompile.formats.mxfp4 import MXFP4
from qcompile.formats.nvfp4 import NVFP4
from qcompile.formats.symmetric import W8_SYM_CHANNEL, W8_SYM_G32, W8_SYM_G64, W8_SYM_G128
from qcompile.formats.weight import WeightFormat

METHOD = "compressed-tensors"
BYTES = (W8_SYM_G128, W8_SYM_G64, W8_SYM_G32)


def _config(format: str, weights: dict[str, Any], activations: dict[str, Any] | None, floats: Sequence[str]) -> Any:
    """The quantization_config of a checkpoint that stores all linears except `floats` in one format."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": METHOD,
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"format": format}},
        "ignore": list(floats),
        "kv_cache_scheme": None,
    }


def _integers(bits: int, symmetric: bool, strategy: str, group: int | None = None, dynamic: bool = False) -> Any:
    """How numbers are rounded, as compressed-tensors describes it."""
    return {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": strategy,
        "group_size": group,
        "dynamic": dynamic,
    }


def _pack(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Codes uint8 [n, k], scale f32 [n, groups] and zero uint8 [n, groups] of 4-bit groups."""
    return {
        "weight_packed": pack_words(parts["codes"], 1),
        "weight_scale": parts["scale"],
        "weight_zero_point": pack_words(parts["zero"], 0),
        "weight_shape": torch.tensor(parts["codes"].shape),
    }


def _pack_bytes(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Codes int8 [n, k] and scale f32 [n, groups] of 8-bit groups; a packed code is larger by 128."""
    return {
        "weight_packed": pack_words(parts["codes"].to(torch.int16) + 128, 1, range(0, WORD, 8)),
        "weight_scale": parts["scale"],
        "weight_shape": torch.tensor(parts["codes"].shape),
    }


def _pack_config(floats: Sequence[str], head: str | None, format: WeightFormat) -> Any:
    weights = _integers(format.bits, format in BYTES, "group", format.group)
    return _config("pack-quantized", weights, None, floats)


def _bytes(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Codes int8 [n, k] and scale f32 [n] of w8_sym_channel."""
    return {"weight": parts["codes"], "weight_scale": parts["scale"][:, None]}


def _bytes_config(floats: Sequence[str], head: str | None) -> Any:
    return _config("int-quantized", _integers(8, True, "channel"), _integers(8, True, "token", dynamic=True), floats)


def _floats(strategy: str, group: int, scale: str) -> Any:
    """How E2M1 elements are rounded, as compressed-tensors describes it; `scale` is the type of their scales."""
    return {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": strategy,
        "group_size": group,
        "dynamic": False,
        "scale_dtype": scale,
    }


def _mxfp4(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Codes uint8 [n, k] and exponent uint8 [n, groups] of mxfp4."""
    return {"weight_packed": pack_halves(parts["codes"]), "weight_scale": parts["exponent"]}


def _mxfp4_config(floats: Sequence[str], head: str | None) -> Any:
    return _config("mxfp4-pack-quantized", _floats("group", MXFP4.group, "torch.uint8"), None, floats)


def _nvfp4(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Codes uint8 [n, k], group_scale uint8 [n, groups], the bits of E4M3, and scale f32 [1] of nvfp4."""
    return {
        "weight_packed": pack_halves(parts["codes"]),
        "weight_scale": parts["group_scale"].view(torch.float8_e4m3fn),
        "weight_global_scale": parts["scale"],
    }


def _nvfp4_config(floats: Sequence[str], head: str | None) -> Any:
    weights = _floats("tensor_group", NVFP4.group, "torch.float8_e4m3fn")
    return _config("nvfp4-pack-quantized", weights, None, floats)


COMPRESSED: dict[WeightFormat, StoredLayout] = {
    **{
        kind: StoredLayout(
            _pack_bytes if kind in BYTES else _pack, partial(_pack_config, format=kind), inputs=kind.group
        )
        for kind in (W4_ASYM_G128, W4_ASYM_G64, W4_ASYM_G32, *BYTES)
    },
    W8_SYM_CHANNEL: StoredLayout(_bytes, _bytes_config, activation=INT8.name),
    MXFP4: StoredLayout(_mxfp4, _mxfp4_config, inputs=MXFP4.group),
    NVFP4: StoredLayout(_nvfp4, _nvfp4_config, inputs=NVFP4.group),
}
"""How compressed-tensors stores weights of our formats."""
