"""Why `auto` drafts as many tokens as it does: what it expects of each gamma, and what it has measured since."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qcompile.runtime.speculation.controller import GammaController
from qcompile.runtime.speculation.costs import MAX_ACCEPTANCE, expected_tokens
from qcompile.runtime.speculation.measurements import Measurements


@dataclass(frozen=True)
class GammaFacts:
    """What `auto` knows of about `batch` requests of about `context` tokens, and the `gamma` in use for them.

    Gains are speeds relative to plain decoding, by gamma, at `acceptance`: the probability, at the last choice, that a
    draft is accepted if those before it in the round are. `expected` are those with the costs of the prior (costs.py),
    `measured` those with the times of steps and rounds and the tokens of rounds so far; empty before the first rounds.
    `waits`, `full`: as in Measurements.
    """

    batch: int
    context: int
    gamma: int
    acceptance: float
    expected: dict[int, float]
    measured: dict[int, float]
    waits: bool = False
    full: bool = False

    @property
    def gain(self) -> float | None:
        """The measured gain of the gamma in use; None if nothing drafts or no rounds were measured."""
        return self.measured.get(self.gamma) if self.gamma else None

    @property
    def reason(self) -> str:
        """Why this gamma, as a sentence."""
        if self.full:
            return f"plain decoding, as a step has no room for drafts of {self.batch} requests"
        gains = self.measured or self.expected
        best = max(gains, key=lambda gamma: gains[gamma])
        told = "by what was measured" if self.measured else "by what is expected, as no round was measured yet"
        if self.gamma:
            return f"rounds of {self.gamma} drafts decode {gains[self.gamma]:.2f} times as fast, {told}"
        then = "and filling the drafts' caches first would take longer than rounds save, " if self.waits else ""
        return f"plain decoding, as rounds of {best} drafts would decode {gains[best]:.2f} times as fast, {then}{told}"

    @property
    def json(self) -> dict[str, Any]:
        """The facts for JSON."""
        gains = {"expected": self.expected, "measured": self.measured}
        rounded = {name: {str(gamma): round(gain, 3) for gamma, gain in each.items()} for name, each in gains.items()}
        facts = {"batch": self.batch, "context": self.context, "gamma": self.gamma, "reason": self.reason}
        return facts | {"acceptance": round(self.acceptance, 3)} | rounded


def explained(controller: GammaController) -> list[GammaFacts]:
    """The facts for each kind of work that was seen, by batch; of calls of many steps where there were any."""
    by_place: dict[tuple[int, int], Measurements] = {}
    known = [*controller.kinds.items()]  # the engine's thread may add to it
    for (whole, _), measured in sorted(known, key=lambda item: item[0][0]):
        if measured.plain and measured.costs.rounds and (whole or measured.place not in by_place):
            by_place[measured.place] = measured
    return [_facts(controller, measured) for _, measured in sorted(by_place.items())]


def _facts(controller: GammaController, measured: Measurements) -> GammaFacts:
    rate, costs = min(measured.rate or controller.acceptance, MAX_ACCEPTANCE), measured.costs
    tokens = {gamma: expected_tokens(rate, gamma) for gamma in costs.rounds}
    expected = {gamma: many * costs.plain / costs.rounds[gamma] for gamma, many in tokens.items()}
    gains = {gamma: measured.yields * many / measured.cost(gamma) for gamma, many in tokens.items()}
    batch, context = measured.place
    known = gains if measured.tried else {}
    return GammaFacts(batch, 16 * context, measured.gamma, rate, expected, known, measured.waits, measured.full)
