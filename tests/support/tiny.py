"""A two-layer llama with random weights: its Program written by hand, its torch reference, and a runner over ctypes."""

from __future__ import annotations

import ctypes
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qcompile.codegen.buffers import PAD, Buffer
from qcompile.codegen.calls import Attention, Call, Embed, Gemm, Norm, QuantizeRows, RopeAppend, TakeRows
from qcompile.codegen.cpu import compiler, render
from qcompile.codegen.kv_layout import KVLayout
from qcompile.codegen.program import Program
from qcompile.codegen.sizes import round_up
from qcompile.formats.activations import activation_format, dequantize_activation
from qcompile.formats.blocks import as_blob, pack_vector
from qcompile.formats.kv import HIER_GROUP, kv_format, read_hier
from qcompile.formats.registry import weight_format
from qcompile.runtime.cpu.executor import QcBatch, QcConfig, bind
from qcompile.runtime.loader import Arena
from qcompile.targets import Target, get_target


@dataclass(frozen=True)
class Tiny:
    """Shape and formats of the model. `act` is the dtype GEMMs read, `activation` what the codes of q8 are."""

    format: str = "f32"
    act: str = "f32"
    kv: str = "kv32"
    hidden: int = 96
    inner: int = 160
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    layers: int = 2
    vocab: int = 203
    rotary_dim: int = 32
    interleaved: bool = False
    window: int = 0
    softcap: float = 0.0
    max_position: int = 512
    seed: int = 0
    activation: str = "int8"

    def group(self, width: int) -> int:
        """Inputs per activation sum."""
        spec = weight_format(self.format), activation_format(self.activation)
        return spec[0].sum_group or spec[1].group or round_up(width, PAD)

    @property
    def qkv_width(self) -> int:
        """Columns of the joined q, k and v."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def weights(self) -> dict[str, Tensor]:
        """Float weights by name; gate and up apart."""
        make = torch.Generator().manual_seed(self.seed)

        def linear(n: int, k: int) -> Tensor:
            return torch.randn(n, k, generator=make) / math.sqrt(k)

        out = {"embed": torch.randn(self.vocab, self.hidden, generator=make)}
        attended = self.heads * self.head_dim
        for i in range(self.layers):
            out[f"{i}.norm1"] = 1 + 0.1 * torch.randn(self.hidden, generator=make)
            out[f"{i}.norm2"] = 1 + 0.1 * torch.randn(self.hidden, generator=make)
            out[f"{i}.qkv"] = linear(self.qkv_width, self.hidden)
            out[f"{i}.qkv_bias"] = 0.1 * torch.randn(self.qkv_width, generator=make)
            out[f"{i}.o"] = linear(self.hidden, attended)
            out[f"{i}.gate"] = linear(self.inner, self.hidden)
            out[f"{i}.up"] = linear(self.inner, self.hidden)
            out[f"{i}.down"] = linear(self.hidden, self.inner)
        out["norm"] = 1 + 0.1 * torch.randn(self.hidden, generator=make)
        out["head"] = linear(self.vocab, self.hidden)
        out["inv_freq"] = 1 / 10000 ** (torch.arange(0, self.rotary_dim, 2).float() / self.rotary_dim)
        return out


@dataclass
class _Builder:
    """Writes the program and packs the weights."""

    tiny: Tiny
    blobs: dict[str, Tensor] = field(default_factory=dict)
    buffers: list[Buffer] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    top: dict[str, int] = field(default_factory=lambda: {"tokens": 0, "outputs": 0})

    def buffer(self, name: str, dtype: Any, width: int, rows: Any = "tokens") -> str:
        group = self.tiny.group(width) if dtype == "q8" else 0
        made = Buffer(name, dtype, width, group, rows, self.top[rows], self.tiny.activation)
        self.top[rows] = round_up(made.offset + made.row_bytes, 64)
        self.buffers.append(made)
        return name

    def vector(self, name: str, value: Tensor) -> str:
        self.blobs[name] = pack_vector(value)
        return name

    def gemm(self, name: str, w: Tensor, x: str, **rest: Any) -> None:
        packed = weight_format(self.tiny.format).pack(weight_format(self.tiny.format).quantize(w))
        roles = {role: f"{name}.{role}" for role in packed}
        self.blobs |= {roles[role]: blob for role, blob in packed.items()}
        self.calls.append(Gemm(name, x, self.tiny.format, w.shape[0], w.shape[1], roles, **rest))

    def gemm_input(self, name: str, x: str, width: int, rows: Any = "tokens") -> str:
        """x in the dtype GEMMs read: itself, or quantized."""
        if self.tiny.act == "f32":
            return x
        out = self.buffer(f"{name}.in", self.tiny.act, width, rows)
        self.calls.append(QuantizeRows(f"{name}.quantize", x, out))
        return out

    def layer(self, i: int, w: dict[str, Tensor]) -> None:
        t = self.tiny
        h, qkv = "h", self.buffer(f"{i}.qkv", "f32", t.qkv_width)
        x = self.buffer(f"{i}.x", t.act, t.hidden)
        self.calls.append(Norm(f"{i}.norm1", "rms", h, x, 1e-6, self.vector(f"{i}.norm1", w[f"{i}.norm1"])))
        bias = self.vector(f"{i}.qkv_bias", w[f"{i}.qkv_bias"])
        self.gemm(f"{i}.qkv", w[f"{i}.qkv"], x, out=qkv, bias=bias)
        k_at, v_at = t.heads * t.head_dim, (t.heads + t.kv_heads) * t.head_dim
        rope = (t.rotary_dim, "inv_freq", 1.0, t.interleaved)
        self.calls.append(RopeAppend(f"{i}.rope", qkv, 0, k_at, v_at, t.heads, t.kv_heads, t.head_dim, i, *rope))
        attended = self.buffer(f"{i}.attended", "f32", k_at)
        shape = (t.heads, t.kv_heads, t.head_dim, t.head_dim**-0.5, i, t.window, t.softcap)
        self.calls.append(Attention(f"{i}.attention", qkv, 0, attended, *shape))
        self.gemm(f"{i}.o", w[f"{i}.o"], self.gemm_input(f"{i}.o", attended, k_at), epilogue="add", residual=h, out=h)
        y, inner = self.buffer(f"{i}.y", t.act, t.hidden), self.buffer(f"{i}.inner", "f32", t.inner)
        self.calls.append(Norm(f"{i}.norm2", "rms", h, y, 1e-6, self.vector(f"{i}.norm2", w[f"{i}.norm2"])))
        both = torch.stack([w[f"{i}.gate"].view(-1, 16, t.hidden), w[f"{i}.up"].view(-1, 16, t.hidden)], 1)
        self.gemm(f"{i}.gate_up", both.reshape(-1, t.hidden), y, epilogue="silu_mul", out=inner)
        z = self.gemm_input(f"{i}.down", inner, t.inner)
        self.gemm(f"{i}.down", w[f"{i}.down"], z, epilogue="add", residual=h, out=h)

    def program(self) -> Program:
        t, w = self.tiny, self.tiny.weights()
        self.buffer("h", "f32", t.hidden)
        self.blobs["embed"] = as_blob(w["embed"])
        self.calls.append(Embed("embed", "h", "embed", "f32", t.vocab))
        self.vector("inv_freq", w["inv_freq"])
        for i in range(t.layers):
            self.layer(i, w)
        last = self.buffer("last", "f32", t.hidden, "outputs")
        final = self.buffer("final", t.act, t.hidden, "outputs")
        self.calls.append(TakeRows("take", "h", last))
        self.calls.append(Norm("norm", "rms", last, final, 1e-6, self.vector("norm", w["norm"])))
        self.gemm("head", w["head"], final, epilogue="logits")
        kv = KVLayout(t.kv, t.layers, t.kv_heads, t.head_dim)  # type: ignore[arg-type]
        parts = tuple(self.buffers), tuple(self.calls), tuple(self.blobs)
        return Program(t.vocab, t.max_position, *parts, kv, head="head")


def build(tiny: Tiny) -> tuple[Program, dict[str, Tensor]]:
    """The program, and its packed weights by name in order."""
    builder = _Builder(tiny)
    return builder.program(), builder.blobs


def head_weight(tiny: Tiny) -> Tensor:
    """The head's weight [vocab, hidden] as kernels read it, float64."""
    format = weight_format(tiny.format)
    return format.dequantize(format.quantize(tiny.weights()["head"]), tiny.hidden).double()


