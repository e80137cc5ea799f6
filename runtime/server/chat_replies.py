"""Responses of /v1/chat/completions, whole or as a stream of events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qcompile.runtime.messages import MessageStream
from qcompile.runtime.outputs import CompletionOutput, RequestOutput
from qcompile.runtime.server.logprobs import TokenBytes, no_bytes, prompt_entries
from qcompile.runtime.server.replies import Reply, stop_reason
from qcompile.runtime.turn import PLAIN_TURN, Turn


class ChatReply(Reply):
    """A response of /v1/chat/completions. top: number of alternatives reported for each token. turn: how to read it."""

    prefix, whole_object, piece_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, model: str, samples: int, token_bytes: TokenBytes = no_bytes, top: int = 0, turn: Turn = PLAIN_TURN
    ) -> None:
        super().__init__(model, samples, token_bytes)
        self._top, self._turn = top, turn
        self.tells_prompt = False
        """Whether the response has the log probabilities of the prompt."""
        self._streams: dict[int, MessageStream] = {}  # by choice

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        reply = super().whole(outputs)
        return reply | {"prompt_logprobs": prompt_entries(outputs[0])} if self.tells_prompt else reply

    def choice(self, index: int, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        stream = MessageStream(self._turn)
        stream.push(sample.text, ended=True)
        return {"index": index, "message": stream.message} | self._rest(sample, 0, stream)

    def opening(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "finish_reason": None} for index in range(self._samples)]

    def piece(
        self, index: int, output: RequestOutput, sample: CompletionOutput, characters: int, tokens: int
    ) -> dict[str, Any] | None:
        stream = self._streams.setdefault(index, MessageStream(self._turn))
        delta = stream.push(sample.text[characters:], sample.finish_reason is not None)
        if not delta and sample.finish_reason is None and sample.logprobs is None:
            return None  # the parser waits for more
        return {"index": index, "delta": delta or {"content": ""}} | self._rest(sample, tokens, stream)

    def _rest(self, sample: CompletionOutput, first: int, stream: MessageStream) -> dict[str, Any]:
        called = stream.calls > 0 and sample.finish_reason == "stop" and not self._turn.named
        reason = "tool_calls" if called else sample.finish_reason
        logprobs = self._speller.chat(sample, first, self._top)
        return {"logprobs": logprobs, "finish_reason": reason} | stop_reason(sample)
