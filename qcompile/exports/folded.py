"""Weights of norms that passes have folded into linears: a checkpoint stores numbers in their place that do nothing."""

from __future__ import annotations

from typing import Any

from torch import fx

from qcompile import ops
from qcompile.graph import Graph


def neutral_numbers(model: Graph) -> dict[str, float]:
    """For each weight and bias of a norm in the raised graph `model`, the number by which the norm scales or adds none.

    A norm may scale by its weight plus a constant.
    """
    numbers: dict[str, float] = {}
    for node in model.calls("rms_norm", "layer_norm"):
        given = ops.named(node)
        for operand, nothing in (("weight", 1.0), ("bias", 0.0)):
            weight: Any = given.get(operand)
            number = nothing
            while isinstance(weight, fx.Node) and ops.name_of(weight.target) == "shift":
                number -= float(ops.operand(weight, "offset"))
                weight = ops.operand(weight, "x")
            if isinstance(weight, fx.Node) and weight.op == "get_attr":
                numbers[str(weight.target)] = number
    return numbers
