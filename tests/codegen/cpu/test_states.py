"""Recurrent states on the CPU: against the graph in float64, and bitwise for any division of a text into steps."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from qcompile import recipes
from qcompile.codegen.cpu import render
from qcompile.codegen.lower import lower
from qcompile.codegen.packing import WeightTable
from qcompile.formats.states import LOG_TOKENS
from qcompile.passes.base import run_passes
from qcompile.passes.schedule import configure
from qcompile.runtime.cpu.executor import Executor, StateMemory
from qcompile.runtime.loader import Arena
from qcompile.runtime.step import EVERYTHING, Limits, Rows
from qcompile.targets import get_target
from tests.support.graphs import recurrent
from tests.support.tiny import aligned, load_library

VOCAB, LENGTH, SLOTS, PAGES = 50, 70, 4, 12
TEXTS = np.random.default_rng(5).integers(0, VOCAB, (3, LENGTH)).tolist()
SHAPES: dict[str, dict[str, Any]] = {
    "hybrid": {"layers": 1, "value_dim": 20},
    "scan": {
        **{"heads": 40, "key_heads": 1, "key_dim": 16, "value_dim": 1, "rates": "keys", "delta": False},
        **{"attention": False, "layers": 1},
    },
    "linears of slices": {"layers": 1, "attention": False, "rank": 24},
    "hybrid in bf16": {"layers": 1, "value_dim": 20, "states": "bf16"},
    "hybrid in int8": {"layers": 1, "value_dim": 20, "states": "int8"},
}
ERRORS = {"f32": 5e-5, "bf16": 5e-3, "int8": 1e-2}
"""float32 sums of about 100 numbers of size 1, and e^x to 1.2e-7; the states feed errors back for 70 tokens. Those in
fewer bits are rounded eight times."""
Open = Callable[..., Executor]


def sizes_of(shape: str) -> tuple[dict[str, Any], str]:
    """The sizes of a shape, and how its states are stored."""
    sizes = dict(SHAPES[shape])
    return sizes, sizes.pop("states", "f32")


@cache
def prepared(shape: str) -> tuple[Any, list[np.ndarray], int, int]:
    """The library of a shape, its weights, and bytes of a page and of a slot."""
    sizes, states = sizes_of(shape)
    passes = configure(recipes.get_recipe("f32").settings(), {"cache.format": "kv32", "cache.states": states})
    graphs, _ = run_passes(recurrent(**sizes), passes[1:])
    table = WeightTable()
    program = lower(graphs[-1], table)
    blobs = [aligned(blob.numpy()) for weight in table.weights for blob in weight.produce()]
    library = load_library(render.render(program, get_target("cpu")), get_target("cpu"))
    return library, blobs, program.kv.page_bytes, program.states.slot_bytes


@pytest.fixture
def opened() -> Iterator[Open]:
    """Opens a shape's library with states of NaN."""
    with ExitStack() as stack:

        def make(shape: str, threads: int = 1) -> Executor:
            library, blobs, page_bytes, slot_bytes = prepared(shape)
            pointers = (ctypes.c_void_p * len(blobs))(*[blob.ctypes.data for blob in blobs])
            kv, states = Arena(PAGES * page_bytes), Arena(SLOTS * slot_bytes)
            states.view[:] = b"\xff" * states.size
            executor = Executor(
                library, pointers, kv, PAGES, threads, Limits(128, VOCAB, 64, 512), states=StateMemory(states, 0)
            )
            stack.callback(executor.close)
            return executor

        yield make


def rows(text: int, start: int, end: int, certain: int = EVERYTHING, tokens: Sequence[int] | None = None) -> Rows:
    """Tokens start .. end of a text, with logits of all; its pages and slot are its own."""
    given = TEXTS[text][start:end] if tokens is None else tokens
    return Rows(given, start, [4 * text + 1, 4 * text], end - start, slot=SLOTS - 1 - text, certain=certain)


def logits_of(executor: Executor, *parts: Rows) -> np.ndarray:
    logits = executor.step(parts, True)[1]
    assert logits is not None
    return logits.copy()


@cache
def reference(shape: str) -> np.ndarray:
    """Logits [texts, LENGTH, vocab] of the whole texts in float64."""
    positions = torch.arange(LENGTH).expand(len(TEXTS), -1)
    graph = recurrent(**sizes_of(shape)[0])
    logits: torch.Tensor = graph.run(torch.tensor(TEXTS), positions, dtype=torch.float64)
    return logits.numpy()


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_graph(opened: Open, shape: str) -> None:
    result = logits_of(opened(shape), rows(0, 0, LENGTH))
    np.testing.assert_allclose(result, reference(shape)[0], atol=ERRORS[sizes_of(shape)[1]])


