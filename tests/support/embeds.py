"""Steps with tokens and embeddings, for tests of prompts that are given as embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np

from qcompile.runtime.sampling.arrays import FloatArray
from qcompile.runtime.step import Rows


def step_with_both(llm: Any, ids: list[int], embeds: FloatArray) -> bool:
    """Whether a text has the same logits, to the bit, as tokens, as embeddings, and as some of each, all in one step.

    embeds: those of `ids`, [tokens, width].
    """
    executor, pool, count = llm.engine.executor, llm.engine.pool, len(ids)
    pages = pool.take(3)
    rows = [Rows(ids, 0, pages[:1], count), Rows([0] * count, 0, pages[1:2], count, embeds=embeds)]
    rows.append(Rows([0] * 4 + ids[4:], 0, pages[2:], count, embeds=embeds[:4]))
    logits = executor.step(rows, logits=True)[1]
    pool.give_back(pages)
    assert logits is not None
    first, *others = logits.copy().reshape(3, count, -1)
    return all(np.array_equal(first, other) for other in others)
