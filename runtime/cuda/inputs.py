"""The inputs of a step on a GPU: its rows, its sequences and their pages, copied from the host in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, repeat
from typing import Any, NamedTuple

from qcompile.runtime.cuda.adapters import DeviceAdapters
from qcompile.runtime.cuda.counts import MIN_PAGES, AttentionWork, attention_work, eighths, power_of_two
from qcompile.runtime.cuda.driver import Driver
from qcompile.runtime.cuda.embeds import GivenEmbeds
from qcompile.runtime.cuda.memory import DeviceMemory, PinnedNumbers
from qcompile.runtime.outputs import MOST_DRAFTS
from qcompile.runtime.step import Limits, Rows

_NAMES = ("counter", "token_ids", "positions", "row_sequence", "output_rows", "query_start", "prompt_start")
"""Arrays of at most one number a row, and some more; the block table, of pages for each sequence, follows them."""
_STATE_NAMES = ("state_slots", "certain")
"""More of these arrays, of one number a sequence, for paths with recurrent states."""
_EMBEDS = "embeds"
"""One more, for paths with rows that may have embeddings in place of tokens: the two halves of their address."""
_ADAPTERS = "adapters"
"""One more, for paths with linears that adapters may change: the number of each sequence's adapter, 0 for none."""


class Written(NamedTuple):
    """What `StepInputs.write` wrote: numbers of rows and of rows with logits, pages of a sequence in the block table,
    most rows of a sequence, and the work of attention for sequences that decode and for prompts. `adapted`: the rows, 0
    if none has an adapter."""

    tokens: int
    outputs: int
    stride: int
    queries: int
    decoding: AttentionWork
    prompts: AttentionWork
    adapted: int = 0


