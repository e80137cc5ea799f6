"""How long a build will take: by the seconds of the last one on this machine, corrected by the speed of this one."""

from __future__ import annotations

import json
import time

from qcompile import user_cache

_ORDER = ("import", "passes", "weights", "kernels")
_USUAL = {"import": 7.0, "passes": 2.0, "weights": 4e-8, "kernels": 12.0}
"""Seconds of each part of a build on two cores; of the weights, seconds for each of them."""
_FEWEST = 1_000_000
"""Weights of models that are too small to tell how long one weight takes."""
_CACHED = 2.0
"""Seconds in which kernels come from the cache."""
_LEAST, _MOST = 0.1, 30.0
"""Bounds for how much slower a build is than expected."""


class Estimate:
    """The expected seconds of a build of a model by its number of weights, part by part.

    The parts are: to import the compiler, the passes, the weights, and what the compilation of the kernels takes longer
    than the weights, since both run at once.
    """

    def __init__(self, weights: int) -> None:
        self._weights = weights
        usual = _USUAL | _recalled()
        expected = usual | {"weights": usual["weights"] * weights}
        self._expected = expected | {"kernels": max(usual["kernels"] - expected["weights"], 0.0)}
        self._taken: dict[str, float] = {}
        self._part, self._start, self._percent = "", time.monotonic(), 0

    def enter(self, stage: str) -> None:
        """A stage of the build begins."""
        part = stage if stage in _ORDER else "weights" if stage == "weights and kernels" else "passes"
        if part != self._part:
            self._leave()
            self._part = part

    def left(self, share: float | None) -> tuple[int, float]:
        """The percentage that is done, and the seconds left; `share` is what is done of this part, if it is known."""
        now = time.monotonic()
        spent = sum(self._taken.values()) + now - self._start
        here, expected = now - self._start, self._expected.get(self._part, 0.0)
        slower = self._slower()
        rest = here * (1 - share) / share if share else max(expected * slower - here, 0.05 * here)
        place = _ORDER.index(self._part) if self._part in _ORDER else -1
        rest += sum(self._expected[part] for part in _ORDER[place + 1 :] if part not in self._taken) * slower
        self._percent = max(self._percent, int(100 * spent / max(spent + rest, 1e-9)))  # never falls
        return self._percent, rest

    def finish(self) -> None:
        """The build is done: keep its seconds for the estimate of the next one."""
        self._leave()
        kept = {part: seconds for part, seconds in self._taken.items() if part in _ORDER}
        kernels = kept.pop("kernels", 0.0) + kept.get("weights", 0.0)
        if self._weights < _FEWEST:
            kept.pop("weights", None)
        elif "weights" in kept:
            kept["weights"] /= self._weights
        if kernels > _CACHED:  # else none was compiled
            kept["kernels"] = kernels
        text = json.dumps(_recalled() | kept)
        user_cache.remember(user_cache.cache_dir() / "durations", text.encode())

    def _leave(self) -> None:
        now = time.monotonic()
        if self._part:
            self._taken[self._part] = self._taken.get(self._part, 0.0) + now - self._start
        self._start = now

    def _slower(self) -> float:
        """How many times as long as expected the parts took that are over, or should be."""
        expected = sum(self._expected[part] for part in self._taken)
        taken = sum(self._taken.values())
        here = time.monotonic() - self._start
        if here > self._expected.get(self._part, here):  # it is late already
            expected, taken = expected + self._expected[self._part], taken + here
        return min(max(taken / expected, _LEAST), _MOST) if expected > 1 else 1.0


def _recalled() -> dict[str, float]:
    """What the last build took, as far as it is known."""
    try:
        kept = json.loads(user_cache.recall(user_cache.cache_dir() / "durations") or b"{}")
        return {part: float(seconds) for part, seconds in kept.items() if part in _ORDER}
    except (ValueError, TypeError, AttributeError):
        return {}
