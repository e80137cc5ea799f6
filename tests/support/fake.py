"""A model of a few lines behind the library's C interface, for testing the runtime without one.

Each position writes one number into its page; the logits of a position follow from the sum of the numbers of
its whole history, read back through the block table. A wrong page, slot, position or order changes them.
"""

from __future__ import annotations

import copy
import ctypes
import hashlib
import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from qcompile.artifact.abi import CPU_ABI
from qcompile.runtime.cpu.executor import Executor, QcSampling
from qcompile.runtime.llm import LLM
from qcompile.runtime.loader import Arena
from qcompile.runtime.sampling.accept import pick
from qcompile.runtime.sampling.arrays import FloatArray
from qcompile.runtime.sampling.inputs import SamplingInputs
from qcompile.runtime.sampling.masks import mask_words
from qcompile.runtime.sampling.params import SamplingParams
from qcompile.runtime.sampling.penalties import Bias, Occurrences, penalize
from qcompile.runtime.sampling.sampling import distribution
from qcompile.runtime.step import Limits, Rows

VOCAB, PAGE_TOKENS, MAX_TOKENS, CONTEXT, EOS = 260, 64, 96, 1000, 0
PAGE_BYTES = PAGE_TOKENS * 8
_COLUMNS = np.arange(VOCAB)


def mark(token: int, position: int) -> int:
    """What a position leaves in the cache."""
    return (token + 1) * (position * 7919 + 104729) % 1000003


def logits_of(state: int) -> np.ndarray:
    """Logits [vocab] of a history; `state` is the sum of its marks."""
    return (4 * np.sin(state % 9973 + _COLUMNS * 1.7 + (state % 31) * _COLUMNS)).astype(np.float32)


def reference_logits(tokens: Sequence[int]) -> np.ndarray:
    """Logits [tokens, vocab] of a sequence, from no cache."""
    states = np.cumsum([mark(token, position) for position, token in enumerate(tokens)])
    return np.stack([logits_of(int(state)) for state in states])


def reference_greedy(prompt: Sequence[int], count: int, eos: int | None = EOS) -> list[int]:
    """Greedy continuation, including the end of text if it comes."""
    tokens = list(prompt)
    state = sum(mark(token, position) for position, token in enumerate(prompt))
    while len(tokens) < len(prompt) + count:
        tokens.append(int(logits_of(state).argmax()))
        if tokens[-1] == eos:
            break
        state += mark(tokens[-1], len(tokens) - 1)
    return tokens[len(prompt) :]


