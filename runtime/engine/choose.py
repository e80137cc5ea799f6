"""Chooses tokens from logits on the host, for requests and devices for which the executor cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from qcompile.errors import OverflowedError
from qcompile.runtime.request import Request
from qcompile.runtime.sampling import accept
from qcompile.runtime.sampling.arrays import FloatArray
from qcompile.runtime.sampling.logprobs import Logprob, logprobs_of

NO_TOKEN = -1
"""Takes the place of a token with logits that are not finite, also in the results of executors."""

Spell = Callable[[int], str]
"""Gives a token's text."""


class ChosenTokens(NamedTuple):
    """Tokens that were chosen from logits, the last of them possibly NO_TOKEN.

    logprobs: the log probabilities of the tokens before NO_TOKEN; empty if the request does not report them.
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]


class TokenChooser:
    """Chooses the tokens of one request after one step. spell: None if the artifact has no tokenizer."""

    def __init__(self, request: Request, spell: Spell | None) -> None:
        self._request, self._spell = request, spell
        self._logprobs: list[dict[int, Logprob]] = []

    def choose(self, draft: list[int], logits: FloatArray) -> ChosenTokens:
        """The drafts that the target would have drawn itself, and one token more. logits: [drafts + 1, vocab]."""
        tokens = accept.drawn(draft, lambda place: self._draw(logits[place]))
        return ChosenTokens(tokens, self._logprobs)

    def choose_by_rejection(self, draft: list[int], logits: FloatArray) -> ChosenTokens:
        """The drafts that rejection sampling accepts, and one token more. logits: [drafts + 1, vocab]."""
        sampler, kept = self._request.sampler, 0

        def target(place: int) -> accept.Distribution:
            nonlocal kept
            if place:
                sampler.note(self._report(logits[place - 1], draft[place - 1]))
                kept = place
            return sampler.distribution(logits[place])

        try:
            tokens = accept.rejection(draft, self._request.drafts.proposed, target, sampler.fresh)
        except OverflowedError:
            return ChosenTokens([*draft[:kept], NO_TOKEN], self._logprobs)
        sampler.note(self._report(logits[len(tokens) - 1], tokens[-1]))
        return ChosenTokens(tokens, self._logprobs)

    def _draw(self, logits: FloatArray) -> int:
        """Draw the next token from its logits [vocab]; NO_TOKEN where they are not finite."""
        try:
            return self._report(logits, self._request.sampler.draw(logits))
        except OverflowedError:
            return NO_TOKEN

    def _report(self, logits: FloatArray, token: int) -> int:
        """Keep the log probability of a token if the request reports it, and return the token. logits: [vocab]."""
        wanted = self._request.params.logprobs
        if wanted is not None:
            self._logprobs.append(logprobs_of(logits, token, wanted, self._spell))
        return token
