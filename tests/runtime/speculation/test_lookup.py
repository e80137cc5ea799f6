"""Drafts by lookup as the host makes them: what followed where the text ended as it does now."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from qcompile.runtime.speculation.host import _Call, _RoundText
from qcompile.runtime.speculation.lookup import SHORTEST_MATCH, SURE_MATCH, look_up
from qcompile.runtime.speculation.stages import DraftStage
from qcompile.runtime.step import Limits


def scanned(tokens: list[int], match: int, most: int, shortest: int) -> list[int]:
    """What a lookup appends, position by position: behind the latest of the longest matches."""
    best, result = shortest - 1, 0
    for end in range(len(tokens) - 1, 0, -1):
        size = 0
        while size < min(match, end) and tokens[end - 1 - size] == tokens[-1 - size]:
            size += 1
        if size > best:
            best, result = size, end
    text = list(tokens)
    for place in range(result, result + most if result else 0):
        text.append(text[place])
    return text[len(tokens) :]


def test_what_is_found_is_what_a_scan_finds() -> None:
    """Few tokens, so that much recurs; and tokens with bytes that begin as those of others end."""
    draw, result = random.Random(0), 0
    for _ in range(600):
        alphabet = draw.choice(([0, 1], [1, 2, 3], [256, 1, 65536, 257]))
        tokens = [draw.choice(alphabet) for _ in range(draw.randrange(1, 40))]
        arguments = draw.choice((2, 5, 8)), draw.randrange(8), draw.choice((SHORTEST_MATCH, SURE_MATCH, 1))
        text = array("i", tokens)
        want = scanned(tokens, *arguments)
        assert look_up(text, *arguments) == len(want) and text.tolist() == tokens + want
        result += bool(want)
    assert result > 100


@pytest.mark.parametrize(("stage", "recurring", "drafts"), [(1, 3, [9, 5]), (2, 3, []), (2, 4, [9, 5])])
def test_where_a_model_could_draft_more_must_recur(stage: int, recurring: int, drafts: list[int]) -> None:
    target: Any = SimpleNamespace(limits=Limits(64, 10, 64, 1024))
    stages = [DraftStage(target, 0, True), *[DraftStage(target, 4)] * (stage - 1), DraftStage(None, 7, match=8)]
    end = [5, 6, 7, 8][:recurring]
    tokens = array("i", [1, *end, 9, *end])
    want = [0] * stage + [2]
    text = _RoundText(tokens, 0, 4, [], [0] * (stage + 1), want, [0] * (stage + 1), 0, len(tokens))
    _Call(stages, [text], 1).extend(stage)
    assert tokens.tolist() == [1, *end, 9, *end, *drafts]
