"""Packed weights: how a target packs them, and which ones an artifact contains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qcompile.clock import Progress
from qcompile.formats import mixed_layout
from qcompile.formats.registry import weight_format
from qcompile.formats.rounding import Parts


@dataclass(frozen=True)
class PackedWeight:
    """One logical weight of the artifact: `blobs` are (name, size in bytes) in order, `produce` computes them."""

    blobs: tuple[tuple[str, int], ...]
    produce: Callable[[], Iterator[Tensor]]


class MixedPacking(NamedTuple):
    """How to pack a mix_4_8 weight with known wide (8-bit) rows.

    `sizes`: bytes by role. `blobs`: packs the parts. `blocks`: blocks of 16 packed rows. `wide`: number of 8-bit rows,
    if all of them come first. `runs`: runs of block pairs, each of which is split over the threads separately.
    """

    sizes: dict[str, int]
    blobs: Callable[[Parts], dict[str, Tensor]]
    blocks: int
    wide: int = 0
    runs: tuple[int, ...] = ()


def cpu_mixed(marked: Tensor, pairs: bool, k: int) -> MixedPacking:
    """The layout of formats/mixed_layout.py."""
    order = mixed_layout.row_layout(marked, pairs)
    sizes = mixed_layout.packed_bytes(order, k)
    return MixedPacking(sizes, lambda parts: mixed_layout.pack(parts, order), len(order.rows), runs=order.runs)


@dataclass(frozen=True)
class Packing:
    """How a target packs weights, given shape or parts, weight format and activation type.

    `name` identifies a packing: (format, activation) pairs packed alike have the same name. `sizes` gives the bytes of
    each blob by role (multiples of 64), `blobs` the flat uint8 blobs. `readable` names another packing that kernels for
    these activations can read, so that a weight already packed that way by another path is not stored twice. `mixed`
    packs mix_4_8 weights, given the mask of wide rows, whether rows are gate and up pairs, and the number of inputs.
    """

    name: Callable[[str, str], str]
    sizes: Callable[[int, int, str, str], dict[str, int]]
    blobs: Callable[[Parts, str, str], dict[str, Tensor]]
    readable: Callable[[str, str], str | None] = lambda format, activation: None
    mixed: Callable[[Tensor, bool, int], MixedPacking] = cpu_mixed


CPU_PACKING = Packing(
    lambda format, activation: format,
    lambda n, k, format, activation: weight_format(format).packed_bytes(n, k),
    lambda parts, format, activation: weight_format(format).pack(parts),
)


@dataclass
class WeightTable:
    """The packed weights of an artifact in streaming order, deduplicated across paths.

    A weight is identified by its expression, down to the stored weights, and its packing.
    """

    packing: Packing = CPU_PACKING
    weights: list[PackedWeight] = field(default_factory=list)
    _known: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    _taken: set[str] = field(default_factory=set)

    def add(
        self,
        key: tuple[str, str],
        base: str,
        other: str,
        parts: tuple[tuple[str, int], ...],
        produce: Callable[[], Iterator[Tensor]],
    ) -> tuple[str, ...]:
        """Names of the parts (suffix, bytes) of weight `key`, added as `base`, or as `other` if that name is taken."""
        if key not in self._known:
            if any(base + suffix in self._taken for suffix, _ in parts):
                base = other
            number = 1
            while any(base + suffix in self._taken for suffix, _ in parts):
                number += 1
                base = f"{other}.{number}"
            names = tuple(base + suffix for suffix, _ in parts)
            self._known[key] = names
            self._taken.update(names)
            sizes = (size for _, size in parts)
            self.weights.append(PackedWeight(tuple(zip(names, sizes, strict=True)), produce))
        return self._known[key]


def stream(weights: Sequence[PackedWeight], progress: Progress) -> Iterator[Any]:
    """The bytes of all weights (uint8 arrays) in order, with one weight in memory at a time."""
    total = sum(size for weight in weights for _, size in weight.blobs)
    done = 0
    with torch.no_grad():
        for weight in weights:
            for (_, size), blob in zip(weight.blobs, weight.produce(), strict=True):
                yield blob.numpy()
                progress("weights", done := done + size, total)
