"""Masks of tokens that grammars exclude, for a step on a GPU (codegen/gpu/masks.py).

The host writes them while the GPU computes the step's logits.
"""

from __future__ import annotations

from collections.abc import Sequence

from qcompile.runtime.cuda.driver import Driver
from qcompile.runtime.cuda.memory import PinnedNumbers
from qcompile.runtime.sampling.draws import Draws
from qcompile.runtime.sampling.masks import GrammarState, mask_words
from qcompile.runtime.step import Rows


class DeviceMasks:
    """An int32 array on the GPU, with a copy in pinned host memory, for steps of up to `rows` rows with logits.

    It begins with a number for each of these: where its mask begins, or 0. It grows when masks are first used.
    """

    def __init__(self, driver: Driver, rows: int, vocab: int) -> None:
        self._driver, self._rows, self._words = driver, rows, mask_words(vocab)
        self._starts: list[int] = []
        self._wanted: list[tuple[GrammarState, list[int]]] = []
        self._room = 0
        self._host = PinnedNumbers(driver)
        self.address = 0
        """Where the array is on the GPU; `grow` changes it."""

    def want(self, sequences: Sequence[Rows], draws: Sequence[Draws]) -> bool:
        """Note which masks a step needs. Returns whether it needs any."""
        self._starts, self._wanted = [], []
        if any(draw.masks for draw in draws):
            for rows, draw in zip(sequences, draws, strict=True):
                end = rows.start + len(rows.tokens)
                for position in range(end - rows.outputs, end):
                    self._starts.append(self._want(rows, draw, position - draw.first))
        return bool(self._wanted)

    def _want(self, rows: Rows, draw: Draws, after: int) -> int:
        """Note the mask of a row that is `after` positions after the first. Returns where it begins."""
        if not draw.masks or after < 0:
            return 0
        later = list(draw.masks.ahead[:after]) + [0] * (after - len(draw.masks.ahead))
        for position, token in enumerate(rows.tokens, rows.start - draw.first - 1):
            if 0 <= position < after:
                later[position] = token
        self._wanted.append((draw.masks.grammar, later))
        return self._rows + (len(self._wanted) - 1) * self._words

    @property
    def lacks_room(self) -> bool:
        """Whether the noted masks need more memory."""
        return len(self._wanted) > self._room

    def grow(self) -> None:
        """Make room for the noted masks. No launch that knows the old address may be running, or run later."""
        if self.lacks_room:
            self.free()
            room = 1 << (len(self._wanted) - 1).bit_length()
            items = self._rows + room * self._words
            self._driver.use()
            self.address = self._driver.allocate(4 * items, "masks of tokens")
            self._host.open(items)
            self._room = room

    def send(self) -> None:
        """Write the noted masks, and queue their copy to the GPU."""
        numbers = self._host.begin()
        numbers[: len(self._starts)] = self._starts
        for index, (grammar, ahead) in enumerate(self._wanted):
            first = self._rows + index * self._words
            grammar.fill(ahead, self._host.address + 4 * first, self._words)
        self._driver.use()
        self._host.send(self.address, self._rows + len(self._wanted) * self._words)

    def free(self) -> None:
        """Free the memory on both sides."""
        if self._room:
            self._driver.free(self.address)
            self._host.free()
            self.address = self._room = 0
