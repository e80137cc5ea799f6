"""Rounds with a draft head (EAGLE-3, arXiv 2503.01840), step by step from the host.

A head reads features of the target beside the text.

Row p of the head has the features of position p and the token at p + 1; it gives features and a draft for p + 2. The
features are the target's where the target has computed the position, and the head's own after that. The head's cache
has an entry for each row, so it can hold as many positions as the target's. Entries of the head's own features are
computed again once the target's are known.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qcompile.errors import OverflowedError
from qcompile.runtime.outputs import MOST_DRAFTS
from qcompile.runtime.request import Request
from qcompile.runtime.sampling.arrays import FloatArray
from qcompile.runtime.speculation.stages import DraftStage, Speculator, StageResult
from qcompile.runtime.step import FeatureExecutor, Rows

_REST_AFTER, _REST_IN = 16, 32
"""Tokens without drafts after which the target no longer computes features; in calls of more steps, from the first."""

Choose = Callable[[int, int, FloatArray | None], int]
"""Returns a draft for text i, from the head's argmax (a token of the target) and its logits if they are wanted."""


class TargetFeatures(NamedTuple):
    """The target's features [positions, width] of a text's positions from `first` on, which the head's cache lacks."""

    first: int
    features: FloatArray

    @property
    def end(self) -> int:
        """The position after the last."""
        return self.first + len(self.features)


class ComputedRows(NamedTuple):
    """`many` positions of a request from `start` on, which are rows of the target's last step from row `at` on."""

    request: Request
    start: int
    at: int
    many: int

    @property
    def last(self) -> ComputedRows:
        """The last of the positions."""
        return ComputedRows(self.request, self.start + self.many - 1, self.at + self.many - 1, 1)


@dataclass(slots=True)
class _Text:
    """A request in a call: what its next row of the head reads, and its drafts.

    new: tokens that the call has appended. want: drafts wanted. end: tokens at which the text ends.
    """

    request: Request
    gamma: int
    end: int
    computed: int
    new: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    want: int = 0
    rounds: int = 0
    drafted: list[int] = field(default_factory=lambda: [0] * MOST_DRAFTS)
    accepted: list[int] = field(default_factory=lambda: [0] * MOST_DRAFTS)

    @property
    def length(self) -> int:
        """Tokens of the text, without drafts."""
        return len(self.request.sequence.tokens) + len(self.new)

    def tokens(self, first: int) -> list[int]:
        """The text's tokens from place `first` on."""
        known = self.request.sequence.tokens
        return known[first:] + self.new[max(0, first - len(known)) :]

    def accept(self, chosen: Sequence[int]) -> int:
        """Keep the drafts that are those `chosen`, and the token after them. Returns how many drafts."""
        kept = next((i for i, draft in enumerate(self.drafts) if draft != chosen[i]), len(self.drafts))
        self.new += [*self.drafts[:kept], chosen[kept]]
        self.computed += kept + 1
        self.rounds += 1
        for place in range(min(len(self.drafts), MOST_DRAFTS)):
            self.drafted[place] += 1
            self.accepted[place] += place < kept
        if chosen[kept] < 0:  # logits that are not finite end the text
            self.end = self.length
        return kept


