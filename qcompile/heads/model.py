"""The computation of a draft head in torch, and its unrolling as training sees it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from qcompile.heads.layout import HeadShape


class HeadRmsNorm(nn.Module):
    """RMS norm over the last dimension."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.shape, self.weight, self.eps)


class HeadAttention(nn.Module):
    """Projections of the attention, which reads an embedding and a hidden state beside each other."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        read, attended = 2 * shape.hidden, shape.heads * shape.head_dim
        self.q_proj = nn.Linear(read, attended, bias=False)
        self.k_proj = nn.Linear(read, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(read, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(attended, shape.hidden, bias=False)


class HeadFeedForward(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class HeadLayer(nn.Module):
    """The decoder layer."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.input_layernorm = HeadRmsNorm(shape.hidden, shape.norm_eps)
        self.hidden_norm = HeadRmsNorm(shape.hidden, shape.norm_eps)
        self.self_attn = HeadAttention(shape)
        self.post_attention_layernorm = HeadRmsNorm(shape.hidden, shape.norm_eps)
        self.mlp = HeadFeedForward(shape)


class DraftHead(nn.Module):
    """A head with random weights. Names and shapes of its parameters are those of the public layout.

    The embedding is the target's, and is given to `unroll`.
    """

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(shape.layers) * shape.hidden, shape.hidden, bias=False)
        self.midlayer = HeadLayer(shape)
        self.norm = HeadRmsNorm(shape.hidden, shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden, shape.drafted, bias=False)

    def unroll(self, features: Tensor, embedded: Tensor, depth: int) -> Iterator[Tensor]:
        """Logits float [batch, positions, drafted] of the drafts at depth 1, 2, ... `depth`.

        `features` [batch, positions, layers * hidden] are the target's hidden states, and `embedded`
        [batch, positions + depth - 1, hidden] the embeddings of the tokens that follow each position. The draft of
        depth n at position i reads the target's hidden states up to i, and the head's own after them.
        """
        positions = features.shape[1]
        hidden = self.fc(features)
        angles = _angles(self.shape, positions + depth, features)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step in range(depth):
            token = embedded[:, step : step + positions]
            hidden = self._layer(token, hidden, angles[step : step + positions], keys, values)
            yield self.lm_head(self.norm(hidden))

    def _layer(self, token: Tensor, hidden: Tensor, angles: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """The residual stream after the decoder layer, [batch, positions, hidden]; adds to `keys` and `values`."""
        layer, shape = self.midlayer, self.shape
        x = torch.cat([layer.input_layernorm(token), layer.hidden_norm(hidden)], -1)
        q = _turned(_heads(layer.self_attn.q_proj(x), shape.heads), angles)
        repeats = shape.heads // shape.kv_heads
        k = _turned(_heads(layer.self_attn.k_proj(x), shape.kv_heads), angles)
        keys.append(k.repeat_interleave(repeats, 1))
        values.append(_heads(layer.self_attn.v_proj(x), shape.kv_heads).repeat_interleave(repeats, 1))
        attended = _attend(q, keys, values).transpose(1, 2).flatten(2)
        hidden = hidden + layer.self_attn.o_proj(attended)
        out: Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return out


def _heads(x: Tensor, count: int) -> Tensor:
    """[batch, positions, count * head_dim] as [batch, count, positions, head_dim]."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def _angles(shape: HeadShape, positions: int, like: Tensor) -> Tensor:
    """Angles float32 [positions, head_dim / 2] of the rotary embedding."""
    steps = torch.arange(0, shape.head_dim, 2, device=like.device, dtype=torch.float32) / shape.head_dim
    return torch.outer(torch.arange(positions, device=like.device).float(), shape.rope_theta**-steps)


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    """`x` [batch, heads, positions, head_dim], with its two halves rotated by `angles`."""
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _attend(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of position i to the keys of the first step up to i, and to its own of each later step.

    All are [batch, heads, positions, head_dim].
    """
    q = q * q.shape[-1] ** -0.5
    positions = q.shape[2]
    later = torch.ones(positions, positions, dtype=torch.bool, device=q.device).triu(1)
    scores = [(q @ keys[0].transpose(-1, -2)).masked_fill(later, -torch.inf)]
    scores += [(q * key).sum(-1, keepdim=True) for key in keys[1:]]
    shares = torch.cat(scores, -1).softmax(-1)
    out = shares[..., :positions] @ values[0]
    for place, value in enumerate(values[1:], positions):
        out = out + shares[..., place : place + 1] * value
    return out
