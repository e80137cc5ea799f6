"""Random decoders at stage `raise`: any mix of the operators there are, small and of odd sizes, from a seed."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import fx

from qcompile import check, ops
from qcompile.graph import Graph, ModelInfo, WeightStore

CONTEXT = 128


class RandomDecoder:
    """Draws one decoder from `seed`; `graph` is the result, `drawn` what was chosen."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.values = torch.Generator().manual_seed(seed)
        self.drawn: dict[str, Any] = {"seed": seed}
        self._sizes()
        info = ModelInfo(f"random{seed}", self.vocab, CONTEXT, 0, (0,), 0)
        self.graph = Graph(fx.Graph(), WeightStore(), info, "raise")
        self.ids, self.positions = (self.graph.fx.placeholder(name) for name in ("token_ids", "positions"))
        for node in (self.ids, self.positions):
            node.meta["val"] = torch.empty(2, 7, dtype=torch.int64, device="meta")
        self._tables()
        x = self._embedded()
        for layer in range(self.layers):
            x = self._layer(x, layer)
        self.graph.fx.output(self._logits(self.norm(x, "last")))
        self.graph = self.graph.clone()
        check.check(self.graph)

    # ---- drawing ---------------------------------------------------------------------------------

    def pick(self, name: str, *choices: Any) -> Any:
        """One of `choices`, noted under `name`."""
        self.drawn[name] = self.random.choice(choices)
        return self.drawn[name]

    def maybe(self, chance: float = 0.3) -> bool:
        return self.random.random() < chance

    def _sizes(self) -> None:
        self.vocab = self.random.randint(20, 90)
        self.head_dim = self.pick("head_dim", 4, 8, 12, 16, 18, 32, 40)
        self.kv_heads = self.pick("kv_heads", 1, 1, 2, 3)
        self.heads = self.kv_heads * self.pick("group", 1, 2, 3, 4)
        self.hidden = self.pick("hidden", 16, 20, 32, 36, 48, 64, 72, 100, 144)
        self.inner = self.pick("inner", 16, 24, 40, 48, 80, 129, 160)
        self.layers = self.pick("layers", 1, 2, 2, 3)
        self.norm_kind = self.pick("norm", "rms_norm", "rms_norm", "layer_norm")
        self.bias = self.pick("bias", 0.0, 0.0, 0.5, 1.0)
        self.rotary = 2 * self.random.randint(1, self.head_dim // 2) if self.maybe(0.8) else 0
        self.drawn |= {"vocab": self.vocab, "rotary": self.rotary}
        self.act = self.pick("act", *ops.UNARY)
        self.gated = self.pick("gated", True, True, False)
        self.parallel = self.pick("parallel", False, False, True)
        self.after = self.pick("post_norm", False, False, False, True)
        self.head_norm = self.pick("head_norm", "", "", "heads", "whole")
        self.fused = self.pick("fused", False, False, True)

    # ---- building --------------------------------------------------------------------------------

    def call(self, name: str, *args: Any) -> fx.Node:
        return self.graph.call(name, *args)

    def weight(self, name: str, *shape: int, scale: float = 1.0, shift: float = 0.0) -> fx.Node:
        value = torch.randn(*shape, generator=self.values) * scale + shift
        self.graph.weights.add_tensor(name, value)
        return self.graph.weight(name)

    def linear(self, x: fx.Node, name: str, n: int) -> fx.Node:
        k = x.meta["val"].shape[-1]
        bias = self.weight(f"{name}.bias", n, scale=0.3) if self.maybe(self.bias) else None
        return self.call("linear", x, self.weight(name, n, k, scale=k**-0.5), bias)

    def norm(self, x: fx.Node, name: str) -> fx.Node:
        width = x.meta["val"].shape[-1]
        scale = self.weight(f"{name}.scale", width, scale=0.3, shift=1.0) if self.maybe(0.8) else None
        if self.norm_kind == "rms_norm":
            return self.call("rms_norm", x, scale, 1e-5)
        shift = self.weight(f"{name}.shift", width, scale=0.3) if self.maybe(0.6) else None
        return self.call("layer_norm", x, scale, shift, 1e-5)

    def _tables(self) -> None:
        if self.rotary:
            steps = torch.arange(0, self.rotary, 2) / self.rotary
            self.graph.weights.add_tensor("inv_freq", 1000.0**-steps)
            self.rope = (self.graph.weight("inv_freq"), self.pick("scaling", 1.0, 1.0, 1.2), self.maybe())

    def _embedded(self) -> fx.Node:
        self.table = self.weight("embed", self.vocab, self.hidden)
        x = self.call("embedding", self.ids, self.table)
        if self.maybe():
            x = self.call("scale", x, 1.5)
        if self.maybe():
            places = self.weight("places", CONTEXT, self.hidden, scale=0.3)
            x = self.call("add", x, self.call("embedding", self.positions, places))
        return self.norm(x, "embed.norm") if self.maybe(0.1) else x

    def _layer(self, x: fx.Node, layer: int) -> fx.Node:
        y = self.norm(x, f"norm{layer}a")
        mixed = self._attention(y, layer)
        if self.parallel:
            both = self.call("add", mixed, self._mlp(y if self.maybe(0.5) else self.norm(x, f"norm{layer}b"), layer))
            return self.call("add", x, both)
        x = self._residual(x, mixed, f"post{layer}a")
        return self._residual(x, self._mlp(self.norm(x, f"norm{layer}b"), layer), f"post{layer}b")

    def _residual(self, x: fx.Node, y: fx.Node, name: str) -> fx.Node:
        if self.after:
            y = self.norm(y, name)
        if self.drawn.setdefault("residual_scale", self.maybe(0.15)):
            y = self.call("scale", y, 0.5)
        return self.call("add", *((x, y) if self.maybe(0.7) else (y, x)))

    def _attention(self, x: fx.Node, layer: int) -> fx.Node:
        widths = [n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        if self.fused:
            joined = self.linear(x, f"qkv{layer}", sum(widths))
            starts = [0, widths[0], widths[0] + widths[1]]
            parts = [self.call("slice_features", joined, s, s + w) for s, w in zip(starts, widths, strict=True)]
        else:
            parts = [self.linear(x, f"{name}{layer}", w) for name, w in zip("qkv", widths, strict=True)]
        q, k, v = (
            self._heads(part, count, f"{name}{layer}", name != "v")
            for part, count, name in zip(parts, (self.heads, self.kv_heads, self.kv_heads), "qkv", strict=True)
        )
        window = self.random.choice((0, 0, 1, 5, 17))
        softcap = self.random.choice((0.0, 0.0, 0.0, 4.0))
        self.drawn[f"attention{layer}"] = (window, softcap)
        mixed = self.call("attention", q, k, v, self.head_dim**-0.5, window, softcap, None)
        return self.linear(self.call("merge_heads", mixed), f"o{layer}", self.hidden)

    def _heads(self, x: fx.Node, count: int, name: str, turns: bool) -> fx.Node:
        if turns and self.head_norm == "whole":
            x = self.norm(x, f"{name}.norm")
        x = self.call("split_heads", x, count)
        if turns and self.head_norm == "heads":
            x = self.norm(x, f"{name}.norm")
        return self.call("rope", x, self.positions, *self.rope) if turns and self.rotary else x

    def _mlp(self, x: fx.Node, layer: int) -> fx.Node:
        if not self.gated:
            inner = self.call("unary", self.linear(x, f"in{layer}", self.inner), self.act)
        elif self.fused:
            joined = self.linear(x, f"gate_up{layer}", 2 * self.inner)
            gate, up = (self.call("slice_features", joined, i * self.inner, (i + 1) * self.inner) for i in (0, 1))
            inner = self.call("mul", self.call("unary", gate, self.act), up)
        else:
            gate = self.call("unary", self.linear(x, f"gate{layer}", self.inner), self.act)
            up = self.linear(x, f"up{layer}", self.inner)
            inner = self.call("mul", *((gate, up) if self.maybe(0.7) else (up, gate)))
        return self.linear(inner, f"down{layer}", self.hidden)

    def _logits(self, x: fx.Node) -> fx.Node:
        if self.pick("tied", False, True):
            logits = self.call("linear", x, self.call("scale_axis", self.table, self._ones(), 1, False))
        else:
            logits = self.linear(x, "head", self.vocab)
        if self.pick("cap", False, False, True):
            logits = self.call("scale", self.call("unary", self.call("scale", logits, 0.2), "tanh"), 5.0)
        return logits

    def _ones(self) -> fx.Node:
        return self.weight("head.scale", self.hidden, scale=0.0, shift=self.hidden**-0.5)


def random_decoder(seed: int) -> tuple[Graph, dict[str, Any]]:
    """The decoder of `seed`, and what was drawn for it."""
    made = RandomDecoder(seed)
    return made.graph, made.drawn
