"""Shares an engine among asyncio tasks: it runs in a thread of its own, and tasks submit and cancel requests."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from qcompile.errors import AsleepError, BusyError, QCompileError, ResourceError
from qcompile.runtime.embeddings import EmbeddingOptions
from qcompile.runtime.engine.samples import PromptSamples
from qcompile.runtime.llm import LLM
from qcompile.runtime.ranks.failure import RankFailure
from qcompile.runtime.sampling.arrays import FloatArray
from qcompile.runtime.sampling.masks import Grammar
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.sampling.structured import StructuredOutputsParams
from qcompile.runtime.server.admission import check_admitted
from qcompile.runtime.server.mailbox import CLOSING, Answer, Cancelled, Mailbox, wake_all
from qcompile.runtime.speculation.explained import GammaFacts, explained

Result = TypeVar("Result")
_PIECE_SECONDS, _MOST_PIECE_SECONDS = 200e-6, 64e-3
"""Shortest time between two pieces of a stream: the first number for each running sample, at most the second. To make
and send a piece takes about a quarter of the first number, during which the engine's thread may have to wait."""


class Outlet(Protocol):
    """What takes the outputs of one caller's prompts, in the engine's thread. It is woken after it has been given
    some.

    needs_text: whether outputs without stop texts have their text already, or whoever reads them makes it.
    """

    needs_text: bool

    def put(self, samples: PromptSamples) -> None:
        """Take the outputs that a prompt has so far."""

    def fail(self, error: QCompileError) -> None:
        """Take the error that has ended the prompts; the engine continues."""


@dataclass(eq=False)
class Job:
    """The prompts of one caller.

    partial: whether the caller wants outputs of unfinished prompts. grammar: that of structured outputs. owner: as in
    RequestSpec. samples: those of each prompt that the engine's thread has accepted.
    """

    prompts: Sequence[list[int]]
    params: SamplingParams
    partial: bool
    outlet: Outlet
    grammar: Grammar | None = None
    owner: str = ""
    samples: list[PromptSamples] = field(default_factory=list)


