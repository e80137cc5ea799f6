"""The exact distribution that sampling parameters define, and how a request draws from it.

Order of the options, as in vLLM: biases, repetition penalty, frequency and presence penalty, structured outputs,
temperature, min-p and top-k on the logits, then top-p on the remaining tokens, renormalized. Probabilities are float64.
Each request has its own random generator, so its tokens do not depend on the other requests of its batch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from qcompile.errors import OverflowedError
from qcompile.runtime.sampling.accept import Distribution, pick
from qcompile.runtime.sampling.arrays import DoubleArray, FloatArray
from qcompile.runtime.sampling.biases import NO_BANS, BiasTable, TokenBiases
from qcompile.runtime.sampling.inputs import GREEDY, SamplingInputs
from qcompile.runtime.sampling.logprobs import MOST_REPORTED, empty_reports
from qcompile.runtime.sampling.masks import GrammarState, Masks
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.sampling.penalties import Occurrences, Penalties, penalize


def finite_peak(logits: FloatArray) -> np.float32:
    """The largest of logits [vocab]. Raises OverflowedError if it is infinite or any logit is NaN."""
    peak: np.float32 = logits.max()
    if not np.isfinite(peak):
        raise OverflowedError
    return peak


def distribution(logits: FloatArray, params: SamplingParams) -> Distribution:
    """The tokens that can be drawn, in ascending order, and their probabilities [candidates] (float64, sum 1).

    logits: [vocab], with biases and penalties applied; temperature must not be 0. All ties at the limit of top-k are
    kept; of ties at the limit of top-p, those with the lowest token numbers. Raises OverflowedError if the largest is
    not finite.
    """
    peak = finite_peak(logits)
    floor: float | np.floating[Any] = peak + np.float32(_min_logit(params))
    if 0 < params.top_k < len(logits):
        floor = max(floor, np.partition(logits, -params.top_k)[-params.top_k])
    ids = np.flatnonzero(logits >= floor)
    with np.errstate(over="ignore"):  # near temperature 0, all but the largest logits become -inf
        weights = np.exp((logits[ids].astype(np.float64) - np.float64(peak)) / params.temperature)
    if params.top_p < 1:
        weights /= weights.sum()
        # All weights below (1 - top_p) / n together are less than what may be left out; half of it, for rounding. A
        # sort is many times faster than an argsort.
        falling = np.sort(weights[weights >= (1 - params.top_p) / (2 * len(weights))])[::-1]
        count = np.count_nonzero(np.cumsum(falling) - falling < params.top_p)
        kept = weights > falling[count - 1]
        ties = np.flatnonzero(weights == falling[count - 1])
        kept[ties[: count - np.count_nonzero(kept)]] = True
        ids, weights = ids[kept], weights[kept]
    return ids, weights / weights.sum()


def _min_logit(params: SamplingParams) -> float:
    """What to add to the largest logit for min-p's limit."""
    return max(params.temperature * math.log(params.min_p), -1e38) if params.min_p else -math.inf


