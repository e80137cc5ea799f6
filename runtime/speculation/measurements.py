"""Measured cost of steps and rounds for one kind of work, and the trials of choices that are not in use.

A trial runs a choice that is not in use, to see whether it has become better. A fixed share of the time goes into an
exploration budget, from which the expected loss of a trial is paid, so that trials never cost more than that share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from qcompile.runtime.speculation.costs import MIN_GAIN, RoundCosts
from qcompile.runtime.speculation.latency import LatencyModel

_OPTIMISM = 1.0
"""Standard deviations that are added to an expected gain to decide whether a trial is worthwhile."""

_PLAIN_JITTER = 0.05
"""Change of the logarithm of plain steps' time that occurs with any text, and so tells nothing about the machine."""

_MAX_DEVIATION = 0.35
"""Standard deviation of the gain above which plain steps are tried even if the budget does not cover it."""

_LOOK_INTERVAL = 48
"""Fewest tokens between two trials of another gamma."""

_PLAIN_INTERVAL = 24
"""Fewest tokens between two trials of plain steps."""

_PLAIN_TRIAL_STEPS, _PLAIN_TRIAL_SECONDS = 6, 3e-3
"""Steps of a trial of plain decoding, more where these take less than 3 ms: a shorter call is mostly its own overhead.
Further steps would add little, as they share most of a call's noise."""

_MIN_TRIAL_ROUNDS = 2
"""Rounds that the budget must cover before a further trial of rounds."""

_MAX_TRIAL_STEPS = 12.0
"""Longest trial of rounds, in plain steps' time: rounds may have become far slower since they were last measured."""

TRIAL_SHARE = 0.01
"""Share of the time that trials may cost."""

_MAX_BUDGET = 0.5
"""Most time in the budget, in trials of plain decoding."""

_CALL_OVERHEAD = 1.5e-4
"""Seconds of a call of many steps or rounds that are not spent in them: waking threads, entering and leaving Python."""

_MIN_SECONDS = 1e-9
"""Least time of a call: clocks have a finite resolution."""


class GammaChoice(NamedTuple):
    """What to run next: rounds of `gamma` drafts, or plain steps if it is 0. `most` limits how many in a trial."""

    gamma: int
    most: int | None = None


