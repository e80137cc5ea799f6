"""Decoders written by hand as plain modules, each in its own style, for tests of the front end and of raising."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, HIDDEN, HEADS, SIZE = 61, 48, 6, 8


def randomized(module: nn.Module, seed: int = 0) -> nn.Module:
    """Every parameter random, biases and norms included, so that none can be dropped unnoticed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale + (parameter.dim() == 1))
    return module.eval()


class Plain(nn.Module):
    """SDPA with grouped keys repeated, rotary embedding by halves, written-out RMSNorm, SwiGLU, tied head."""

    def __init__(self, layers: int = 1, kv_heads: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(PlainLayer(kv_heads) for _ in range(layers))
        self.scale = nn.Parameter(torch.ones(HIDDEN))
        self.register_buffer("freq", 100.0 ** -(torch.arange(0, SIZE, 2) / SIZE), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        angle = torch.outer(torch.arange(ids.shape[1], device=ids.device).float(), self.freq)
        angle = torch.cat((angle, angle), -1)
        cos, sin = angle.cos(), angle.sin()
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(rms(x, self.scale), self.embed.weight)


def rms(x: Tensor, scale: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * scale


class PlainLayer(nn.Module):
    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.kv_heads = kv_heads
        self.q, self.o = nn.Linear(HIDDEN, HEADS * SIZE), nn.Linear(HEADS * SIZE, HIDDEN, bias=False)
        self.k, self.v = (nn.Linear(HIDDEN, kv_heads * SIZE, bias=False) for _ in range(2))
        self.gate, self.up, self.down = nn.Linear(HIDDEN, 80), nn.Linear(HIDDEN, 80), nn.Linear(80, HIDDEN)
        self.scales = nn.ParameterList(torch.ones(HIDDEN) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        y = rms(x, self.scales[0])
        q = self.q(y).view(batch, tokens, HEADS, SIZE).transpose(1, 2)
        k, v = (f(y).view(batch, tokens, self.kv_heads, SIZE).transpose(1, 2) for f in (self.k, self.v))
        q, k = (t * cos + torch.cat((-t[..., SIZE // 2 :], t[..., : SIZE // 2]), -1) * sin for t in (q, k))
        k, v = (t.repeat_interleave(HEADS // self.kv_heads, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, tokens, -1))
        y = rms(x, self.scales[1])
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Classic(nn.Module):
    """LayerNorm, fused qkv, learned positions, biases, GELU, softmax written out under a stored mask."""

    def __init__(self, layers: int = 1, longest: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(longest, HIDDEN)
        self.layers = nn.ModuleList(ClassicLayer(longest) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.drop = nn.Dropout(0.1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device)))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class ClassicLayer(nn.Module):
    def __init__(self, longest: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.register_buffer("mask", torch.tril(torch.ones(longest, longest)).view(1, 1, longest, longest))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.first(x)).split(width, 2)
        q, k, v = (t.view(batch, tokens, HEADS, width // HEADS).transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = self.hide(scores, self.mask[:, :, :tokens, :tokens])
        y = (F.softmax(scores, -1) @ v).transpose(1, 2).contiguous().view(batch, tokens, width)
        x = x + self.out(y)
        y = self.up(self.second(x))
        y = 0.5 * y * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (y + 0.044715 * torch.pow(y, 3.0))))
        return x + self.down(y)

    def hide(self, scores: Tensor, mask: Tensor) -> Tensor:
        return scores.masked_fill(mask == 0, float("-inf"))


class AddedMask(Classic):
    """Classic, of one layer, that adds a stored mask to its scores: 0, and -inf where nothing is to be seen."""

    def __init__(self, longest: int = 64) -> None:
        super().__init__(1, longest)
        layer = self.layers[0]
        layer.mask = torch.full((1, 1, longest, longest), float("-inf")).triu(1)
        layer.hide = torch.add


class Grouped(Classic):
    """Classic, of one layer, with two dimensions for heads: groups, and heads of a group.

    Keys have a head for each group, values one for all. With `alone`, there is one head, without a dimension for it.
    """

    def __init__(self, alone: bool = False, longest: int = 64) -> None:
        super().__init__(1, longest)
        self.layers[0] = GroupedLayer(alone, longest)


class GroupedLayer(ClassicLayer):
    def __init__(self, alone: bool, longest: int) -> None:
        super().__init__(longest)
        self.alone = alone
        self.qkv = nn.Linear(HIDDEN, HIDDEN * 3 if alone else HIDDEN + 3 * SIZE)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        y = self.qkv(self.first(x))
        if self.alone:
            q, k, v = y.chunk(3, -1)
        else:
            q, k, v = y.split((width, 2 * SIZE, SIZE), -1)
            q = q.view(batch, tokens, 2, 3, SIZE).permute(0, 2, 3, 1, 4)
            k = k.view(batch, tokens, 2, 1, SIZE).permute(0, 2, 3, 1, 4)
            v = v[:, None, None]
        scores = self.hide(q @ k.transpose(-2, -1) * 0.2, self.mask[0, 0, :tokens, :tokens])
        y = scores.softmax(-1) @ v
        y = y if self.alone else y.permute(0, 3, 1, 2, 4).reshape(batch, tokens, width)
        x = x + self.out(y)
        return x + self.down(F.relu(self.up(self.second(x))))


class Modern(nn.Module):
    """Interleaved partial rotary, sliding window by an added mask, query and key norms, parallel blocks.

    Embeddings are scaled, norms are (1 + w), gate and up are fused, keys expanded, logits soft-capped; the
    caller gives the positions.
    """

    def __init__(self, layers: int = 1, window: int = 5) -> None:
        super().__init__()
        self.window = window
        self.embed, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
        self.layers = nn.ModuleList(ModernLayer() for _ in range(layers))
        self.scale = nn.Parameter(torch.zeros(HIDDEN))

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        freq = 1.0 / (50.0 ** (torch.arange(0, 4, 2, device=ids.device).float() / 4))
        angle = torch.einsum("bt,f->btf", positions.float(), freq).repeat_interleave(2, -1)
        cos, sin = angle.cos()[:, :, None], angle.sin()[:, :, None]
        far = positions[:, :, None] - positions[:, None]
        mask = torch.where((far < 0) | (far >= self.window), torch.finfo(torch.float32).min, 0.0)[:, None]
        x = self.embed(ids) * HIDDEN**0.5
        for layer in self.layers:
            x = layer(x, cos, sin, mask.to(x.dtype))
        logits = self.head(rms(x, 1 + self.scale))
        return 30.0 * torch.tanh(logits / 30.0)


class ModernLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(HIDDEN, HEADS * SIZE, bias=False), nn.Linear(HIDDEN, 4 * SIZE, bias=False)
        self.o, self.gate_up = nn.Linear(HEADS * SIZE, HIDDEN, bias=False), nn.Linear(HIDDEN, 160, bias=False)
        self.down, self.scale = nn.Linear(80, HIDDEN, bias=False), nn.Parameter(torch.zeros(HIDDEN))
        self.q_scale, self.k_scale = nn.Parameter(torch.zeros(SIZE)), nn.Parameter(torch.zeros(SIZE))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        y = rms(x, 1 + self.scale)
        q = rms(self.q(y).view(batch, tokens, HEADS, SIZE), 1 + self.q_scale)
        k, v = self.kv(y).view(batch, tokens, 2, 2, SIZE).unbind(2)
        k = rms(k, 1 + self.k_scale)
        q, k = (turn(t, cos, sin).transpose(1, 2) for t in (q, k))
        k, v = (t[:, :, None].expand(batch, 2, 3, tokens, SIZE).reshape(batch, HEADS, tokens, SIZE)
                for t in (k, v.transpose(1, 2)))  # fmt: skip
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3).transpose(1, 2).flatten(2)
        gate, up = self.gate_up(rms(x, 1 + self.scale)).chunk(2, -1)
        return x + self.o(y) + self.down(F.gelu(gate, approximate="tanh") * up)


class Cached(nn.Module):
    """Rotary tables stored ahead and cut to length, torch's RMSNorm modules, keys and values of one head."""

    def __init__(self, layers: int = 1, longest: int = 64, size: int = 16, base: float = 10000.0) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
        self.layers = nn.ModuleList(CachedLayer(size) for _ in range(layers))
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-6)
        angle = torch.outer(torch.arange(longest).float(), base ** -(torch.arange(0, size, 2).float() / size))
        self.register_buffer("cos", torch.cat((angle, angle), -1).cos()[None, :, None])
        self.register_buffer("sin", torch.cat((angle, angle), -1).sin()[None, :, None])

    def forward(self, ids: Tensor) -> Tensor:
        tokens = ids.shape[1]
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.cos[:, :tokens], self.sin[:, :tokens])
        return self.head(self.norm(x))


class CachedLayer(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.norm = size, nn.RMSNorm(HIDDEN, eps=1e-6)
        self.qkv, self.out = nn.Linear(HIDDEN, 5 * size, bias=False), nn.Linear(3 * size, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, 96), nn.Linear(96, HIDDEN)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, tokens, 5, self.size).split((3, 1, 1), 2)
        q, k = (t * cos + torch.cat((-t.chunk(2, -1)[1], t.chunk(2, -1)[0]), -1) * sin for t in (q, k))
        q, k, v = (t.transpose(1, 2) for t in (q, k.expand(-1, -1, 3, -1), v.expand(-1, -1, 3, -1)))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.norm(x))).square())


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first 4 features of each head rotated in neighbouring pairs."""
    head, tail = x[..., :4], x[..., 4:]
    turned = torch.stack((-head[..., 1::2], head[..., ::2]), -1).flatten(-2)
    return torch.cat((head * cos + turned * sin, tail), -1)
