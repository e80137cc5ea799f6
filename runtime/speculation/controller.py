"""Chooses gamma, the number of tokens drafted per round, from the measured cost of rounds and their acceptance.

Where each draft is accepted with probability a, a round of gamma drafts gives (1 - a^(gamma + 1)) / (1 - a) tokens on
average (Leviathan et al. 2023, 2.2). The gamma with the most tokens per second wins; plain decoding (gamma 0) is left
only if another gamma is better by a margin. The cost of a round in plain steps is first that of the prior (costs.py),
and is then corrected by the steps and rounds that the engine runs (latency.py). Choices that are not in use are tried
again when, within the uncertainty of their cost, they may be better; a budget limits the cost of these trials
(measurements.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from qcompile.runtime.outputs import SpeculationMetrics
from qcompile.runtime.request import Request
from qcompile.runtime.speculation.costs import MAX_ACCEPTANCE, MIN_GAIN, SpeculationPrior, expected_tokens
from qcompile.runtime.speculation.latency import LatencyModel
from qcompile.runtime.speculation.measurements import TRIAL_SHARE, GammaChoice, Measurements, net_seconds

_PRIOR_TOKENS = 8.0
"""Weight of the other requests' acceptance in a request's own, in drafted tokens."""

_MEMORY_TOKENS = 512.0
"""Drafted tokens of earlier requests over which the acceptance of new requests is averaged."""

_MIN_KEEP_PROBABILITY = 0.1
"""With several requests, a request drafts only tokens that are accepted with at least this probability."""

_FEW_ROWS = 64
"""Fewest rows of which the filling tells what a row takes: with fewer, a step of drafts takes as long as for one."""

_ROW_SHARE = 1 / 64
"""What filling a row of the drafts' own caches takes, in plain steps, before it was measured."""

_MOST_CREDIT = 1.0
"""Most seconds of filling that are saved up."""

_YIELD_RATE, _MAX_YIELD = 0.05, 3.0
"""Weight of one call in the moving average of `Measurements.yields`; that call's ratio is limited to this and its
inverse."""


class DraftLag(NamedTuple):
    """What must be done before drafts: `rows` that their own caches lack, for requests with `left` tokens to come.

    left: the mean of the requests.
    """

    rows: int = 0
    left: float = math.inf


NO_LAG = DraftLag()
"""Nothing to do, as for drafts that share the target's cache."""


