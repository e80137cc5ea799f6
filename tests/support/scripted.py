"""A server with replies that are written in the test, in place of a model's: what shows them is tested alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from qcompile.errors import QCompileError
from qcompile.runtime.outputs import CompletionOutput, RequestMetrics, RequestOutput, SpeculationMetrics
from qcompile.runtime.sampling.logprobs import Logprob
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.server.service import Service


@dataclass
class Script:
    """What the server answers next, piece by piece, and what it was asked.

    pieces: the text, of which each piece is a token of its own. wait: seconds between pieces. hold: number of pieces
    after which the server waits until the client leaves. error: raised after the last piece. drafted, accepted: of
    drafts, where there are any.
    """

    pieces: Sequence[str] = ("Hello",)
    wait: float = 0.0
    hold: int | None = None
    error: QCompileError | None = None
    finish_reason: str = "stop"
    drafted: int = 0
    accepted: int = 0
    asked: list[tuple[str, SamplingParams]] = field(default_factory=list)
    cancelled: int = 0


class ScriptedService(Service):
    """A service that answers by a script."""

    def __init__(self, llm: Any, max_waiting: int, script: Script) -> None:
        super().__init__(llm, max_waiting)
        self.script = script

    def submit(self, prompts: Sequence[list[int]], params: SamplingParams, *rest: Any, **more: Any) -> Any:
        self.script.asked.append((self.llm.decode(prompts[0]), params))
        return _Answer(self.script, prompts[0], params)


class _Answer:
    """Outputs that grow by a piece each."""

    def __init__(self, script: Script, prompt: list[int], params: SamplingParams) -> None:
        self._script, self._prompt, self._params = script, prompt, params
        self._ended = False
        self.cancel: Callable[[], None] = self._left

    def _left(self) -> None:
        self._script.cancelled += not self._ended
        self._ended = True

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        script = self._script
        for count in range(1, len(script.pieces) + 1):
            if count - 1 == script.hold:
                await asyncio.sleep(60)
            await asyncio.sleep(script.wait)
            if script.error and count == len(script.pieces):
                self._ended = True
                raise script.error
            yield self._output(count, count == len(script.pieces))
        self._ended = True

    def _output(self, count: int, ended: bool) -> RequestOutput:
        script, tokens = self._script, list(range(1, count + 1))
        sample = CompletionOutput(0, "".join(script.pieces[:count]), tokens)
        sample.finish_reason = script.finish_reason if ended else None
        if self._params.logprobs is not None:
            sample.logprobs = [_chances(token, script.pieces[token - 1]) for token in tokens]
        speculation = SpeculationMetrics(rounds=1, drafted=[script.drafted], accepted=[script.accepted])
        drafts = speculation if script.drafted else None
        return RequestOutput(0, None, self._prompt, [sample], ended, RequestMetrics(), drafts)


def _chances(token: int, text: str) -> dict[int, Logprob]:
    """The more tokens, the less probable; `other` is the second."""
    return {token: Logprob(-0.25 * (token - 1), 1, text), 1000: Logprob(-3.0, 2, "other")}
