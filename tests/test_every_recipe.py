"""Every recipe through passes, code generation and runtime, against the reference bodies of its own last graph.

Of the kernels here, tests/codegen compiles each as builds do.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import qcompile
from qcompile import check, pipeline, recipes
from qcompile.passes.base import run_passes
from qcompile.passes.schedule import configure
from tests.codegen.test_recipes import FLIPS, TOLERANCE, small
from tests.support.graphs import sequence_inputs, step_inputs

Build = Callable[..., Path]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """`small` as an artifact of a recipe, its weights in a format of their own if given; built when first asked for."""
    folder = tmp_path_factory.mktemp("recipes")

    def build(recipe: str, weight: str = "") -> Path:
        if not (out := folder / f"{recipe} {weight}").exists():
            options = {"assign_precision.weight": weight} if weight else {}
            pipeline.build(small(), out, recipe=recipe, options=options)
        return out

    return build


@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_artifact_computes_what_its_graph_says(recipe: str, built: Build) -> None:
    graph = small()
    passes = configure(recipes.get_recipe(recipe).settings(), {})
    step = run_passes(graph, passes[1:])[0][-1]
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
        with qcompile.load(built("w4a8", weight), threads=1) as llm:
            logits[weight] = llm.logits(ids)
    assert torch.equal(logits["nested_4"], logits["w4_asym_g128"])
    rounded = small().run(ids, positions)
    errors = {weight: check.max_relative_error(value, rounded) for weight, value in logits.items()}
    assert errors["nested_8_4"] < 2 * errors["w8_sym_channel"] < errors["nested_4"]


def test_builds_are_byte_identical(tmp_path: Path) -> None:
    for name in ("a", "b"):
        pipeline.build(small(), tmp_path / name, recipe="w4a8")
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file())
    assert len(files) >= 6
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", [name for name in recipes.RECIPES if name not in ("mixllm", "auto")])
def test_kernels_rebuilt_from_the_graph_are_the_same(recipe: str, built: Build) -> None:
    artifact = built(recipe)
    for name, library in qcompile.rebuild(artifact).libraries.items():
        assert library == (artifact / name).read_bytes(), name


@pytest.mark.parametrize("recipe", ["f32", "bf16", "w4a16", "w2t16", "w4a8", "qserve", "mxfp4", "nvfp4"])
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
