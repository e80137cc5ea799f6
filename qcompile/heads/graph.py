"""A draft head as a raised graph, so that passes and code generation treat it as they treat models."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import fx

from qcompile import ops
from qcompile.errors import UnsupportedError, UsageError
from qcompile.graph import Graph, Weight, WeightStore
from qcompile.heads.reading import EMBEDDING, HeadFile

INPUTS = ("token_ids", "positions", "features")


@dataclass(frozen=True)
class TokenTable:
    """The embedding that a head reads: its name and weight, and what multiplies its rows."""

    name: str
    weight: Weight
    scale: float = 1.0


def token_table(head: HeadFile, target: Graph, origin: str) -> TokenTable:
    """The embedding of the head's own file, or else of the raised graph `target`.

    Raises UnsupportedError if neither has one that the head can read, UsageError if the head's lacks tokens.
    """
    if EMBEDDING in head.weights:
        rows, needed = head.weights[EMBEDDING].shape[0], target.info.vocab_size
        if rows < needed:
            raise UsageError(f"draft {head.path}: {EMBEDDING} has {rows} rows for the {needed} tokens of the model")
        return TokenTable(f"{origin}{EMBEDDING}", head.weights[EMBEDDING])
    ids = target.inputs[0]
    tables = {ops.operand(node, "weight") for node in target.calls("embedding") if ops.operand(node, "ids") is ids}
    table = next(iter(tables), None)
    scale = target.info.embeds_scale
    if len(tables) != 1 or table is None or table.op != "get_attr" or not scale:
        raise UnsupportedError(f"draft {head.path} has no {EMBEDDING}, and the model has no plain one to share")
    name = str(table.target)
    return TokenTable(name, target.weights.entries[name], scale)


def head_graph(head: HeadFile, target: Graph, origin: str) -> Graph:
    """The head at stage `raise`. The names of its own weights begin with `origin`.

    Its inputs are token_ids and positions int64 [B, T], and features [B, T, F]: of the target at the position before,
    or the head's own. Its output is logits [B, T, drafted]. `target` is the raised graph of the model.

    Raises UnsupportedError if the embedding has another width than the head.
    """
    table = token_table(head, target, origin)
    if table.weight.shape[1] != head.hidden:
        raise UnsupportedError(
            f"draft {head.path} is {head.hidden} features wide, and embeddings of tokens are {table.weight.shape[1]}"
        )
    info = replace(
        target.info,
        name=head.path.name,
        vocab_size=head.drafted,
        parameters=sum(int(np.prod(weight.shape)) for weight in head.weights.values()),
        left_out={},
        adapters={},
        remarks=(),
    )
    return _Builder(head, Graph(fx.Graph(), WeightStore(), info, "raise"), origin).build(table)


class _Builder:
    """Writes the operators of a head into a graph."""

    def __init__(self, head: HeadFile, graph: Graph, origin: str) -> None:
        self.head, self.graph, self.origin = head, graph, origin

    def build(self, table: TokenTable) -> Graph:
        """The finished graph."""
        graph, call = self.graph, self.graph.call
        ids, positions, features = (graph.fx.placeholder(name) for name in INPUTS)
        ids.meta["val"] = torch.empty(2, 7, dtype=torch.int64, device="meta")
        positions.meta["val"] = torch.empty(2, 7, dtype=torch.int64, device="meta")
        features.meta["val"] = torch.empty(2, 7, self.head.hidden, device="meta")
        embedded = call("embedding", ids, self._kept(table.name, table.weight))
        if table.scale != 1:
            embedded = call("scale", embedded, table.scale)
        hidden = call("read_features", features)
        normed = self._norm(hidden, "hidden_norm")
        both = self._joined(self._norm(embedded, "input_layernorm"), normed)
        mixed = self._linear(self._attention(both, positions), "self_attn.o_proj")
        hidden = call("add", normed if self.head.norm_first else hidden, mixed)
        normed = self._norm(hidden, "post_attention_layernorm")
        gate = call("unary", self._linear(normed, "mlp.gate_proj"), "silu")
        product = call("mul", gate, self._linear(normed, "mlp.up_proj"))
        hidden = call("add", hidden, self._linear(product, "mlp.down_proj"))
        graph.fx.output(self._linear(self._norm(hidden, "norm"), "lm_head"))
        return graph

    def _attention(self, x: fx.Node, positions: fx.Node) -> fx.Node:
        head, call = self.head, self.graph.call
        counts = {"q": head.heads, "k": head.kv_heads, "v": head.kv_heads}
        q, k, v = (
            call("split_heads", self._linear(x, f"self_attn.{name}_proj"), count) for name, count in counts.items()
        )
        inv_freq = self._kept(f"{self.origin}inv_freq", _constant(head.rotation.inv_freq))
        q, k = (call("rope", x, positions, inv_freq, head.rotation.scaling, False) for x in (q, k))
        return call("merge_heads", call("attention", q, k, v, head.head_dim**-0.5))

    def _joined(self, first: fx.Node, second: fx.Node) -> fx.Node:
        """[..., F] and [..., F] beside each other, [..., 2 F]."""
        index = self._kept(f"{self.origin}joined", _constant(torch.arange(2 * self.head.hidden)))
        return self.graph.call("gather_features", [first, second], index)

    def _linear(self, x: fx.Node, name: str) -> fx.Node:
        bias = (self._own(f"{name}.bias"),) if f"{name}.bias" in self.head.weights else ()
        return self.graph.call("linear", x, self._own(f"{name}.weight"), *bias)

    def _norm(self, x: fx.Node, name: str) -> fx.Node:
        return self.graph.call("rms_norm", x, self._own(f"{name}.weight"), self.head.norm_eps)

    def _own(self, name: str) -> fx.Node:
        return self._kept(f"{self.origin}{name}", self.head.weights[name])

    def _kept(self, name: str, weight: Weight) -> fx.Node:
        """A node that reads the weight `name`."""
        self.graph.weights.entries[name] = weight
        return self.graph.weight(name)


def _constant(value: torch.Tensor) -> Weight:
    return Weight(tuple(value.shape), value.dtype, lambda: value)
