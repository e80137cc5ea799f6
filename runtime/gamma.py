"""How many tokens to draft: what a round costs against what a request's rounds bring, measured as the engine runs.

A round of gamma drafts gives on average (1 - a^(gamma + 1)) / (1 - a) tokens where each draft is accepted with
probability a (Leviathan et al. 2023, 2.2). The gamma with the most tokens a second wins, and 0, which is plain
decoding, unless another wins clearly. What a round takes in plain steps comes from `qcompile tune`, or before that
from bytes, and from then on from the rounds and steps that are made: the same artifact may find its cores sharing a
cache or not, or memory that others use, and that changes from minute to minute.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from qcompile.runtime.outputs import SpeculationMetrics
    from qcompile.runtime.scheduler import Request

AUTO = -1
"""As gamma: chosen for each step as it goes."""

GAMMAS = (1, 2, 3, 4, 5, 6, 7, 8)
"""What is measured, and chosen from."""

_ROW = 0.05
"""Predicted: a further row of a step costs this much of the first, for arithmetic."""

_CLEARLY = 1.03
"""How much faster than what is done now something else must look to be done instead."""

_PRIOR_TOKENS = 6.0
"""Weight of the acceptance found with other requests, in drafted tokens of the request's own."""

_MEMORY_TOKENS = 512.0
"""Drafted tokens of earlier requests that the acceptance to expect goes by."""

_FORGET = 0.9
"""What older rounds of a request still count after each call: text changes as it goes on."""

_SURE = 0.995
"""The best acceptance there is taken to be."""

_SELDOM = 0.1
"""Among several requests none drafts a token that is less likely than this to be kept."""

_CALLS = 5
"""Calls whose median a time is: one that was held up, because the machine was busy elsewhere, tells nothing."""

_HELD_UP = 1.5
"""Steps amid rounds are not taken to be slower than this, against what rounds tell, by one call."""

_FOLLOW, _MOST_YIELD = 0.05, 3.0
"""How far what rounds yield moves with a call, and the most that is believed of one."""

_FRESH = 64
"""Tokens for which a time is taken to be that of here and now."""

_COMPARE, _LOOK = 128, 256
"""Tokens after which plain steps are compared with rounds again; a gamma with the ones beside it."""

_CALM, _CALMEST = 24, 512
"""Tokens between two trials at least; of rounds twice as many after each that did not show them to be better."""

_SURPRISE = 1.2
"""Rounds that take so much longer than when they were compared are compared at once."""

_TRIAL = 12.0
"""Plain steps' worth of time that rounds are tried for at once: should they be far slower than they were."""

_NEAR = 0.9
"""Where the best gamma seems slower than this part of plain decoding, or long ago, the smallest is tried first."""

_FADE = 0.98
"""What was too slow to be tried again is taken to be a little less so with each call: that it was may be long ago."""

_FEW = 4
"""Plain steps that tell enough."""

_BUDGET = 0.015
"""Share of the time that trials may cost."""

_PURSE = 4.0
"""Plain steps' worth of time that is saved up for trials at most: 3 % of an answer of 128 tokens."""


@dataclass(frozen=True)
class Costs:
    """Seconds of a plain step and of a round by its gamma, at so many requests of about so many tokens."""

    batch: int
    context: int
    plain: float
    rounds: dict[int, float]

    @staticmethod
    def from_json(item: dict[str, Any]) -> Costs:
        """One entry of the manifest's table."""
        rounds = {int(gamma): float(seconds) for gamma, seconds in item["rounds"].items()}
        return Costs(item["batch"], item["context"], float(item["plain"]), rounds)


@dataclass(frozen=True)
class GammaPolicy:
    """What to expect before anything was measured here: `table` of times, and how likely a draft is accepted."""

    table: tuple[Costs, ...]
    acceptance: float

    @staticmethod
    def load(tuned: dict[str, Any]) -> GammaPolicy:
        """What `qcompile tune` left in the manifest."""
        return GammaPolicy(tuple(Costs.from_json(item) for item in tuned["table"]), float(tuned["acceptance"]))

    def costs(self, batch: int, context: int) -> Costs:
        """The entry measured nearest to so many requests, then to such a context."""

        def distance(entry: Costs) -> tuple[float, float]:
            return abs(math.log(entry.batch / batch)), abs(math.log((entry.context + 1) / (context + 1)))

        return min(self.table, key=distance)


