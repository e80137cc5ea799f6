"""Every recipe through passes, code generation and runtime, against the reference bodies of its own last graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import qcompile
from qcompile import check, pipeline, recipes, targets
from qcompile.graph import Graph
from tests.graphs import decoder, sequence_inputs, step_inputs

# Kernels and references sum float32 in different orders; where values are rounded to int8, bf16 or the cache's
# codes afterwards, a few land on the other side of a tie, and one step of a 4-bit range shows in the logits: a
# seventh of the largest value where activations have 4 bits. Most logits see no such flip.
TOLERANCE = {"f32": 2e-6, "bf16": 5e-3, "w8a8": 1e-2, "w4a4": 0.2, "w4a4-g128": 0.2}
FLIPS = 3e-2
HOST = [
    name
    for name, target in targets.TARGETS.items()
    if target.kind == "cpu" and not targets.missing_flags(target.requires)
]


Build = Callable[..., Path]


def small() -> Graph:
    """A decoder of odd widths with biases: one for all of these tests, so that they share compiled libraries."""
    return decoder(bias=True, hidden=72, ffn=200)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """`small` as an artifact of a recipe, for a target and with settings; built when first asked for."""
    folder = tmp_path_factory.mktemp("recipes")

    def build(recipe: str, target: str = "cpu", **options: str) -> Path:
        out = folder / " ".join((recipe, target, *options.values()))
        if not out.exists():
            given = {name.replace("__", "."): value for name, value in options.items()}
            pipeline.build(small(), out, target=target, recipe=recipe, options=given)
        return out

    return build


@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_artifact_computes_what_its_graph_says(recipe: str, built: Build) -> None:
    graph = small()
    passes = pipeline.configure(recipes.get_recipe(recipe).settings(), {})
    step = pipeline.run_passes(graph, passes[1:])[0][-1]
    ids, positions = sequence_inputs(70)
    reference = step.run(*step_inputs(ids, None, step))[0].view(2, 70, -1)
    with qcompile.load(built(recipe), threads=2) as llm:
        logits = llm.logits(ids)
    assert logits.dtype == torch.float32 and logits.shape == (2, 70, 50)
    assert check.max_relative_error(logits, reference) < TOLERANCE.get(recipe, FLIPS)
    assert (logits - reference).abs().median() < 5e-3
    if recipe != "f32":
        assert check.max_relative_error(logits, graph.run(ids, positions)) > 1e-4  # it did round


def test_nested_weights_run_at_8_bits_and_at_4(built: Build) -> None:
    ids, positions = sequence_inputs(20)
    logits = {}
    for weight in ("w4_asym_g128", "nested_4", "nested_8_4", "w8_sym_channel"):
        with qcompile.load(built("w4a8", assign_precision__weight=weight), threads=1) as llm:
            logits[weight] = llm.logits(ids)
    assert torch.equal(logits["nested_4"], logits["w4_asym_g128"])
    rounded = small().run(ids, positions)
    errors = {weight: check.max_relative_error(value, rounded) for weight, value in logits.items()}
    assert errors["nested_8_4"] < 2 * errors["w8_sym_channel"] < errors["nested_4"]


def test_mixed_weights_compute_what_their_graph_says(tmp_path: Path) -> None:
    graph, (ids, _) = small(), sequence_inputs(70)
    options = {"assign_precision.weight": "mix_4_8", "assign_precision.activation": "int8_g128"}
    pipeline.build(graph, tmp_path / "out", recipe="w4a8", options=options)
    passes = pipeline.configure(recipes.get_recipe("w4a8").settings(), options)
    step = pipeline.run_passes(graph, passes[1:])[0][-1]
    assert len(step.calls("quantize_mixed")) == 8  # qkv, o, gate and up, down in each of two layers
    reference = step.run(*step_inputs(ids, None, step))[0].view(2, 70, -1)
    with qcompile.load(tmp_path / "out", threads=2) as llm:
        logits = llm.logits(ids)
        assert torch.equal(llm.logits(ids, chunk=3), logits)
    assert check.max_relative_error(logits, reference) < FLIPS
    assert (logits - reference).abs().median() < 1e-4


@pytest.mark.parametrize(
    "shape",
    [
        {"head_norm": "heads"},
        {"head_norm": "whole", "bias": "q"},
        {"act": "gelu_tanh"},
        {"rotary": False, "act": "relu"},
    ],
    ids=str,
)
def test_other_shapes_of_decoder_run(shape: dict[str, object], tmp_path: Path) -> None:
    graph, (ids, positions) = decoder(**shape), sequence_inputs(70)  # type: ignore[arg-type]
    pipeline.build(graph, tmp_path / "out", recipe="f32")
    with qcompile.load(tmp_path / "out") as llm:
        assert check.max_relative_error(llm.logits(ids), graph.run(ids, positions)) < 2 * TOLERANCE["f32"]


@pytest.mark.parametrize(("recipe", "cache"), [("f32", "kv32"), ("w4a8", "kv8"), ("mxfp4", "kv16")])
@pytest.mark.parametrize("target", [name for name in HOST if name != "cpu-avx512vnni"])
def test_instruction_sets_agree(recipe: str, cache: str, target: str, built: Build) -> None:
    """Over several pages of each kind of cache."""
    ids, _ = sequence_inputs(150)
    results = []
    for name in (target, "cpu"):
        with qcompile.load(built(recipe, name, cache__format=cache), threads=1) as llm:
            results.append(llm.logits(ids))
    # Fused against separate multiply and add; a flipped rounding where activations are int8.
    assert (results[0] - results[1]).abs().max() < (1e-4 if recipe == "f32" else 2e-2)


def test_builds_are_byte_identical(tmp_path: Path) -> None:
    for name in ("a", "b"):
        pipeline.build(small(), tmp_path / name, recipe="w4a8")
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file())
    assert len(files) >= 6
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file


@pytest.mark.parametrize("recipe", ["f32", "bf16", "w4a16", "w4a8", "qserve", "mxfp4"])
def test_a_row_does_not_depend_on_its_step(recipe: str, built: Build) -> None:
    """Bitwise: chunk sizes, batch neighbours and thread counts change nothing."""
    ids, _ = sequence_inputs(81, batch=3)
    with qcompile.load(built(recipe), threads=1) as llm:
        whole = llm.logits(ids)
        for chunk in (1, 2, 3, 5, 8, 17):
            assert torch.equal(llm.logits(ids, chunk=chunk), whole), chunk
        for row in range(3):
            assert torch.equal(llm.logits(ids[row : row + 1])[0], whole[row])
    for threads in (2, 3):
        with qcompile.load(built(recipe), threads=threads) as llm:
            assert torch.equal(llm.logits(ids), whole)
