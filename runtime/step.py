"""What an executor is: the interface by which the engine runs a model, on any device.

A step computes rows. A row is one token of one sequence at one position; it reads the keys and values of the positions
before it from the KV cache and writes its own. An executor knows sequences only by their rows and pages: requests,
text and scheduling are the engine's (runtime/engine/).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol, get_args

from qcompile.runtime.preparations import Preparations
from qcompile.runtime.sampling.arrays import FloatArray
from qcompile.runtime.sampling.inputs import SamplingInputs

Rate = Literal["memory", "int8", "f32", "bf16"]
"""A peak rate of a machine: GB/s of memory, and thousand millions of operations per second of each type."""
RATES: tuple[Rate, ...] = get_args(Rate)
EVERYTHING = (1 << 31) - 1
"""As `Rows.certain`: no position will be taken back."""


class SlotCopies(NamedTuple):
    """`many` slots of recurrent states from `first` on, which no request has.

    `copy(source, target)` copies a slot behind all steps that were started, and before those that are started later.
    apart: fewest positions that a prompt computes before a copy that no other prompt is known to need. A copy takes a
    step of its own, which ends there.
    """

    first: int
    many: int
    copy: Callable[[int, int], None]
    apart: int = 0


class HiddenStates(NamedTuple):
    """Gives the final hidden states of rows: what the output head reads, after the last norm.

    `step` runs a step of sequences as `StepExecutor.step` does, and returns the hidden states [outputs, width] of its
    output rows, float32, instead of logits.
    """

    width: int
    step: Callable[[Sequence[Rows]], FloatArray]


class Rows(NamedTuple):
    """Consecutive tokens of one sequence in one step; the last `outputs` of them give logits."""

    tokens: Sequence[int]
    start: int
    """Position of the first token."""
    pages: Sequence[int]
    """KV pages of the sequence, enough for the last position."""
    outputs: int
    known: int = 0
    """Number of leading outputs that are followed by a token of the prompt (`SamplingInputs.known`)."""
    slot: int = 0
    """The sequence's slot of recurrent states, if the model has any."""
    certain: int = EVERYTHING
    """Leading positions of the sequence that will never be taken back: all but those of drafts."""
    embeds: FloatArray | None = None
    """Embeddings [rows, width] in place of those of the first tokens; None for none. Their tokens have no meaning."""


class Limits(NamedTuple):
    """Sizes for which an executor allocates its buffers.

    max_tokens: most rows of a step. vocab: size of the vocabulary. page_tokens: positions of a KV page. max_position:
    most positions of a sequence. ring_tokens: positions of the ring of a hierarchical cache, 0 for other caches.
    slots: of recurrent states, one for each request that runs at once, on a GPU. most_outputs: most rows with logits of
    a step, which bounds its sequences too; 0 for as many as rows. copies: slots behind those of requests, for copies of
    states, on a GPU.
    """

    max_tokens: int
    vocab: int
    page_tokens: int
    max_position: int
    ring_tokens: int = 0
    slots: int = 0
    most_outputs: int = 0
    copies: int = 0

    @property
    def max_outputs(self) -> int:
        """Most rows with logits of a step, and most sequences."""
        return min(self.most_outputs or self.max_tokens, self.max_tokens)

    def pages_for(self, tokens: int) -> int:
        """Number of KV pages that `tokens` positions take."""
        return pages_for(tokens, self.page_tokens, self.ring_tokens)