class Choice(NamedTuple):
    """What to do next: rounds of `gamma` drafts (0: plain steps), and the most of them where it is a trial."""

    gamma: int
    most: int | None = None


@dataclass(slots=True)
class Times:
    """What steps and rounds take at one kind of work, followed as they are made.

    `plain` is a plain step's seconds, 0 before the first. `measured` has what rounds took, by gamma, in plain steps
    made shortly before or after. Where rounds follow rounds, `unit` is what a plain step's seconds are by them now.
    The ages count tokens of a request.
    """

    costs: Costs
    """Of the table, for the requests at hand."""
    place: tuple[int, int] = 0, 0
    """How many they are, and how long in powers of two."""
    plain: float = 0.0
    unit: float = 0.0
    measured: dict[int, deque[float]] = field(default_factory=dict)
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=_CALLS))
    """Seconds of a step in the last calls, whose median `plain` is; `units`: likewise of `unit`."""
    units: deque[float] = field(default_factory=lambda: deque(maxlen=_CALLS))
    plain_age: int = 0
    rounds_age: int = 0
    trial_age: int = 0
    look_age: int = 0
    calm: int = _CALM
    """Tokens until rounds may be tried again."""
    settled: float = 0.0
    """The acceptance at which plain decoding was found to be better, and nothing has been learned since."""
    purse: float = 0.0
    gamma: int = 0
    """Of the last call that was no trial; `gain`: tokens a second it was expected to give, over plain decoding's."""
    gain: float = 1.0
    side: int = 1
    yields: float = 1.0
    """Tokens of rounds over what acceptance lets expect: a lookup may propose more than gamma."""
    doubt: float = 1.0
    """How much of what rounds were measured to cost is believed."""

    def cost(self, gamma: int) -> float:
        """Plain steps' worth of time that a round takes: as measured, or by how wrong the table is beside it."""
        if gamma in self.measured:
            return median_low(self.measured[gamma])
        below = max((known for known in self.measured if known < gamma), default=None)
        above = min((known for known in self.measured if known > gamma), default=None)
        if below is None or above is None:
            known = below if above is None else above
            wrong = 1.0 if known is None else self._wrong(known)
        else:
            wrong = self._wrong(below) + (self._wrong(above) - self._wrong(below)) * (gamma - below) / (above - below)
        return wrong * self.costs.rounds[gamma] / self.costs.plain

    def _wrong(self, gamma: int) -> float:
        return median_low(self.measured[gamma]) * self.costs.plain / self.costs.rounds[gamma]

    def step(self, seconds: float, steps: int) -> None:
        """Plain steps took so long each."""
        stale = self.plain_age > _FRESH
        if stale:  # what slowed the rounds since slowed steps too
            _restart(self.steps, self.unit)
            seconds = min(seconds, _HELD_UP * self.unit)
        self.steps.append(seconds)
        self.plain = median(self.steps)
        if stale and self.units:
            self._scale(median(self.units) / self.plain)
        self.units.clear()
        self.plain_age = 0
        self.rounds_age += steps
        self._pass(steps)

    def round(self, gamma: int, seconds: float, tokens: int) -> None:
        """Rounds took so long each; `tokens` came of them for a request."""
        if gamma not in self.costs.rounds or not self.plain:
            return
        known = gamma in self.measured
        if self.plain_age <= _FRESH:
            before, times = self.cost(gamma), self.measured.setdefault(gamma, deque(maxlen=_CALLS))
            if self.rounds_age > _FRESH and known:
                _restart(times, before)
            times.append(seconds / self.plain)
            if known:  # a gamma that is known tells of the others
                self._scale(self.cost(gamma) / before, besides=gamma)
        elif gamma != self.gamma or not known:
            self.measured.setdefault(gamma, deque(maxlen=_CALLS)).append(seconds / self.unit)
        if gamma == self.gamma or not self.units:
            self.units.append(seconds / self.cost(gamma))
            self.unit = median(self.units)
        self.rounds_age, self.doubt = 0, 1.0
        self.plain_age += tokens
        self._pass(tokens)

    def _pass(self, tokens: int) -> None:
        self.trial_age += tokens
        self.look_age += tokens

    def _scale(self, factor: float, besides: int = 0) -> None:
        for gamma, times in self.measured.items():
            if gamma != besides:
                self.measured[gamma] = deque((factor * time for time in times), maxlen=_CALLS)

    @property
    def surprising(self) -> bool:
        """Whether rounds have become slower since they were compared with plain steps."""
        return len(self.units) == _CALLS and self.unit > _SURPRISE * self.plain


