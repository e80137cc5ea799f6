"""A request: one sample of one prompt, from its arrival to its end.

Each part of a request has one module that changes it:

- `spec`, what the caller asked for: nobody; it is immutable.
- `sequence`, its tokens, KV pages and slot: engine/scheduler.py the pages and the slot, and the computed positions when
  the request starts or ends; engine/postprocess.py the tokens; whoever runs a step, the positions that it has computed
  (engine/runner.py, engine/postprocess.py, and speculators for their rounds).
- `prompt_report`, the log probabilities of the prompt: engine/postprocess.py.
- `sampler`, its random numbers and penalties: itself, when an executor or the engine chooses a token.
- `drafts`, its state in speculation: runtime/speculation/ and the devices' speculators.
- `output`, `metrics` and `stream`, what the caller sees: engine/postprocess.py, and scheduling times the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from qcompile.runtime.detokenizer import Detokenizer
from qcompile.runtime.engine.held_text import HeldText
from qcompile.runtime.engine.prefixes import CachedPage, Sharing
from qcompile.runtime.engine.slots import NO_SLOT
from qcompile.runtime.outputs import CompletionOutput, RequestMetrics, SpeculationMetrics
from qcompile.runtime.sampling.accept import Distribution
from qcompile.runtime.sampling.arrays import FloatArray
from qcompile.runtime.sampling.logprobs import DoubleArray, Logprob
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.sampling.sampling import Sampler

_CALL_DECAY = 0.9
"""Weight of a request's earlier rounds after each further call of rounds: acceptance changes along a text."""

_STEP_DECAY = 0.5 ** (1 / 48)
"""Weight of a request's earlier rounds after each further plain step, which tells nothing about acceptance."""


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """What the caller asked for.

    prompt_length: tokens of the prompt. max_length: tokens of prompt and output at which the request ends, by its
    max_tokens or the context. owner: who sent the request, if only requests of one owner may share cached pages.
    """

    id: int
    prompt_length: int
    max_length: int
    params: SamplingParams
    owner: str = ""

    @property
    def sharing(self) -> Sharing:
        """Which requests may share cached pages."""
        return self.params.lora, self.owner

    @property
    def is_prompt(self) -> bool:
        """Whether nothing but the prompt is wanted."""
        return self.max_length == self.prompt_length


@dataclass(eq=False, slots=True)
class SequenceState:
    """The tokens of a request and their place in the KV cache, including what pending steps will add.

    A pending step is one that has been started and has not been waited for (engine/pending.py). Each step asks these
    properties of each request, so they are written without calls of each other.
    """

    tokens: list[int]
    """The prompt, followed by the generated tokens."""
    pages: list[int] = field(default_factory=list)
    """KV pages that the request holds, in the order of positions."""
    room: int = 0
    """Positions for which the pages are known to suffice."""
    slot: int = NO_SLOT
    """Slot of recurrent states that the request holds while it runs."""
    state_ends: list[int] = field(default_factory=list)
    """Positions before which a step ends, so that the states there can be kept for other requests."""
    computed: int = 0
    """Positions that have keys and values in the cache, while the request runs."""
    cached_page: CachedPage | None = None
    """The last of its pages that other requests can find (engine/prefixes.py)."""
    pending_rows: int = 0
    """Rows in pending steps."""
    pending_tokens: int = 0
    """Tokens that the pending steps will append."""
    pending_output: int = 0
    """Index of the last of these tokens among the outputs of the newest pending step."""
    embeds: FloatArray | None = None
    """The prompt's embeddings [tokens, width], if the caller gave these; the prompt's tokens then have no meaning."""

    @property
    def length(self) -> int:
        """Number of tokens after all pending steps."""
        return len(self.tokens) + self.pending_tokens

    @property
    def scheduled(self) -> int:
        """Positions with keys and values in the cache after all pending steps."""
        return self.computed + self.pending_rows

    @property
    def uncomputed(self) -> int:
        """Tokens that no step has computed and no pending step computes; 1 while decoding."""
        return len(self.tokens) + self.pending_tokens - self.computed - self.pending_rows

    @property
    def decodes(self) -> bool:
        """Whether only the last token is left to compute, and it has no embedding of its own."""
        if len(self.tokens) + self.pending_tokens - self.computed - self.pending_rows != 1:
            return False
        return self.embeds is None or self.scheduled >= len(self.embeds)

    def embeds_from(self, start: int) -> FloatArray | None:
        """The embeddings of the positions from `start` on; None if there are none."""
        return None if self.embeds is None or start >= len(self.embeds) else self.embeds[start:]

    def begin_step(self, rows: int, tokens: int, output: int) -> None:
        """A pending step computes `rows` rows and appends `tokens` tokens; its output `output` gives the last token."""
        self.pending_rows += rows
        self.pending_tokens += tokens
        self.pending_output = output

    def end_step(self, rows: int, tokens: int) -> None:
        """The step with these numbers is no longer pending."""
        self.pending_rows -= rows
        self.pending_tokens -= tokens

    def abandon_steps(self) -> None:
        """No pending step will append tokens any more. The positions that they compute are in the cache afterwards."""
        self.computed, self.pending_rows, self.pending_tokens = self.scheduled, 0, 0


