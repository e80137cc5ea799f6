"""Cache: turn the whole-sequence graph into one step over rows of many sequences with a paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import fx

from qcompile import ops
from qcompile.errors import PassError, UsageError
from qcompile.formats.kv import KV_FORMATS, PAGE_TOKENS, kv_format
from qcompile.formats.states import STATE_FORMATS
from qcompile.graph import Graph
from qcompile.ops.recurrent_step import state_format
from qcompile.passes.base import Pass, PassResult
from qcompile.passes.dataflow import value_features
from qcompile.passes.gather import gathered
from qcompile.passes.states import OPERATORS, STATE_INPUTS, example_states, replace_states

Features = tuple[int, int]
"""First feature of a range, and the feature after its last one."""
STEP_INPUTS = ("token_ids", "positions", "sequence", "block_table", "output_rows", "cache")
FEATURES = "features"
"""The input of a step of a draft head that a graph over sequences has after positions, [B, T, F]."""


@dataclass(frozen=True)
class Cache(Pass):
    """Attention reads keys and values back from a cache of `format` (kv32, kv16, kv8, kv4, kv_hier, kv_hier4).

    The graph's inputs become token_ids [M], positions [M], sequence [M] (the row's index into block_table), block_table
    [S, pages], output_rows [R] and cache [layers, 2, slots, Hk, D], and a draft head's features [M, F]; its outputs are
    logits [R, V] and the new cache.
    All operators but attention and those with states (passes/states.py) treat rows independently, so only these change.
    Attentions over the same keys and values share a layer of the cache, to which the first one appends. Layers may
    differ in heads and head size; Hk and D are the largest. A model without attention has a cache of 0 layers. Logits
    are computed for `output_rows` only. Values narrower than keys are padded with zeros, which are sliced off after
    attention, because a layer's keys and values have one size. Values that are features of the keys (passes/latent.py)
    are not stored, except in hierarchical caches. Keys and values are quantized per head and token (QServe 3.2);
    LATENT_GROUP features share a scale where values are features of the keys. kv_hier is QuantSpec's hierarchical
    cache; kv_hier4 is the draft's view of it, which reads the upper 4 bits only. States of recurrences are
    stored in the format `states` (f32, bf16, int8; formats/states.py). Fewer bits are for matrices, and refused where
    they save nothing.
    """

    name: ClassVar[str] = "cache"
    requires: ClassVar[tuple[str, ...]] = ("quantize",)
    ensures: ClassVar[str | None] = "cache"
    format: str = "kv16"
    states: str = "f32"

    def __post_init__(self) -> None:
        if self.states not in STATE_FORMATS:
            raise UsageError(f"cache.states={self.states} is unknown; there are {', '.join(STATE_FORMATS)}")
        if self.format not in KV_FORMATS:
            raise UsageError(f"cache.format={self.format} is unknown; there are {', '.join(KV_FORMATS)}")

    def for_draft(self) -> Cache:
        """The pass for a draft over the same cache: it reads only the upper bits of a hierarchical cache."""
        return replace(self, format=kv_format(self.format).draft or self.format)

    def run(self, graph: Graph) -> PassResult:
        graph = graph.clone()
        self._pad_values(graph)
        attentions = graph.calls("attention")
        if not attentions and not graph.calls(*OPERATORS):
            raise PassError(
                self.name, graph.output.name, "the model has no attention and no state, so nothing to cache"
            )
        shapes = [_kv_shape(node, self._values_in_keys(node)) for node in attentions] or [((1, 1), None)]
        if len({value for _, value in shapes}) != 1:
            raise PassError(self.name, attentions[0].name, "layers must agree in which features of keys are values")
        inputs = _step_inputs(graph)
        cache: fx.Node = inputs["cache"]
        layers: dict[tuple[fx.Node, fx.Node], int] = {}
        for node in attentions:
            cache = self._replace_attention(graph, node, layers, inputs, cache)
        states, layout = replace_states(graph, inputs, state_format(self.states))
        _take_output_rows(graph, inputs["output_rows"])
        graph.output.args = ((graph.output.args[0], cache, *states),)
        kv_heads, head_dim = (max(sizes) for sizes in zip(*(heads for heads, _ in shapes), strict=True))
        graph.infer([*_example(len(layers), kv_heads, head_dim), *example_states(layout), *_example_features(graph)])
        return PassResult(graph, len(attentions) + len(layout.layers))

    def _replace_attention(
        self,
        graph: Graph,
        node: fx.Node,
        layers: dict[tuple[fx.Node, fx.Node], int],
        inputs: dict[str, fx.Node],
        cache: fx.Node,
    ) -> fx.Node:
        """Attend over pages instead; keys and values are appended unless they are in `layers`. Returns the cache."""
        given = ops.named(node)
        k, v = given.pop("k"), given.pop("v")
        step: dict[str, Any] = {name: inputs[name] for name in ("positions", "sequence", "block_table")}
        known = (k, v) in layers
        step["layer"] = layers.setdefault((k, v), len(layers))
        bits, kv_heads = kv_format(self.format).read_bits, k.meta["val"].shape[-2]
        value = self._values_in_keys(node)
        with graph.fx.inserting_before(node):
            if not known:
                cache = graph.create("kv_append", k, None if value else v, **step, cache=cache, format=self.format)
            given |= {"value": list(value)} if value else {}
            read = graph.create("kv_attention", **step, **given, cache=cache, bits=bits, kv_heads=kv_heads)
        graph.replace(node, read)
        return cache

    def _pad_values(self, graph: Graph) -> None:
        """Pad cached values narrower than their keys with zeros, and slice the padding off attention's results."""
        made: dict[tuple[fx.Node, int], fx.Node] = {}
        for node in graph.calls("attention"):
            value, wide = ops.operand(node, "v"), ops.operand(node, "k").meta["val"].shape[-1]
            narrow = value.meta["val"].shape[-1]
            if narrow >= wide or self._values_in_keys(node):
                continue
            if (value, wide) not in made:
                with graph.fx.inserting_before(node):
                    made[value, wide] = _padded(graph, value, wide)
            ops.set_operands(node, v=made[value, wide])
            _cut(graph, node, narrow)

    def _values_in_keys(self, node: fx.Node) -> Features | None:
        """Which features of the keys are the values, so that only keys are cached; None if values are cached too."""
        return None if kv_format(self.format).hierarchical else value_features(node)


