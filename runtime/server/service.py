"""Shares an engine among asyncio tasks: it runs in its own thread, and tasks submit and cancel requests."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from qcompile.errors import OverflowedError, QCompileError, ResourceError, UsageError
from qcompile.runtime.engine.group import Group
from qcompile.runtime.llm import LLM
from qcompile.runtime.outputs import RequestOutput
from qcompile.runtime.sampling.sampling import SamplingParams

_PIECE_SECONDS, _MOST_PIECE_SECONDS = 170e-6, 48e-3
"""Least time between two pieces of a stream, for each sample that runs, and the most that this may come to. To make and
to send a piece takes about a third of that, in which the engine's thread may have to wait."""


class BusyError(QCompileError):
    """The queue of waiting requests is full; the caller should try again later."""

    exit_code = ResourceError.exit_code


@dataclass(eq=False)
class Job:
    """The prompts of one caller. `grown` holds the newest output of each prompt that the caller has not read yet.

    A slow reader misses intermediate outputs, but no text, and unread outputs take no more memory than one per prompt.
    """

    prompts: Sequence[list[int]]
    params: SamplingParams
    partial: bool
    loop: asyncio.AbstractEventLoop
    event: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is something to read."""
    groups: list[Group] = field(default_factory=list)
    grown: dict[int, RequestOutput] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    error: QCompileError | None = None
    """The error that ended this job, while the engine goes on."""

    def put(self, output: RequestOutput) -> None:
        """Hand an output to the caller, who is to be woken. Runs in the engine's thread."""
        with self.lock:
            self.grown[output.request_id] = output

    def take(self) -> list[RequestOutput]:
        """Take the unread outputs, in the order of the prompts."""
        with self.lock:
            grown, self.grown = self.grown, {}
        return [grown[number] for number in sorted(grown)]


class Service:
    """Serves `llm` to many callers at once. Until the thread has ended, `llm` refuses to be used otherwise.

    max_waiting: most samples that may wait to run.
    """

    def __init__(self, llm: LLM, max_waiting: int) -> None:
        self.llm, self.most = llm, max_waiting + llm.engine.scheduler.max_batch
        self.failure: BaseException | None = None
        self.ended = False  # set before callers are woken for the last time
        self.failed: Callable[[BaseException], None] = lambda error: None  # called in the engine's thread as it ends
        self.cancelled: Callable[[RequestOutput], None] = lambda output: (
            None
        )  # also called there, for cancelled prompts
        self._jobs: dict[Job, int] = {}  # unfinished jobs, with their numbers of samples
        self._commands: SimpleQueue[tuple[Callable[[Job], None], Job] | None] = SimpleQueue()
        self._owner: dict[int, tuple[Job, Group]] = {}  # by request id
        self._grown: dict[tuple[Job, Group], None] = {}  # prompts with tokens that are not published yet
        llm.lend()
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

    def admit(self, count: int, params: SamplingParams) -> None:
        """Raise UsageError for a request of `count` samples that can never run, before its prompts are encoded."""
        if count > self.most:
            raise UsageError(f"{count} samples in one request: at most {self.most} may run and wait")
        self.llm.check(params)

    def submit(self, prompts: Sequence[list[int]], params: SamplingParams, partial: bool = False) -> Answer:
        """Submit `prompts` (tokens from `LLM.encode`). Call it, and iterate over the answer, on an event loop.

        The answer yields outputs when they finish, or with `partial` whenever they grow. Raises BusyError if the queue
        is full, UsageError for more samples than the queue can hold, ResourceError when the engine has ended.
        """
        count = len(prompts) * params.n
        self.admit(count, params)
        if (held := sum(self._jobs.values())) + count > self.most:
            raise BusyError(f"{held} samples run or wait already, of at most {self.most}: try again later")
        job = Job(prompts, params, partial, asyncio.get_running_loop())
        self._jobs[job] = count
        self._commands.put((self._start, job))
        return Answer(self, job)

    def drop(self, job: Job) -> None:
        """Cancel the unfinished prompts of a job."""
        if self._jobs.pop(job, None):
            self._commands.put((self._cancel, job))

    def check(self) -> None:
        """Raise ResourceError if the engine has ended."""
        if self.ended:
            raise ResourceError(f"the engine has ended: {self.failure}" if self.failure else "the server is closing")

    def end(self) -> None:
        """Tell the thread to end as soon as it can; unfinished jobs fail."""
        self._commands.put(None)

    def close(self) -> None:
        """End the thread and wait for it. The model stays open."""
        self.end()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._run_commands():
                self._grown.update((self._owner[request.id], None) for request in self.llm.engine.step())
                self._publish_due()
            for job in {job for job, _ in self._owner.values()}:
                self._cancel(job)
        except BaseException as error:
            self.failure = error
            self.failed(error)
        self.llm.lend(False)
        self.ended = True
        _wake(list(self._jobs))

    def _run_commands(self) -> bool:
        """Run the commands of callers, waiting for one while the engine is idle. False when the thread is to end."""
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

    def _publish_due(self) -> None:
        """Publish the prompts that have ended, and pieces of streams that are due."""
        now = time.monotonic()
        latest = now - min(_PIECE_SECONDS * self.running, _MOST_PIECE_SECONDS)
        due = [
            (job, group)
            for job, group in self._grown
            if group.finished or group.overflowed or (job.partial and group.told <= latest)
        ]
        for job, group in due:
            self._grown.pop((job, group), None)
            group.told = now
            self._publish(job, group)
        _wake(job for job, _ in due)

    def _publish(self, job: Job, group: Group) -> None:
        """Pass the output of a prompt on, or end its job if its logits are not finite."""
        if group.overflowed:
            self._cancel(job)
            job.error = OverflowedError()
            return
        if group.finished:
            self._forget(group)
        job.put(group.output())

    def _cancel(self, job: Job) -> None:
        for group in job.groups:
            if any(request.id in self._owner for request in group.requests):  # not finished yet
                for request in group.requests:
                    self.llm.engine.cancel(request)
                self.cancelled(group.output())
            self._grown.pop((job, group), None)
            self._forget(group)

    def _forget(self, group: Group) -> None:
        for request in group.requests:
            self._owner.pop(request.id, None)


class Answer:
    """The result of `Service.submit`: iterate over it once. Cancelling or dropping it cancels what is unfinished."""

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
    """Wake the callers of jobs, those of an event loop together: to wake one costs as much as to hand it its output."""
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
