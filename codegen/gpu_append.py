"""GPU kernels that rotate queries and keys and put keys and values into the cache (gpu_attention.py has its layout).

In a hierarchical cache the programs of a group's first row also round the last group but one. A step of few rows writes
to the ring. One of many rows may have more groups than the ring, so its keys and values are staged in a buffer:
AppendSpec writes them there, StagedSpec rounds groups, attention reads the step's positions from the buffer and older
ones from the ring, and only then StagedSpec copies the newest groups to the ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from qcompile.codegen import program as p
from qcompile.codegen.gpu_attention import GpuKV, page_arguments, power_of_two
from qcompile.codegen.gpu_compile import Argument, Kernel, render_template
from qcompile.codegen.program import RING_GROUPS
from qcompile.numerics import HIER_GROUP

# 2 pi in parts: two short ones whose products with whole numbers up to 2^12 are exact, and the rest.
_TWO_PI = (-6.28125, -0.0019350051879882812, -3.01991605e-07)


def _group_constants(kv: GpuKV, shares: int) -> dict[str, int]:
    """Template constants for rounding a group in `shares` (large heads: twice as many) of whole pairs of channels."""
    block = max(power_of_two(kv.width), 2)
    ring = RING_GROUPS * HIER_GROUP // kv.page_tokens
    shares *= 2 if kv.dim > 128 else 1
    return {"age": HIER_GROUP, "ring_pages": ring, "plane_block": block, "shares": min(shares, block // 2)}


@dataclass(frozen=True)
class HeadNorm:
    """The norm of each head by itself: weight and bias [dim], or [heads, dim] where they are `by_head`."""

    kind: Literal["rms", "layer"]
    eps: float
    weight: bool = False
    bias: bool = False
    by_head: bool = False

    @classmethod
    def of(cls, c: p.NormHeads | None) -> HeadNorm | None:
        """That of a call."""
        return None if c is None else cls(c.kind, c.eps, c.weight is not None, c.bias is not None, c.by_head)

    @property
    def vectors(self) -> list[str]:
        """What there is of weight and bias."""
        return ["weight"] * self.weight + ["bias"] * self.bias


def fused_part(norm: p.NormHeads, calls: Sequence[p.Call]) -> str:
    """q or k, if the append that follows (in `calls`, after other norms) can fuse this norm of it; else nothing."""
    append = next((call for call in calls if not isinstance(call, p.NormHeads)), None)
    if not isinstance(append, p.RopeAppend) or append.qkv != norm.x or norm.width != append.head_dim:
        return ""
    parts = {"q": (append.q_offset, append.heads), "k": (append.k_offset, append.kv_heads)}
    return next((part for part, place in parts.items() if place == (norm.x_offset, norm.heads)), "")


@dataclass(frozen=True)
class AppendSpec:
    """Rotates q and k of x [tokens, stride] (f32) in place, and writes k and v to their pages.

    First heads are normalized by `norm_q` and `norm_k`; features are summed pairwise, in the same order for any number
    of tokens per program. After the rotation q is multiplied by the weights `times`: query_table by position,
    query_weight [dim] by feature. With `centered` a weight [heads, dim] is subtracted from k, and with `hadamard`, a
    power of 2, each block of so many features of q and k is multiplied by a Hadamard matrix.
    """

    kv: GpuKV
    heads: int
    stride: int
    q_offset: int
    k_offset: int
    v_offset: int
    rotary_dim: int = 0
    scaling: float = 1.0
    interleaved: bool = False
    hadamard: int = 0
    centered: bool = False
    inline_asm: bool = True
    tokens: int = 1
    """Tokens of a program; 1 where groups are rounded."""
    shares: int = 2
    """Parts that a group's keys, or values, of a KV head are rounded in: with two, registers suffice."""
    rounding: int = 0
    """Least programs for each token where groups are rounded: those without a head only round."""
    staged: bool = False
    """Whether k and v go to a buffer bf16 [tokens, 2, KV heads, dim], and nothing is rounded."""
    norm_q: HeadNorm | None = None
    norm_k: HeadNorm | None = None
    times: tuple[str, ...] = ()

    @property
    def norms(self) -> list[tuple[str, HeadNorm, int, int]]:
        """Norms: of what, and by the number of their heads among all the first and how many."""
        every = (("q", self.norm_q, 0, self.heads), ("k", self.norm_k, self.heads, self.kv.heads))
        return [(name, norm, first, heads) for name, norm, first, heads in every if norm is not None]

    @property
    def rounds(self) -> bool:
        """Whether the first row of a group rounds an older group."""
        return self.kv.hierarchical and not self.staged

    @property
    def programs(self) -> int:
        """Programs for each token, or so many tokens."""
        return max(self.heads + 2 * self.kv.heads, self.rounding)

    def kernel(self, capability: int) -> Kernel:
        """The kernel for a compute capability."""
        pages = [Argument("staged", "*bf16")] if self.staged else page_arguments(self.kv)
        names = ("positions",) if self.staged else ("positions", "row_sequence", "block_table")
        arguments = [Argument("x", "*fp32"), *pages, *(Argument(name, "*i32") for name in names)]
        arguments += [Argument("inv_freq", "*fp32")] * bool(self.rotary_dim)
        arguments += [Argument(name, "*fp32") for name in self.times]
        arguments += [Argument("center", "*fp32")] * self.centered
        for part, norm, *_ in self.norms:
            arguments += [Argument(f"{part}_{vector}", "*fp32") for vector in norm.vectors]
        arguments += [Argument("table_stride", "i32")] * (not self.staged) + [Argument("M", "i32")] * (self.tokens > 1)
        # Paths append alike, whatever they read back.
        format = "staged" if self.staged else "kv_hier" if self.kv.hierarchical else self.kv.format
        name = f"append_{format}{f'_{self.tokens}' if self.tokens > 1 else ''}"
        pdl = self.inline_asm and capability >= 90
        source = render_template(
            "append.py.jinja",
            spec=self,
            name=name,
            arguments=arguments,
            pdl=pdl,
            asm=self.inline_asm,
            pairs_block=power_of_two(max(self.rotary_dim // 2, 1)),
            block=power_of_two(self.kv.dim if self.kv.hierarchical else self.kv.width),
            format=format,
            scaling="" if self.scaling == 1.0 else f" * {self.scaling}",
            head_rows=power_of_two(self.kv.dim),
            stages=self.hadamard.bit_length() - 1,
            two_pi=_TWO_PI,
            **_group_constants(self.kv, self.shares),
        )
        warps = 4 if self.rounds or self.tokens > 1 else 1
        return Kernel(name, source, tuple(arguments), warps, 1, pdl, fusion=False)


@dataclass(frozen=True)
class StagedSpec:
    """With `to_ring` copies the newest groups of a step's staged rows to the ring, else rounds groups."""

    kv: GpuKV
    to_ring: bool
    shares: int = 4
    tokens: int = 16
    """Rows of a program that copies them."""

    @property
    def programs(self) -> int:
        """Programs for a group, or so many tokens."""
        return 2 * self.kv.heads * (1 if self.to_ring else _group_constants(self.kv, self.shares)["shares"])

    def kernel(self, capability: int) -> Kernel:
        """The kernel for a compute capability."""
        pages = [Argument("kv_full", "*bf16")] if self.to_ring else page_arguments(self.kv)
        names = ("positions", "row_sequence", "query_start", "block_table")
        arguments = [*pages, Argument("staged", "*bf16")]
        arguments += [Argument(name, "*i32") for name in names if self.to_ring or name != "row_sequence"]
        arguments += [Argument("table_stride", "i32")] + [Argument("M", "i32")] * self.to_ring
        name = "staged_to_ring" if self.to_ring else "round_staged"
        source = render_template(
            "staged_kv.py.jinja",
            spec=self,
            name=name,
            arguments=arguments,
            pdl=capability >= 90,
            block=power_of_two(self.kv.dim),
            ring_groups=RING_GROUPS,
            **_group_constants(self.kv, self.shares),
        )
        return Kernel(name, source, tuple(arguments), 4, 1, capability >= 90, fusion=False)
