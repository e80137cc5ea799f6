"""Tiny configurations of any type, of which benchmarks/decoder_types.py makes its rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import decoder_types, tiny
from benchmarks.families import auto_class

KINDS = ("llama", "gpt2", "gemma4_text", "deepseek_v3", "qwen3_next", "dbrx", "bamba", "glm4v_moe", "laguna", "mpt")


@pytest.mark.parametrize("kind", KINDS)
def test_a_type_is_small_and_can_be_made(kind: str) -> None:
    from transformers import AutoConfig, __version__

    if kind == "dbrx" and __version__.startswith("5.17."):
        pytest.skip("the configuration of dbrx of transformers 5.17 does not take what it has stored")
    config: Any = AutoConfig.for_model(kind, **tiny.settings(kind))
    with torch.device("meta"):
        module = auto_class(kind).from_config(config)
    assert sum(p.numel() for p in module.parameters()) < 4e7
    text = config.get_text_config()
    assert 2 <= text.num_hidden_layers <= tiny.MOST_LAYERS and text.vocab_size == tiny.VOCABULARY


def test_a_layer_of_each_kind_is_kept() -> None:
    kinds = ["linear"] * 3 + ["full"] + ["linear"] * 3 + ["full"]
    given = {"num_hidden_layers": 8, "layer_types": kinds, "heads_by_layer": [8] * 7 + [16], "hidden_size": 4096}
    assert tiny.cut(given) == {
        "num_hidden_layers": 3,
        "layer_types": ["linear", "full", "full"],
        "heads_by_layer": [8, 8, 16],
        "hidden_size": tiny.WIDTH,
    }


def test_changes_of_single_layers_move_with_them() -> None:
    given = {"num_hidden_layers": 4, "per_layer_config": {"2": {"head_dim": 512}}, "head_dim": 256}
    assert tiny.cut(given) == {
        "num_hidden_layers": 2,
        "per_layer_config": {1: {"head_dim": tiny.HEAD}},
        "head_dim": tiny.HEAD,
    }


@pytest.mark.parametrize(
    ("kind", "name"),
    [("llama", "CausalLM"), ("llava", "ImageTextToText"), ("emu3", "ImageTextToText"), ("mllama", "ImageTextToText")],
)
def test_models_are_made_by_the_class_that_reads_them_back(kind: str, name: str) -> None:
    assert auto_class(kind).__name__ == f"AutoModelFor{name}"


def test_classifiers_are_no_decoders() -> None:
    assert decoder_types.not_a_decoder("shieldgemma2", {}) == "classifier of images"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("gemma4_assistant", "a drafter, which reads the keys and values of another model"),
        ("pi0", "needs state besides text"),
        ("diffusion_gemma", "encoder and decoder"),
        ("llama", ""),
        ("llava", ""),
    ],
)
def test_what_takes_more_than_text_is_no_decoder(kind: str, reason: str) -> None:
    from transformers.models.auto import modeling_auto as auto

    if kind not in {**auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}:
        pytest.skip(f"this version of transformers does not have {kind}")
    assert decoder_types.takes_more(kind) == reason
