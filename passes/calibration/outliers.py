"""How far outlier channels of activations and keys exceed the others, before and after function-preserving passes.

The measure is the largest magnitude of a channel over the mean of all channels' largest magnitudes, on a short excerpt
of the calibration text; 1 is perfectly even. Kinds of values are determined by dataflow, never by names.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from qcompile import ops
from qcompile.graph import Graph
from qcompile.passes.calibration.sweep import Sweep

TOKENS = 2048
"""Tokens of text to measure on; magnitudes converge quickly."""

KEYS, BLOCKS, OUTPUTS = "keys", "block inputs", "inputs of output modules"

Figures = dict[str, dict[str, list[float]]]

_LINEARS = ("linear", "gated_linear", "expert_linear", "gated_experts")


def compare(graphs: Sequence[Graph]) -> Figures:
    """{kind: {"before", "after": one value per layer}} for the first of `graphs` and the last before quantization.

    Kinds are KEYS, BLOCKS (inputs of linears after a norm) and OUTPUTS (inputs of other linears, as the projections
    after attention and after the gate). If a layer has several linears, the largest value counts. Empty without
    calibration text. `graphs` are the graphs after each pass.
    """
    floats = [graph for graph in graphs if graph.stage == "raise"]
    if not floats or floats[-1].calibration is None:
        return {}
    before, after = (measure(graph, floats[-1].calibration.excerpt(TOKENS)) for graph in (floats[0], floats[-1]))
    return {kind: {"before": before[kind], "after": after[kind]} for kind in before if before[kind]}


def measure(graph: Graph, tokens: Tensor) -> dict[str, list[float]]:
    """Unevenness of channels by kind and layer of a `graph` in floating point over whole sequences."""
    places = _places(graph)
    measured: dict[str, dict[int, float]] = {KEYS: {}, BLOCKS: {}, OUTPUTS: {}}
    sweep = Sweep(graph, tokens)
    for node, (kind, layer, source) in places.items():
        sweep.advance(node)
        far = _unevenness(sweep.values(source))
        measured[kind][layer] = max(far, measured[kind].get(layer, 0.0))
    return {kind: [layers[layer] for layer in sorted(layers)] for kind, layers in measured.items()}


def _unevenness(values: list[Tensor]) -> float:
    """Largest magnitude of any channel over the mean of all channels'; values are [1, tokens, ..., features]."""
    largest = torch.stack([value.float().abs().amax((0, 1)).flatten() for value in values]).amax(0)
    return float(largest.max() / largest.mean().clamp_min(torch.finfo(torch.float32).tiny))


def _places(graph: Graph) -> dict[fx.Node, tuple[str, int, fx.Node]]:
    """Attentions and linears in order, each with its kind, its layer and the value to measure."""
    attentions = graph.calls("attention")
    feeding = {linear: layer for layer, node in enumerate(attentions) for linear in _linears_behind(node)}
    heads = set(_linears_behind(graph.output))
    places: dict[fx.Node, tuple[str, int, fx.Node]] = {}
    layer = 0
    for node in graph.nodes:
        if node in attentions:
            layer = attentions.index(node)
            places[node] = (KEYS, layer, ops.operand(node, "k"))
        elif ops.name_of(node.target) in _LINEARS and node not in heads:
            x = ops.operand(node, "x")
            kind = BLOCKS if ops.name_of(_before_rotation(x).target) in ops.NORMS else OUTPUTS
            places[node] = (kind, feeding.get(node, layer), x)
    return places


def _before_rotation(value: fx.Node) -> fx.Node:
    """The value before an online rotation in front of a linear; other values unchanged."""
    return value.all_input_nodes[0] if ops.name_of(value.target) == "hadamard" else value


def _linears_behind(node: fx.Node) -> list[fx.Node]:
    """Linears with no other linear, attention or add between them and `node`."""
    linears, seen, frontier = [], {node}, list(node.all_input_nodes)
    while frontier:
        source = frontier.pop()
        if source in seen:
            continue
        seen.add(source)
        kind = ops.name_of(source.target)
        if kind in _LINEARS:
            linears.append(source)
        elif kind not in ("attention", "add"):
            frontier += source.all_input_nodes
    return linears
