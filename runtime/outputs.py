"""Results of a request, in the form of vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from qcompile.runtime.sampling.logprobs import Logprob


@dataclass
class CompletionOutput:
    """One sample of a prompt.

    finish_reason: 'stop' (end of text or a stop text), 'length', 'abort', 'error' (logits are not finite), or None
    while the sample runs. stop_reason: the stop text, or the token of stop_token_ids, that ended the sample. new_text:
    in a stream, the text added since the previous output. message: of `LLM.chat`, the assistant's message in OpenAI's
    form, as far as it has come.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    new_text: str = ""
    message: dict[str, Any] | None = None

    def add_logprobs(self, tokens: Sequence[int], logprobs: Sequence[dict[int, Logprob]]) -> None:
        """Append the log probabilities of tokens."""
        assert self.logprobs is not None and self.cumulative_logprob is not None
        self.logprobs += logprobs
        # One by one: sum() of Python 3.12 compensates rounding errors, so its last bits depend on the division.
        for token, each in zip(tokens, logprobs, strict=True):
            self.cumulative_logprob += each[token].logprob

    def drop_logprobs(self) -> None:
        """Drop log probabilities of tokens past the last of the output."""
        if self.logprobs is None or len(self.logprobs) <= len(self.token_ids):
            return
        kept, self.logprobs, self.cumulative_logprob = self.logprobs[: len(self.token_ids)], [], 0.0
        self.add_logprobs(self.token_ids, kept)


@dataclass
class RequestMetrics:
    """Times of a request on the monotonic clock, in seconds; 0 for an event that has not happened yet.

    cached_tokens: tokens of the prompt that had their keys and values in the cache already.
    """

    arrival_time: float = 0.0
    first_scheduled_time: float = 0.0
    first_token_time: float = 0.0
    finished_time: float = 0.0
    cached_tokens: int = 0

    def copy(self) -> RequestMetrics:
        """An independent copy; `dataclasses.replace` takes several times as long."""
        return RequestMetrics(**vars(self))

    @property
    def prefill_seconds(self) -> float:
        """From the first step that carried the prompt to the first token."""
        return self.first_token_time - self.first_scheduled_time

    @property
    def decode_seconds(self) -> float:
        """From the first token to the last."""
        return self.finished_time - self.first_token_time


MOST_DRAFTS = 16
"""Most tokens drafted in one round."""
AUTO = -1
"""As the number of tokens drafted in one round: chosen for each step from measurements."""


@dataclass
class SpeculationMetrics:
    """Speculation metrics of a prompt. `drafted` and `accepted` count tokens by their position in the round.

    gamma: tokens drafted in the most recent round. The seconds are those of all steps in which the prompt took part.
    """

    gamma: int = 0
    rounds: int = 0
    drafted: list[int] = field(default_factory=lambda: [0] * MOST_DRAFTS)
    accepted: list[int] = field(default_factory=lambda: [0] * MOST_DRAFTS)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0

    def count(self, drafted: int, accepted: int) -> None:
        """Add one round."""
        self.rounds += 1
        for place in range(drafted):
            self.drafted[place] += 1
            self.accepted[place] += place < accepted

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None if none was drafted."""
        return sum(self.accepted) / sum(self.drafted) if sum(self.drafted) else None

    @property
    def tokens_per_round(self) -> float | None:
        """Mean number of tokens per round: the accepted ones and one of the target; None without a round."""
        return 1 + sum(self.accepted) / self.rounds if self.rounds else None

    @property
    def drafted_per_round(self) -> float | None:
        """Mean number of drafted tokens per round; None without a round."""
        return sum(self.drafted) / self.rounds if self.rounds else None

    @property
    def accepted_per_position(self) -> list[float]:
        """Share of accepted tokens at each position of a round."""
        return [kept / made for kept, made in zip(self.accepted, self.drafted, strict=True) if made]


@dataclass
class RequestOutput:
    """A prompt and its samples.

    prompt: None if the caller gave token numbers. speculation: None without drafts. prompt_logprobs: None unless the
    caller asked for them and the whole prompt is computed; then for each of its tokens as `CompletionOutput.logprobs`,
    but None for the first token. dropped_tokens: tokens of samples that best_of left out.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    speculation: SpeculationMetrics | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    dropped_tokens: int = 0

    @property
    def generated_tokens(self) -> int:
        """Tokens of all samples that were generated."""
        return self.dropped_tokens + sum(len(sample.token_ids) for sample in self.outputs)
