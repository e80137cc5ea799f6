"""Linears on quantized activations and weights, and the operators fused with them."""

from __future__ import annotations

import torch
from torch import Tensor

from qcompile.formats.activations import activation_format, dequantize_activation
from qcompile.formats.registry import weight_format
from qcompile.ops.epilogues import gate, gemm_float
from qcompile.ops.model import hadamard, layer_norm, rms_norm
from qcompile.ops.registry import define


def _fake_activation(x: Tensor, kind: str, group: int) -> list[Tensor]:
    return [x.new_empty(s, dtype=d) for s, d in activation_format(kind).layout(tuple(x.shape), group)]


@define(_fake_activation, since="quantize")
def quantize_activation(x: Tensor, kind: str, group: int) -> list[Tensor]:
    """x [..., K] as activation format `kind`: [x], or for integers [codes int8, scale f32, sums].

    Scales are [...] or [..., K/128], depending on the type. Sums int32 [..., K/group] add up the codes of each group of
    inputs; a weight's zero point is multiplied by them.
    """
    return [part.clone() for part in activation_format(kind).quantize(x, group)]


def _fake_gemm(
    x: list[Tensor],
    weight: list[Tensor],
    bias: Tensor | None,
    residual: Tensor | None,
    format: str,
    epilogue: str,
    width: int,
) -> Tensor:
    return x[0].new_empty((*x[0].shape[:-1], width), dtype=torch.float32)


@define(_fake_gemm, since="quantize")
def gemm(
    x: list[Tensor],
    weight: list[Tensor],
    bias: Tensor | None,
    residual: Tensor | None,
    format: str,
    epilogue: str,
    width: int,
) -> Tensor:
    """A linear on a quantized activation [..., K] and a quantized weight [N, K] -> f32 [..., width].

    Epilogues: `store`; `add` (residual + y); those of GATED. `silu_mul`, for example, returns silu(gate) * up. For
    these, the weight interleaves gate and up rows in blocks of GATE_BLOCK.
    """
    k = x[0].shape[-1]
    values = dequantize_activation(x)
    return gemm_float(values, weight_format(format).dequantize(weight, k), bias, residual, epilogue, width)


@define(lambda x, weight, bias, kind, width: x.new_empty(*x.shape[:-1], width))
def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, width: int) -> Tensor:
    """x [..., K], weight [2N', K] interleaved in blocks of GATE_BLOCK rows -> kind(gate) * up, [..., width]."""
    return gate(torch.nn.functional.linear(x, weight, bias), kind, width)


@define(lambda x, core, block, dtype, group: _fake_activation(x, dtype, group), since="cache")
def hadamard_quantize(x: Tensor, core: Tensor, block: int, dtype: str, group: int) -> list[Tensor]:
    """hadamard followed by quantize_activation, in one pass over x [..., F]."""
    return activation_format(dtype).quantize(hadamard(x, core, block), group)


def _fake_norm_quantize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str, dtype: str, group: int
) -> list[Tensor]:
    return _fake_activation(x, dtype, group)


@define(_fake_norm_quantize, since="cache")
def norm_quantize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str, dtype: str, group: int
) -> list[Tensor]:
    """rms_norm or layer_norm (`kind` rms, layer) followed by quantize_activation, in one pass over x [..., F]."""
    y = rms_norm(x, weight, eps) if kind == "rms" else layer_norm(x, weight, bias, eps)
    return activation_format(dtype).quantize(y, group)
