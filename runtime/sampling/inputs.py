"""Sampling inputs: what an executor needs to choose the tokens of a sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from qcompile.runtime.sampling.arrays import DoubleArray
from qcompile.runtime.sampling.masks import Masks
from qcompile.runtime.sampling.penalties import Bias, Penalties


class SamplingInputs(NamedTuple):
    """How an executor chooses a sequence's tokens: options, and the random number for each position from `first` on.

    temperature: 0 is greedy. top_k: 0 is no limit. min_logit: what to add to the largest logit for min-p's limit.
    bias, penalties, masks: None if the logits stay as they are. The tokens listed there are those up to
    position `first`. known: tokens that are given already; their logits are those of the positions before `first`,
    where nothing is chosen. reports: None, or where the executor reports log probabilities
    (`logprobs.empty_reports`): first of the known tokens, then of the token that the logits of position `first` give,
    and so on. Rows of tokens that are rejected are undefined.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    min_logit: float = -math.inf
    top_k: int = 0
    first: int = 0
    """The position with the logits that the first random number draws from."""
    uniforms: Sequence[float] = ()
    penalties: Penalties | None = None
    bias: Bias | None = None
    known: Sequence[int] = ()
    reports: DoubleArray | None = None
    masks: Masks | None = None

    @property
    def plain(self) -> bool:
        """Whether only the argmax of the logits is wanted."""
        return not (self.temperature or self.penalties or self.bias or self.masks) and self.reports is None

    @property
    def lists(self) -> bool:
        """Whether there are lists of tokens, or reports: more than options and random numbers."""
        return bool(self.penalties or self.bias or self.known) or self.reports is not None

    @property
    def unreported(self) -> SamplingInputs:
        """These inputs without reports, for steps that draft."""
        return self._replace(known=(), reports=None) if self.reports is not None else self


GREEDY = SamplingInputs()