@dataclass(eq=False, slots=True)
class PromptReport:
    """Log probabilities of a prompt's tokens, as far as the caller wants them (`SamplingParams.prompt_logprobs`).

    prompt_length: tokens of the prompt.
    """

    prompt_length: int
    scored: int
    """Positions that need no report of the token after them any more. That token is part of the prompt."""
    pieces: list[DoubleArray] = field(default_factory=list)
    """Reports of executors, in the order of positions, until the whole prompt is reported."""
    logprobs: list[dict[int, Logprob] | None] | None = None
    """The log probabilities of all tokens, once the whole prompt is reported."""

    @property
    def complete(self) -> bool:
        """Whether all wanted log probabilities are reported."""
        return self.scored >= self.prompt_length - 1

    def add(self, reports: DoubleArray) -> None:
        """Keep the reports of further tokens."""
        self.pieces.append(reports)
        self.scored += len(reports)


@dataclass(slots=True)
class SpeculationState:
    """A request's state in speculation.

    cached: positions that each draft stage's own cache holds. kept, missed: accepted drafts, and rounds that ended with
    a rejection; older ones count less.
    """

    cached: list[int] = field(default_factory=list)
    kept: float = 0.0
    missed: float = 0.0
    proposed: list[Distribution] = field(default_factory=list)
    """The distributions from which the drafts of the current round were sampled."""
    metrics: SpeculationMetrics = field(default_factory=SpeculationMetrics)

    def observe(self, kept: int, missed: int) -> None:
        """Note a call of rounds: the drafts that it accepted, and its rounds that ended with a rejection."""
        self.kept = self.kept * _CALL_DECAY + kept
        self.missed = self.missed * _CALL_DECAY + missed

    def fade(self, steps: int) -> None:
        """Note plain steps."""
        self.kept *= _STEP_DECAY**steps
        self.missed *= _STEP_DECAY**steps


@dataclass(eq=False, slots=True)
class StreamState:
    """What is needed to continue the output's text.

    detokenizer: None if the output gets no text. marks: the texts of special tokens that stop texts contain.
    """

    detokenizer: Detokenizer | None
    marks: dict[int, str] = field(default_factory=dict)
    held: HeldText = field(default_factory=HeldText)
    """Text that may turn out to be the start of a stop text, and is not in the output yet."""
    unread: list[int] = field(default_factory=list)
    """Tokens that were not decoded to text yet, as nobody has asked for the text (engine/stops.py)."""


@dataclass(eq=False, slots=True)
class Request:
    """One sample of one prompt. The module's docstring tells who changes which part."""

    spec: RequestSpec
    sequence: SequenceState
    prompt_report: PromptReport
    sampler: Sampler
    output: CompletionOutput
    metrics: RequestMetrics
    stream: StreamState
    drafts: SpeculationState = field(default_factory=SpeculationState)
    id: int = field(init=False)
    """The number of the request, unique in its engine: that of `spec`, which each step asks several times."""
    params: SamplingParams = field(init=False)
    """The sampling parameters that the caller asked for, those of `spec`."""

    def __post_init__(self) -> None:
        self.id, self.params = self.spec.id, self.spec.params

    @property
    def call_length(self) -> int:
        """Most tokens of prompt and output after a call of the executor that runs several steps or rounds: biases are
        given for a whole call."""
        prompt = self.spec.prompt_length
        until = self.sampler.biases.until(self.sequence.length - prompt)
        return self.spec.max_length if until is None else min(prompt + until, self.spec.max_length)

    @property
    def reusable(self) -> int:
        """Positions that may be taken from the cache instead of computed: those with logits that nobody reports.

        The cache knows positions by their tokens, so it has none of a prompt given as embeddings.
        """
        if self.sequence.embeds is not None:
            return 0
        return len(self.sequence.tokens) if self.prompt_report.complete else self.prompt_report.scored
