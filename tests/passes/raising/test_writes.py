"""Tables that are assembled in place, and writes that cannot be followed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from qcompile.errors import UnsupportedError
from tests.support import modules
from tests.support.raising import raise_module, right

HALF = modules.SIZE // 2
Table = Callable[[Tensor], Tensor]


def interleaved(angles: Tensor) -> Tensor:
    """[3, T, HALF]: every third angle of the second and third table replaces those of the first."""
    whole = angles[0]
    for table in (1, 2):
        whole[..., table::3] = angles[table, ..., table::3]
    return whole


def read_before(angles: Tensor) -> Tensor:
    """What was read before the write keeps its values."""
    whole = angles[0]
    kept = whole * 2.0
    whole[..., 1:3] = angles[1, ..., 1:3]
    return whole + kept


def two_views(angles: Tensor) -> Tensor:
    """A view that was made before the write is read after it."""
    whole, last = angles[0], angles[0][..., 2:]
    whole[..., 1:3] = angles[1, ..., 1:3]
    return torch.cat((whole[..., :2], last), -1)


def whole(angles: Tensor) -> Tensor:
    """All of a table is replaced."""
    angles[0] = angles[2]
    return angles[0] + 0.0 * angles[1]


def transposed(angles: Tensor) -> Tensor:
    """The write goes through a permutation."""
    angles.permute(2, 1, 0)[1:3, :, 0] = angles[1, :, 1:3].t()
    return angles[0]


def copied(angles: Tensor) -> Tensor:
    """A copy of the table is read after the write, from an operator that may also return a view."""
    kept = angles[0].t().reshape(-1)
    angles[0, :, 1:3] = angles[1, :, 1:3]
    return kept.unflatten(0, (HALF, -1)).t() + angles[0]


def in_features(angles: Tensor) -> Tensor:
    """The table is no function of the position alone."""
    scaled = angles * angles.new_ones(3, 1, 1).cumsum(0)
    scaled[0] = scaled[1] ** 2
    return scaled[0]


def scaled(angles: Tensor) -> Tensor:
    """Another operator works in place."""
    angles[0][:, 1:3].mul_(2.0)
    return angles[0]


class Rotated(nn.Module):
    """Attention with queries and keys that are rotated by angles; `table` makes these of three tables."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.table = table
        self.embed, self.head = nn.Embedding(modules.VOCAB, 48), nn.Linear(48, modules.VOCAB)
        self.q, self.k, self.v = (nn.Linear(48, 48) for _ in range(3))
        self.register_buffer("freq", torch.tensor([[1.0], [0.5], [0.3]]) * 0.7 ** torch.arange(HALF), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        place = torch.arange(ids.shape[1]).float()
        angle = self.table(place[None, :, None] * self.freq[:, None])
        cos, sin = (torch.cat((each, each), -1) for each in (angle.cos(), angle.sin()))
        x = self.embed(ids)
        q, k, v = (
            each(x).unflatten(-1, (modules.HEADS, modules.SIZE)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        q, k = (each * cos + torch.cat((-each[..., HALF:], each[..., :HALF]), -1) * sin for each in (q, k))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(y.transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("table", [interleaved, read_before, two_views, whole, transposed, scaled])
def test_a_table_assembled_in_place(table: Table) -> None:
    graph = right(modules.randomized(Rotated(table)))
    assert len(graph.calls("rope")) == 2


@pytest.mark.parametrize("table", [copied, in_features])
def test_writes_that_are_not_followed(table: Table) -> None:
    with pytest.raises(UnsupportedError, match="in place"):
        raise_module(modules.randomized(Rotated(table)))


class Assembled(nn.Module):
    """Attention with keys that are written into new memory; the second part of each, often a rotated one, is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(modules.VOCAB, 48), nn.Linear(48, modules.VOCAB)
        self.q, self.k, self.v = (nn.Linear(48, 48) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        batch, tokens = ids.shape
        x = self.embed(ids).view(batch * tokens, 48).view(batch, tokens, 48)
        x += 1.0  # of a view by the numbers of sequences and tokens, which others read, too
        q, k, v = (
            each(x).unflatten(-1, (modules.HEADS, modules.SIZE)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        first, second = k.split([modules.SIZE, 0], -1)
        key = torch.empty_like(k)
        key[..., : modules.SIZE] = first
        key[..., modules.SIZE :] = second.reshape(batch, modules.HEADS, tokens, 0)
        query = torch.cat((q, self.v(x)[..., :0].view(batch, 1, tokens, 0).expand(-1, modules.HEADS, -1, -1)), -1)
        y = torch.nn.functional.scaled_dot_product_attention(query, key, v, is_causal=True)
        return self.head(y.transpose(1, 2).flatten(-2))


def test_parts_without_features() -> None:
    graph = right(modules.randomized(Assembled()))
    assert len(graph.calls("attention")) == 1
