"""What requests may not choose, read from their parameters for one model."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING

from qcompile.errors import UsageError
from qcompile.runtime.sampling.biases import NO_BANS, Bans, BiasTable, word_tokens
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.tokenizer import encode

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class BanReader:
    """Reads bans for a model with this tokenizer and size of the vocabulary."""

    def __init__(self, tokenizer: Tokenizer | None, vocab: int) -> None:
        self._tokenizer, self._vocab = tokenizer, vocab
        self._words = lru_cache(64)(self._word_tokens)  # a request's words are needed several times
        self._last: tuple[SamplingParams, BiasTable] | None = None

    def read(self, params: SamplingParams, ends: frozenset[int]) -> Bans:
        """What a request may not choose. ends: the tokens that end its text.

        Raises UsageError if no token may be left, or if a tokenizer is needed that the model does not have.
        """
        if not params.bans:
            return NO_BANS
        allowed = None if params.allowed_token_ids is None else frozenset(params.allowed_token_ids)
        words = self._words(tuple(params.bad_words)) if params.bad_words else ()
        bans = Bans(allowed, ends if params.min_tokens else frozenset(), params.min_tokens, words)
        bans.check(self._vocab)
        return bans

    def table(self, params: SamplingParams, ends: frozenset[int]) -> BiasTable:
        """The biases of a request. That of the samples of a prompt, which have the same parameters, is made once."""
        if self._last is None or self._last[0] is not params:
            self._last = params, BiasTable(params.logit_bias, self.read(params, ends), self._vocab)
        return self._last[1]

    def _word_tokens(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        if self._tokenizer is None:
            raise UsageError("this artifact has no tokenizer: bad_words cannot be encoded")
        return word_tokens(words, partial(encode, self._tokenizer, special=False))
