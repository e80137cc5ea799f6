"""Has the model answer requests over HTTP: what the endpoints that generate text share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request
from fastapi.concurrency import run_in_threadpool

from qcompile.errors import QCompileError, UsageError
from qcompile.runtime.arguments import Prompt
from qcompile.runtime.dialogue import DialogueFormat
from qcompile.runtime.outputs import RequestOutput
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.sampling.structured import named_as
from qcompile.runtime.server.errors import UnknownModelError
from qcompile.runtime.server.metrics import Metrics
from qcompile.runtime.server.replies import OutputStream
from qcompile.runtime.server.served import Encoder, Submitting
from qcompile.runtime.tokenizer import encode

if TYPE_CHECKING:
    pass

Result = TypeVar("Result")
owner: ContextVar[str] = ContextVar("owner", default="")
"""The owner of this request, if only requests of one owner may share cached pages; the endpoints need not know."""
_ENCODED_AT_ONCE, _FOR_A_PROMPT = 2000, 100
"""Most characters, or tokens, that are encoded at once: a thread would cost more time. Each prompt counts as the second
number of characters in addition."""


@dataclass(frozen=True)
class Asker:
    """Has a model answer. name: the model's name for clients. dialogues: how conversations are written, if they can.

    adapters: names of adapters, which clients ask for as if they were models.
    """

    name: str
    llm: Encoder
    service: Submitting
    metrics: Metrics
    dialogues: DialogueFormat | None = None
    adapters: tuple[str, ...] = ()

    @property
    def templates(self) -> DialogueFormat:
        """How conversations are written. Raises UsageError without a chat template."""
        if self.dialogues is None:
            raise UsageError(f"{self.name} has no chat template: use /v1/completions")
        return self.dialogues

    def check_model(self, name: str | None) -> None:
        """Raise UnknownModelError for a request that names another model than the one served, and no adapter."""
        known = (self.name, *self.adapters)
        if name is not None and name not in known:
            raise UnknownModelError(f"there is no model {name!r} here, only {', '.join(map(repr, known))}")

    def named(self, model: str | None) -> str:
        """The name of the model or adapter that answers a request for `model`."""
        return self.name if model is None else model

    def count(self, text: str) -> int:
        """The number of tokens of a text without special tokens of the tokenizer's own."""
        return len(encode(self.llm.tokenizer, text, False)) if self.llm.tokenizer else 0

    async def submit(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        partial: bool,
        special: bool = False,
        structure_field: str | None = None,
        model: str | None = None,
    ) -> OutputStream:
        """Encode prompts and submit them. Raises UsageError, BusyError and ResourceError, as `Service.submit` does.

        partial: whether the answer yields outputs that grow. special: whether the tokenizer adds its special tokens.
        structure_field: the field of the request that structured outputs come from; None for `structured_outputs`.
        model: the model that the request names, or the adapter.
        """
        if model in self.adapters:
            params = replace(params, lora=model)
        self.service.admit(len(prompts) * params.generated.n, params)
        tokens = await self.encoded(prompts, special, params)
        with named_as(structure_field):
            grammar = await self.service.compile(params.structure) if params.structure else None
        return self.service.submit(tokens, params, partial, grammar, owner.get())

    async def encoded(self, prompts: Sequence[Prompt], special: bool, params: SamplingParams) -> list[list[int]]:
        """The prompts' tokens. Long texts are encoded in a thread, so that other responses continue."""

        def encoded() -> list[list[int]]:
            return [self.llm.encode(prompt, special=special, params=params) for prompt in prompts]

        texts = [prompt for prompt in prompts if isinstance(prompt, str | list)]  # anything else is refused
        size = _FOR_A_PROMPT * len(prompts) + sum(map(len, texts))
        return encoded() if size <= _ENCODED_AT_ONCE else await run_in_threadpool(encoded)

    async def outputs(self, request: Request, answer: OutputStream) -> list[RequestOutput] | None:
        """The finished outputs; None if the client of the request disconnects first, which cancels the answer."""
        return await unless_gone(request, self._collect(answer))

    async def _collect(self, answer: OutputStream) -> list[RequestOutput]:
        outputs = []
        try:
            async for output in answer:
                self.metrics.finished(output)
                outputs.append(output)
        finally:
            answer.cancel()
        return outputs


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of `work`; if the client of the request disconnects first, cancels `work` and returns None."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for one in (task, gone):
            one.cancel()
        with contextlib.suppress(asyncio.CancelledError, QCompileError):
            await task


async def _disconnected(request: Request) -> None:
    """Return when the client of a request disconnects. The body of the request must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
