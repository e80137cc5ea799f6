"""The online rotation: its kernel against the reference, alone and in whole models, and bit against bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from qcompile import check, pipeline, recipes
from qcompile.codegen.calls import Embed, Hadamard
from qcompile.formats import hadamard
from qcompile.formats.blocks import as_blob, pack_vector
from qcompile.passes.base import run_passes
from qcompile.passes.schedule import configure
from tests.support.cases import first
from tests.support.columns import Case, Columns
from tests.support.graphs import decoder, logits_whatever_the_step, sequence_inputs, step_inputs

ONLINE = {"rotate.enabled": "true", "rotate.online": "true"}


SIZES = [(16, 16), (512, 512), (48, 16), (40, 40), (24, 12), (280, 280), (72, 36)]
"""Widths of rows and of the blocks that are turned in them."""


def test_kernel_equals_reference_whatever_the_step() -> None:
    generator = torch.Generator().manual_seed(0)
    tables = {width: torch.randn(12, width, generator=generator) for width, _ in SIZES}
    tokens = [3, 1, 9, 0, 7, 11, 2, 2, 5, 6, 4, 8, 10, 11, 1, 3, 0]
    blobs, cases = {}, {}
    for width, block in SIZES:
        core = hadamard.core_order(block)
        blobs[f"table{width}"] = as_blob(tables[width])
        blobs[f"core{core}"] = pack_vector(hadamard.core_matrix(core).flatten())
        embed = Embed(f"embed{width}", f"x{width}", f"table{width}", "f32", 12)
        turn = Hadamard(f"turn{width}", f"x{width}", f"y{width}", block, f"core{core}", core)
        cases[f"{width} {block}"] = Case([embed, turn], f"y{width}")
    widths = {f"{name}{width}": width for width, _ in SIZES for name in "xy"}
    one, two = (Columns(widths, blobs, cases, threads) for threads in (1, 2))
    rows, fewer = one.rows(tokens), {count: one.rows(tokens[:count]) for count in (1, 3)}
    shared = two.rows(tokens)
    for name, (width, block) in zip(cases, SIZES, strict=True):
        expected = hadamard.transform(tables[width][tokens].double().unflatten(-1, (-1, block))).flatten(-2)
        # float32, sums of up to `block` terms of size 1
        np.testing.assert_allclose(rows[name], expected, atol=2e-6, err_msg=name)
        for count, result in fewer.items():
            np.testing.assert_array_equal(result[name], rows[name][:count], name)
        np.testing.assert_array_equal(shared[name], rows[name], name)
    one.close()
    two.close()


@pytest.mark.parametrize(
    ("recipe", "late_norms"),
    first((("w4a16", True),), [("f32", False), ("f32", True), ("w4a16", True), ("w4a8", True)]),
)
def test_model_with_online_rotation(recipe: str, late_norms: bool, tmp_path: Path) -> None:
    """Products are turned, and what norms make of a residual stream that norms write, for the head too."""
    graph = decoder(hidden=64, ffn=160, late_norms=late_norms)
    pipeline.build(graph, tmp_path / "out", recipe=recipe, options=ONLINE)
    passes = configure(recipes.get_recipe(recipe).settings(), ONLINE)
    step = run_passes(graph, passes[1:])[0][-1]
    assert len(step.calls("hadamard" if recipe == "f32" else "hadamard_quantize")) == 2 + 5 * late_norms
    ids, positions = sequence_inputs(41)
    reference = step.run(*step_inputs(ids, None, step))[0].view(2, 41, -1)
    logits = logits_whatever_the_step(tmp_path / "out", ids)
    # A rounding to int8 or bf16 that falls the other way shows in the logits; float32 sums do at 1e-6.
    assert check.max_relative_error(logits, reference) < (4e-6 if recipe == "f32" else 3e-2)
    if recipe == "f32":
        assert check.max_relative_error(logits, graph.run(ids, positions)) < 4e-6
