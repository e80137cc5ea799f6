"""Responses of the HTTP server: outputs as OpenAI's objects, whole or as a stream of events."""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from qcompile.errors import QCompileError
from qcompile.runtime.arguments import Prompt
from qcompile.runtime.outputs import CompletionOutput, RequestOutput
from qcompile.runtime.server import api

Finished = Callable[[RequestOutput], None]


class OutputStream(Protocol):
    """The outputs of a request's prompts as they grow. `cancel` ends the prompts that are unfinished."""

    @property
    def cancel(self) -> Callable[[], object]: ...
    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...


class Reply(ABC):
    """The response to one request with `samples` samples per prompt, by a model with the name `model`."""

    prefix: str
    whole_object: str
    piece_object: str

    def __init__(self, model: str, samples: int) -> None:
        self._samples = samples
        self._header = {
            "id": f"{self.prefix}-{random.getrandbits(128):032x}",
            "created": int(time.time()),
            "model": model,
        }
        self._begin = api.encode(self._header | {"object": self.piece_object})[:-1]  # of each event, without its "}"
        self._sent: dict[int, tuple[int, int]] = {}  # numbers of characters (-1: all) and tokens sent, by choice

    @abstractmethod
    def choice(self, index: int, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        """A whole choice, which is a sample of `output`."""

    @abstractmethod
    def piece(
        self, index: int, output: RequestOutput, sample: CompletionOutput, characters: int, tokens: int
    ) -> dict[str, Any]:
        """What was added to a choice after its first `characters` and `tokens`."""

    def ready(self, output: RequestOutput) -> bool:
        """Whether the output has all that the first piece of a stream needs."""
        return True

    def opening(self) -> list[dict[str, Any]]:
        """Choices to send before any text."""
        return []

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The whole response. outputs: one for each prompt."""
        ordered = sorted(outputs, key=lambda output: output.request_id)
        choices = [self.choice(index, output, sample) for output in ordered for index, sample in self._numbered(output)]
        return self._header | {"object": self.whole_object, "choices": choices, "usage": api.usage(ordered)}

    async def events(self, answer: OutputStream, finished: Finished, counts: api.StreamOptions) -> AsyncIterator[str]:
        """Server-sent events as `answer` grows. Ending the iteration early cancels the answer.

        counts: which events have the token counts.
        """
        newest: dict[int, RequestOutput] = {}
        try:
            for opening in self.opening():
                yield self._event([opening])
            async for output in answer:
                newest[output.request_id] = output
                if output.finished:
                    finished(output)
                usage = api.usage(newest.values()) if counts.continuous_usage_stats else None
                for piece in self._pieces(output):
                    yield self._event([piece], usage)
            if counts.include_usage:
                yield self._event([], api.usage(newest.values()))
            yield api.event("[DONE]")
        except QCompileError as error:  # the status line was sent already
            yield api.event(api.failure(str(error), "server_error"))
        finally:
            answer.cancel()

    def _pieces(self, output: RequestOutput) -> Iterator[dict[str, Any]]:
        for index, sample in self._numbered(output) if self.ready(output) else ():
            characters, tokens = self._sent.get(index, (0, 0))
            if characters < 0 or (tokens == len(sample.token_ids) and sample.finish_reason is None):
                continue  # this sample has ended, or only another one of the prompt has grown
            end = len(sample.text) if sample.finish_reason is None else -1
            self._sent[index] = end, len(sample.token_ids)
            if sample.finish_reason is not None or len(sample.text) > characters or sample.logprobs:
                yield self.piece(index, output, sample, characters, tokens)

    def _numbered(self, output: RequestOutput) -> Iterator[tuple[int, CompletionOutput]]:
        for sample in output.outputs:
            yield output.request_id * self._samples + sample.index, sample

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> str:
        end = f', "usage": {api.encode(usage)}' if usage else ""
        return api.event(f'{self._begin}, "choices": {api.encode(choices)}{end}}}')


@dataclass(frozen=True)
class Echo:
    """The prompts of a request, for a response that starts with them. decode: gives the text of tokens."""

    prompts: Sequence[Prompt]
    decode: Callable[[Sequence[int]], str]

    def text(self, output: RequestOutput) -> str:
        """The text of a prompt."""
        prompt = self.prompts[output.request_id]
        return prompt if isinstance(prompt, str) else self.decode(output.prompt_token_ids)


class CompletionReply(Reply):
    """A response of /v1/completions. echo: the prompts, if the response is to start with them."""

    prefix, whole_object, piece_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, samples: int, echo: Echo | None = None) -> None:
        super().__init__(model, samples)
        self._echo = echo
        self._offsets: dict[int, int] = {}  # text offset of the next token, by choice

    def ready(self, output: RequestOutput) -> bool:
        return not self._echo or output.prompt_logprobs is not None or output.outputs[0].logprobs is None

    def choice(self, index: int, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        return self._from(index, output, sample, 0, 0, None)[0]

    def piece(
        self, index: int, output: RequestOutput, sample: CompletionOutput, characters: int, tokens: int
    ) -> dict[str, Any]:
        place = self._offsets.get(index)
        choice, self._offsets[index] = self._from(index, output, sample, characters, tokens, place)
        return choice

    def _from(
        self, index: int, output: RequestOutput, sample: CompletionOutput, characters: int, tokens: int, at: int | None
    ) -> tuple[dict[str, Any], int]:
        """A choice after its first `characters` and `tokens`, and the offset of the next token.

        at: the offset of the first token here; None at the start of the choice.
        """
        if at is not None or not self._echo:
            return api.completion_choice(index, sample, characters, tokens, at or 0)
        prompt = self._echo.text(output)
        choice, end = api.completion_choice(index, sample, characters, tokens, len(prompt))
        choice["text"] = prompt + choice["text"]
        if sample.logprobs is not None:
            columns = api.prompt_columns(prompt, self._echo.decode(output.prompt_token_ids[:1]), output)
            choice["logprobs"] = {name: columns[name] + rest for name, rest in choice["logprobs"].items()}
        return choice, end