class Sampler:
    """Draws the tokens of one request, with its parameters, its random generator, and the tokens seen so far.

    `index` numbers the samples of a prompt (n > 1): each has its own random stream from the same seed. `grammar`
    follows the output if the parameters have structured outputs. `biases`: None are those of the parameters.
    """

    def __init__(
        self,
        params: SamplingParams,
        index: int,
        prompt: Sequence[int],
        vocab: int,
        grammar: GrammarState | None = None,
        biases: TokenBiases | None = None,
    ) -> None:
        self.params, self._vocab, self._index, self.grammar = params, vocab, index, grammar
        self._ahead: deque[float] = deque()  # random numbers that `guess` or `inputs` gave and `uniform` will return
        self._noted: Occurrences | None = None
        """The tokens that penalties are for: of the prompt only if its repetition counts."""
        if params.repetition_penalty != 1 or params.counts:
            self._noted = Occurrences(prompt if params.repetition_penalty != 1 else ())
        self.biases = biases or TokenBiases(BiasTable(params.logit_bias, NO_BANS, vocab))
        self._notes = self._noted is not None or grammar is not None or params.bans
        self.argmax_only = params.argmax_only
        """Whether a token is the argmax of the model's logits, and nothing is noted of it."""
        plain = self._noted is None and self.params.logprobs is None
        self.foresees = plain and not params.bad_words
        """Whether `inputs` can be asked for tokens before those before them are known. Masks are computed later."""
        top_k = params.top_k if 0 < params.top_k < vocab else 0
        self._limits = params.temperature, params.top_p, _min_logit(params), top_k
        self._reports: DoubleArray | None = None
        self._taken: DoubleArray | None = None
        self._known: DoubleArray | None = None

    @cached_property
    def _random(self) -> np.random.Generator:
        """Made when a number is needed first, as most requests need none."""
        seed = self.params.seed
        if seed is not None and seed < 0:  # entropy has no sign
            seed %= 1 << 64
        entropy = None if seed is None else [seed, self._index]
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))

    def draw(self, logits: FloatArray) -> int:
        """Draw the next token from its logits [vocab]. Raises OverflowedError if the largest is not finite, also if
        penalties make it so."""
        penalized = self._penalized(logits)
        if self.params.temperature == 0:
            finite_peak(penalized)
            token = int(penalized.argmax())
        else:
            token = pick(distribution(penalized, self.params), self.uniform())
        self.note(token)
        return token

    def guess(self, logits: FloatArray, ahead: Sequence[int]) -> tuple[int, Distribution]:
        """Draw a draft token from the draft's logits [vocab] after the tokens `ahead`. Also returns its distribution.

        Uses the same random number that `draw` will use at that position: similar distributions then give equal tokens.
        """
        drafted = self.distribution(logits, ahead)
        self._look_ahead(len(ahead) + 1)
        return pick(drafted, self._ahead[len(ahead)]), drafted

    def distribution(self, logits: FloatArray, ahead: Sequence[int] = ()) -> Distribution:
        """The distribution for logits [vocab] after tokens `ahead`, which are not noted yet. Not for temperature 0."""
        return distribution(self._penalized(logits, ahead), self.params)

    def uniform(self) -> float:
        """The next random number in [0, 1)."""
        return self._ahead.popleft() if self._ahead else float(self._random.random())

    def inputs(
        self, first: int, count: int, ahead: Sequence[int] = (), known: Sequence[int] = (), skipped: int = 0
    ) -> SamplingInputs:
        """What an executor needs to choose up to `count` tokens, the first of them after position `first`.

        `ahead` are tokens after that position that are not noted yet. `took` must be told which tokens were chosen.
        `skipped` are how many are to be chosen before with other inputs, of which `took` was not told yet.
        `known` are the prompt's tokens before, up to position `first`, to report as well: `take_known` returns that.
        """
        params, reports = self.params, self._new_reports(len(known), count)
        if not count or params.argmax_only:
            return GREEDY._replace(first=first, known=known, reports=reports) if known else GREEDY
        penalties = None
        if self._noted:
            options = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
            penalties = Penalties(*options, *self._noted.listed(), count, ahead)
        masks = Masks(self.grammar, count, ahead) if self.grammar else None
        bias = self.biases.after(skipped, ahead)
        if params.temperature == 0:
            return GREEDY._replace(
                first=first, penalties=penalties, bias=bias, known=known, reports=reports, masks=masks
            )
        self._look_ahead(skipped + count)
        uniforms = list(islice(self._ahead, skipped, skipped + count))
        return SamplingInputs(*self._limits, first, uniforms, penalties, bias, known, reports, masks)

    def _new_reports(self, known: int, chosen: int) -> DoubleArray | None:
        """Room for the reports of `known` known tokens, and of `chosen` chosen ones if they are to be reported."""
        params, alternatives = self.params, []
        if known:
            alternatives.append(params.prompt_logprobs or 0)
        if chosen and params.logprobs is not None and params.logprobs <= MOST_REPORTED:
            alternatives.append(params.logprobs)
        else:
            chosen = 0
        self._known = self._reports = None
        if not alternatives:
            return None
        reports = empty_reports(known + chosen, min(max(alternatives), self._vocab))
        self._known = reports[:known] if known else None
        self._reports = reports[known:] if chosen else None
        return reports

    def took(self, tokens: Sequence[int]) -> None:
        """Note tokens that an executor has chosen with `inputs`, and drop the random numbers that it used.

        `take_reports` then returns their reports.
        """
        if self.argmax_only:
            return
        self._taken, self._reports = self._reports, None
        if self.params.temperature:
            for _ in tokens:
                self._ahead.popleft()
        if self._notes:
            for token in tokens:
                self.note(token)

    def take_reports(self) -> DoubleArray | None:
        """Reports of the tokens that an executor has chosen last, if it was asked for any; once."""
        reports, self._taken = self._taken, None
        return reports

    def take_known(self) -> DoubleArray | None:
        """Reports of known tokens, if an executor was asked for any last; once."""
        reports, self._known = self._known, None
        return reports

    def _look_ahead(self, count: int) -> None:
        """Have at least `count` of the next random numbers ready."""
        if len(self._ahead) < count:
            self._ahead.extend(self._random.random(count - len(self._ahead)).tolist())

    def fresh(self) -> float:
        """A random number in [0, 1) that no guess has used; discards the ones that guesses used."""
        self._ahead.clear()
        return float(self._random.random())

    def note(self, token: int) -> None:
        """Note that the token was appended to the output."""
        self.biases.note(token)
        if self._noted:
            self._noted.note(token)
        if self.grammar:
            self.grammar.note(token)

    def _penalized(self, logits: FloatArray, ahead: Sequence[int] = ()) -> FloatArray:
        """Logits [vocab] after the tokens `ahead`, with biases, penalties and the grammar's mask."""
        if bias := self.biases.after(0, ahead):
            logits = bias.added(logits)
        if self._noted:
            params = self.params
            options = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
            logits = penalize(logits, *self._noted.listed(ahead), *options)
        return self.grammar.masked(logits, ahead) if self.grammar else logits