class FakeLibrary:
    """The functions of the generated library, checking all they are given."""

    def __init__(self) -> None:
        self.broken: int | None = None  # the logits of a row of this token are not finite
        self.steps: list[int] = []  # rows of each step
        self.decodes: list[int] = []  # steps of each multi-step decode
        self.closed = False

    def qc_describe(self) -> bytes:
        return json.dumps({"abi": CPU_ABI, "isa": "fake", "calls": ["all"]}).encode()

    def qc_open(self, config: Any) -> int:
        self.pages = config._obj.kv_pages
        self.max_tokens = config._obj.max_tokens
        cells = (ctypes.c_int64 * (self.pages * PAGE_TOKENS)).from_address(config._obj.kv)
        self.kv = np.ctypeslib.as_array(cells)
        self.kv[:] = -1 << 40
        return 1

    def qc_close(self, handle: int) -> None:
        self.closed = True

    def qc_step(self, handle: int, reference: Any) -> int:
        batch = reference._obj
        self.steps.append(batch.tokens)
        self._run(batch)
        return 0

    def qc_decode(self, handle: int, reference: Any, steps: int, out: int) -> int:
        batch = reference._obj
        assert batch.tokens == batch.sequences == batch.outputs
        self.decodes.append(steps)
        count = batch.sequences
        result = ints(out, steps * count)
        for step in range(steps):
            self._run(batch)
            chosen = ints(batch.argmax, count)
            result[step * count : (step + 1) * count] = chosen
            ints(batch.token_ids, count)[:] = np.maximum(chosen, 0)
            ints(batch.positions, count)[:] += 1
        return 0

    def _run(self, batch: Any) -> None:
        assert 1 <= batch.tokens <= self.max_tokens and 1 <= batch.sequences <= batch.tokens
        tokens, positions = ints(batch.token_ids, batch.tokens), ints(batch.positions, batch.tokens)
        start = ints(batch.query_start, batch.sequences + 1)
        table = ints(batch.block_table, batch.sequences * batch.block_stride).reshape(batch.sequences, -1)
        assert start[0] == 0 and start[-1] == batch.tokens
        assert tokens.min() >= 0 and tokens.max() < VOCAB
        states = np.zeros(batch.tokens, np.int64)
        for sequence in range(batch.sequences):
            first, end = start[sequence], start[sequence + 1]
            assert end > first and (np.diff(positions[first:end]) == 1).all()
            history = np.arange(positions[end - 1] + 1)
            pages = table[sequence][history // PAGE_TOKENS]
            assert pages.min() >= 0 and pages.max() < self.pages
            cells = pages * PAGE_TOKENS + history % PAGE_TOKENS
            for row in range(first, end):
                self.kv[cells[positions[row]]] = mark(int(tokens[row]), int(positions[row]))
            keep_recent(batch, sequence, tokens[first:end], positions[first:end])
            states[first:end] = np.cumsum(self.kv[cells])[positions[first:end]]
        wanted = ints(batch.output_rows, batch.outputs)
        for output, row in enumerate(wanted):
            logits, broken = logits_of(int(states[row])), tokens[row] == self.broken
            ints(batch.argmax, batch.outputs)[output] = -1 if broken else logits.argmax()
            if batch.sampling and not broken:
                sequence = int(np.searchsorted(start, row, side="right")) - 1
                ints(batch.argmax, batch.outputs)[output] = drawn(batch, sequence, logits, int(positions[row]))
            if batch.logits:
                floats = (ctypes.c_float * VOCAB).from_address(batch.logits + 4 * VOCAB * output)
                np.ctypeslib.as_array(floats)[:] = np.nan if broken else logits


def keep_recent(batch: Any, sequence: int, tokens: np.ndarray, positions: np.ndarray) -> None:
    """Keep the tokens of a step that follow those listed."""
    sampling = (QcSampling * batch.sequences).from_address(batch.sampling)[sequence] if batch.sampling else None
    for token, position in zip(tokens, positions, strict=True):
        if sampling and sampling.first < position <= sampling.first + sampling.room:
            ints(sampling.recent, sampling.room)[position - sampling.first - 1] = token


def drawn(batch: Any, sequence: int, logits: np.ndarray, position: int) -> int:
    """The token that a sequence's sampling inputs choose at a position, or know; reports it if asked."""
    sampling = (QcSampling * batch.sequences).from_address(batch.sampling)[sequence]
    at, room = position - sampling.first + sampling.known, sampling.known + sampling.reported
    known = 0 <= at < sampling.known
    token = int(ints(sampling.known_next, sampling.known)[at]) if known else chosen(sampling, logits, position)
    if 0 <= at < room:
        width = 4 + 2 * sampling.alternatives
        every = (ctypes.c_double * (width * room)).from_address(sampling.reports)
        top = np.lexsort((_COLUMNS, -logits))[: sampling.alternatives]
        rank, weights = 1 + (logits > logits[token]).sum(), np.exp(logits.astype(np.float64) - logits.max())
        report = [logits.max(), weights.sum(), logits[token], rank, *logits[top], *top]
        np.ctypeslib.as_array(every).reshape(-1, width)[at] = report
    return token


def chosen(sampling: QcSampling, logits: np.ndarray, position: int) -> int:
    """The token that sampling inputs choose at a position."""
    if sampling.biased:
        values = np.ctypeslib.as_array((ctypes.c_float * sampling.biased).from_address(sampling.bias_values))
        logits = Bias(ints(sampling.bias_tokens, sampling.biased), values).added(logits)
    if sampling.repetition:
        logits = penalized(sampling, logits, position)
    if sampling.fill_mask:
        mask = np.zeros(mask_words(VOCAB), np.uint32)
        grammar = ctypes.cast(sampling.grammar, ctypes.py_object)
        recent = ctypes.cast(sampling.recent, ctypes.POINTER(ctypes.c_int32))
        changed = sampling.temperature or sampling.repetition or sampling.biased or sampling.reported
        best = int(logits.argmax())
        if not changed and sampling.fill_mask(grammar, recent, position - sampling.first, None, best) == 1:
            return best
        sampling.fill_mask(grammar, recent, position - sampling.first, mask.ctypes.data, len(mask))
        allowed = np.unpackbits(mask.view(np.uint8), count=VOCAB, bitorder="little")
        logits = np.where(allowed, logits, np.float32(-np.inf))
        if not allowed.any():
            return -1
    if sampling.temperature == 0:
        return int(logits.argmax())
    assert sampling.min_logit == -np.inf  # its min-p cannot be told from it
    params = SamplingParams(temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k)
    uniforms = (ctypes.c_double * sampling.count).from_address(sampling.uniforms)
    return pick(distribution(logits, params), uniforms[min(position - sampling.first, sampling.count - 1)])


def penalized(sampling: QcSampling, logits: np.ndarray, position: int) -> np.ndarray:
    """The logits of a position with a sequence's penalties."""
    noted = Occurrences(())
    noted._tokens, noted._counts = (array("i", ints(at, sampling.listed)) for at in (sampling.seen, sampling.counts))
    noted._place = {token: place for place, token in enumerate(noted._tokens)}
    assert 0 <= position - sampling.first <= sampling.room
    listed = noted.listed(ints(sampling.recent, sampling.room)[: position - sampling.first])
    return penalize(logits, *listed, sampling.repetition, sampling.frequency, sampling.presence)


def ints(address: int, count: int) -> np.ndarray:
    """The int32 array at an address."""
    return np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(address))


