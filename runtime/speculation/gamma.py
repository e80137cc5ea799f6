"""Choice of gamma, the number of tokens drafted per round, from the measured cost of rounds and their acceptance.

Where each draft is accepted with probability a, a round of gamma drafts gives (1 - a^(gamma + 1)) / (1 - a) tokens on
average (Leviathan et al. 2023, 2.2). The gamma with the most tokens per second wins; plain decoding (0) is left only if
another gamma is better by a margin. The cost of a round in plain steps comes from `qcompile tune`, or without it from
the sizes of the weights, and is then corrected by the steps and rounds that the engine runs
(runtime/speculation/pace.py). Choices that are not in use are tried again when, within the uncertainty of their cost,
they may be better; a budget keeps the cost of these trials low.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from qcompile.runtime.speculation.pace import Pace

if TYPE_CHECKING:
    from qcompile.runtime.engine.scheduler import Request
    from qcompile.runtime.outputs import SpeculationMetrics

GAMMAS = (1, 2, 3, 4, 5, 6, 7, 8)
"""The values that `qcompile tune` measures and `auto` chooses from."""

_ROW_COST = 0.05
"""Predicted cost of each further row of a step (arithmetic), as a share of the first row's (reading the weights)."""

_MIN_GAIN = 0.02
"""Expected gain required to change to another choice. Like all gains, the logarithm of a ratio of speeds."""

_OPTIMISM = 1.0
"""Standard deviations that are added to an expected gain to decide whether a trial is worthwhile."""

_PLAIN_JITTER = 0.05
"""Change of the logarithm of plain steps' time that occurs with any text, and so tells nothing about the machine."""

_MAX_DOUBT = 0.35
"""Standard deviation of the gain above which plain steps are tried even if the purse does not cover it."""

_PRIOR_TOKENS = 8.0
"""Weight of the other requests' acceptance in a request's own, in drafted tokens."""

_MEMORY_TOKENS = 512.0
"""Drafted tokens of earlier requests over which the acceptance of new requests is averaged."""

_CALL_DECAY = 0.9
"""Weight of a request's earlier rounds after each further call of rounds: acceptance changes along a text."""

_STEP_DECAY = 0.5 ** (1 / 48)
"""The same after each plain step, which tells nothing about acceptance."""

_MAX_ACCEPTANCE = 0.995
"""Upper limit of estimated acceptance."""

_MIN_KEEP_PROBABILITY = 0.1
"""With several requests, a request drafts only tokens that are accepted with at least this probability."""

_YIELD_RATE, _MAX_YIELD = 0.05, 3.0
"""Weight of one call in the moving average of `Times.yields`; that call's ratio is limited to this and its inverse."""

_LOOK_INTERVAL = 48
"""Fewest tokens between two trials of another gamma."""

_PLAIN_INTERVAL = 24
"""Fewest tokens between two trials of plain steps."""

_PLAIN_TRIAL_STEPS = 6
"""Steps of a trial of plain decoding: more in one call would add little, as they share most of its noise."""

_CALL_OVERHEAD = 1.5e-4
"""Seconds of a call of many steps or rounds that are not spent in them: waking threads, entering and leaving Python."""

_MIN_SECONDS = 1e-9
"""Least time of a call: clocks have a finite resolution."""

_MIN_TRIAL_ROUNDS = 2
"""Rounds that the purse must cover before a further trial of rounds."""

_MAX_TRIAL_STEPS = 12.0
"""Longest trial of rounds, in plain steps' time: rounds may have become far slower since they were last measured."""

_TRIAL_SHARE = 0.01
"""Share of the time that trials may cost."""

_MAX_PURSE = 3.0
"""Most time that the purse holds, in plain steps."""


@dataclass(frozen=True)
class Costs:
    """Seconds of a plain step and of a round by its gamma, for `batch` requests of about `context` tokens."""

    batch: int
    context: int
    plain: float
    rounds: dict[int, float]

    @staticmethod
    def from_json(item: dict[str, Any]) -> Costs:
        """One entry of the manifest's table."""
        rounds = {int(gamma): float(seconds) for gamma, seconds in item["rounds"].items()}
        return Costs(item["batch"], item["context"], float(item["plain"]), rounds)

    def towards(self, other: Costs, context: int) -> Costs:
        """Linear interpolation between this entry and one of a longer context."""
        part = (context - self.context) / (other.context - self.context)
        rounds = {gamma: seconds + part * (other.rounds[gamma] - seconds) for gamma, seconds in self.rounds.items()}
        return Costs(self.batch, context, self.plain + part * (other.plain - self.plain), rounds)


