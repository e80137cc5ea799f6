"""Responses of /v1/messages, whole or as a stream of events."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any

from pydantic_core import from_json

from qcompile.errors import QCompileError
from qcompile.runtime.outputs import RequestOutput
from qcompile.runtime.server.api import named_event
from qcompile.runtime.server.blocks import BlockReader, Change, ReplyBlock
from qcompile.runtime.server.errors import messages_failure
from qcompile.runtime.server.replies import Finished, OutputStream
from qcompile.runtime.turn import Turn

Json = dict[str, Any]


class MessageReply:
    """The response to a request. turn: how to read it."""

    def __init__(self, model: str, turn: Turn) -> None:
        self._reader = BlockReader(turn, "toolu_")
        id = f"msg_{secrets.token_hex(12)}"
        self._header: Json = {"id": id, "type": "message", "role": "assistant", "model": model}

    def whole(self, output: RequestOutput) -> Json:
        """The response that has this output."""
        for _ in self._reader.read(output):
            pass
        content = [content_of(block) for block in self._reader.blocks]
        return self._header | {"content": content, "usage": _usage(output)} | self._stop(output)

    async def events(self, answer: OutputStream, finished: Finished) -> AsyncIterator[str]:
        """Server-sent events as `answer` grows. Ending the iteration early cancels the answer.

        The first event comes with the first token, since it tells how much of the prompt was cached.
        """
        begun = False
        try:
            async for output in answer:
                if not begun:
                    yield self._start(output)
                    begun = True
                for change in self._reader.read(output):
                    for event in _events_of(change):
                        yield event
                if output.finished:
                    finished(output)
                    yield named_event({"type": "message_delta", "delta": self._stop(output), "usage": _usage(output)})
            yield named_event({"type": "message_stop"})
        except QCompileError as error:  # the status line was sent already
            yield named_event(messages_failure(str(error)))
        finally:
            answer.cancel()

    def _start(self, output: RequestOutput) -> str:
        nothing: Json = {"content": [], "stop_reason": None, "stop_sequence": None}
        usage = _usage(output) | {"output_tokens": 0}
        return named_event({"type": "message_start", "message": self._header | nothing | {"usage": usage}})

    def _stop(self, output: RequestOutput) -> Json:
        """Why a finished reply ended."""
        (sample,) = output.outputs
        if isinstance(sample.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": sample.stop_reason}
        called = "tool_use" if self._reader.calls else "end_turn"
        return {"stop_reason": "max_tokens" if self._reader.cut else called, "stop_sequence": None}


def _usage(output: RequestOutput) -> Json:
    """The token counts: those of the prompt without those taken from the cache, and these."""
    cached = output.metrics.cached_tokens
    return {
        "input_tokens": len(output.prompt_token_ids) - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": output.generated_tokens,
    }


def content_of(block: ReplyBlock) -> Json:
    """A whole block."""
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _input(block.text)}


def _input(arguments: str) -> Json:
    """The arguments of a call. Incomplete ones are given as far as they are, those with numbers out of range not."""
    try:
        value = from_json(arguments, allow_partial="trailing-strings")
        json.dumps(value, allow_nan=False)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _events_of(change: Change) -> Iterator[str]:
    """The event that tells of a change."""
    place = {"index": change.index}
    if change.what == "begin":
        block = content_of(ReplyBlock(change.block.kind, "", change.block.name, change.block.call_id))
        yield named_event({"type": "content_block_start", **place, "content_block": block})
    elif change.what == "end":
        yield named_event({"type": "content_block_stop", **place})
    else:
        yield named_event({"type": "content_block_delta", **place, "delta": _delta(change)})


def _delta(change: Change) -> Json:
    if change.block.kind == "call":
        return {"type": "input_json_delta", "partial_json": change.added}
    if change.block.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": change.added}
    return {"type": "text_delta", "text": change.added}
