"""The layout of the paged KV cache for GPU kernels.

A page holds kv.PAGE_TOKENS positions. The arena is [layer][page][KV head] blocks; layers may
differ in heads and head size. A block contains, in order:

    keys         bf16 [page tokens][dim], or 16-bit items [page tokens][width]: item j holds the codes of elements j,
                 j + width, ..., lowest bits first: two of 8 bits or four of 4 bits
    values       bf16 [page tokens][dim], or items like those of the keys, [width][page tokens]
    key words    int32 [page tokens], then value words likewise (8 and 4 bits only): bits 0-7 are the zero point, the
                 rest the upper 24 bits of the float32 scale; value = (code - zero) * scale

If the values are features of the keys (passes/latent.py), a block has no values: keys bf16 [page tokens][dim], or codes
[page tokens][dim] of 8 bits, or of 4 bits, the lower ones those of even features. With 8 and 4 bits, words [page
tokens] [dim / LATENT_GROUP] like those above follow.

A hierarchical cache (kv_hier, or kv_hier4 for a draft that reads only the upper bits) keeps the newest three groups of
128 positions in a ring, in bf16, and older ones rounded (QuantSpec 4.2). In a sequence's block table the ring comes
first: entry 2 (p / 64 mod 6) is the page with the key of position p, the next entry the page with its value, both bf16
[page tokens][dim]. Entries from 12 on are pages of 64 rounded positions, x = scale * (u + l / 16) + least:

    upper codes  u of the keys as items of four codes like above, then those of the values
    value words  float32 scale [page tokens], then -least / scale [page tokens]
    key words    per pair of adjacent channels two words of two fp16 each, the same in both pages of a group: 16 scale,
                 and least - 16.5 scale, because few instructions turn codes into 1 + (16 u + l + 8) / 256
    lower codes  l + 8 of the keys, then of the values, laid out like the upper ones

Each item belongs to one token, so tokens can be appended in parallel, and both products take items directly as the A
operand of an MMA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qcompile.codegen.gpu.kernel import Argument
from qcompile.errors import UnsupportedError
from qcompile.formats.kv import LATENT_GROUP, PAGE_TOKENS, KVFormat, kv_format

LEAVES = 8
"""Parts in which the positions of a split are summed apart, at most."""
MOST_FEATURES = 512
"""Most features of a head: four warps have registers for the sums of a leaf of eight rows beside those of a split."""
MOST_ROUNDED_LATER = 256
"""Most features of a head over a hierarchical cache, where programs have queries in two types in registers."""


@dataclass(frozen=True)
class GpuKV:
    """Layout of pages with `heads` KV heads of `dim` elements; `format` is kv16, kv8, kv4, kv_hier or kv_hier4.

    Each split is summed in `leaves` parts, `most_leaves` at most, or `chained`: its leaves one after the other. `value`
    are the features of keys that are the values, if pages hold no others.
    """

    format: str
    heads: int
    dim: int
    page_tokens: int = PAGE_TOKENS
    most_leaves: int = LEAVES
    chained: bool = False
    value: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.kind.bits > 16:
            raise UnsupportedError(f"GPU kernels have no {self.format} cache; there are kv16, kv8, kv4, kv_hier")
        if self.value is not None:
            first, stop = self.value
            if self.heads > 1 or stop != self.dim or stop - first > 512 or first > 128 or self.dim % 2:
                raise UnsupportedError(
                    f"values that are features {self.value} of {self.heads} keys of {self.dim}: GPU attention takes "
                    "one key head of up to 128 features and then up to 512, an even number in all"
                )
            return
        most = MOST_ROUNDED_LATER if self.hierarchical else MOST_FEATURES
        if self.dim % 4 or self.dim > most:
            over = f" over {self.format}" if self.hierarchical else ""
            raise UnsupportedError(f"head size {self.dim}: GPU attention takes multiples of 4 up to {most}{over}")

    @property
    def leaves(self) -> int:
        """Parts in which the positions of a split are summed apart."""
        return 1 if self.chained or self.value else self.most_leaves

    @property
    def value_dim(self) -> int:
        """Features of a value."""
        return self.dim if self.value is None else self.value[1] - self.value[0]

    @property
    def word_groups(self) -> int:
        """Words of a latent key, which is a value too."""
        return -(-self.dim // LATENT_GROUP)

    @property
    def kind(self) -> KVFormat:
        """The format of keys and values."""
        return kv_format(self.format)

    @property
    def hierarchical(self) -> bool:
        """Whether the newest positions are kept unrounded, in a ring."""
        return self.kind.hierarchical

    @property
    def upper_only(self) -> bool:
        """Whether only the upper nibbles of a hierarchical cache are read."""
        return self.hierarchical and self.bits == 4

    @property
    def bits(self) -> int:
        """Bits read per element (per rounded element, in a hierarchical cache)."""
        return self.kind.read_bits or self.kind.bits

    @property
    def planes(self) -> int:
        """Codes per 16-bit item."""
        return 4 if self.hierarchical else 16 // self.bits

    @property
    def width(self) -> int:
        """Items per token of a head's keys (or values)."""
        return self.dim // self.planes

    @property
    def row_bytes(self) -> int:
        """Bytes of the codes of one head's key (or value) at one position."""
        return 2 * self.width if self.value is None else self.dim * self.bits // 8

    @property
    def part_bytes(self) -> int:
        """Bytes of the codes of a block's keys (or values)."""
        return -(-self.page_tokens * self.row_bytes // 16) * 16

    @property
    def key_word_bytes(self) -> int:
        """Offset of the key words (scales of channels) in a rounded block of a hierarchical cache."""
        return 2 * self.part_bytes + 8 * self.page_tokens

    @property
    def key_width(self) -> int:
        """Key words per plane of channels: `width`, rounded up to whole pairs."""
        return self.width + self.width % 2

    @property
    def lower_bytes(self) -> int:
        """Distance from the upper codes of a rounded block to the lower codes of the same elements."""
        return self.key_word_bytes + -(-4 * self.planes * self.key_width // 16) * 16

    @property
    def block_bytes(self) -> int:
        """Bytes of one (page, KV head)."""
        if self.hierarchical:
            return self.lower_bytes + 2 * self.part_bytes
        if self.value is not None:
            return self.part_bytes + (4 * self.page_tokens * self.word_groups if self.bits < 16 else 0)
        return 2 * self.part_bytes + (8 * self.page_tokens if self.bits < 16 else 0)


def most_heads(kvs: Sequence[GpuKV]) -> GpuKV:
    """The layout of the layer with the most heads: its attention has the most programs."""
    return max(kvs, key=lambda kv: kv.heads)


def page_arguments(kv: GpuKV) -> list[Argument]:
    """Kernel arguments that point to a layer's pages, one for each type the pages are read as."""
    if kv.hierarchical:
        return [Argument("kv", "*i16"), Argument("kv_words", "*fp32"), Argument("kv_full", "*bf16")]
    codes = Argument("kv", "*bf16" if kv.bits == 16 else "*i16" if kv.value is None else "*i8")
    return [codes] + [Argument("kv_words", "*i32")] * (kv.bits < 16)
