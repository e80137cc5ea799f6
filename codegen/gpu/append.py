"""GPU kernels that apply RoPE to queries and keys and append keys and values to the cache (layout: kv_pages.py).

Hierarchical cache: for sequences that decode, AppendSpec writes keys and values to the ring, and the programs of a
group's first row also round the group two groups before it. The rows of a prompt may fill more groups than the ring
has, so keys and values of prompts pass through a staging buffer:

    1. AppendSpec writes the step's keys and values to the buffer.
    2. StagedSpec rounds the groups that leave the ring.
    3. Attention reads the step's own positions from the buffer, and older ones from the ring.
    4. StagedSpec copies the newest groups to the ring.

In a step with both kinds of sequences, the rows of prompts come last, from `first_row` on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qcompile.codegen.calls import NormHeads
from qcompile.codegen.gpu.kernel import Argument, Kernel, render_template
from qcompile.codegen.gpu.kv_pages import GpuKV, page_arguments
from qcompile.codegen.sizes import power_of_two
from qcompile.formats.kv import HIER_GROUP, LATENT_GROUP, RING_GROUPS
from qcompile.targets import has_pdl

# -2 pi as a sum: two short parts, exact in products with integers up to 2^12, and the rest.
_TWO_PI = (-6.28125, -0.0019350051879882812, -3.01991605e-07)


def _group_constants(kv: GpuKV, shares: int) -> dict[str, int]:
    """Template constants to round a group in `shares` parts (large heads: twice as many) of whole channel pairs."""
    block = max(power_of_two(kv.width), 2)
    ring = RING_GROUPS * HIER_GROUP // kv.page_tokens
    shares *= 2 if kv.dim > 128 else 1
    return {"age": HIER_GROUP, "ring_pages": ring, "plane_block": block, "shares": min(shares, block // 2)}


@dataclass(frozen=True)
class HeadNorm:
    """A norm of each head separately, with weight and bias [dim], or [heads, dim] if `by_head`."""

    kind: Literal["rms", "layer"]
    eps: float
    weight: bool = False
    bias: bool = False
    by_head: bool = False

    @classmethod
    def of(cls, c: NormHeads | None) -> HeadNorm | None:
        """The norm of a call, if there is one."""
        return None if c is None else cls(c.kind, c.eps, c.weight is not None, c.bias is not None, c.by_head)

    @property
    def vectors(self) -> list[str]:
        """Which of weight and bias it has."""
        return ["weight"] * self.weight + ["bias"] * self.bias


@dataclass(frozen=True)
class AppendSpec:
    """Applies RoPE to q and k of x [tokens, stride] (f32) in place, and writes k and v to their pages.

    In order:

    1. `norm_q` and `norm_k` normalize heads. They add features up pairwise, in the same order for any number of tokens
       per program.
    2. RoPE.
    3. q is multiplied by the weights named in `times`: query_table by position, query_weight [dim] by feature.
    4. With `centered`, a weight [KV heads, dim] is subtracted from k.
    5. If `hadamard`, a power of 2, is not 0, each block of that many features of q and k is multiplied by a Hadamard
       matrix.
    """

    kv: GpuKV
    heads: int
    stride: int
    q_offset: int
    k_offset: int
    v_offset: int | None
    rotary_dim: int = 0
    scaling: float = 1.0
    interleaved: bool = False
    hadamard: int = 0
    centered: bool = False
    inline_asm: bool = True
    tokens: int = 1
    """Tokens per program; 1 if groups are rounded."""
    shares: int = 2
    """Parts in which a group's keys (or values) of a KV head are rounded; with two there are enough registers."""
    rounding: int = 0
    """Fewest programs per token if groups are rounded; programs beyond the number of heads only round."""
    staged: bool = False
    """Whether k and v go to a buffer bf16 [tokens, 2, KV heads, dim], and nothing is rounded."""
    appends: bool = True
    """Whether k and v follow q; without them, a `centered` weight [heads, dim] is subtracted from q."""
    norm_q: HeadNorm | None = None
    norm_k: HeadNorm | None = None
    times: tuple[str, ...] = ()

    @property
    def norms(self) -> list[tuple[str, HeadNorm, int, int]]:
        """(part, norm, first head, number of heads) of each norm; heads are numbered q, k, v."""
        every = (("q", self.norm_q, 0, self.heads), ("k", self.norm_k, self.heads, self.kv.heads))
        return [(name, norm, first, heads) for name, norm, first, heads in every if norm is not None]

    @property
    def rounds(self) -> bool:
        """Whether the programs of a group's first row round an older group."""
        return self.kv.hierarchical and not self.staged and self.appends

    @property
    def programs(self) -> int:
        """Programs for each block of `tokens` tokens."""
        if not self.appends:
            return self.heads
        return max(self.heads + (2 if self.kv.value is None else 1) * self.kv.heads, self.rounding)

    @property
    def _block(self) -> int:
        """Items of a key that a program writes, padded to a power of two: whole groups of a latent."""
        if self.kv.value is not None:
            return max(power_of_two(self.kv.dim), LATENT_GROUP) // (2 if self.kv.bits == 4 else 1)
        return power_of_two(self.kv.dim if self.kv.hierarchical else self.kv.width)

    def kernel(self, capability: int) -> Kernel:
        """The kernel for a compute capability."""
        paged = self.appends and not self.staged
        pages = page_arguments(self.kv) if paged else [Argument("staged", "*bf16")] * self.staged
        names = ("positions", "row_sequence", "block_table") if paged else ("positions",)
        arguments = [Argument("x", "*fp32"), *pages, *(Argument(name, "*i32") for name in names)]
        arguments += [Argument("inv_freq", "*fp32")] * bool(self.rotary_dim)
        arguments += [Argument(name, "*fp32") for name in self.times]
        arguments += [Argument("center", "*fp32")] * self.centered
        for part, norm, *_ in self.norms:
            arguments += [Argument(f"{part}_{vector}", "*fp32") for vector in norm.vectors]
        numbers = ["first_row"] * self.staged + ["table_stride"] * paged + ["M"] * (self.tokens > 1)
        arguments += [Argument(name, "i32") for name in numbers]
        # Formats that differ only in what is read share this kernel.
        format = "staged" if self.staged else self.kv.kind.appended_as
        what = f"append_{format}" if self.appends else "rope_heads"
        name = f"{what}{f'_{self.tokens}' if self.tokens > 1 else ''}"
        pdl = self.inline_asm and has_pdl(capability)
        source = render_template(
            "append.py.jinja",
            spec=self,
            name=name,
            paged=paged,
            arguments=arguments,
            pdl=pdl,
            asm=self.inline_asm,
            pairs_block=power_of_two(max(self.rotary_dim // 2, 1)),
            block=self._block,
            group=LATENT_GROUP,
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
    """Copies the newest groups of a step's staged rows to the ring (`to_ring`), or rounds groups."""

    kv: GpuKV
    to_ring: bool
    shares: int = 4
    tokens: int = 16
    """Rows per program that copies."""

    @property
    def programs(self) -> int:
        """Programs for each group, or for each block of `tokens` rows."""
        return 2 * self.kv.heads * (1 if self.to_ring else _group_constants(self.kv, self.shares)["shares"])

    def kernel(self, capability: int) -> Kernel:
        """The kernel for a compute capability."""
        pages = [Argument("kv_full", "*bf16")] if self.to_ring else page_arguments(self.kv)
        names = ("positions", "row_sequence", "query_start", "block_table")
        arguments = [*pages, Argument("staged", "*bf16")]
        arguments += [Argument(name, "*i32") for name in names if self.to_ring or name != "row_sequence"]
        numbers = ["table_stride", *(("first_row", "M") if self.to_ring else ())]
        arguments += [Argument(name, "i32") for name in numbers]
        name = "staged_to_ring" if self.to_ring else "round_staged"
        source = render_template(
            "staged_kv.py.jinja",
            spec=self,
            name=name,
            arguments=arguments,
            pdl=has_pdl(capability),
            block=power_of_two(self.kv.dim),
            ring_groups=RING_GROUPS,
            **_group_constants(self.kv, self.shares),
        )
        return Kernel(name, source, tuple(arguments), 4, 1, has_pdl(capability), fusion=False)
