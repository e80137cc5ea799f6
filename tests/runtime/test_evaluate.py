"""Perplexity: windows, what precedes documents, and the numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from qcompile.errors import UsageError
from qcompile.runtime import evaluate
from qcompile.runtime.evaluate import negative_log_likelihood, read_documents, token_stream
from qcompile.texts import encoded
from tests.support.fake import byte_tokenizer, fake_llm, reference_logits

TOKENIZER = byte_tokenizer()
TEXTS = ["def f(x):\n    return x\n" * 9, "import os\n" * 40, "x = 1\n" * 13]


def expected_nll(stream: list[int], window: int) -> tuple[float, int]:
    total, windows = 0.0, len(stream) // window
    for number in range(windows):
        tokens = stream[number * window : (number + 1) * window]
        logits = reference_logits(tokens).astype(np.float64)
        logp = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        total -= sum(logp[i, tokens[i + 1]] for i in range(window - 1))
    return total / (windows * (window - 1)), windows


def test_perplexity_is_that_of_the_protocol(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS) + "\n")
    stream = token_stream(TOKENIZER, TEXTS, 0)
    assert len(stream) == sum(map(len, TEXTS)) + 3 and stream[0] == stream[len(TEXTS[0]) + 1] == 0
    llm = fake_llm(tokenizer=TOKENIZER)
    done: list[tuple[int, int]] = []
    for window in (97, 200):
        result = llm.perplexity(path, window=window, progress=lambda *now: done.append(now))
        nll, windows = expected_nll(stream, window)
        assert result.nll == pytest.approx(nll, abs=1e-6) and result.windows == windows
        assert result.perplexity == pytest.approx(math.exp(nll), rel=1e-5)
        assert result.tokens == windows * (window - 1)
        assert done[-1] == (windows, windows)
    assert llm.perplexity(TEXTS, window=97, max_windows=2).windows == 2
    cut = llm.perplexity([TEXTS[0] * 2000], window=10**6, max_windows=1)
    assert cut.window == llm.context and cut.tokens == llm.context - 1
    assert llm.engine.pool.used == 0


def test_texts_are_encoded_in_pieces_and_no_more_of_them_than_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A corpus takes minutes to encode: an interrupt is heeded between pieces, and few windows take few texts."""
    texts = [f"def f{number}(x):\n    return x\n" for number in range(40)] + ["", "x" * 90]
    alone = [TOKENIZER.encode(text, add_special_tokens=False).ids for text in texts]
    for piece in (1, 100, 1 << 20):
        monkeypatch.setattr("qcompile.texts.PIECE", piece)
        assert list(encoded(TOKENIZER, texts, "")) == alone
        assert list(encoded(TOKENIZER, [], "")) == []
    monkeypatch.setattr("qcompile.texts.PIECE", 3)
    pieces: list[list[str]] = []

    def told(texts: list[str], add_special_tokens: bool) -> list[SimpleNamespace]:
        pieces.append(texts)
        return [SimpleNamespace(ids=[len(text)]) for text in texts]

    lengths = list(encoded(SimpleNamespace(encode_batch_fast=told), list("abcdefgh"), ""))  # type: ignore[arg-type]
    assert lengths == [[1]] * 8 and list(map("".join, pieces)) == ["abc", "def", "gh"]
    monkeypatch.setattr("qcompile.texts.PIECE", 100)
    whole = token_stream(TOKENIZER, texts, 0)
    part = token_stream(TOKENIZER, texts, 0, 300)
    assert part == whole[: len(part)] and 300 <= len(part) < 450
    llm = fake_llm(tokenizer=TOKENIZER)
    seen: list[list[int]] = []

    def watched(tokenizer: Tokenizer, texts: Sequence[str], name: str) -> Iterator[list[int]]:
        for ids in encoded(tokenizer, texts, name):
            seen.append(ids)
            yield ids

    monkeypatch.setattr(evaluate, "encoded", watched)
    assert llm.perplexity(texts, window=50, max_windows=2).nll == pytest.approx(expected_nll(whole[:100], 50)[0])
    assert len(seen) < 10


def test_text_that_has_no_tokens_here() -> None:
    """A tokenizer may know fewer words than there are, or more tokens than the model."""
    words = Tokenizer(models.WordLevel({"import": 5, "last": 259, "next": 260, "os": 300}, unk_token="missing"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    llm = fake_llm(tokenizer=words)
    assert llm.perplexity(["import " * 9], window=4).windows == 2
    assert llm.perplexity(["import last " * 4], window=4).windows == 2
    with pytest.raises(UsageError, match="the text has token 260, outside the model's vocabulary of 260"):
        llm.perplexity(["import next " * 4], window=4)
    with pytest.raises(UsageError, match="the text is outside the vocabulary: "):
        llm.perplexity(["import sys " * 9], window=4)
    with pytest.raises(UsageError, match="the text has token 300, outside the model's vocabulary of 260"):
        llm.perplexity(["import os " * 9], window=4)
    with pytest.raises(UsageError, match="the prompt is outside the tokenizer's vocabulary: "):
        llm.generate("import sys")


def test_likelihood_of_extreme_logits() -> None:
    logits = np.array([[1e4, -1e4, 0], [-1e30, 5, 5], [0, 0, 0]], np.float32)
    np.testing.assert_allclose(negative_log_likelihood(logits, [0, 1]), [0, math.log(2)], atol=1e-7)
    assert negative_log_likelihood(logits, [1])[0] == pytest.approx(2e4)


def test_likelihood_is_exact_for_large_logits_of_a_large_vocabulary() -> None:
    """Floats near a thousand are 6e-5 apart: their distances are exact, sums with the mass must not be floats."""
    draw = np.random.default_rng(4)
    logits = (1000 + draw.standard_normal((17, 40000))).astype(np.float32)
    targets = draw.integers(0, 40000, 17)
    exact = logits.astype(np.float64) - 1000
    wanted = np.log(np.exp(exact).sum(axis=1)) - exact[np.arange(17), targets]
    np.testing.assert_allclose(negative_log_likelihood(logits, list(targets)), wanted, rtol=0, atol=1e-6)


def test_malformed_data(tmp_path: Path) -> None:
    llm = fake_llm(tokenizer=TOKENIZER)
    path = tmp_path / "data.jsonl"
    for content, message in (
        ('{"text": "a"}\nnonsense\n', "line 2"),
        ('{"txt": "a"}\n', "line 1"),
        ('{"text": 3}\n', "line 1"),
        ("[1]\n", "item 1"),
        ("plain\n", "line 1"),
        ('{"text": "a"}\n', r"window takes 1000: give more text or a smaller window \(--window\)$"),
        ("", "0 tokens.* give more text$"),
    ):
        path.write_text(content)
        with pytest.raises(UsageError, match=message):
            llm.perplexity(path)
    with pytest.raises(UsageError, match="cannot read"):
        read_documents(tmp_path / "nowhere")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot read"):
        read_documents(path)
    for wrong in ({"max_windows": 0}, {"max_windows": -1}, {"window": "9"}, {"documents": 3}):
        with pytest.raises(UsageError, match=f"{next(iter(wrong))} must be a"):
            llm.perplexity(**{"documents": TEXTS, "window": 97} | wrong)
    with pytest.raises(UsageError, match="window must be at least 2"):
        llm.perplexity(TEXTS, window=1)
