"""Chooses the replica of a request: the one that has most of its prompt in the KV cache, unless that one is too busy.

The router has no tokenizer. It divides the text of a prompt into blocks of characters, and notes which replica was sent
which beginnings. What a replica has dropped from its cache since is not known here; then the prompt is computed there.
"""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)
_BLOCK = 256
"""Characters of a block: about as many as a page of 64 tokens of the KV cache has."""
_MOST_BLOCKS = 1024
"""Blocks of a prompt that are looked at. Prompts that differ after these go to the same replica."""
_MOST_KNOWN = 1 << 16
"""Beginnings that are noted for a replica. The one that was not used for the longest time is forgotten first."""
_SLACK = 4
"""How many more requests than the least busy replica has may be in flight at the one that knows a prompt."""
_BEFORE = ("model", "system", "instructions", "tools", "documents")
_PROMPT = ("messages", "input", "prompt")


class Affinity(Generic[Name]):
    """Which replica, by its name, was sent which beginnings of prompts."""

    def __init__(self) -> None:
        self._known: defaultdict[Name, OrderedDict[int, None]] = defaultdict(OrderedDict)

    def choose(self, blocks: Sequence[int], loads: Mapping[Name, int]) -> Name:
        """The replica for a prompt of these blocks. loads: requests in flight at each replica that may be chosen.

        It is the one that was sent most of the prompt's beginning, of those that are at most _SLACK requests busier
        than the least busy one. Ties go to the least busy one, then to the one that was sent the fewest prompts.
        """
        least = min(loads.values())
        free = [name for name in loads if loads[name] <= least + _SLACK]
        return max(free, key=lambda name: (self._shared(name, blocks), -loads[name], -len(self._known[name])))

    def note(self, replica: Name, blocks: Sequence[int]) -> None:
        """The replica is sent a prompt of these blocks."""
        known = self._known[replica]
        for block in reversed(blocks):  # a block is of no use without those before it: they are forgotten later
            known[block] = None
            known.move_to_end(block)
        while len(known) > _MOST_KNOWN:
            known.popitem(last=False)

    def forget(self, replica: Name) -> None:
        """The replica's cache is empty: it starts again."""
        self._known.pop(replica, None)

    def keep(self, replicas: Collection[Name]) -> None:
        """Forget all replicas but these."""
        for gone in self._known.keys() - set(replicas):
            self.forget(gone)

    def _shared(self, replica: Name, blocks: Sequence[int]) -> int:
        """How many blocks from the beginning of the prompt the replica was sent before."""
        known = self._known[replica]
        return next((at for at, block in enumerate(blocks) if block not in known), len(blocks))


def blocks_of(asked: Mapping[str, Any], owner: str = "") -> list[int]:
    """A number for each whole block of a request's prompt, which depends on all blocks before it.

    asked: the body of a request to any of the endpoints. owner: the owner of the cached pages that the request may
    reuse.
    """
    text = prompt_text(asked)
    numbers, before = [], hash(owner)
    for start in range(0, min(len(text), _BLOCK * _MOST_BLOCKS) - _BLOCK + 1, _BLOCK):
        before = hash((before, text[start : start + _BLOCK]))
        numbers.append(before)
    return numbers


def prompt_text(asked: Mapping[str, Any]) -> str:
    """A text of which the text of an earlier turn of the same conversation is a beginning."""
    parts = [_encoded(asked[name]) for name in _BEFORE if asked.get(name)]
    prompt = next((asked[name] for name in _PROMPT if name in asked), "")
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return "\n".join([*parts, ",".join(map(str, prompt))])
    if isinstance(prompt, list):  # messages, or several prompts, which go where the first one has been
        return "\n".join([*parts, *map(_encoded, prompt)])
    return "\n".join([*parts, _encoded(prompt)])


def _encoded(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
