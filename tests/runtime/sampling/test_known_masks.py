"""Masks that are kept: found by the same text of the same grammar alone."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import pytest

from qcompile.runtime.sampling import known_masks, masks
from qcompile.runtime.sampling.known_masks import KnownMasks
from qcompile.runtime.sampling.masks import Grammar, GrammarState


class Ascending:
    """Stands for llguidance's matcher: each token is larger than the one before it. It counts what it computes."""

    computed = taken = 0

    def __init__(self, text: tuple[int, ...] = ()) -> None:
        self.text = list(text)

    def deep_copy(self) -> Ascending:
        return Ascending(tuple(self.text))

    def rollback(self, count: int) -> None:
        del self.text[len(self.text) - count :]

    def try_consume_tokens(self, tokens: list[int]) -> int:
        for taken, token in enumerate(tokens):
            if self.text and token <= self.text[-1]:
                return taken
            self.text.append(token)
            Ascending.taken += 1
        return len(tokens)

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
        Ascending.computed += 1
        above = np.arange(8 * size) > (self.text[-1] if self.text else -1)
        ctypes.memmove(address, np.packbits(above, bitorder="little").ctypes.data, size)

    def compute_bitmask(self) -> None: ...

    def is_accepting(self) -> bool:
        return True

    def is_error(self) -> bool:
        return False


def allowed(state: GrammarState, ahead: list[int] | None = None, vocab: int = 64) -> set[int]:
    logits: Any = state.masked(np.zeros(vocab, np.float32), ahead or [])
    return set(np.flatnonzero(np.isfinite(logits)).tolist())


def grammar(known: KnownMasks | None = None, eos: frozenset[int] = frozenset()) -> Grammar:
    return Grammar(Ascending(), eos, None, Ascending, known)


def computed() -> int:
    count, Ascending.computed = Ascending.computed, 0
    return count


def test_a_text_is_computed_once_for_all_that_have_it() -> None:
    one, two = (both := grammar()).start(), both.start()
    computed()
    for token in (3, 9, 30):
        assert allowed(one) == allowed(two) and computed() == 1
        one.note(token)
        two.note(token)
    assert allowed(one) == set(range(31, 64)) == allowed(two)
    one.note(40)
    two.note(41)
    assert (min(allowed(one)), min(allowed(two))) == (41, 42)


def test_drafts_lead_to_the_text_that_tokens_lead_to() -> None:
    """A draft that the grammar excludes allows all, and is not mixed up with what is noted."""
    one, two = (both := grammar()).start(), both.start()
    assert allowed(one, [3, 9]) == set(range(10, 64))
    computed()
    for token in (3, 9):
        two.note(token)
    assert allowed(two) == set(range(10, 64)) and computed() == 0
    assert allowed(one, [9, 3]) == set(range(64)) and allowed(one, [3]) == set(range(4, 64))
    one.note(3)
    assert allowed(one, [9]) == set(range(10, 64))
    one.note(2)
    assert allowed(one) == set() and allowed(two) == set(range(10, 64))


def test_tokens_that_were_ahead_are_not_taken_again() -> None:
    """A call of several steps asks with ever more tokens ahead, which are noted when it ends."""
    state, steps = grammar().start(), [3, 9, 30, 31]
    before = Ascending.taken
    for count in range(len(steps) + 1):
        assert allowed(state, steps[:count]) == set(range(steps[count - 1] + 1 if count else 0, 64))
    for token in steps:
        state.note(token)
    assert Ascending.taken - before == len(steps) and allowed(state) == set(range(32, 64))


def test_texts_that_ended_or_failed_are_not_those_before() -> None:
    one, two = (both := grammar(eos=frozenset([5]))).start(), both.start()
    for state in (one, two):
        state.note(7)
        assert allowed(state) == set(range(8, 64))
    two.note(6)
    assert two._failed and allowed(two) == set()
    one.note(5)
    assert allowed(one) == set(range(64)) == allowed(both.start(), [7, 5])


def test_other_grammars_and_vocabularies_do_not_share() -> None:
    known = KnownMasks()
    one, two = grammar(known).start(), grammar(known).start()
    computed()
    assert allowed(one) == allowed(two) and computed() == 2
    assert allowed(one, vocab=32) == set(range(32)) and computed() == 1


def test_what_is_forgotten_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_masks, "_MOST_MASKS", 4)
    monkeypatch.setattr(known_masks, "_MOST_TEXTS", 8)
    both = grammar()
    for first in range(20):
        state = both.start()
        for token in (first, first + 20, first + 40):
            state.note(token)
            assert allowed(state) == set(range(token + 1, 64))
    assert len(both.known._masks) <= 4 and len(both.known._texts) <= 8


def test_several_threads_agree_on_numbers() -> None:
    known, result = KnownMasks(), list[list[int]]()
    start = known.start()

    def count() -> None:
        result.append([known.after(start, range(length)) for length in range(300)])

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(numbers == result[0] for numbers in result) and len(set(result[0])) == 300


def test_a_sampled_text_keeps_only_its_first_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long sampled texts do not come again: to keep their masks costs time, and drives out those of greedy texts."""
    monkeypatch.setattr(masks, "_MOST_NEW", 3)
    both = grammar()
    first, again = both.start(sampled=True), both.start(sampled=True)
    for token in range(6):
        assert allowed(first) == set(range(token, 64))
        first.note(token)
    computed()
    counts = []
    for token in range(6):
        assert allowed(again) == set(range(token, 64))
        counts.append(computed())
        again.note(token)
    assert counts == [0, 0, 0, 1, 1, 1]
    known = both.start(sampled=True)  # what two texts have kept, a third one has, and keeps as much behind it
    assert [(len(allowed(known)), known.note(token), computed())[2] for token in range(6)] == [0] * 6
    assert first.text_after([]) != first.text_after([])
