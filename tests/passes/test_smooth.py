"""Smoothing of output modules and attention keeps the function, narrows ranges, and refuses what it cannot prove."""

from __future__ import annotations

import pytest
import torch

from qcompile import check
from qcompile.calibration import Calibration
from qcompile.errors import UsageError
from qcompile.graph import Graph
from qcompile.passes.base import Pass, apply
from qcompile.passes.rotate import Rotate
from qcompile.passes.smooth import Smooth
from qcompile.passes.smooth_attention import SmoothAttention
from tests.support.graphs import decoder, sequence_inputs

OUTPUTS = Smooth(inputs=False)
"""The graphs here have norms without weights, which cannot absorb a scale."""


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "passes",
    [(OUTPUTS,), (SmoothAttention(),), (Rotate(), OUTPUTS, SmoothAttention()), (SmoothAttention(), Rotate())],
)
def test_the_function_stays(bias: bool, passes: tuple[Pass, ...]) -> None:
    before = graph = decoder(bias=bias)
    for rewrite in passes:
        result = apply(rewrite, graph)
        assert result.fired > 0 and not result.notes
        graph = result.graph
    assert check.equivalent(graph, before, sequence_inputs()) < 1e-13  # float64


def loud_keys(graph: Graph) -> Graph:
    """Key channel 3 of each head and its rotary partner times 30, with queries divided to match."""
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
    assert all(len(head.unique()) == 8 for head in a)  # and every pair has its own scale
    assert check.equivalent(after, graph, sequence_inputs()) < 1e-13


def test_columns_of_output_modules_even_out() -> None:
    graph = decoder()
    after = apply(OUTPUTS, graph).graph
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
    assert apply(OUTPUTS, graph).fired == 1  # only the gate's product
    assert check.equivalent(result.graph, graph, sequence_inputs()) == 0


def test_queries_behind_an_activation_are_left_and_named() -> None:
    graph = decoder(layers=1)
    attention = graph.calls("attention")[0]
    with graph.fx.inserting_before(attention):
        bent = graph.call("unary", attention.args[0], "tanh")
    attention.update_arg(0, bent)
    result = apply(SmoothAttention(), graph)
    assert result.fired == 0 and "cannot move into unary" in result.notes[0]


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
def test_key_norms_take_the_factor_alike_for_all_heads(kind: str) -> None:
    graph = decoder(layers=1)
    for index, name in enumerate(("qn", "kn")):
        weights = torch.randn(2, 16, generator=torch.Generator().manual_seed(index)) + 0.5  # some are negative
        parts = [f"{name}{part}" for part in ("scale", "shift")[: 1 + (kind == "layer_norm")]]
        for part, values in zip(parts, weights, strict=False):
            graph.weights.add_tensor(part, values)
        rope = graph.calls("rope")[index]
        with graph.fx.inserting_before(rope):
            rope.update_arg(0, graph.call(kind, rope.args[0], *map(graph.weight, parts), 1e-6))
    result = apply(SmoothAttention(), graph)
    assert result.fired == 1 and not result.notes
    assert check.equivalent(result.graph, graph, sequence_inputs()) < 1e-13
    factor = result.graph.evaluate(result.graph.calls("key_scale")[0])
    pairs = graph.weights[parts[0]].abs().unflatten(0, (2, 8)).amax(0)
    torch.testing.assert_close(factor, pairs.repeat(2))


@pytest.mark.parametrize("head_norm", ["", "heads"])
def test_queries_that_are_multiplied_by_position_take_a_scale(head_norm: str) -> None:
    graph = decoder(layers=1, head_norm=head_norm)
    graph.weights.add_tensor("table", 1 + torch.rand(512, 1, generator=torch.Generator().manual_seed(3)))
    rope = graph.calls("rope")[0]
    with graph.fx.inserting_before(rope):
        factor = graph.call("embedding", graph.inputs[1], graph.weight("table"))
        heads = rope.args[0]
        flat = graph.call("merge_heads", heads) if head_norm else heads.args[0]
        rope.update_arg(0, graph.call("split_heads", graph.call("mul", flat, factor), 4))
    graph.erase_dead()
    result = apply(SmoothAttention(), graph)
    assert result.fired == 1 and not result.notes
    assert check.equivalent(result.graph, graph, sequence_inputs()) < 1e-13


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


# ---- inputs of blocks -------------------------------------------------------------------------------


def weighted_norms(kind: str = "rms_norm") -> Graph:
    """A decoder with weights in its norms, channel 5 of them 50 times larger."""
    graph = decoder(bias=True)
    for index, norm in enumerate(graph.calls("rms_norm")):
        generator = torch.Generator().manual_seed(index)
        scale = torch.randn(48, generator=generator)
        scale[5] *= 50
        graph.weights.add_tensor(f"scale{index}", scale)
        graph.weights.add_tensor(f"shift{index}", torch.randn(48, generator=generator))
        with graph.fx.inserting_before(norm):
            parameters = [graph.weight(f"{name}{index}") for name in ("scale", "shift")[: 1 + (kind == "layer_norm")]]
            graph.replace(norm, graph.call(kind, norm.args[0], *parameters, norm.args[-1]))
    return graph


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("measured", [False, True])
def test_outliers_of_block_inputs_move_into_weights(kind: str, measured: bool) -> None:
    before = weighted_norms(kind)
    if measured:
        before.calibration = Calibration(torch.randint(0, 50, (3, 20), generator=torch.Generator().manual_seed(2)))
    result = apply(Smooth(), before)
    assert result.fired == 5 + 4 and not result.notes  # all norms, including the head's, and the output modules
    assert check.equivalent(result.graph, before, sequence_inputs()) < 1e-13  # float64
    loudest = []
    for graph in (before, result.graph):
        probe = graph.clone()
        probe.output.args = (probe.calls(kind)[0],)
        size = probe.run(*sequence_inputs()).abs().flatten(0, -2).amax(0)
        loudest.append((size.max() / size.median()).item())
    assert loudest[0] > 20 and loudest[1] < 1.5 * loudest[0] ** 0.5


def test_strength_says_how_much_moves() -> None:
    before = weighted_norms()
    columns = [
        result.graph.evaluate(result.graph.calls("linear")[0].args[1]).abs().amax(0)
        for result in (apply(Smooth(alpha=alpha), before) for alpha in (0.0, 1.0))
    ]
    assert columns[0].max() / columns[0].min() < 3 < 50 < columns[1].max() / columns[1].median()
    with pytest.raises(UsageError, match="from 0 to 1"):
        Smooth(alpha=1.5)
    for alpha in (-0.1, 7.0):
        with pytest.raises(UsageError, match="must be from 0 to 1"):
            SmoothAttention(alpha=alpha)


def test_norms_that_cannot_take_a_scale_are_left_and_named() -> None:
    graph = weighted_norms()
    norm = graph.calls("rms_norm")[0]
    with graph.fx.inserting_after(norm):
        graph.call("add", norm, norm)
    result = apply(Smooth(), graph)
    assert result.fired == 8 and "not a linear over it" in result.notes[0] and norm.name in result.notes[0]
    bare = apply(Smooth(), decoder())
    assert bare.fired == 4 and all("no weight that could take a scale" in note for note in bare.notes)
