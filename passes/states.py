"""Turn operators with a recurrent state over whole sequences into operators of a step over slots of states."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from qcompile import ops
from qcompile.formats.states import StateLayout
from qcompile.graph import Graph
from qcompile.ops.recurrent_step import layer_state

OPERATORS = ("causal_conv", "linear_recurrence")
"""Operators over whole sequences that have a state."""

STATE_INPUTS = ("state_slots", "certain", "states")
"""Inputs of a step of a graph with states: state_slots [S], certain [S] and states [slots, numbers]."""


def replace_states(graph: Graph, inputs: dict[str, fx.Node]) -> tuple[list[fx.Node], StateLayout]:
    """Replace the operators, which continue one another's states. Returns the new states (none without operators)."""
    nodes = graph.calls(*OPERATORS)
    layout = StateLayout(tuple(layer_state(node) for node in nodes))
    states = [inputs["states"]] if nodes else []
    for node, offset in zip(nodes, layout.offsets, strict=True):
        states = [_replace(graph, node, inputs, states[0], offset)]
    return states, layout


def _replace(graph: Graph, node: fx.Node, inputs: dict[str, fx.Node], states: fx.Node, offset: int) -> fx.Node:
    """Replace an operator. Returns the states after it."""
    kind = "conv_step" if ops.name_of(node.target) == "causal_conv" else "recurrence_step"
    given: dict[str, Any] = ops.named(node)
    names = ["positions", "sequence", "state_slots", *(["certain"] if kind == "recurrence_step" else [])]
    step = {name: inputs[name] for name in names}
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
