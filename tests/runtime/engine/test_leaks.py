"""No client gets what another one computed: a short form of benchmarks/client_leaks.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import qcompile
from tests.support import leaks

PAGES = 36


def test_marked_prompts_get_their_own_answers(tiny_artifact: Callable[[str], Path]) -> None:
    artifact, draw = tiny_artifact("w4a8"), random.Random(1)
    with qcompile.load(artifact, threads=1, max_batch=1, prefix_caching=False) as alone:
        kv = alone.manifest["runtime"]["kv"]
        prompts = [leaks.marked(draw, alone.vocab_size, kv["page_tokens"]) for _ in range(40)]
        wanted = leaks.references(alone, [prompt for _, prompt in prompts])
    cache = PAGES * kv["page_bytes"]
    with qcompile.load(artifact, threads=1, max_batch=8, kv_cache_bytes=cache) as llm, leaks.poisoned(llm, kv):
        result = leaks.ask(llm, prompts, wanted, 250)
    assert result.wrong == result.foreign == 0 and result.answered + result.cancelled == 250
    assert result.reused > 50 and result.cancelled > 5, result
