"""One engine for several threads: their runs take turns with its steps, or a server's thread has it alone."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from qcompile.errors import UsageError
from qcompile.runtime.engine.samples import PromptSamples
from qcompile.runtime.outputs import RequestOutput
from qcompile.runtime.prompts import CheckedPrompt
from qcompile.runtime.request import Request
from qcompile.runtime.sampling.arrays import FloatArray
from qcompile.runtime.sampling.grammars import Grammars
from qcompile.runtime.sampling.masks import Grammar
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.step import StepExecutor


class Stepping(Protocol):
    """What runs need of an engine (engine/engine.py)."""

    executor: StepExecutor
    grammars: Grammars

    @property
    def busy(self) -> bool: ...
    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        index: int = 0,
        embeds: FloatArray | None = None,
        grammar: Grammar | None = None,
    ) -> Request: ...
    def cancel(self, request: Request) -> None: ...
    def step(self) -> list[Request]: ...


class SharedEngine:
    """An engine, and the runs that use it. close: closes the model; alive until it has done so."""

    def __init__(self, engine: Stepping, close: weakref.finalize) -> None:
        self._engine, self._close = engine, close
        self._owner: dict[int, tuple[_Run, int]] = {}  # by request id
        self._lock = threading.RLock()  # see `exclusive`
        self._locked = self._lent = False
        self._process = os.getpid()
        self._ended: list[_Run] = []  # their requests are to be cancelled

    @property
    def idle(self) -> bool:
        """Whether no run has unfinished requests."""
        return not self._owner

    def run(
        self, prompts: list[CheckedPrompt], params_of_each: list[SamplingParams], partial: bool
    ) -> Iterator[RequestOutput]:
        """Yield outputs whenever they grow; with `partial` false only when they are finished."""
        run = _Run()
        try:
            with self.exclusive():
                for number, (prompt, params) in enumerate(zip(prompts, params_of_each, strict=True)):
                    requests = self._added(prompt, params.generated)
                    run.samples.append(PromptSamples(number, prompt.text, prompt.shown, requests, params))
                    self._owner.update((request.id, (run, number)) for request in requests)
            unfinished = len(run.samples)
            while unfinished:
                with self.exclusive():
                    if not run.grown:
                        self._step()
                    grown = [run.samples[number] for number in sorted(run.grown)]
                    run.grown = set()
                    for samples in grown:
                        if samples.overflowed:
                            raise samples.failure(f"prompt {samples.number + 1} of {len(run.samples)}: ")
                    ready = [samples.output() for samples in grown if partial or samples.finished]
                for output in ready:
                    unfinished -= output.finished
                    yield output
        finally:
            self._ended.append(run)
            if not (self.forked or self._lent):
                with self.exclusive():
                    pass

    def _added(self, prompt: CheckedPrompt, params: SamplingParams) -> list[Request]:
        """The requests of a prompt, queued."""
        grammar = self._engine.grammars.compile(params.structure)
        return [self._engine.add(prompt.tokens, params, index, prompt.embeds, grammar) for index in range(params.n)]

    def lend(self, lent: bool = True) -> None:
        """As `LLM.lend`."""
        with self.exclusive() if lent else self._lock:
            if lent and self._engine.busy:
                raise UsageError("the model has unfinished requests: serve it when they have ended")
            self._lent = lent

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Exclusive use of the engine by this thread. At the end, the requests of ended runs are cancelled.

        They are cancelled here because an abandoned stream ends when Python collects garbage, possibly during a step
        of the same thread.
        """
        if self.forked:
            raise UsageError(
                "the model was loaded before the process forked, and threads do not come along: load it here"
            )
        with self._lock:
            if self._lent:
                raise UsageError("a server uses this model: ask the server, or end it first")
            if self._locked:
                yield
                return
            self._locked = True
            try:
                yield
            finally:
                while self._ended:
                    for samples in self._ended.pop().samples:
                        for request in samples.requests:
                            self._owner.pop(request.id, None)
                            self._engine.cancel(request)
                self._locked = False

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that loaded the model, and lacks the model's threads or its GPU.

        Waiting for them would never end. A model that computes only in its caller's thread works in a fork, too.
        """
        return os.getpid() != self._process and self._engine.executor.threads != 1

    def _step(self) -> None:
        """Run one step of the engine, and mark the prompts that have grown in their runs (any thread's)."""
        if not self._close.alive:  # rounds of drafts would use freed memory
            raise UsageError("the model is closed: load it again")
        for request in self._engine.step():
            if request.id in self._owner:
                run, number = self._owner[request.id]
                run.grown.add(number)


class _Run:
    """One call of `generate` or `stream`. Several may be active; each runs steps when it is asked for more output."""

    def __init__(self) -> None:
        self.samples: list[PromptSamples] = []
        """The samples of each prompt."""
        self.grown: set[int] = set()
        """Numbers of the prompts with new tokens since they were last handled, in steps of any run."""