def reference(tiny: Tiny, tokens: Sequence[int]) -> np.ndarray:
    """Logits [tokens, vocab] of one sequence in torch, every tensor rounded as the kernels round it."""
    t, w = tiny, tiny.weights()

    def linear(x: Tensor, name: str) -> Tensor:
        weight = w[name]
        parts = weight_format(t.format).quantize(weight)
        weight = weight_format(t.format).dequantize(parts, weight.shape[1])
        kind = t.activation if t.act == "q8" else t.act
        x = dequantize_activation(activation_format(kind).quantize(x.float(), t.group(weight.shape[1])))
        return x.double() @ weight.double().T

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w[name].double()

    h = w["embed"][list(tokens)].double()
    for i in range(t.layers):
        qkv = linear(norm(h, f"{i}.norm1"), f"{i}.qkv") + w[f"{i}.qkv_bias"]
        heads = qkv.view(len(tokens), -1, t.head_dim)
        q, k, v = heads.split([t.heads, t.kv_heads, t.kv_heads], 1)
        q, k = rope(t, q, w["inv_freq"]), rope(t, k, w["inv_freq"])
        k, v = (kv_format(t.kv).round_trip(x.float()).double() for x in (k, v))
        h = h + linear(attend_hier(t, q, k, v) if kv_format(t.kv).hierarchical else attend(t, q, k, v), f"{i}.o")
        x = norm(h, f"{i}.norm2")
        h = h + linear(torch.nn.functional.silu(linear(x, f"{i}.gate")) * linear(x, f"{i}.up"), f"{i}.down")
    return linear(norm(h, "norm"), "head").float().numpy()


