"""Perplexity of a model on text.

Documents are joined, each preceded by the model's beginning-of-text token. The stream is cut into windows that do not
overlap, and an incomplete last one is dropped. The mean negative log likelihood is over the `window - 1` predictions of
every window. Keys and values are read back through the artifact's cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from qcompile import texts
from qcompile.errors import OverflowedError, UnsupportedError, UsageError
from qcompile.runtime.sampling.arrays import DoubleArray, FloatArray
from qcompile.runtime.step import StepExecutor
from qcompile.text_tables.reading import documents as documents_of_table
from qcompile.text_tables.reading import is_table
from qcompile.texts import encoded, started

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_BLOCK = 16
"""Rows for which the likelihood is computed at once."""


class LogitsSource(Protocol):
    """Computes the logits of texts: what the evaluation needs of an engine."""

    executor: StepExecutor
    context: int
    """Most tokens of a text."""

    def forward(
        self, sequences: Sequence[Sequence[int]], chunk: int, adapter: str | None = None
    ) -> Iterator[tuple[int, int, FloatArray]]:
        """Logits of every position of sequences of equal length, `chunk` positions of each sequence per step.

        adapter: the name of the one that all have.
        """


@dataclass(frozen=True)
class Evaluation:
    """nll: mean negative log likelihood over `tokens` predictions in `windows` windows, in nats. perplexity: its
    exponential. window: tokens of each window, fewer than requested where the context, or the cache, is shorter.
    """

    perplexity: float
    nll: float
    windows: int
    tokens: int
    window: int


def read_documents(path: str | Path) -> list[str]:
    """The "text" of every line of a JSONL file, item of a JSON array, or row of a table (text_tables).

    Raises UsageError naming the faulty one.
    """
    if is_table(Path(path)):
        return documents_of_table(Path(path))
    try:
        whole = texts.read(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    documents = texts.documents(whole, str(path))
    if documents is None and whole.strip():
        raise UsageError(f'{path} line {texts.lines(whole)[0][0]}: not a JSON object with a "text" in Unicode')
    return documents or []


def token_stream(tokenizer: Tokenizer, documents: Sequence[str], bos: int, most: int | None = None) -> list[int]:
    """The tokens of all documents, joined, with `bos` before each. Stops after the document that reaches `most` tokens.

    Raises UsageError if a document is not text.
    """
    for number, text in enumerate(documents):
        if texts.text_of({"text": text}, "text") is None:
            raise UsageError(f"document {number} is not text in Unicode")
    stream: list[int] = []
    for ids in encoded(tokenizer, documents, "the text"):
        stream += started(ids, bos)
        if most is not None and len(stream) >= most:
            break
    return stream


def negative_log_likelihood(logits: FloatArray, targets: Sequence[int]) -> DoubleArray:
    """-log p(target) in nats of each row, float64. logits: [rows, vocab]; the last row may have no target."""
    wanted = np.asarray(targets, np.int64)
    result = np.empty(len(wanted), np.float64)
    for start in range(0, len(wanted), _BLOCK):  # few rows at a time, so that they stay in the core's cache
        end = min(start + _BLOCK, len(wanted))
        rows = logits[start:end]  # [block, vocab]
        highest = rows.max(axis=1, keepdims=True)  # [block, 1]
        # float32 exponentials lie in [0, 1]; their sum in float64 keeps the error of a row below 1e-6.
        mass = np.exp(rows - highest).sum(axis=1, dtype=np.float64)  # [block]
        chosen = rows[np.arange(end - start), wanted[start:end]].astype(np.float64)
        result[start:end] = np.log(mass) + highest[:, 0] - chosen
    return result


def perplexity(
    engine: LogitsSource,
    tokenizer: Tokenizer,
    bos: int | None,
    documents: str | Path | Sequence[str],
    window: int = 2048,
    progress: Callable[[int, int], None] | None = None,
    max_windows: int | None = None,
    adapter: str | None = None,
) -> Evaluation:
    """Evaluate on a JSONL file or on texts. `progress(done, total)` is called after every window.

    Windows are limited to the model's context; only the first `max_windows` are evaluated. Raises UsageError if the
    text does not fill one window, OverflowedError if logits are not finite.
    """
    for name, value in (("window", window), ("max_windows", 1 if max_windows is None else max_windows)):
        if not isinstance(value, int) or value < 1:
            raise UsageError(f"{name} must be a whole number of at least {1 + (name == 'window')}, not {value!r}")
    if not isinstance(documents, str | Path | Sequence):
        raise UsageError(f"documents must be a path or a list of texts, not {type(documents).__name__}")
    window = min(window, engine.context)
    if window < 2:
        raise UsageError(f"window must be at least 2, not {window}")
    texts = read_documents(documents) if isinstance(documents, str | Path) else documents
    most = None if max_windows is None else max_windows * window
    stream = token_stream(tokenizer, texts, 0 if bos is None else bos, most)
    if (worst := max(stream, default=0)) >= (size := engine.executor.limits.vocab):
        raise UsageError(f"the text has token {worst}, outside the model's vocabulary of {size}")
    windows = len(stream) // window
    if windows == 0:
        shorter = " or a smaller window (--window)" if len(stream) > 1 else ""
        raise UsageError(f"the text has {len(stream)} tokens, one window takes {window}: give more text{shorter}")
    windows = windows if max_windows is None else min(windows, max_windows)
    total = 0.0
    for number in range(windows):
        tokens = stream[number * window : (number + 1) * window]
        for _, start, logits in engine.forward([tokens], engine.executor.limits.max_tokens, adapter):
            targets = tokens[start + 1 : start + 1 + len(logits)]
            total += float(negative_log_likelihood(logits, targets).sum()) if targets else 0.0
        if not math.isfinite(total):
            raise OverflowedError(f"window {number + 1}: ")
        if progress:
            progress(number + 1, windows)
    count = windows * (window - 1)
    nll = total / count
    try:
        return Evaluation(math.exp(nll), nll, windows, count, window)
    except OverflowError as error:
        raise UnsupportedError(
            f"the model is wrong by {nll:,.0f} nats a token, a perplexity that no float holds"
        ) from error
