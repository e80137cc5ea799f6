"""Responses of the HTTP server: outputs as OpenAI's objects, whole or as a stream of events."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from qcompile.errors import QCompileError
from qcompile.runtime import api
from qcompile.runtime.outputs import CompletionOutput, RequestOutput
from qcompile.runtime.service import Answer

Finished = Callable[[RequestOutput], None]


class Reply(ABC):
    """The response to one request with `samples` samples per prompt, by a model called `model`."""

    prefix: str
    whole_object: str
    piece_object: str

    def __init__(self, model: str, samples: int) -> None:
        self._samples = samples
        self._header = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._sent: dict[int, tuple[int, int]] = {}  # numbers of characters (-1: all) and tokens sent, by choice

    @abstractmethod
    def choice(self, index: int, sample: CompletionOutput) -> dict[str, Any]:
        """A whole choice."""

    @abstractmethod
    def piece(self, index: int, sample: CompletionOutput, characters: int, tokens: int) -> dict[str, Any]:
        """What was added to a choice after its first `characters` and `tokens`."""

    def opening(self) -> list[dict[str, Any]]:
        """Choices to send before any text."""
        return []

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The whole response. outputs: one for each prompt."""
        ordered = sorted(outputs, key=lambda output: output.request_id)
        choices = [self.choice(index, sample) for output in ordered for index, sample in self._numbered(output)]
        return self._header | {"object": self.whole_object, "choices": choices, "usage": api.usage(ordered)}

    async def events(self, answer: Answer, finished: Finished, wants_usage: bool) -> AsyncIterator[str]:
        """Server-sent events as `answer` grows. Ending the iteration early cancels the answer."""
        ended: list[RequestOutput] = []
        try:
            for opening in self.opening():
                yield self._event([opening])
            async for output in answer:
                if output.finished:
                    finished(output)
                    ended.append(output)
                for piece in self._pieces(output):
                    yield self._event([piece])
            if wants_usage:
                yield self._event([], usage=api.usage(ended))
            yield api.event("[DONE]")
        except QCompileError as error:  # the status line was sent already
            yield api.event(api.failure(str(error), "server_error"))
        finally:
            answer.cancel()

    def _pieces(self, output: RequestOutput) -> Iterator[dict[str, Any]]:
        for index, sample in self._numbered(output):
            characters, tokens = self._sent.get(index, (0, 0))
            if tokens == len(sample.token_ids) or characters < 0:
                continue  # this sample has ended, or only another one of the prompt has grown
            end = len(sample.text) if sample.finish_reason is None else -1
            self._sent[index] = end, len(sample.token_ids)
            if sample.finish_reason is not None or len(sample.text) > characters or sample.logprobs:
                yield self.piece(index, sample, characters, tokens)

    def _numbered(self, output: RequestOutput) -> Iterator[tuple[int, CompletionOutput]]:
        for sample in output.outputs:
            yield output.request_id * self._samples + sample.index, sample

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        return api.event(self._header | {"object": self.piece_object, "choices": choices} | more)


class CompletionReply(Reply):
    """A response of /v1/completions."""

    prefix, whole_object, piece_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, samples: int) -> None:
        super().__init__(model, samples)
        self._offsets: dict[int, int] = {}  # text offset of the next token, by choice

    def choice(self, index: int, sample: CompletionOutput) -> dict[str, Any]:
        return api.completion_choice(index, sample, 0, 0, 0)[0]

    def piece(self, index: int, sample: CompletionOutput, characters: int, tokens: int) -> dict[str, Any]:
        offset = self._offsets.get(index, 0)
        found, self._offsets[index] = api.completion_choice(index, sample, characters, tokens, offset)
        return found


class ChatReply(Reply):
    """A response of /v1/chat/completions. top: number of alternatives reported for each token."""

    prefix, whole_object, piece_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, samples: int, top: int) -> None:
        super().__init__(model, samples)
        self._top = top

    def choice(self, index: int, sample: CompletionOutput) -> dict[str, Any]:
        message = {"role": "assistant", "content": sample.text}
        return {"index": index, "message": message} | self._rest(sample, 0)

    def opening(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "finish_reason": None} for index in range(self._samples)]

    def piece(self, index: int, sample: CompletionOutput, characters: int, tokens: int) -> dict[str, Any]:
        return {"index": index, "delta": {"content": sample.text[characters:]}} | self._rest(sample, tokens)

    def _rest(self, sample: CompletionOutput, first: int) -> dict[str, Any]:
        return {"logprobs": api.chat_logprobs(sample, first, self._top), "finish_reason": sample.finish_reason}
