"""The text of a request's new tokens, which ends where one of its stop texts appears."""

from __future__ import annotations

from collections.abc import Sequence

from qcompile.runtime.request import Request


def extend_text(request: Request, tokens: Sequence[int]) -> int:
    """Add the text of new tokens to the output. Returns how many of the tokens the output keeps.

    If a stop text ends the output, that may be fewer than all, and the output's stop_reason is set. Text that may turn
    out to be the start of a stop text is held back.
    """
    stream, output = request.stream, request.output
    if stream.detokenizer is None:
        return len(tokens)
    stops = request.params.stops
    if not stops:
        output.text += stream.detokenizer.push(tokens)
        return len(tokens)
    before, held = stream.detokenizer.clone(), stream.held_text
    text = held + stream.detokenizer.push(tokens)
    if _first_stop(text, stops):
        # Decode again token by token: the request ends with the token that completes the stop text.
        stream.detokenizer, text = before, held
        for count, token in enumerate(tokens, start=1):
            text += before.push([token])
            if stop := _first_stop(text, stops):
                at, output.stop_reason = stop
                output.text += text[:at]
                stream.held_text = ""
                return count
    keep = _possible_start(text, stops)
    output.text += text[: len(text) - keep]
    stream.held_text = text[len(text) - keep :]
    return len(tokens)


def end_text(request: Request) -> None:
    """Add the text that was held back. Sets the output's stop_reason if a stop text is in it."""
    stream, output = request.stream, request.output
    if stream.detokenizer is None or output.stop_reason is not None:
        return
    text = stream.held_text + stream.detokenizer.push([], last=True)
    if stop := _first_stop(text, request.params.stops):
        at, output.stop_reason = stop
        text = text[:at]
    output.text += text


def _first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Index and text of the earliest stop text; None without one."""
    places = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    return min(places, default=None)


def _possible_start(text: str, stops: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that is a prefix of a stop text."""
    for size in range(min(len(text), max(map(len, stops)) - 1), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0
