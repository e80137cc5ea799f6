"""Tiny random multimodal checkpoints, made from transformers' default configurations with their sizes cut.

`tiny_config(kind)` is such a configuration of a type in transformers' maps of multimodal models, and `save_random(kind,
path)` saves a model of it, every parameter random. Sizes are cut by the names that configurations share; SPECIAL has
what a few types need beyond that.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

Settings = dict[str, Any]

LAYERS, VOCABULARY, HEAD = 4, 320, 16
EXACT: Settings = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "unpadded_vocab_size": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "head_dim": HEAD,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "image_size": 56,
    "patch_size": 14,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": HEAD,
    "qk_nope_head_dim": HEAD,
    "v_head_dim": HEAD,
    "sliding_window": 16,
    "first_k_dense_replace": 1,
    "attention_chunk_size": 24,
}
"""Values of these keys, wherever they occur with a number."""
DEPTH = r"(num_(hidden_)?layers|n_layers|depth|layers|(encoder|decoder)_layers|num_blocks)$"
"""Keys of numbers of layers."""
PATTERNS: tuple[tuple[str, int], ...] = (
    (r"(num_(attention_)?heads|attention_heads)$", 4),
    (r"(num_key_value_heads)$", 2),
    (r"(intermediate_size|ffn_dim|mlp_dim|intermediate_size_mlp)$", 96),
    (r"(hidden_size|d_model|embed_dim|hidden_dim|projection_dim|(input|output|adapter_in|adapter_out)_dim)$", 64),
    (r"num_(local_|routed_)?experts$|n_routed_experts$|moe_num_experts$", 6),
)
"""Upper limits of numbers, by the end of their key."""
LATENT: Settings = {"num_key_value_heads": 4, "head_dim": HEAD, "qk_head_dim": 2 * HEAD}
"""What else is cut where keys and values are latent."""
SPECIAL: dict[str, Settings] = {
    "chameleon": {"vocabulary_map": {"<image>": 4}},
    "emu3": {"vocabulary_map": {"<image>": 4}},
    "gemma4": {"text_config": {"per_layer_config": {"3": {"head_dim": 32}}, "num_kv_shared_layers": 0}},
    "gemma4_unified": {"text_config": {"per_layer_config": {"3": {"head_dim": 32}}}},
}
"""Settings of types that need more than cut sizes."""


def tiny_config(kind: str, layers: int = LAYERS) -> Any:
    """A tiny configuration of transformers' model type `kind`; each stack has at most `layers` layers."""
    from transformers import CONFIG_MAPPING

    default = CONFIG_MAPPING[kind]
    return default.from_dict(_merged(_cut(default().to_dict(), layers), SPECIAL.get(kind, {})))


def save_random(kind: str, path: Path, config: Any = None, seed: int = 0) -> Any:
    """A model of `config`, or of `tiny_config(kind)`, every parameter random, saved at `path` and read from there."""
    from transformers import AutoModelForMultimodalLM as Auto

    torch.manual_seed(seed)
    module = Auto.from_config(config or tiny_config(kind), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            flat = parameter.dim() < 2
            parameter.normal_(0.5 if flat else 0.0, 0.3 if flat else parameter.shape[-1] ** -0.5)
            if flat and name.endswith("bias"):
                parameter.sub_(0.5)
    module.save_pretrained(path)
    return Auto.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def _merged(settings: Settings, more: Settings) -> Settings:
    """`settings` with `more` written over it, in nested configurations too."""
    nested = {key: _merged(settings[key], value) for key, value in more.items() if isinstance(settings.get(key), dict)}
    plain = {key: value for key, value in more.items() if key not in nested or key in REPLACED}
    return {**settings, **nested, **plain}


REPLACED = ("per_layer_config", "vocabulary_map")
"""Tables that are replaced as a whole."""


def _cut(settings: Settings, layers: int) -> Settings:
    """`settings` with its sizes cut, in nested configurations too."""
    depth = next((v for k, v in settings.items() if re.fullmatch(DEPTH, str(k)) and type(v) is int), None)
    made = {key: _cut_value(str(key), value, depth, layers) for key, value in settings.items()}
    if made.get("kv_lora_rank"):
        made |= {key: value for key, value in LATENT.items() if key in made}
    rope = made.get("rope_parameters")
    if isinstance(rope, dict) and "rope_type" in rope:
        part = (made.get("head_dim") or HEAD) * (rope.get("partial_rotary_factor") or 1.0) / 2
        third = int(part * 3 / 8)
        made["rope_parameters"] = {**rope, "mrope_section": [int(part) - 2 * third, third, third]}
    return made


def _cut_value(key: str, value: Any, depth: int | None, layers: int) -> Any:
    if isinstance(value, dict):
        return _cut(value, layers)
    if isinstance(value, list) and len(value) == depth:
        return value[:layers]
    if type(value) is not int or not value:
        return value
    if key in EXACT:
        return EXACT[key]
    for pattern, small in ((DEPTH, layers), *PATTERNS):
        if re.search(pattern, key):
            return min(value, small)
    if re.search(r"token_(id|index)$", key) and value >= VOCABULARY:
        return 16 + sum(key.encode()) % 256
    return value
