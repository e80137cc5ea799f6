"""Acceptance of drafted tokens, as pure functions of the drafts and the target's results.

Every rule returns a request's new tokens: the accepted drafts, and one token of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Distribution = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]
"""Tokens that can be drawn, in ascending order, and their probabilities."""


def greedy(drafted: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """Accept drafts as long as the target would have chosen them.

    `chosen[i]` is the target's token after the first i drafts (one more than there are drafts). The result is what the
    target alone generates, token for token.
    """
    kept = 0
    while kept < len(drafted) and drafted[kept] == chosen[kept]:
        kept += 1
    return [*drafted[:kept], chosen[kept]]


def drawn(drafted: Sequence[int], draw: Callable[[int], int]) -> list[int]:
    """Accept drafts as long as the target draws the same: `draw(i)` is its own draw after the first i drafts.

    Each token is the target's draw given those before it, so its distribution is the target's whatever is drafted,
    and with a seed the tokens are those without speculation. A draft x is accepted with the target's probability of x,
    as by the rule of Leviathan et al. 2023 (2.3) for a draft that proposes x with probability 1.
    """
    tokens: list[int] = []
    for place in range(len(drafted) + 1):
        tokens.append(draw(place))
        if place < len(drafted) and tokens[-1] != drafted[place]:
            break
    return tokens


def keeps(target: Any, draft: Any, uniform: Any) -> Any:
    """Whether a drafted token is accepted: with probability min(1, target / draft) (Leviathan et al. 2023, 2.3).

    target, draft: the token's probability under each, floats or arrays of equal shape. uniform: drawn from [0, 1).
    """
    return uniform * draft < target


def residual(target: npt.NDArray[np.float64], draft: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The distribution that replaces a rejected token: max(0, target - draft), normalized. Both [..., vocabulary]."""
    left = np.maximum(target - draft, 0.0)
    return left / left.sum(-1, keepdims=True)


def rejection(
    drafted: Sequence[int],
    proposed: Sequence[Distribution],
    target: Callable[[int], Distribution],
    uniform: Callable[[], float],
) -> list[int]:
    """Rejection sampling (Leviathan et al. 2023, algorithm 1): each token has the target's distribution.

    `drafted[i]` was drawn from `proposed[i]`. `target(i)` is the target's distribution after the first i drafts; it is
    called in order and no further than needed. `uniform()` draws from [0, 1).
    """
    for place, token in enumerate(drafted):
        ids, probabilities = target(place)
        guess = _probabilities_of(proposed[place], ids)
        match = np.flatnonzero(ids == token)
        if len(match) and keeps(probabilities[match[0]], guess[match[0]], uniform()):
            continue
        return [*drafted[:place], pick((ids, residual(probabilities, guess)), uniform())]
    return [*drafted, pick(target(len(drafted)), uniform())]


def _probabilities_of(distribution: Distribution, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Probabilities of the tokens `ids`."""
    known, probabilities = distribution
    place = np.minimum(np.searchsorted(known, ids), len(known) - 1)
    return np.where(known[place] == ids, probabilities[place], 0.0)


def pick(distribution: Distribution, uniform: float) -> int:
    """The token at which the cumulative probability passes `uniform`."""
    ids, probabilities = distribution
    mass = np.cumsum(probabilities)
    place = int(np.searchsorted(mass, uniform * mass[-1], side="right"))
    return int(ids[min(place, len(ids) - 1)])
