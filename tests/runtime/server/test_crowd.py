"""Many clients with prompts of their own: a short form of benchmarks/load.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

import qcompile
from qcompile import SamplingParams
from tests.runtime.server.test_server import serving
from tests.support.crowd import Level, answers_counted, crowd, prompts
from tests.support.mixture import session

TOKENS = 4


def test_each_client_gets_its_own_answer_once(tiny_artifact: Callable[[str], Path]) -> None:
    artifact, asked = tiny_artifact("w4a8"), prompts(40)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    with qcompile.load(artifact, threads=1, max_batch=1, prefix_caching=False) as alone:
        wanted = {prompt: alone.generate([prompt], params)[0].outputs[0].text for prompt in asked}

    async def measured(root: str) -> tuple[list[Level], int]:
        async with session() as clients:
            levels = [await crowd(clients, root, wanted, TOKENS, count, seconds=0.3) for count in (1, 40)]
            return levels, await answers_counted(clients, root)

    with qcompile.load(artifact, threads=1, max_batch=8) as llm, serving(llm) as client:
        levels, counted = asyncio.run(measured(f"http://127.0.0.1:{client.port}"))
    for level in levels:
        assert not level.wrong and not level.lost and not level.doubled and level.tokens == TOKENS * len(level.times)
    assert counted == sum(len(level.times) for level in levels) > 40


@pytest.mark.parametrize(("counted", "doubled"), [(2, 0), (3, 1)])
def test_answers_that_nobody_asked_for_are_told(counted: int, doubled: int) -> None:
    level = Level(1, times=[0.1, 0.2], counted=counted)
    assert level.told()["doubled"] == doubled
