"""Attention with masks, biases and rotary embeddings: what is raised, what is refused, and what resembles it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qcompile import check, ops
from qcompile.errors import UnsupportedError
from tests.support import modules
from tests.support.raising import LONGEST, Attend, inputs, place, raise_module, refused_or_right, right, sdpa


def test_facts_of_attention() -> None:
    _, _, _, scale, window, softcap, sinks = (
        raise_module(modules.randomized(modules.Modern()), 2).calls("attention")[0].args
    )
    assert (scale, window, softcap, sinks) == (0.3, 5, 0.0, None)
    ropes = raise_module(modules.randomized(modules.Modern()), 2).calls("rope")
    assert all(node.args[4] is True and node.args[2].meta["val"].shape == (2,) for node in ropes)


def biased(ids: Tensor, bias: Tensor) -> Tensor:
    return torch.where(place(ids)[:, None] >= place(ids), bias, -torch.inf)


def rotated(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, angle: Callable[[Tensor], Tensor]) -> Tensor:
    turn = angle(place(ids).float())[:, None] * torch.tensor([1.0, 0.5, 0.1, 0.01], device=q.device)
    cos, sin = (f(torch.cat((turn, turn), -1)) for f in (torch.cos, torch.sin))
    q, k = (t * cos + torch.cat((-t[..., 4:], t[..., :4]), -1) * sin for t in (q, k))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def stored(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, spoil: float) -> Tensor:
    angle = torch.arange(LONGEST)[:, None] * torch.tensor([1.0, 0.5, 0.1, 0.01, 1.0, 0.5, 0.1, 0.01])
    cos, sin = angle.cos()[: ids.shape[1]], (angle.sin() + spoil * angle.square().sin())[: ids.shape[1]]
    q, k = (t * cos + torch.cat((-t[..., 4:], t[..., :4]), -1) * sin for t in (q, k))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


REFUSED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "not causal": (sdpa(), "attends to later tokens"),
    "mask off by one": (sdpa(attn_mask=lambda ids: place(ids)[:, None] + 1 >= place(ids)), "neither causal nor"),
    "mask of ids": (sdpa(attn_mask=lambda ids: ids[:, None, :, None] >= ids[:, None, None]), "from token ids"),
    "bias of distances that is not linear": (
        sdpa(attn_mask=lambda ids: biased(ids, -0.1 * (place(ids)[:, None] - place(ids)).abs().sqrt())),
        "bias to its scores that is no mask and depends on more than the key",
    ),
    "blocks": (
        sdpa(
            attn_mask=lambda ids: (place(ids)[:, None] // 4 - place(ids) // 4 < 2) & (place(ids)[:, None] >= place(ids))
        ),
        "neither causal nor",
    ),
    "angle not linear": (lambda *a: rotated(*a, angle=lambda p: p * p), "no counterpart"),
    "angle of a root": (lambda *a: rotated(*a, angle=torch.sqrt), "no counterpart"),
    "stored table that is no rotation": (lambda *a: stored(*a, spoil=1e-4), "cat combines features"),
    "heads mixed up": (
        lambda q, k, v, ids: F.scaled_dot_product_attention(q, k.roll(1, 1), v, is_causal=True),
        "roll",
    ),
    "unknown operator": (lambda q, k, v, ids: sdpa(is_causal=True)(q.erfinv(), k, v, ids), "erfinv"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    attend, message = REFUSED[case]
    with pytest.raises(UnsupportedError, match=message):
        raise_module(modules.randomized(Attend(attend)))


def test_accepted_beside_the_refused() -> None:
    causal = sdpa(attn_mask=lambda ids: place(ids)[:, None] >= place(ids))
    for attend in (
        sdpa(is_causal=True),
        causal,
        sdpa(attn_mask=lambda ids: biased(ids, -0.1 * place(ids))),
        sdpa(attn_mask=lambda ids: biased(ids, torch.arange(1, 7)[:, None, None] * (0.1 * place(ids) - 0.7))),
        sdpa(attn_mask=lambda ids: biased(ids, -0.1 * (place(ids)[:, None] - place(ids)))),
        lambda *a: rotated(*a, angle=lambda p: 3 * p + p / 7),
        lambda *a: stored(*a, spoil=0.0),
    ):
        module = modules.randomized(Attend(attend))
        ids, positions = inputs()
        assert check.max_relative_error(raise_module(module).run(ids, positions), module(ids)) < 3e-6


def test_repeated_heads_in_the_wrong_order() -> None:
    """K tiled instead of repeated: query head h reads key head h % Hk, which our attention does not support."""

    def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k[:, :2].repeat(1, 3, 1, 1), v[:, :2].repeat(1, 3, 1, 1), is_causal=True
        )

    module = modules.randomized(Attend(attend))
    ids, positions = inputs()
    try:
        graph = raise_module(module)
    except UnsupportedError:
        return
    assert check.max_relative_error(graph.run(ids, positions), module(ids)) < 3e-6


class Chunked(nn.Module):
    """Attention in which tokens see those of their own `chunk`, which begins `late` tokens late."""

    def __init__(self, chunk: int, late: int = 0) -> None:
        super().__init__()
        self.chunk, self.late = chunk, late
        self.embed, self.head = nn.Embedding(modules.VOCAB, 16), nn.Linear(16, modules.VOCAB)
        self.qkv = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = (f(x).unflatten(-1, (2, 8)).transpose(1, 2) for f in self.qkv)
        at = torch.arange(ids.shape[1])
        near = (at[:, None] + self.late) // self.chunk == (at + self.late) // self.chunk
        mask = near & (at[:, None] >= at)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.head(x + y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("chunk", [1, 8, 17, LONGEST])
def test_chunks_are_proved_by_a_mask(chunk: int) -> None:
    graph = right(modules.randomized(Chunked(chunk)))
    (node,) = graph.calls("attention")
    result = ops.operand(node, "window"), ops.operand(node, "chunk")
    assert result == {1: (1, 0), LONGEST: (0, 0)}.get(chunk, (0, chunk))


def test_chunks_that_begin_elsewhere_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="neither causal nor a causal window"):
        raise_module(Chunked(8, late=3))


# ---- what resembles it ---------------------------------------------------------------------------------


def seen(ids: Tensor, window: Tensor | int = LONGEST) -> Tensor:
    distance = place(ids)[:, None] - place(ids)
    return (distance >= 0) & (distance < window)


def written(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Attention as matmuls, with scores passed through `change` after masking."""
    scores = (q @ k.transpose(-1, -2)).masked_fill(~seen(ids), -1e9)
    return torch.softmax(change(scores), -1) @ v


