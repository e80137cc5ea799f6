"""Smoothing of output modules and of attention: keeps the function, narrows ranges, refuses what it cannot prove."""

from __future__ import annotations

import pytest
import torch

from qcompile import check
from qcompile.calibration import Calibration
from qcompile.graph import Graph
from qcompile.passes.base import Pass, apply
from qcompile.passes.rotate import Rotate
from qcompile.passes.smooth import Smooth
from qcompile.passes.smooth_attention import SmoothAttention
from tests.graphs import decoder, sequence_inputs


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "passes",
    [(Smooth(),), (SmoothAttention(),), (Rotate(), Smooth(), SmoothAttention()), (SmoothAttention(), Rotate())],
)
def test_the_function_stays(bias: bool, passes: tuple[Pass, ...]) -> None:
    before = graph = decoder(bias=bias)
    for rewrite in passes:
        result = apply(rewrite, graph)
        assert result.fired > 0 and not result.notes
        graph = result.graph
    assert check.equivalent(graph, before, sequence_inputs()) < 1e-13  # float64


def loud_keys(graph: Graph) -> Graph:
    """Key channel 3 of each head 30 times louder, and what rotates with it; queries quieter to match."""
    for name, factor in (("k0", 30.0), ("q0", 1 / 30)):
        loud = graph.weights[name].clone().unflatten(0, (-1, 16))
        loud[:, [3, 11]] *= factor
        graph.weights.add_tensor(name, loud.flatten(0, 1))
    return graph


def test_loud_key_channels_come_down_to_their_root() -> None:
    graph = loud_keys(decoder())
    after = apply(SmoothAttention(), graph).graph
    keys = [g.evaluate(g.calls("linear")[1].args[1]).norm(dim=1) for g in (graph, after)]
    spread = [(k.max() / k.median()).item() for k in keys]
    assert spread[0] > 20 and spread[1] < spread[0] ** 0.5 * 1.3


@pytest.mark.parametrize("interleaved", [False, True])
def test_pairs_that_turn_together_share_a_factor(interleaved: bool) -> None:
    graph = loud_keys(decoder(layers=1))
    for node in graph.calls("rope"):
        node.update_arg(4, interleaved)
    after = apply(SmoothAttention(), graph).graph
    factor = after.evaluate(after.calls("key_scale")[0]).reshape(2, 16)
    a, b = (factor[:, 0::2], factor[:, 1::2]) if interleaved else factor.chunk(2, 1)
    assert torch.equal(a, b)
    assert check.equivalent(after, graph, sequence_inputs()) < 1e-13


def test_columns_of_output_modules_even_out() -> None:
    graph = decoder()
    after = apply(Smooth(), graph).graph
    down = after.evaluate(after.calls("linear")[6].args[1])
    assert torch.allclose(down.abs().amax(0), down.abs().amax(0)[:1], rtol=1e-4)  # float32 powers and means


def test_keys_that_others_read_are_left_and_named() -> None:
    graph = decoder(layers=1)
    attention = graph.calls("attention")[0]
    with graph.fx.inserting_before(attention):
        value = graph.call("add", attention.args[2], attention.args[1])
    attention.update_arg(2, value)
    result = apply(SmoothAttention(), graph)
    assert result.fired == 0 and "others read this value" in result.notes[0]
    assert apply(Smooth(), graph).fired == 1  # the gate's product alone
    assert check.equivalent(result.graph, graph, sequence_inputs()) == 0


def test_queries_behind_an_activation_are_left_and_named() -> None:
    graph = decoder(layers=1)
    attention = graph.calls("attention")[0]
    with graph.fx.inserting_before(attention):
        bent = graph.call("unary", attention.args[0], "tanh")
    attention.update_arg(0, bent)
    result = apply(SmoothAttention(), graph)
    assert result.fired == 0 and "cannot move into unary" in result.notes[0]


def test_key_norms_take_the_factor_alike_for_all_heads() -> None:
    graph = decoder(layers=1)
    for index, name in enumerate(("qn", "kn")):
        graph.weights.add_tensor(name, torch.rand(16, generator=torch.Generator().manual_seed(index)) + 0.5)
        rope = graph.calls("rope")[index]
        with graph.fx.inserting_before(rope):
            rope.update_arg(0, graph.call("rms_norm", rope.args[0], graph.weight(name), 1e-6))
    result = apply(SmoothAttention(), graph)
    assert result.fired == 1 and not result.notes
    assert check.equivalent(result.graph, graph, sequence_inputs()) < 1e-13
    factor = result.graph.evaluate(result.graph.calls("key_scale")[0])
    assert factor.shape == (16,)


def test_attention_is_smoothed_by_measured_keys() -> None:
    before = decoder()
    before.calibration = Calibration(torch.randint(0, 50, (3, 20), generator=torch.Generator().manual_seed(2)))
    result = apply(SmoothAttention(alpha=0.5), before)
    assert result.fired == 2
    assert check.equivalent(result.graph, before, sequence_inputs()) < 1e-12
    node = result.graph.calls("attention")[1]
    probe = before.clone()
    probe.output.args = (probe.calls("attention")[1].args[1],)
    keys = torch.cat([probe.run(row[None], torch.arange(20)[None]) for row in before.calibration.tokens])
    kept = result.graph.weights[f"smooth_attention.{node.name}.keys"]
    torch.testing.assert_close(kept, keys.square().mean((0, 1)).sqrt().flatten())
