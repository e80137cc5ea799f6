"""Embeddings of texts: pooled hidden states, cut and normalized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np

from qcompile.errors import OverflowedError, UnsupportedError, UsageError, shown
from qcompile.runtime.sampling.arrays import FloatArray
from qcompile.runtime.sampling.params import plain_number
from qcompile.runtime.step import HiddenStates, Limits, StepExecutor

Pooling = Literal["last", "mean"]
"""The hidden state of a text's last token, or the mean of those of all its tokens."""
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)


class PoolingEngine(Protocol):
    """What is needed of an Engine."""

    executor: StepExecutor

    def pooled(self, texts: Sequence[Sequence[int]], pooling: Pooling, adapter: str | None) -> FloatArray: ...


class GivesHidden(Protocol):
    """What is needed of an executor to check requests."""

    @property
    def hidden(self) -> HiddenStates | str:
        """What gives hidden states, or why nothing does."""

    @property
    def limits(self) -> Limits: ...


def hidden_states(executor: GivesHidden) -> HiddenStates:
    """What gives hidden states. Raises UnsupportedError if the model cannot."""
    if isinstance(executor.hidden, str):
        raise UnsupportedError(f"this artifact gives no hidden states: {executor.hidden}")
    return executor.hidden


@dataclass(frozen=True)
class EmbeddingOptions:
    """How embeddings are made of hidden states, see `LLM.embed`. `lora`: the adapter that computes these.

    Raises UsageError for values of other kinds.
    """

    pooling: Pooling = "last"
    normalize: bool = True
    dimensions: int | None = None
    lora: str | None = None

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise UsageError(f"pooling must be one of {', '.join(POOLINGS)}, not {shown(self.pooling)}")
        if not isinstance(self.normalize, bool):
            raise UsageError(f"normalize must be True or False, not {shown(self.normalize)}")
        given = plain_number(self.dimensions)
        if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
            raise UsageError(f"dimensions must be a whole number of at least 1, not {shown(self.dimensions)}")

    def check(self, executor: GivesHidden) -> None:
        """Raise UnsupportedError if the model gives no hidden states, UsageError if they have fewer dimensions."""
        width = hidden_states(executor).width
        if self.dimensions is not None and self.dimensions > width:
            raise UsageError(f"dimensions must be at most {width}, the model's hidden size, not {self.dimensions}")

    def embeddings(self, engine: PoolingEngine, texts: Sequence[Sequence[int]]) -> FloatArray:
        """Embeddings [texts, dimensions] of texts (tokens). Raises OverflowedError where numbers are not finite."""
        self.check(engine.executor)
        pooled = engine.pooled(texts, self.pooling, self.lora)[:, : self.dimensions]
        if not np.isfinite(pooled).all():
            raise OverflowedError
        if self.normalize:
            lengths = np.sqrt(np.einsum("ij,ij->i", pooled, pooled, dtype=np.float64))[:, None]
            pooled = (pooled / np.where(lengths > 0, lengths, 1)).astype(np.float32)
        return pooled
