"""Responses that the server keeps in memory, for requests that go on from them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qcompile.errors import shown
from qcompile.runtime.server.api import encode
from qcompile.runtime.server.errors import NotFoundError

MOST_STORED, MOST_STORED_CHARACTERS = 1000, 64 << 20
"""Most responses that are kept, and most characters of all of them, with their conversations, as JSON."""


class UnknownResponseError(NotFoundError):
    """No response with this id is kept."""

    code = "response_not_found"

    def __init__(self, id: str) -> None:
        kept = f"the server keeps the last {MOST_STORED:,} in memory, unless `store` is false"
        super().__init__(f"there is no response {shown(id)}: {kept}")


@dataclass(frozen=True)
class StoredResponse:
    """A response, and all messages of its conversation: those of the requests, and the replies.

    input: the items of its own request's input.
    """

    response: dict[str, Any]
    messages: Sequence[dict[str, Any]]
    input: Sequence[dict[str, Any]] = ()

    @property
    def characters(self) -> int:
        """Number of characters as JSON."""
        return len(encode(self.response)) + sum(len(encode(list(each))) for each in (self.messages, self.input))


class ResponseStore:
    """The newest responses by their ids; the oldest are forgotten first."""

    def __init__(self, most: int = MOST_STORED, most_characters: int = MOST_STORED_CHARACTERS) -> None:
        self._most, self._most_characters = most, most_characters
        self._kept: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        self._characters = 0

    def add(self, stored: StoredResponse) -> None:
        """Keep a response. One that is larger than all that may be kept is not."""
        size = stored.characters
        if size > self._most_characters:
            return
        self._kept[stored.response["id"]] = stored, size
        self._characters += size
        while len(self._kept) > self._most or self._characters > self._most_characters:
            self._characters -= self._kept.popitem(last=False)[1][1]

    def get(self, id: str) -> StoredResponse:
        """A response. Raises UnknownResponseError."""
        if id not in self._kept:
            raise UnknownResponseError(id)
        return self._kept[id][0]

    def remove(self, id: str) -> None:
        """Forget a response. Raises UnknownResponseError."""
        self.get(id)
        self._characters -= self._kept.pop(id)[1]
