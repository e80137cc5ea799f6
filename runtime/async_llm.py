"""The Python interface of a loaded model for asyncio: the requests of all tasks are computed in the same steps."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from qcompile.errors import UsageError
from qcompile.runtime.arguments import Params, Prompt, Prompts, as_list, params_for
from qcompile.runtime.chats import ChatOptions, Conversation, MessageReader, conversations_of
from qcompile.runtime.embeddings import EmbeddingOptions, Pooling
from qcompile.runtime.llm import LLM
from qcompile.runtime.load import load
from qcompile.runtime.outputs import RequestOutput
from qcompile.runtime.sampling.arrays import FloatArray
from qcompile.runtime.sampling.masks import Grammar
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.server.service import Service
from qcompile.runtime.turn import Turn

_CHAT_OPTIONS = frozenset(field.name for field in fields(ChatOptions))


class AsyncLLM:
    """A model for asyncio. Use it as an asynchronous context manager, or call `aclose`, to end its thread.

        async with AsyncLLM("out/pycode", threads=2) as llm:
            async for output in llm.generate("def main(", max_tokens=64):
                print(output.outputs[0].new_text, end="")
            first, second = await asyncio.gather(llm.generate("import "), llm.generate("class "))

    A thread of its own steps the engine, so that the event loop continues. A request joins and leaves the steps at any
    time, and its output is that of `LLM.generate`, whatever runs beside it.
    """

    def __init__(self, model: str | Path | LLM, *, max_waiting: int | None = None, **options: Any) -> None:
        """Take a loaded model, or the path of an artifact, which is loaded here with the options of `load`.

        A model that was given stays open, and refuses all other use until this object is closed. max_waiting: most
        samples that may wait for others to end; default any number. Raises what `load` does, and UsageError if the
        model has unfinished requests.
        """
        if not (max_waiting is None or (isinstance(max_waiting, int) and max_waiting >= 0)):
            raise UsageError(f"max_waiting must be a whole number of at least 0, or None, not {max_waiting!r}")
        if isinstance(model, LLM) and options:
            raise UsageError(f"{next(iter(options))} is an option of loading: this model is loaded already")
        self._given = isinstance(model, LLM)
        self.llm = model if isinstance(model, LLM) else load(model, **options)
        """The model. While it is used here, only what runs no steps is possible, such as `encode` and `decode`."""
        most = sys.maxsize // 2 if max_waiting is None else max_waiting
        self._service = Service(self.llm, most, closed="the model is closed: load it again")

    def generate(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> AsyncOutputs:
        """Continue a prompt, a text or token numbers, with SamplingParams or their fields as keywords.

        Iterate over the result for the RequestOutput whenever it has grown, or await it for the finished one. The
        request is checked, and starts, when that begins. It is cancelled with the task that waits for it. Raises
        UsageError as `LLM.generate` does, and BusyError if too many samples wait.
        """
        return AsyncOutputs(lambda partial: self._run(lambda: self._prompted(prompt, params, options), partial))

    def chat(self, messages: Conversation, params: SamplingParams | None = None, **options: Any) -> AsyncOutputs:
        """Reply to a conversation, as `generate`; `outputs[i].message` is the reply.

        options: `tools` and the other keywords of `LLM.chat`, and fields of SamplingParams.
        """
        return AsyncOutputs(lambda partial: self._run(lambda: self._conversed(messages, params, options), partial))

    async def embed(
        self,
        texts: Prompts,
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        dimensions: int | None = None,
        lora: str | None = None,
    ) -> FloatArray:
        """Embeddings of one text or several, float32 [texts, dimensions], as `LLM.embed` gives them.

        Other requests run between two texts.
        """
        how = EmbeddingOptions(pooling, normalize, dimensions, lora)
        alone = SamplingParams(max_tokens=0, prompt_logprobs=0)
        listed, engine = as_list(texts), self.llm.engine
        tokens = await asyncio.to_thread(lambda: [self.llm.encode(text, params=alone) for text in listed])
        return np.concatenate([await self._service.call(partial(how.embeddings, engine, [one])) for one in tokens])

    @property
    def is_sleeping(self) -> bool:
        """Whether the model sleeps."""
        return self._service.asleep

    async def sleep(self, level: int = 1) -> None:
        """Refuse new requests, let those that run end, then sleep as `LLM.sleep` does."""
        await self._service.sleep(level)

    async def wake_up(self) -> None:
        """Wake up as `LLM.wake_up` does."""
        await self._service.wake_up()

    async def aclose(self) -> None:
        """End the thread, and close the model if it was loaded here. Unfinished requests raise ResourceError."""
        await asyncio.to_thread(self._service.close)
        if not self._given:
            self.llm.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    async def _run(self, prepare: Callable[[], _Prepared], partial: bool) -> AsyncGenerator[RequestOutput, None]:
        """Yield the output of a prompt whenever it grows; with `partial` false only when it is finished."""
        self._service.check()
        asked = await asyncio.to_thread(prepare)  # to encode a long prompt, or compile a grammar, takes a while
        if partial:
            asked.params.check_streamed()
        reader = MessageReader([asked.turn]) if asked.turn else None
        answer = self._service.submit([asked.tokens], asked.params, partial, asked.grammar)
        sent: dict[int, int] = {}  # characters of each sample
        try:
            async for output in answer:
                output.prompt = asked.text
                for sample in output.outputs:  # a slow caller misses outputs, and with them what they added
                    sample.new_text = sample.text[sent.get(sample.index, 0) :]
                    sent[sample.index] = len(sample.text)
                yield reader.read(output) if reader else output
        finally:
            answer.cancel()

    def _prompted(self, prompt: Prompt, params: Params, options: dict[str, Any]) -> _Prepared:
        [one] = params_for(1, params, options, self.llm.sampling_defaults)
        self.llm.check(one)
        tokens = self.llm.encode(prompt, params=one)
        grammar = self.llm.engine.grammars.compile(one.structure)
        return _Prepared(prompt if isinstance(prompt, str) else None, tokens, one, grammar)

    def _conversed(self, messages: Conversation, params: Params, options: dict[str, Any]) -> _Prepared:
        conversations = conversations_of(messages)
        if len(conversations) > 1 or conversations[0] is not messages:
            raise UsageError("give the messages of one conversation: a call for each of several may run at once")
        asked = ChatOptions(**{name: value for name, value in options.items() if name in _CHAT_OPTIONS})
        others = {name: value for name, value in options.items() if name not in _CHAT_OPTIONS}
        [(turn, one)] = self.llm.turns(conversations, params, others, asked)
        self.llm.check(one)
        tokens = self.llm.encode(turn.prompt, special=False, params=one)
        return _Prepared(turn.prompt, tokens, one, self.llm.engine.grammars.compile(one.structure), turn)


@dataclass(frozen=True)
class _Prepared:
    """A request that has been checked. turn: how to read the replies of a conversation."""

    text: str | None
    tokens: list[int]
    params: SamplingParams
    grammar: Grammar | None
    turn: Turn | None = None


class AsyncOutputs:
    """The output of one prompt: iterate for each RequestOutput as it grows, or await the finished one. Use it once.

    `asyncio.ensure_future` makes a task of it.
    """

    def __init__(self, run: Callable[[bool], AsyncGenerator[RequestOutput, None]]) -> None:
        """run: makes the outputs, all of them or only the finished one."""
        self._run: Callable[[bool], AsyncGenerator[RequestOutput, None]] | None = run
        self._grown: AsyncGenerator[RequestOutput, None] | None = None

    def __aiter__(self) -> AsyncOutputs:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._grown is None:
            self._grown = self._start(partial=True)
        return await anext(self._grown)

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self._finished().__await__()

    async def aclose(self) -> None:
        """Cancel the request unless it has finished."""
        self._run = None
        if self._grown is not None:
            await self._grown.aclose()

    async def _finished(self) -> RequestOutput:
        async with aclosing(self._start(partial=False)) as outputs:
            return await anext(outputs)

    def _start(self, partial: bool) -> AsyncGenerator[RequestOutput, None]:
        if self._run is None:
            raise UsageError("this output was used already: call generate or chat again")
        run, self._run = self._run, None
        return run(partial)
