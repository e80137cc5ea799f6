"""The service of an engine that runs in another process, as the process that answers clients uses it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from qcompile.errors import AsleepError, BusyError, ResourceError
from qcompile.runtime.embeddings import EmbeddingOptions
from qcompile.runtime.sampling.arrays import FloatArray
from qcompile.runtime.sampling.masks import Grammar
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.sampling.structured import StructuredOutputsParams
from qcompile.runtime.server.admission import check_admitted
from qcompile.runtime.server.apart import wire
from qcompile.runtime.server.apart.channel import Message
from qcompile.runtime.server.apart.model import RemoteModel
from qcompile.runtime.server.mailbox import CLOSING, Answer, Cancelled, Mailbox
from qcompile.runtime.speculation.explained import GammaFacts

Ask = Callable[[Message], None]
"""Sends a message to the engine's process."""


class _Job:
    """The prompts of one request, and what they have grown to. count: its samples."""

    def __init__(self, prompts: Sequence[list[int]], params: SamplingParams, llm: RemoteModel, count: int) -> None:
        self.mailbox, self.count = Mailbox(len(prompts), asyncio.get_running_loop()), count
        hides_end = not params.include_stop_str_in_output
        self.grown = [
            wire.Grown(number, tokens, llm.detokenizer(tokens, params), hides_end)
            for number, tokens in enumerate(prompts)
        ]


class RemoteService:
    """As `Service`. All is used on one event loop, which gives `told` what the engine's process tells.

    max_waiting: most samples that may wait to run. ask: sends a message.
    """

    def __init__(self, llm: RemoteModel, max_waiting: int, ask: Ask) -> None:
        self.llm, self.most, self._ask = llm, max_waiting + llm.max_batch, ask
        self.failure: BaseException | None = None
        self.ended = False
        self.failed: Callable[[BaseException], None] = lambda error: None
        self.cancelled: Cancelled = lambda tokens, reasons: None
        self.running, self.kv_pages_used_ratio = 0, 0.0
        self.drafting: Sequence[GammaFacts] = ()
        self.asleep = False
        self._falling_asleep = 0
        self._numbers = itertools.count()
        self._jobs: dict[int, _Job] = {}  # unfinished, by number
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._held = 0  # samples of unfinished jobs

    @property
    def waiting(self) -> int:
        """Number of samples that wait to run."""
        return max(0, self._held - self.running)

    def admit(self, count: int, params: SamplingParams) -> None:
        """As `Service.admit`."""
        check_admitted(self.llm, params, count, self._held, self.most)

    def submit(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        partial: bool = False,
        grammar: Grammar | None = None,
        owner: str = "",
    ) -> Answer:
        """As `Service.submit`; the engine's process has compiled the grammar."""
        self.check()
        if self.asleep or self._falling_asleep:
            raise AsleepError("is asleep" if self.asleep else "is falling asleep")
        count = len(prompts) * params.generated.n
        self.admit(count, params)
        number, job = next(self._numbers), _Job(prompts, params, self.llm, count)
        self._jobs[number] = job
        self._held += count
        self._ask(("submit", number, list(prompts), wire.params_value(params), partial, owner))
        return Answer(self, job.mailbox, functools.partial(self._drop, number, job.mailbox.loop))

    def _drop(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel the unfinished prompts of a job, on its event loop. An answer may be collected as garbage in any
        thread."""
        if not _runs_here(loop):
            with contextlib.suppress(RuntimeError):  # if the loop is closed, the engine has ended
                loop.call_soon_threadsafe(self._drop, number, loop)
        elif (job := self._jobs.pop(number, None)) is not None:
            self._held -= job.count
            self._ask(("drop", number))

    async def compile(self, structure: StructuredOutputsParams) -> Grammar | None:
        """As `Service.compile`; the engine's process keeps the grammar, for the request that comes next."""
        await self._call("compile", wire.structure_value(structure))
        return None

    async def embed(self, how: EmbeddingOptions, texts: Sequence[list[int]]) -> FloatArray:
        """As `Service.embed`."""
        content, shape = await self._call("embed", wire.embedding_value(how), list(texts))
        return np.frombuffer(base64.b64decode(content), np.float32).reshape(shape)

    async def sleep(self, level: int) -> None:
        """As `Service.sleep`."""
        self._falling_asleep += 1
        try:
            await self._call("sleep", level)
            self.asleep = True
        finally:
            self._falling_asleep -= 1

    async def wake_up(self) -> None:
        """As `Service.wake_up`."""
        await self._call("wake_up")
        self.asleep = False

    async def refresh(self) -> None:
        """Ask for what the properties tell. After the engine has ended, they stay as they are."""
        if not self.ended:
            told = await self._answered("occupancy")  # also while too many calls wait
            self.running, self.kv_pages_used_ratio = told["running"], told["kv_pages_used_ratio"]
            self.drafting = wire.drafting_of(told["drafting"])

    async def _call(self, name: str, *operands: Any) -> Any:
        """The result of what the engine's process is asked to do. Raises BusyError if too many calls wait."""
        self.check()
        if len(self._calls) >= self.most:
            raise BusyError(f"{len(self._calls)} requests wait already, of at most {self.most}: try again later")
        return await self._answered(name, *operands)

    async def _answered(self, name: str, *operands: Any) -> Any:
        number: int = next(self._numbers)
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self._ask((name, number, *operands))
            return await future
        finally:
            self._calls.pop(number, None)

    def check(self) -> None:
        """Raise ResourceError if the engine has ended."""
        if self.ended:
            raise ResourceError(f"the engine has ended: {self.failure}" if self.failure else CLOSING)

    def end(self) -> None:
        """End the engine; unfinished requests fail."""
        self._ask(("close",))
        self._end()

    def lost(self, failure: BaseException | None) -> None:
        """The engine's process has ended, or says so. failure: the error that ended it."""
        if not self.ended:
            self.failure = failure
            self._end()
        if failure is not None:
            self.failed(failure)

    def _end(self) -> None:
        self.ended = True
        for future in self._calls.values():
            if not future.done():
                future.set_exception(ResourceError(CLOSING))
        for job in self._jobs.values():
            job.mailbox.event.set()

    def grown(self, values: Sequence[Sequence[Any]]) -> None:
        """Take outputs that have grown: for each prompt the number of its job, and a value of `wire.Growth`."""
        for number, *value in values:
            if (job := self._jobs.get(number)) is not None:  # else nobody waits for it any more
                job.mailbox.keep(job.grown[value[0]].add(value))
                job.mailbox.event.set()

    def refused(self, number: int, error: Sequence[Any]) -> None:
        """Take the error that has ended a job."""
        if (job := self._jobs.get(number)) is not None:
            job.mailbox.fail(wire.error_of(error))
            job.mailbox.event.set()

    def returned(self, number: int, result: Any, error: Sequence[Any] | None) -> None:
        """Take the result of a call, or its error."""
        future = self._calls.get(number)
        if future is None or future.done():
            return
        if error is not None:
            future.set_exception(wire.error_of(error))
        else:
            future.set_result(result)


def _runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether this thread runs an event loop."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
