"""Kernel calls: one class per kernel, with the buffers that a call reads and writes, its weights, and its parameters.

A field that names a buffer or a weight holds its name in the program. `x_offset` and the like are columns (elements).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True)
class Call:
    """A call of one kernel: the buffers it reads and writes, the weights it reads, and the kernel's parameters.

    `read_fields` and `write_fields` of a class name its fields that hold buffers: a name, a tuple of names, or None.
    The KV cache (of a layer) and the caller's logits are not buffers.
    """

    kernel: ClassVar[str]
    read_fields: ClassVar[tuple[str, ...]] = ("x",)
    write_fields: ClassVar[tuple[str, ...]] = ("out",)
    name: str

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the buffers that the call reads, each once."""
        return self._buffers(self.read_fields)

    @property
    def writes(self) -> tuple[str, ...]:
        """Names of the buffers that the call writes, each once; none if it writes the caller's logits."""
        return self._buffers(self.write_fields)

    def _buffers(self, fields: tuple[str, ...]) -> tuple[str, ...]:
        values = (getattr(self, each) for each in fields)
        names = (name for value in values for name in (value if isinstance(value, tuple) else (value,)))
        return tuple(dict.fromkeys(name for name in names if name is not None))


TableType = Literal["f32", "bf16", "f16"]


@dataclass(frozen=True)
class Embed(Call):
    """out[t] = table[id] * scale, id = token_ids[t] or positions[t] by `index`. `table`: row-major [vocab, width].

    A table of type i8 is packed as w8_sym_channel weights of linears are, with the rows' scales in `row_scale`.
    Where the step gives a row's embedding, out[t] is that embedding times `given`; 0 if the step may give none.
    """

    kernel: ClassVar[str] = "embed"
    read_fields: ClassVar[tuple[str, ...]] = ()
    out: str
    table: str
    table_dtype: TableType | Literal["i8"]
    vocab: int
    scale: float = 1.0
    index: Literal["tokens", "positions"] = "tokens"
    given: float = 0.0
    row_scale: str | None = None


@dataclass(frozen=True)
class Norm(Call):
    """out = x / sqrt(mean(x^2) + eps) * weight (rms), or layer norm; also quantizes if out is q8.

    Reads as many columns of x as out has, from column `x_offset` on.
    """

    kernel: ClassVar[str] = "norm"
    kind: Literal["rms", "layer"]
    x: str
    out: str
    eps: float
    weight: str | None = None
    bias: str | None = None
    x_offset: int = 0


@dataclass(frozen=True)
class NormHeads(Call):
    """Normalizes `heads` blocks of `width` columns of x (f32), from column `x_offset` on, each in place.

    weight and bias are [width], or [heads * width] if `by_head`.
    """

    kernel: ClassVar[str] = "norm_heads"
    write_fields: ClassVar[tuple[str, ...]] = ("x",)
    kind: Literal["rms", "layer"]
    x: str
    x_offset: int
    heads: int
    width: int
    eps: float
    weight: str | None = None
    bias: str | None = None
    by_head: bool = False


@dataclass(frozen=True)
class QuantizeRows(Call):
    """out = x in out's dtype: integer codes with scales (q8), or rounded to bf16."""

    kernel: ClassVar[str] = "quantize"
    x: str
    out: str


@dataclass(frozen=True)
class Hadamard(Call):
    """out = x with each `block` columns multiplied by a Hadamard matrix / sqrt(block), in out's dtype.

    `core` is a weight, f32 [core_order * core_order], row-major: the matrix before its Sylvester doublings.
    """

    kernel: ClassVar[str] = "hadamard"
    x: str
    out: str
    block: int
    core: str
    core_order: int


@dataclass(frozen=True)
class Gemm(Call):
    """y[t, n] = sum_k x[t, k] * W[n, k] + bias[n], then the epilogue.

    `weights` maps the roles of the packed format (codes, scale, zero, group_scale, exponent, low, columns, starts)
    to weight names. Epilogues: store (out = y); add (out = residual + y, both f32, residual may be out itself);
    those of ops.GATED (silu_mul: out = silu(gate) * up, width n / 2, W's 16-row blocks alternate gate and up); logits
    (x is an `outputs` buffer, results go to the caller's logits and argmax, out is None).
    """

    kernel: ClassVar[str] = "gemm"
    read_fields: ClassVar[tuple[str, ...]] = ("x", "residual")
    x: str
    format: str
    n: int
    k: int
    weights: Mapping[str, str]
    epilogue: str = "store"
    out: str | None = None
    bias: str | None = None
    residual: str | None = None
    blocks: int = 0
    """16-row blocks of a weight with explicit output columns (role columns); 0: rows are in order."""
    packing: str = ""
    """Packing of the weight, if it differs from the target's packing for the format and activations."""
    wide: int = 0
    """Number of packed 8-bit rows of a mix_4_8 weight, if all of them come first."""
    runs: tuple[int, ...] = ()
    """Lengths, in block pairs, of runs of a mix_4_8 weight, each split over threads separately, as is the remainder."""