def listed(folder: Path) -> dict[str, Any]:
    """The files of a folder as the manifest of an artifact lists them."""
    contents = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    return {name: {"bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for name, c in contents.items()}


def byte_tokenizer() -> Any:
    """A tokenizer with a token for each byte (1 to 256) and a special <eos> (0)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<eos>": 0} | {letter: number for number, letter in enumerate(alphabet, start=1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


@dataclass
class Late:
    """A step or a multi-step decode that has been started, what slots of states are copied then, and its tokens once it
    has run."""

    rows: list[Rows]
    steps: int
    sampling: list[SamplingInputs]
    copied: list[tuple[int, int]] = field(default_factory=list)
    result: list[int] | None = None


class LateExecutor(Executor):
    """Runs what `start` is given as late as a GPU may: when its tokens, or those of a later call, are asked for. Two
    may be late at once."""

    overlaps = True
    most_late = 0  # the most that were late at once

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._late: list[Late] = []

    def start(
        self, sequences: Sequence[Rows], steps: int, sampling: Sequence[SamplingInputs] = ()
    ) -> Callable[[], list[int]]:
        while len(self._late) > 1:
            self._run_first()
        # As on a GPU, the inputs have been read when this returns.
        rows = [row._replace(tokens=list(row.tokens), pages=list(row.pages)) for row in sequences]
        late = Late(rows, steps, [draw._replace(penalties=copy.deepcopy(draw.penalties)) for draw in sampling])
        self._late.append(late)
        self.most_late = max(self.most_late, len(self._late))

        def wait() -> list[int]:
            while late.result is None:
                self._run_first()
            return late.result

        return wait

    def settle(self) -> None:
        """Run what is late, in order."""
        while self._late:
            self._run_first()

    def _run_first(self) -> None:
        (late, *others), self._late = self._late, []
        late.result = super().start(late.rows, late.steps, late.sampling)()
        for source, target in late.copied:
            super().copy_state(source, target)
        self._late = others

    def copy_state(self, source: int, target: int) -> None:
        if self._late:
            self._late[-1].copied.append((source, target))
        else:
            super().copy_state(source, target)

    def step(self, *given: Any, **more: Any) -> tuple[list[int], FloatArray | None]:
        self.settle()
        return super().step(*given, **more)

    def decode(self, *given: Any, **more: Any) -> list[int]:
        self.settle()
        return super().decode(*given, **more)


Chosen: type[Executor] = Executor
"""What fake_llm takes; tests/runtime/conftest.py changes it."""


def fake_llm(
    pages: int = 64, max_batch: int = 8, tokenizer: Any = None, max_tokens: int = MAX_TOKENS, most_outputs: int = 0
) -> LLM:
    """An LLM over the fake library."""
    limits = Limits(max_tokens, VOCAB, PAGE_TOKENS, CONTEXT, most_outputs=most_outputs)
    weights = (ctypes.c_void_p * 1)()
    executor = Chosen(FakeLibrary(), weights, Arena(pages * PAGE_BYTES), pages, 1, limits)
    model = {"bos_token_id": EOS, "eos_token_ids": [EOS]}
    return LLM(executor, {"model": model}, tokenizer, max_batch)