@dataclass(frozen=True)
class GammaPolicy:
    """What is expected before the engine has measured anything: a `table` of costs, and the acceptance of drafts."""

    table: tuple[Costs, ...]
    acceptance: float

    @staticmethod
    def load(tuned: dict[str, Any]) -> GammaPolicy:
        """From what `qcompile tune` stored in the manifest."""
        return GammaPolicy(tuple(Costs.from_json(item) for item in tuned["table"]), float(tuned["acceptance"]))

    def costs(self, batch: int, context: int) -> Costs:
        """The entry of the nearest batch size (by ratio), interpolated between the contexts that were measured."""
        nearest = min((entry.batch for entry in self.table), key=lambda measured: abs(math.log(measured / batch)))
        entries = sorted((entry for entry in self.table if entry.batch == nearest), key=_context)
        for before, after in pairwise(entries):
            if before.context < context < after.context:
                return before.towards(after, context)
        return max((entry for entry in entries if entry.context <= context), key=_context, default=entries[0])


def _context(costs: Costs) -> int:
    return costs.context


class Choice(NamedTuple):
    """What to run next: rounds of `gamma` drafts, or plain steps if it is 0. `most` limits how many in a trial."""

    gamma: int
    most: int | None = None


@dataclass(slots=True)
class Times:
    """Measured cost of steps and rounds for one kind of work. The ages count tokens of a request."""

    costs: Costs
    """The table's entry for the current requests."""
    place: tuple[int, int]
    """Number of requests and longest context in units of 16 tokens, for which `costs` was looked up."""
    pace: Pace
    plain: float = 0.0
    """Estimated seconds of a plain step; 0 before the first."""
    tried: bool = False
    """Whether rounds have been measured."""
    compared: float = 0.0
    """`pace.plain` when steps last followed rounds or rounds followed steps."""
    plain_age: int = 0
    """Tokens since the last plain step."""
    look_age: int = 0
    """Tokens since the last trial of another gamma."""
    purse: float = 0.0
    """Seconds that trials may lose."""
    gamma: int = 0
    """The gamma in use, trials aside."""
    gain: float = 1.0
    """Expected speed of `gamma` relative to plain decoding."""
    yields: float = 1.0
    """Tokens of rounds relative to the number that acceptance predicts: a lookup may propose more than gamma."""

    def cost(self, gamma: int) -> float:
        """Time of a round in plain steps."""
        return math.exp(self.pace.rounds(gamma)) * self.costs.rounds[gamma] / self.costs.plain

    def doubt(self, gamma: int) -> float:
        """Standard deviation of the gain of rounds. A change of plain steps' time since the comparison adds to it."""
        return self.pace.doubt(gamma) + max(0.0, abs(self.pace.plain - self.compared) - _PLAIN_JITTER)

    def stepped(self, steps: int, seconds: float) -> None:
        """Note plain steps that took `seconds`, call overhead excluded."""
        self.pace.stepped(math.log(seconds / steps / self.costs.plain), steps)
        self._advance(steps)
        if self.plain_age:
            self.compared = self.pace.plain
        self.plain_age = 0

    def drafted(self, gamma: int, rounds: int, seconds: float, tokens: float) -> None:
        """Note rounds that took `seconds`, call overhead excluded, and gave `tokens` per request."""
        if gamma in self.costs.rounds and self.plain:
            self.tried = True
            self.pace.rounded(gamma, math.log(seconds / rounds / self.costs.rounds[gamma]), rounds)
            self._advance(tokens)
            if not self.plain_age:
                self.compared = self.pace.plain
        self.plain_age += round(tokens)

    def _advance(self, tokens: float) -> None:
        self.pace.passed(tokens)
        self.look_age += round(tokens)
        self.plain = self.costs.plain * math.exp(self.pace.plain)

    def save(self, seconds: float) -> None:
        """Put the trials' share of `seconds` into the purse."""
        most = _MAX_PURSE * self.plain
        self.purse = min(max(self.purse, -most) + _TRIAL_SHARE * seconds, most)


