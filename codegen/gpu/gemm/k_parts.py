"""How K is divided into parts that are summed separately."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KParts:
    """The `blocks` of K in `count` parts, multiples of `unit` blocks. The first parts may be one unit longer."""

    blocks: int
    unit: int
    count: int

    @property
    def part_blocks(self) -> int:
        """Blocks per part, except the first `longer`."""
        return self.blocks // (self.unit * self.count) * self.unit

    @property
    def longer(self) -> int:
        """Number of parts, the first ones, with `unit` blocks more."""
        return self.blocks // self.unit % self.count

    @property
    def starts(self) -> tuple[int, ...]:
        """The first block of each part."""
        return tuple(i * self.part_blocks + min(i, self.longer) * self.unit for i in range(self.count))
