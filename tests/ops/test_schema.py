"""Operands of nodes by name, and the stages in which operators may appear."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from qcompile import ops
from tests.support.graphs import decoder


@pytest.fixture
def linear() -> fx.Node:
    return decoder().calls("linear")[0]


def test_operands_have_the_names_of_the_schema(linear: fx.Node) -> None:
    given = ops.operands(linear)
    assert given.x is linear.args[0] and given.weight is linear.args[1]
    assert list(ops.named(linear)) == ["x", "weight", "bias"]


def test_an_operand_that_is_left_out_has_its_default(linear: fx.Node) -> None:
    linear.args = linear.args[:2]
    assert ops.operand(linear, "bias") is None and ops.has_operand(linear, "bias")
    assert not ops.has_operand(linear, "window")
    with pytest.raises(AttributeError, match=r"linear.*has no operand window"):
        ops.operand(linear, "window")


def test_setting_an_operand_gives_those_before_it() -> None:
    node = decoder().calls("attention")[0]
    node.args = node.args[:4]
    ops.set_operands(node, sinks=None, window=7)
    assert node.args[4:] == (7, 0.0, None)
    assert ops.operand(node, "center") is None


def test_calls_may_name_their_operands() -> None:
    graph = decoder()
    x = graph.calls("linear")[0].args[0]
    with graph.fx.inserting_before(graph.output):
        assert graph.call("slice_features", x, stop=5, start=1).args == (x, 1, 5)
    for given in ((x, 1, 5, 2), (x,)):
        with pytest.raises((TypeError, RuntimeError)):
            graph.call("slice_features", *given)
    with pytest.raises(TypeError, match="needs operand start"):
        ops.arguments("slice_features", (x,), {"stop": 5})
    with pytest.raises(TypeError, match="no further operand start"):
        ops.arguments("slice_features", (x, 1, 5), {"start": 1})


def test_operators_belong_to_stages() -> None:
    at = {stage: ops.allowed(stage) for stage in ops.STAGES}
    assert {"linear", "attention", "rotate"} <= at["raise"] and "gemm" not in at["raise"]
    assert {"gemm", "attention", "quantize_weight"} <= at["quantize"] and "kv_attention" not in at["quantize"]
    assert {"gemm", "kv_attention"} <= at["cache"] and "attention" not in at["cache"]
    assert set(ops.DEFINED) == at["raise"] | at["quantize"] | at["cache"]


def test_an_operator_is_an_attribute_of_the_package() -> None:
    assert ops.scale is ops.op("scale") and torch.equal(ops.scale(torch.ones(2), 3.0), torch.full((2,), 3.0))
    with pytest.raises(AttributeError):
        _ = ops.none_such
