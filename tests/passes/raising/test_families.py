"""Raise on families of transformers with different components; others are refused by name."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qcompile import check
from qcompile.checkpoints import frontend
from qcompile.errors import QCompileError, UnsupportedError
from qcompile.passes.base import apply
from qcompile.passes.raising import Raise
from tests.support.cases import first
from tests.support.families import COMMON, EXPERTS, LATENT, SMALL, save

LONG: dict[str, Any] = {
    "original_max_position_embeddings": 32,
    "rope_parameters": {
        **{"rope_type": "longrope", "rope_theta": 10000.0},
        **{"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]},
    },
}

SCALED: dict[str, Any] = {"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.1}
"""Queries are scaled up every 8 positions."""

STREAMS: dict[str, Any] = {
    **{"head_dim": 16, "hidden_size_per_layer_input": 8, "laurel_rank": 8, "vocab_size_per_layer_input": 97},
    **{"num_hidden_layers": 4, "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0]},
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
"""Keys of the last layers are those of earlier ones."""

RIGHT: dict[str, dict[str, Any]] = {
    "gemma2": COMMON | {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},  # caps, (1 + w), windows
    "gpt2": SMALL,  # Conv1D, fused qkv, learned positions
    "opt": COMMON | {"ffn_dim": 96, "word_embed_proj_dim": 64},  # learned positions with an offset
    "phi": COMMON | {"partial_rotary_factor": 0.5},  # parallel block, partial rotary
    "gpt_neox": COMMON,  # qkv interleaved by head
    "cohere": COMMON | {"logit_scale": 0.5, "use_qk_norm": True},  # interleaved rotary, norms by head without bias
    "stablelm": COMMON | {"use_parallel_residual": True, "qk_layernorm": True},  # a norm module for each head
    "nanochat": COMMON,  # norms after the rotation, which has the opposite direction
    "bloom": {"vocab_size": 97, "hidden_size": 64, "n_layer": 2, "n_head": 4},  # linear biases
    "codegen": SMALL | {"rotary_dim": 8},  # a mask inside the scale, stored tables read by position
    "phi3": COMMON | LONG,  # frequencies copied into a buffer, with others for longer texts
    "granite": COMMON | {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2},
    "qwen3": COMMON | {"head_dim": 16},  # norms of queries and keys
    "falcon": COMMON | {"new_decoder_architecture": True, "num_kv_heads": 2},  # attention written out, in place
    "mixtral": COMMON | EXPERTS,  # experts stored separately
    "glm4_moe": COMMON | EXPERTS | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},  # groups of experts
    "gpt_oss": COMMON | EXPERTS | {"head_dim": 16, "sliding_window": 8},  # sinks, clamped gates, interleaved rows
    "deepseek_v3": COMMON | EXPERTS | LATENT | {"n_group": 3, "topk_group": 2},  # keys assembled in new memory
    "deepseek_v2": COMMON | EXPERTS | LATENT | {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2},
    "apertus": COMMON,  # an activation with its own scalars in each layer
    "hunyuan_v1_dense": COMMON | {"head_dim": 16},  # norms with weights after the rotation
    "ministral3": COMMON | {"head_dim": 16, "rope_parameters": LATENT["rope_parameters"] | SCALED},
    "aria_text": COMMON | {"moe_num_experts": 6, "moe_topk": 2, "moe_num_shared_experts": 1},  # strides in a condition
    "longcat_flash": COMMON
    | LATENT
    | {"n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 3, "expert_ffn_hidden_size": 24, "num_layers": 1}
    | {"head_dim": LATENT["qk_rope_head_dim"], "qk_head_dim": LATENT["qk_rope_head_dim"] + LATENT["qk_nope_head_dim"]}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},  # some experts return their token
    "phimoe": COMMON | EXPERTS | {"router_jitter_noise": 0.2},  # experts chosen one after another
    "gemma3n_text": COMMON | STREAMS,  # streams mixed by weights of the token, changed in place, and sparse gates
    "nemotron": COMMON,  # squared ReLU, LayerNorm with 1 + w
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bert": (COMMON | {"is_decoder": False}, "neither causal nor"),
}


# tests/checkpoints/test_families.py builds them, of other sizes, and compares the artifact with transformers.
FIRST = (
    *("gemma3n_text", "phi3", "codegen", "bloom", "longcat_flash", "nanochat", "gpt2", "granite", "falcon", "stablelm"),
    *("apertus", "aria_text"),
)


@pytest.mark.parametrize("kind", first(FIRST, RIGHT))
def test_right(kind: str, tmp_path: Path) -> None:
    module = save(kind, RIGHT[kind], tmp_path)
    if kind == "phi3" and version("transformers").startswith("5.17."):  # its rotary frequencies branch on data
        with pytest.raises(UnsupportedError, match=r"another way for long sequences|replaces its tensor"):
            frontend.load(tmp_path)
        return
    graph = apply(Raise(), frontend.load(tmp_path)).graph
    ids = torch.randint(0, 97, (2, 31), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = module(ids).logits
    assert check.max_relative_error(graph.run(ids, torch.arange(31).expand(2, 31)), expected) < 5e-6


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (torch.zeros(1), r"has shape \[1\], the model needs \[6\]"),
        pytest.param(torch.zeros(6).int(), "of integer type", marks=pytest.mark.exhaustive),
    ],
)
def test_a_stored_buffer_that_does_not_fit(stored: torch.Tensor, message: str, tmp_path: Path) -> None:
    save("glm4_moe", RIGHT["glm4_moe"], tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    (name,) = (name for name in tensors if "bias" in name and tensors[name].shape == (6,))
    save_file(tensors | {name: stored}, file)
    with pytest.raises(QCompileError, match=message):
        frontend.load(tmp_path)


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(kind: str, tmp_path: Path) -> None:
    settings, message = REFUSED[kind]
    save(kind, settings, tmp_path)
    with pytest.raises(UnsupportedError, match=message):
        apply(Raise(), frontend.load(tmp_path))


@pytest.mark.parametrize(
    ("least", "most", "right"),
    first(((0, 5, True), (0, 4, False)), [(0, 5, True), (-1, None, True), (0, 4, False), (1, None, False)]),
)
def test_choices_are_kept_within_bounds(
    least: int, most: int | None, right: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some versions of transformers clamp expert indices, which is a no-op if all are within the bounds."""
    from transformers.integrations import moe

    batched = moe.batched_mm_experts_forward

    def clamped(self: Any, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return batched(self, x, index.clamp(least, most), weights)

    monkeypatch.setitem(moe.ExpertsInterface._global_mapping, "batched_mm", clamped)
    module = save("qwen3_moe", COMMON | EXPERTS | {"head_dim": 16}, tmp_path)
    if not right:
        with pytest.raises(UnsupportedError, match="Qwen3MoeExperts"):
            apply(Raise(), frontend.load(tmp_path))
        return
    graph = apply(Raise(), frontend.load(tmp_path)).graph
    ids = torch.randint(0, 97, (2, 31), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = module(ids).logits
    assert check.max_relative_error(graph.run(ids, torch.arange(31).expand(2, 31)), expected) < 5e-6
