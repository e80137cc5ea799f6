"""Cache: turn the whole-sequence graph into one step over rows of many sequences with a paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import fx

from qcompile import ops
from qcompile.errors import PassError, UsageError
from qcompile.formats.kv import KV_FORMATS, PAGE_TOKENS, kv_format
from qcompile.graph import Graph
from qcompile.passes.base import Pass, PassResult
from qcompile.passes.dataflow import value_features
from qcompile.passes.gather import gathered
from qcompile.passes.states import OPERATORS, STATE_INPUTS, example_states, replace_states

Features = tuple[int, int]
"""First feature of a range, and the feature after its last one."""
STEP_INPUTS = ("token_ids", "positions", "sequence", "block_table", "output_rows", "cache")


@dataclass(frozen=True)
class Cache(Pass):
    """Attention reads keys and values back from a cache of `format` (kv32, kv16, kv8, kv4, kv_hier, kv_hier4).

    The graph's inputs become token_ids [M], positions [M], sequence [M] (the row's index into block_table), block_table
    [S, pages], output_rows [R] and cache [layers, 2, slots, Hk, D]; its outputs are logits [R, V] and the new cache.
    All operators but attention and those with states (passes/states.py) treat rows independently, so only these change.
    A model without attention has a cache of 0 layers. Logits are computed for
    `output_rows` only. Values narrower than keys are padded with zeros, which are sliced off after attention, because
    all heads in a page have one size. Values that are features of the keys (passes/latent.py) are not stored, except in
    hierarchical caches. Keys and values are quantized per head and token (QServe 3.2); LATENT_GROUP features share a
    scale where values are features of the keys. kv_hier is QuantSpec's hierarchical cache; kv_hier4 is the draft's view
    of it, which reads the upper 4 bits only.
    """

    name: ClassVar[str] = "cache"
    requires: ClassVar[tuple[str, ...]] = ("quantize",)
    ensures: ClassVar[str | None] = "cache"
    format: str = "kv16"

    def __post_init__(self) -> None:
        if self.format not in KV_FORMATS:
            raise UsageError(f"cache.format={self.format} is unknown; there are {', '.join(KV_FORMATS)}")

    def for_draft(self) -> Cache:
        """The pass for a draft over the same cache: it reads only the upper bits of a hierarchical cache."""
        return Cache(kv_format(self.format).draft or self.format)

    def run(self, graph: Graph) -> PassResult:
        graph = graph.clone()
        for node in graph.calls("attention"):
            if not self._values_in_keys(node):
                _pad_values(graph, node)
        attentions = graph.calls("attention")
        heads = {_kv_shape(node, self._values_in_keys(node)) for node in attentions} or {((1, 1), None)}
        if not attentions and not graph.calls(*OPERATORS):
            raise PassError(
                self.name, graph.output.name, "the model has no attention and no state, so nothing to cache"
            )
        if len(heads) != 1:
            where = attentions[0].name
            raise PassError(self.name, where, f"layers must agree in KV heads and head size, found {sorted(heads)}")
        inputs = _step_inputs(graph)
        cache: fx.Node = inputs["cache"]
        for layer, node in enumerate(attentions):
            cache = self._replace_attention(graph, node, layer, inputs, cache)
        states, layout = replace_states(graph, inputs)
        _take_output_rows(graph, inputs["output_rows"])
        graph.output.args = ((graph.output.args[0], cache, *states),)
        (kv_heads, head_dim), _ = heads.pop()
        graph.infer([*_example(len(attentions), kv_heads, head_dim), *example_states(layout)])
        return PassResult(graph, len(attentions) + len(layout.layers))

    def _replace_attention(
        self, graph: Graph, node: fx.Node, layer: int, inputs: dict[str, fx.Node], cache: fx.Node
    ) -> fx.Node:
        given = ops.named(node)
        k, v = given.pop("k"), given.pop("v")
        step: dict[str, Any] = {name: inputs[name] for name in ("positions", "sequence", "block_table")}
        step["layer"] = layer
        bits = kv_format(self.format).read_bits
        value = self._values_in_keys(node)
        with graph.fx.inserting_before(node):
            appended = graph.create("kv_append", k, None if value else v, **step, cache=cache, format=self.format)
            given |= {"value": list(value)} if value else {}
            read = graph.create("kv_attention", **step, **given, cache=appended, bits=bits)
        graph.replace(node, read)
        return appended

    def _values_in_keys(self, node: fx.Node) -> Features | None:
        """Which features of the keys are the values, so that only keys are cached; None if values are cached too."""
        return None if kv_format(self.format).hierarchical else value_features(node)


def _kv_shape(node: fx.Node, value: Features | None) -> tuple[tuple[int, int], Features | None]:
    """(KV heads, head size) of a layer of the cache, and which features of its keys are values."""
    k, v = (ops.operand(node, name).meta["val"].shape for name in ("k", "v"))
    if value is None and k != v:
        raise PassError("cache", node.name, f"keys {tuple(k[2:])} and values {tuple(v[2:])} differ in heads or size")
    return tuple(k[-2:]), value


def _pad_values(graph: Graph, node: fx.Node) -> None:
    """Pad values narrower than keys with zeros, and slice the padding off the attention output."""
    key, value = ops.operand(node, "k"), ops.operand(node, "v")
    (_, _, heads, wide), (_, _, kv_heads, narrow) = key.meta["val"].shape, value.meta["val"].shape
    if narrow >= wide:
        return
    heads = node.meta["val"].shape[-2]
    place = np.arange(kv_heads * narrow).reshape(kv_heads, narrow)
    filled = np.pad(place, ((0, 0), (0, wide - narrow)), constant_values=-1).ravel()
    kept = np.arange(heads * wide).reshape(heads, wide)[:, :narrow].ravel()
    with graph.fx.inserting_before(node):
        split = ops.name_of(value.target) == "split_heads"
        flat = ops.operand(value, "x") if split else graph.call("merge_heads", value)
        ops.set_operands(node, v=graph.call("split_heads", gathered(graph, [flat], filled), kv_heads))
    users = list(node.users)
    graph.infer_node(node)
    with graph.fx.inserting_after(node):
        merged = graph.call("merge_heads", node)
    with graph.fx.inserting_after(merged):
        cut = gathered(graph, [merged], kept)
    with graph.fx.inserting_after(cut):
        narrowed = graph.call("split_heads", cut, heads)
    for user in users:
        user.replace_input_with(node, narrowed)


def _step_inputs(graph: Graph) -> dict[str, fx.Node]:
    """Replace the graph's inputs (token_ids, positions) by those of a step."""
    old = graph.inputs
    names = STEP_INPUTS + STATE_INPUTS * bool(graph.calls(*OPERATORS))
    with graph.fx.inserting_before(graph.nodes[0]):
        new = {name: graph.fx.placeholder(f"step_{name}") for name in names}
    for node, name in zip(old, STEP_INPUTS, strict=False):
        graph.replace(node, new[name])
    return new


