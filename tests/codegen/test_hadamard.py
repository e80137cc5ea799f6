"""The online rotation: its kernel against the reference, alone and in whole models, and bit against bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from qcompile import check, hadamard, numerics, pipeline, recipes
from qcompile.codegen import program as p
from tests.codegen.tiny import Chunk, Runner, Tiny
from tests.graphs import decoder, logits_whatever_the_step, sequence_inputs, step_inputs

ONLINE = {"rotate.enabled": "true", "rotate.online": "true"}


def rotating(width: int, block: int, table: torch.Tensor, threads: int) -> Runner:
    """A model whose logits are rows of `table`, rotated: embed, hadamard, identity."""
    core = hadamard.core_order(block)
    stride = p.round_up(width, p.PAD)
    buffers = (
        p.Buffer("x", "f32", width),
        p.Buffer("y", "f32", width, offset=4 * stride),
        p.Buffer("last", "f32", width, rows="outputs"),
    )
    calls: tuple[p.Call, ...] = (
        p.Embed("embed", "x", "table", "f32", len(table)),
        p.Hadamard("turn", "x", "y", block, "core", core),
        p.TakeRows("take", "y", "last"),
        p.Gemm("head", "last", "f32", width, width, {"codes": "identity"}, "logits"),
    )
    identity = numerics.pack_weight(numerics.quantize_weight(torch.eye(width), "f32"), "f32")
    blobs = {
        "table": numerics.as_blob(table),
        "core": numerics.pack_vector(hadamard.core_matrix(core).flatten()),
        "identity": identity["codes"],
    }
    program = p.Program(width, 64, buffers, calls, tuple(blobs), p.KVLayout("kv32", 1, 1, 16))
    tiny = Tiny(vocab=width, hidden=width, max_position=64, kv_heads=1, head_dim=16, layers=1)
    return Runner(tiny, threads=threads, built=(program, blobs))


@pytest.mark.parametrize(("width", "block"), [(16, 16), (512, 512), (48, 16), (40, 40), (24, 12), (280, 280), (72, 36)])
def test_kernel_equals_reference_whatever_the_step(width: int, block: int) -> None:
    table = torch.randn(width, width, generator=torch.Generator().manual_seed(0))
    tokens = [3, 1, 9, 0, 7, 11, 2, 2, 5, 6, 4, 8, 10, 11, 1, 3, 0]
    expected = hadamard.transform(table[tokens].double().unflatten(-1, (-1, block))).flatten(-2)
    one = rotating(width, block, table, 1)
    rows = one.step([Chunk(tokens, 0, [0])])
    np.testing.assert_allclose(rows, expected, atol=2e-6)  # float32, sums of up to `block` terms of size 1
    for count in (1, 3):
        np.testing.assert_array_equal(one.step([Chunk(tokens[:count], 0, [0])]), rows[:count])
    two = rotating(width, block, table, 2)
    np.testing.assert_array_equal(two.step([Chunk(tokens, 0, [0])]), rows)
    one.close()
    two.close()


@pytest.mark.parametrize("late_norms", [False, True])
@pytest.mark.parametrize("recipe", ["f32", "w4a16", "w4a8"])
def test_model_with_online_rotation(recipe: str, late_norms: bool, tmp_path: Path) -> None:
    """Products are turned, and what norms make of a residual stream that norms write, for the head too."""
    graph = decoder(hidden=64, ffn=160, late_norms=late_norms)
    pipeline.build(graph, tmp_path / "out", recipe=recipe, options=ONLINE)
    passes = pipeline.configure(recipes.get_recipe(recipe).settings(), ONLINE)
    step = pipeline.run_passes(graph, passes[1:])[0][-1]
    assert len(step.calls("hadamard" if recipe == "f32" else "hadamard_quantize")) == 2 + 5 * late_norms
    ids, positions = sequence_inputs(41)
    reference = step.run(*step_inputs(ids, None, step))[0].view(2, 41, -1)
    logits = logits_whatever_the_step(tmp_path / "out", ids)
    # A rounding to int8 or bf16 that falls the other way shows in the logits; float32 sums do at 1e-6.
    assert check.max_relative_error(logits, reference) < (4e-6 if recipe == "f32" else 3e-2)
    if recipe == "f32":
        assert check.max_relative_error(logits, graph.run(ids, positions)) < 4e-6
