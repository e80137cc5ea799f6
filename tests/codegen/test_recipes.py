"""Mixed weights and other shapes of decoders, in libraries compiled as builds do; what tests of all recipes share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import qcompile
from qcompile import check, pipeline, recipes
from qcompile.graph import Graph
from qcompile.passes.base import run_passes
from qcompile.passes.schedule import configure
from tests.support.cases import first
from tests.support.graphs import decoder, latent, sequence_inputs, step_inputs

# Kernels and references sum float32 in different orders; where values are rounded to int8, bf16 or the cache's
# codes afterwards, a few land on the other side of a tie, and one step of a 4-bit range shows in the logits: a
# seventh of the largest value where activations have 4 bits. Most logits see no such flip.
TOLERANCE = {"f32": 2e-6, "bf16": 5e-3, "w8a8": 1e-2, "w4a4": 0.2, "w4a4-g128": 0.2}
FLIPS = 3e-2


def small() -> Graph:
    """A decoder of odd widths with biases: one for all of these tests, so that they share compiled libraries."""
    return decoder(bias=True, hidden=72, ffn=200)


def test_mixed_weights_compute_what_their_graph_says(tmp_path: Path) -> None:
    graph, (ids, _) = small(), sequence_inputs(70)
    options = {"assign_precision.weight": "mix_4_8", "assign_precision.activation": "int8_g128"}
    pipeline.build(graph, tmp_path / "out", recipe="w4a8", options=options)
    passes = configure(recipes.get_recipe("w4a8").settings(), options)
    step = run_passes(graph, passes[1:])[0][-1]
    assert len(step.calls("quantize_mixed")) == 8  # qkv, o, gate and up, down in each of two layers
    reference = step.run(*step_inputs(ids, None, step))[0].view(2, 70, -1)
    with qcompile.load(tmp_path / "out", threads=2) as llm:
        logits = llm.logits(ids)
        assert torch.equal(llm.logits(ids, chunk=3), logits)
    assert check.max_relative_error(logits, reference) < FLIPS
    assert (logits - reference).abs().median() < 1e-4


@pytest.mark.parametrize("recipe", first(("qserve",), ["f32", "qserve"]))
def test_values_narrower_than_keys_run(recipe: str, tmp_path: Path) -> None:
    """Norms read some columns of a value, keys are gathered, values filled up with zeros."""
    graph, (ids, positions) = latent(narrow=8), sequence_inputs(70)
    pipeline.build(graph, tmp_path / "out", recipe=recipe)
    step = run_passes(graph, configure(recipes.get_recipe(recipe).settings(), {})[1:])[0][-1]
    assert len(step.calls("gather_features")) == 2  # queries, keys and values side by side; what is cut off
    reference = step.run(*step_inputs(ids, None, step))[0].view(2, 70, -1)
    with qcompile.load(tmp_path / "out", threads=2) as llm:
        logits = llm.logits(ids)
        assert torch.equal(llm.logits(ids, chunk=3), logits)
    assert check.max_relative_error(logits, reference) < TOLERANCE.get(recipe, FLIPS)
    assert recipe != "f32" or check.max_relative_error(logits, graph.run(ids, positions)) < 2 * TOLERANCE["f32"]


@pytest.mark.parametrize(
    "shape",
    [
        {"head_norm": "heads"},
        pytest.param({"head_norm": "whole", "bias": "q"}, marks=pytest.mark.exhaustive),
        pytest.param({"act": "gelu_tanh"}, marks=pytest.mark.exhaustive),
        {"rotary": False, "act": "relu"},
    ],
    ids=str,
)
def test_other_shapes_of_decoder_run(shape: dict[str, object], tmp_path: Path) -> None:
    graph, (ids, positions) = decoder(**shape), sequence_inputs(70)  # type: ignore[arg-type]
    pipeline.build(graph, tmp_path / "out", recipe="f32")
    with qcompile.load(tmp_path / "out") as llm:
        assert check.max_relative_error(llm.logits(ids), graph.run(ids, positions)) < 2 * TOLERANCE["f32"]
