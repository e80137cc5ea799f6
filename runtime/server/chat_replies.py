"""Responses of /v1/chat/completions, whole or as a stream of events."""

from __future__ import annotations

from typing import Any

from qcompile.runtime.outputs import CompletionOutput, RequestOutput
from qcompile.runtime.server.logprobs import TokenBytes, no_bytes
from qcompile.runtime.server.replies import Reply


class ChatReply(Reply):
    """A response of /v1/chat/completions. top: number of alternatives reported for each token."""

    prefix, whole_object, piece_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, samples: int, token_bytes: TokenBytes = no_bytes, top: int = 0) -> None:
        super().__init__(model, samples, token_bytes)
        self._top = top

    def choice(self, index: int, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        message = {"role": "assistant", "content": sample.text}
        return {"index": index, "message": message} | self._rest(sample, 0)

    def opening(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "finish_reason": None} for index in range(self._samples)]

    def piece(
        self, index: int, output: RequestOutput, sample: CompletionOutput, characters: int, tokens: int
    ) -> dict[str, Any]:
        return {"index": index, "delta": {"content": sample.text[characters:]}} | self._rest(sample, tokens)

    def _rest(self, sample: CompletionOutput, first: int) -> dict[str, Any]:
        return {"logprobs": self._speller.chat(sample, first, self._top), "finish_reason": sample.finish_reason}
