"""Centering keys keeps the function, rounds keys better, and kernels match the references."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qcompile import check, pipeline, recipes
from qcompile.calibration import Calibration
from qcompile.graph import Graph
from qcompile.passes.assign_precision import AssignPrecision
from qcompile.passes.base import Pass, apply, run_passes
from qcompile.passes.cache import Cache
from qcompile.passes.center_keys import CenterKeys
from qcompile.passes.fuse import Fuse
from qcompile.passes.merge import Merge
from qcompile.passes.quantize import Quantize
from qcompile.passes.rotate_keys import RotateKeys
from qcompile.passes.schedule import configure
from qcompile.passes.smooth_attention import SmoothAttention
from tests.support.cases import first
from tests.support.graphs import decoder, logits_whatever_the_step, loss_of_keys, sequence_inputs, step_inputs

TEXT = torch.randint(0, 50, (3, 20), generator=torch.Generator().manual_seed(2))
SMOOTH, TURN = SmoothAttention(alpha=0.5), RotateKeys()


def calibrated(graph: Graph) -> Graph:
    graph.calibration = Calibration(TEXT)
    return graph


def through(graph: Graph, *passes: Pass) -> Graph:
    for rewrite in passes:
        graph = apply(rewrite, graph).graph
    return graph


def far_from_zero(cap: float = 0.0, sinks: bool = False, head_dim: int = 16, **shape: int) -> Graph:
    """A decoder with large biases of some key channels, and optionally capped scores or sinks."""
    graph = decoder(bias=True, head_dim=head_dim, **shape)  # type: ignore[arg-type]
    for node in graph.calls("attention"):
        weights = torch.randn(node.args[0].meta["val"].shape[-2], generator=torch.Generator().manual_seed(0))  # type: ignore[union-attr]
        graph.weights.add_tensor("sinks", weights)
        node.args = (*node.args[:4], 0, cap, graph.weight("sinks") if sinks else None)
    for layer in range(2):
        bias = graph.weights[f"k{layer}.bias"].clone().unflatten(0, (-1, head_dim))
        bias[:, [7, 15]] += torch.tensor([12.0, -8.0])  # a pair with a low rotary frequency
        graph.weights.add_tensor(f"k{layer}.bias", bias.flatten())
    return calibrated(graph)


@pytest.mark.parametrize("others", [(), (SMOOTH,), (TURN,), (SMOOTH, TURN)])
@pytest.mark.parametrize("shape", [{}, {"bias": True, "window": 3}, {"rotary": False}, {"head_norm": "heads"}])
def test_the_function_stays(shape: dict[str, bool | int | str], others: tuple[Pass, ...]) -> None:
    before = calibrated(decoder(**shape))  # type: ignore[arg-type]
    result = apply(CenterKeys(), before)
    assert result.fired == 2 and not result.notes
    after = through(result.graph, *others)
    keys = [node.args[1] for node in after.calls("attention")]
    assert [key.args[1] is not None and key.args[0].target for key in keys] == [keys[0].args[0].target] * 2
    assert len(after.calls("rotate_heads")) == 2 * (1 + (TURN in others))  # one operator subtracts and rotates
    assert check.equivalent(after, before, sequence_inputs()) < 1e-13  # float64: exact for any mean


@pytest.mark.parametrize("others", [(), (SMOOTH,), (TURN,)])
@pytest.mark.parametrize(("cap", "sinks"), [(5.0, False), (0.0, True), (5.0, True), (0.0, False)])
def test_attention_whose_scores_are_seen_is_told_what_came_off(
    cap: float, sinks: bool, others: tuple[Pass, ...]
) -> None:
    before = far_from_zero(cap, sinks)
    result = apply(CenterKeys(), before)
    assert result.fired == 2 and not result.notes
    after = through(result.graph, *others)
    assert check.equivalent(after, before, sequence_inputs()) < (1e-6 if others == (TURN,) else 1e-13)
    attentions = after.calls("attention")
    assert {len(node.args) for node in attentions} == {9 if cap or sinks else 7}
    for node in attentions:
        node.args = node.args[:8]
    assert (check.equivalent(after, before, sequence_inputs()) > 1e-3) == bool(cap or sinks)


def test_keys_turned_by_something_else_keep_their_mean() -> None:
    graph = calibrated(decoder(layers=1))
    rope = next(node for node in graph.calls("rope") if node.args[0] is not graph.calls("rope")[0].args[0])
    with graph.fx.inserting_before(rope):
        rope.update_arg(1, graph.call("shift", rope.args[1], 1.0))
    result = apply(CenterKeys(), graph)
    assert result.fired == 0 and not result.graph.calls("rotate_heads")
    assert "rotated by something other than their positions" in result.notes[0]


def test_without_text_keys_stay() -> None:
    result = apply(CenterKeys(), decoder())
    assert result.fired == 0 and "without calibration text" in result.notes[0]


def test_keys_far_from_zero_round_with_less_error_and_are_smoothed_by_what_varies() -> None:
    graph = far_from_zero()

    smoothed, centered = through(graph, SMOOTH), through(graph, CenterKeys())
    assert loss_of_keys(centered, TEXT) < 0.3 * loss_of_keys(graph, TEXT)
    assert loss_of_keys(through(centered, SMOOTH), TEXT) < 0.3 * loss_of_keys(smoothed, TEXT)
    sizes = through(centered, SMOOTH).weights["smooth_attention.attention.keys"].unflatten(0, (2, 16))
    assert sizes.max() < 3 < smoothed.weights["smooth_attention.attention.keys"].max()


@pytest.mark.parametrize("interleaved", [False, True])
def test_keys_are_centered_at_all_positions_and_not_at_those_of_the_text_alone(interleaved: bool) -> None:
    """A pair far from zero that turns by half a circle between the text's positions and later ones."""
    graph = decoder(bias="k", layers=1)
    bias = graph.weights["k0.bias"].clone().unflatten(0, (-1, 16))
    bias[:, 2 if interleaved else 1] += 20.0
    graph.weights.add_tensor("k0.bias", bias.flatten())
    graph.weights.add_tensor("inv_freq", torch.tensor([1.0, torch.pi / 500, *[1e-5] * 6]))
    for node in graph.calls("rope"):
        node.update_arg(4, interleaved)
    after = through(calibrated(graph), CenterKeys())

    def largest(graph: Graph) -> float:
        probe = graph.clone()
        probe.output.args = (probe.calls("attention")[0].args[1],)
        return float(probe.run(TEXT, torch.arange(492, 512).expand(3, 20)).abs().max())

    assert largest(after) < 1.1 * largest(graph)


