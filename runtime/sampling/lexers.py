"""The lexers of llguidance that the texts of a grammar share. A lexer learns its states from the texts, one by one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Lexer:
    """A lexer of a grammar. matcher: llguidance's, at the start of a text; its copies use the same lexer.

    compile: returns a new matcher. The states of a lexer are limited: at the limit, `renew` is called.
    """

    def __init__(self, matcher: Any, compile: Callable[[], Any]) -> None:
        self.matcher, self._compile = matcher, compile

    def renew(self) -> None:
        """Have a `matcher` with a lexer that no text has used."""
        self.matcher = self._compile()


class Lexers:
    """The lexers of a grammar, at first one. A lexer has a lock, so as many threads as lexers compute masks at once."""

    def __init__(self, matcher: Any, compile: Callable[[], Any]) -> None:
        self._compile = compile
        self.all = [Lexer(matcher, compile)]
        self._thread: threading.Thread | None = None

    @property
    def first(self) -> Lexer:
        """The lexer that texts begin with."""
        return self.all[0]

    def grow(self, wanted: int) -> None:
        """Have another lexer soon, if there are fewer than `wanted`: a thread compiles it, which takes a while."""
        if len(self.all) < wanted and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._add, name="qcompile-lexer")
            self._thread.start()

    def _add(self) -> None:
        self.all.append(Lexer(self._compile(), self._compile))
