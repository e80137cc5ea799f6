"""Drafts by a model with another tokenizer: the text is encoded again for that model, and its drafts for the target.

This is transformers' universal assisted generation. The target verifies these drafts like any others, so text that the
two tokenizers split differently costs drafts, never correctness.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qcompile.errors import ArtifactError, told_in_rust
from qcompile.runtime.engine.blocks import BlockPool
from qcompile.runtime.outputs import MOST_DRAFTS
from qcompile.runtime.request import Request
from qcompile.runtime.speculation.stages import top_probability
from qcompile.runtime.step import Rows, StepExecutor
from qcompile.runtime.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TAIL = 8
"""Tokens at the end of the text that are encoded again together with the drafted text."""


@dataclass
class _EncodedText:
    """A request's state in the draft model: the model's own tokens, how many its cache holds, and its pages."""

    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    pages: list[int] = field(default_factory=list)


class Reencoder:
    """Drafts for the requests of an engine with the model of `executor`.

    own: the model's tokenizer. start: its beginning-of-text token. pool: the pages of its own cache. threshold:
    drafting stops before a token less probable than this. target: the target's tokenizer. vocab: size of the target
    model's vocabulary; drafting stops before a token outside it, as the target's tokenizer may have more tokens.
    """

    def __init__(
        self,
        target: Tokenizer,
        own: Tokenizer,
        executor: StepExecutor,
        pool: BlockPool,
        start: int | None,
        threshold: float,
        vocab: int,
    ) -> None:
        self.executor, self.pool, self.threshold, self._vocab = executor, pool, threshold, vocab
        self._target, self._own = target, own
        self._start = [] if start is None else [start]
        self._texts: dict[int, _EncodedText] = {}
        self.max_position = 1 << 30  # unknown in tokens of the target; `_draft` checks the limit in its own tokens

    @property
    def has_states(self) -> bool:
        """Whether the draft has recurrent states: never, as builds refuse that."""
        return False

    def most(self, requests: int) -> int:
        """The most tokens that can be drafted for each of `requests` requests."""
        return min(MOST_DRAFTS - 1, self.executor.limits.max_outputs // requests - 2)

    def behind(self, requests: Sequence[Request]) -> int:
        """None are known: a text that is encoded anew may share any beginning with the one in the cache."""
        return 0

    def start(self, request: Request) -> None:
        """Prepare the state of a new request."""
        self._texts[request.id] = _EncodedText()

    def settle(self, request: Request) -> None:
        """After verification: nothing to do, as `propose` compares the cache with the text."""

    def rest(self, steps: int) -> bool:
        """A call without drafts follows: the draft needs nothing of it."""
        return False

    def note(self, requests: Sequence[Request], rows: Sequence[Rows], steps: int) -> None:
        """The target has computed rows: nothing to note, as the draft reads the text alone."""

    def release(self, request: Request) -> None:
        """A request has ended: free its pages."""
        self.pool.give_back(self._texts.pop(request.id).pages)

    def draw(self, requests: Sequence[Request], gammas: Sequence[int], distributions: bool) -> list[list[int]]:
        """As `propose`. Each draft counts as proposed with probability 1."""
        drafts = self.propose(requests, gammas)
        for request, draft in zip(requests, drafts, strict=True):
            request.drafts.proposed = [(np.array([token]), np.ones(1)) for token in draft]
        return drafts

    def propose(self, requests: Sequence[Request], gammas: Sequence[int]) -> list[list[int]]:
        """Up to `gammas[i]` drafts for `requests[i]`, in the target's tokens."""
        drafts = []
        for request, most in zip(requests, gammas, strict=True):
            started = time.perf_counter()
            drafts.append(self._draft(request, most))
            request.drafts.metrics.draft_seconds += time.perf_counter() - started
        return drafts

    def close(self) -> None:
        """Close the draft model."""
        self.executor.close()

    def _draft(self, request: Request, most: int) -> list[int]:
        text = self._target.decode(request.sequence.tokens, skip_special_tokens=False)
        tokens = self._start + _tokens(self._own, text)
        state = self._texts[request.id]
        longest = len(tokens) + most
        missing = self.pool.pages_for(longest) - len(state.pages)
        limits = self.executor.limits
        if (
            longest > limits.max_position
            or missing > self.pool.free
            or max(tokens, default=limits.vocab) >= limits.vocab
        ):
            return []
        state.pages += self.pool.take(max(0, missing))
        state.computed = min(_common_prefix(state.tokens[: state.computed], tokens), len(tokens) - 1)
        added = self._continue(state, tokens, most)
        state.tokens = tokens + added
        whole = self._own.decode([*tokens, *added], skip_special_tokens=False)
        before = self._own.decode(tokens, skip_special_tokens=False)
        return self._encoded(request.sequence.tokens, whole[len(before) :])[:most] if whole.startswith(before) else []

    def _continue(self, state: _EncodedText, tokens: list[int], most: int) -> list[int]:
        """Greedy tokens of the draft model, in its own tokens, up to one less probable than the threshold."""
        added: list[int] = []
        rows = self.executor.limits.max_tokens
        while len(tokens) - 1 - state.computed >= rows:
            part = tokens[state.computed : state.computed + rows]
            self.executor.step([Rows(part, state.computed, state.pages, 0)], logits=False)
            state.computed += rows
        while len(added) < most:
            part = [*tokens, *added][state.computed :]
            argmax, logits = self.executor.step([Rows(part, state.computed, state.pages, 1)], logits=True)
            assert logits is not None
            state.computed += len(part)
            if top_probability(logits[0]) < self.threshold:
                break
            added.append(max(argmax[0], 0))
        return added

    def _encoded(self, tokens: Sequence[int], text: str) -> list[int]:
        """The target's tokens for `text` after `tokens`; none where encoding both together changes `tokens`."""
        tail = list(tokens[-_TAIL:])
        joined = self._target.decode(tail, skip_special_tokens=False) + text
        encoded = _tokens(self._target, joined)
        if not text or encoded[: len(tail)] != tail:
            return []
        return [*takewhile(lambda token: token < self._vocab, encoded[len(tail) :])]


def _tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text; none where the tokenizer fails, as it does on unknown text without an unknown token."""
    try:
        with told_in_rust():
            ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    except Exception:  # tokenizers raises plain Exception
        return []
    return ids


def open_reencoder(
    root: Path,
    files: dict[str, Any],
    stage: dict[str, Any],
    target: Tokenizer | None,
    vocab: int,
    executor: StepExecutor,
    pool: BlockPool,
) -> Reencoder:
    """Open the re-encoding draft of the artifact at `root`.

    files, stage: the manifest's files and its entry of the draft stage (in "levels"). target: the target's tokenizer.
    vocab: size of the target's vocabulary. pool: the pages of the draft's own cache. Raises ArtifactError where a
    tokenizer is missing.
    """
    own = load_tokenizer(root, files, stage["tokenizer"])
    if own is None or target is None:
        raise ArtifactError(f"{root}: a draft that encodes text needs two tokenizers; build it again")
    return Reencoder(target, own, executor, pool, stage.get("bos_token_id"), stage["threshold"], vocab)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(a), len(b)))
