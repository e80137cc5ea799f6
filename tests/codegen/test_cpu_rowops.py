"""Rowwise kernels through a generated library: f(table[token]) @ identity, so logits are the kernel's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qcompile import numerics
from qcompile.codegen import program as p
from tests.codegen.tiny import Chunk, Runner, Tiny

WIDTH = 40  # not a multiple of a vector: the padding must stay zero
TINY = Tiny(vocab=WIDTH, hidden=WIDTH, max_position=64, kv_heads=1, head_dim=16, layers=1)
MAKE = torch.Generator().manual_seed(3)
TABLE = 3 * torch.randn(WIDTH, WIDTH, generator=MAKE)
PLACES = torch.randn(64, WIDTH, generator=MAKE)
WEIGHT, BIAS = torch.randn(WIDTH, generator=MAKE), torch.randn(WIDTH, generator=MAKE)

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


@contextmanager
def rows_of(calls: list[p.Call], dtype: str = "f32") -> Iterator[Callable[[list[int]], np.ndarray]]:
    """Opens `embed -> calls (from buffer x to buffer y) -> take_rows -> identity`; gives tokens to rows of y."""
    buffers = [p.Buffer(name, "f32", WIDTH, offset=4 * 64 * i) for i, name in enumerate(("x", "places", "y"))]
    buffers.append(p.Buffer("last", "f32", WIDTH, rows="outputs"))
    table = TABLE.bfloat16() if dtype == "bf16" else TABLE
    identity = numerics.pack_weight(numerics.quantize_weight(torch.eye(WIDTH), "f32"), "f32")
    blobs = {
        "table": numerics.as_blob(table),
        "positions": numerics.as_blob(PLACES),
        "weight": numerics.pack_vector(WEIGHT),
        "bias": numerics.pack_vector(BIAS),
        "identity": identity["codes"],
    }
    everything = (
        p.Embed("embed", "x", "table", dtype, WIDTH),  # type: ignore[arg-type]
        *calls,
        p.TakeRows("take", "y", "last"),
        p.Gemm("head", "last", "f32", WIDTH, WIDTH, {"codes": "identity"}, "logits"),
    )
    kv = p.KVLayout("kv32", 1, 1, 16)
    program = p.Program(WIDTH, 64, tuple(buffers), everything, tuple(blobs), kv)
    runner = Runner(TINY, threads=2, built=(program, blobs))
    yield lambda tokens: runner.step([Chunk(tokens, 5, [0])])
    runner.close()


TOKENS = [3, 1, 39, 1, 0]
X = TABLE[TOKENS]
AT = PLACES[5:10]


@pytest.mark.parametrize("kind", UNARY)
def test_unary(kind: str) -> None:
    with rows_of([p.Elementwise("f", kind, "x", "y")]) as rows:
        np.testing.assert_allclose(rows(TOKENS), UNARY[kind](X), atol=1e-6, rtol=1e-6)


def test_scale_add_and_mul() -> None:
    calls: list[p.Call] = [
        p.Embed("place", "places", "positions", "f32", 64, scale=0.5, index="positions"),
        p.Elementwise("add", "add", "x", "y", other="places"),
        p.Elementwise("mul", "mul", "y", "y", weight="weight"),
        p.Elementwise("scale", "scale", "y", "y", factor=1.5),
        p.Elementwise("bias", "add", "y", "y", weight="bias"),
        p.Elementwise("gate", "mul", "y", "y", other="x"),
    ]
    with rows_of(calls) as rows:
        expected = ((X + 0.5 * AT) * WEIGHT * 1.5 + BIAS) * X
        np.testing.assert_allclose(rows(TOKENS), expected, atol=1e-5, rtol=1e-6)


def test_norms() -> None:
    rms = p.Norm("n", "rms", "x", "y", 1e-5, "weight")
    with rows_of([rms]) as rows:
        np.testing.assert_allclose(rows(TOKENS), F.rms_norm(X, (WIDTH,), WEIGHT, 1e-5), atol=1e-5)
    with rows_of([replace(rms, kind="layer", bias="bias")]) as rows:
        np.testing.assert_allclose(rows(TOKENS), F.layer_norm(X, (WIDTH,), WEIGHT, BIAS, 1e-5), atol=1e-5)
    with rows_of([replace(rms, kind="layer", weight=None)]) as rows:
        np.testing.assert_allclose(rows(TOKENS), F.layer_norm(X, (WIDTH,), None, None, 1e-5), atol=1e-5)
    with rows_of([replace(rms, eps=3.0)]) as rows:
        np.testing.assert_allclose(rows(TOKENS), F.rms_norm(X, (WIDTH,), WEIGHT, 3.0), atol=1e-5)


def test_embedding_of_bf16_is_exact() -> None:
    with rows_of([p.Elementwise("f", "scale", "x", "y", factor=1.0)], "bf16") as rows:
        np.testing.assert_array_equal(rows(TOKENS), TABLE.bfloat16().float()[TOKENS])
