"""How many tokens to draft: what a round costs, measured or predicted, against what a request's rounds bring.

A round of gamma drafts takes `seconds[gamma]` and gives on average (1 - a^(gamma + 1)) / (1 - a) tokens where each
draft is accepted with probability a (Leviathan et al. 2023, 2.2). The gamma with the most tokens a second wins,
and 0, which is plain decoding, unless another wins clearly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qcompile.runtime.scheduler import Request

AUTO = -1
"""As gamma: chosen for each request as it goes."""

GAMMAS = (1, 2, 3, 4, 5, 6, 7, 8)
"""What is measured, and chosen from."""

_ROW = 0.05
"""Predicted: a further row of a step costs this much of the first, for arithmetic."""

_CLEARLY = 1.03
"""How much faster than plain decoding a round must look to begin; to go on it must not look slower."""

_PRIOR_TOKENS = 4.0
"""Weight of the acceptance found when tuning, in drafted tokens of the request's own."""

_FORGET = 0.9
"""What older rounds still count after each call: text changes as it goes on."""

_RETRY = 64
"""Plain tokens after which a request that does without drafts tries a round again, if the best acceptance would pay."""

_SURE = 0.995
"""The best acceptance there is taken to be."""

_COMPARE = 1024
"""Tokens of rounds after which some plain steps are made, to see how long they take now."""

_FOLLOW = 0.25
"""How far the pace moves towards what a call took."""


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
    """Chooses gamma by `table` for a request; `acceptance` is what to expect before it has drafted."""

    table: tuple[Costs, ...]
    acceptance: float

    @staticmethod
    def load(tuned: dict[str, Any]) -> GammaPolicy:
        """What `qcompile tune` left in the manifest."""
        return GammaPolicy(tuple(Costs.from_json(item) for item in tuned["table"]), float(tuned["acceptance"]))

    def choose(self, request: Request, batch: int, pace: float = 1.0) -> int:
        """Gamma of the request's next rounds, among `batch` requests; rounds take `pace` times what the table says."""
        costs = self.costs(batch, len(request.tokens))
        state = request.drafts
        tried = state.kept + state.missed
        rate = (state.kept + _PRIOR_TOKENS * self.acceptance) / (tried + _PRIOR_TOKENS)
        gamma = best(costs, min(rate, _SURE), pace, _CLEARLY if state.plain_tokens or not tried else 1.0)
        if gamma == 0 and state.plain_tokens >= _RETRY and best(costs, _SURE, pace):
            gamma = min(costs.rounds)
        return gamma

    def costs(self, batch: int, context: int) -> Costs:
        """The entry measured nearest to so many requests, then to such a context."""

        def distance(entry: Costs) -> tuple[float, float]:
            return abs(math.log(entry.batch / batch)), abs(math.log((entry.context + 1) / (context + 1)))

        return min(self.table, key=distance)


class Pace:
    """How rounds compare with plain steps here and now, where the table says how they did when it was measured.

    The same artifact may find its cores sharing a cache or not, or memory that others use: then all that reads many
    bytes takes another time, and all that multiplies much does not.
    """

    def __init__(self) -> None:
        self._plain: float | None = None
        self._rounds: float | None = None
        self._drafted = 0

    def plain(self, costs: Costs, seconds: float) -> None:
        """A plain step took so long."""
        self._plain, self._drafted = _follow(self._plain, seconds / costs.plain), 0

    def round(self, costs: Costs, gamma: int, seconds: float, tokens: int) -> None:
        """A round took so long; `tokens` came of all rounds of its call."""
        self._drafted += tokens
        if gamma in costs.rounds:
            self._rounds = _follow(self._rounds, seconds / costs.rounds[gamma])

    @property
    def factor(self) -> float:
        """How many times longer rounds take than the table says, where plain steps take what it says."""
        return self._rounds / self._plain if self._rounds and self._plain else 1.0

    @property
    def unsure(self) -> bool:
        """Whether plain steps were made too long ago to compare with."""
        return self._drafted >= _COMPARE


def _follow(known: float | None, ratio: float) -> float:
    """One slow call (the machine was busy elsewhere) moves it little."""
    return ratio if known is None else known + _FOLLOW * (min(ratio, 2 * known) - known)


def best(costs: Costs, rate: float, pace: float = 1.0, clearly: float = _CLEARLY) -> int:
    """The gamma with the most tokens a second when drafts are accepted at `rate`, 0 where none is `clearly` better."""
    speeds = {
        gamma: (1 - rate ** (gamma + 1)) / (1 - rate) / seconds for gamma, seconds in costs.rounds.items() if gamma
    }
    gamma = max(speeds, key=lambda g: speeds[g], default=0)
    return gamma if gamma and speeds[gamma] * costs.plain > clearly * pace else 0


def observe(request: Request, kept: int, missed: int) -> None:
    """Note the drafts accepted and the rounds that ended in a rejection since the last call."""
    state = request.drafts
    state.kept = state.kept * _FORGET + kept
    state.missed = state.missed * _FORGET + missed
    state.plain_tokens = 0


def predicted(target_bytes: int, draft_bytes: int) -> GammaPolicy:
    """A table before any measurement: a step takes as long as its weights (bytes; 0 for a lookup) take to be read."""
    rounds = {gamma: gamma * draft_bytes / target_bytes + 1 + _ROW * gamma for gamma in GAMMAS}
    return GammaPolicy((Costs(1, 1, 1.0, rounds),), 0.7 if draft_bytes else 0.4)
