"""The text of a request's new tokens, which ends where one of its stop texts appears.

Tokens of requests without stop texts are decoded when somebody asks for their text, several at a time: that is several
times as fast as to decode them one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

from qcompile.runtime.detokenizer import Detokenizer
from qcompile.runtime.engine.held_text import HeldText
from qcompile.runtime.request import Request

_MOST_UNREAD = 32
"""Most tokens that wait to be decoded, so that it takes microseconds when their text is asked for."""


def extend_text(request: Request, tokens: Sequence[int], early: int = 0) -> int:
    """Add new tokens' text to the output (`read_text` tells when). Returns how many of them the output keeps.

    In the text of the first `early` tokens, stop texts do not count. A stop text in later text ends the output: the
    tokens behind it are not kept, and the output's stop_reason is set. Text that may turn out to be the start of a stop
    text is held back.
    """
    stream, output = request.stream, request.output
    if stream.detokenizer is None:
        return len(tokens)
    if not request.params.stops:
        stream.unread += tokens
        if len(stream.unread) >= _MOST_UNREAD:
            read_text(request)
        return len(tokens)
    early = max(0, min(early, len(tokens)))
    if early:
        output.text += stream.detokenizer.push(tokens[:early])
    if early < len(tokens):
        return early + _search(request, stream.detokenizer, tokens[early:])
    return len(tokens)


def read_text(request: Request) -> None:
    """Add the text of tokens that were not decoded yet to the output."""
    stream = request.stream
    if stream.unread and stream.detokenizer is not None:
        request.output.text += stream.detokenizer.push(stream.unread)
        stream.unread = []


def _search(request: Request, detokenizer: Detokenizer, tokens: Sequence[int]) -> int:
    """`extend_text` for tokens after the early ones: stop texts in their text count."""
    stream, output, stops = request.stream, request.output, request.params.stops
    before, held = detokenizer.clone(), stream.held
    text = held + detokenizer.push(tokens)
    if text.first_stop(stops) or not stream.marks.keys().isdisjoint(tokens):
        # Decode again token by token: the request ends with the token that completes the stop text.
        stream.detokenizer, text = before, held
        for count, token in enumerate(tokens, start=1):
            text += before.push([token])
            if token in stream.marks:
                text = text.marked(stream.marks[token])
            if _stopped(request, text):
                return count
    keep = text.possible_stop(stops)
    output.text += text.shown(keep)
    stream.held = text.rest(keep)
    return len(tokens)


def end_text(request: Request) -> None:
    """Add the text that was held back. Sets the output's stop_reason if a stop text is in it."""
    read_text(request)
    stream, output = request.stream, request.output
    if stream.detokenizer is None or output.stop_reason is not None:
        return
    text = stream.held + stream.detokenizer.push([], last=True)
    if not _stopped(request, text):
        output.text += text.shown(len(text.text))


def _stopped(request: Request, text: HeldText) -> bool:
    """Whether a stop text is in the text held back; if so, the output ends there."""
    stop = text.first_stop(request.params.stops)
    if not stop:
        return False
    start, end, request.output.stop_reason = stop
    request.output.text += text.shown(end if request.params.include_stop_str_in_output else start)
    request.stream.held = HeldText()
    return True
