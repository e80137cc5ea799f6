"""Rowwise kernels through a generated library: its logits are each kernel's result for table[token]."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qcompile import ops
from qcompile.codegen.calls import Call, Elementwise, Embed, Norm
from qcompile.formats.blocks import as_blob, pack_vector
from qcompile.formats.symmetric import W8_SYM_CHANNEL
from tests.support.columns import Case, Columns

WIDTH = 40  # not a multiple of a vector: the padding must stay zero
MAKE = torch.Generator().manual_seed(3)
TABLE = 3 * torch.randn(WIDTH, WIDTH, generator=MAKE)
PLACES = torch.randn(64, WIDTH, generator=MAKE)
TABLE[1, :12] = torch.tensor([0, -0.0, 1e-7, -1e-7, -1e-6, -1e-4, -0.01, -0.2499, -0.25, -0.26, -90, 90])
CURVE = torch.tensor([0.8, 1.3, 0.5, -1e-6])  # of xIELU: alpha_p, alpha_n, beta and eps
WEIGHT, BIAS = torch.randn(WIDTH, generator=MAKE), torch.randn(WIDTH, generator=MAKE)

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "mish": F.mish,
    "elu": F.elu,
    "softplus": F.softplus,
    "exp": lambda x: torch.exp(0.5 * x),  # of numbers with finite exponentials
}


_BITS = (torch.arange(TABLE.numel()) * 7919 % 0x7C00).to(torch.int16).view(TABLE.shape)
HALVES = torch.where(TABLE < 0, -_BITS.view(torch.float16), _BITS.view(torch.float16))
TOKENS = [3, 1, 39, 1, 0]
X = TABLE[TOKENS]
AT = PLACES[5:10]
RMS = Norm("n", "rms", "x", "y", 1e-5, "weight")
CALLS: dict[str, list[Call]] = {
    **{kind: [Elementwise("f", kind, "x", "y")] for kind in UNARY},
    "exp": [Elementwise("half", "scale", "x", "y", factor=0.5), Elementwise("f", "exp", "y", "y")],
    "xielu": [Elementwise("bend", "xielu", "x", "y", weight="curve")],
    "scale, add and mul": [
        Embed("place", "places", "positions", "f32", 64, scale=0.5, index="positions"),
        Elementwise("add", "add", "x", "y", other="places"),
        Elementwise("mul", "mul", "y", "y", weight="weight"),
        Elementwise("scale", "scale", "y", "y", factor=1.5),
        Elementwise("bias", "add", "y", "y", weight="bias"),
        Elementwise("gate", "mul", "y", "y", other="x"),
    ],
    "rms": [RMS],
    "layer": [replace(RMS, kind="layer", bias="bias")],
    "layer without weights": [replace(RMS, kind="layer", weight=None)],
    "large eps": [replace(RMS, eps=3.0)],
    "bf16": [Embed("embed16", "y", "table16", "bf16", WIDTH)],
    "f16": [Embed("halves", "y", "halves", "f16", WIDTH)],
    "i8": [Embed("codes", "y", "codes", "i8", WIDTH, scale=1.5, row_scale="row_scale")],
}
CODES = W8_SYM_CHANNEL.quantize(TABLE)


@pytest.fixture(scope="module")
def rows() -> Iterator[dict[str, np.ndarray]]:
    """Result in buffer y of each of CALLS, with X in buffer x."""
    blobs = {
        "table": as_blob(TABLE),
        "table16": as_blob(TABLE.bfloat16()),
        "halves": as_blob(HALVES),
        "positions": as_blob(PLACES),
        "weight": pack_vector(WEIGHT),
        "bias": pack_vector(BIAS),
        "curve": pack_vector(CURVE),
        **dict(zip(("codes", "row_scale"), W8_SYM_CHANNEL.pack(CODES).values(), strict=True)),
    }
    embed = Embed("embed", "x", "table", "f32", WIDTH)
    cases = {name: Case([embed, *calls], "y") for name, calls in CALLS.items()}
    columns = Columns(dict.fromkeys(("x", "places", "y"), WIDTH), blobs, cases, threads=2)
    yield columns.rows(TOKENS, 5)
    columns.close()


@pytest.mark.parametrize("kind", UNARY)
def test_unary(rows: dict[str, np.ndarray], kind: str) -> None:
    np.testing.assert_allclose(rows[kind], UNARY[kind](X), atol=1e-6, rtol=1e-6)


def test_xielu(rows: dict[str, np.ndarray]) -> None:
    # A few roundings relative to x, however small: exp(x) - 1 would cancel near 0.
    wanted = ops.xielu(X.double(), CURVE)
    assert ((torch.from_numpy(rows["xielu"]) - wanted).abs() <= 3e-7 * (X.abs() + wanted.abs())).all()


def test_scale_add_and_mul(rows: dict[str, np.ndarray]) -> None:
    expected = ((X + 0.5 * AT) * WEIGHT * 1.5 + BIAS) * X
    np.testing.assert_allclose(rows["scale, add and mul"], expected, atol=1e-5, rtol=1e-6)


def test_norms(rows: dict[str, np.ndarray]) -> None:
    expected = {
        "rms": F.rms_norm(X, (WIDTH,), WEIGHT, 1e-5),
        "layer": F.layer_norm(X, (WIDTH,), WEIGHT, BIAS, 1e-5),
        "layer without weights": F.layer_norm(X, (WIDTH,), None, None, 1e-5),
        "large eps": F.rms_norm(X, (WIDTH,), WEIGHT, 3.0),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(rows[name], value, atol=1e-5, err_msg=name)


def test_embedding_of_bf16_is_exact(rows: dict[str, np.ndarray]) -> None:
    np.testing.assert_array_equal(rows["bf16"], TABLE.bfloat16().float()[TOKENS])


def test_embedding_of_f16_is_exact(rows: dict[str, np.ndarray]) -> None:
    """Of all exponents, also subnormal numbers."""
    np.testing.assert_array_equal(rows["f16"], HALVES.float()[TOKENS])


def test_embedding_of_codes_is_exact(rows: dict[str, np.ndarray]) -> None:
    np.testing.assert_array_equal(rows["i8"], (W8_SYM_CHANNEL.dequantize(CODES, WIDTH) * 1.5)[TOKENS])
