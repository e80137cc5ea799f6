"""GPU kernels that rotate queries and keys and put keys and values into the cache (gpu_attention.py has its layout).

In a hierarchical cache the first row of a group has the last group but one rounded, by all of its programs together. A
step of few rows writes to the ring. One of many rows may have more groups than the ring, so its keys and values are
fresh rows of their own: AppendSpec writes them, FreshSpec has groups rounded, attention reads positions of the step
from there and older ones from the ring, and only then FreshSpec puts the newest groups into it.
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


def _of_groups(kv: GpuKV, shares: int) -> dict[str, int]:
    """What templates are told of groups, rounded in shares (of large heads twice as many): pairs of channels each."""
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


def riding(norm: p.NormHeads, calls: Sequence[p.Call]) -> str:
    """q or k, where that is what the call that appends, first of `calls` but for norms, can normalize; else nothing."""
    append = next((call for call in calls if not isinstance(call, p.NormHeads)), None)
    if not isinstance(append, p.RopeAppend) or append.qkv != norm.x or norm.width != append.head_dim:
        return ""
    parts = {"q": (append.q_offset, append.heads), "k": (append.k_offset, append.kv_heads)}
    return next((part for part, place in parts.items() if place == (norm.x_offset, norm.heads)), "")


@dataclass(frozen=True)
class AppendSpec:
    """Rotates q and k of x [tokens, stride] (f32) in place, and writes k and v to their pages.

    Ahead of that heads are normalized by `norm_q` and `norm_k`. Sums over features are of neighbours each time, so that
    they have one order however many tokens a program has. Behind it q is multiplied with the weights `times`:
    query_table by its position, query_weight [dim] by feature. Where `centered`, a weight [heads, dim] then comes off
    k, and with `turned`, a power of 2, each so many features of q and of k are turned by a Hadamard matrix.
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
    turned: int = 0
    centered: bool = False
    inline_asm: bool = True
    tokens: int = 1
    """Tokens of a program; several not where groups are rounded."""
    shares: int = 2
    """Parts that a group's keys, or values, of a KV head are rounded in: two leave programs registers enough."""
    rounding: int = 0
    """Programs for each token at least, where groups are rounded: those without a head do nothing else."""
    fresh: bool = False
    """Whether k and v go to rows bf16 [tokens, 2, KV heads, dim], and nothing is rounded."""
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
        """Whether first rows of groups have others rounded."""
        return self.kv.hierarchical and not self.fresh

    @property
    def programs(self) -> int:
        """Programs for each token, or so many tokens."""
        return max(self.heads + 2 * self.kv.heads, self.rounding)

    def kernel(self, capability: int) -> Kernel:
        """The kernel for a compute capability."""
        pages = [Argument("fresh", "*bf16")] if self.fresh else page_arguments(self.kv)
        names = ("positions",) if self.fresh else ("positions", "row_sequence", "block_table")
        arguments = [Argument("x", "*fp32"), *pages, *(Argument(name, "*i32") for name in names)]
        arguments += [Argument("inv_freq", "*fp32")] * bool(self.rotary_dim)
        arguments += [Argument(name, "*fp32") for name in self.times]
        arguments += [Argument("center", "*fp32")] * self.centered
        for part, norm, *_ in self.norms:
            arguments += [Argument(f"{part}_{vector}", "*fp32") for vector in norm.vectors]
        arguments += [Argument("table_stride", "i32")] * (not self.fresh) + [Argument("M", "i32")] * (self.tokens > 1)
        # Paths append alike, whatever they read back.
        format = "fresh" if self.fresh else "kv_hier" if self.kv.hierarchical else self.kv.format
        name = f"append_{format}{f'_{self.tokens}' if self.tokens > 1 else ''}"
        prelaunch = self.inline_asm and capability >= 90
        source = render_template(
            "append.py.jinja",
            spec=self,
            name=name,
            arguments=arguments,
            prelaunch=prelaunch,
            asm=self.inline_asm,
            pairs_block=power_of_two(max(self.rotary_dim // 2, 1)),
            block=power_of_two(self.kv.dim if self.kv.hierarchical else self.kv.width),
            format=format,
            scaling="" if self.scaling == 1.0 else f" * {self.scaling}",
            head_rows=power_of_two(self.kv.dim),
            stages=self.turned.bit_length() - 1,
            two_pi=_TWO_PI,
            **_of_groups(self.kv, self.shares),
        )
        warps = 4 if self.rounds or self.tokens > 1 else 1
        return Kernel(name, source, tuple(arguments), warps, 1, prelaunch, fusion=False)


@dataclass(frozen=True)
class FreshSpec:
    """What becomes of a step's fresh rows: with `keeps` the newest groups go to the ring, else groups are rounded."""

    kv: GpuKV
    keeps: bool
    shares: int = 4
    tokens: int = 16
    """Rows of a program that keeps them."""

    @property
    def programs(self) -> int:
        """Programs for a group, or so many tokens."""
        return 2 * self.kv.heads * (1 if self.keeps else _of_groups(self.kv, self.shares)["shares"])

    def kernel(self, capability: int) -> Kernel:
        """The kernel for a compute capability."""
        pages = [Argument("kv_full", "*bf16")] if self.keeps else page_arguments(self.kv)
        names = ("positions", "row_sequence", "query_start", "block_table")
        arguments = [*pages, Argument("fresh", "*bf16")]
        arguments += [Argument(name, "*i32") for name in names if self.keeps or name != "row_sequence"]
        arguments += [Argument("table_stride", "i32")] + [Argument("M", "i32")] * self.keeps
        name = "keep_fresh" if self.keeps else "round_fresh"
        source = render_template(
            "fresh.py.jinja",
            spec=self,
            name=name,
            arguments=arguments,
            prelaunch=capability >= 90,
            block=power_of_two(self.kv.dim),
            ring_groups=RING_GROUPS,
            **_of_groups(self.kv, self.shares),
        )
        return Kernel(name, source, tuple(arguments), 4, 1, capability >= 90, fusion=False)
