"""Function-preserving passes are exact in float64 on families of transformers, one by one and all together."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from qcompile import check, ops
from qcompile.checkpoints import frontend
from qcompile.graph import Graph
from qcompile.passes import dataflow
from qcompile.passes.base import Pass, apply
from qcompile.passes.fold_norms import FoldNorms
from qcompile.passes.raising import Raise
from qcompile.passes.reorder import Reorder
from qcompile.passes.rotate import Rotate
from qcompile.passes.smooth import Smooth
from qcompile.passes.smooth_attention import SmoothAttention
from tests.support.cases import first
from tests.support.families import COMMON, EXPERTS, SMALL, save

EXACT = 1e-9
"""Tolerance for float64 rounding of weights that are multiplied, rotated and centered."""

ROTATED: dict[str, dict[str, Any]] = {
    "llama": COMMON | {"attention_bias": True, "tie_word_embeddings": True},
    "mistral": COMMON | {"sliding_window": 8},
    "qwen2": COMMON,
    "qwen3": COMMON | {"head_dim": 16},
    "granite": COMMON | {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2},
    "phi3": COMMON,
    "smollm3": COMMON | {"no_rope_layers": [1, 0]},
    "starcoder2": COMMON | {"sliding_window": 8},
    "opt": COMMON | {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "gpt_neox": COMMON | {"rotary_pct": 0.25},
    "gpt2": SMALL,
    "phi": COMMON | {"partial_rotary_factor": 0.5},
    "nemotron": COMMON,
    "mixtral": COMMON | EXPERTS,
    "qwen2_moe": COMMON | EXPERTS | {"shared_expert_intermediate_size": 48, "decoder_sparse_step": 1},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gemma2": (COMMON | {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}, "written by rms_norm"),
    "olmo2": (COMMON, "written by rms_norm"),
}
FAMILIES = ROTATED | {kind: settings for kind, (settings, _) in REFUSED.items()}

SMOOTHING: tuple[Pass, ...] = (Smooth(enabled=True), SmoothAttention(enabled=True))
ALONE: tuple[Pass, ...] = (FoldNorms(), Rotate(online=True), *SMOOTHING, Reorder())
TOGETHER: tuple[tuple[Pass, ...], ...] = (
    (FoldNorms(), Rotate()),
    (FoldNorms(), Rotate(), *SMOOTHING, Reorder()),
    (FoldNorms(), Rotate(online=True), *SMOOTHING, Reorder()),
)


@cache
def raised(kind: str) -> Graph:
    """The family's random model, raised. Its weights are read now, since its files are temporary."""
    with TemporaryDirectory() as folder:
        save(kind, FAMILIES[kind], Path(folder))
        graph = apply(Raise(), frontend.load(folder)).graph
        for name in list(graph.weights.entries):
            graph.weights.add_tensor(name, graph.weights[name].clone())
    return graph


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 97, (2, 31), generator=torch.Generator().manual_seed(0))
    return ids, torch.arange(31).expand(2, 31)


@pytest.mark.parametrize("kind", first(("llama", "phi", "gpt2", "mixtral", "gemma2"), FAMILIES))
def test_logits_stay(kind: str) -> None:
    before = raised(kind)
    for passes in (*((one,) for one in ALONE), *TOGETHER):
        after = before
        for rewrite in passes:
            result = apply(rewrite, after)
            assert result.fired or result.notes, f"{rewrite.name} did nothing and says nothing"
            after = result.graph
        assert check.equivalent(after, before, inputs()) < EXACT, passes


@pytest.mark.parametrize("kind", first(("llama", "phi", "gpt2", "mixtral"), ROTATED))
def test_the_whole_stream_turns(kind: str) -> None:
    folded = apply(FoldNorms(), raised(kind)).graph
    (stream,) = dataflow.residual_streams(folded)
    result = apply(Rotate(heads=False), folded)
    assert not result.notes
    readers = {reader for reader, _ in dataflow.carried(stream.reads)}
    assert result.fired >= len(stream.writers) + len(readers) >= 1 + 2 * 2 + 2 * 2 + 1


@pytest.mark.parametrize("kind", first(("gemma2",), REFUSED))
def test_a_stream_that_cannot_turn_is_named(kind: str) -> None:
    folded = apply(FoldNorms(), raised(kind)).graph
    result = apply(Rotate(heads=False), folded)
    assert result.fired == 0 and REFUSED[kind][1] in result.notes[0]


@pytest.mark.parametrize("kind", first(("llama", "gemma2"), ["llama", "starcoder2", "gemma2"]))
def test_norms_are_folded_where_that_lets_a_stream_turn(kind: str) -> None:
    before = raised(kind)
    result, whole = apply(FoldNorms(needed=True), before), apply(FoldNorms(), before)
    turns = kind in ROTATED
    assert result.fired == (whole.fired if turns else 0) and len(result.notes) >= (0 if turns else whole.fired)
    assert len(apply(Rotate(heads=False), result.graph).notes) == (not turns)
    assert turns or all("keeps its scale" in note or "not a linear" in note for note in result.notes)
    assert check.equivalent(result.graph, before, inputs()) < EXACT


@pytest.mark.parametrize("kind", first(("gemma2",), REFUSED))
def test_a_stream_that_cannot_turn_is_turned_where_linears_read_it(kind: str) -> None:
    folded = apply(FoldNorms(), raised(kind)).graph
    result = apply(Rotate(online=True), folded)
    assert REFUSED[kind][1] in result.notes[0]
    given = {ops.name_of(linear.args[0].target) for linear in result.graph.calls("linear")}  # type: ignore[union-attr]
    assert given == {"hadamard", "merge_heads"}
    assert check.equivalent(result.graph, folded, inputs()) < EXACT


def test_a_stream_that_folded_norms_let_turn_is_not_turned_at_run_time() -> None:
    before = raised("llama")
    result = apply(Rotate(online=True), before)
    assert "read by rms_norm" in result.notes[0]
    assert len(result.graph.calls("hadamard")) == len(before.calls("mul")) == 2
