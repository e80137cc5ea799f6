"""Small raised graphs, written by hand, and inputs for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from qcompile.graph import Graph, ModelInfo, WeightStore


class Begun:
    """A graph at stage `raise` with its inputs, and random weights drawn in the order in which they are asked for."""

    def __init__(self, vocab: int, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.graph = Graph(fx.Graph(), WeightStore(), ModelInfo("tiny", vocab, 512, 0, (0,), 0), "raise")
        self.ids, self.positions = (self.graph.fx.placeholder(name) for name in ("token_ids", "positions"))
        for node in (self.ids, self.positions):
            node.meta["val"] = torch.empty(2, 7, dtype=torch.int64, device="meta")

    def kept(self, name: str, value: torch.Tensor) -> fx.Node:
        """A node that reads `value`, the weight `name`."""
        self.graph.weights.add_tensor(name, value)
        node = self.graph.fx.create_node("get_attr", name)
        self.graph.infer_node(node)
        return node

    def weight(self, name: str, *shape: int) -> fx.Node:
        """A random weight that makes numbers about as large as those it is given."""
        return self.kept(name, torch.randn(*shape, generator=self.generator) / shape[-1] ** 0.5)

    def more_scores(self, heads: int, sinks: bool, key_bias: bool) -> dict[str, fx.Node]:
        """Weights among attention's operands, by name."""
        more: dict[str, fx.Node] = {}
        if sinks:
            of_heads = 5.5 + torch.randn(heads, generator=self.generator)  # as much as hundreds of others
            of_heads[0] = 100.0  # more than 2^128 times what others weigh
            more["sinks"] = self.kept("sinks", of_heads)
        if key_bias:
            slope = 2.0 ** -torch.linspace(2, 7, heads)
            of_positions = slope[:, None] * torch.arange(512) + torch.randn(heads, 512, generator=self.generator)
            more["key_bias"] = self.kept("key_bias", of_positions)
        return more


@dataclass(frozen=True, kw_only=True)
class _Block:
    """The blocks of `decoder`: its arguments of these names."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    bias: bool | str
    head_norm: str
    late_norms: bool
    act: str
    begun: Begun

    def linear(self, x: fx.Node, name: str, n: int, k: int) -> fx.Node:
        """A linear with n outputs and k inputs, perhaps with a bias."""
        biased = self.bias is True or (self.bias and name.startswith(self.bias))
        extra = (self.begun.weight(f"{name}.bias", n),) if biased else ()
        return self.begun.graph.call("linear", x, self.begun.weight(name, n, k), *extra)

    def added(self, x: fx.Node, y: fx.Node, name: str, k: int) -> fx.Node:
        """`x` plus what a block adds: its last linear of y, perhaps normalized."""
        y = self.linear(y, name, self.hidden, k)
        if self.late_norms:
            y = self.begun.graph.call("rms_norm", y, self.begun.weight(f"{name}.norm", self.hidden), 1e-6)
        return self.begun.graph.call("add", x, y)

    def attention(self, x: fx.Node, layer: int, inv_freq: fx.Node | None, more: dict[str, object]) -> fx.Node:
        """The block of attention; keys are rotated if there is an `inv_freq`, and `more` are attention's operands."""
        call, weight = self.begun.graph.call, self.begun.weight
        y = call("rms_norm", x, None, 1e-6)
        pair = []
        for name, count in (("q", self.heads), ("k", self.kv_heads)):
            t = self.linear(y, f"{name}{layer}", count * self.head_dim, self.hidden)
            if self.head_norm == "whole":
                t = call("rms_norm", t, weight(f"{name}{layer}.norm", count * self.head_dim), 1e-6)
            t = call("split_heads", t, count)
            if self.head_norm == "heads":
                t = call("rms_norm", t, weight(f"{name}{layer}.norm", self.head_dim), 1e-6)
            pair.append(t)
        q, k = pair
        v = call("split_heads", self.linear(y, f"v{layer}", self.kv_heads * self.head_dim, self.hidden), self.kv_heads)
        if inv_freq is not None:
            q, k = (call("rope", t, self.begun.positions, inv_freq, 1.0, False) for t in (q, k))
        mixed = call("merge_heads", call("attention", q, k, v, self.head_dim**-0.5, **more))
        return self.added(x, mixed, f"o{layer}", self.heads * self.head_dim)

    def feed_forward(self, x: fx.Node, layer: int) -> fx.Node:
        """The gated block."""
        call = self.begun.graph.call
        y = call("rms_norm", x, None, 1e-6)
        gate = self.linear(y, f"gate{layer}", self.ffn, self.hidden)
        if self.act == "xielu":
            gate = call("xielu", gate, self.begun.kept(f"curve{layer}", torch.tensor([0.8, 1.3 + layer, 0.5, -1e-6])))
        else:
            gate = call("unary", gate, self.act)
        product = call("mul", gate, self.linear(y, f"up{layer}", self.ffn, self.hidden))
        return self.added(x, product, f"down{layer}", self.ffn)


def decoder(  # parameters: one for each way in which the graph may vary
    *,
    vocab: int = 50,
    hidden: int = 48,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    ffn: int = 72,
    layers: int = 2,
    bias: bool | str = False,
    rotary: bool = True,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    capped: bool = False,
    head_norm: str = "",
    late_norms: bool = False,
    act: str = "silu",
    sinks: bool = False,
    key_bias: bool = False,
    seed: int = 0,
) -> Graph:
    """A Llama-shaped decoder at stage `raise`: no norm weights, random everything else.

    `head_norm`: "heads" normalizes q and k head by head, "whole" before they are split. `bias` "q" is on q alone.
    `late_norms`: what a block adds to the residual stream goes through a norm with weights first.
    `capped`: logits are 2 tanh(x / 2). `sinks`: scores in sums alone, the first head's of which leaves nothing of the
    others. `key_bias`: what positions add to scores, to those of the last heads little.
    """
    begun = Begun(vocab, seed)
    graph, weight = begun.graph, begun.weight
    shape = {"hidden": hidden, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "ffn": ffn}
    block = _Block(**shape, bias=bias, head_norm=head_norm, late_norms=late_norms, act=act, begun=begun)
    inv_freq = begun.kept("inv_freq", 10000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)) if rotary else None
    more = {"window": window, "softcap": softcap, "chunk": chunk, **begun.more_scores(heads, sinks, key_bias)}
    x = graph.call("embedding", begun.ids, weight("embed", vocab, hidden))
    for layer in range(layers):
        x = block.feed_forward(block.attention(x, layer, inv_freq, more), layer)
    logits = graph.call("linear", graph.call("rms_norm", x, None, 1e-6), weight("head", vocab, hidden))
    if capped:
        logits = graph.call("scale", graph.call("unary", graph.call("scale", logits, 0.5), "tanh"), 2.0)
    graph.fx.output(logits)
    return graph


def sequence_inputs(
    tokens: int = 7, batch: int = 2, vocab: int = 50, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """token_ids and positions [batch, tokens] for graphs before `cache`."""
    ids = torch.randint(0, vocab, (batch, tokens), generator=torch.Generator().manual_seed(seed))
    return ids, torch.arange(tokens).expand(batch, tokens).contiguous()