@dataclass(frozen=True)
class RopeAppend(Call):
    """Rotates q (in place) and k by position, and appends k and v to the layer's KV pages.

    qkv: f32 [tokens, width]; q, k and v start at the given columns (without v, only k is appended). `inv_freq` is a
    weight, f32 [rotary_dim / 2] (None: no rotation); `scaling` multiplies cos and sin. After the rotation, q is
    multiplied by its position's entry of the weight `query_table`, f32 [positions], and by the weight `query_weight`,
    f32 [head_dim]. The weight `center`, f32 [kv_heads * head_dim], is subtracted from k. None skips any of these. If
    `block`, a power of 2, is not 0, q and k are then multiplied by a Hadamard matrix in blocks of that many features.
    """

    kernel: ClassVar[str] = "rope_append"
    read_fields: ClassVar[tuple[str, ...]] = ("qkv",)
    write_fields: ClassVar[tuple[str, ...]] = ("qkv",)
    qkv: str
    q_offset: int
    k_offset: int
    v_offset: int | None
    heads: int
    kv_heads: int
    head_dim: int
    layer: int
    rotary_dim: int = 0
    inv_freq: str | None = None
    scaling: float = 1.0
    interleaved: bool = False
    center: str | None = None
    block: int = 0
    query_table: str | None = None
    query_weight: str | None = None


@dataclass(frozen=True)
class RopeHeads(Call):
    """Changes `heads` heads of x, f32 [tokens, width], from column `offset` on in place as RopeAppend changes q.

    The weight `center`, f32 [heads * head_dim], is subtracted after the factors `table` and `weight`, and before the
    Hadamard matrix.
    """

    kernel: ClassVar[str] = "rope_heads"
    write_fields: ClassVar[tuple[str, ...]] = ("x",)
    x: str
    offset: int
    heads: int
    head_dim: int
    rotary_dim: int = 0
    inv_freq: str | None = None
    scaling: float = 1.0
    interleaved: bool = False
    center: str | None = None
    block: int = 0
    table: str | None = None
    weight: str | None = None


@dataclass(frozen=True)
class Gather(Call):
    """out[t, i] = column index[i] of the concatenated sources, 0 where index[i] is -1. `index`: int32 weight [width].

    Source n is the `widths[n]` columns, f32, of buffer `sources[n]` from column `offsets[n]` on.
    """

    kernel: ClassVar[str] = "gather"
    read_fields: ClassVar[tuple[str, ...]] = ("sources",)
    sources: tuple[str, ...]
    offsets: tuple[int, ...]
    widths: tuple[int, ...]
    out: str
    index: str


@dataclass(frozen=True)
class Attention(Call):
    """out[t, h] = softmax(softcap(q k^T * scale) + mask) v over the layer's KV pages.

    q: f32 at column `q_offset` of its buffer, [tokens, heads, head_dim]; out: f32 [tokens, heads * value_dim].
    `window` > 0 lets position p see p - window + 1 .. p, `chunk` > 0 lets it see p - p % chunk .. p; `softcap` > 0 is
    cap * tanh(s / cap).
    """

    kernel: ClassVar[str] = "attention"
    read_fields: ClassVar[tuple[str, ...]] = ("q",)
    q: str
    q_offset: int
    out: str
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    layer: int
    window: int = 0
    softcap: float = 0.0
    sinks: str | None = None
    """Weight f32 [heads]: scores that only enter the softmax sum."""
    key_bias: str | None = None
    """Weight f32 [heads][max position]: added to scores, as the key position's entry minus the query position's."""
    center: str | None = None
    """Weight f32 [kv_heads * head_dim]: was subtracted from cached keys; scores are those of the keys with it."""
    value: tuple[int, int] | None = None
    """The features of the keys, from the first to before the second, that are the values; None: values are cached."""
    chunk: int = 0

    @property
    def value_dim(self) -> int:
        """Features of a value, and of a head of the result."""
        return self.head_dim if self.value is None else self.value[1] - self.value[0]


@dataclass(frozen=True)
class TakeRows(Call):
    """out[r] = x[output_rows[r]], the rows with requested logits. out is an `outputs` buffer."""

    kernel: ClassVar[str] = "take_rows"
    x: str
    out: str