@dataclass(slots=True)
class Measurements:
    """Measured cost of steps and rounds for one kind of work. The ages count tokens of a request."""

    costs: RoundCosts
    """The prior's costs for the current requests."""
    place: tuple[int, int]
    """Number of requests and longest context in units of 16 tokens, for which `costs` was looked up."""
    latency: LatencyModel
    plain: float = 0.0
    """Estimated seconds of a plain step; 0 before the first."""
    tried: bool = False
    """Whether rounds have been measured."""
    compared: float = 0.0
    """`latency.plain` when steps last followed rounds or rounds followed steps."""
    plain_age: int = 0
    """Tokens since the last plain step."""
    look_age: int = 0
    """Tokens since the last trial of another gamma."""
    budget: float = 0.0
    """The exploration budget: seconds that trials may lose."""
    gamma: int = 0
    """The gamma in use, trials aside."""
    rate: float = 0.0
    """Acceptance of the requests at the last choice, 0 before the first."""
    waits: bool = False
    """Whether rounds that were expected to be faster waited at the last choice, as drafts' caches had to be filled."""
    full: bool = False
    """Whether a step has no room for drafts of as many requests."""
    gain: float = 1.0
    """Expected speed of `gamma` relative to plain decoding."""
    yields: float = 1.0
    """Tokens of rounds relative to the number that acceptance predicts: a lookup may propose more than gamma."""

    def cost(self, gamma: int) -> float:
        """Time of a round in plain steps."""
        return math.exp(self.latency.rounds(gamma)) * self.costs.rounds[gamma] / self.costs.plain

    def deviation(self, gamma: int) -> float:
        """Standard deviation of the gain of rounds. A change of plain steps' time since the comparison adds to it."""
        return self.latency.deviation(gamma) + max(0.0, abs(self.latency.plain - self.compared) - _PLAIN_JITTER)

    def note_steps(self, steps: int, seconds: float) -> None:
        """Note plain steps that took `seconds`, call overhead excluded."""
        self.latency.observe_steps(math.log(seconds / steps / self.costs.plain), steps)
        self._advance(steps)
        if self.plain_age or not self.tried:
            self.compared = self.latency.plain
        self.plain_age = 0

    def note_rounds(self, gamma: int, rounds: int, seconds: float, tokens: float) -> None:
        """Note rounds that took `seconds`, call overhead excluded, and gave `tokens` per request."""
        if gamma in self.costs.rounds and self.plain:
            self.tried = True
            self.latency.observe_rounds(gamma, math.log(seconds / rounds / self.costs.rounds[gamma]), rounds)
            self._advance(tokens)
            if not self.plain_age:
                self.compared = self.latency.plain
        self.plain_age += round(tokens)

    def _advance(self, tokens: float) -> None:
        self.latency.advance(tokens)
        self.look_age += round(tokens)
        self.plain = self.costs.plain * math.exp(self.latency.plain)

    def save(self, seconds: float) -> None:
        """Add the trials' share of `seconds` to the budget."""
        most = _MAX_BUDGET * self.plain_trial_steps * self.plain
        self.budget = min(max(self.budget, -most) + TRIAL_SHARE * seconds, most)

    @property
    def plain_trial_steps(self) -> int:
        """Steps of a trial of plain decoding."""
        return max(_PLAIN_TRIAL_STEPS, round(_PLAIN_TRIAL_SECONDS / self.plain)) if self.plain else _PLAIN_TRIAL_STEPS

    # ---- trials ---------------------------------------------------------------------------------

    def first_rounds(self, gamma: int) -> GammaChoice:
        """Rounds of `gamma` drafts after plain steps: few at first, as they may be slower than expected."""
        return GammaChoice(gamma, _few_rounds(self.cost(gamma)))

    def plain_trial(self, gain: float) -> GammaChoice | None:
        """A trial of plain steps while rounds are in use, if it is due: they may be faster, or too little is known.

        gain: the expected gain of the rounds in use.
        """
        deviation, loss = self.deviation(self.gamma), self.plain * (1 - 1 / self.gain)
        steps = self.plain_trial_steps
        paid = gain < _OPTIMISM * deviation and steps * loss <= self.budget
        if self.plain_age < _PLAIN_INTERVAL or not (paid or deviation > _MAX_DEVIATION):
            return None
        return GammaChoice(0, steps)

    def gamma_trial(self, gains: dict[int, float]) -> GammaChoice | None:
        """A trial of another gamma than the one in use, if it is due and one may be better by a margin.

        gains: the expected gain of each gamma.
        """
        if self.look_age < _LOOK_INTERVAL:
            return None
        hopes = {gamma: gain + self.latency.difference_deviation(gamma, self.gamma) for gamma, gain in gains.items()}
        best = max(hopes, key=lambda gamma: hopes[gamma])
        if hopes[best] < gains[self.gamma] + MIN_GAIN:
            return None
        self.look_age = 0
        return GammaChoice(best)

    def rounds_trial(self, tokens: dict[int, float], gains: dict[int, float]) -> GammaChoice | None:
        """A trial of rounds while plain steps are in use.

        Takes the best gamma that may be better than plain steps and has a trial that the budget covers. Rounds that
        were never measured are tried once whatever their expected gain, as soon as the budget covers one.
        tokens, gains: the expected tokens of a round, and the expected gain, of each gamma.
        """
        for gamma in sorted(gains, key=lambda gamma: -gains[gamma]):
            deviation, cost = self.deviation(gamma), self.cost(gamma)
            few = _few_rounds(cost)
            believed, enough = (deviation, min(few, _MIN_TRIAL_ROUNDS)) if self.tried else (0.0, 1)
            loss = self.plain * (cost * math.exp(-believed) - tokens[gamma])
            hopeful = gains[gamma] + _OPTIMISM * deviation > MIN_GAIN or not self.tried
            if hopeful and enough * loss <= self.budget:
                return GammaChoice(gamma, max(enough, min(few, int(self.budget / loss))) if loss > 0 else few)
        return None


def _few_rounds(cost: float) -> int:
    """The most rounds of a trial, where a round costs as much as `cost` plain steps."""
    return max(1, int(_MAX_TRIAL_STEPS / cost))


def net_seconds(seconds: float, whole: bool) -> float:
    """Time of a call's steps or rounds, without the call's own overhead. whole: many steps or rounds are one call."""
    return max(seconds - _CALL_OVERHEAD, seconds / 2, _MIN_SECONDS) if whole else max(seconds, _MIN_SECONDS)