class Tempo:
    """Chooses gamma for each call from the steps and rounds measured so far.

    Now and then it tries a choice that is not in use, to see whether that has become better. A fixed share of the time
    goes into a purse, from which the expected loss of a trial is paid, so trials never cost more than that share.
    `seconds` is all the time measured, `lost` the part of it by which trials, and rounds that were too slow, took
    longer than the choice known to be faster would have taken for as many tokens.
    """

    def __init__(self, policy: GammaPolicy) -> None:
        self.policy = policy
        self._times: dict[tuple[bool, int], Times] = {}
        self._kept, self._tried = policy.acceptance * _MEMORY_TOKENS / 8, _MEMORY_TOKENS / 8
        self._drafted = False
        self.seconds = self.lost = 0.0

    @property
    def acceptance(self) -> float:
        """Probability that a new request's draft is accepted, given that those before it in the round were."""
        return self._kept / self._tried

    def rate(self, request: Request) -> float:
        """Probability that the request's draft is accepted, given that those before it in the round were."""
        state = request.drafts
        tried = state.kept + state.missed + _PRIOR_TOKENS
        return min((state.kept + _PRIOR_TOKENS * self.acceptance) / tried, _MAX_ACCEPTANCE)

    def choose(self, requests: Sequence[Request], whole: bool) -> Choice:
        """What requests that are all decoding run next; `whole`: many steps or rounds are one call."""
        times = self.times(requests, whole)
        if not times.plain or not times.costs.rounds:
            return Choice(0)
        rate = sum(map(self.rate, requests)) / len(requests)
        tokens = {gamma: times.yields * expected(rate, gamma) for gamma in times.costs.rounds}
        plain, rounds = times.costs.plain, times.costs.rounds
        gains = {gamma: math.log(tokens[gamma] * plain / rounds[gamma]) - times.pace.rounds(gamma) for gamma in rounds}
        best, before = max(gains, key=lambda gamma: gains[gamma]), times.gamma
        if before and gains[best] < gains[before] + _MIN_GAIN:
            best = before
        if gains[best] <= (0.0 if before else _MIN_GAIN):
            times.gamma = 0
            return _rounds_trial(times, tokens, gains) or Choice(0)
        times.gamma, times.gain = best, math.exp(gains[best])
        if not before:  # few at first, should they be slower than expected
            return Choice(best, _few_rounds(times, best))
        return _plain_trial(times, gains[best]) or _gamma_trial(times, gains) or Choice(best)

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

    def times(self, requests: Sequence[Request], whole: bool) -> Times:
        """The measurements for about this many requests. How costs depend on the context is taken from the table."""
        batch, context = len(requests), max(len(request.tokens) for request in requests)
        key, place = (whole, batch if batch <= 4 else 4 + batch.bit_length()), (batch, context // 16)
        found = self._times.get(key)
        if found is None or found.place != place:
            costs = self.policy.costs(batch, context)
            if found is None:
                found = self._times[key] = Times(costs, place, Pace(costs.rounds))
            found.costs, found.place = costs, place
        return found

    def stepped(self, requests: Sequence[Request], whole: bool, steps: int, seconds: float) -> None:
        """Note a call of plain steps that took `seconds`."""
        times = self.times(requests, whole)
        times.stepped(steps, _net_seconds(seconds, whole))
        for request in requests:
            request.drafts.kept *= _STEP_DECAY**steps
            request.drafts.missed *= _STEP_DECAY**steps
        self.seconds += seconds
        if times.gamma:  # a trial
            loss = seconds * (1 - 1 / times.gain)
            times.purse -= loss
            self.lost += loss
        times.save(seconds)

    def drafted(
        self, requests: Sequence[Request], whole: bool, gamma: int, rounds: int, seconds: float, tokens: float
    ) -> None:
        """Note a call of rounds that took `seconds` and gave `tokens` per request.

        The time of the very first call is not measured: it includes the first use of the draft path.
        """
        times = self.times(requests, whole)
        loss = max(0.0, seconds - tokens * times.plain) if times.plain else 0.0
        self.seconds += seconds
        self.lost += loss
        if not self._drafted:
            self._drafted = True
            return
        times.drafted(gamma, rounds, _net_seconds(seconds, whole), tokens)
        found = tokens / rounds / expected(sum(map(self.rate, requests)) / len(requests), gamma)
        times.yields += _YIELD_RATE * (min(max(found, 1 / _MAX_YIELD), _MAX_YIELD) - times.yields)
        if gamma != times.gamma:  # a trial
            times.purse -= loss
        times.save(seconds)

    def finished(self, metrics: SpeculationMetrics) -> None:
        """Add the drafts of a request that has ended to the acceptance expected of new ones."""
        kept = sum(metrics.accepted)
        tried = sum(min(*pair) for pair in zip([metrics.rounds, *metrics.accepted], metrics.drafted, strict=False))
        fade = max(0.0, 1 - tried / _MEMORY_TOKENS)
        self._kept, self._tried = fade * self._kept + kept, fade * self._tried + tried


def _net_seconds(seconds: float, whole: bool) -> float:
    """Time of a call's steps or rounds, without the call's own overhead."""
    return max(seconds - _CALL_OVERHEAD, seconds / 2, _MIN_SECONDS) if whole else max(seconds, _MIN_SECONDS)


def _plain_trial(times: Times, gain: float) -> Choice | None:
    """A trial of plain steps while rounds are in use, if it is due: they may be faster, or too little is known."""
    doubt, loss = times.doubt(times.gamma), times.plain * (1 - 1 / times.gain)
    paid = gain < _OPTIMISM * doubt and _PLAIN_TRIAL_STEPS * loss <= times.purse
    if times.plain_age < _PLAIN_INTERVAL or not (paid or doubt > _MAX_DOUBT):
        return None
    return Choice(0, _PLAIN_TRIAL_STEPS)


def _gamma_trial(times: Times, gains: dict[int, float]) -> Choice | None:
    """A trial of another gamma than the one in use, if it is due and one may be better by a margin."""
    if times.look_age < _LOOK_INTERVAL:
        return None
    hopes = {gamma: gain + times.pace.apart(gamma, times.gamma) for gamma, gain in gains.items()}
    best = max(hopes, key=lambda gamma: hopes[gamma])
    if hopes[best] < gains[times.gamma] + _MIN_GAIN:
        return None
    times.look_age = 0
    return Choice(best)


def _rounds_trial(times: Times, tokens: dict[int, float], gains: dict[int, float]) -> Choice | None:
    """A trial of rounds while plain steps are in use.

    Takes the best gamma that may be better than plain steps and whose trial the purse covers. Rounds that were never
    measured are tried once whatever their expected gain, as soon as the purse covers one.
    """
    for gamma in sorted(gains, key=lambda gamma: -gains[gamma]):
        doubt, few = times.doubt(gamma), _few_rounds(times, gamma)
        believed, enough = (doubt, min(few, _MIN_TRIAL_ROUNDS)) if times.tried else (0.0, 1)
        loss = times.plain * (times.cost(gamma) * math.exp(-believed) - tokens[gamma])
        if (gains[gamma] + _OPTIMISM * doubt > _MIN_GAIN or not times.tried) and enough * loss <= times.purse:
            return Choice(gamma, max(enough, min(few, int(times.purse / loss))) if loss > 0 else few)
    return None


def _few_rounds(times: Times, gamma: int) -> int:
    return max(1, int(_MAX_TRIAL_STEPS / times.cost(gamma)))


def expected(rate: float, gamma: int) -> float:
    """Tokens that a round of gamma drafts gives on average, each accepted with probability `rate` below 1."""
    return (1 - rate ** (gamma + 1)) / (1 - rate)


def best(costs: Costs, rate: float) -> int:
    """The gamma with the most tokens per second for drafts accepted at `rate`; 0 if none beats plain steps clearly."""
    speeds = {
        gamma: expected(min(rate, _MAX_ACCEPTANCE), gamma) / seconds for gamma, seconds in costs.rounds.items() if gamma
    }
    gamma = max(speeds, key=lambda g: speeds[g], default=0)
    return gamma if gamma and speeds[gamma] * costs.plain > math.exp(_MIN_GAIN) else 0


def observe(request: Request, kept: int, missed: int) -> None:
    """Note the drafts accepted since the last call, and the rounds that ended with a rejection."""
    state = request.drafts
    state.kept = state.kept * _CALL_DECAY + kept
    state.missed = state.missed * _CALL_DECAY + missed


def predicted(target_bytes: int, draft_bytes: int) -> GammaPolicy:
    """A table before any measurement: a step takes as long as reading its weights (bytes; 0 for a lookup)."""
    rounds = {gamma: gamma * draft_bytes / target_bytes + 1 + _ROW_COST * gamma for gamma in GAMMAS}
    return GammaPolicy((Costs(1, 1, 1.0, rounds),), 0.7 if draft_bytes else 0.4)
