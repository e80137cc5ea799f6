"""Responses of /v1/chat/completions, whole or as a stream of events."""

from __future__ import annotations

import secrets
import string
from typing import Any

from qcompile.runtime.dialogue import Turn
from qcompile.runtime.outputs import CompletionOutput, RequestOutput
from qcompile.runtime.parsers.events import ArgumentsPiece, CallStart, Event, ReasoningPiece, TextPiece
from qcompile.runtime.parsers.reply import ParsedReply, ReplyParser
from qcompile.runtime.server.logprobs import TokenBytes, no_bytes
from qcompile.runtime.server.replies import Reply

_ID_LETTERS = string.ascii_letters + string.digits
_PLAIN = Turn("", ReplyParser)


class ChatReply(Reply):
    """A response of /v1/chat/completions. top: number of alternatives reported for each token. turn: how to read it."""

    prefix, whole_object, piece_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, model: str, samples: int, token_bytes: TokenBytes = no_bytes, top: int = 0, turn: Turn = _PLAIN
    ) -> None:
        super().__init__(model, samples, token_bytes)
        self._top, self._turn = top, turn
        self._streams: dict[int, _Deltas] = {}  # by choice

    def choice(self, index: int, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        found = self._turn.parser().whole(sample.text)
        message = message_of(found, self._turn)
        return {"index": index, "message": message} | self._rest(sample, 0, bool(found.calls))

    def opening(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "finish_reason": None} for index in range(self._samples)]

    def piece(
        self, index: int, output: RequestOutput, sample: CompletionOutput, characters: int, tokens: int
    ) -> dict[str, Any] | None:
        stream = self._streams.setdefault(index, _Deltas(self._turn))
        delta = stream.push(sample.text[characters:], sample.finish_reason is not None)
        if not delta and sample.finish_reason is None and sample.logprobs is None:
            return None  # the parser waits for more
        rest = self._rest(sample, tokens, stream.calls > 0)
        return {"index": index, "delta": delta or {"content": ""}} | rest

    def _rest(self, sample: CompletionOutput, first: int, calls: bool) -> dict[str, Any]:
        reason = "tool_calls" if calls and sample.finish_reason == "stop" else sample.finish_reason
        return {"logprobs": self._speller.chat(sample, first, self._top), "finish_reason": reason}


class _Deltas:
    """One choice of a stream: what each piece of its text adds to its message."""

    def __init__(self, turn: Turn) -> None:
        self._turn, self._parser = turn, turn.parser()
        self.calls = 0

    def push(self, text: str, ended: bool) -> dict[str, Any]:
        """What further text adds, in OpenAI's form; empty if nothing is certain yet."""
        events = self._parser.push(text)
        delta: dict[str, Any] = {}
        for event in events + (self._parser.end() if ended else []):
            self._add(delta, event)
        return delta

    def _add(self, delta: dict[str, Any], event: Event) -> None:
        if isinstance(event, TextPiece):
            delta["content"] = delta.get("content", "") + event.text
        elif isinstance(event, ReasoningPiece):
            delta["reasoning_content"] = delta.get("reasoning_content", "") + event.text
        elif isinstance(event, CallStart):
            call = {"index": self.calls} | _call(event.name, "", self._turn)
            delta.setdefault("tool_calls", []).append(call)
            self.calls += 1
        elif isinstance(event, ArgumentsPiece):
            calls = delta.setdefault("tool_calls", [])
            if not calls or calls[-1]["index"] != self.calls - 1:
                calls.append({"index": self.calls - 1, "function": {"arguments": ""}})
            calls[-1]["function"]["arguments"] += event.text


def message_of(found: ParsedReply, turn: Turn) -> dict[str, Any]:
    """A reply as a message in OpenAI's form."""
    content = found.content if found.content is not None or found.calls else ""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if found.reasoning is not None:
        message["reasoning_content"] = found.reasoning
    if found.calls:
        message["tool_calls"] = [_call(call.name, call.arguments, turn) for call in found.calls]
    return message


def _call(name: str, arguments: str, turn: Turn) -> dict[str, Any]:
    """A call with an id of its own. Some templates refuse ids of another length than theirs."""
    digits = "".join(secrets.choice(_ID_LETTERS) for _ in range(turn.id_characters or 24))
    identity = digits if turn.id_characters else f"call_{digits}"
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
