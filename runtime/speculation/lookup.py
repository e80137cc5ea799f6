"""Prompt lookup (Saxena 2023): drafts are the tokens that followed the same n-gram earlier in the text."""

from __future__ import annotations

from array import array

WINDOW = 2048
"""Tokens at the end of the text in which a lookup searches."""
SHORTEST_MATCH, SURE_MATCH = 3, 4
"""Tokens that must recur before a lookup proposes what followed them; the second where a model could draft instead."""


def look_up(tokens: array[int], match: int, most: int, shortest: int) -> int:
    """Find the longest suffix of `shortest` to `match` tokens that occurred before, and append what followed it.

    Takes the suffix's latest occurrence, and appends the `most` tokens after it. Returns the number of appended tokens:
    0 without a match.
    """
    if most <= 0:
        return 0
    end, size = len(tokens), tokens.itemsize
    before = tokens[:-1].tobytes()
    for length in range(min(match, end - 1), shortest - 1, -1):
        wanted = tokens[end - length :].tobytes()
        at = before.rfind(wanted)
        while at > 0 and at % size:  # not at a token boundary
            at = before.rfind(wanted, 0, at + len(wanted) - 1)
        if at >= 0 and at % size == 0:
            for place in range(at // size + length, at // size + length + most):
                tokens.append(tokens[place])
            return most
    return 0
