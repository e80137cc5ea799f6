"""Biases on a request's tokens, and tokens that it may not choose: these have a bias of minus infinity.

Biases are the same along most outputs. Two options change them: `min_tokens`, after that number of tokens, and words of
`bad_words` with several tokens, of which the last is banned where the others stand before it. An executor gets the
biases for a whole call, so a call ends where they change (`TokenBiases.until`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from qcompile.errors import UsageError
from qcompile.runtime.sampling.penalties import Bias

Encode = Callable[[str], list[int]]
"""Gives the tokens of a text, without those that a tokenizer adds."""


@dataclass(frozen=True)
class Bans:
    """What a request may not choose.

    allowed: the only tokens that it may choose; None for all. ends: tokens that it may not choose before it has
    `least` tokens. words: sequences of tokens of which it may not choose the last after the others.
    """

    allowed: frozenset[int] | None = None
    ends: frozenset[int] = frozenset()
    least: int = 0
    words: tuple[tuple[int, ...], ...] = ()

    def check(self, vocab: int) -> None:
        """Raise UsageError if there may be no token left of a vocabulary of `vocab` tokens."""
        last = {word[-1] for word in self.words} | self.ends
        left = vocab - len(last) if self.allowed is None else len(self.allowed - last)
        if left < 1:
            raise UsageError("allowed_token_ids, bad_words and min_tokens leave no token to choose")


NO_BANS = Bans()


def word_tokens(words: Sequence[str], encode: Encode) -> tuple[tuple[int, ...], ...]:
    """The tokens of words as a tokenizer encodes them at the start of a text, and after a space if that differs in the
    first token only, as in vLLM."""
    sequences = []
    for word in words:
        plain, spaced = tuple(encode(word.lstrip() or word)), tuple(encode(f" {word.lstrip()}"))
        sequences += [plain] * bool(plain)
        if plain and len(spaced) == len(plain) and spaced[0] != plain[0]:
            sequences.append(spaced)
    return tuple(dict.fromkeys(sequences))


class BiasTable:
    """The biases that a request may have, which all samples of its prompt share.

    given: by token number. vocab: size of the vocabulary.
    """

    def __init__(self, given: Mapping[int, float] | None, bans: Bans, vocab: int) -> None:
        self._given, self._vocab = dict(given or {}), vocab
        self.least = bans.least
        self.words = [word for word in bans.words if len(word) > 1]
        self._always = {word[0] for word in bans.words if len(word) == 1}
        self._allowed, self._ends = bans.allowed, bans.ends
        self._late = self._without(set())
        self._early = self._without(self._ends) if bans.least else self._late

    def biases(self, early: bool, last: set[int]) -> Bias | None:
        """The biases; None if there are none. early: whether no end may come yet. last: further banned tokens."""
        if last:
            return self._without(last | self._ends if early else last)
        return self._early if early else self._late

    def _without(self, more: Collection[int]) -> Bias | None:
        """The biases if these tokens are banned besides those that always are."""
        tokens: Collection[int] = self._always.union(more)
        if self._allowed is not None:
            banned = np.ones(self._vocab, bool)
            banned[list(self._allowed)] = False
            banned[list(tokens)] = True
            tokens = np.flatnonzero(banned).tolist()
        if not tokens and not self._given:
            return None
        every = dict(self._given) | dict.fromkeys(tokens, -np.inf)
        return Bias(np.array(list(every), np.int32), np.array(list(every.values()), np.float32))


class TokenBiases:
    """The biases of one request along its output."""

    def __init__(self, table: BiasTable) -> None:
        self._table = table
        self._longest = max(map(len, table.words), default=1)
        self._none = not table.words and table.biases(True, set()) is None and table.biases(False, set()) is None
        self._count = 0  # tokens of the output
        self._recent: list[int] = []  # the last of them

    def note(self, token: int) -> None:
        """Note that the token was appended to the output."""
        self._count += 1
        if self._table.words:
            self._recent = [*self._recent, token][1 - self._longest :]

    def until(self, count: int) -> int | None:
        """The length of the output up to which the biases after `count` tokens hold; None: to the end."""
        if self._table.words:
            return count + 1
        return self._table.least if count < self._table.least else None

    def after(self, skipped: int, ahead: Sequence[int]) -> Bias | None:
        """The biases after the tokens noted, `skipped` unknown ones and those `ahead`; None if there are none."""
        if self._none:
            return None
        early = self._count + skipped + len(ahead) < self._table.least
        text = [*self._recent, *ahead] if self._table.words else []
        last = {word[-1] for word in self._table.words if text[len(text) - len(word) + 1 :] == [*word[:-1]]}
        return self._table.biases(early, last)
