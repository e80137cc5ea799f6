"""What a build made of the weights that a checkpoint stores in few bits, and of the embedding, in words.

The facts are those that codegen/fidelity.py measures and the manifest holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from qcompile.errors import escaped

PLACE = b"<!-- stored weights -->"
"""Where the page has room for the sentence, which is known when the weights are written."""

LAST_BITS = 2**-23
"""Changes up to this share of a norm are those of scales that are rounded to float32 in another order."""


def sentence(facts: Mapping[str, Any] | None) -> str:
    """How many weights keep their numbers, and what the others lose; empty without weights of few bits."""
    if not facts:
        return ""
    weights, kept = facts["weights"], facts["kept"]
    text = f"{kept} of {weights} weights that the checkpoint stores in few bits keep their numbers to the bit"
    if kept == weights:
        return text
    if facts["error"] <= LAST_BITS and not facts["changed"]:
        return f"{text}; {weights - kept} differ in the last bits, by {_percent(facts['error'])} of their norm"
    changed = f", {facts['changed']} of them after passes changed them" if facts["changed"] else ""
    error = _percent(facts["error"])
    share = f", with {facts['rows_kept']:.0%} of their rows kept" if 0 < facts["rows_kept"] < 1 else ""
    worst = "".join(f" (most: {name}, {_percent(error)})" for name, error in facts["worst"].items())
    return (
        f"{text}; {weights - kept} are rounded again{changed}{share}, which moves them by {error} of their norm{worst}"
    )


def embedding_sentence(facts: Mapping[str, Any] | None) -> str:
    """What rounding changes of the embedding, and whether the output head shares it; empty if it is not rounded."""
    if not facts:
        return ""
    shared = ", stored once with the output head" if facts["shared"] else ""
    return f"embedding in {facts['bits']} bits{shared}; rounding moves it by {_percent(facts['error'])} of its norm"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"


def placed(page: bytes, facts: Mapping[str, Any] | None, embedding: Mapping[str, Any] | None = None) -> bytes:
    """The page with the sentences in their place."""
    texts = filter(None, (sentence(facts), embedding_sentence(embedding)))
    lines = "".join(f'<p class="headline">{escape(escaped(text))}.</p>' for text in texts)
    return page.replace(PLACE, lines.encode())
