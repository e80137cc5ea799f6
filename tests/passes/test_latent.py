"""Latent attention: it fires where keys and values are proved linear in one latent, and keeps the function there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import qcompile
from qcompile import SamplingParams, check, ops, pipeline
from qcompile.calibration import Calibration
from qcompile.passes.base import apply, run_passes
from qcompile.passes.center_keys import CenterKeys
from qcompile.passes.dataflow import value_features
from qcompile.passes.latent import Latent
from qcompile.passes.rotate_keys import RotateKeys
from qcompile.passes.schedule import Schedule, configure
from qcompile.passes.smooth_attention import SmoothAttention
from qcompile.recipe_files.resolved import resolve
from qcompile.recipes import get_recipe
from tests.support.cases import first
from tests.support.graphs import decoder, latent, logits_whatever_the_step, sequence_inputs, step_inputs

HEADS = 8
EXACT = 1e-13
"""float64: the products are the same, in another order."""


@pytest.mark.parametrize(
    "shape", [{}, {"plain": 24, "turned": 8}, {"narrow": 40}, {"rank": 33}, {"heads": 5}, {"heads": 16, "turned": 2}]
)
def test_keys_and_values_of_a_latent_become_one_key_head(shape: dict[str, int]) -> None:
    shape = {"heads": HEADS} | shape
    before = latent(**shape)  # type: ignore[arg-type]
    result = apply(Latent(), before)
    assert result.fired == 1 and not result.notes
    (node,) = result.graph.calls("attention")
    turned, rank = shape.get("turned", 16), shape.get("rank", 24)
    assert value_features(node) == (turned, turned + rank)
    assert tuple(ops.operand(node, "k").meta["val"].shape[-2:]) == (1, turned + rank)
    assert check.equivalent(result.graph, before, sequence_inputs()) < EXACT


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        ("biased k", "its keys are not a product of the latent"),
        ("biased v", "with a bias"),
        ("normed k", "its keys are not a product of the latent"),
        ("own turn", "every head has rotated keys of its own"),
        ("other v", "its keys are not a product of the latent"),
        ("late turn", "its queries are not slices of one value"),
        ("slow turn", "its queries are not rotated like its keys"),
    ],
)
def test_what_is_not_linear_in_one_latent_stays(odd: str, reason: str) -> None:
    before = latent(heads=HEADS, odd=odd)
    result = apply(Latent(), before)
    assert result.fired == 0 and len(result.notes) == 1 and reason in result.notes[0]
    assert result.graph.calls("attention")[0].name in result.notes[0]
    assert check.equivalent(result.graph, before, sequence_inputs()) == 0


def test_layers_with_other_latents_stay() -> None:
    """A cache has one layout."""
    before = latent(heads=HEADS)
    (first,) = before.calls("attention")
    with before.fx.inserting_after(first):
        own = before.call("attention", first, first, first, 1.0, 0, 0.0)
    before.fx.inserting_after(own)
    for user in [user for user in first.users if user is not own]:
        user.replace_input_with(first, own)
    result = apply(Latent(), before)
    assert result.fired == 0 and "other layers have no latent" in result.notes[0]
    assert check.equivalent(result.graph, before, sequence_inputs()) == 0


@pytest.mark.parametrize("graph", [decoder(), decoder(kv_heads=4, rotary=False), latent(heads=3)])
def test_other_attentions_and_small_gains_stay_without_a_note(graph: Any) -> None:
    result = apply(Latent(), graph)
    assert result.fired == 0 and not result.notes
    assert check.equivalent(result.graph, graph, sequence_inputs()) == 0


@pytest.mark.parametrize(
    ("shape", "fits"),
    [({"rank": 32, "narrow": 32, "plain": 32}, True), ({"rank": 48}, False), ({"plain": 40}, False), ({}, False)],
)
def test_shapes_without_gpu_kernels_stay(shape: dict[str, int], fits: bool) -> None:
    result = apply(Latent(kind="cuda"), latent(heads=16, **shape))  # type: ignore[arg-type]
    assert result.fired == fits and len(result.notes) == (not fits)
    assert fits or "no cuda kernels for 16 shared features" in result.notes[0]


def test_targets_set_the_kind_of_kernels() -> None:
    def latents(recipe: str, target: str) -> Latent:
        (result,) = (p for p in Schedule(resolve(recipe), target).model_passes() if isinstance(p, Latent))
        return result

    assert [latents("w4a8", target).kind for target in ("cpu-avx2", "h200")] == ["cpu", "cuda"]
    assert latents("quantspec", "cpu-avx2").enabled and not latents("quantspec", "h200").enabled


def test_a_fault_in_the_proof_shows() -> None:
    """The test of equality would notice keys that lack their shared features."""
    before = latent(heads=HEADS)
    graph = apply(Latent(), before).graph
    index = next(n for n in graph.calls("gather_features") if n.meta["val"].shape[-1] == 40)
    shifted = graph.weights[str(ops.operand(index, "index").target)].roll(1)
    graph.weights.add_tensor(str(ops.operand(index, "index").target), shifted)
    assert check.equivalent(graph, before, sequence_inputs()) > 1e-3


@pytest.mark.parametrize("rewrite", [RotateKeys(), CenterKeys(), SmoothAttention()])
def test_passes_over_keys_leave_those_that_are_values(rewrite: Any) -> None:
    graph = apply(Latent(), latent(heads=HEADS)).graph
    graph.calibration = Calibration(torch.randint(0, 50, (3, 20), generator=torch.Generator().manual_seed(2)))
    result = apply(rewrite, graph)
    assert result.fired == 0 and len(result.notes) == 1
    assert value_features(result.graph.calls("attention")[0]) is not None
    assert check.equivalent(result.graph, graph, sequence_inputs()) == 0


@pytest.mark.parametrize("format", ["kv32", "kv16", "kv8", "kv4", "kv_hier"])
def test_a_step_reads_values_from_the_cached_keys(format: str) -> None:
    passes = configure(get_recipe("f32").settings(), {"cache.format": format, "calibrate.enabled": "false"})
    graphs, _ = run_passes(latent(heads=HEADS), passes[1:])
    step = graphs[-1]
    (append,), (read,) = step.calls("rope_append"), step.calls("kv_attention")
    alone = format != "kv_hier"
    assert len(ops.operand(append, "offsets")) == (2 if alone else 3)
    assert ops.operand(read, "value") == ([16, 40] if alone else None)
    ids, positions = sequence_inputs()
    expected = next(graph for graph in graphs if graph.stage == "quantize").run(ids, positions, dtype=torch.float32)
    tolerance = {"kv32": 1e-5, "kv_hier": 0.02, "kv16": 0.02, "kv8": 0.02, "kv4": 0.3}[format]
    result = step.run(*step_inputs(ids, None, step), dtype=torch.float32)[0].view_as(expected)
    assert check.max_relative_error(result, expected) < tolerance  # by the bits of the cache


def test_four_bits_have_a_scale_for_each_part_of_a_latent() -> None:
    """A loud rotary key of one group does not coarsen the others."""
    from qcompile.formats.kv import LATENT_GROUP, kv_format

    x = torch.randn(5, 1, 3 * LATENT_GROUP - 7, generator=torch.Generator().manual_seed(0))
    x[..., :LATENT_GROUP] *= 100
    error = kv_format("kv4").round_trip_latent(x) - x
    assert error[..., LATENT_GROUP:].abs().max() < 0.5 < error[..., :LATENT_GROUP].abs().max()


ODD: dict[str, Any] = {"heads": 5, "turned": 8, "plain": 24, "rank": 33}
SCORED: dict[str, Any] = {"window": 30, "softcap": 2.0, "more_scores": True}


@pytest.mark.parametrize(
    ("recipe", "format", "shape"),
    [
        pytest.param("f32", "kv32", {}, marks=pytest.mark.exhaustive),
        pytest.param("w4a8", "kv16", {}, marks=pytest.mark.exhaustive),
        ("w4a8", "kv8", ODD),
        pytest.param("w4a8", "kv4", {}, marks=pytest.mark.exhaustive),
        pytest.param("f32", "kv32", ODD | SCORED, marks=pytest.mark.exhaustive),
        ("f32", "kv32", {"heads": 36} | SCORED),
    ],
)
def test_kernels_agree_with_references_whatever_the_step(
    recipe: str, format: str, shape: dict[str, Any], tmp_path: Path
) -> None:
    graph, options = latent(**({"heads": HEADS, "rank": 80, "vocab": 64} | shape)), {"cache.format": format}
    pipeline.build(graph, tmp_path / "out", recipe=recipe, options=options)
    ids, _ = sequence_inputs(70, vocab=64)
    logits = logits_whatever_the_step(tmp_path / "out", ids)
    passes = configure(get_recipe(recipe).settings(), options)
    step = run_passes(graph, passes[1:])[0][-1]
    expected = step.run(*step_inputs(ids, None, step), dtype=torch.float32)[0].view_as(logits)
    tolerance = 1e-5 if recipe == "f32" else 0.05  # codes that round the other way move sums by their steps
    assert check.max_relative_error(logits, expected) < tolerance


def test_the_cache_shrinks(tmp_path: Path) -> None:
    pages = {}
    for enabled in ("true", "false"):
        built = pipeline.build(
            latent(heads=HEADS), tmp_path / enabled, recipe="f32", options={"latent.enabled": enabled}
        )
        assert built is not None
        manifest = json.loads((tmp_path / enabled / "qcompile.json").read_text())
        pages[enabled] = manifest["runtime"]["kv"]["page_bytes"]
    assert pages == {"true": 64 * 48 * 4, "false": 2 * HEADS * 64 * 32 * 4}  # 40 features padded to 48, and 2 x 8 x 32


def test_steps_of_any_batch_give_the_same_bits(tmp_path: Path) -> None:
    pipeline.build(latent(heads=HEADS, rank=80, vocab=64), tmp_path / "out", recipe="w4a8")
    with qcompile.load(tmp_path / "out", threads=2) as llm:
        ids, _ = sequence_inputs(30, batch=3, vocab=64)
        together = llm.logits(ids)
        for row in range(3):
            assert torch.equal(llm.logits(ids[row : row + 1]), together[row : row + 1])


@pytest.mark.parametrize(
    ("recipe", "format"),
    first((("quantspec", "kv_hier"),), [("nested", "kv16"), ("qspec", "kv4"), ("quantspec", "kv_hier")]),
)
def test_speculation_is_exact(recipe: str, format: str, tmp_path: Path) -> None:
    """With drafts, of which some are rejected, texts are those without."""
    graph = latent(heads=HEADS, rank=80, vocab=64)
    pipeline.build(graph, tmp_path / "out", recipe=recipe, options={"cache.format": format})
    texts = [torch.randint(0, 64, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (1, 9, 40, 70)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    result: list[Any] = []
    for gamma in (0, 3):
        with qcompile.load(tmp_path / "out", threads=2, gamma=gamma) as llm:
            outputs = llm.generate(texts, params)
            result.append([output.outputs[0].token_ids for output in outputs])
    assert result[0] == result[1]
    rounds = [output.speculation for output in outputs]
    drafted, accepted = (sum(sum(getattr(each, name)) for each in rounds) for name in ("drafted", "accepted"))
    assert 0 < accepted < drafted
