"""How many tokens to draft: what a round costs against what a request's rounds bring, measured as the engine runs.

A round of gamma drafts gives on average (1 - a^(gamma + 1)) / (1 - a) tokens where each draft is accepted with
probability a (Leviathan et al. 2023, 2.2). The gamma with the most tokens a second wins, and 0, which is plain
decoding, unless another wins clearly. What a round takes in plain steps comes from `qcompile tune`, or before that
from bytes, and from then on from the rounds and steps that are made (runtime/pace.py). What is not done is tried
where what is known of it leaves room for it to be better, and seldom enough to cost little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from qcompile.runtime.pace import Pace

if TYPE_CHECKING:
    from qcompile.runtime.outputs import SpeculationMetrics
    from qcompile.runtime.scheduler import Request

AUTO = -1
"""As gamma: chosen for each step as it goes."""

GAMMAS = (1, 2, 3, 4, 5, 6, 7, 8)
"""What is measured, and chosen from."""

_ROW = 0.05
"""Predicted: a further row of a step costs this much of the first, for arithmetic."""

_CLEARLY = 0.02
"""How much more must be expected of something else than of what is done now; a logarithm, as all gains."""

_DOUBT = 1.0
"""Standard deviations by which something may be better than is known of it."""

_STILL = 0.05
"""How far plain steps' time moves with any text."""

_LOST = 0.35
"""Standard deviation of the gain from which on it has to be found anew."""

_PRIOR_TOKENS = 8.0
"""Weight of the acceptance found with other requests, in drafted tokens of the request's own."""

_MEMORY_TOKENS = 512.0
"""Drafted tokens of earlier requests that the acceptance to expect goes by."""

_FORGET = 0.9
"""What older rounds of a request still count after each call: text changes as it goes on."""

_FORGET_STEP = 0.5 ** (1 / 48)
"""Likewise after a plain step: how the text goes on is not seen."""

_SURE = 0.995
"""The best acceptance there is taken to be."""

_SELDOM = 0.1
"""Among several requests none drafts a token that is less likely than this to be kept."""

_FOLLOW, _MOST_YIELD = 0.05, 3.0
"""How far what rounds yield moves with a call, and the most that is believed of one."""

_LOOK = 48
"""Tokens at least between two looks at another gamma."""

_CALM = 24
"""Tokens at least between two plain trials."""

_FEW = 6
"""Plain steps that tell enough: more in one call would tell little more, as they share most of its noise."""

_CALL = 1.5e-4
"""Seconds of a call of many steps or rounds that are not theirs: other threads wake, Python comes and goes."""

_INSTANT = 1e-9
"""What a call takes at least: clocks have steps."""
_ENOUGH = 2
"""Rounds that tell enough."""

_TRIAL = 12.0
"""Plain steps' worth of time that rounds are tried for at once: should they be far slower than they were."""

_BUDGET = 0.01
"""Share of the time that trials may cost."""

_PURSE = 3.0
"""Plain steps' worth of time that is saved up for trials at most."""


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

    def towards(self, other: Costs, context: int) -> Costs:
        """On the straight line from this entry to another of a longer context."""
        part = (context - self.context) / (other.context - self.context)
        rounds = {gamma: seconds + part * (other.rounds[gamma] - seconds) for gamma, seconds in self.rounds.items()}
        return Costs(self.batch, context, self.plain + part * (other.plain - self.plain), rounds)


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
        """At the number of requests measured that is nearest; contexts between two measured are between the two."""
        nearest = min((entry.batch for entry in self.table), key=lambda measured: abs(math.log(measured / batch)))
        entries = sorted((entry for entry in self.table if entry.batch == nearest), key=_context)
        for before, after in pairwise(entries):
            if before.context < context < after.context:
                return before.towards(after, context)
        return max((entry for entry in entries if entry.context <= context), key=_context, default=entries[0])


def _context(costs: Costs) -> int:
    return costs.context


class Choice(NamedTuple):
    """What to do next: rounds of `gamma` drafts (0: plain steps), and the most of them where it is a trial."""

    gamma: int
    most: int | None = None