def behind_cache(passes: tuple[Pass, ...], added: Pass) -> tuple[Pass, ...]:
    """`passes` with one more, which runs after `cache`."""
    place = next(index for index, rewrite in enumerate(passes, 1) if isinstance(rewrite, Cache))
    return (*passes[:place], added, *passes[place:])


def _kv_shape(node: fx.Node, value: Features | None) -> tuple[tuple[int, int], Features | None]:
    """(KV heads, head size) of a layer of the cache, and which features of its keys are values."""
    k, v = (ops.operand(node, name).meta["val"].shape for name in ("k", "v"))
    if value is None and k != v:
        raise PassError("cache", node.name, f"keys {tuple(k[2:])} and values {tuple(v[2:])} differ in heads or size")
    return tuple(k[-2:]), value


def _padded(graph: Graph, value: fx.Node, wide: int) -> fx.Node:
    """`value` [B, T, H, n] with zeros after the features of each head, [B, T, H, wide], at the insertion point."""
    heads, narrow = value.meta["val"].shape[-2:]
    place = np.arange(heads * narrow).reshape(heads, narrow)
    filled = np.pad(place, ((0, 0), (0, wide - narrow)), constant_values=-1).ravel()
    split = ops.name_of(value.target) == "split_heads"
    flat = ops.operand(value, "x") if split else graph.call("merge_heads", value)
    return graph.call("split_heads", gathered(graph, [flat], filled), heads)


def _cut(graph: Graph, node: fx.Node, narrow: int) -> None:
    """Make the users of attention `node` read the first `narrow` features of its heads: its values were padded."""
    heads, wide = node.meta["val"].shape[-2], ops.operand(node, "v").meta["val"].shape[-1]
    kept = np.arange(heads * wide).reshape(heads, wide)[:, :narrow].ravel()
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
    """Replace the graph's inputs (token_ids, positions, and features of a draft head) by those of a step."""
    old = graph.inputs
    names = STEP_INPUTS + STATE_INPUTS * bool(graph.calls(*OPERATORS)) + (FEATURES,) * (len(old) > 2)
    with graph.fx.inserting_before(graph.nodes[0]):
        new = {name: graph.fx.placeholder(f"step_{name}") for name in names}
    for node, name in zip(old, (*STEP_INPUTS[:2], FEATURES), strict=False):
        new[name].meta = dict(node.meta)
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


def _example_features(graph: Graph) -> list[torch.Tensor]:
    """A meta tensor for the features of the rows of `_example`, if the graph reads any."""
    read = [node for node in graph.inputs if node.target == f"step_{FEATURES}"]
    return [torch.empty(3, node.meta["val"].shape[-1], device="meta") for node in read]


def _example(layers: int, kv_heads: int, head_dim: int) -> list[torch.Tensor]:
    """Meta tensors for a step of 3 rows of 2 sequences with 5 pages and 2 output rows."""
    rows = torch.empty(3, dtype=torch.int64, device="meta")
    table = torch.empty(2, 5, dtype=torch.int64, device="meta")
    outputs = torch.empty(2, dtype=torch.int64, device="meta")
    slots = 10 * PAGE_TOKENS
    cache = torch.empty(layers, 2, slots, kv_heads, head_dim, device="meta")
    return [rows, rows, rows, table, outputs, cache]
