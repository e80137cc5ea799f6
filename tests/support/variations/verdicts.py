"""What becomes of a variation: compiled rightly, refused by name, wrong without a word, or a crash."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import qcompile
from qcompile import check
from qcompile.checkpoints import frontend
from qcompile.errors import UnsupportedError
from qcompile.passes.base import apply
from qcompile.passes.raising import Raise
from tests.support.variations import attention, experts, features, masks, norms, turns, writes
from tests.support.variations.decoder import LONGEST, VOCAB, Variation

TABLES = {
    "masks": masks.TABLE,
    "attention": attention.TABLE,
    "turns": turns.TABLE,
    "norms": norms.TABLE,
    "features": features.TABLE,
    "experts": experts.TABLE,
    "writes": writes.TABLE,
}
ALL: dict[str, Variation] = {f"{table}: {one.name}": one for table, each in TABLES.items() for one in each.variations}
assert len(ALL) == sum(len(table.variations) for table in TABLES.values()), "two variations have one name"

ALIKE = 1e-5
"""Sums of float32 in another order; random weights make logits of about 1."""


@dataclass(frozen=True)
class Verdict:
    """`agrees`, `refused`, `wrong` or `crash`; the reason or place; the error relative to the largest logit."""

    name: str
    reason: str = ""
    error: float = 0.0


def text(batch: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Random token ids, and positions."""
    ids = torch.randint(0, VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(tokens))
    return ids, torch.arange(tokens).expand(batch, tokens)


def expected(module: nn.Module, batch: int, tokens: int, takes: int) -> Tensor:
    """The logits that torch computes."""
    with torch.no_grad():
        result = module(*text(batch, tokens)[:takes])
    return next((leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)), torch.empty(0))


def examine(variation: Variation, folder: Path | None = None) -> Verdict:
    """Raise `variation` and run its graph; with `folder`, build it there in float32 and run the library in steps."""
    module = variation.module()
    expected(module, 2, 9, variation.takes)  # torch can run it
    source: dict[str, Any] = {"example_inputs": text(2, 7)[: variation.takes], "max_position": LONGEST}
    try:
        if folder is None:
            errors = list(_raised(variation, module, source))
        else:
            qcompile.build(module, folder / "out", recipe="f32", **source)
            errors = list(_built(variation, module, folder / "out"))
    except UnsupportedError as error:
        return Verdict("refused", str(error)) if "\n" not in str(error) else Verdict("crash", str(error))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return Verdict("crash", f"{type(error).__name__}: {error} at {Path(last.filename).name}:{last.lineno}")
    return Verdict("agrees" if max(errors) < ALIKE else "wrong", error=max(errors))


def _raised(variation: Variation, module: nn.Module, source: dict[str, Any]) -> Iterator[float]:
    graph = apply(Raise(), frontend.load(module, **source)).graph
    for batch, tokens in ((1, 1), (3, 23)):
        yield check.max_relative_error(
            graph.run(*text(batch, tokens)), expected(module, batch, tokens, variation.takes)
        )


def _built(variation: Variation, module: nn.Module, artifact: Path) -> Iterator[float]:
    with qcompile.load(artifact) as llm:
        for tokens, chunk in ((1, None), (23, None), (23, 1), (60, 7)):
            ids = text(2, tokens)[0]
            logits = llm.logits(ids) if chunk is None else llm.logits(ids, chunk=chunk)
            yield check.max_relative_error(logits, expected(module, 2, tokens, variation.takes))
