"""Variations of activations, linears, residuals, embeddings and logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.variations.decoder import HEADS, HIDDEN, INNER, SIZE, VOCAB, Part, Table
from tests.support.variations.norms import half

TABLE = Table()
add = TABLE.add


# ---- activations ---------------------------------------------------------------------------------------


def act(change: Part) -> dict[str, Part]:
    return {"act": lambda m, g, u: change(g, u)}


def alone(change: Part) -> dict[str, Part]:
    return act(lambda g, u: change(g))


for kind in ("silu", "gelu", "relu", "mish", "elu", "tanh", "sigmoid", "tanhshrink"):
    add("agrees", f"{kind} gate", **act(lambda g, u, f=kind: getattr(F, f)(g) * u))
for kind in ("relu6", "hardtanh", "leaky_relu", "softplus", "selu", "celu", "hardswish", "hardsigmoid", "logsigmoid",
             "softsign", "softshrink", "hardshrink"):  # fmt: skip
    add("refused", f"{kind} gate", **act(lambda g, u, f=kind: getattr(F, f)(g) * u))
add("agrees", "gate and up swapped", **act(lambda g, u: F.silu(u) * g))
add("agrees", "no gate", **alone(F.silu))
add("agrees", "gate of itself", **alone(lambda g: F.silu(g) * g))
add("agrees", "two gates", **act(lambda g, u: F.silu(g) * F.silu(u)))
add("agrees", "two gates of two kinds", **act(lambda g, u: F.silu(g) * F.gelu(u)))
add("agrees", "gate behind the product", **act(lambda g, u: F.silu(g * u)))
add("agrees", "bilinear", **act(lambda g, u: g * u))
add("agrees", "sum in place of product", **act(lambda g, u: F.silu(g) + u))
add("agrees", "gate used twice", **act(lambda g, u: F.silu(g) * u + g))
add("agrees", "up used twice", **act(lambda g, u: F.silu(g) * u + u))
add("agrees", "gate squared", **act(lambda g, u: F.silu(g) * F.silu(g) * u))
add("agrees", "up plus 1", **act(lambda g, u: F.silu(g) * (u + 1)))
add("agrees", "1 less up", **act(lambda g, u: F.silu(g) * (u - 1) * -1))
add("agrees", "clamped", **act(lambda g, u: F.silu(g.clamp(max=0.5)) * u.clamp(-0.5, 0.5)))
add(
    "agrees",
    "clamped and shifted",
    **act(lambda g, u: g.clamp(max=0.5) * torch.sigmoid(1.702 * g.clamp(max=0.5)) * (u.clamp(-0.5, 0.5) + 1)),
)
add("agrees", "clamped behind the gate", **act(lambda g, u: F.silu(g).clamp(max=0.5) * u))
add("agrees", "clamped the wrong way", **act(lambda g, u: F.silu(g.clamp(0.5, -0.5)) * u))
add("agrees", "clamped alike", **act(lambda g, u: F.silu(g.clamp(-0.5, 0.5)) * u.clamp(-0.5, 0.5)))
add(
    "agrees",
    "clamped with different limits",
    **act(lambda g, u: g.clamp(max=0.2) * torch.sigmoid(1.702 * g.clamp(max=0.2)) * (u.clamp(-0.5, 0.7) + 0.3)),
)
add("agrees", "scaled gate", **act(lambda g, u: F.silu(2 * g) * u))
add("agrees", "swish of another slope", **act(lambda g, u: g * torch.sigmoid(1.5 * g) * u))
add("agrees", "written out silu", **act(lambda g, u: g * torch.sigmoid(g) * u))
add("refused", "silu by a quotient", **act(lambda g, u: g / (1 + torch.exp(-g)) * u))
add("agrees", "sigmoid of another", **act(lambda g, u: g * torch.sigmoid(u)))
add("agrees", "quick gelu", **alone(lambda g: g * torch.sigmoid(1.702 * g)))
add("agrees", "nearly quick gelu", **alone(lambda g: g * torch.sigmoid(1.7 * g)))
add("agrees", "quick gelu of another", **act(lambda g, u: u * torch.sigmoid(1.702 * g)))
add("agrees", "gelu by tanh", **alone(lambda g: F.gelu(g, approximate="tanh")))
add("agrees", "gelu by erf", **alone(lambda g: 0.5 * g * (1 + torch.erf(g / 2**0.5))))
add("refused", "gelu by erf of another", **act(lambda g, u: 0.5 * u * (1 + torch.erf(g / 2**0.5))))
add("refused", "gelu without its half", **alone(lambda g: g * (1 + torch.erf(g / 2**0.5))))
add("refused", "gelu by erf of another slope", **alone(lambda g: 0.5 * g * (1 + torch.erf(g * 0.75))))
add("refused", "gelu by erfc", **alone(lambda g: 0.5 * g * torch.erfc(-g / 2**0.5)))
add("agrees", "relu squared", **alone(lambda g: F.relu(g).square()))
add("agrees", "relu cubed", **alone(lambda g: F.relu(g).square() * F.relu(g)))
add("refused", "relu to the 1.5", **alone(lambda g: (F.relu(g) + 0.1) ** 1.5))
add("agrees", "silu squared", **alone(lambda g: F.silu(g) * F.silu(g)))
add("refused", "square of a square", **alone(lambda g: g.square().square()))
add("agrees", "relu by max", **alone(lambda g: g.clamp_min(0.0)))
add("refused", "absolute value", **alone(torch.abs))
add("refused", "elu of another alpha", **alone(lambda g: F.elu(g, 0.5)))
add("refused", "prelu", **alone(lambda g: F.prelu(g, torch.tensor([0.2]))))
add("refused", "random relu", **alone(lambda g: F.rrelu(g, training=True)))
add(
    "refused",
    "glu over tokens",
    mlp=lambda m, x: m.down(torch.cat([F.glu(m.gate(x), 1)] * 2, 1)) if x.shape[1] % 2 == 0 else x,
)
add("refused", "glu", **act(lambda g, u: torch.cat((F.glu(g), F.glu(u)), -1)))
add("refused", "softmax of features", **alone(lambda g: g.softmax(-1) * 5 + F.silu(g).softmax(-1, dtype=torch.float16)))
add("agrees", "softmax of features, in float32", **alone(lambda g: g.softmax(-1) * 5))
add("refused", "softmax over tokens", **alone(lambda g: g.softmax(1)))
add("refused", "softmax over the batch", **alone(lambda g: g.softmax(0)))
add(
    "agrees",
    "gate and up interleaved",
    mlp=lambda m, x: m.down(
        torch.cat(
            (F.silu(m.gate(x)[..., ::2]) * m.gate(x)[..., 1::2], F.silu(m.up(x)[..., ::2]) * m.up(x)[..., 1::2]), -1
        )
    ),
)
add(
    "agrees",
    "gate and up in halves",
    mlp=lambda m, x: m.down(torch.cat([F.silu(m.gate(x)[..., :20]) * m.gate(x)[..., 20:]] * 2, -1)),
)
add(
    "agrees",
    "up and gate in halves",
    mlp=lambda m, x: m.down(torch.cat([F.silu(m.gate(x)[..., 20:]) * m.gate(x)[..., :20]] * 2, -1)),
)
add(
    "agrees",
    "halves of gate and up",
    mlp=lambda m, x: m.down(
        torch.cat(
            (F.silu(m.gate(x)[..., :20]) * m.up(x)[..., 20:], F.silu(m.up(x)[..., :20]) * m.gate(x)[..., 20:]), -1
        )
    ),
)
add(
    "agrees",
    "gate of every second",
    mlp=lambda m, x: m.down(torch.cat((F.silu(m.gate(x)[..., ::2]), m.up(x)[..., ::2]), -1)),
)
add("refused", "random dropout of features", **act(lambda g, u: F.dropout(F.silu(g) * u, 0.3)))
add("refused", "random dropout of channels", **act(lambda g, u: F.dropout1d(F.silu(g) * u, 0.3)))
add("agrees", "dropout of nothing", **act(lambda g, u: F.dropout(F.silu(g) * u, 0.0)))
add("agrees", "dropout in evaluation", **act(lambda g, u: F.dropout(F.silu(g) * u, 0.3, False)))
add("refused", "noise added", **act(lambda g, u: F.silu(g) * u + torch.randn_like(u)))
add("refused", "noise multiplied", **act(lambda g, u: F.silu(g) * u * torch.rand(INNER)))
add(
    "refused",
    "random dropout of weights",
    mlp=lambda m, x: F.linear(m.act(m.gate(x), m.up(x)), F.dropout(m.down.weight, 0.3)),
)
add("refused", "random choice of features", **act(lambda g, u: F.silu(g) * u[..., torch.randperm(INNER)]))

# ---- linears -------------------------------------------------------------------------------------------


def down(change: Part) -> dict[str, Part]:
    """The down projection computed by `change` of its input and weight."""
    return {"mlp": lambda m, x: change(m, m.act(m.gate(x), m.up(x)), m.down.weight)}


add("agrees", "weight transposed twice", **down(lambda m, x, w: x @ w.t().t().t()))
add("agrees", "weight permuted", **down(lambda m, x, w: x @ w.permute(-1, -2)))
add("agrees", "weight permuted as -1, 0", **down(lambda m, x, w: x @ w.permute(-1, 0)))
add("agrees", "weight permuted as it is", **down(lambda m, x, w: F.linear(x, w.permute(0, 1))))
add("agrees", "weight transposed to itself", **down(lambda m, x, w: F.linear(x, w.transpose(1, 1))))
add("agrees", "weight reshaped, not transposed", **down(lambda m, x, w: x @ w.reshape(INNER, HIDDEN)))
add("agrees", "weight negated", **down(lambda m, x, w: F.linear(x, -w)))
add("agrees", "weight scaled by a tensor", **down(lambda m, x, w: F.linear(x, w * m.by_inner)))
add("agrees", "weight flipped", **down(lambda m, x, w: F.linear(x, w.flip(0))))
add("agrees", "weight flipped along inputs", **down(lambda m, x, w: F.linear(x, w.flip(1))))
add("agrees", "weight rolled", **down(lambda m, x, w: F.linear(x, w.roll(3, 1))))
add("agrees", "every second row twice", **down(lambda m, x, w: torch.cat([F.linear(x, w[::2])] * 2, -1)))
add("agrees", "every second input", **down(lambda m, x, w: F.linear(x[..., ::2], w[:, ::2])))
add("agrees", "weight and its transpose", **down(lambda m, x, w: F.linear(F.linear(F.linear(x, w), w.t()), w)))
add("agrees", "weight of low rank", **down(lambda m, x, w: F.linear(x, w) + x @ w[:4].t() @ w[4:8, :HIDDEN]))
add("refused", "weight on the left", **down(lambda m, x, w: (w @ x.mT).mT))
add(
    "refused",
    "addmm with beta",
    **down(lambda m, x, w: torch.addmm(m.first, x.flatten(0, 1), w.t(), beta=0.5, alpha=2.0).view(*x.shape[:2], -1)),
)
add("refused", "baddbmm", **down(lambda m, x, w: torch.baddbmm(m.first, x, w.t().expand(x.shape[0], -1, -1))))
add("agrees", "bias twice", **down(lambda m, x, w: F.linear(x, w, m.first) + m.first))
add("agrees", "bias before", **down(lambda m, x, w: F.linear(x + m.by_inner, w)))
add("refused", "bias subtracted", **down(lambda m, x, w: F.linear(x, w) - m.first))
add("refused", "bias less the linear", **down(lambda m, x, w: m.first - F.linear(x, w)))
add("agrees", "bias of one number", **down(lambda m, x, w: F.linear(x, w) + m.first[:1]))
add("agrees", "bias of [1, 1, N]", **down(lambda m, x, w: F.linear(x, w) + m.first[None, None]))
add("refused", "bias doubled by alpha", **down(lambda m, x, w: torch.add(F.linear(x, w), m.first, alpha=2)))
add("refused", "weight rounded with its input", **down(lambda m, x, w: F.linear(x.bfloat16(), w.bfloat16()).float()))
add("refused", "input rounded", **down(lambda m, x, w: F.linear(half(x), w)))
add("agrees", "weight rounded", **down(lambda m, x, w: F.linear(x, half(w))))
add("agrees", "weight rounded to float8", **down(lambda m, x, w: F.linear(x, w.to(torch.float8_e4m3fn).float())))
add(
    "agrees", "weight from integers", **down(lambda m, x, w: F.linear(x, (w * 10).round().to(torch.int8).float() * 0.1))
)
add("refused", "input to integers", **down(lambda m, x, w: F.linear((x * 10).round().to(torch.int8).float(), w)))
add("refused", "input rounded to whole numbers", **down(lambda m, x, w: F.linear((x * 10).round(), w)))
add("refused", "autocast", **down(lambda m, x, w: autocast(F.linear, x, w)))
add("agrees", "autocast that is off", **down(lambda m, x, w: autocast(F.linear, x, w, enabled=False)))
add(
    "refused",
    "a linear over tokens",
    **down(lambda m, x, w: (x.mT @ torch.ones(x.shape[1], x.shape[1])).mT[..., :HIDDEN]),
)
add(
    "refused",
    "convolution",
    **down(
        lambda m, x, w: F.linear(
            F.conv1d(x.mT, m.by_inner[:, None, None].expand(-1, -1, 3), padding=1, groups=INNER).mT, w
        )
    ),
)
add(
    "refused",
    "bilinear form",
    **down(lambda m, x, w: F.bilinear(x[..., :4], x[..., 4:8], w[:, :16].view(HIDDEN, 4, 4))),
)
add("agrees", "weight norm", prepare=lambda m: [nn.utils.parametrizations.weight_norm(b.down) for b in m.layers])
add("agrees", "weights shared by layers", layers=2, prepare=lambda m: setattr(m.layers[1], "down", m.layers[0].down))
add("agrees", "layers shared", layers=2, through=lambda m, x, p: m.layers[0](m.layers[1](m.layers[0](x, p), p), p))
add(
    "refused",
    "block of each head",
    **down(
        lambda m, x, w: torch.einsum(
            "bthd,hde->bthe",
            m.o(F.linear(x, w)).unflatten(-1, (HEADS, SIZE)),
            m.q.weight.view(HEADS, SIZE, HIDDEN)[..., :SIZE],
        ).flatten(-2)
    ),
)


def autocast(f: Part, *args: Any, enabled: bool = True) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        return f(*args).float()


# ---- residuals -----------------------------------------------------------------------------------------

add("agrees", "parallel", block=lambda m, x, p: x + m.mix(m.norm(x, m.first), p) + m.mlp(m.norm(x, m.second)))
add(
    "agrees", "parallel, one norm", block=lambda m, x, p: x + (m.mix(m.norm(x, m.first), p) + m.mlp(m.norm(x, m.first)))
)
add("agrees", "norms behind", block=lambda m, x, p: m.norm(m.norm(x + m.mix(x, p), m.first) + m.mlp(x), m.second))
add("agrees", "layer scale", block=lambda m, x, p: x + m.third * m.mix(m.norm(x, m.first), p) + m.second * m.mlp(x))
add("agrees", "residual scaled", block=lambda m, x, p: 0.5 * x + 0.3 * m.mix(m.norm(x, m.first), p))
add("agrees", "residual doubled by alpha", block=lambda m, x, p: torch.add(x, m.mix(m.norm(x, m.first), p), alpha=2))
add("agrees", "residual subtracted", block=lambda m, x, p: x - m.mix(m.norm(x, m.first), p))
add("agrees", "residual of the norm", block=lambda m, x, p: m.norm(x, m.first) + m.mix(m.norm(x, m.first), p))
add("agrees", "residual multiplied", block=lambda m, x, p: x * torch.sigmoid(m.mix(m.norm(x, m.first), p)))
add("agrees", "no residual", block=lambda m, x, p: m.mix(m.norm(x, m.first), p))
add("agrees", "residual twice", block=lambda m, x, p: x + x + m.mix(m.norm(x, m.first), p))
add(
    "agrees",
    "input of the first layer added to all",
    layers=3,
    through=lambda m, x, p: x + m.layers[1](m.layers[0](x, p) + x, p),
)
add(
    "agrees",
    "mean of layers",
    layers=2,
    through=lambda m, x, p: (x + m.layers[0](x, p) + m.layers[1](m.layers[0](x, p), p)) / 3,
)
add(
    "agrees",
    "layers concatenated",
    layers=2,
    through=lambda m, x, p: torch.cat((m.layers[0](x, p)[..., :16], m.layers[1](x, p)[..., 16:]), -1),
)
add(
    "agrees",
    "highway of a number per token",
    block=lambda m, x, p: x + torch.sigmoid(F.linear(x, m.first[None])) * m.mlp(x),
)
add("refused", "stochastic depth", block=lambda m, x, p: x + m.mlp(x) * torch.bernoulli(torch.full((1,), 0.5)))
add("refused", "token shift", block=lambda m, x, p: x + m.mlp(F.pad(x, (0, 0, 1, -1))))
add("refused", "sum over tokens so far", block=lambda m, x, p: x + m.mlp(x.cumsum(1)))
add("refused", "mean of the batch", block=lambda m, x, p: x + m.mlp(x - x.mean(0)))
add("refused", "mean of tokens", block=lambda m, x, p: x + m.mlp(x - x.mean(1, keepdim=True)))
add("refused", "batch reversed", block=lambda m, x, p: x + m.mlp(x.flip(0)))
add("refused", "reads the first token", block=lambda m, x, p: x + m.mlp(x[:, :1]))
add("refused", "depends on a value", block=lambda m, x, p: x + m.mlp(x) if x.sum() > 0 else x)
add("refused", "depends on the length", block=lambda m, x, p: x + m.mlp(x) if x.shape[1] > 5 else x)
add("refused", "depends on the batch", block=lambda m, x, p: x + m.mlp(x) if x.shape[0] > 1 else x)
add(
    "refused",
    "cond on values",
    block=lambda m, x, p: x + torch.cond(x.sum() > 0, lambda y: y * 2.0, lambda y: y * 3.0, (x,)),
)

# ---- embeddings and logits -----------------------------------------------------------------------------

add("agrees", "embedding scaled", start=lambda m, i, p: m.embed(i) * HIDDEN**0.5)
add("agrees", "embedding normed", start=lambda m, i, p: F.layer_norm(m.embed(i), (HIDDEN,)))
add("agrees", "embedding as rows", start=lambda m, i, p: m.embed.weight[i])
add("agrees", "embedding of a product", start=lambda m, i, p: F.embedding(i, m.embed.weight[:, :4] @ m.head.weight[:4]))
add("agrees", "embedding of two tables", start=lambda m, i, p: m.embed(i) + m.learned(i) * 0.5)
add("agrees", "half of an embedding", start=lambda m, i, p: torch.cat([m.embed(i)[..., :16]] * 2, -1))
add("agrees", "rows of a table from the second on", start=lambda m, i, p: m.embed.weight[2:].repeat(2, 1)[i])
add("agrees", "padding index", start=lambda m, i, p: F.embedding(i, m.embed.weight, padding_idx=3))
add("refused", "one token masked", start=lambda m, i, p: m.embed(i) * (i != 3)[..., None])
add("refused", "one-hot", start=lambda m, i, p: F.one_hot(i, VOCAB).float() @ m.embed.weight)
add("refused", "next token", start=lambda m, i, p: m.embed(i.roll(1, 1)))
add("refused", "embedding of tokens as bytes", start=lambda m, i, p: m.embed((i * 5).to(torch.uint8).long() % VOCAB))
add("refused", "tokens as booleans", start=lambda m, i, p: m.embed(i.to(torch.bool).to(torch.int64)))
add("refused", "bag of tokens", start=lambda m, i, p: m.embed(i) + F.embedding_bag(i, m.embed.weight)[:, None])
add("refused", "embedding renormed", start=lambda m, i, p: F.embedding(i, m.embed.weight * 1.0, max_norm=1.0))
add("refused", "embedding renormed in place", prepare=lambda m: setattr(m.embed, "max_norm", 1.0))
add("agrees", "logits scaled", end=lambda m, x: m.head(x) * 0.3)
add("agrees", "logits capped", end=lambda m, x: 3 * torch.tanh(m.head(x) / 3))
add("agrees", "logits with a bias", end=lambda m, x: m.head(x) + m.by_vocab)
add("agrees", "logits with a factor", end=lambda m, x: m.head(x) * m.by_vocab)
add("agrees", "logits of the embedding", end=lambda m, x: F.linear(x, m.embed.weight))
add("agrees", "logits of the embedding, scaled", end=lambda m, x: x @ m.embed.weight.t() * 0.1)
add("agrees", "logits of part of the embedding", end=lambda m, x: F.linear(x, m.embed.weight[:50]))
add("agrees", "logits permuted", end=lambda m, x: m.head(x)[..., torch.arange(VOCAB - 1, -1, -1)])
add("agrees", "logits padded", end=lambda m, x: F.pad(m.head(x), (0, 3)))
add("refused", "logits padded with -inf", end=lambda m, x: F.pad(m.head(x), (0, 3), value=-1e9))
add("refused", "one token's logits hidden", end=lambda m, x: m.head(x).masked_fill(torch.arange(VOCAB) == 3, -1e9))
add("refused", "log probabilities", end=lambda m, x: m.head(x).log_softmax(-1))
add("agrees", "probabilities", end=lambda m, x: m.head(x).softmax(-1))
add("refused", "probabilities in float16", end=lambda m, x: m.head(x).softmax(-1, dtype=torch.float16))
add("refused", "logits in bfloat16", end=lambda m, x: m.head(x).bfloat16())
add("agrees", "logits in float64", end=lambda m, x: m.head(x).double())
add("refused", "logits of the last token", end=lambda m, x: m.head(x[:, -1:]))
add("refused", "logits of the last token alone", end=lambda m, x: m.head(x[:, -1]))
add("refused", "logits of all tokens in a row", end=lambda m, x: m.head(x).flatten(0, 1))
add("refused", "logits by vocabulary first", end=lambda m, x: m.head(x).transpose(1, 2))
add("refused", "best tokens", end=lambda m, x: m.head(x).argmax(-1))
add("refused", "best logits", end=lambda m, x: m.head(x).argmax(-1, keepdim=True))
add("refused", "logits and hidden states", end=lambda m, x: (m.head(x), x))
add("agrees", "a tuple of logits", end=lambda m, x: (m.head(x),))
add("agrees", "a dictionary of logits", end=lambda m, x: {"logits": m.head(x)})
add("agrees", "a dataclass of logits", end=lambda m, x: Output(m.head(x)))
add("agrees", "logits and None", end=lambda m, x: (None, m.head(x)))
add("refused", "logits and a mask", end=lambda m, x: (m.head(x), x > 0))
add("refused", "logits and nothing", end=lambda m, x: (m.head(x), x[:, :0]))
add("refused", "logits and a number", end=lambda m, x: (m.head(x), 3))
add("refused", "logits and a size", end=lambda m, x: (x.shape[1], m.head(x)))
add("refused", "None", end=lambda m, x: None)
add("refused", "a number", end=lambda m, x: 3.0)
add("refused", "logits and loss", end=lambda m, x: (m.head(x).sum(), m.head(x)))


@dataclass
class Output:
    """What some models return."""

    logits: Tensor


torch.export.register_dataclass(Output)