@dataclass(slots=True)
class Times:
    """What steps and rounds take at one kind of work, followed as they are made. The ages count tokens of a request."""

    costs: Costs
    """Of the table, for the requests at hand."""
    place: tuple[int, int]
    """How many they are, and how long in sixteens."""
    pace: Pace
    plain: float = 0.0
    """A plain step's seconds, 0 before the first."""
    tried: bool = False
    """Whether rounds were made."""
    compared: float = 0.0
    """What was known of plain steps when steps came after rounds or rounds after steps."""
    plain_age: int = 0
    look_age: int = 0
    purse: float = 0.0
    gamma: int = 0
    """Of the last call that was no trial."""
    gain: float = 1.0
    """How many times as fast as plain decoding that was expected to be."""
    yields: float = 1.0
    """Tokens of rounds over what acceptance lets expect: a lookup may propose more than gamma."""

    def cost(self, gamma: int) -> float:
        """Plain steps' worth of time that a round takes."""
        return math.exp(self.pace.rounds(gamma)) * self.costs.rounds[gamma] / self.costs.plain

    def doubt(self, gamma: int) -> float:
        """Standard deviation of the gain of rounds; what has moved since these were compared adds to it."""
        return self.pace.doubt(gamma) + max(0.0, abs(self.pace.plain - self.compared) - _STILL)

    def stepped(self, steps: int, seconds: float) -> None:
        """Plain steps took `seconds` by themselves."""
        self.pace.stepped(math.log(seconds / steps / self.costs.plain), steps)
        self._passed(steps)
        if self.plain_age:
            self.compared = self.pace.plain
        self.plain_age = 0

    def drafted(self, gamma: int, rounds: int, seconds: float, tokens: float) -> None:
        """Rounds took `seconds` by themselves; `tokens` came of them for a request."""
        if gamma in self.costs.rounds and self.plain:
            self.tried = True
            self.pace.rounded(gamma, math.log(seconds / rounds / self.costs.rounds[gamma]), rounds)
            self._passed(tokens)
            if not self.plain_age:
                self.compared = self.pace.plain
        self.plain_age += round(tokens)

    def _passed(self, tokens: float) -> None:
        self.pace.passed(tokens)
        self.look_age += round(tokens)
        self.plain = self.costs.plain * math.exp(self.pace.plain)

    def save(self, seconds: float) -> None:
        """Put a share of `seconds` into the purse."""
        most = _PURSE * self.plain
        self.purse = min(max(self.purse, -most) + _BUDGET * seconds, most)


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
        if not times.plain or not times.costs.rounds:
            return Choice(0)
        rate = sum(map(self.rate, requests)) / len(requests)
        tokens = {gamma: times.yields * expected(rate, gamma) for gamma in times.costs.rounds}
        plain, rounds = times.costs.plain, times.costs.rounds
        gains = {gamma: math.log(tokens[gamma] * plain / rounds[gamma]) - times.pace.rounds(gamma) for gamma in rounds}
        best, before = max(gains, key=lambda gamma: gains[gamma]), times.gamma
        if before and gains[best] < gains[before] + _CLEARLY:
            best = before
        if gains[best] <= (0.0 if before else _CLEARLY):
            times.gamma = 0
            return _rounds_trial(times, tokens, gains) or Choice(0)
        times.gamma, times.gain = best, math.exp(gains[best])
        if not before:  # carefully
            return Choice(best, _few_rounds(times, best))
        return _plain_trial(times, gains[best]) or _look(times, gains) or Choice(best)

    def each(self, requests: Sequence[Request], gamma: int) -> list[int]:
        """How many of `gamma` drafts each of the requests takes."""
        if len(requests) == 1 or not gamma:
            return [gamma] * len(requests)
        rates = map(self.rate, requests)
        return [max(1, min(gamma, int(math.log(_SELDOM) / math.log(rate)))) if rate > _SELDOM else 1 for rate in rates]

    def times(self, requests: Sequence[Request], whole: bool) -> Times:
        """What is known of about so many requests; how times depend on the context, the table knows."""
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
        """Plain steps took `seconds` in all."""
        times = self.times(requests, whole)
        times.stepped(steps, _own(seconds, whole))
        for request in requests:
            request.drafts.kept *= _FORGET_STEP**steps
            request.drafts.missed *= _FORGET_STEP**steps
        self.seconds += seconds
        if times.gamma:  # a trial
            loss = seconds * (1 - 1 / times.gain)
            times.purse -= loss
            self.lost += loss
        times.save(seconds)

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
        times.drafted(gamma, rounds, _own(seconds, whole), tokens)
        found = tokens / rounds / expected(sum(map(self.rate, requests)) / len(requests), gamma)
        times.yields += _FOLLOW * (min(max(found, 1 / _MOST_YIELD), _MOST_YIELD) - times.yields)
        if gamma != times.gamma:  # a trial
            times.purse -= loss
        times.save(seconds)

    def finished(self, metrics: SpeculationMetrics) -> None:
        """A request has ended: how many of its drafts were kept tells of the next ones."""
        kept = sum(metrics.accepted)
        tried = sum(min(*pair) for pair in zip([metrics.rounds, *metrics.accepted], metrics.drafted, strict=False))
        fade = max(0.0, 1 - tried / _MEMORY_TOKENS)
        self._kept, self._tried = fade * self._kept + kept, fade * self._tried + tried