def _restart(times: deque[float], known: float) -> None:
    """Begin anew with what is known."""
    times.clear()
    times.append(known)


class Tempo:
    """Chooses gamma step by step, by what steps and rounds have taken so far.

    Now and then it tries what it does not do, to see whether that has become better. What a trial is expected to
    lose is paid from a purse into which a fixed share of the time goes, so trials never cost more than that share.
    Of all the `seconds` it has been told of, `lost` are those that trials, and rounds that were too slow, took longer
    than what was known to be faster would have for as many tokens.
    """

    def __init__(self, policy: GammaPolicy) -> None:
        self.policy = policy
        self._times: dict[tuple[bool, int], Times] = {}
        self._kept, self._tried = policy.acceptance * _MEMORY_TOKENS / 8, _MEMORY_TOKENS / 8
        self._drafted = False
        self.seconds = self.lost = 0.0

    @property
    def acceptance(self) -> float:
        """How likely a draft of a new request is to be accepted, where those before it were."""
        return self._kept / self._tried

    def rate(self, request: Request) -> float:
        """How likely a draft of the request is to be accepted, where those before it were."""
        state = request.drafts
        tried = state.kept + state.missed + _PRIOR_TOKENS
        return min((state.kept + _PRIOR_TOKENS * self.acceptance) / tried, _SURE)

    def choose(self, requests: Sequence[Request], whole: bool) -> Choice:
        """What requests that are all decoding do next; `whole`: in calls of many steps or rounds."""
        times = self.times(requests, whole)
        rate = sum(map(self.rate, requests)) / len(requests)
        if not times.plain or (rate <= times.settled and times.trial_age < times.calm):
            return Choice(0)
        times.settled = 0.0
        tokens = {gamma: times.yields * expected(rate, gamma) for gamma in times.costs.rounds}
        gains = {gamma: tokens[gamma] / times.cost(gamma) for gamma in tokens if gamma}
        best = max(gains, key=lambda gamma: gains[gamma], default=0)
        if not best:
            return Choice(0)
        if times.gamma in gains and gains[best] < _CLEARLY * gains[times.gamma]:
            best = times.gamma
        if gains[best] > (1.0 if times.gamma else _CLEARLY):
            before = times.gamma
            times.gamma, times.gain = best, max(1.0, gains[best])
            if not before:  # carefully
                times.calm = _CALM
                return Choice(best, _few_rounds(times, best))
            if best != before:  # what lies further on may be better still
                times.side, times.look_age = 1 if best < before else -1, _LOOK
            return _plain_trial(times, gains[best]) or _look(times, gains) or Choice(best)
        times.gamma, times.settled = 0, rate
        return _rounds_trial(times, tokens, best) or Choice(0)

    def each(self, requests: Sequence[Request], gamma: int) -> list[int]:
        """How many of `gamma` drafts each of the requests takes."""
        if len(requests) == 1 or not gamma:
            return [gamma] * len(requests)
        rates = map(self.rate, requests)
        return [max(1, min(gamma, int(math.log(_SELDOM) / math.log(rate)))) if rate > _SELDOM else 1 for rate in rates]

    def times(self, requests: Sequence[Request], whole: bool) -> Times:
        """What is known of about so many requests; how times depend on the context, the table knows."""
        batch, context = len(requests), max(len(request.tokens) for request in requests)
        key = whole, batch if batch <= 4 else 4 + batch.bit_length()
        found = self._times.get(key)
        if found is None or found.place != (batch, context.bit_length()):
            costs = self.policy.costs(batch, context)
            found = self._times.setdefault(key, Times(costs))
            found.costs, found.place = costs, (batch, context.bit_length())
        return found

    def stepped(self, requests: Sequence[Request], whole: bool, steps: int, seconds: float) -> None:
        """Plain steps took `seconds` in all."""
        times = self.times(requests, whole)
        times.step(seconds / steps, steps)
        self.seconds += seconds
        if times.gamma:  # a trial
            loss = seconds * (1 - 1 / times.gain)
            times.purse -= loss
            self.lost += loss
        _save(times, seconds)

    def drafted(
        self, requests: Sequence[Request], whole: bool, gamma: int, rounds: int, seconds: float, tokens: float
    ) -> None:
        """Rounds took `seconds` in all and gave so many tokens a request. The very first also woke what drafts."""
        times = self.times(requests, whole)
        loss = max(0.0, seconds - tokens * times.plain) if times.plain else 0.0
        self.seconds += seconds
        self.lost += loss
        if not self._drafted:
            self._drafted = True
            return
        times.round(gamma, seconds / rounds, round(tokens))
        found = tokens / rounds / expected(sum(map(self.rate, requests)) / len(requests), gamma)
        times.yields += _FOLLOW * (min(max(found, 1 / _MOST_YIELD), _MOST_YIELD) - times.yields)
        if gamma != times.gamma:  # a trial
            times.purse -= loss
        _save(times, seconds)

    def finished(self, metrics: SpeculationMetrics) -> None:
        """A request has ended: how many of its drafts were kept tells of the next ones."""
        kept = sum(metrics.accepted)
        tried = sum(min(*pair) for pair in zip([metrics.rounds, *metrics.accepted], metrics.drafted, strict=False))
        fade = max(0.0, 1 - tried / _MEMORY_TOKENS)
        self._kept, self._tried = fade * self._kept + kept, fade * self._tried + tried


