"""Masks that were computed before: after the same text, all requests of a grammar have the same."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable

_MOST_TEXTS = 1 << 16
"""Most texts with a number that is remembered: about 10 MB."""
_MOST_MASKS = 1024
"""Most masks that are kept: 19 MB with a vocabulary of 151,936 tokens."""


class KnownMasks:
    """Masks by the text after which they are. Several threads may use it.

    A text of any length is found by its number, which stands for a grammar and the tokens after its start. No other
    text gets the same number, in this object or another. When the number of a text was forgotten, the text gets a new
    one.
    """

    _numbers = itertools.count()

    def __init__(self) -> None:
        self._texts: dict[tuple[int, int], int] = {}  # by the number of a text and the token after it
        self._masks: dict[int, bytes] = {}  # by text, the oldest first
        self._lock = threading.Lock()

    def start(self) -> int:
        """The number of the empty text of one more grammar."""
        return next(self._numbers)

    def after(self, text: int, tokens: Iterable[int]) -> int:
        """The number of a text and these tokens after it."""
        for token in tokens:
            known = self._texts.get((text, token))
            text = self._add(text, token) if known is None else known
        return text

    def _add(self, text: int, token: int) -> int:
        if len(self._texts) >= _MOST_TEXTS:
            self._texts.clear()
        return self._texts.setdefault((text, token), next(self._numbers))  # one operation: all threads get one number

    def get(self, text: int) -> bytes | None:
        """The mask after a text; None if it is not known."""
        return self._masks.get(text)

    def keep(self, text: int, mask: bytes) -> None:
        """Keep the mask after a text."""
        if len(self._masks) >= _MOST_MASKS:
            with self._lock:
                while len(self._masks) >= _MOST_MASKS:
                    del self._masks[next(iter(self._masks))]
        self._masks[text] = mask