@dataclass(frozen=True)
class Elementwise(Call):
    """out = kind(x, operand), all f32 [rows, width]; out may be x itself.

    Kinds: those of ops.UNARY (no operand); those of ops.CURVES (`weight`: the parameters); scale (times `factor`);
    shift (plus `factor`); power (to the power `factor`, one of ops.POWERS); clamp (to `low`, `high`); mul_row and
    add_row (times and plus the single column of `other`); add and mul (operand is the buffer `other`, or the weight
    vector `weight` [width]). x and other are read from columns `x_offset` and `other_offset` on.
    """

    kernel: ClassVar[str] = "elementwise"
    read_fields: ClassVar[tuple[str, ...]] = ("x", "other")
    kind: str
    x: str
    out: str
    other: str | None = None
    weight: str | None = None
    factor: float = 1.0
    x_offset: int = 0
    other_offset: int = 0
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class AllGather(Call):
    """Writes the first `width` columns of x of `ranks` processes side by side to the caller's logits, and argmax.

    x is an f32 `outputs` buffer.
    """

    kernel: ClassVar[str] = "all_gather"
    write_fields: ClassVar[tuple[str, ...]] = ()
    x: str
    ranks: int
    width: int


@dataclass(frozen=True)
class AllReduce(Call):
    """out = the sum of x over `ranks` processes, added in their order; both f32 [rows, width], and not the same."""

    kernel: ClassVar[str] = "all_reduce"
    x: str
    out: str
    ranks: int


@dataclass(frozen=True)
class Mean(Call):
    """out[t, i] = the mean of columns i * `width` to (i + 1) * `width` of x from column `x_offset` on; all f32."""

    kernel: ClassVar[str] = "mean"
    x: str
    out: str
    width: int
    x_offset: int = 0


@dataclass(frozen=True)
class Route(Call):
    """A router operator on `width` columns of x, f32 [tokens, ...], from column `x_offset` on.

    softmax: over the columns. top_k: int32 indices of the largest columns, as many as out has. pick: x, or the weight
    `table` if x is None, at the indices in buffer `index`. near_share: the operator, of indices and `tolerance`.
    bound_choice: int32 indices of buffer `index`, of `width` - 1 at most; x is None.
    normalize: x / max(sum of x + `eps`, `floor`). limit_groups: minus infinity outside the `keep` best of `groups`
    groups of columns, ranked by the sum of their `count` largest.
    """

    kernel: ClassVar[str] = "route"
    read_fields: ClassVar[tuple[str, ...]] = ("x", "index")
    kind: Literal["softmax", "top_k", "pick", "near_share", "bound_choice", "normalize", "limit_groups"]
    x: str | None
    out: str
    width: int
    x_offset: int = 0
    index: str | None = None
    table: str | None = None
    tolerance: float = 0.0
    eps: float = 0.0
    floor: float = 0.0
    groups: int = 0
    keep: int = 0
    count: int = 0


@dataclass(frozen=True)
class EveryExpert(Call):
    """out[t, i] = i for i < `experts`: an int32 index, which chooses every expert."""

    kernel: ClassVar[str] = "every_expert"
    read_fields: ClassVar[tuple[str, ...]] = ()
    out: str
    experts: int


@dataclass(frozen=True)
class ExpertGemm(Call):
    """y[t, s] = W[index[t, s]] x for each slot s. x: f32, one input per token (`x_slots` 1) or one per slot.

    `weights` as in Gemm, with the experts' `rows` concatenated, each expert padded to whole blocks. Inputs are
    quantized to `activation`, with sums over `group` inputs. out: f32 [tokens, slots * n]. Epilogues: store, or those
    of ops.GATED as in Gemm, with an expert's blocks alternating gate and up. If `limit` is given, gate is clamped to at
    most `limit` and up to [-limit, limit]; then `offset` is added to up.
    """

    kernel: ClassVar[str] = "expert_gemm"
    read_fields: ClassVar[tuple[str, ...]] = ("x", "index")
    x: str
    index: str
    out: str
    format: str
    activation: str
    group: int
    n: int
    rows: int
    k: int
    experts: int
    slots: int
    x_slots: int
    weights: Mapping[str, str]
    strides: Mapping[str, int]
    """Stride between experts in bytes, by role."""
    bias: str | None = None
    epilogue: str = "store"
    limit: float | None = None
    offset: float = 0.0


@dataclass(frozen=True)
class Combine(Call):
    """out[t, n] = sum over slots s of x[t, s] * scores[t, n, s], for `results` n; x: f32 [tokens, slots * width].

    Without scores, it is the sum of x[t, s], one result.
    """

    kernel: ClassVar[str] = "combine"
    read_fields: ClassVar[tuple[str, ...]] = ("x", "scores")
    x: str
    out: str
    slots: int
    scores: str | None = None
    results: int = 1


@dataclass(frozen=True)
class Logits(Call):
    """Writes x, an f32 `outputs` buffer, to the caller's logits and argmax, if other calls follow the last gemm."""

    kernel: ClassVar[str] = "logits"
    write_fields: ClassVar[tuple[str, ...]] = ()
    x: str