class HeadSpeculator(Speculator):
    """Drafts of a single stage, a head, which the host runs step by step; it proposes `gamma` tokens at once.

    tokens: the target's tokens that the head proposes, by their numbers in the head; None if these are the same.
    """

    def __init__(
        self, target: FeatureExecutor, head: FeatureExecutor, gamma: int, tokens: NDArray[np.int32] | None
    ) -> None:
        super().__init__(target, [DraftStage(head, gamma)])
        self._target, self._head, self._tokens = target, head, tokens
        self._known: dict[int, TargetFeatures] = {}
        self._undrafted = 0  # tokens of a request since the last drafts
        self._resting = False
        self._rested: set[int] = set()  # requests of which positions were computed without features

    # ---- what is known of requests ----------------------------------------------------------------

    def start(self, request: Request) -> None:
        super().start(request)
        self._known[request.id] = self._nothing(0)

    def release(self, request: Request) -> None:
        self._known.pop(request.id, None)
        self._rested.discard(request.id)

    def settle(self, request: Request) -> None:
        super().settle(request)
        first, features = self._of(request)
        self._known[request.id] = TargetFeatures(first, features[: max(0, request.sequence.computed - first)])

    def rest(self, steps: int) -> bool:
        self._resting = steps > 0 and (self._undrafted >= _REST_AFTER or steps > _REST_IN)
        if self._resting:
            self._target.return_features(False)
        return not self._resting

    def note(self, requests: Sequence[Request], rows: Sequence[Rows], steps: int) -> None:
        self._undrafted += steps
        if self._resting:
            self._resting = False
            self._target.return_features(True)
            self._rested.update(request.id for request in requests if request.id in self._known)
            return
        at, many = 0, len(rows)
        features = self._target.features[: many * steps] if steps > 1 else None
        computed: list[ComputedRows] = []
        for index, (request, row) in enumerate(zip(requests, rows, strict=True)):
            first, at, count = at, at + len(row.tokens), max(0, request.sequence.computed - row.start)
            if not request.sequence.pages:  # it has ended
                continue
            if len(row.tokens) == 1 and self._undrafted > _REST_AFTER:
                self._rested.add(request.id)  # the target has computed features for prompts beside it
                continue
            self._bridge(request, row.start)
            if features is None:
                computed.append(ComputedRows(request, row.start, first, min(len(row.tokens), count)))
            else:
                self._keep(request, row.start, features[index::many][:count])
        self._take(computed)
        self._fill([request for request in requests if request.sequence.pages], self.most_lag)

    def _take(self, computed: Sequence[ComputedRows]) -> None:
        """Keep the features of positions that the target's last step has computed."""
        for request, start, at, count in computed:
            self._keep(request, start, self._target.features[at : at + count])

    def _nothing(self, first: int) -> TargetFeatures:
        return TargetFeatures(first, np.empty((0, self._target.features.shape[1]), np.float32))

    def _of(self, request: Request) -> TargetFeatures:
        """The features that are known of a request, from the first position that the head's cache lacks."""
        known, first = self._known[request.id], request.drafts.cached[0]
        return known if known.first == first else self._nothing(first)

    def _read(self, request: Request, computed: int) -> TargetFeatures:
        """The features that the head reads first to draft for a text of which `computed` positions are computed."""
        known = self._of(request)
        if not computed or (len(known.features) and known.end >= computed):
            return known
        return TargetFeatures(computed - 1, np.zeros_like(self._target.features[:1]))  # after a rewind: any will do

    def _keep(self, request: Request, start: int, features: FloatArray) -> None:
        """Keep the target's features of the positions from `start` on.

        Positions before them that another request has computed are taken as they are in the head's cache.
        """
        first, known = self._of(request)
        if not first <= start <= first + len(known):
            request.drafts.cached[0] = first = start
        self._known[request.id] = TargetFeatures(first, np.concatenate([known[: start - first], features]))

    # ---- steps of the head ------------------------------------------------------------------------

    def _catch_up(self, requests: Sequence[Request], gammas: Sequence[int]) -> None:
        self._wake(requests)
        self._fill(requests, min(self.most_lag, max(1, self.target.limits.max_outputs // len(requests))))

    def _wake(self, requests: Sequence[Request]) -> None:
        """Have features of the texts for which the target has rested: it computes the newest positions once more.

        That leaves its cache as it is. Recurrent states would move on, so a target with states computes nothing again.
        """
        self._undrafted = 0
        again: list[ComputedRows] = []
        at = 0
        for request in requests:
            computed = request.sequence.computed
            newest = max(self._of(request).end, computed - self.most_lag)
            if self.target.state_slots:
                if request.id in self._rested:
                    self._bridge(request, computed)
                continue
            if request.id in self._rested and newest < computed:
                self._bridge(request, newest)
                if at + computed - newest > self.target.limits.max_tokens:
                    self._compute_again(again)
                    again, at = [], 0
                again.append(ComputedRows(request, newest, at, computed - newest))
                at += computed - newest
        self._compute_again(again)

    def _compute_again(self, computed: Sequence[ComputedRows]) -> None:
        """Have the target compute positions once more, in one step, and keep their features."""
        if computed:
            rows = [
                Rows(each.sequence.tokens[start : start + count], start, each.sequence.pages, 0)
                for each, start, _, count in computed
            ]
            self._target.step(rows, False)
            self._take(computed)

    def _bridge(self, request: Request, end: int) -> None:
        """Have no features of the positions before `end` that the target has computed while it rested.

        The head computes them with zeros: it knows their tokens alone.
        """
        known = self._of(request)
        if request.id in self._rested:
            self._rested.remove(request.id)
            unknown = np.zeros((max(0, end - known.end), known.features.shape[1]), np.float32)
            self._known[request.id] = TargetFeatures(known.first, np.concatenate([known.features, unknown]))

    def _fill(self, requests: Sequence[Request], lag: int) -> None:
        """Compute rows of the head where more than `lag` positions are known that its cache lacks; one always stays."""
        while behind := [request for request in requests if len(self._of(request).features) > lag]:
            rows: list[Rows] = []
            given: list[FloatArray] = []
            room = self._head.limits.max_tokens
            for request in behind:
                first, known = self._of(request)
                count = min(len(known) - 1, room)
                if not count:
                    continue
                tokens = request.sequence.tokens[first + 1 : first + 1 + count]
                rows.append(Rows(tokens, first, request.sequence.pages, 0))
                given.append(known[:count])
                request.drafts.cached[0] = first + count
                self._known[request.id] = TargetFeatures(first + count, known[count:])
                room -= count
            self._head.given[: self._head.limits.max_tokens - room] = np.concatenate(given)
            self._head.step(rows, logits=False)

    def _draft(self, texts: Sequence[_Text], choose: Choose, logits: bool) -> float:
        """Draft `want` tokens for each text. Returns the seconds of the head's steps."""
        started = time.perf_counter()
        places: list[int] = []
        pending: list[FloatArray] = []
        for text in texts:
            text.want *= text.computed > 0  # the first row of the head needs features of the target
            first, known = self._read(text.request, text.computed)
            places.append(first)
            pending.append(known)
            text.drafts = []
        while active := [i for i, text in enumerate(texts) if len(text.drafts) < text.want]:
            rows, at = [], 0
            for i in active:
                tokens = (texts[i].tokens(places[i] + 1) + texts[i].drafts)[-len(pending[i]) :]
                self._head.given[at : at + len(tokens)] = pending[i]
                rows.append(Rows(tokens, places[i], texts[i].request.sequence.pages, 1))
                at += len(tokens)
            chosen, result = self._head.step(rows, logits)
            at = 0
            for number, i in enumerate(active):
                at += len(rows[number].tokens)
                places[i] += len(rows[number].tokens)
                pending[i] = self._head.features[at - 1 : at].copy()
                token = max(chosen[number], 0)
                token = token if self._tokens is None else int(self._tokens[token])
                texts[i].drafts.append(choose(i, token, None if result is None else result[number]))
        for text in texts:
            if text.want:
                text.request.drafts.cached[0] = text.computed
        return time.perf_counter() - started

    # ---- drafts and rounds ------------------------------------------------------------------------

    def _extend(
        self, requests: Sequence[Request], gammas: Sequence[int], ends: Sequence[int], rounds: int
    ) -> tuple[list[StageResult], Sequence[float]]:
        texts = [
            _Text(request, gamma, end, request.sequence.computed)
            for request, gamma, end in zip(requests, gammas, ends, strict=True)
        ]
        seconds = [0.0, 0.0]
        if not rounds:
            for text in texts:
                text.want = min(text.gamma, text.end - text.length)
            seconds[1] = self._draft(texts, _greedy, False)
            return [self._result(text, text.drafts) for text in texts], seconds
        for _ in range(rounds):
            active = [text for text in texts if text.length < text.end]
            if not active:
                break
            for text in active:
                text.want = min(text.gamma, text.end - text.length - 1)
            seconds[1] += self._draft(active, _greedy, False)
            seconds[0] += self._verify(active)
        return [self._result(text, text.new) for text in texts], seconds

    @staticmethod
    def _result(text: _Text, tokens: list[int]) -> StageResult:
        computed = [text.computed, text.request.drafts.cached[0]]
        return StageResult(tokens, computed, text.rounds, text.drafted, text.accepted)

    def _verify(self, texts: Sequence[_Text]) -> float:
        """Run a step of the target over the drafts, and keep what it chooses. Returns its seconds."""
        rows = []
        for text in texts:
            tokens = [*text.tokens(text.computed), *text.drafts]
            own = text.request.sequence
            rows.append(Rows(tokens, text.computed, own.pages, len(tokens), slot=own.slot, certain=text.length))
        started = time.perf_counter()
        chosen, _ = self.target.step(rows, False)
        seconds = time.perf_counter() - started
        at = 0
        for text, row in zip(texts, rows, strict=True):
            kept = text.accept(chosen[at : at + len(row.tokens)])
            self._keep(text.request, row.start, self._target.features[at : at + kept + 1])
            at += len(row.tokens)
        return seconds

    def draw(self, requests: Sequence[Request], gammas: Sequence[int], distributions: bool) -> list[list[int]]:
        """As `Speculator.draw`: the host draws, over all tokens of the target, of which the head proposes some."""
        self._catch_up(requests, gammas)
        texts = [
            _Text(request, gamma, 0, request.sequence.computed, want=gamma)
            for request, gamma in zip(requests, gammas, strict=True)
        ]
        for request in requests:
            request.drafts.proposed = []

        def choose(index: int, token: int, logits: FloatArray | None) -> int:
            text = texts[index]
            assert logits is not None
            try:
                token, distribution = text.request.sampler.guess(self._whole(logits), text.drafts)
            except OverflowedError:  # no token is left, or the logits are not finite: any token will do
                distribution = np.array([token]), np.ones(1)
            text.request.drafts.proposed.append(distribution)
            return token

        seconds = self._draft(texts, choose, True)
        for text in texts:
            text.request.drafts.metrics.draft_seconds += seconds
        return [text.drafts for text in texts]

    def _whole(self, logits: FloatArray) -> FloatArray:
        """Logits of the target's vocabulary: minus infinity for tokens that the head does not propose."""
        if self._tokens is None:
            return logits
        whole = np.full(self.target.limits.vocab, -np.inf, np.float32)
        whole[self._tokens] = logits
        return whole


def _greedy(index: int, token: int, logits: FloatArray | None) -> int:
    return token
