"""The process of the engine: runs the requests of the process that answers clients, and tells it their outputs."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from qcompile.errors import QCompileError
from qcompile.runtime.embeddings import EmbeddingOptions
from qcompile.runtime.engine.samples import PromptSamples
from qcompile.runtime.llm import LLM
from qcompile.runtime.server.apart import wire
from qcompile.runtime.server.apart.channel import Message
from qcompile.runtime.server.service import Job, Service


class _Outlet:
    """Sends the outputs of one job. outgoing: what is sent together when the outlets are woken."""

    needs_text = False

    def __init__(self, number: int, prompts: int, outgoing: list[Any], tell: Callable[[Message], None]) -> None:
        self._number, self._outgoing, self._tell = number, outgoing, tell
        self._growth = [wire.Growth() for _ in range(prompts)]

    def put(self, samples: PromptSamples) -> None:
        self._outgoing.append([self._number, *self._growth[samples.number].value(samples)])

    def fail(self, error: QCompileError) -> None:
        self._tell(("refused", self._number, wire.error_value(error)))


class EngineHost:
    """Runs the engine of `llm` for another process. All but outlets is used on one event loop.

    tell: sends a message; it is called in the engine's thread, too.
    """

    def __init__(self, llm: LLM, max_waiting: int, tell: Callable[[Message], None]) -> None:
        self._llm, self._tell = llm, tell
        self._outgoing: list[Any] = []  # of the engine's thread
        self._jobs: dict[int, Job] = {}  # that nobody has dropped, by the numbers of the other process
        self._tasks: set[asyncio.Task[None]] = set()
        self.service = Service(llm, max_waiting, wake=self._send_outputs)
        self.service.cancelled = lambda tokens, reasons: tell(("cancelled", tokens, list(reasons)))

    @property
    def facts(self) -> dict[str, Any]:
        """What the other process needs to know of the model, as values of JSON."""
        hidden, limits = self._llm.executor.hidden, self._llm.executor.limits
        return {
            "context": self._llm.context,
            "limits": limits._asdict(),
            "hidden": hidden if isinstance(hidden, str) else hidden.width,
            "adapters": self._llm.engine.adapters,
            "sampling_defaults": self._llm.sampling_defaults,
            "end_tokens": sorted(self._llm.end_tokens),
            "max_batch": self._llm.engine.scheduler.max_batch,
        }

    def _send_outputs(self, outlets: Iterable[Any]) -> None:
        if self._outgoing:
            self._tell(("grown", self._outgoing))
            self._outgoing.clear()

    def asked(self, message: Sequence[Any]) -> None:
        """Do what the other process asks for."""
        name, *operands = message
        match name:
            case "submit":
                self._submit(*operands)
            case "drop":
                if (job := self._jobs.pop(operands[0], None)) is not None:
                    self.service.drop(job)
            case "end_at":
                self._llm.end_at(operands[0])
            case "close":
                self.service.end()
            case _:
                number, *operands = operands
                self._begin(self._call(number, name, operands))

    def _submit(self, number: int, prompts: list[list[int]], params: dict[str, Any], partial: bool, owner: str) -> None:
        given = wire.params_of(params)
        outlet = _Outlet(number, len(prompts), self._outgoing, self._tell)
        job = Job(prompts, given, partial, outlet, None, owner)
        self._jobs[number] = job
        if given.structure is None:
            self._take(number, job)
        else:
            self._begin(self._with_grammar(number, job))

    async def _with_grammar(self, number: int, job: Job) -> None:
        """Submit a job once its grammar is compiled, which it is already unless the cache was full."""
        structure = job.params.structure
        assert structure is not None
        try:
            job.grammar = await self.service.compile(structure)
        except QCompileError as error:
            job.outlet.fail(error)
            return
        if self._jobs.get(number) is job:  # nobody has dropped it
            self._take(number, job)

    def _take(self, number: int, job: Job) -> None:
        try:
            self.service.take(job)
        except QCompileError as error:
            job.outlet.fail(error)

    async def _call(self, number: int, name: str, operands: Sequence[Any]) -> None:
        """Do something that has a result, and send that."""
        try:
            result, error = await self._result(name, *operands), None
        except QCompileError as raised:
            result, error = None, wire.error_value(raised)
        self._tell(("returned", number, result, error))

    async def _result(self, name: str, *operands: Any) -> Any:
        service = self.service
        match name:
            case "compile":
                await service.compile(wire.structure_of(operands[0]))
            case "embed":
                embeddings = await service.embed(EmbeddingOptions(**operands[0]), operands[1])
                return base64.b64encode(embeddings.tobytes()).decode(), list(embeddings.shape)
            case "sleep":
                await service.sleep(operands[0])
            case "wake_up":
                await service.wake_up()
            case "occupancy":
                return {
                    "running": service.running,
                    "kv_pages_used_ratio": service.kv_pages_used_ratio,
                    "drafting": wire.drafting_value(service.drafting),
                }
            case _:
                raise AssertionError(name)
        return None

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
