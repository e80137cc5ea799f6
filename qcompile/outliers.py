"""Outliers of activations and keys, before and after the passes that keep the function: how far a channel sticks out.

An outlier is measured as the largest magnitude of a channel over the mean of all channels' largest, on a short piece of
the calibration text: 1 is perfectly even. Kinds of values are told by dataflow, never by names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from qcompile import ops
from qcompile.graph import Graph
from qcompile.sweep import Sweep

TOKENS = 2048
"""How much text is looked at: magnitudes settle soon."""

KEYS, BLOCKS, OUTPUTS = "keys", "block inputs", "inputs of output modules"

Figures = dict[str, dict[str, list[float]]]

_LINEARS = ("linear", "gated_linear", "expert_linear", "gated_experts")
_NORMS = ("rms_norm", "layer_norm")


def compare(graphs: Sequence[Graph]) -> Figures:
    """{kind: {"before", "after": by layer}} of the first of `graphs` and the last before quantization.

    Kinds are KEYS, BLOCKS (what linears behind a norm read) and OUTPUTS (what other linears read, as the projections
    after attention and after the gate); of several linears in a layer the largest counts. Empty without calibration
    text. `graphs` are those after each pass.
    """
    floats = [graph for graph in graphs if graph.stage == "raise"]
    if not floats or floats[-1].calibration is None:
        return {}
    before, after = (measure(graph, floats[-1].calibration.excerpt(TOKENS)) for graph in (floats[0], floats[-1]))
    return {kind: {"before": before[kind], "after": after[kind]} for kind in before if before[kind]}


def measure(graph: Graph, tokens: Tensor) -> dict[str, list[float]]:
    """By kind, how far channels stick out in each layer of a float `graph` of whole sequences."""
    places = _places(graph)
    found: dict[str, dict[int, float]] = {KEYS: {}, BLOCKS: {}, OUTPUTS: {}}
    sweep = Sweep(graph, tokens)
    for node, (kind, layer, source) in places.items():
        sweep.advance(node)
        far = _unevenness(sweep.values(source))
        found[kind][layer] = max(far, found[kind].get(layer, 0.0))
    return {kind: [layers[layer] for layer in sorted(layers)] for kind, layers in found.items()}


def _unevenness(values: list[Tensor]) -> float:
    """Largest magnitude of a channel over the mean of all; values are [1, tokens, ..., features]."""
    largest = torch.stack([value.float().abs().amax((0, 1)).flatten() for value in values]).amax(0)
    return float(largest.max() / largest.mean().clamp_min(torch.finfo(torch.float32).tiny))


def _places(graph: Graph) -> dict[fx.Node, tuple[str, int, fx.Node]]:
    """Attentions and linears in order, each with its kind, its layer and the value that is looked at."""
    attentions = graph.calls("attention")
    feeding = {linear: layer for layer, node in enumerate(attentions) for linear in _linears_behind(node)}
    heads = set(_linears_behind(graph.output))
    found: dict[fx.Node, tuple[str, int, fx.Node]] = {}
    layer = 0
    for node in graph.nodes:
        arguments: Any = node.args
        if node in attentions:
            layer = attentions.index(node)
            found[node] = (KEYS, layer, arguments[1])
        elif ops.name_of(node.target) in _LINEARS and node not in heads:
            kind = BLOCKS if ops.name_of(_unturned(arguments[0]).target) in _NORMS else OUTPUTS
            found[node] = (kind, feeding.get(node, layer), arguments[0])
    return found


def _unturned(value: fx.Node) -> fx.Node:
    """What an online rotation in front of a linear turned; other values as they are."""
    return value.all_input_nodes[0] if ops.name_of(value.target) == "hadamard" else value


def _linears_behind(node: fx.Node) -> list[fx.Node]:
    """Linears from which `node` is reached without another linear or attention."""
    found, seen, frontier = [], {node}, list(node.all_input_nodes)
    while frontier:
        source = frontier.pop()
        if source in seen:
            continue
        seen.add(source)
        kind = ops.name_of(source.target)
        if kind in _LINEARS:
            found.append(source)
        elif kind not in ("attention", "add"):
            frontier += source.all_input_nodes
    return found
