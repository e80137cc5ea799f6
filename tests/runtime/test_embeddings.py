"""Embeddings in Python: transformers' hidden states, pooled; their bits depend on the text alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import qcompile
from qcompile import pipeline
from qcompile.errors import UnsupportedError, UsageError
from qcompile.runtime.llm import LLM
from tests.support.fake import fake_llm

Build = Callable[[str], Path]
TEXTS = ["import os", "x", "def main(arguments):\n    return " + "value + " * 60]


@pytest.fixture(scope="module")
def llm(tiny_artifact: Build) -> Iterator[LLM]:
    with qcompile.load(tiny_artifact("f32"), threads=2, max_batch=4) as opened:
        yield opened


@pytest.fixture(scope="module")
def wanted(tiny_checkpoint: Path, llm: LLM) -> list[np.ndarray]:
    """The last hidden states [tokens, width] of each text, by transformers."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    with torch.no_grad():
        return [model(torch.tensor([llm.encode(text)])).last_hidden_state[0].double().numpy() for text in TEXTS]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_transformers(llm: LLM, wanted: list[np.ndarray], pooling: Any) -> None:
    pooled = np.stack([rows[-1] if pooling == "last" else rows.mean(0) for rows in wanted])
    result = llm.embed(TEXTS, pooling=pooling, normalize=False)
    assert result.dtype == np.float32 and result.shape == pooled.shape
    np.testing.assert_allclose(result, pooled, atol=2e-5)  # float32 in another order
    units = pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
    np.testing.assert_allclose(llm.embed(TEXTS, pooling=pooling), units, atol=2e-5)
    cut = pooled[:, :5] / np.linalg.norm(pooled[:, :5], axis=1, keepdims=True)
    np.testing.assert_allclose(llm.embed(TEXTS, pooling=pooling, dimensions=5), cut, atol=2e-5)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_bits_depend_on_the_text_alone(llm: LLM, tiny_artifact: Build, pooling: Any) -> None:
    result = llm.embed(TEXTS, pooling=pooling)
    for text, row in zip(TEXTS, result, strict=True):
        np.testing.assert_array_equal(llm.embed(text, pooling=pooling)[0], row)
        np.testing.assert_array_equal(llm.embed(llm.encode(text), pooling=pooling)[0], row)
    many = llm.embed([*reversed(TEXTS)] * 3, pooling=pooling)
    np.testing.assert_array_equal(many, result[[2, 1, 0] * 3])
    with qcompile.load(tiny_artifact("f32"), threads=1, max_batch=2, max_num_batched_tokens=16) as narrow:
        np.testing.assert_array_equal(narrow.embed(TEXTS, pooling=pooling), result)
        narrow.engine.check()
    llm.engine.check()


def test_a_context_full_of_text(llm: LLM) -> None:
    assert llm.embed([[5] * llm.context]).shape == (1, 64)
    with pytest.raises(UsageError, match="the prompt is too long: it has 257 tokens"):
        llm.embed([[5] * (llm.context + 1)])


@pytest.mark.parametrize(
    ("texts", "options", "said"),
    [
        ([], {}, "no prompt given"),
        ([""], {}, "empty"),
        (["x"], {"pooling": "max"}, "pooling must be one of last, mean, not 'max'"),
        (["x"], {"dimensions": 0}, "dimensions must be a whole number of at least 1, not 0"),
        (["x"], {"dimensions": 65}, "dimensions must be at most 64, the model's hidden size, not 65"),
        (["x"], {"dimensions": True}, "dimensions must be a whole number"),
        (["x"], {"normalize": 1}, "normalize must be True or False, not 1"),
    ],
)
def test_what_is_refused(llm: LLM, texts: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        llm.embed(texts, **options)


def test_libraries_of_earlier_builds_are_refused() -> None:
    with fake_llm() as old, pytest.raises(UnsupportedError, match="no hidden states: it was built by an earlier ver"):
        old.embed([[5]])


@pytest.mark.parametrize(
    ("options", "known"),
    [
        ({}, True),
        ({"fold_norms.enabled": "true"}, False),
        ({"smooth.enabled": "true"}, False),
        ({"fold_norms.enabled": "true", "rotate.enabled": "true"}, False),
    ],
)
def test_the_head_is_known_unless_passes_change_what_it_reads(
    tiny_checkpoint: Path, options: dict[str, str], known: bool
) -> None:
    planned = pipeline.plan(str(tiny_checkpoint), recipe="w4a8", options=options)
    assert (planned.program.head is not None) == known
    if known:
        assert planned.program.calls[-1].name == planned.program.head
