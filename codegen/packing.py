"""Packed weights: how a target packs them, and which ones an artifact holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from qcompile import mix, numerics


@dataclass(frozen=True)
class PackedWeight:
    """One logical weight of the artifact: `blobs` are (name, bytes) in order, `produce` computes them."""

    blobs: tuple[tuple[str, int], ...]
    produce: Callable[[], Iterator[Tensor]]


class Mixed(NamedTuple):
    """How a mix_4_8 weight is packed whose wide rows are known.

    Bytes by role, what packs the parts, blocks of 16 packed rows, how many rows of 8 bits come first where all do, and
    the runs of pairs of blocks that threads share out alone.
    """

    sizes: dict[str, int]
    blobs: Callable[[numerics.Parts], dict[str, Tensor]]
    blocks: int
    wide: int = 0
    runs: tuple[int, ...] = ()


def cpu_mixed(marked: Tensor, pairs: bool, k: int) -> Mixed:
    """As qcompile.mix has it."""
    order = mix.layout(marked, pairs)
    return Mixed(mix.packed_bytes(order, k), lambda parts: mix.pack(parts, order), len(order.rows), runs=order.runs)


@dataclass(frozen=True)
class Packing:
    """How a target packs weights, from shape or parts, number format and the activations they meet.

    `name` is the same where a weight is packed alike. `sizes` gives the bytes (multiples of 64) of each blob by role,
    `blobs` the flat uint8 blobs themselves. `readable` names another packing that kernels for these activations read
    too, so that a weight some path has packed so is not stored once more. `mixed` packs mix_4_8 weights, by which rows
    are wide, whether rows are pairs of gate and up, and how many inputs there are.
    """

    name: Callable[[str, str], str]
    sizes: Callable[[int, int, str, str], dict[str, int]]
    blobs: Callable[[numerics.Parts, str, str], dict[str, Tensor]]
    readable: Callable[[str, str], str | None] = lambda format, activation: None
    mixed: Callable[[Tensor, bool, int], Mixed] = cpu_mixed


CPU_PACKING = Packing(
    lambda format, activation: format,
    lambda n, k, format, activation: numerics.packed_bytes(n, k, format),
    lambda parts, format, activation: numerics.pack_weight(parts, format),
)


@dataclass
class WeightTable:
    """The packed weights of an artifact in streaming order. What several paths compute alike is there once:
    a weight is known by the expression that makes it, down to the stored weights, and how it is packed."""

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
        """Names of the parts (suffix, bytes) of the weight `key`, entered as `base`, or `other` where that is taken."""
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
