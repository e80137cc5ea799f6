"""Masks of structured outputs in the CPU's library: on every instruction set, and in all kinds of calls."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qcompile
from qcompile import SamplingParams
from qcompile.runtime.cpu.executor import Executor
from qcompile.runtime.sampling.masks import GrammarState, mask_words
from tests.runtime.engine.test_batches import run
from tests.support.harness import TRIED
from tests.support.sampled import OPTIONS, same_outputs


@pytest.mark.parametrize("isa", TRIED)
def test_masks_are_applied_bit_by_bit(harness: Callable[[str], ctypes.CDLL], isa: str) -> None:
    library, random = harness(isa), np.random.default_rng(0)
    for vocab in (1, 31, 32, 33, 65, 1000):
        for share in (0.0, 0.1, 0.9, 1.0):
            logits = random.standard_normal(vocab).astype(np.float32)
            allowed = random.random(32 * mask_words(vocab)) < share
            mask = np.packbits(allowed, bitorder="little")
            want = np.where(allowed[:vocab], logits, np.float32(-np.inf))
            best = library.harness_mask(ctypes.c_void_p(logits.ctypes.data), vocab, ctypes.c_void_p(mask.ctypes.data))
            assert (logits.view(np.int32) == want.view(np.int32)).all()
            assert best == (want.argmax() if np.isfinite(want.max()) else -1)


LANGUAGES: list[dict[str, Any]] = [
    {"regex": "[a-z_ ]{20,40}\\."},
    {"regex": "(ab|ba ){3,9}"},
    {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4}},
]


def test_drafts_and_batches_change_nothing(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With drafts of a model and by lookup, alone, together, and in steps of few rows; among requests without a
    grammar, with penalties and log probabilities."""
    qcompile.build(str(tiny_checkpoint), tmp_path / "out", recipe="qspec", drafts=["lookup"])
    options = [{"temperature": 0}, OPTIONS[0], OPTIONS[4], {"temperature": 0, "logprobs": 1}]
    options.append({"temperature": 0.9, "repetition_penalty": 0.8, "frequency_penalty": 0.1})
    params = [
        SamplingParams(max_tokens=60, seed=3, structured_outputs=asked, **one) for asked in LANGUAGES for one in options
    ]
    params += [SamplingParams(max_tokens=20, temperature=0, ignore_eos=True), SamplingParams(max_tokens=20, seed=5)]
    work = [([5 + i, 7, 5 + i, 7, 5 + i][: 1 + i % 5], one) for i, one in enumerate(params)]
    with qcompile.load(tmp_path / "out", threads=2, max_batch=32) as llm:
        plain = run(llm, work)
        for (_, _, text, _), one in zip(plain, params, strict=True):
            if one.structure and one.structure.regex and len(text) > 30:
                assert re.fullmatch(one.structure.regex, text)
        for gamma in (0, 3, 6):
            llm.engine.speculation.gamma = gamma
            assert [run(llm, [one])[0] for one in work] == plain
            assert run(llm, work) == plain
            with monkeypatch.context() as patch:  # masks of all rows, not only of those that need them
                patch.setattr(GrammarState, "allows", lambda *_: False)
                assert run(llm, work) == plain
        [output] = llm.generate([work[5][0]], work[5][1])
        assert output.speculation and sum(output.speculation.accepted) > 0
        llm.engine.scheduler.max_tokens = 5
        assert run(llm, work) == plain
        monkeypatch.setattr(Executor, "samples", False)
        llm.engine.scheduler.samples, llm.engine.speculation.gamma = False, 0
        assert same_outputs(run(llm, work), plain)
