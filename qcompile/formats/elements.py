"""E2M1, the 4-bit floating-point element of MXFP4 and NVFP4: a sign, two exponent bits and one mantissa bit."""

from __future__ import annotations

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes 0 to 7; codes 8 to 15 are their negatives."""
E2M1_MAX_EXPONENT = 2
_VALUES = torch.tensor(E2M1 + tuple(-value for value in E2M1))


def e2m1_codes(x: Tensor) -> Tensor:
    """f32 [...] -> 4-bit codes (sign, two exponent bits, one mantissa bit); ties to even, saturating."""
    size = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for index in range(7):
        edge = (E2M1[index] + E2M1[index + 1]) / 2
        code += (size >= edge) if index % 2 else (size > edge)
    return code + 8 * (torch.signbit(x) & (code > 0)).to(torch.uint8)


def e2m1_values(codes: Tensor) -> Tensor:
    """4-bit codes uint8 [...] -> f32 values. E2M1 is convex in the code, so it is the maximum of three lines."""
    negative = codes >= 8
    size = codes.float() - 8.0 * negative.float()
    value = torch.maximum(torch.maximum(size / 2, size - 2), 2 * size - 8)
    return torch.where(negative, -value, value)


def e2m1_round(x: Tensor) -> Tensor:
    """f32 [...] -> the nearest E2M1 values."""
    return _VALUES[e2m1_codes(x).long()]
