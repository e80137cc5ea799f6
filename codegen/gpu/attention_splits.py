"""How decode attention is divided into programs, by the amount of work (kernels: attention.py, attention_merge.py)."""

from __future__ import annotations

from dataclasses import dataclass

from qcompile.codegen.gpu.kv_pages import GpuKV
from qcompile.targets import TUNED_ON

MOST_QUERIES = 16
"""Most query positions per sequence in the decode class; steps with more are prefill."""
GROUP_SPLITS = 16
"""Splits that are merged into one group before groups are merged."""
CHAINED_LEAVES = 4
"""Fewest leaves of a split that are chained."""
MIN_LEAF_POSITIONS = 16
"""Fewest positions of a leaf: the K of the MMA with the values."""
FINE_PROGRAMS = 3072
"""Most programs of a launch that takes one leaf per program, on an H200, and in proportion on other GPUs; half as many
with 16 bits, where one split per program is faster sooner."""
RESIDENT_PROGRAMS = 6
"""Most programs resident at once on a multiprocessor if loads from the ring are pipelined."""
NEAR_SPLITS = 1
"""Most splits of a prompt's step for which programs take few rows: they are faster to begin and to end."""
SHARING_PROGRAMS = {False: 8, True: 5}
"""Most programs per multiprocessor that loop over splits, by whether the cache is hierarchical."""


@dataclass(frozen=True)
class SplitLimits:
    """How decode attention over `kv` is divided into programs, by the amount of work, on a GPU of `multiprocessors`.

    The limits change how fast a step is, not its bits.
    """

    kv: GpuKV
    multiprocessors: int

    @property
    def fine_splits(self) -> int:
        """Most splits, over all sequences, for which each program computes one leaf."""
        programs = FINE_PROGRAMS * self.multiprocessors // TUNED_ON.multiprocessors
        programs //= 2 if self.kv.bits > 8 else 1
        return programs // (self.kv.leaves * self.kv.heads) if self.kv.leaves > 1 else 0

    @property
    def few_splits(self) -> int:
        """Most of these splits for which all programs are resident at once even if not `direct` (AttentionSpec)."""
        resident = RESIDENT_PROGRAMS * self.multiprocessors
        return resident // (self.kv.leaves * self.kv.heads) if self.kv.hierarchical and self.kv.leaves > 1 else 0

    @property
    def shares(self) -> int:
        """Most programs per KV head among which a sequence's splits (hierarchical: all sequences') are divided."""
        return max(SHARING_PROGRAMS[self.kv.hierarchical] * self.multiprocessors // self.kv.heads, 1)

    @property
    def facts(self) -> dict[str, int]:
        """What attention_counts (runtime/cuda/counts.py) needs besides the step to choose launches."""
        limits = {"most_queries": MOST_QUERIES, "group_splits": GROUP_SPLITS, "near_splits": NEAR_SPLITS}
        limits |= {"fine_splits": self.fine_splits, "few_splits": self.few_splits, "shares": self.shares}
        return limits | {"leaves": self.kv.leaves, "shared": self.kv.hierarchical}
