"""The memory of each GPU of a divided model to which the others write (peer memory), and the state of exchanges.

    small     int64 [2][ranks][SMALL_ITEMS]: a part's float32 bits, below the number of the sum in the upper half
    arrived   int32 [ranks][most chunks]: the last sum in two steps to which rank r has sent its part of an owned chunk
    summed    int32 [most chunks]: the last sum in two steps of which `data` has the total of the chunk
    passed    int32 [2][ranks][MOST_PROGRAMS]: the last exchange in which a program of rank r has sent all that it sends
    logits    float32 [MOST_OUTPUTS][vocabulary], where ranks gather them
    sent      float32 [chunks][2][ranks - 1][CHUNK]: parts of the others in sums in one exchange
    data      float32 [groups][2][ranks][CHUNK]: of `ranks` chunks, the parts of the owned one, and all totals

Two GPUs have no sums in two steps: `sent` is at the end then, and there is no `data`.

A program of a kernel that exchanges in one step waits only for the programs of its number on the other GPUs, and
counts its exchanges. Each of its exchanges waits for all GPUs, and begins when the one before has ended. So when it has
ended exchange e, the others' programs of its number have ended e - 1, and it may write where they had parts of e - 1:
two places, and two flags, are enough. Logits have one place, since sums are between two gatherings.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcompile.codegen.gpu.launches import MOST_OUTPUTS

SMALL_BLOCK, SMALL_PROGRAMS = 256, 256
"""Elements of a program of a small sum, and most programs of one."""
CHUNK = 4096
"""Elements that one program of a larger sum in two steps handles at a time, and unit in which memory is divided."""
MOST_PROGRAMS = 512
"""Most programs of a kernel that exchanges in one step."""
MEDIUM_ITEMS = 1 << 18
"""Most elements of a sum in one exchange among more than two GPUs, for which larger ones in two steps send less."""
STATE = 4
"""Words before the counters of programs in the memory `sums`: the number of sums in two steps, how many programs of
such a sum have ended, and whether a GPU has failed."""
STATE_BYTES = 4 * (STATE + MOST_PROGRAMS)


@dataclass(frozen=True)
class PeerLayout:
    """Where the parts of a GPU's peer memory begin, in bytes, if no sum has more than `items` elements.

    `vocab`: logits of a row that ranks gather; 0 if they do not.
    """

    ranks: int
    items: int
    vocab: int = 0

    @property
    def chunks(self) -> int:
        """Most chunks of a sum, a multiple of the ranks."""
        return -(-self.items // (CHUNK * self.ranks)) * self.ranks

    @property
    def arrived(self) -> int:
        """Where `arrived` begins."""
        return 2 * self.ranks * SMALL_BLOCK * SMALL_PROGRAMS * 8

    @property
    def summed(self) -> int:
        """Where `summed` begins."""
        return self.arrived + 4 * self.ranks * self.chunks

    @property
    def passed(self) -> int:
        """Where `passed` begins."""
        return self.summed + 4 * self.chunks

    @property
    def logits(self) -> int:
        """Where `logits` begins."""
        return _aligned(self.passed + 8 * self.ranks * MOST_PROGRAMS)

    @property
    def sent(self) -> int:
        """Where `sent` begins."""
        return _aligned(self.logits + 4 * MOST_OUTPUTS * self.vocab)

    @property
    def data(self) -> int:
        """Where `data` begins; of two GPUs, which have no `data`, where `sent` begins."""
        return self.sent + (8 * (self.ranks - 1) * MEDIUM_ITEMS if self.ranks > 2 else 0)


def _aligned(place: int) -> int:
    return -(-place // 1024) * 1024