class GammaController:
    """Chooses gamma for each call from the steps and rounds measured so far.

    `seconds` is all the time measured, `lost` the part of it by which trials, and rounds that were too slow, took
    longer than the choice known to be faster would have taken for as many tokens. `owed` are the seconds of filling
    the drafts' own caches for trials that the share of the time for trials has not paid yet; below 0, what is saved up
    for that. Trials for which more has to be filled wait.
    """

    def __init__(self, prior: SpeculationPrior) -> None:
        self.prior = prior
        self._measurements: dict[tuple[bool, int], Measurements] = {}
        self._kept, self._tried = prior.acceptance * _MEMORY_TOKENS / 8, _MEMORY_TOKENS / 8
        self._drafted = False
        self._lag = NO_LAG
        self._row_seconds = 0.0  # of filling the drafts' own caches, as it was last measured
        self.owed = 0.0
        self.seconds = self.lost = 0.0

    @property
    def acceptance(self) -> float:
        """Probability that a new request's draft is accepted, given that those before it in the round were."""
        return self._kept / self._tried

    @property
    def kinds(self) -> Mapping[tuple[bool, int], Measurements]:
        """What is measured, by the kind of work: whether calls are of many steps, and about how many requests."""
        return self._measurements

    def rate(self, request: Request) -> float:
        """Probability that the request's draft is accepted, given that those before it in the round were."""
        state = request.drafts
        tried = state.kept + state.missed + _PRIOR_TOKENS
        return min((state.kept + _PRIOR_TOKENS * self.acceptance) / tried, MAX_ACCEPTANCE)

    def choose(self, requests: Sequence[Request], whole: bool, lag: DraftLag = NO_LAG) -> GammaChoice:
        """What requests that are all decoding run next. whole: many steps or rounds are one call.

        Rounds begin only where they are expected to save the time that filling the drafts' own caches takes.
        """
        measured, self._lag = self.measurements(requests, whole), lag
        if not measured.plain or not measured.costs.rounds:
            return GammaChoice(0)
        plain, rounds, latency = measured.costs.plain, measured.costs.rounds, measured.latency
        rate = measured.rate = self._mean_rate(requests)
        measured.waits = False
        fill = lag.rows * (self._row_seconds or _ROW_SHARE * measured.plain)
        tokens = {gamma: measured.yields * expected_tokens(rate, gamma) for gamma in rounds}
        gains = {gamma: math.log(tokens[gamma] * plain / rounds[gamma]) - latency.rounds(gamma) for gamma in rounds}
        best, before = max(gains, key=lambda gamma: gains[gamma]), measured.gamma
        if before and gains[best] < gains[before] + MIN_GAIN:
            best = before
        if gains[best] <= (0.0 if before else MIN_GAIN):
            measured.gamma = 0
            return (measured.rounds_trial(tokens, gains) if self.owed + fill <= 0 else None) or GammaChoice(0)
        saved = lag.left * measured.plain * (1 - math.exp(-gains[best]))
        if not before and (fill > saved or (self.owed > 0 and not measured.tried)):
            measured.waits = True
            return GammaChoice(0)
        measured.gamma, measured.gain = best, math.exp(gains[best])
        if not before:
            return measured.first_rounds(best)
        return measured.plain_trial(gains[best]) or measured.gamma_trial(gains) or GammaChoice(best)

    def each(self, requests: Sequence[Request], gamma: int) -> list[int]:
        """How many of `gamma` drafts each of the requests takes."""
        if len(requests) == 1 or not gamma:
            return [gamma] * len(requests)
        rates = map(self.rate, requests)
        return [
            max(1, min(gamma, int(math.log(_MIN_KEEP_PROBABILITY) / math.log(rate))))
            if rate > _MIN_KEEP_PROBABILITY
            else 1
            for rate in rates
        ]

    def measurements(self, requests: Sequence[Request], whole: bool) -> Measurements:
        """The measurements for about this many requests. The prior tells how costs depend on the context."""
        batch, context = len(requests), max(len(request.sequence.tokens) for request in requests)
        key, place = (whole, batch if batch <= 4 else 4 + batch.bit_length()), (batch, context // 16)
        measured = self._measurements.get(key)
        if measured is None or measured.place != place:
            costs = self.prior.costs(batch, context)
            if measured is None:
                measured = self._measurements[key] = Measurements(costs, place, LatencyModel(costs.rounds))
            measured.costs, measured.place = costs, place
        return measured

    def note_steps(self, requests: Sequence[Request], whole: bool, steps: int, seconds: float) -> None:
        """Note a call of plain steps that took `seconds`."""
        measured = self.measurements(requests, whole)
        measured.note_steps(steps, net_seconds(seconds, whole))
        for request in requests:
            request.drafts.fade(steps)
        self.seconds += seconds
        if measured.gamma:  # a trial
            loss = seconds * (1 - 1 / measured.gain)
            measured.budget -= loss
            self.lost += loss
        self._save(measured, seconds)

    def note_rounds(
        self, requests: Sequence[Request], whole: bool, gamma: int, rounds: int, seconds: float, tokens: float
    ) -> None:
        """Note a call of rounds that took `seconds` and gave `tokens` per request.

        The time of the very first call is not measured: it includes the first use of the draft path.
        """
        measured = self.measurements(requests, whole)
        loss = max(0.0, seconds - tokens * measured.plain) if measured.plain else 0.0
        self.seconds += seconds
        self.lost += loss
        if not self._drafted:
            self._drafted = True
            return
        measured.note_rounds(gamma, rounds, net_seconds(seconds, whole), tokens)
        ratio = tokens / rounds / expected_tokens(self._mean_rate(requests), gamma)
        measured.yields += _YIELD_RATE * (min(max(ratio, 1 / _MAX_YIELD), _MAX_YIELD) - measured.yields)
        if gamma != measured.gamma:  # a trial
            measured.budget -= loss
        self._save(measured, seconds)

    def note_catch_up(self, requests: Sequence[Request], whole: bool, gamma: int, seconds: float) -> None:
        """Note the time that filling the drafts' own caches took before rounds.

        In a trial it is lost, as before the first rounds of a kind, which are of no more than an expected gain.
        """
        measured = self.measurements(requests, whole)
        self.seconds += seconds
        if self._lag.rows >= _FEW_ROWS:
            self._row_seconds = seconds / self._lag.rows
        if gamma != measured.gamma or not measured.tried:
            self.owed += seconds
            self.lost += seconds

    def _save(self, measured: Measurements, seconds: float) -> None:
        """Put the trials' share of `seconds` into what is owed, and the rest into the budget of a kind of work."""
        paid = min(max(0.0, self.owed), TRIAL_SHARE * seconds)
        self.owed = max(self.owed - TRIAL_SHARE * seconds, -_MOST_CREDIT)
        measured.save(seconds - paid / TRIAL_SHARE)

    def note_finished(self, metrics: SpeculationMetrics) -> None:
        """Add the drafts of a request that has ended to the acceptance expected of new ones."""
        kept = sum(metrics.accepted)
        tried = sum(min(*pair) for pair in zip([metrics.rounds, *metrics.accepted], metrics.drafted, strict=False))
        fade = max(0.0, 1 - tried / _MEMORY_TOKENS)
        self._kept, self._tried = fade * self._kept + kept, fade * self._tried + tried

    def _mean_rate(self, requests: Sequence[Request]) -> float:
        """Mean of the requests' acceptance."""
        return sum(map(self.rate, requests)) / len(requests)
