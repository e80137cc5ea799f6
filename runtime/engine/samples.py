"""The samples of one prompt, and the output that they have so far."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from qcompile.errors import OverflowedError, QCompileError, UsageError
from qcompile.runtime.engine.stops import read_text
from qcompile.runtime.outputs import CompletionOutput, RequestMetrics, RequestOutput, SpeculationMetrics
from qcompile.runtime.request import Request
from qcompile.runtime.sampling.logprobs import Logprob
from qcompile.runtime.sampling.params import SamplingParams


class PromptSamples:
    """The requests of a prompt, one for each sample.

    `number` is the prompt's index in the call; `prompt` is None where the caller gave token numbers. `params` are what
    the caller asked for, and the requests are those of `params.generated`.
    """

    def __init__(
        self, number: int, prompt: str | None, tokens: list[int], requests: list[Request], params: SamplingParams
    ) -> None:
        self.number, self.prompt, self.tokens, self.requests = number, prompt, tokens, requests
        self._params = params
        self._sent = [0] * len(requests)  # characters of each sample that `output` has returned
        self.published = 0.0
        """When a server last published the output, on the monotonic clock."""

    @property
    def finished(self) -> bool:
        """Whether all samples have finished."""
        return all([request.output.finish_reason for request in self.requests])  # noqa: C419 - half a generator's time

    @property
    def overflowed(self) -> bool:
        """Whether a sample has ended because its logits are not finite, or its grammar allows none."""
        return "error" in [request.output.finish_reason for request in self.requests]

    def failure(self, where: str = "") -> QCompileError:
        """The error of a prompt that has `overflowed`; its message starts with `where`."""
        for request in self.requests:
            if request.sampler.grammar and (reason := request.sampler.grammar.error):
                return UsageError(f"{where}structured_outputs {reason}")
        return OverflowedError(where)

    def output(self) -> RequestOutput:
        """A copy of the current outputs; `new_text` is the text added since the last call.

        A server calls this for each token of each stream: it is one pass over the samples.
        """
        outputs: list[CompletionOutput] = []
        finished = True
        for at, request in enumerate(self.requests):
            read_text(request)
            now, sent = request.output, self._sent[at]
            logprobs = None if now.logprobs is None else now.logprobs.copy()
            reasons = now.finish_reason, now.stop_reason
            scores = now.cumulative_logprob, logprobs
            outputs.append(
                CompletionOutput(now.index, now.text, now.token_ids.copy(), *scores, *reasons, now.text[sent:])
            )
            self._sent[at] = len(now.text)
            finished = finished and now.finish_reason is not None
        kept, dropped = outputs, 0
        if self.chosen:
            kept = _best(outputs, self._params)
            dropped = sum(len(one.token_ids) for one in outputs) - sum(len(one.token_ids) for one in kept)
        told = self.metrics(finished), self.speculation, self.prompt_logprobs
        return RequestOutput(self.number, self.prompt, self.tokens, kept, finished, *told, dropped)

    @property
    def chosen(self) -> bool:
        """Whether the outputs are the best of more samples."""
        return len(self.requests) > self._params.n

    @property
    def speculation(self) -> SpeculationMetrics | None:
        """Those of all samples; None if nothing was drafted."""
        for request in self.requests:
            if request.drafts.metrics.rounds:
                return _sum(request.drafts.metrics for request in self.requests)
        return None

    @property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """The log probabilities of the prompt's tokens, if they are wanted and complete."""
        return self.requests[0].prompt_report.logprobs

    def metrics(self, finished: bool) -> RequestMetrics:
        """The times of the prompt, from the first of its samples to start to the last to finish."""
        times = [request.metrics for request in self.requests]
        if len(times) == 1:
            return times[0].copy()
        return RequestMetrics(
            times[0].arrival_time,
            _first(time.first_scheduled_time for time in times),
            _first(time.first_token_time for time in times),
            max(time.finished_time for time in times) if finished else 0.0,
            min(time.cached_tokens for time in times),
        )


def _best(outputs: Sequence[CompletionOutput], params: SamplingParams) -> list[CompletionOutput]:
    """The samples with the highest mean log probability of a token, the best first, as the caller wants them."""

    def mean(output: CompletionOutput) -> float:
        return (output.cumulative_logprob or 0.0) / max(len(output.token_ids), 1)

    best = sorted(outputs, key=mean, reverse=True)[: params.n]
    if params.logprobs is None:
        best = [replace(output, logprobs=None, cumulative_logprob=None) for output in best]
    return [replace(output, index=index) for index, output in enumerate(best)]


def _first(moments: Iterable[float]) -> float:
    """The earliest moment that has occurred; 0 where none has."""
    return min((moment for moment in moments if moment), default=0.0)


def _sum(samples: Iterable[SpeculationMetrics]) -> SpeculationMetrics:
    """Sum of the speculation metrics of a prompt's samples."""
    total = SpeculationMetrics()
    for one in samples:
        total.gamma = one.gamma
        total.rounds += one.rounds
        total.drafted = [a + b for a, b in zip(total.drafted, one.drafted, strict=True)]
        total.accepted = [a + b for a, b in zip(total.accepted, one.accepted, strict=True)]
        total.draft_seconds += one.draft_seconds
        total.verify_seconds += one.verify_seconds
    return total
