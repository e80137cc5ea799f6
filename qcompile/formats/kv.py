"""KV formats: how a cache stores keys and values, and what they read back as."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qcompile.errors import UsageError
from qcompile.formats.rounding import asymmetric

PAGE_TOKENS = 64
"""Positions per KV page, and the block size of every attention reduction."""
LATENT_GROUP = 64
"""Features of a key that share a scale, where features of the keys are also the values."""
HIER_GROUP = 128
"""Positions of a hierarchical cache that are rounded together, with shared scales for keys."""
RING_GROUPS = 3
"""Groups of newest positions that a hierarchical cache keeps unrounded, in a ring."""


@dataclass(frozen=True)
class KVFormat:
    """A cache format. `bits` per key or value at the time it is appended; `head_pad`: heads are padded to its multiple.

    Below 16 bits, keys and values are asymmetric integers per head and token (QServe 3.2: dynamic, scale and zero
    stored in the page). A hierarchical cache (QuantSpec 4.2) rounds older positions later; `read_bits` of that part are
    read (0: no such part). `draft` names the format in which a draft reads the same cache, if that is another one, and
    `whole` the format of which this one reads a part. `cpu_name` is the name of the format in CPU kernels, and
    `cpu_latent` that of its pages without values, where these are features of the keys (empty: there are none).
    """

    name: str
    cpu_name: str
    bits: int
    head_pad: int
    read_bits: int = 0
    draft: str = ""
    whole: str = ""
    cpu_latent: str = ""

    @property
    def hierarchical(self) -> bool:
        """Whether the newest positions are kept in bf16, and older ones rounded to 4 + 4 bits in groups."""
        return self.read_bits > 0

    @property
    def appended_as(self) -> str:
        """The name of the format that is appended: that of the whole cache."""
        return self.whole or self.name

    @property
    def stored_bits(self) -> int:
        """Bits of an element in a page; a hierarchical cache has two planes of 4."""
        return 8 if self.hierarchical else self.bits

    @property
    def has_scales(self) -> bool:
        """Whether a page holds a scale and a zero per head and token, of keys and of values."""
        return self.bits < 16

    def round_trip(self, x: Tensor) -> Tensor:
        """Keys or values [..., D] as read back right after they were appended."""
        if self.bits == 32:
            return x.clone()
        if self.bits == 16:
            return x.to(torch.bfloat16).to(x.dtype)
        codes, scale, zero = asymmetric(x, self.bits)
        return ((codes.float() - zero.float()) * scale).to(x.dtype)

    def round_trip_latent(self, x: Tensor) -> Tensor:
        """As round_trip, for keys [..., D] that are values too (latents): LATENT_GROUP features share a scale."""
        padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % LATENT_GROUP))
        return self.round_trip(padded.unflatten(-1, (-1, LATENT_GROUP))).flatten(-2)[..., : x.shape[-1]]


KV_FORMATS = {
    format.name: format
    for format in (
        KVFormat("kv32", "kKv32", 32, 16, cpu_latent="kLatent32"),
        KVFormat("kv16", "kKv16", 16, 16, cpu_latent="kLatent16"),
        KVFormat("kv8", "kKv8", 8, 16, cpu_latent="kLatent8"),
        KVFormat("kv4", "kKv4", 4, 32, cpu_latent="kLatent4"),
        KVFormat("kv_hier", "kKvHier", 16, 32, read_bits=8, draft="kv_hier4"),
        KVFormat("kv_hier4", "kKvHier4", 16, 32, read_bits=4, whole="kv_hier"),
    )
}


def kv_format(name: str) -> KVFormat:
    """The cache format called `name`. Raises UsageError if there is none."""
    if name not in KV_FORMATS:
        raise UsageError(f"cache format {name} is unknown; there are {', '.join(KV_FORMATS)}")
    return KV_FORMATS[name]


def round_trip_hier(x: Tensor, dim: int, bits: int) -> Tensor:
    """x with one range along `dim`, rounded to 4 bits and, if `bits` is 8, its residual to 4 more.

    value = scale * (u + l / 16) + zero with u in 0..15, l in -8..7. Source: QuantSpec 4.2, where zero is the minimum.
    """
    low = x.amin(dim, keepdim=True)
    scale = (x.amax(dim, keepdim=True) - low) / 15
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    t = (x - low) / scale
    upper = torch.round(t).clamp_(0, 15)
    lower = torch.round((t - upper) * 16).clamp_(-8, 7) if bits == 8 else torch.zeros_like(t)
    return scale * (upper + lower / 16) + low


def read_hier(k: Tensor, v: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Keys and values [T, Hk, D] up to a query's position, as that query reads them from a hierarchical cache.

    All groups of 128 but its own and the previous one are rounded: keys per channel and group, values per position.
    """
    old = max(0, (len(k) - 1) // HIER_GROUP - 1) * HIER_GROUP
    keys = round_trip_hier(k[:old].unflatten(0, (-1, HIER_GROUP)), 1, bits).flatten(0, 1)
    return torch.cat([keys, k[old:]]), torch.cat([round_trip_hier(v[:old], -1, bits), v[old:]])
