"""Shares an engine among asyncio tasks: it runs in a thread of its own, and tasks submit and cancel requests."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from qcompile.errors import AsleepError, BusyError, QCompileError, ResourceError, UsageError
from qcompile.runtime.engine.samples import PromptSamples
from qcompile.runtime.llm import LLM
from qcompile.runtime.outputs import RequestOutput
from qcompile.runtime.ranks.failure import RankFailure
from qcompile.runtime.sampling.masks import Grammar
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.speculation.explained import GammaFacts, explained

Result = TypeVar("Result")
_PIECE_SECONDS, _MOST_PIECE_SECONDS = 200e-6, 64e-3
"""Shortest time between two pieces of a stream: the first number for each running sample, at most the second. To make
and send a piece takes about a quarter of the first number, during which the engine's thread may have to wait."""


@dataclass(eq=False)
class Job:
    """The prompts of one caller.

    partial: whether the caller wants outputs of unfinished prompts. grammar: that of structured outputs. owner: as in
    RequestSpec. grown: the
    newest output of each prompt that the caller has not read yet. A slow reader misses intermediate outputs, but no
    text, and there is at most one unread output per prompt.
    """

    prompts: Sequence[list[int]]
    params: SamplingParams
    partial: bool
    loop: asyncio.AbstractEventLoop
    grammar: Grammar | None = None
    owner: str = ""
    event: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is something to read."""
    samples: list[PromptSamples] = field(default_factory=list)
    """The samples of each prompt that the engine's thread has accepted."""
    grown: dict[int, RequestOutput] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    error: QCompileError | None = None
    """The error that ended this job; the engine continues."""

    def put(self, output: RequestOutput) -> None:
        """Hand an output to the caller. Runs in the engine's thread; the caller must be woken afterwards."""
        with self.lock:
            self.grown[output.request_id] = output

    def take(self) -> list[RequestOutput]:
        """Take the unread outputs, in the order of the prompts."""
        with self.lock:
            grown, self.grown = self.grown, {}
        return [grown[number] for number in sorted(grown)]


class Service:
    """Serves `llm` to many callers at once. Until the thread has ended, `llm` refuses all other use.

    max_waiting: most samples that may wait to run. closed: what callers are told once the service is closed.
    """

    def __init__(self, llm: LLM, max_waiting: int, closed: str = "the server is closing") -> None:
        self._closed = closed
        self.llm, self.most = llm, max_waiting + llm.engine.scheduler.max_batch
        self.failure: BaseException | None = None
        self.ended = False  # set before callers are woken for the last time
        self.failed: Callable[[BaseException], None] = lambda error: None  # called in the engine's thread as it ends
        # Called in the engine's thread, too, for each cancelled prompt.
        self.cancelled: Callable[[RequestOutput], None] = lambda output: None
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
        """Raise UsageError for a request of `count` samples that can never run, and BusyError if the queue is full.

        Called before prompts are encoded: a refusal is to take little time.
        """
        if count > self.most:
            raise UsageError(f"{count} samples in one request: at most {self.most} may run and wait")
        self.llm.check(params)
        if (held := sum(self._jobs.values())) + count > self.most:
            raise BusyError(f"{held} samples run or wait already, of at most {self.most}: try again later")

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
        self._check_awake()
        count = len(prompts) * params.generated.n
        self.admit(count, params)
        job = Job(prompts, params, partial, asyncio.get_running_loop(), grammar, owner)
        self._jobs[job] = count
        self._commands.put((self._start, job))
        return Answer(self, job)

    async def call(self, work: Callable[[], Result]) -> Result:
        """Run `work`, which may use the engine, between two steps, and return its result. Call it on an event loop.

        Raises the errors of qcompile that it does, BusyError if too many calls wait, ResourceError when the engine has
        ended.
        """
        return await self._call(work, _EngineCall.run)

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
        _wake(list(self._jobs))

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
        for number, tokens in enumerate(job.prompts):
            requests = [
                engine.add(tokens, params, index, grammar=job.grammar, owner=job.owner) for index in range(params.n)
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
        _wake(job for job, _ in due)

    def _publish(self, job: Job, samples: PromptSamples) -> None:
        """Hand the output of a prompt to its job, or end the job if the prompt has no next token."""
        if samples.overflowed:
            self._cancel(job)
            job.error = samples.failure()
            return
        if samples.finished:
            self._forget(samples)
        job.put(samples.output())

    def _cancel(self, job: Job) -> None:
        for samples in job.samples:
            if any(request.id in self._owner for request in samples.requests):  # not finished yet
                for request in samples.requests:
                    self.llm.engine.cancel(request)
                self.cancelled(samples.output())
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
            self._end(partial(self.future.set_exception, error))
        else:
            self._end(partial(self.future.set_result, result))

    def fail(self) -> None:
        """End the call because the engine has ended."""
        self._end(partial(self.future.set_exception, ResourceError("the server is closing")))

    def _end(self, act: Callable[[], None]) -> None:
        def end() -> None:
            if not self.future.done():
                act()

        with contextlib.suppress(RuntimeError):  # if the loop is closed, nobody waits
            self.loop.call_soon_threadsafe(end)


class Answer:
    """The result of `Service.submit`. Iterate over it once; `cancel`, or dropping it, cancels unfinished prompts."""

    def __init__(self, service: Service, job: Job) -> None:
        self._service, self._job = service, job
        self.cancel = weakref.finalize(self, service.drop, job)

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        unfinished = len(self._job.prompts)
        while unfinished:
            self._service.check()  # the engine may have ended before it took the job
            await self._job.event.wait()
            self._job.event.clear()
            if self._job.error:
                raise self._job.error
            for output in self._job.take():
                unfinished -= output.finished
                yield output
        self.cancel()


def _wake(jobs: Iterable[Job]) -> None:
    """Wake the callers of jobs, all of an event loop in one call: each call costs as much as handing over an output."""
    events: dict[asyncio.AbstractEventLoop, dict[asyncio.Event, None]] = {}
    for job in jobs:
        events.setdefault(job.loop, {})[job.event] = None
    for loop, some in events.items():
        try:
            loop.call_soon_threadsafe(_set, some)
        except RuntimeError:  # if the loop is closed, nobody waits
            if not loop.is_closed():
                raise


def _set(events: Iterable[asyncio.Event]) -> None:
    for event in events:
        event.set()
