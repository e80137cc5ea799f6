"""The arena of the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qcompile.codegen.sizes import round_up
from qcompile.formats.kv import HIER_GROUP, LATENT_GROUP, PAGE_TOKENS, RING_GROUPS, KVFormat, kv_format


@dataclass(frozen=True)
class KVLayout:
    """The paged KV arena: [layer][page][kv_head] blocks of `block_bytes`."""

    format: str
    layers: int
    kv_heads: int
    head_dim: int
    page_tokens: int = PAGE_TOKENS
    own_block_bytes: int = 0
    """Bytes of a block, if the target's layout differs from the CPU kernels'; 0: the same layout."""
    value: tuple[int, int] | None = None
    """The features of the keys that are the values, so that a block holds keys alone; None: it holds values too."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one (layer, page, kv head): K, then V (unless it is part of K), then scales and zeros if quantized.

        Heads are padded to 16 elements (32 for kv4 and hierarchical caches); see cpu/templates/kv.h for the layout.
        """
        if self.own_block_bytes:
            return self.own_block_bytes
        width = round_up(self.head_dim, self.kind.head_pad)
        part = self.page_tokens * width * self.kind.stored_bits // 8
        if self.value is not None:
            groups = -(-width // LATENT_GROUP) if self.kind.has_scales else 0
            return round_up(part, 64) + 2 * 4 * self.page_tokens * groups
        if self.hierarchical:
            return 2 * part + 4 * (2 * self.page_tokens + width)
        parameters = 4 * 4 * self.page_tokens if self.kind.has_scales else 0
        return 2 * round_up(part, 64) + parameters

    @property
    def kind(self) -> KVFormat:
        """The format of keys and values."""
        return kv_format(self.format)

    @property
    def hierarchical(self) -> bool:
        """Whether the newest positions are kept separately, in a ring (cpu/templates/attention_hier.h)."""
        return self.kind.hierarchical

    @property
    def ring_tokens(self) -> int:
        """Positions in a hierarchical cache's ring, which uses two pages per PAGE_TOKENS; 0 for other caches."""
        return RING_GROUPS * HIER_GROUP if self.hierarchical else 0

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers and heads."""
        return self.layers * self.kv_heads * self.block_bytes

    @property
    def facts(self) -> dict[str, Any]:
        """What the manifest records about the cache."""
        return {
            "format": self.format,
            "layers": self.layers,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "page_tokens": self.page_tokens,
            "page_bytes": self.page_bytes,
            **({"ring_tokens": self.ring_tokens} if self.hierarchical else {}),
            **({"value": list(self.value)} if self.value else {}),
        }