class Service:
    """Serves `llm` to many callers at once. Until the thread has ended, `llm` refuses all other use.

    max_waiting: most samples that may wait to run. closed: what callers are told once the service is closed. wake:
    called in the engine's thread with outlets that were given something, by default mailboxes.
    """

    def __init__(
        self,
        llm: LLM,
        max_waiting: int,
        closed: str = CLOSING,
        wake: Callable[[Iterable[Any]], None] = wake_all,
    ) -> None:
        self._closed, self._wake = closed, wake
        self.llm, self.most = llm, max_waiting + llm.engine.scheduler.max_batch
        self.failure: BaseException | None = None
        self.ended = False  # set before callers are woken for the last time
        self.failed: Callable[[BaseException], None] = lambda error: None  # called in the engine's thread as it ends
        # Called in the engine's thread, too, for each cancelled prompt: its tokens, and how its samples ended.
        self.cancelled: Cancelled = lambda tokens, reasons: None
        self._jobs: dict[Job, int] = {}  # unfinished jobs, with their numbers of samples
        self._calls: dict[_EngineCall, None] = {}  # unfinished
        self._commands: SimpleQueue[tuple[Callable[[Any], None], Job | _EngineCall | None] | None] = SimpleQueue()
        self._at_rest: list[_EngineCall] = []  # calls that wait until no request is unfinished
        self._falling_asleep = 0  # calls of `sleep` that wait
        self._owner: dict[int, tuple[Job, PromptSamples]] = {}  # by request id
        # Prompts with tokens that are not published yet, and whether a sample ended with them.
        self._grown: dict[tuple[Job, PromptSamples], bool] = {}
        llm.lend()
        if ranks := getattr(llm.executor, "ranks", None):
            failure: RankFailure = ranks.failure
            failure.listen(self._end_with)
        self._thread = threading.Thread(target=self._run, name="qcompile-engine", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """Number of samples that are running."""
        return len(self.llm.engine.scheduler.running)

    @property
    def waiting(self) -> int:
        """Number of samples that wait to run."""
        return max(0, sum(self._jobs.values()) - self.running)

    @property
    def kv_pages_used_ratio(self) -> float:
        """Share of the KV cache's pages that requests hold."""
        pool = self.llm.engine.pool
        return 1 - pool.free / pool.total

    @property
    def drafting(self) -> Sequence[GammaFacts]:
        """What `auto` knows of drafts; empty if it does not choose."""
        chooser = self.llm.engine.speculation.chooser
        return explained(chooser) if chooser else ()

    def admit(self, count: int, params: SamplingParams) -> None:
        """Raise UsageError for a request of `count` samples that can never run, and BusyError if the queue is full."""
        check_admitted(self.llm, params, count, sum(self._jobs.values()), self.most)

    def submit(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        partial: bool = False,
        grammar: Grammar | None = None,
        owner: str = "",
    ) -> Answer:
        """Submit `prompts` (tokens from `LLM.encode`), with the grammar of structured outputs. Call it, and iterate
        over the answer, on an event loop.

        The answer yields outputs when they finish, or with `partial` whenever they grow. Raises BusyError if the queue
        is full, UsageError for more samples than the queue can hold, AsleepError from the moment at which `sleep` was
        called, ResourceError when the engine has ended.
        """
        mailbox = Mailbox(len(prompts), asyncio.get_running_loop())
        job = Job(prompts, params, partial, mailbox, grammar, owner)
        self.take(job)
        return Answer(self, mailbox, functools.partial(self.drop, job))

    def take(self, job: Job) -> None:
        """Take a job; its outlet gets its outputs. Raises what `submit` does."""
        self._check_awake()
        count = len(job.prompts) * job.params.generated.n
        self.admit(count, job.params)
        self._jobs[job] = count
        self._commands.put((self._start, job))

    async def call(self, work: Callable[[], Result]) -> Result:
        """Run `work`, which may use the engine, between two steps, and return its result. Call it on an event loop.

        Raises the errors of qcompile that it does, BusyError if too many calls wait, ResourceError when the engine has
        ended.
        """
        return await self._call(work, _EngineCall.run)

    async def compile(self, structure: StructuredOutputsParams) -> Grammar | None:
        """The grammar of structured outputs, for `submit`. Raises UsageError if it cannot be compiled."""
        # In a thread, as it may take longer than other responses should wait.
        return await asyncio.to_thread(self.llm.engine.grammars.compile, structure)

    async def embed(self, how: EmbeddingOptions, texts: Sequence[list[int]]) -> FloatArray:
        """Embeddings [texts, dimensions] of texts (tokens), computed between two steps. Raises what `call` does."""
        return await self.call(functools.partial(how.embeddings, self.llm.engine, texts))

    async def refresh(self) -> None:
        """Bring what the properties tell up to date, which it is here."""

    async def sleep(self, level: int) -> None:
        """Refuse new requests, let those that were submitted end, then let the model sleep, as `LLM.sleep` does."""
        self.llm.engine.sleep.check_possible(level)
        self._falling_asleep += 1
        try:
            await self._call(lambda: self.llm.engine.fall_asleep(level), self._at_rest.append)
        finally:
            self._falling_asleep -= 1

    async def wake_up(self) -> None:
        """Wake the model, as `LLM.wake_up` does; if it is to fall asleep first, after that."""
        await self._call(self.llm.engine.sleep.end, self._at_rest.append)

    @property
    def asleep(self) -> bool:
        """Whether the model sleeps."""
        return self.llm.engine.sleep.asleep

    def _check_awake(self) -> None:
        self.llm.engine.sleep.check_awake()
        if self._falling_asleep:
            raise AsleepError("is falling asleep")

    async def _call(self, work: Callable[[], Result], take: Callable[[_EngineCall], None]) -> Result:
        """Have the engine's thread `take` a call of `work`, and return the result."""
        self.check()
        if len(self._calls) >= self.most:
            raise BusyError(f"{len(self._calls)} requests wait already, of at most {self.most}: try again later")
        call = _EngineCall(work, asyncio.get_running_loop())
        self._calls[call] = None
        try:
            self._commands.put((take, call))
            if self.ended:  # perhaps before it saw this call
                call.fail()
            result: Result = await call.future
            return result
        finally:
            self._calls.pop(call, None)

    def drop(self, job: Job) -> None:
        """Cancel the unfinished prompts of a job."""
        if self._jobs.pop(job, None):
            self._commands.put((self._cancel, job))

    def check(self) -> None:
        """Raise ResourceError if the engine has ended."""
        if self.ended:
            raise ResourceError(f"the engine has ended: {self.failure}" if self.failure else self._closed)

    def end(self) -> None:
        """Tell the thread to end as soon as it can; unfinished jobs fail."""
        self._commands.put(None)

    def _end_with(self, problem: str) -> None:
        """Have the thread end with an error, also while it waits for requests."""

        def fail(_: object) -> None:
            raise ResourceError(problem)

        self._commands.put((fail, None))

    def close(self) -> None:
        """End the thread and wait for it. The model stays open."""
        self.end()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._run_commands():
                for request in self.llm.engine.step():
                    owner, ended = self._owner[request.id], request.output.finish_reason is not None
                    self._grown[owner] = ended or self._grown.get(owner, False)
                self._publish_due()
            for job in {job for job, _ in self._owner.values()}:
                self._cancel(job)
        except BaseException as error:
            self.failure = error
            self.failed(error)
        self.llm.lend(False)
        self.ended = True
        for call in list(self._calls):
            call.fail()
        self._wake([job.outlet for job in self._jobs])

    def _run_commands(self) -> bool:
        """Run the commands of callers, waiting for one while the engine is idle. False when the thread is to end."""
        while True:
            if not self.llm.engine.busy:
                self._run_at_rest()
            elif self._commands.empty():
                return True
            command = self._commands.get()
            if command is None:
                return False
            act, job = command
            act(job)

    def _run_at_rest(self) -> None:
        """Run the calls that waited until no request is unfinished."""
        calls, self._at_rest[:] = self._at_rest[:], []
        for call in calls:
            call.run()

    def _start(self, job: Job) -> None:
        engine, params = self.llm.engine, job.params.generated
        text = job.outlet.needs_text or bool(params.stops)
        for number, tokens in enumerate(job.prompts):
            requests = [
                engine.add(tokens, params, index, grammar=job.grammar, owner=job.owner, text=text)
                for index in range(params.n)
            ]
            job.samples.append(PromptSamples(number, None, tokens, requests, job.params))
            self._owner.update((request.id, (job, job.samples[-1])) for request in requests)

    def _publish_due(self) -> None:
        """Publish the prompts that have ended, and pieces of streams that are due."""
        now = time.monotonic()
        latest = now - min(_PIECE_SECONDS * self.running, _MOST_PIECE_SECONDS)
        due = [
            (job, samples)
            for (job, samples), ended in self._grown.items()
            if (job.partial and samples.published <= latest) or (ended and (samples.finished or samples.overflowed))
        ]
        for job, samples in due:
            self._grown.pop((job, samples), None)
            samples.published = now
            self._publish(job, samples)
        self._wake([job.outlet for job, _ in due])

    def _publish(self, job: Job, samples: PromptSamples) -> None:
        """Hand the output of a prompt to its job, or end the job if the prompt has no next token."""
        if samples.overflowed:
            self._cancel(job)
            job.outlet.fail(samples.failure())
            return
        if samples.finished:
            self._forget(samples)
        job.outlet.put(samples)

    def _cancel(self, job: Job) -> None:
        for samples in job.samples:
            if any(request.id in self._owner for request in samples.requests):  # not finished yet
                for request in samples.requests:
                    self.llm.engine.cancel(request)
                output = samples.output()
                self.cancelled(output.generated_tokens, [str(sample.finish_reason) for sample in output.outputs])
            self._grown.pop((job, samples), None)
            self._forget(samples)

    def _forget(self, samples: PromptSamples) -> None:
        for request in samples.requests:
            self._owner.pop(request.id, None)


@dataclass(eq=False)
class _EngineCall:
    """Work for the engine's thread. `future` has its result or error. A call that nobody waits for any more is not
    run."""

    work: Callable[[], Any]
    loop: asyncio.AbstractEventLoop

    def __post_init__(self) -> None:
        self.future: asyncio.Future[Any] = self.loop.create_future()

    def run(self) -> None:
        """Run the work, in the engine's thread."""
        if self.future.done():
            return
        try:
            result = self.work()
        except QCompileError as error:
            self._end(functools.partial(self.future.set_exception, error))
        else:
            self._end(functools.partial(self.future.set_result, result))

    def fail(self) -> None:
        """End the call because the engine has ended."""
        self._end(functools.partial(self.future.set_exception, ResourceError(CLOSING)))

    def _end(self, act: Callable[[], None]) -> None:
        def end() -> None:
            if not self.future.done():
                act()

        with contextlib.suppress(RuntimeError):  # if the loop is closed, nobody waits
            self.loop.call_soon_threadsafe(end)
