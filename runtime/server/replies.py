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
from qcompile.runtime.server.logprobs import TextOffsets, TokenBytes, TokenSpeller, no_bytes, prompt_entries

Finished = Callable[[RequestOutput], None]


class OutputStream(Protocol):
    """The outputs of a request's prompts as they grow. `cancel` ends the prompts that are unfinished."""

    @property
    def cancel(self) -> Callable[[], object]: ...
    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...


class Reply(ABC):
    """The response to one request with `samples` samples per prompt, by a model with the name `model`.

    token_bytes: the model's tokens, for log probabilities.
    """

    prefix: str
    whole_object: str
    piece_object: str

    def __init__(self, model: str, samples: int, token_bytes: TokenBytes = no_bytes) -> None:
        self._samples = samples
        self._speller = TokenSpeller(token_bytes)
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
    ) -> dict[str, Any] | None:
        """What was added to a choice after its first `characters` and `tokens`; None if nothing is certain yet."""

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
                piece = self.piece(index, output, sample, characters, tokens)
                if piece is not None:
                    yield piece

    def _numbered(self, output: RequestOutput) -> Iterator[tuple[int, CompletionOutput]]:
        for sample in output.outputs:
            yield output.request_id * self._samples + sample.index, sample

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> str:
        end = f', "usage": {api.encode(usage)}' if usage else ""
        return api.event(f'{self._begin}, "choices": {api.encode(choices)}{end}}}')


def stop_reason(sample: CompletionOutput) -> dict[str, Any]:
    """The field of a choice, in vLLM's format, that tells which stop text or token ended it; none without one."""
    return {} if sample.stop_reason is None else {"stop_reason": sample.stop_reason}


@dataclass(frozen=True)
class Echo:
    """The prompts of a request, for a response that starts with them.

    decode: gives the text of tokens. cut: whether prompts may have lost their starts.
    """

    prompts: Sequence[Prompt]
    decode: Callable[[Sequence[int]], str]
    cut: bool = False

    def text(self, output: RequestOutput) -> str:
        """The text of a prompt."""
        prompt = self.prompts[output.request_id]
        return prompt if isinstance(prompt, str) and not self.cut else self.decode(output.prompt_token_ids)


class CompletionReply(Reply):
    """A response of /v1/completions.

    echo: the prompts, if the response is to start with them. tells_prompt: whether it has their log probabilities apart
    from that.
    """

    prefix, whole_object, piece_object = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        model: str,
        samples: int,
        token_bytes: TokenBytes = no_bytes,
        echo: Echo | None = None,
        tells_prompt: bool = False,
    ) -> None:
        super().__init__(model, samples, token_bytes)
        self._echo, self._tells_prompt = echo, tells_prompt
        self._offsets: dict[int, TextOffsets] = {}  # of the tokens not sent yet, by choice

    def ready(self, output: RequestOutput) -> bool:
        return not self._echo or output.prompt_logprobs is not None or output.outputs[0].logprobs is None

    def choice(self, index: int, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        prompt = self._echo.text(output) if self._echo else ""
        choice = self._echoed(self._continued(index, sample, 0, 0, TextOffsets(len(prompt))), prompt, output)
        return choice | {"prompt_logprobs": prompt_entries(output)} if self._tells_prompt else choice

    def piece(
        self, index: int, output: RequestOutput, sample: CompletionOutput, characters: int, tokens: int
    ) -> dict[str, Any]:
        if index in self._offsets:
            return self._continued(index, sample, characters, tokens, self._offsets[index])
        prompt = self._echo.text(output) if self._echo else ""
        offsets = self._offsets[index] = TextOffsets(len(prompt))
        return self._echoed(self._continued(index, sample, characters, tokens, offsets), prompt, output)

    def _continued(
        self, index: int, sample: CompletionOutput, characters: int, tokens: int, offsets: TextOffsets
    ) -> dict[str, Any]:
        """A choice after its first `characters` and `tokens`.

        Offsets are those of the tokens' own characters: the text may lag behind them, as the start of a possible stop
        text and incomplete characters are held back.
        """
        columns = None
        if sample.logprobs is not None:
            columns = self._speller.completion(sample.token_ids[tokens:], sample.logprobs[tokens:], offsets)
        text = sample.text[characters:]
        end = {"finish_reason": sample.finish_reason} | stop_reason(sample)
        return {"index": index, "text": text, "logprobs": columns} | end

    def _echoed(self, choice: dict[str, Any], prompt: str, output: RequestOutput) -> dict[str, Any]:
        """A choice with the prompt in front of it, if the response is to start with it."""
        if self._echo is None:
            return choice
        choice["text"] = prompt + choice["text"]
        if choice["logprobs"] is not None:
            columns = self._speller.prompt(prompt, self._echo.decode(output.prompt_token_ids[:1]), output)
            choice["logprobs"] = {name: columns[name] + rest for name, rest in choice["logprobs"].items()}
        return choice
