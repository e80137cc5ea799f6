"""Turn operators with a recurrent state over whole sequences into operators of a step over slots of states."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from qcompile import ops
from qcompile.errors import PassError
from qcompile.formats.states import LayerState, RecurrenceState, StateFormat, StateLayout
from qcompile.graph import Graph
from qcompile.ops.recurrent_step import layer_state

OPERATORS = ("causal_conv", "linear_recurrence")
"""Operators over whole sequences that have a state."""

STATE_INPUTS = ("state_slots", "certain", "states")
"""Inputs of a step of a graph with states: state_slots [S], certain [S] and states [slots, numbers]."""


def replace_states(
    graph: Graph, inputs: dict[str, fx.Node], stored: StateFormat = "f32"
) -> tuple[list[fx.Node], StateLayout]:
    """Replace the operators, which continue one another's states. Returns the new states (none without operators).

    States of recurrences are `stored` in a format. Raises PassError if one of them would gain nothing.
    """
    nodes = graph.calls(*OPERATORS)
    layout = StateLayout(tuple(layer_state(node, stored) for node in nodes))
    _check(graph, nodes, layout, stored)
    states = [inputs["states"]] if nodes else []
    for node, layer, offset in zip(nodes, layout.layers, layout.offsets, strict=True):
        states = [_replace(graph, node, layer, inputs, states[0], offset)]
    return states, layout


def _check(graph: Graph, nodes: list[fx.Node], layout: StateLayout, stored: StateFormat) -> None:
    """Raise PassError unless all recurrences have states of matrices, of which the format `stored` saves bytes."""
    if stored == "f32":
        return
    pairs = zip(nodes, layout.layers, strict=True)
    layers = {node: layer for node, layer in pairs if isinstance(layer, RecurrenceState)}
    if not layers:
        raise PassError("cache", graph.output.name, f"states of {stored}: the model has no recurrence")
    for node, layer in layers.items():
        whole, reason = replace(layer, stored="f32").step_bytes, ""
        if layer.value_dim == 1:
            reason = "a state of one value feature a head is small beside the log of a block"
        elif layer.step_bytes >= whole:
            reason = f"a step would read and write {layer.step_bytes:,.0f} bytes, in f32 {whole:,.0f}"
        if reason:
            raise PassError("cache", node.name, f"states of {stored}: {reason}; leave cache.states at f32")


def _replace(
    graph: Graph, node: fx.Node, layer: LayerState, inputs: dict[str, fx.Node], states: fx.Node, offset: int
) -> fx.Node:
    """Replace an operator. Returns the states after it."""
    kind = "conv_step" if ops.name_of(node.target) == "causal_conv" else "recurrence_step"
    given: dict[str, Any] = ops.named(node)
    names = ["positions", "sequence", "state_slots", *(["certain"] if kind == "recurrence_step" else [])]
    step: dict[str, Any] = {name: inputs[name] for name in names}
    if isinstance(layer, RecurrenceState) and layer.stored != "f32":
        step["stored"] = layer.stored
    with graph.fx.inserting_before(node):
        both = graph.create(kind, **given, **step, states=states, offset=offset)
        y, after = (graph.fx.call_function(operator.getitem, (both, index)) for index in (0, 1))
    graph.replace(node, y)
    return after


def example_states(layout: StateLayout) -> list[torch.Tensor]:
    """Meta tensors for STATE_INPUTS of a step of 2 sequences, with 2 slots; none without states."""
    if not layout.layers:
        return []
    slots = torch.empty(2, dtype=torch.int64, device="meta")
    return [slots, slots, torch.empty(2, layout.slot_numbers, device="meta")]
