"""Masks that models of transformers ask for: what they show is proved, and what cannot be proved is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from qcompile.checkpoints.attention_interface import attention
from qcompile.checkpoints.attention_masks import ShortTable, Shown, UnknownMask, begin, causal_mask, rehearsed
from qcompile.errors import UnsupportedError

LONGEST = 200
MaskFunction = Callable[..., Tensor]


def made(function: MaskFunction, longest: int = LONGEST) -> Any:
    return causal_mask(lambda config: config.longest, mask_function=function, config=SimpleNamespace(longest=longest))


def shown(function: MaskFunction, longest: int = LONGEST) -> Shown:
    result: Shown = made(function, longest).shown
    return result


def of(window: int = 0, chunk: int = 0, padding: Tensor | None = None) -> MaskFunction:
    """A causal mask with a window and chunks that begin after `padding` [1] tokens."""

    def function(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        late = torch.zeros((), dtype=torch.int64) if padding is None else padding[batch]
        seen = key <= query
        seen = seen & (key > query - window) if window else seen
        return seen & ((key - late) // chunk == (query - late) // chunk) if chunk else seen

    return function


@pytest.mark.parametrize("size", [1, 7, 50, 64, 199])
def test_windows_and_chunks(size: int) -> None:
    assert shown(of(window=size)) == (size, 0)
    assert shown(of(chunk=size)) == ((1, 0) if size == 1 else (0, size))


@pytest.mark.parametrize("size", [0, LONGEST, 2 * LONGEST])
def test_what_hides_nothing_is_no_window(size: int) -> None:
    assert shown(of(window=size)) == shown(of(chunk=size)) == (0, 0)


def test_a_mask_of_one_token() -> None:
    assert shown(of(), 1) == (0, 0)


@pytest.mark.parametrize(
    "function",
    [
        lambda b, h, q, k: k >= 0,  # both directions
        lambda b, h, q, k: k < q,  # not itself
        of(window=30, chunk=40),
        of(chunk=40, padding=torch.tensor([3])),
        lambda b, h, q, k: (k <= q) & ((k > q - 9) | (k < 4)),  # the first tokens stay
        lambda b, h, q, k: (k <= q) & (k != 100),
    ],
)
def test_other_masks_are_refused(function: MaskFunction) -> None:
    with pytest.raises(UnsupportedError, match="neither causal nor"):
        shown(function)


def traced(padding: int, sequences: int = 2) -> MaskFunction:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return of(chunk=16, padding=torch.full((sequences,), padding))


def test_what_depends_on_inputs_is_taken_from_passes_with_numbers() -> None:
    with pytest.raises(UnknownMask):
        shown(traced(0))

    def run() -> None:
        begin()
        shown(of(window=9))
        shown(of(chunk=16, padding=torch.zeros(2, dtype=torch.int64)))

    with rehearsed([(None, run)] * 2):
        for _ in range(2):
            begin()
            assert (shown(traced(0)), shown(traced(0))) == ((9, 0), (0, 16))
        with pytest.raises(UnsupportedError, match="other attention masks each time"):
            shown(traced(0))
    with pytest.raises(UnknownMask):
        shown(traced(0))


def test_passes_must_agree() -> None:
    runs = [(None, functools.partial(shown, of(window))) for window in (5, 6)]
    with pytest.raises(UnsupportedError, match="depends on the number"), rehearsed(runs):
        pass


def of_blocks(blocks: Tensor) -> MaskFunction:
    """A causal mask in which the tokens of a block, those with the same number of at least 0, see one another."""
    return lambda b, h, q, k: (k <= q) | ((blocks[b, q] == blocks[b, k]) & (blocks[b, q] >= 0))


def test_masks_by_tensors_of_shorter_sequences_are_refused() -> None:
    with pytest.raises(ShortTable, match="tensors that the model makes for each token"):
        shown(of_blocks(torch.full((1, 7), -1)))


def test_masks_by_tensors_of_whole_contexts() -> None:
    runs = [(n, functools.partial(shown, of_blocks(torch.full((2, n), -1)))) for n in (LONGEST, LONGEST // 2)]
    with rehearsed(runs):
        begin()
        assert shown(traced(0)) == (0, 0)
    blocks = torch.full((1, LONGEST), -1)
    blocks[0, 85:95] = 3  # rows are samples, LONGEST * i // 16 among them
    with (
        pytest.raises(UnsupportedError, match="neither causal nor"),
        rehearsed([(LONGEST, lambda: shown(of_blocks(blocks)))]),
    ):
        pass
    with FakeTensorMode(allow_non_fake_inputs=True):  # of token ids
        blocks = torch.full((1, LONGEST), -1)
    with pytest.raises(UnknownMask), rehearsed([(LONGEST, lambda: shown(of_blocks(blocks)))]):
        pass


def test_a_mask_that_hides_everything_is_refused_where_it_is_used() -> None:
    mask = made(lambda b, h, q, k: torch.zeros(1, len(k), dtype=torch.bool))
    q = torch.zeros(1, 2, 5, 8)
    with pytest.raises(UnsupportedError, match="hides all tokens"):
        attention(nn.Module(), q, q, q, mask)