def _own(seconds: float, whole: bool) -> float:
    """What steps or rounds took by themselves of a call's time."""
    return max(seconds - _CALL, seconds / 2, _INSTANT) if whole else max(seconds, _INSTANT)


def _plain_trial(times: Times, gain: float) -> Choice | None:
    """Plain steps amid rounds, if it is time: where nothing is known any more, or where they may be faster."""
    doubt, loss = times.doubt(times.gamma), times.plain * (1 - 1 / times.gain)
    paid = gain < _DOUBT * doubt and _FEW * loss <= times.purse
    if times.plain_age < _CALM or not (paid or doubt > _LOST):
        return None
    return Choice(0, _FEW)


def _look(times: Times, gains: dict[int, float]) -> Choice | None:
    """Rounds of another gamma than the one in use, if they may be clearly better."""
    if times.look_age < _LOOK:
        return None
    hopes = {gamma: gain + times.pace.apart(gamma, times.gamma) for gamma, gain in gains.items()}
    best = max(hopes, key=lambda gamma: hopes[gamma])
    if hopes[best] < gains[times.gamma] + _CLEARLY:
        return None
    times.look_age = 0
    return Choice(best)


def _rounds_trial(times: Times, tokens: dict[int, float], gains: dict[int, float]) -> Choice | None:
    """Rounds amid plain steps: of the best gamma of which enough can be paid for, if they may be better, or once."""
    for gamma in sorted(gains, key=lambda gamma: -gains[gamma]):
        doubt, few = times.doubt(gamma), _few_rounds(times, gamma)
        believed, enough = (doubt, min(few, _ENOUGH)) if times.tried else (0.0, 1)
        loss = times.plain * (times.cost(gamma) * math.exp(-believed) - tokens[gamma])
        if (gains[gamma] + _DOUBT * doubt > _CLEARLY or not times.tried) and enough * loss <= times.purse:
            return Choice(gamma, max(enough, min(few, int(times.purse / loss))) if loss > 0 else few)
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
    return gamma if gamma and speeds[gamma] * costs.plain > math.exp(_CLEARLY) else 0


def observe(request: Request, kept: int, missed: int) -> None:
    """Note the drafts accepted and the rounds that ended in a rejection since the last call."""
    state = request.drafts
    state.kept = state.kept * _FORGET + kept
    state.missed = state.missed * _FORGET + missed


def predicted(target_bytes: int, draft_bytes: int) -> GammaPolicy:
    """A table before any measurement: a step takes as long as its weights (bytes; 0 for a lookup) take to be read."""
    rounds = {gamma: gamma * draft_bytes / target_bytes + 1 + _ROW * gamma for gamma in GAMMAS}
    return GammaPolicy((Costs(1, 1, 1.0, rounds),), 0.7 if draft_bytes else 0.4)
