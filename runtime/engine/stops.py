"""The text of a request's new tokens, which ends where one of its stop texts appears."""

from __future__ import annotations

from collections.abc import Sequence

from qcompile.runtime.detokenizer import Detokenizer
from qcompile.runtime.engine.held_text import HeldText
from qcompile.runtime.request import Request


def extend_text(request: Request, tokens: Sequence[int], early: int = 0) -> int:
    """Add the text of new tokens to the output. Returns how many of the tokens the output keeps.

    In the text of the first `early` tokens, stop texts do not count.

    If a stop text ends the output, that may be fewer than all, and the output's stop_reason is set. Text that may turn
    out to be the start of a stop text is held back.
    """
    stream, output = request.stream, request.output
    if stream.detokenizer is None:
        return len(tokens)
    stops = request.params.stops
    early = max(0, min(early, len(tokens))) if stops else len(tokens)
    if early:
        output.text += stream.detokenizer.push(tokens[:early])
    if early < len(tokens):
        return early + _search(request, stream.detokenizer, tokens[early:])
    return len(tokens)


def _search(request: Request, detokenizer: Detokenizer, tokens: Sequence[int]) -> int:
    """`extend_text` for tokens in whose text stop texts count."""
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