def _take_output_rows(graph: Graph, rows: fx.Node) -> None:
    """Gather the wanted rows as early as possible: at the start of the single chain of row-wise operators to logits."""
    node: Any = graph.output.args[0]
    while True:
        sources = [n for n in node.all_input_nodes if not graph.is_weight(n)]
        if len(sources) != 1 or ops.name_of(node.target) in ("kv_attention", "embedding", None):
            break
        node = sources[0]
    users = list(node.users)
    with graph.fx.inserting_after(node):
        taken = graph.create("take_rows", node, rows)
    reaching = _output_chain(graph)
    for user in users:
        if user in reaching:
            user.replace_input_with(node, taken)


def _output_chain(graph: Graph) -> set[fx.Node]:
    """Nodes on the single chain that ends in the output."""
    chain: set[fx.Node] = {graph.output}
    node: Any = graph.output.args[0]
    while isinstance(node, fx.Node):
        chain.add(node)
        sources = [n for n in node.all_input_nodes if not graph.is_weight(n)]
        node = sources[0] if len(sources) == 1 else None
    return chain


def _example(layers: int, kv_heads: int, head_dim: int) -> list[torch.Tensor]:
    """Meta tensors for a step of 3 rows of 2 sequences with 5 pages and 2 output rows."""
    rows = torch.empty(3, dtype=torch.int64, device="meta")
    table = torch.empty(2, 5, dtype=torch.int64, device="meta")
    outputs = torch.empty(2, dtype=torch.int64, device="meta")
    slots = 10 * PAGE_TOKENS
    cache = torch.empty(layers, 2, slots, kv_heads, head_dim, device="meta")
    return [rows, rows, rows, table, outputs, cache]
