"""What a request gives back, shaped as vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field

from qcompile.runtime.sampling import Logprob


@dataclass
class CompletionOutput:
    """One sample of a prompt.

    finish_reason: 'stop' (end of text or a stop text), 'length', 'abort', or None while running.
    stop_reason: the stop text that ended it, if one did. new_text: what a stream has not given before.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | None = None
    new_text: str = ""


@dataclass
class RequestMetrics:
    """Moments on the monotonic clock, in seconds; 0 where it has not happened."""

    arrival_time: float = 0.0
    first_scheduled_time: float = 0.0
    first_token_time: float = 0.0
    finished_time: float = 0.0

    @property
    def prefill_seconds(self) -> float:
        """From the first step that carried the prompt to the first token."""
        return self.first_token_time - self.first_scheduled_time

    @property
    def decode_seconds(self) -> float:
        """From the first token to the last."""
        return self.finished_time - self.first_token_time


@dataclass
class RequestOutput:
    """A prompt and its samples. `prompt` is None where token numbers were given."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
