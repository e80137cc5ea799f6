"""The factors of an adapter in the linears of an artifact, laid out as codegen/cpu/templates/lora.h describes.

The layout for GPUs is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qcompile.artifact.adapted import Adapted, AdaptedWeight, Site
from qcompile.checkpoints.adapters import Adapter, LowRank
from qcompile.errors import UnsupportedError, UsageError

LANES, RANK_STEP, INPUT_STEP = 16, 4, 32
"""Outputs of a block, and what numbers of ranks and inputs are padded to a multiple of."""
BLOCK = np.dtype([("first", np.int32), ("count", np.int32), ("at", np.int64)])
"""LoraBlock of lora.h."""


@dataclass(frozen=True)
class SiteFactors:
    """An adapter's factors in one linear: a [ranks, inputs], b [all blocks' count, 16], and `blocks` of BLOCK."""

    a: Tensor
    b: Tensor
    blocks: np.ndarray[Any, Any]

    @property
    def ranks(self) -> int:
        """The ranks of all terms together, padded."""
        return self.a.shape[0]


def factors(adapted: Adapted, adapter: Adapter) -> list[SiteFactors | None]:
    """The factors of `adapter` in each site; None where it changes nothing.

    Raises UnsupportedError for what cannot change while the model runs, UsageError for a weight that the model lacks or
    of another shape.
    """
    _check(adapted, adapter)
    return [_of_site(site, adapter, adapted.vectors) for site in adapted.sites]


def _check(adapted: Adapted, adapter: Adapter) -> None:
    instead = f"merge it at build: qcompile build MODEL --lora {adapter.directory}"
    for name in (*adapter.replaced, *adapter.added):
        raise UnsupportedError(f"adapter {adapter.name} changes {name}, which is no product of low rank; {instead}")
    known = {term.weight: term for site in adapted.sites for term in site.terms}
    for module, change in adapter.low_rank.items():
        weight = f"{module}.weight"
        if change.table or change.magnitude is not None:
            what = "is a table" if change.table else "has magnitudes (DoRA)"
            raise UnsupportedError(f"adapter {adapter.name}: {module} {what}; {instead}")
        if weight in adapted.refused or weight not in known:
            reason = adapted.refused.get(weight, "no linear of the model reads it by this name")
            raise UnsupportedError(f"adapter {adapter.name} changes {weight}: {reason}; {instead}")
        if change.rank > adapted.rank:
            raise UsageError(
                f"adapter {adapter.name}: {module} has rank {change.rank}, the artifact takes {adapted.rank} at most; "
                f"build it with --set lora.rank={change.rank}"
            )
        shape = change.b.shape[0], change.a.shape[1]
        if shape != known[weight].shape:
            raise UsageError(
                f"adapter {adapter.name} changes {weight} as {list(shape)}, and the model has "
                f"{list(known[weight].shape)}: it was trained for another model"
            )


def _of_site(site: Site, adapter: Adapter, vectors: Any) -> SiteFactors | None:
    """The factors in one linear: those of all its terms, one after the other."""
    pairs = list(_products(site.terms, adapter, vectors))
    if not pairs:
        return None
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[site.factors]
    return laid_out(torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs], 1), dtype)


def laid_out(a: Tensor, b: Tensor, dtype: torch.dtype) -> SiteFactors:
    """The factors a [R, K] and b [N, R], scale included, of an adapter in one linear, as numbers of `dtype`."""
    a = torch.nn.functional.pad(a, (0, -a.shape[1] % INPUT_STEP, 0, -a.shape[0] % RANK_STEP))
    return SiteFactors(a.to(dtype).contiguous(), *_blocks(b.to(dtype)))


def _products(terms: tuple[AdaptedWeight, ...], adapter: Adapter, vectors: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """A [r, K] and scale * B [N, r] in float64 of each term that the adapter changes, after the term's changes."""
    for term in terms:
        name = term.weight
        change: LowRank | None = adapter.low_rank.get(name.removesuffix(".weight"))
        if change is None:
            continue
        a, b = change.a.double(), change.b.double() * change.scale
        for each in term.inputs:
            a = each.apply(a, vectors)
        for each in term.outputs:
            b = each.apply(b, vectors)
        yield a, b


def _blocks(b: Tensor) -> tuple[Tensor, np.ndarray[Any, Any]]:
    """b [N, R] by blocks of 16 outputs, each with the ranks from its first to its last that are not all zero."""
    rows = torch.nn.functional.pad(b, (0, 0, 0, -b.shape[0] % LANES)).unflatten(0, (-1, LANES))  # [blocks, 16, R]
    used = (rows != 0).any(1).numpy()
    blocks = np.zeros(len(rows), BLOCK)
    blocks["first"] = np.where(used.any(1), used.argmax(1), 0)
    blocks["count"] = np.where(used.any(1), b.shape[1] - used[:, ::-1].argmax(1) - blocks["first"], 0)
    blocks["at"][1:] = LANES * np.cumsum(blocks["count"])[:-1]
    parts = [rows[i, :, first : first + count].T for i, (first, count, _) in enumerate(blocks.tolist())]
    return torch.cat(parts).contiguous(), blocks
