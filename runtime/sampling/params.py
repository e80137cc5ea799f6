"""Sampling parameters: the options of one request, checked and in one form."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from qcompile.errors import UsageError, shown
from qcompile.runtime.sampling.logprobs import MOST_REPORTED
from qcompile.runtime.sampling.structured import StructuredOutputsParams, structured

MOST_SAMPLES = 1 << 14
"""Most samples of a prompt: each takes memory from the first step on."""
_MOST_PENALTY = 1e3
"""Largest repetition penalty; the smallest is its reciprocal. Logits times or over it stay finite in float32."""
_MOST_SUBTRACTED = 2.0
"""Largest frequency and presence penalty; the smallest is its negative, as in OpenAI's API."""
_LEAST_TOP_P = 1e-9
"""Less than the largest probability of any vocabulary: a smaller top_p keeps one token, too."""
_MOST_WORDS, _MOST_WORD = 1024, 256
"""Most bad words of a request, and characters of one."""
_MOST_TOKENS = 1 << 20
"""Most tokens in a list of them."""
_MOST_BIAS, _MOST_BIASES = 100.0, 1024
"""Largest absolute value of a bias, as in OpenAI's API; and most biases of a request."""


_FLAGS = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")
_TOKENS = ("stop_token_ids", "allowed_token_ids")
_NO_NUMBERS = ("stop", "logit_bias", "structured_outputs", "bad_words", "lora", *_TOKENS, *_FLAGS)
"""Fields with values that are not numbers."""


