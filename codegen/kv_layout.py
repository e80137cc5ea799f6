"""The arena of the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qcompile.codegen.sizes import round_up
from qcompile.formats.kv import HIER_GROUP, LATENT_GROUP, PAGE_TOKENS, RING_GROUPS, KVFormat, kv_format


@dataclass(frozen=True)
class KVLayout:
    """The paged KV cache: for each page and layer, a block of each KV head; those of a layer have the same size.

    `by_layer` has the KV heads and head size of each layer if layers differ; `kv_heads` and `head_dim` are the largest.
    """

    format: str
    layers: int
    kv_heads: int
    head_dim: int
    page_tokens: int = PAGE_TOKENS
    by_layer: tuple[tuple[int, int], ...] = ()
    own_block_bytes: tuple[int, ...] = ()
    """Bytes of a block of each layer, if the target's layout differs from the CPU kernels'."""
    value: tuple[int, int] | None = None
    """The features of the keys that are the values, so that a block holds keys alone; None: it holds values too."""

    def heads_of(self, layer: int) -> tuple[int, int]:
        """KV heads and head size of a layer."""
        return self.by_layer[layer] if self.by_layer else (self.kv_heads, self.head_dim)

    def block_bytes(self, layer: int = 0) -> int:
        """Bytes of one (layer, page, kv head): K, then V (unless it is part of K), then scales and zeros if quantized.

        Heads are padded to 16 elements (32 for kv4 and hierarchical caches); see cpu/templates/kv.h for the layout.
        """
        if self.own_block_bytes:
            return self.own_block_bytes[layer]
        width = round_up(self.heads_of(layer)[1], self.kind.head_pad)
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
    def layer_page_bytes(self) -> tuple[int, ...]:
        """Bytes of one page of each layer, over all heads."""
        return tuple(self.heads_of(layer)[0] * self.block_bytes(layer) for layer in range(self.layers))

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers and heads."""
        return sum(self.layer_page_bytes)

    @property
    def facts(self) -> dict[str, Any]:
        """What the manifest records about the cache."""
        return {
            "format": self.format,
            "layers": self.layers,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            **({"by_layer": [list(heads) for heads in self.by_layer]} if self.by_layer else {}),
            "page_tokens": self.page_tokens,
            "page_bytes": self.page_bytes,
            **({"ring_tokens": self.ring_tokens} if self.hierarchical else {}),
            **({"value": list(self.value)} if self.value else {}),
        }
