"""An engine that several asyncio tasks share: it steps in a thread of its own, requests come and go meanwhile."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from qcompile.errors import OverflowedError, QCompileError, ResourceError, UsageError
from qcompile.runtime.group import Group
from qcompile.runtime.llm import LLM
from qcompile.runtime.outputs import RequestOutput
from qcompile.runtime.sampling import SamplingParams


class BusyError(QCompileError):
    """As many requests wait as may; the caller should come back later."""

    exit_code = ResourceError.exit_code


@dataclass(eq=False)
class Job:
    """What one caller asked for. `grown` holds the newest output of each prompt that the caller has not seen.

    A slow reader misses states between, never their text, and what it has not read takes no more memory than one.
    """

    prompts: Sequence[list[int]]
    params: SamplingParams
    partial: bool
    wake: Callable[[], None]
    groups: list[Group] = field(default_factory=list)
    grown: dict[int, RequestOutput] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    error: QCompileError | None = None
    """What ended it alone."""

    def put(self, output: RequestOutput) -> None:
        """From the engine's thread."""
        with self.lock:
            self.grown[output.request_id] = output
        self.wake()

    def fail(self, error: QCompileError) -> None:
        """From the engine's thread."""
        self.error = error
        self.wake()

    def take(self) -> list[RequestOutput]:
        """What is new, by prompt."""
        with self.lock:
            grown, self.grown = self.grown, {}
        return [grown[number] for number in sorted(grown)]


class Service:
    """`llm` for many callers at once; it must not be used otherwise until `close`.

    max_waiting: samples that may wait for a place among those that run.
    """

    def __init__(self, llm: LLM, max_waiting: int) -> None:
        self.llm, self.most = llm, max_waiting + llm.engine.scheduler.max_batch
        self.failure: BaseException | None = None
        self.ended = False  # set before callers are woken for the last time
        self.failed: Callable[[BaseException], None] = lambda error: None  # called in the engine's thread as it ends
        self.cancelled: Callable[[RequestOutput], None] = lambda output: None  # there too, for what nobody is told
        self._jobs: dict[Job, int] = {}  # those of callers that wait, with their number of samples
        self._commands: SimpleQueue[tuple[Callable[[Job], None], Job] | None] = SimpleQueue()
        self._owner: dict[int, tuple[Job, Group]] = {}  # by request
        self._thread = threading.Thread(target=self._work, name="qcompile-engine", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """Samples that are being computed."""
        return len(self.llm.engine.scheduler.running)

    @property
    def waiting(self) -> int:
        """Samples that are not, yet."""
        return max(0, sum(self._jobs.values()) - self.running)

    def admit(self, count: int, params: SamplingParams) -> None:
        """Raise UsageError for what could never be answered, before any of its `count` prompts is encoded."""
        if count > self.most:
            raise UsageError(f"{count} samples in one request: at most {self.most} may run and wait")
        self.llm.check(params)

    def submit(self, prompts: Sequence[list[int]], params: SamplingParams, partial: bool = False) -> Answer:
        """Have `prompts` (tokens that `LLM.encode` passed) answered; to be called, and iterated over, on an event loop.

        Gives outputs as they end, or with `partial` as they grow. Raises BusyError where there is no room,
        UsageError for more than could ever wait, ResourceError when the engine has ended.
        """
        count = len(prompts) * params.n
        self.admit(count, params)
        if (held := sum(self._jobs.values())) + count > self.most:
            raise BusyError(f"{held} samples run or wait already, of at most {self.most}: try again later")
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        job = Job(prompts, params, partial, lambda: _call(loop, event.set))
        self._jobs[job] = count
        self._commands.put((self._start, job))
        return Answer(self, job, event)

    def drop(self, job: Job) -> None:
        """The caller wants no more of a job; what is unfinished of it ends."""
        if self._jobs.pop(job, None):
            self._commands.put((self._cancel, job))

    def check(self) -> None:
        """Raises ResourceError once the engine has ended."""
        if self.ended:
            raise ResourceError(f"the engine has ended: {self.failure}" if self.failure else "the server is closing")

    def end(self) -> None:
        """Have the thread end as soon as it can; what is unfinished fails."""
        self._commands.put(None)

    def close(self) -> None:
        """End the thread, and wait for it. The model stays open."""
        self.end()
        self._thread.join()

    def _work(self) -> None:
        try:
            while self._obey():
                grown = [self._owner[request.id] for request in self.llm.engine.step()]
                for job, group in dict.fromkeys(grown):
                    self._tell(job, group)
            for job in {job for job, _ in self._owner.values()}:
                self._cancel(job)
        except BaseException as error:
            self.failure = error
            self.failed(error)
        self.ended = True
        for job in list(self._jobs):
            job.wake()

    def _obey(self) -> bool:
        """Do what callers wanted meanwhile, waiting for them if there is nothing else to do; False at the end."""
        while not self.llm.engine.busy or not self._commands.empty():
            command = self._commands.get()
            if command is None:
                return False
            act, job = command
            act(job)
        return True

    def _start(self, job: Job) -> None:
        engine, params = self.llm.engine, job.params
        for number, tokens in enumerate(job.prompts):
            requests = [engine.add(tokens, params, index) for index in range(params.n)]
            job.groups.append(Group(number, None, tokens, requests))
            self._owner.update((request.id, (job, job.groups[-1])) for request in requests)

    def _tell(self, job: Job, group: Group) -> None:
        """A prompt's samples have got tokens."""
        if group.overflowed:
            self._cancel(job)
            job.fail(OverflowedError())
            return
        if group.finished:
            self._forget(group)
        if job.partial or group.finished:
            job.put(group.output())

    def _cancel(self, job: Job) -> None:
        for group in job.groups:
            if any(request.id in self._owner for request in group.requests):  # it was not ended before
                for request in group.requests:
                    self.llm.engine.cancel(request)
                self.cancelled(group.output())
            self._forget(group)

    def _forget(self, group: Group) -> None:
        for request in group.requests:
            self._owner.pop(request.id, None)


class Answer:
    """What `Service.submit` gives: iterate over it once. Cancelled, or forgotten, it ends what is unfinished."""

    def __init__(self, service: Service, job: Job, event: asyncio.Event) -> None:
        self._service, self._job, self._event = service, job, event
        self.cancel = weakref.finalize(self, service.drop, job)

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        unfinished = len(self._job.prompts)
        while unfinished:
            self._service.check()  # it may have ended before it took the job
            await self._event.wait()
            self._event.clear()
            if self._job.error:
                raise self._job.error
            for output in self._job.take():
                unfinished -= output.finished
                yield output
        self.cancel()


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """In the caller's thread; a loop that has closed has nobody left to tell."""
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:
        if not loop.is_closed():
            raise