class StepInputs:
    """Input arrays on the GPU. A step may be queued while the one before it runs, so two host copies take turns."""

    def __init__(
        self,
        driver: Driver,
        plan: dict[str, Any],
        limits: Limits,
        memory: DeviceMemory,
        spare: int,
        repeated: int = 0,
    ) -> None:
        """`spare` is the first page past the cache's, for positions that no page of a sequence holds.

        The last `repeated` certain positions of a sequence may be computed again, so recurrent states go back to them.
        """
        self._plan, self._limits, self._memory, self._spare, self._repeated = plan, limits, memory, spare, repeated
        self._most_pages = power_of_two(limits.pages_for(limits.max_position + MOST_DRAFTS))
        names = _NAMES + _STATE_NAMES * (plan["slot_bytes"] > 0)
        names += (_EMBEDS,) * ("embeds" in plan)
        names += (_ADAPTERS,) * any(launch["by"] == "adapted" for launch in plan["launches"])
        self.adapters: DeviceAdapters | None = None
        """The adapters that sequences may have; None if there are none."""
        self._embeds = GivenEmbeds(driver, plan["embeds"]) if "embeds" in plan else None
        self._offsets = {name: i * (memory.rows + 4) for i, name in enumerate((*names, "block_table"))}
        self._hosts = PinnedNumbers(driver), PinnedNumbers(driver)
        self._address = 0
        self._written = 0
        """Numbers of the last step's arrays."""

    def open(self) -> None:
        """Allocate the arrays. Raises ResourceError."""
        items = self._offsets["block_table"] + self._memory.outputs * self._most_pages
        self._address = self._memory.allocate(4 * items, "inputs")
        for host in self._hosts:
            host.open(items)

    def address(self, name: str) -> int | None:
        """The address of an array on the GPU; None if it is not one of these."""
        return self._address + 4 * self._offsets[name] if name in self._offsets else None

    def write(self, sequences: Sequence[Rows], ahead: int, turn: int) -> Written:
        """Write a step's rows to host copy `turn`, which `send` sends to the GPU.

        Sequences may advance `ahead` positions before the next call. Keys and values past a sequence's pages go to
        spare pages. Bf16 entries of a ring and quantized ones have different spare pages: codes read as bf16 may be
        NaN, and NaN times an attention weight of 0 would spoil rows that do not see those positions.
        """
        need = [self._limits.pages_for(rows.start + len(rows.tokens) + ahead) if ahead else 0 for rows in sequences]
        pages = [max(least, len(rows.pages)) for least, rows in zip(need, sequences, strict=True)]
        stride = min(max(power_of_two(max(pages)), MIN_PAGES), self._most_pages)
        lengths = [len(rows.tokens) for rows in sequences]
        decoding, prompts = attention_work(self._plan, lengths, pages, lambda count: self._splits(count, stride))
        starts = list(accumulate(lengths, initial=0))
        ends = zip(sequences, starts[1:], strict=True)
        values: dict[str, list[int]] = {
            "counter": [0],
            "token_ids": list(chain.from_iterable(rows.tokens for rows in sequences)),
            "positions": [at for rows in sequences for at in range(rows.start, rows.start + len(rows.tokens))],
            "row_sequence": list(chain.from_iterable(map(repeat, range(len(lengths)), lengths))),
            "output_rows": [row for rows, end in ends for row in range(end - rows.outputs, end)],
            "query_start": starts,
            "prompt_start": starts[decoding.sequences :],
        }
        if self._embeds:
            self._embeds.begin(turn)
            if any(rows.embeds is not None for rows in sequences):
                values["token_ids"], values[_EMBEDS] = self._embeds.write(sequences, turn)
        if "certain" in self._offsets:
            values["state_slots"] = [rows.slot for rows in sequences]
            values["certain"] = [self._certain(rows) for rows in sequences]
        adapters = [self.adapters.number(rows.pages[0]) if self.adapters else 0 for rows in sequences]
        if _ADAPTERS in self._offsets:
            values[_ADAPTERS] = adapters
        host = self._hosts[turn].begin()
        for name, items in values.items():
            host[self._offsets[name] : self._offsets[name] + len(items)] = items
        self._write_pages(host, sequences, need, stride)
        self._written = self._offsets["block_table"] + len(sequences) * stride
        adapted = starts[-1] if any(adapters) else 0
        return Written(starts[-1], len(values["output_rows"]), stride, max(lengths), decoding, prompts, adapted)

    def send(self, turn: int) -> None:
        """Queue a copy to the GPU of what the last `write` has put into host copy `turn`."""
        self._hosts[turn].send(self._address, self._written)

    def content(self, turn: int) -> memoryview:
        """The bytes that the last `write` has put into host copy `turn`."""
        return self._hosts[turn].content(self._written)

    def receive(self, content: memoryview, turn: int) -> None:
        """Do what `write` and `send` did in another process, which has returned this `content`."""
        self._hosts[turn].receive(content, self._address)

    def _certain(self, rows: Rows) -> int:
        """Leading positions that enter the base of recurrent states."""
        if not self._repeated:
            return rows.certain  # beyond the rows, as far as decoding goes
        return max(0, min(rows.certain, rows.start + len(rows.tokens)) - self._repeated)

    def _write_pages(self, host: Any, sequences: Sequence[Rows], need: Sequence[int], stride: int) -> None:
        """Write the block table: each sequence's pages, and spare pages up to those that it needs."""
        start, ring = self._offsets["block_table"], self._memory.ring_entries
        for first, rows, most in zip(range(start, len(host), stride), sequences, need, strict=False):
            held = len(rows.pages)
            host[first : first + held] = rows.pages
            if held < most:
                host[first + held : first + most] = [self._spare + (0 < ring <= entry) for entry in range(held, most)]

    def reset_counter(self, turn: int) -> None:
        """Queue a copy of the counter, 0, from host copy `turn`: kernels have advanced it."""
        self._hosts[turn].send(self._address, 1)

    def _splits(self, pages: int, stride: int) -> int:
        """Attention splits of a context of `pages` pages."""
        return -(-min(eighths(pages), stride) * self._limits.page_tokens // self._plan["split"])

    def free(self) -> None:
        """Free the host copies; the memory on the GPU belongs to DeviceMemory."""
        if self._embeds:
            self._embeds.free()
        for host in self._hosts:
            host.free()