def rope(t: Tiny, x: Tensor, inv_freq: Tensor) -> Tensor:
    """x [tokens, heads, head_dim] rotated by position."""
    angle = (torch.arange(x.shape[0])[:, None].float() * inv_freq).double()[:, None]
    half, out = t.rotary_dim // 2, x.clone()
    first = (..., slice(0, 2 * half, 2)) if t.interleaved else (..., slice(0, half))
    second = (..., slice(1, 2 * half, 2)) if t.interleaved else (..., slice(half, 2 * half))
    out[first] = x[first] * angle.cos() - x[second] * angle.sin()
    out[second] = x[second] * angle.cos() + x[first] * angle.sin()
    return out


def attend(t: Tiny, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention [tokens, heads * head_dim]."""
    k, v = (x.repeat_interleave(t.heads // t.kv_heads, 1) for x in (k, v))
    score = torch.einsum("thd,shd->hts", q, k) * t.head_dim**-0.5
    if t.softcap:
        score = t.softcap * torch.tanh(score / t.softcap)
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
    hidden = (distance < 0) | ((distance >= t.window) if t.window else torch.tensor(False))
    score = score.masked_fill(hidden, -math.inf)
    return torch.einsum("hts,shd->thd", score.softmax(-1), v).reshape(len(q), -1)


def attend_hier(t: Tiny, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As `attend`, each query reading the hierarchical cache as its position has it: alike for those of a group."""
    rows = []
    for start in range(0, len(q), HIER_GROUP):
        end = min(start + HIER_GROUP, len(q))
        seen = read_hier(k[:end], v[:end], kv_format(t.kv).read_bits)
        rows.append(attend(t, q[:end], *seen)[start:])
    return torch.cat(rows)


@dataclass(frozen=True)
class Chunk:
    """Rows of one sequence in a step: `tokens` from position `start`, its pages, and its slot of recurrent states.

    `certain` leading positions will not be taken back.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    slot: int = 0
    certain: int = (1 << 31) - 1


class Runner:
    """A compiled program opened through its C interface. The KV arena starts as NaNs."""

    def __init__(
        self,
        tiny: Tiny,
        threads: int = 1,
        target: Target | None = None,
        pages: int = 24,
        max_tokens: int = 160,
        built: tuple[Program, dict[str, Tensor]] | None = None,
    ) -> None:
        program, blobs = built or build(tiny)
        target = target or get_target("cpu")
        self.tiny, self.max_tokens = tiny, max_tokens
        self.library = load_library(render.render(program, target), target)
        self._weights = [aligned(blob.numpy()) for blob in blobs.values()]
        self._pointers = (ctypes.c_void_p * len(blobs))(*[w.ctypes.data for w in self._weights])
        self._kv = Arena(pages * program.kv.page_bytes)
        self._kv.view[:] = b"\xff" * self._kv.size
        config = QcConfig(ctypes.addressof(self._pointers), self._kv.address, pages, threads, max_tokens, max_tokens)
        self.handle = self.library.qc_open(ctypes.byref(config))
        assert self.handle

    def batch(
        self, chunks: Sequence[Chunk], rows: Sequence[int] | None = None
    ) -> tuple[QcBatch, dict[str, np.ndarray]]:
        """The C batch, and the arrays it points to. `rows` are the output rows (all by default)."""
        ids = [t for c in chunks for t in c.tokens]
        stride = max(len(c.pages) for c in chunks)
        lengths = [len(c.tokens) for c in chunks]
        arrays = {
            "token_ids": np.array(ids, np.int32),
            "positions": np.concatenate([np.arange(c.start, c.start + len(c.tokens)) for c in chunks]).astype(np.int32),
            "query_start": np.cumsum([0, *lengths]).astype(np.int32),
            "block_table": np.array([[*c.pages, *[0] * (stride - len(c.pages))] for c in chunks], np.int32),
            "output_rows": np.arange(len(ids), dtype=np.int32) if rows is None else np.array(rows, np.int32),
        }
        outputs = len(arrays["output_rows"])
        arrays["logits"] = np.full((outputs, self.tiny.vocab), np.nan, np.float32)
        arrays["argmax"] = np.full(outputs, -1, np.int32)
        pointers = {name: a.ctypes.data for name, a in arrays.items()}
        return QcBatch(len(ids), len(chunks), outputs, stride, **pointers), arrays

    def step(self, chunks: Sequence[Chunk], rows: Sequence[int] | None = None) -> np.ndarray:
        """Logits [rows, vocab] of one step."""
        batch, arrays = self.batch(chunks, rows)
        assert self.library.qc_step(self.handle, ctypes.byref(batch)) == 0
        np.testing.assert_array_equal(arrays["argmax"], arrays["logits"].argmax(-1))
        return arrays["logits"]

    def hidden(self, chunks: Sequence[Chunk], rows: Sequence[int] | None = None) -> np.ndarray:
        """Final hidden states [rows, hidden] of one step."""
        batch, arrays = self.batch(chunks, rows)
        result = np.full((batch.outputs, self.tiny.hidden), np.nan, np.float32)
        assert self.library.qc_hidden(self.handle, ctypes.byref(batch), result.ctypes.data) == 0
        assert np.isnan(arrays["logits"]).all() and (arrays["argmax"] == -1).all()
        return result

    def forward(self, tokens: Sequence[int], pages: Sequence[int], chunk: int) -> np.ndarray:
        """Logits of a whole sequence, `chunk` tokens a step."""
        starts = range(0, len(tokens), chunk)
        return np.concatenate([self.step([Chunk(tokens[i : i + chunk], i, pages)]) for i in starts])

    def close(self) -> None:
        """Free the model."""
        self.library.qc_close(self.handle)


def aligned(data: np.ndarray) -> np.ndarray:
    """A copy of `data` that starts on a 64-byte boundary."""
    raw = np.zeros(data.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    out = raw[start : start + data.nbytes]
    out[:] = data.view(np.uint8).reshape(-1)
    return out


def load_library(source: str, target: Target) -> Any:
    """Compile and open a library."""
    binary = compiler.compile(source, target)
    handle, path = tempfile.mkstemp(suffix=".so")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(binary)
        library = ctypes.CDLL(path)
    finally:
        os.unlink(path)
    bind(library)
    return library
