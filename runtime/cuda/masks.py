"""Masks of tokens that grammars exclude, for a step on a GPU (codegen/gpu/masks.py).

The host writes them while the GPU computes the step's logits. Threads of llguidance compute most of them, meanwhile the
host goes on with its other work.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from qcompile.runtime.cuda.background import BackgroundCall
from qcompile.runtime.cuda.driver import Driver
from qcompile.runtime.cuda.memory import MirroredNumbers
from qcompile.runtime.sampling.inputs import SamplingInputs
from qcompile.runtime.sampling.masks import Grammar, GrammarState, Together, mask_words, unusual
from qcompile.runtime.step import Rows

_FEWEST = 4
"""Masks that are worth a lexer of their own, or that the host does not wait for: as a rule each takes 10 to 100 us."""
_MOST_LEXERS = 16
"""Most lexers of a grammar: each takes the time of a compilation and memory of its own."""


class DeviceMasks:
    """An int32 array on the GPU, with a copy in pinned host memory, for steps of up to `rows` rows with logits.

    It begins with a number for each of these: where its mask begins, or 0. It grows when masks are first used.
    """

    def __init__(self, driver: Driver, rows: int, vocab: int) -> None:
        self._driver, self._rows, self._words = driver, rows, mask_words(vocab)
        self._starts: list[int] = []
        self._wanted: list[tuple[GrammarState, list[int]]] = []
        self._numbers: MirroredNumbers | None = None
        self._sent: Any = None
        self._background = BackgroundCall()
        self._begun: _Begun | None = None

    @property
    def address(self) -> int:
        """Where the array is on the GPU, 0 if masks were never used; `grow` changes it."""
        return self._numbers.address if self._numbers else 0

    def want(self, sequences: Sequence[Rows], sampling: Sequence[SamplingInputs]) -> bool:
        """Note which masks a step needs. Returns whether it needs any."""
        self._forget()
        self._starts, self._wanted = [], []
        if any(inputs.masks for inputs in sampling):
            for rows, inputs in zip(sequences, sampling, strict=True):
                end = rows.start + len(rows.tokens)
                for position in range(end - rows.outputs, end):
                    self._starts.append(self._want(rows, inputs, position - inputs.first))
        return bool(self._wanted)

    def _want(self, rows: Rows, inputs: SamplingInputs, after: int) -> int:
        """Note the mask of a row that is `after` positions after the first. Returns where it begins."""
        if not inputs.masks or after < 0:
            return 0
        later: list[int] = []
        if after:
            later = list(inputs.masks.ahead[:after]) + [0] * (after - len(inputs.masks.ahead))
            for position, token in enumerate(rows.tokens, rows.start - inputs.first - 1):
                if 0 <= position < after:
                    later[position] = token
        self._wanted.append((inputs.masks.grammar, later))
        return self._items(len(self._wanted) - 1)

    @property
    def lacks_room(self) -> bool:
        """Whether the noted masks need more memory."""
        return bool(self._wanted) and self._items(len(self._wanted)) > (self._numbers.items if self._numbers else 0)

    def _items(self, masks: int) -> int:
        """Numbers of an array with `masks` masks."""
        return self._rows + masks * self._words

    def grow(self) -> None:
        """Make room for the noted masks. No launch that knows the old address may be running, or run later."""
        if self.lacks_room:
            items = self._items(1 << (len(self._wanted) - 1).bit_length())
            numbers = MirroredNumbers(self._driver, items, 4, "masks of tokens")
            self._free_numbers()
            self._numbers, self._sent = numbers, self._driver.event()

    def begin(self) -> bool:
        """Begin to compute the noted masks, which `send` ends. Returns whether other threads compute some meanwhile."""
        if self._begun is not None:
            return self._background.busy
        assert self._numbers is not None
        self._driver.wait_for(self._sent)  # what was sent before may be on its way
        address = self._numbers.host_address
        starts: Any = (ctypes.c_int32 * len(self._starts)).from_address(address)
        starts[:] = self._starts
        new, known = self._divided()
        self._spread(new)
        self._begun = _Begun(known)
        self._begin_some(new)
        return self._background.busy

    def send(self) -> None:
        """Write the noted masks, and queue their copy to the GPU."""
        if self._begun is None:
            self.begin()
        assert self._begun is not None and self._numbers is not None
        while self._begun.states:
            self._end_some()
            self._begin_some(self._begun.left)
        for index in self._begun.known:
            state, ahead = self._wanted[index]
            state.fill(ahead, self._place(index), self._words)
        self._begun = None
        self._numbers.send(self._items(len(self._wanted)))
        self._driver.record(self._sent)

    def content(self) -> memoryview:
        """The bytes that the last `send` has sent."""
        assert self._numbers is not None
        return self._numbers.content(self._items(len(self._wanted)))

    def receive(self, content: memoryview, forget: Callable[[], None]) -> None:
        """Send what `send` sent in another process. Calls `forget` before memory moves that launches know."""
        items = len(content) // 4
        if items > (self._numbers.items if self._numbers else 0):
            forget()
            numbers = MirroredNumbers(self._driver, 1 << (items - 1).bit_length(), 4, "masks of tokens")
            self._free_numbers()
            self._numbers, self._sent = numbers, self._driver.event()
        assert self._numbers is not None
        self._driver.wait_for(self._sent)
        self._numbers.content(items)[:] = content
        self._numbers.send(items)
        self._driver.record(self._sent)

    def _place(self, index: int) -> int:
        """Address of a noted mask in the host's memory."""
        assert self._numbers is not None
        return self._numbers.host_address + 4 * self._items(index)

    def _begin_some(self, masks: Sequence[int]) -> None:
        """Begin to compute these masks together, but one of each text: a matcher is at one place."""
        assert self._begun is not None
        states: dict[GrammarState, int] = {}
        left: list[int] = []
        asked: dict[Together, list[tuple[Any, int]]] = {}
        first, size = self._place(0), 4 * self._words
        for index in masks:
            state, ahead = self._wanted[index]
            if state in states:
                left.append(index)
            elif (matcher := state.begin(ahead, first + index * size, self._words)) is not None:
                states[state] = index
                asked.setdefault(state.grammar.together, []).append((matcher, index))
        self._begun.states, self._begun.left = states, left
        if states:
            self._begun.call = partial(_compute, asked, first, size, len(self._wanted))
            if len(states) >= _FEWEST:
                self._background.begin(self._begun.call)

    def _end_some(self) -> None:
        """Have the masks computed that were begun last."""
        assert self._begun is not None
        if self._background.busy:
            self._background.wait()
        else:
            self._begun.call()
        first, size = self._place(0), 4 * self._words
        masks: Any = (ctypes.c_uint32 * (len(self._wanted) * self._words)).from_address(first)
        written = np.ctypeslib.as_array(masks).reshape(-1, self._words)
        told = unusual(written, frozenset().union(*(state.grammar.eos for state in self._begun.states))).tolist()
        for state, index in self._begun.states.items():
            state.end(self._wanted[index][1], first + index * size, self._words, not told[index])

    def _forget(self) -> None:
        """Forget masks that were begun for a step that has failed."""
        self._begun = None
        with suppress(Exception):
            self._background.wait()

    def _divided(self) -> tuple[list[int], list[int]]:
        """The noted masks that have to be computed, and those that are known, or are once these are computed."""
        new: list[int] = []
        known: list[int] = []
        seen: set[int] = set()
        for index, (state, ahead) in enumerate(self._wanted):
            text = state.text_after(ahead)
            (known if text in seen or state.grammar.known.get(text) else new).append(index)
            seen.add(text)
        return new, known

    def _spread(self, new: Sequence[int]) -> None:
        """Spread the masks to compute of each grammar over its lexers, as a lexer has a lock.

        A grammar of many masks gets more lexers. Texts of a lexer that has more than its share move to others.
        """
        by_grammar: dict[Grammar, list[GrammarState]] = {}
        for index in new:
            state = self._wanted[index][0]
            by_grammar.setdefault(state.grammar, []).append(state)
        for grammar, states in by_grammar.items():
            grammar.lexers.grow(min(_cores(), _MOST_LEXERS, len(states) // _FEWEST))
            lexers = grammar.lexers.all
            if len(lexers) > 1:
                most = max(_FEWEST, -(-len(states) // len(lexers)))
                counts = dict.fromkeys(lexers, 0)
                for state in states:
                    if counts[state.lexer] >= most:
                        state.lexer = min(counts, key=lambda lexer: counts[lexer])
                    counts[state.lexer] += 1

    def free(self) -> None:
        """Free the memory on both sides, and end the thread."""
        self._background.close()
        self._begun = None
        self._free_numbers()

    def _free_numbers(self) -> None:
        if self._numbers:
            self._numbers.free()
            self._driver.drop_event(self._sent)
            self._numbers = self._sent = None


@dataclass(slots=True)
class _Begun:
    """Masks that were begun: those that are known, or are once others are computed, `known`. call: computes those of
    `states`, which follow from the texts of these; `left` come after them, as they are of the same texts."""

    known: list[int]
    states: dict[GrammarState, int] = field(default_factory=dict)
    left: list[int] = field(default_factory=list)
    call: Callable[[], None] = lambda: None


def _compute(asked: Mapping[Together, Sequence[tuple[Any, int]]], address: int, size: int, room: int) -> None:
    """Compute masks, given by how they are computed together. The other parameters are those of `Together`."""
    for together, matchers in asked.items():
        together(matchers, address, size, room)


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))
