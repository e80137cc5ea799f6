"""The memory of each GPU of a divided model to which the others write (peer memory), and the state of exchanges.

    packed    int64 [2][ranks][few_rows][width]: a part's float32 bits, below the number of the sum in the upper half
    arrived   int32 [MOST_ROWS]: at slot * ranks + r, the last sum of an owned row to which rank r has sent its part
    done      int32 [MOST_ROWS]: the last sum of a row of which its owner has sent the results
    passed    int32 [2][ranks][MOST_PROGRAMS]: the last exchange in which a program of rank r has sent all that it sends
    logits    float32 [MOST_OUTPUTS][vocabulary], where ranks gather them
    data      [groups of `ranks` rows]: float32 [ranks][width], the parts of the owned row; then `result_bytes` for each
              row of the group, what the row's owner has made of the sum

Row n is owned by rank n modulo `ranks`, and its slot is n // ranks. `data` has as many groups as the largest step has.

A program counts its exchanges in sums of few rows and in gatherings, and a row its sums of many rows. In a sum of few
rows, and in a gathering, a program waits for the programs of its number on all GPUs: when it has ended exchange
e, those have ended e - 1, and it may write where they had parts of e - 1. So two places, and two flags, are enough.
Logits have one place, since sums are between two gatherings. In a sum of many rows, a GPU sends its next parts when it
has collected all results of the sum before; so the owners have read its parts, and one place is enough for them. An
owner sends results when all have sent their parts of the same row, so all have collected the results before.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcompile.codegen.gpu.launches import MOST_OUTPUTS, MOST_ROWS

FEW_ITEMS, FEW_ROWS = 1 << 17, 32
"""Most numbers that a GPU sends in a sum of few rows, and most rows of one, which all GPUs sum: twice the bytes of
parts, but one step. Beyond, owners sum their rows. On two H200, 16 rows of 4,096 with a norm take 5.1 us in one step,
and 8.2 us by owners (benchmarks/results/gpu_sums_h200.json)."""
MOST_PROGRAMS = 512
"""Most programs of a kernel that gathers logits."""
STATE = 4
"""Words before the counters in the memory `sums`; the first says whether a GPU has failed."""
GATHERED = STATE
"""Where the counters of programs of gatherings begin in that memory, in words."""
OWNED = GATHERED + MOST_PROGRAMS
"""Where the counters of rows in sums of many rows begin."""
PACKED = OWNED + MOST_ROWS
"""Where the counters of programs in sums of few rows begin."""


@dataclass(frozen=True)
class PeerLayout:
    """Where the parts of a GPU's peer memory begin, in bytes, if no sum has rows of more than `width` elements.

    `result_bytes`: the most that an owner sends of a row, a multiple of 16. `vocab`: logits of a row that ranks gather;
    0 if they do not. `spread`: elements of a program in all sums of few rows, of which their widths are multiples; 0 if
    a program has a row.
    """

    ranks: int
    width: int
    result_bytes: int = 0
    vocab: int = 0
    spread: int = 0

    @property
    def few_rows(self) -> int:
        """Most rows that all GPUs sum in one step."""
        return max(1, min(FEW_ROWS, FEW_ITEMS // (max(self.width, 1) * (self.ranks - 1))))

    @property
    def row_programs(self) -> int:
        """Programs of the widest row in sums of few rows."""
        return self.width // self.spread if self.spread else 1

    @property
    def state_bytes(self) -> int:
        """Bytes of the memory of counters."""
        return 4 * (PACKED + self.few_rows * self.row_programs)

    @property
    def packed_items(self) -> int:
        """Elements of one rank in one of the two places of `packed`."""
        return self.few_rows * self.width

    @property
    def arrived(self) -> int:
        """Where `arrived` begins."""
        return 16 * self.ranks * self.packed_items

    @property
    def done(self) -> int:
        """Where `done` begins; `arrived` has room for whole groups."""
        return self.arrived + 4 * (MOST_ROWS + self.ranks)

    @property
    def passed(self) -> int:
        """Where `passed` begins."""
        return self.done + 4 * MOST_ROWS

    @property
    def logits(self) -> int:
        """Where `logits` begins."""
        return _aligned(self.passed + 8 * self.ranks * MOST_PROGRAMS)

    @property
    def data(self) -> int:
        """Where `data` begins."""
        return _aligned(self.logits + 4 * MOST_OUTPUTS * self.vocab)

    @property
    def part_bytes(self) -> int:
        """Bytes of a part of a row, a multiple of 16."""
        return -(-4 * self.width // 16) * 16

    @property
    def group_bytes(self) -> int:
        """Bytes of a group of rows in `data`."""
        return self.ranks * (self.part_bytes + self.result_bytes)

    def size(self, rows: int) -> int:
        """Bytes of the memory for steps of up to `rows` rows."""
        return self.data + -(-rows // self.ranks) * self.group_bytes


def _aligned(place: int) -> int:
    return -(-place // 1024) * 1024