@dataclass(frozen=True)
class SamplingParams:
    """Options of one request; names and defaults are vLLM's. Raises UsageError on a value out of range.

    temperature: 0 is greedy. top_k: 0 or -1 is no limit. max_tokens: None is up to the context. stop: one text or
    several; generation ends where one appears, and it is not part of the output. A special token in it matches the
    token. stop_token_ids: tokens at which generation ends, too. include_stop_str_in_output: whether the text of what
    ended the output is part of it. repetition_penalty: for tokens in the prompt or the output. frequency_penalty,
    presence_penalty: subtracted from a token's logit for each occurrence in the output, and once if it occurs there at
    all. logit_bias: added to the logits of these tokens. seed: None or -1 takes fresh entropy. logprobs: number of
    alternatives to report for every token. prompt_logprobs: the same for tokens of the prompt; then max_tokens may be
    0. skip_special_tokens: whether special tokens have no text in the output; the token that ends it never has.
    best_of: number of samples to generate, of which the n with the highest mean log probability of a token are
    returned, the best first; None is n. structured_outputs: the language of the output, as StructuredOutputsParams or
    by the names of its fields. min_tokens: number of tokens before which nothing ends the output: what would is not
    chosen. allowed_token_ids: the only tokens that may be chosen. bad_words: texts that are not generated, in the
    tokens that the tokenizer encodes them with. truncate_prompt_tokens: number of the prompt's last tokens that are
    kept; -1 as many as fit. priority: of requests that wait, those with the lowest number run first. lora: the name of
    the adapter that the request has (`load(lora=...)`); None is the model alone. Numbers may be numpy's.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    max_tokens: int | None = 16
    stop: str | Sequence[str] | None = None
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    best_of: int | None = None
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    min_tokens: int = 0
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    lora: str | None = None

    def __post_init__(self) -> None:
        for name in (name for name in self.__dataclass_fields__ if name not in _NO_NUMBERS):
            object.__setattr__(self, name, plain_number(getattr(self, name)))
        if self.seed == -1:  # vLLM's other way to give none
            object.__setattr__(self, "seed", None)
        in_range = _whole(self.n) and 1 <= self.n <= MOST_SAMPLES
        self._need("n", in_range, f"a whole number of at least 1 and at most {MOST_SAMPLES}")
        in_range = self.best_of is None or (_whole(self.best_of) and self.n <= self.best_of <= MOST_SAMPLES)
        self._need(
            "best_of", in_range, f"None or a whole number of at least n ({shown(self.n)}) and at most {MOST_SAMPLES}"
        )
        for name in _FLAGS:
            self._need(name, isinstance(getattr(self, name), bool | np.bool_), "True or False")
        self._need("temperature", _real(self.temperature) and self.temperature >= 0, "a finite number, at least 0")
        self._need("top_k", _whole(self.top_k) and self.top_k >= -1, "0 or -1 (no limit), or at least 1")
        self._need("top_p", _real(self.top_p) and 0 <= self.top_p <= 1, "a number between 0 and 1")
        object.__setattr__(self, "top_p", max(self.top_p, _LEAST_TOP_P))
        self._need("min_p", _real(self.min_p) and 0 <= self.min_p <= 1, "a number between 0 and 1")
        in_range = _real(self.repetition_penalty) and 1 / _MOST_PENALTY <= self.repetition_penalty <= _MOST_PENALTY
        self._need("repetition_penalty", in_range, f"a number between {1 / _MOST_PENALTY:g} and {_MOST_PENALTY:g}")
        for name in ("frequency_penalty", "presence_penalty"):
            in_range = _real(getattr(self, name)) and abs(getattr(self, name)) <= _MOST_SUBTRACTED
            self._need(name, in_range, f"a number between {-_MOST_SUBTRACTED:g} and {_MOST_SUBTRACTED:g}")
        fits = self.seed is None or (_whole(self.seed) and -(2**63) <= self.seed < 2**63)
        self._need("seed", fits, "None or a whole number of 64 bits")
        for name, least in (("max_tokens", self.prompt_logprobs is None), ("logprobs", 0)):
            value = getattr(self, name)
            fits = value is None or (_whole(value) and value >= least)
            self._need(name, fits, f"None or a whole number of at least {int(least)}")
        in_range = self.prompt_logprobs is None or (
            _whole(self.prompt_logprobs) and 0 <= self.prompt_logprobs <= MOST_REPORTED
        )
        self._need("prompt_logprobs", in_range, f"None or a whole number of at most {MOST_REPORTED}")
        self._check_biases()
        self._check_structure()
        listed = self.stop is None or isinstance(self.stop, Sequence)
        texts = listed and all(isinstance(text, str) and text for text in self.stops)
        self._need("stop", texts, "one or several texts, none empty")
        for name in _TOKENS:
            self._check_tokens(name)
        self._check_bans()
        self._need("priority", _whole(self.priority), "a whole number")
        self._need("lora", self.lora is None or isinstance(self.lora, str), "None or the name of an adapter")
        kept = self.truncate_prompt_tokens
        fits = kept is None or (_whole(kept) and (kept >= 1 or kept == -1))
        self._need("truncate_prompt_tokens", fits, "None, -1, or a whole number of at least 1")

    def _need(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            raise UsageError(f"{name} must be {what}, not {shown(getattr(self, name))}")

    def _check_bans(self) -> None:
        """Raise UsageError for wrong values of the options that keep tokens from being chosen."""
        most = math.inf if self.max_tokens is None else self.max_tokens
        fits = _whole(self.min_tokens) and 0 <= self.min_tokens <= most
        self._need("min_tokens", fits, "a whole number of at least 0 and at most max_tokens")
        words = self.bad_words or ()
        listed = isinstance(words, Sequence) and not isinstance(words, str) and len(words) <= _MOST_WORDS
        texts = listed and all(isinstance(word, str) and 0 < len(word) <= _MOST_WORD for word in words)
        self._need("bad_words", texts, f"None or a list of at most {_MOST_WORDS} texts of 1 to {_MOST_WORD} characters")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise UsageError("allowed_token_ids is empty: give at least one token, or None for all")
        if self.structured_outputs is not None and self.bans:
            raise UsageError("min_tokens, allowed_token_ids and bad_words are not possible with structured_outputs")

    @property
    def bans(self) -> bool:
        """Whether options keep tokens from being chosen."""
        return bool(self.min_tokens or self.bad_words) or self.allowed_token_ids is not None

    def _check_tokens(self, name: str) -> None:
        """Raise UsageError unless a field is None or a list of token numbers; keeps it as a tuple of Python's."""
        given = getattr(self, name)
        if given is None:
            return
        listed = given.tolist() if hasattr(given, "tolist") else given
        few = isinstance(listed, Sequence) and not isinstance(listed, str | bytes) and len(listed) <= _MOST_TOKENS
        self._need(name, few, f"None or a list of at most {_MOST_TOKENS} token numbers")
        tokens = tuple(plain_number(token) for token in listed)
        if wrong := [token for token in tokens if not (_whole(token) and token >= 0)]:
            raise UsageError(f"{name} has {shown(wrong[0])}, which is no token number: give whole numbers")
        object.__setattr__(self, name, tokens)

    def _check_biases(self) -> None:
        """Raise UsageError for wrong biases; keeps them as a dictionary of Python's numbers."""
        if self.logit_bias is None:
            return
        few = isinstance(self.logit_bias, Mapping) and len(self.logit_bias) <= _MOST_BIASES
        self._need("logit_bias", few, f"None or at most {_MOST_BIASES} biases by token number")
        biases = {plain_number(token): plain_number(bias) for token, bias in self.logit_bias.items()}
        for token, bias in biases.items():
            if not (_whole(token) and token >= 0):
                raise UsageError(f"logit_bias has {shown(token)}, which is no token number: give whole numbers")
            if not (_real(bias) and abs(bias) <= _MOST_BIAS):
                limits = f"a number between {-_MOST_BIAS:g} and {_MOST_BIAS:g}"
                raise UsageError(f"logit_bias of token {token} must be {limits}, not {shown(bias)}")
        object.__setattr__(self, "logit_bias", biases)

    def _check_structure(self) -> None:
        """Raise UsageError for wrong structured outputs; keeps them in one form."""
        if self.structured_outputs is not None:
            object.__setattr__(self, "structured_outputs", structured(self.structured_outputs))
            if self.ignore_eos:
                raise UsageError("ignore_eos is not possible with structured_outputs: the output ends where they do")

    @property
    def structure(self) -> StructuredOutputsParams | None:
        """`structured_outputs` in one form."""
        return None if self.structured_outputs is None else structured(self.structured_outputs)

    @property
    def generated(self) -> SamplingParams:
        """The parameters of the samples that are generated: `best_of` of them, with what they are chosen by."""
        if self.best_of in (None, self.n):
            return self
        return replace(self, n=self.best_of, best_of=None, logprobs=self.logprobs or 0)

    def check_streamed(self) -> None:
        """Raise UsageError if outputs cannot be told as they grow: the best are known when all have ended."""
        if self.generated is not self:
            raise UsageError(f"best_of {self.best_of} above n cannot be streamed: the best are known at the end")

    @property
    def stops(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def stop_tokens(self) -> frozenset[int]:
        """`stop_token_ids` as a set."""
        return frozenset(self.stop_token_ids or ())

    @property
    def argmax_only(self) -> bool:
        """Whether only the argmax of the model's logits is needed."""
        return self.temperature == 0 and self.logprobs is None and self.unchanged

    @property
    def unchanged(self) -> bool:
        """Whether tokens are chosen from the model's logits as they are: no penalties, biases, bans and grammar."""
        plain = self.repetition_penalty == 1 and not self.counts and not (self.logit_bias or self.bans)
        return plain and self.structured_outputs is None

    def needs_logits(self, samples: bool) -> bool:
        """Whether a step must return the logits; `samples` tells that the executor can choose from them and report."""
        return (self.logprobs or 0) > MOST_REPORTED if samples else not self.argmax_only

    @property
    def counts(self) -> bool:
        """Whether the number of occurrences of generated tokens matters."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0


def plain_number(value: Any) -> Any:
    """A number of any type as Python's int or float; anything else, and what exceeds a float, unchanged."""
    if value is None or type(value) in (int, float, bool):  # all but few: the check below takes ten times as long
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    try:
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    except OverflowError:
        return value


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _real(value: object) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer that exceeds a float
        return False
