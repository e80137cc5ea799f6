"""Where the tokens of a reply stand in its text: tells the log probabilities of a part of the reply."""

from __future__ import annotations

import codecs
from typing import Any, NamedTuple

from qcompile.runtime.outputs import CompletionOutput
from qcompile.runtime.server.logprobs import TokenSpeller

_SKIPPED = 4
"""Most characters that are passed over in search of a token: those of bytes that are no text."""


class _Place(NamedTuple):
    """The characters of a token: from `start` to `end`."""

    start: int
    end: int
    number: int
    """Which token of the reply it is."""


class TokenPlaces:
    """The places of one reply's tokens. top: number of alternatives that are told of each.

    A token that the text does not show, as a special one, has none.
    """

    def __init__(self, speller: TokenSpeller, top: int) -> None:
        self._speller, self._top = speller, top
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._places: list[_Place] = []
        self._held = ""  # characters of the newest decoded token, which the text does not have yet
        self._decoded = self._end = self._told = self._searched = 0
        self._sample: CompletionOutput | None = None

    def read(self, sample: CompletionOutput) -> list[int]:
        """Take a reply that has grown. Returns where the tokens end that were placed now."""
        self._sample, first = sample, len(self._places)
        assert sample.logprobs is not None
        while self._place(sample):
            pass
        return [min(place.end, len(sample.text)) for place in self._places[first:]]

    def _place(self, sample: CompletionOutput) -> bool:
        """Place one more token. False if none is left, or its text has not come."""
        number = len(self._places)
        if number == len(sample.token_ids):
            return False
        if self._decoded == number:
            assert sample.logprobs is not None
            token = sample.token_ids[number]
            raw = self._speller.counted(token, sample.logprobs[number][token].decoded_token or "")
            self._held, self._decoded = self._decoder.decode(raw), number + 1
        if sample.finish_reason is None and self._end + len(self._held) > len(sample.text):
            return False
        start = self._end
        for shown in (self._held, self._held.lstrip(" ")):  # some tokenizers drop the first space of a text
            at = sample.text.find(shown, start, start + len(shown) + _SKIPPED)
            if at >= 0 and shown:
                start, self._end = at, at + len(shown)
                break
        begun = bool(self._decoder.getstate()[0])  # a character that the next token completes
        self._places.append(_Place(start, self._end + begun, number))
        return True

    def logprobs(self, added: str, read: int) -> list[dict[str, Any]]:
        """Log probabilities of the tokens of `added`, a piece of the reply within its first `read` characters.

        No token is told twice.
        """
        assert self._sample is not None and self._sample.logprobs is not None
        start = self._sample.text.rfind(added, self._searched, read)
        if start < 0 or not added:
            return []
        end = self._searched = start + len(added)
        inside = [
            place.number
            for place in self._places[self._told :]
            if place.start < place.end and place.start < end and place.end > start
        ]
        if inside:
            self._told = inside[-1] + 1
        tokens, reported = self._sample.token_ids, self._sample.logprobs
        return [_in_bytes(self._speller.chat_token(tokens[number], reported[number], self._top)) for number in inside]


def _in_bytes(told: dict[str, Any]) -> dict[str, Any]:
    """A token as chats tell it with its bytes as a list, as responses have it: empty where they are unknown."""
    told["bytes"] = told["bytes"] or []
    for other in told["top_logprobs"]:
        other["bytes"] = other["bytes"] or []
    return told