def pages_for(tokens: int, page_tokens: int, ring_tokens: int = 0) -> int:
    """Number of KV pages that `tokens` positions take.

    A hierarchical cache has a ring of `ring_tokens` positions (three groups) in 16 bits, which takes two pages per
    `page_tokens` positions. Up to two groups, only the used part of the ring has pages. With more, the whole ring has
    pages, and all groups but the two newest have quantized pages as well.
    """
    pages = -(-tokens // page_tokens)
    group = ring_tokens // 3
    if not ring_tokens:
        return pages
    if tokens <= 2 * group:
        return 2 * pages
    return 2 * ring_tokens // page_tokens + ((tokens - 1) // group - 1) * (group // page_tokens)


class StepExecutor(Protocol):
    """Runs the steps of a model on one device."""

    limits: Limits
    kv_pages: int
    """Number of pages of the KV cache."""
    state_slots: int
    """Slots of recurrent states for requests and copies; 0 if the model has none."""
    copies: SlotCopies | None
    """The last of these slots, which are for copies (engine/snapshots.py); None if there are none."""
    threads: int
    """CPU threads that compute; 0 on a GPU."""
    embed_width: int
    """Width of the embeddings that rows may have (`Rows.embeds`); 0 if they may have none."""
    hidden: HiddenStates | str
    """Gives hidden states; if the model cannot, the rest of a sentence that says why and what to do."""
    samples: bool
    """Whether steps can sample tokens, apply biases and penalties, and report log probabilities. If so, the "argmax" of
    a sequence is the token that its sampling inputs choose, and its reports are written."""

    asks_for_masks: bool
    """Whether a call of several steps, or of rounds, asks for the masks of its later steps (`SamplingInputs.masks`). If
    not, a sequence with a grammar takes one step a call."""
    overlaps: bool
    """Whether the host can do other work after `start`, while the step runs."""
    preparations: Preparations
    """When the executor has prepared what later calls are spared."""

    def step(
        self, sequences: Sequence[Rows], logits: bool, sampling: Sequence[SamplingInputs] = ()
    ) -> tuple[list[int], FloatArray | None]:
        """Run one step. Returns the argmax of every output row and, if `logits`, the logits [outputs, vocab].

        The logits are valid until the next call. Biases and penalties of a sequence are applied to its logits. The
        argmax of a row that is followed by a known token (`SamplingInputs.known`) is -1 if the row's logits are not
        finite, and has no other meaning.
        """

    def decode(self, sequences: Sequence[Rows], steps: int, sampling: Sequence[SamplingInputs] = ()) -> list[int]:
        """Run `steps` steps of one row a sequence, each with the tokens of the step before.

        Returns the tokens [steps, sequences], flattened.
        """

    def start(
        self, sequences: Sequence[Rows], steps: int, sampling: Sequence[SamplingInputs] = ()
    ) -> Callable[[], list[int]]:
        """Start `step` (if `steps` is 1) or `decode`. Returns a function that waits for the tokens and returns them.

        A second step may be started before the first is waited for. In its rows, token -1 - i stands for the token of
        output i of the first step (or for token 0, if that output is not finite). Any other call waits for both steps.
        The masks of such a step are asked for by `begin_masks`.
        """

    def begin_masks(self) -> None:
        """Ask for the masks of the second step, if they follow from tokens of the first, which grammars know by now.

        Threads may go on to compute them. Until the next call of the executor, or the wait for that step,
        which wait for these threads, no grammar of that step may be used.
        """

    def profile(self, on: bool) -> None:
        """Start timing each kernel call, with all counters at zero, or stop."""

    def profile_read(self) -> dict[str, tuple[float, int]]:
        """Seconds and number of runs of each kernel call, in the order in which they run."""

    def peak(self, rate: Rate) -> float:
        """A peak rate of the machine that the executor runs on; measured on a CPU, from the data sheet of a GPU."""

    def close(self) -> None:
        """Free what the executor holds; idempotent."""


class FeatureExecutor(StepExecutor, Protocol):
    """Runs the steps of a model with a draft head, or of a head: steps return features, and those of a head read some.

    features: [rows, width] f32, those of the last call's rows: of a step in its order, of several decode steps one step
    after the other. given: [rows, width], where the caller writes what the rows of the next step read.
    """

    features: FloatArray
    given: FloatArray

    def return_features(self, on: bool) -> None:
        """Whether steps compute and return features from now on; at first they do."""