def by_length(ids: Tensor, short: int, long: int) -> Tensor:
    return torch.where(torch.ones_like(ids[0]).sum() > 20, long, short)


def by_batch(ids: Tensor) -> Tensor:
    return torch.where(torch.arange(ids.shape[0]) > 0, 3, LONGEST)[:, None, None, None]


def rotated_in(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, cast: torch.dtype) -> Tensor:
    angle = place(ids).to(cast)[:, None] * torch.tensor([1.0, 0.5, 0.1, 0.01]).repeat(2)
    q, k = (t * angle.cos() + torch.cat((-t[..., 4:], t[..., :4]), -1) * angle.sin() for t in (q, k))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


ATTENDS: dict[str, Callable[..., Tensor]] = {
    "a window in short texts alone": sdpa(attn_mask=lambda ids: seen(ids, by_length(ids, 5, LONGEST))),
    "a window in long texts alone": sdpa(attn_mask=lambda ids: seen(ids, by_length(ids, LONGEST, 5))),
    "a window in some texts of a batch": sdpa(attn_mask=lambda ids: seen(ids, by_batch(ids))),
    "scores in half precision": lambda *a: written(*a, lambda s: s.to(torch.bfloat16).float()),
    "a number for each head added to scores": lambda *a: written(*a, lambda s: s + torch.arange(6.0)[:, None, None]),
    "angles of booleans": lambda *a: rotated_in(*a, torch.bool),
    "angles of bytes": lambda *a: rotated_in(*a, torch.uint8),
    "scores turned over": lambda q, k, v, ids: (
        torch.softmax((q @ k.transpose(-1, -2)).masked_fill(~seen(ids), 1e9) * -0.3, -1) @ v
    ),
}


@pytest.mark.parametrize("attend", ATTENDS)
def test_attention(attend: str) -> None:
    refused_or_right(Attend(ATTENDS[attend]))
