"""What linears do with their results, on float values: gates and residuals."""

from __future__ import annotations

import torch
from torch import Tensor

from qcompile.ops.model import GATE_BLOCK, GATED, UNARY


def gate(y: Tensor, kind: str, width: int, limit: float | None = None, offset: float = 0.0) -> Tensor:
    """y [..., 2N'], gate and up interleaved in blocks of GATE_BLOCK features -> kind(gate) * up, [..., width].

    `limit` bounds gate by at most limit, and up to ±limit (gpt-oss); `offset` is then added to up.
    """
    first, second = (part.flatten(-2) for part in y.unflatten(-1, (-1, 2, GATE_BLOCK)).unbind(-2))
    if limit is not None:
        first, second = first.clamp(max=limit), second.clamp(-limit, limit)
    return (UNARY[kind](first) * (second + offset if offset else second))[..., :width].contiguous()


def gemm_float(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, epilogue: str, width: int
) -> Tensor:
    """gemm on the floats [..., K] and [N, K] that its quantized operands represent."""
    y = torch.nn.functional.linear(x, weight, bias)
    y = gate(y, GATED[epilogue], width) if epilogue in GATED else y[..., :width].contiguous()
    return y if residual is None else residual + y
