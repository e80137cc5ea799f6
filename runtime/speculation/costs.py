"""What steps and rounds of speculation cost, as it is known before the engine has measured any.

The costs come from `qcompile tune`, which stores a table in the manifest, or else from the sizes of the weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

GAMMAS = (1, 2, 3, 4, 5, 6, 7, 8)
"""The values that `qcompile tune` measures and `auto` chooses from."""

MAX_ACCEPTANCE = 0.995
"""Upper limit of estimated acceptance."""

MIN_GAIN = 0.02
"""Expected gain required to change to another choice. Like all gains, the logarithm of a ratio of speeds."""

_ROW_COST = 0.05
"""Predicted cost of each further row of a step (arithmetic), as a share of the first row's (reading the weights)."""


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of a plain step and of a round by its gamma, for `batch` requests of about `context` tokens."""

    batch: int
    context: int
    plain: float
    rounds: dict[int, float]

    @staticmethod
    def from_json(item: dict[str, Any]) -> RoundCosts:
        """One entry of the manifest's table."""
        rounds = {int(gamma): float(seconds) for gamma, seconds in item["rounds"].items()}
        return RoundCosts(item["batch"], item["context"], float(item["plain"]), rounds)

    def towards(self, other: RoundCosts, context: int) -> RoundCosts:
        """Linear interpolation between this entry and one of a longer context."""
        part = (context - self.context) / (other.context - self.context)
        rounds = {gamma: seconds + part * (other.rounds[gamma] - seconds) for gamma, seconds in self.rounds.items()}
        return RoundCosts(self.batch, context, self.plain + part * (other.plain - self.plain), rounds)


@dataclass(frozen=True)
class SpeculationPrior:
    """What is expected before the engine has measured anything: a `table` of costs, and the acceptance of drafts."""

    table: tuple[RoundCosts, ...]
    acceptance: float

    @staticmethod
    def load(tuned: dict[str, Any]) -> SpeculationPrior:
        """From what `qcompile tune` stored in the manifest."""
        return SpeculationPrior(
            tuple(RoundCosts.from_json(item) for item in tuned["table"]), float(tuned["acceptance"])
        )

    @staticmethod
    def predicted(target_bytes: int, draft_bytes: int) -> SpeculationPrior:
        """Before any measurement: a step takes as long as reading its weights (bytes; 0 for a lookup)."""
        rounds = {gamma: gamma * draft_bytes / target_bytes + 1 + _ROW_COST * gamma for gamma in GAMMAS}
        return SpeculationPrior((RoundCosts(1, 1, 1.0, rounds),), 0.7 if draft_bytes else 0.4)

    def costs(self, batch: int, context: int) -> RoundCosts:
        """The entry of the nearest batch size (by ratio), interpolated between the contexts that were measured."""
        nearest = min((entry.batch for entry in self.table), key=lambda measured: abs(math.log(measured / batch)))
        entries = sorted((entry for entry in self.table if entry.batch == nearest), key=_context)
        for before, after in pairwise(entries):
            if before.context < context < after.context:
                return before.towards(after, context)
        return max((entry for entry in entries if entry.context <= context), key=_context, default=entries[0])


def _context(costs: RoundCosts) -> int:
    return costs.context


def expected_tokens(rate: float, gamma: int) -> float:
    """Tokens that a round of gamma drafts gives on average, each accepted with probability `rate` below 1."""
    return (1 - rate ** (gamma + 1)) / (1 - rate)


def best_gamma(costs: RoundCosts, rate: float) -> int:
    """The gamma with the most tokens per second for drafts accepted at `rate`; 0 if none beats plain steps clearly."""
    speeds = {
        gamma: expected_tokens(min(rate, MAX_ACCEPTANCE), gamma) / seconds
        for gamma, seconds in costs.rounds.items()
        if gamma
    }
    gamma = max(speeds, key=lambda g: speeds[g], default=0)
    return gamma if gamma and speeds[gamma] * costs.plain > math.exp(MIN_GAIN) else 0
