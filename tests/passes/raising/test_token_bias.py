"""Biases of scores that the key's token computes, as more features of keys, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from qcompile.errors import UnsupportedError
from tests.support import modules
from tests.support.raising import Attend, place, raise_module, right, used

LEAST = torch.finfo(torch.float32).min

Bias = Callable[[Tensor, Tensor], Tensor]
"""The mask [B, H, T, T] of values [B, H, T, D] and token ids."""


def later(ids: Tensor) -> Tensor:
    return place(ids)[None, :] > place(ids)[:, None]


def of_keys(v: Tensor) -> Tensor:
    """A number for each head and token [B, H, T]."""
    return torch.sigmoid(v[..., 3])


def by_key(v: Tensor, ids: Tensor) -> Tensor:
    return of_keys(v)[:, :, None].expand(-1, -1, ids.shape[1], -1).masked_fill(later(ids), LEAST)


def shared(v: Tensor, ids: Tensor) -> Tensor:
    mask = by_key(v[:, :2], ids)[:, :, None]
    return mask.expand(-1, -1, 3, -1, -1).reshape(ids.shape[0], 6, ids.shape[1], ids.shape[1])


def in_a_window(v: Tensor, ids: Tensor) -> Tensor:
    far = place(ids)[:, None] - place(ids)[None, :] >= 5
    return by_key(v, ids).masked_fill(far, LEAST)


BIASES: dict[str, Bias] = {
    "by key": by_key,
    "of key heads": shared,
    "of one head": lambda v, ids: by_key(v[:, :1], ids).expand(-1, 6, -1, -1),
    "in a window": in_a_window,
}


def written(bias: Bias) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        return torch.softmax(q @ k.transpose(2, 3) * 0.3 + bias(v, ids), -1) @ v

    return Attend(attend)


def fused(bias: Bias) -> Attend:
    return Attend(lambda q, k, v, ids: F.scaled_dot_product_attention(q, k, v, attn_mask=bias(v, ids)))


@pytest.mark.parametrize("module", [written, fused])
@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
def test_bias_of_keys(bias: Bias, module: Callable[[Bias], Attend]) -> None:
    graph = right(modules.randomized(module(bias)))
    assert used(graph)["attention"] == 1
    (node,) = graph.calls("attention")
    assert [node.args[i].meta["val"].shape[-1] for i in range(3)] == [16, 16, 8]  # type: ignore[union-attr]


REFUSED: dict[str, Bias] = {
    "by query": lambda v, ids: of_keys(v)[..., None].expand(-1, -1, -1, ids.shape[1]).masked_fill(later(ids), LEAST),
    "of other tokens": lambda v, ids: by_key(v.cumsum(2), ids),
    "of the token before": lambda v, ids: by_key(v.roll(1, 2), ids),
    "of another sequence": lambda v, ids: by_key(v.flip(0), ids),
    "in whole numbers": lambda v, ids: by_key(v, ids).to(torch.int64).float(),
    "times a mask": lambda v, ids: by_key(v, ids) * torch.where(later(ids), 2.0, 1.0),
    "hidden by the features": lambda v, ids: by_key(v, ids).masked_fill(of_keys(v)[:, :, None] > 0.5, LEAST),
    "later keys as well": lambda v, ids: of_keys(v)[:, :, None].expand(-1, -1, ids.shape[1], -1),
    "hidden weakly": lambda v, ids: (
        of_keys(v)[:, :, None].expand(-1, -1, ids.shape[1], -1).masked_fill(later(ids), -3.0)
    ),
}


@pytest.mark.parametrize("module", [written, fused])
@pytest.mark.parametrize("bias", REFUSED.values(), ids=REFUSED)
def test_near_misses_are_refused(bias: Bias, module: Callable[[Bias], Attend]) -> None:
    with pytest.raises(UnsupportedError):
        raise_module(modules.randomized(module(bias)))
