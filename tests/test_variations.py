"""Odd decoders that once were compiled to something else without a word, or crashed.

benchmarks/variations.py runs all variations.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from qcompile import check
from qcompile.checkpoints import frontend
from qcompile.errors import UnsupportedError
from qcompile.passes.base import apply
from qcompile.passes.fold_norms import FoldNorms
from qcompile.passes.raising import Raise
from qcompile.passes.rotate import Rotate
from tests.support.cases import first
from tests.support.programs import dynamic_size
from tests.support.variations.decoder import LONGEST, VOCAB
from tests.support.variations.verdicts import ALL, examine, text

ONCE_WRONG = (
    "masks: softmax in bfloat16",
    "masks: probabilities in float8",
    "masks: random dropout of probabilities",
    "turns: positions counted in bfloat16",
    "turns: random positions",
    "turns: frequencies in bfloat16, times positions in bfloat16",
    "norms: mean in bfloat16",
    "norms: mean in float16, back in float32",
    "norms: product in float8",
    "features: softmax of features",
    "features: random dropout of features",
    "features: random dropout of channels",
    "features: random dropout of weights",
    "features: random choice of features",
    "features: noise multiplied",
    "features: logits and a mask",
    "features: logits and nothing",
    "features: autocast",
    "features: stochastic depth",
    "features: depends on the batch",
    "features: probabilities in float16",
    "experts: softmax in bfloat16",
    "experts: softmax in bfloat16, not cast back",
    "experts: divided by a sum in bfloat16",
    "experts: rounded to float8",
    "experts: random dropout",
    "experts: one noise for all",
    "writes: written through reshape_as",
    "writes: written through movedim",
    "writes: written through ravel",
    "writes: written through mH",
    "writes: written through diagonal",
    "writes: written through unfold",
    "writes: written through as_strided",
    "writes: written through real part",
    "writes: written through unsafe_chunk",
    "writes: written through dsplit",
    "writes: written through einsum",
    "writes: written by out into a part",
    "writes: a buffer replaced",
    "writes: a buffer replaced by a mean",
    "writes: a submodule called constant",
    "writes: new memory read: empty",
    "writes: new memory read: empty_like",
    "writes: new memory read: resize",
    "writes: a number counted up",
    "writes: a number counted up and read later",
    "masks: mask of new memory",
)
ONCE_A_CRASH = (
    "attention: scale of 0",
    "features: logits and None",
    "features: logits and a number",
    "features: None",
    "writes: indices of the best features",
    "writes: times an item",
    "masks: scores changed by a function",
)
STILL_RIGHT = (
    "masks: dropout that is off",
    "masks: softmax in float64",
    "turns: frequencies rounded to bfloat16",
    "norms: weight in bfloat16",
    "features: autocast that is off",
    "features: dropout in evaluation",
    "experts: divided in place",
    "writes: written through a view that alone is read",
    "writes: written by out",
    "writes: new memory written by fill",
    "writes: new memory written by fill of a view",
    "writes: new memory written by out",
    "masks: mask written into new memory",
)


FIRST = (
    *("masks: softmax in bfloat16", "masks: random dropout of probabilities", "masks: scores changed by a function"),
    *("turns: positions counted in bfloat16", "turns: frequencies rounded to bfloat16", "norms: mean in bfloat16"),
    *("features: softmax of features", "features: logits and None", "features: autocast", "features: noise multiplied"),
    *("features: depends on the batch", "experts: softmax in bfloat16", "experts: one noise for all"),
    *("writes: written through movedim", "writes: written through a view that alone is read", "writes: written by out"),
    *("writes: a buffer replaced", "writes: new memory read: empty", "writes: new memory written by fill"),
    *("writes: a number counted up", "masks: mask written into new memory", "attention: scale of 0"),
)
"""Some of each kind and of each verdict."""


@pytest.mark.parametrize("name", first(FIRST, (*ONCE_WRONG, *ONCE_A_CRASH, *STILL_RIGHT)))
def test_is_right_or_refused(name: str) -> None:
    result = examine(ALL[name])
    assert result.name == ALL[name].right, result


def test_a_cap_of_a_negative_factor_is_a_cap(tmp_path: Path) -> None:
    """Its kernel takes positive caps alone."""
    assert examine(ALL["attention: cap of a negative factor"], tmp_path).name == "agrees"


def test_a_clamp_below_zero_is_no_limit(tmp_path: Path) -> None:
    """The kernel of gated experts clamps to plus and minus a limit, which is positive."""
    assert examine(ALL["experts: clamped to a negative limit"], tmp_path).name == "agrees"


def test_weights_of_whole_numbers_are_rotated_as_numbers() -> None:
    """Bytes would overflow."""
    variation = ALL["writes: plus small"]
    source = frontend.load(variation.module(), example_inputs=text(2, 7)[:1], max_position=LONGEST)
    before = after = apply(Raise(), source).graph
    for rewrite in (FoldNorms(), Rotate(online=True)):
        after = apply(rewrite, after).graph
    assert check.equivalent(after, before, text(2, 9)) < 1e-7


def test_tokens_whose_name_is_that_of_an_operator() -> None:
    """They are no function of the position."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)

        def forward(self, floor: Tensor) -> Tensor:
            return self.head(self.embed(floor) * floor[..., None])

    sizes = {0: dynamic_size("b"), 1: dynamic_size("t", max=LONGEST)}
    program = torch.export.export(Named(), text(2, 7)[:1], dynamic_shapes=(sizes,))
    with pytest.raises(UnsupportedError, match="node unsqueeze: unsqueeze has no counterpart in qcompile"):
        apply(Raise(), frontend.load(program, max_position=LONGEST))
