"""A raised decoder with attention layers that differ, for tests of passes and code generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from qcompile.graph import Graph
from tests.support.graphs import Begun


@dataclass(frozen=True)
class Layer:
    """A layer's attention. With `shared`, it reads the keys and values of the earlier layer with this number.

    Values have `values` features (0: as many as keys), and a norm without weight if `value_norm`. Keys are multiplied
    by `key_scaling` in their rope (queries are not). `gated`: a gate for each head multiplies what it attends to.
    """

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    window: int = 0
    chunk: int = 0
    shared: int | None = None
    values: int = 0
    value_norm: bool = False
    key_scaling: float = 1.0
    gated: bool = False


MIXED = (
    Layer(),
    Layer(heads=4, kv_heads=1, head_dim=32, chunk=20, value_norm=True),
    Layer(heads=2, kv_heads=1, head_dim=32, shared=1, window=30),
    Layer(heads=4, kv_heads=4, head_dim=32, values=16, gated=True),
    Layer(heads=4, kv_heads=2, head_dim=16, shared=0, gated=True),
)
"""Layers of all kinds: other numbers of heads, other head sizes, and keys and values of earlier layers."""


class _Decoder:
    """The graph while its layers are added; `kept` are the keys and values of each layer."""

    def __init__(self, hidden: int, vocab: int, seed: int) -> None:
        self.begun, self.hidden = Begun(vocab, seed), hidden
        self.graph = self.begun.graph
        self.kept: list[tuple[fx.Node, fx.Node]] = []
        self.inv_freq: dict[int, fx.Node] = {}

    def linear(self, x: fx.Node, name: str, n: int) -> fx.Node:
        return self.graph.call("linear", x, self.begun.weight(name, n, x.meta["val"].shape[-1]))

    def heads(self, x: fx.Node, name: str, count: int, size: int) -> fx.Node:
        return self.graph.call("split_heads", self.linear(x, name, count * size), count)

    def turned(self, x: fx.Node, name: str, scaling: float) -> fx.Node:
        """Heads with a norm and a rope."""
        size = x.meta["val"].shape[-1]
        x = self.graph.call("rms_norm", x, self.begun.weight(f"{name}.norm", size), 1e-6)
        if size not in self.inv_freq:
            self.inv_freq[size] = self.begun.kept(f"inv_freq{size}", 1000.0 ** -(torch.arange(0, size, 2) / size))
        return self.graph.call("rope", x, self.begun.positions, self.inv_freq[size], scaling, False)

    def attend(self, y: fx.Node, layer: Layer, number: int) -> fx.Node:
        """What the attention of a layer adds."""
        graph, scale = self.graph, layer.head_dim**-0.5
        q = self.turned(self.heads(y, f"q{number}", layer.heads, layer.head_dim), f"q{number}", 1.0)
        if layer.shared is None:
            k = self.heads(y, f"k{number}", layer.kv_heads, layer.head_dim)
            k = self.turned(k, f"k{number}", layer.key_scaling)
            v = self.heads(y, f"v{number}", layer.kv_heads, layer.values or layer.head_dim)
            v = graph.call("rms_norm", v, None, 1e-6) if layer.value_norm else v
        else:
            k, v = self.kept[layer.shared]
        self.kept.append((k, v))
        mixed = graph.call("attention", q, k, v, scale, layer.window, 0.0, None, None, None, layer.chunk)
        if layer.gated:
            gate = graph.call("unary", self.linear(y, f"g{number}", layer.heads), "sigmoid")
            mixed = graph.call("mul", mixed, graph.call("split_heads", gate, layer.heads))
        return self.linear(graph.call("merge_heads", mixed), f"o{number}", self.hidden)


def layered(layers: Sequence[Layer] = MIXED, *, hidden: int = 64, vocab: int = 50, seed: int = 0) -> Graph:
    """A decoder at stage `raise` of `layers`, each an attention and a gated block."""
    made = _Decoder(hidden, vocab, seed)
    graph = made.graph
    x = graph.call("embedding", made.begun.ids, made.begun.weight("embed", vocab, hidden))
    for number, layer in enumerate(layers):
        y = graph.call("rms_norm", x, None, 1e-6)
        x = graph.call("add", x, made.attend(y, layer, number))
        y = graph.call("rms_norm", x, None, 1e-6)
        gate = graph.call("unary", made.linear(y, f"gate{number}", 96), "silu")
        product = graph.call("mul", gate, made.linear(y, f"up{number}", 96))
        x = graph.call("add", x, made.linear(product, f"down{number}", hidden))
    graph.fx.output(
        graph.call("linear", graph.call("rms_norm", x, None, 1e-6), made.begun.weight("head", vocab, hidden))
    )
    return graph
