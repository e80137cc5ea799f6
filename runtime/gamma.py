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

GAMMAS = (1, 2, 3, 4, 6, 8)
"""What is measured, and chosen from."""

_ROW = 0.05
"""Predicted: a further row of a step costs this much of the first, for arithmetic."""

_CLEARLY = 1.03
"""How much faster than plain decoding a round must look; measured times differ by about this from run to run."""

_PRIOR_TOKENS = 4.0
"""Weight of the acceptance found when tuning, in drafted tokens of the request's own."""

_FORGET = 0.9
"""What older rounds still count after each call: text changes as it goes on."""

_RETRY = 64
"""Plain tokens after which a request that does without drafts tries a round again."""


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

    def choose(self, request: Request, batch: int) -> int:
        """Gamma of the request's next rounds, among `batch` requests."""
        costs = self.costs(batch, len(request.tokens))
        state = request.drafts
        tried = state.kept + state.missed
        rate = (state.kept + _PRIOR_TOKENS * self.acceptance) / (tried + _PRIOR_TOKENS)
        gamma = best(costs, min(rate, 0.995))
        if gamma == 0 and state.plain_tokens >= _RETRY:
            gamma = min(costs.rounds)
        return gamma

    def costs(self, batch: int, context: int) -> Costs:
        """The entry measured nearest to so many requests, then to such a context."""

        def distance(entry: Costs) -> tuple[float, float]:
            return abs(math.log(entry.batch / batch)), abs(math.log((entry.context + 1) / (context + 1)))

        return min(self.table, key=distance)


def best(costs: Costs, rate: float) -> int:
    """The gamma with the most tokens a second when drafts are accepted at `rate`, 0 where none is clearly better."""
    speeds = {
        gamma: (1 - rate ** (gamma + 1)) / (1 - rate) / seconds for gamma, seconds in costs.rounds.items() if gamma
    }
    gamma = max(speeds, key=lambda g: speeds[g], default=0)
    return gamma if gamma and speeds[gamma] * costs.plain > _CLEARLY else 0


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