def test_a_scale_does_not_pass_turned_keys() -> None:
    result = apply(SMOOTH, through(calibrated(decoder()), CenterKeys(), TURN))
    assert result.fired == 0 and all("mixes channels" in note for note in result.notes)


@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_fuse_takes_the_mean_along(cap: float) -> None:
    before = through(far_from_zero(cap), CenterKeys(), AssignPrecision(), Merge(), Quantize(), Cache("kv8"))
    after = through(before, Fuse())
    assert len(after.calls("rope_append")) == 2 and not after.calls("rotate_heads", "kv_append")
    ids, _ = sequence_inputs(9)
    assert torch.equal(after.run(*step_inputs(ids, None, after))[0], before.run(*step_inputs(ids, None, before))[0])


@pytest.mark.parametrize(
    ("format", "cap"), first((("kv_hier", 0.0), ("kv8", 5.0)), [("kv32", 0.0), ("kv_hier", 0.0), ("kv8", 5.0)])
)
def test_kernel_equals_reference_whatever_the_step(format: str, cap: float, tmp_path: Path) -> None:
    graph = far_from_zero(cap)
    options = {"center_keys.enabled": "true", "smooth_attention.enabled": "true", "cache.format": format}
    pipeline.build(graph, tmp_path / "out", recipe="f32", options=options, calib=TEXT)
    passes = configure(recipes.get_recipe("f32").settings(), options)
    step = run_passes(graph, passes[1:])[0][-1]
    ids, positions = sequence_inputs(41)
    reference = step.run(*step_inputs(ids, None, step))[0].view(2, 41, -1)
    logits = logits_whatever_the_step(tmp_path / "out", ids)
    assert check.max_relative_error(logits, reference) < {"kv_hier": 1e-4, "kv32": 2e-5, "kv8": 2e-5}[format]
    if format == "kv32":
        assert check.max_relative_error(logits, graph.run(ids, positions)) < 1e-5


SEEN = {
    "capped": far_from_zero(5.0),
    "weighed against sinks": far_from_zero(0.0, True),
    "both, in heads that are no whole vectors": far_from_zero(5.0, True, 20, heads=6, kv_heads=3),
}


@pytest.mark.parametrize(
    ("name", "turn"),
    first(
        (("capped", True), ("weighed against sinks", False), ("both, in heads that are no whole vectors", True)),
        [(name, turn) for name in SEEN for turn in (False, True)],
    ),
)
def test_kernels_give_scores_back_what_came_off(name: str, turn: bool, tmp_path: Path) -> None:
    """With capped scores or sinks, kernels compute the same function as the graph before."""
    graph = SEEN[name]
    options = {f"{p.name}.enabled": "true" for p in (CenterKeys(), SMOOTH, *[TURN] * turn)}
    pipeline.build(graph, tmp_path / "out", recipe="f32", options=options, calib=TEXT)
    ids, positions = sequence_inputs(41)
    logits = logits_whatever_the_step(tmp_path / "out", ids)
    assert check.max_relative_error(logits, graph.run(ids, positions)) < 1e-5
