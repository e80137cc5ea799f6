"""Biases on a request's tokens, and tokens that it may not choose: these have a bias of minus infinity.

Biases are the same along most outputs. Two options change them: `min_tokens`, after so many tokens, and words of
`bad_words` with several tokens, of which the last is banned where the others stand before it. An executor gets the
biases for a whole call, so a call ends where they change (`TokenBiases.until`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    found = []
    for word in words:
        plain, spaced = tuple(encode(word.lstrip() or word)), tuple(encode(f" {word.lstrip()}"))
        found += [plain] * bool(plain)
        if plain and len(spaced) == len(plain) and spaced[0] != plain[0]:
            found.append(spaced)
    return tuple(dict.fromkeys(found))


class TokenBiases:
    """The biases of one request along its output. given: by token number. vocab: size of the vocabulary."""

    def __init__(self, given: Mapping[int, float] | None, bans: Bans, vocab: int) -> None:
        self._given, self._bans = dict(given or {}), bans
        always = {word[0] for word in bans.words if len(word) == 1}
        self._words = [word for word in bans.words if len(word) > 1]
        self._longest = max(map(len, self._words), default=1)
        if bans.allowed is not None:
            always |= set(range(vocab)) - bans.allowed
        self._always = always
        self._late = _bias(self._given, always)
        self._early = _bias(self._given, always | bans.ends) if bans.least else self._late
        self._count = 0  # tokens of the output
        self._recent: list[int] = []  # the last of them

    def note(self, token: int) -> None:
        """Note that the token was appended to the output."""
        self._count += 1
        if self._words:
            self._recent = [*self._recent, token][1 - self._longest :]

    def until(self, count: int) -> int | None:
        """The biases after `count` tokens of output hold until there are so many; None: to the end."""
        if self._words:
            return count + 1
        return self._bans.least if count < self._bans.least else None

    def after(self, skipped: int, ahead: Sequence[int]) -> Bias | None:
        """The biases after the tokens noted, `skipped` unknown ones and those `ahead`; None if there are none."""
        early = self._count + skipped + len(ahead) < self._bans.least
        if not self._words:
            return self._early if early else self._late
        text = [*self._recent, *ahead]
        ends = {word[-1] for word in self._words if text[len(text) - len(word) + 1 :] == [*word[:-1]]}
        if not ends:
            return self._early if early else self._late
        return _bias(self._given, self._always | ends | (self._bans.ends if early else set()))


def _bias(given: Mapping[int, float], banned: Any) -> Bias | None:
    """The biases of tokens, minus infinity for those that are banned."""
    every = dict(given) | dict.fromkeys(sorted(banned), -np.inf)
    if not every:
        return None
    return Bias(np.array(list(every), np.int32), np.array(list(every.values()), np.float32))
