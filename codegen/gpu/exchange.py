"""What kernels that exchange with the other GPUs of a divided model have in common: arguments, operands, and facts.

Peer memory, and the counters of exchanges, are described in peer_memory.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from qcompile.codegen.gpu.kernel import Argument
from qcompile.codegen.gpu.operands import InputRef, Operands, PeerRef, RankRef
from qcompile.codegen.gpu.peer_memory import GATHERED, MOST_PROGRAMS, OWNED, PACKED, PeerLayout
from qcompile.targets import has_pdl

_GLANCES, _PATIENCE = 1 << 8, 1 << 16
"""Looks at memory that another GPU writes to, between two looks at this GPU's word and at the host's, which say whether
a GPU has failed; powers of two. The host's word is read seldom (in about 20 ms), since reads by every warp of memory
beyond PCIe take longer than a whole sum. Who finds it set sets the GPU's, so that all later sums end at once."""

_PACK, _LOADS = 4, 8
"""Most elements that a thread waits for at once, and most of their parts, where a program has a whole row."""
Way = Literal["packed", "owned"]


def peer_arguments(ranks: int) -> list[Argument]:
    """The arguments of a kernel that exchanges with other GPUs, behind its others."""
    state = [Argument("state", "*i32"), Argument("failed", "*i32"), Argument("rank", "i32")]
    return state + [Argument(name, "*i64") for name in ("own", *(f"peer{rank}" for rank in range(ranks)))]


def peer_operands(ranks: int) -> Operands:
    """What a launch passes for `peer_arguments`."""
    args: Operands = {"state": InputRef("sums"), "failed": InputRef("failed"), "rank": RankRef(), "own": PeerRef()}
    return args | {f"peer{rank}": PeerRef(rank) for rank in range(ranks)}


def exchange_facts(layout: PeerLayout, capability: int, asm: bool) -> dict[str, Any]:
    """Values for templates of kernels that exchange. Without `asm` kernels do not wait, for Triton's interpreter."""
    return {
        "layout": layout,
        "ranks": range(layout.ranks),
        "gathered": GATHERED,
        "packed": PACKED,
        "owned": OWNED,
        "most_programs": MOST_PROGRAMS,
        "patience": _PATIENCE,
        "glances": _GLANCES,
        "asm": asm,
        "pdl": has_pdl(capability),
    }


class RowArray(NamedTuple):
    """An array that an owner sends: the kernel's argument, 32-bit words from row to row, and words of a row."""

    name: str
    stride: int
    words: int

    @property
    def block(self) -> int:
        """Words that a program handles at once."""
        return 1 << (self.words - 1).bit_length()


@dataclass(frozen=True)
class RowExchange:
    """How a row kernel gets its rows: row = [other +] the sum over ranks of x, in the order of ranks; all f32.

    - packed: each program of each GPU sends its elements of a row to all, and sums what it receives.
    - owned: rank r has programs for the rows that it owns, to which the others have sent theirs (SendSpec), and sends
      `arrays` of its rows to all (CollectSpec). With `total_stride` the sum is also stored (`total`).

    Strides are in elements.
    """

    layout: PeerLayout
    way: Way
    other_stride: int = 0
    total_stride: int = 0
    arrays: tuple[RowArray, ...] = ()
    asm: bool = True

    def warps(self, block: int) -> int:
        """Warps of a program that waits for `block` elements: few elements a thread, as a thread waits for its own.

        0 of one that does not: as many as without an exchange, so that sums over a row have the same order.
        """
        return min(max(block // 32, 1), 32) if self.way == "packed" else 0

    def facts(self, capability: int, block: int) -> dict[str, Any]:
        """Values for the template of a row kernel with `block` elements a program."""
        of_thread = block // (32 * max(self.warps(block), 1))
        pack = max(1, min(_PACK, _LOADS // self.layout.ranks, of_thread))
        own = {"pack": pack, "array_places": places(self.arrays)}
        return exchange_facts(self.layout, capability, self.asm) | own

    @property
    def arguments(self) -> list[Argument]:
        """The arguments of the row kernel behind its own."""
        names = [Argument("added", "*fp32")] * bool(self.other_stride)
        names += [Argument("total", "*fp32")] * bool(self.total_stride)
        return names + [Argument("tokens", "i32")] * (self.way == "owned") + peer_arguments(self.layout.ranks)


def places(arrays: tuple[RowArray, ...]) -> list[tuple[RowArray, int]]:
    """Each array with the word at which it begins in a row's results."""
    result, at = [], 0
    for array in arrays:
        result.append((array, at))
        at += -(-array.words // 4) * 4
    return result


def result_bytes(arrays: tuple[RowArray, ...]) -> int:
    """Bytes of a row's results."""
    return sum(-(-array.words // 4) * 16 for array in arrays)