@pytest.mark.parametrize("shape", SHAPES)
def test_bits_do_not_depend_on_the_division_into_steps(opened: Open, shape: str) -> None:
    whole = logits_of(opened(shape), rows(0, 0, LENGTH))
    for cuts in ([1, 2, 3, 50, 51, LENGTH], [40, LENGTH], [*range(1, LENGTH + 1)]):
        executor = opened(shape)
        parts = [logits_of(executor, rows(0, a, b)) for a, b in zip([0, *cuts], cuts, strict=False)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("shape", SHAPES)
def test_bits_depend_neither_on_neighbours_nor_on_threads(opened: Open, shape: str) -> None:
    alone = [logits_of(opened(shape), rows(text, 0, 30)) for text in range(3)]
    for threads in (1, 2, 3):
        executor = opened(shape, threads)
        first = logits_of(executor, rows(0, 0, 10), rows(1, 0, 7), rows(2, 0, 29))
        second = logits_of(executor, rows(2, 29, 30), rows(0, 10, 30), rows(1, 7, 30))
        np.testing.assert_array_equal(np.concatenate([first[:10], second[1:21]]), alone[0])
        np.testing.assert_array_equal(np.concatenate([first[10:17], second[21:]]), alone[1])
        np.testing.assert_array_equal(np.concatenate([first[17:], second[:1]]), alone[2])


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_not_certain_can_be_taken_back(opened: Open, shape: str) -> None:
    """Random rounds: a step with drafts, of which some are kept; in between, drafts that leave the base alone."""
    whole = logits_of(opened(shape), rows(0, 0, LENGTH))
    drawn = np.random.default_rng(1)
    executor, at = opened(shape, 2), 9
    logits_of(executor, rows(0, 0, at))
    while at < LENGTH - LOG_TOKENS // 2:
        drafts, kept = drawn.integers(0, LOG_TOKENS // 2, 2)
        kept = min(kept, drafts)
        for place in range(drafts):  # a draft over the same states, one token at a time
            wrong = drawn.integers(0, VOCAB, 1).tolist()
            logits_of(executor, rows(0, at + place, at + place + 1, 0, wrong))
        tokens = [*TEXTS[0][at : at + kept + 1], *drawn.integers(0, VOCAB, drafts - kept).tolist()]
        result = logits_of(executor, rows(0, at, at + len(tokens), at + 1, tokens))
        np.testing.assert_array_equal(result[: kept + 1], whole[at : at + kept + 1])
        at += int(kept) + 1
    np.testing.assert_array_equal(logits_of(executor, rows(0, at, LENGTH)), whole[at:])


@pytest.mark.parametrize("shape", SHAPES)
def test_random_batches(opened: Open, shape: str) -> None:
    """200 steps of random parts of texts that start again and again, each in a slot that held another text."""
    whole = [logits_of(opened(shape), rows(text, 0, LENGTH)) for text in range(3)]
    drawn, executor, at = np.random.default_rng(2), opened(shape, 2), [0, 0, 0]
    for _ in range(200):
        parts, wanted = [], []
        for text in drawn.permutation(3)[: drawn.integers(1, 4)].tolist():
            if at[text] >= LENGTH or drawn.random() < 0.05:
                at[text] = 0
            end = min(LENGTH, at[text] + int(drawn.integers(1, 20)))
            parts.append(rows(text, at[text], end))
            wanted.append(whole[text][at[text] : end])
            at[text] = end
        np.testing.assert_array_equal(logits_of(executor, *parts), np.concatenate(wanted))


@pytest.mark.parametrize("shape", SHAPES)
def test_multi_step_decode_equals_single_steps(opened: Open, shape: str) -> None:
    one, many = opened(shape), opened(shape, 2)
    for executor in (one, many):
        logits_of(executor, rows(0, 0, 5), rows(1, 0, 8))
    tokens, result = [TEXTS[0][5], TEXTS[1][8]], []
    for step in range(6):
        parts = [rows(text, at + step, at + step + 1, tokens=[tokens[text]]) for text, at in ((0, 5), (1, 8))]
        tokens = list(one.step(parts, False)[0])
        result += tokens
    assert many.decode([rows(0, 5, 6), rows(1, 8, 9)], 6) == result


def test_steps_that_no_state_can_hold_are_refused(opened: Open) -> None:
    executor = opened("hybrid")
    logits_of(executor, rows(0, 0, 5))
    too_long = rows(0, 5, 5 + LOG_TOKENS + 1, 5)
    for wrong in (rows(0, 5, 6)._replace(slot=SLOTS), rows(0, 5, 6)._replace(slot=-1), too_long):
        with pytest.raises(RuntimeError, match="refused"):
            executor.step([wrong], False)
    with pytest.raises(RuntimeError, match="refused"):
        executor.step([rows(0, 5, 6), rows(1, 0, 3)._replace(slot=rows(0, 5, 6).slot)], False)
    logits_of(executor, rows(0, 5, 5 + LOG_TOKENS, 5))


def test_a_slot_that_holds_no_state_gives_no_tokens(opened: Open) -> None:
    argmax, _ = opened("hybrid").step([rows(0, 5, 6)], False)
    assert argmax[0] == -1