def _save(times: Times, seconds: float) -> None:
    most = _PURSE * times.plain
    times.purse = min(max(times.purse, -most) + _BUDGET * seconds, most)


def _plain_trial(times: Times, gain: float) -> Choice | None:
    """Plain steps amid rounds, if it is time and they can be paid for."""
    loss = times.plain * (1 - 1 / gain)
    paid = times.plain_age >= _COMPARE and loss <= times.purse
    if times.trial_age < _CALM or not (paid or times.surprising):
        return None
    times.trial_age = 0
    return Choice(0, max(_FEW, int(times.purse / loss)) if loss > 0 else None)


def _look(times: Times, gains: dict[int, float]) -> Choice | None:
    """Rounds of a gamma beside the one in use."""
    if times.look_age < _LOOK or times.trial_age < _CALM:
        return None
    times.side, times.look_age, times.trial_age = -times.side, 0, 0
    beside = times.gamma + times.side
    return Choice(beside) if beside in gains else None


def _rounds_trial(times: Times, tokens: dict[int, float], best: int) -> Choice | None:
    """Rounds amid plain steps, if it is time and they can be paid for: of the best gamma, or of the cheapest."""
    if times.trial_age < times.calm:
        return None
    near = tokens[best] > _NEAR * times.cost(best) and times.rounds_age < _LOOK
    for gamma in (best, min(times.costs.rounds))[not near :]:
        loss = times.plain * (times.doubt * times.cost(gamma) - tokens[gamma])
        if loss <= times.purse:
            times.trial_age, times.settled = 0, 0.0
            times.calm = min(2 * times.calm, _CALMEST)  # until rounds are made again
            few = _few_rounds(times, gamma)
            return Choice(gamma, max(1, min(few, int(times.purse / loss))) if loss > 0 else few)
    if times.purse >= _PURSE * times.plain:
        times.doubt *= _FADE
    return None


def _few_rounds(times: Times, gamma: int) -> int:
    return max(1, int(_TRIAL / times.cost(gamma)))


def expected(rate: float, gamma: int) -> float:
    """Tokens that a round of gamma drafts gives on average, each accepted at `rate` below 1."""
    return (1 - rate ** (gamma + 1)) / (1 - rate)


def best(costs: Costs, rate: float) -> int:
    """The gamma with the most tokens a second when drafts are accepted at `rate`, 0 where none is clearly better."""
    speeds = {gamma: expected(min(rate, _SURE), gamma) / seconds for gamma, seconds in costs.rounds.items() if gamma}
    gamma = max(speeds, key=lambda g: speeds[g], default=0)
    return gamma if gamma and speeds[gamma] * costs.plain > _CLEARLY else 0


def observe(request: Request, kept: int, missed: int) -> None:
    """Note the drafts accepted and the rounds that ended in a rejection since the last call."""
    state = request.drafts
    state.kept = state.kept * _FORGET + kept
    state.missed = state.missed * _FORGET + missed


def predicted(target_bytes: int, draft_bytes: int) -> GammaPolicy:
    """A table before any measurement: a step takes as long as its weights (bytes; 0 for a lookup) take to be read."""
    rounds = {gamma: gamma * draft_bytes / target_bytes + 1 + _ROW * gamma for gamma in GAMMAS}
    return GammaPolicy((Costs(1, 1, 1.0, rounds),), 0.7 if draft_bytes else 0.4)
