"""Lower the operators that pass features between a model and its draft head."""

from __future__ import annotations

from torch import fx

from qcompile import ops
from qcompile.codegen.feature_calls import ReadFeatures, WriteFeatures
from qcompile.codegen.lowering_state import Lowering
from qcompile.errors import PassError


def read_features(low: Lowering, node: fx.Node) -> ReadFeatures:
    """The call that takes what a step is given."""
    if ops.operand(node, "features").target != "step_features":
        raise PassError("codegen", node.name, "features must be an input of the step")
    return ReadFeatures(node.name, out=low.buffer(node))


def write_features(low: Lowering, node: fx.Node) -> WriteFeatures:
    """The call that returns a value of a step."""
    return WriteFeatures(node.name, x=low.buffer(ops.operand(node, "x")))
