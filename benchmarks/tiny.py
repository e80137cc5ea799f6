"""Tiny configurations of any model type of transformers, cut down from the type's default configuration.

`settings(kind)` gives them as the keyword arguments of the type's configuration. RULES say what becomes of a key,
`EXCEPTIONS` what differs for types with sizes that depend on each other in another way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Settings = dict[str, Any]

VOCABULARY, WIDTH, HEADS, GROUPS, HEAD = 320, 256, 8, 2, 32
CONTEXT, WINDOW, EXPERTS, CHOSEN = 128, 16, 6, 2
MOST_LAYERS = 6
"""Layers of a configuration at most: one of each kind that its lists name, and two at least."""

RULES: tuple[tuple[str, int], ...] = (
    (r"\w+_group_vocab|(decoder_|text_|unpadded_)?vocab_size(_per_layer_input)?|n_vocab", VOCABULARY),
    (r"hidden_size_per_layer_input|laurel_rank", 16),
    (r"moe_intermediate_size|expert_ffn_hidden_size|expert_intermediate_size", 96),
    (r"(moe_)?shared_expert\w*_intermediate_size|share_expert_dim|shared_intermediate_size", 160),
    (r"hidden_size|d_model|n_embd|dim_model|emb_dim|embed_dim|embedding_dim|attention_hidden_size|lru_width", WIDTH),
    (r"(dense_|moe_)?(intermediate|ffn_hidden|feed_forward)_size(_mlp)?|(\w+_)?ffn_dim|n_inner|d_ff|dim_ff|dff", 352),
    (r"(\w+_)?(num_)?attention_heads|n_heads?|num_heads|num_sliding_attention_heads", HEADS),
    (r"num_key_value_heads|num_kv_heads|num_query_groups|swa_num_key_value_heads", GROUPS),
    (r"(attention_|global_|swa_)?head_dim|attention_head_size|kv_channels|dim_head|d_head|d_kv|swa_v_head_dim", HEAD),
    (
        r"max_position_embeddings|n_positions|n_ctx|max_seq_len|seq_length|max_target_positions|model_max_length",
        CONTEXT,
    ),
    (r"sliding_window(_size)?|attention_window_size|local_attention|window_size|attention_chunk_size", WINDOW),
    (r"(moe_)?num_(local_)?experts|n_routed_experts|num_routed_experts", EXPERTS),
    (r"(moe_)?(num_experts_per_tok(en)?|top_?k(_experts)?|k)", CHOSEN),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts|zero_expert_num", 2),
    (r"n_group|num_expert_group|topk_group", 1),
    (r"first_k_dense_replace|num_dense_layers", 1),
    (r"q_lora_rank", 48),
    (r"kv_lora_rank|qk_nope_head_dim|v_head_dim", HEAD),
    (r"qk_rope_head_dim|rotary_dim", 16),
    (r"qk_head_dim", HEAD + 16),
    (r"index_topk", CONTEXT),
    (r"indexer_budget", 8),
    (r"index_n_heads", 4),
    (r"index_head_dim", HEAD),
    (r"(out|text|output|language)_hidden_size|projector_output_dim|output_dim", WIDTH),
    (r"mamba_(n|num)_heads|linear_num_value_heads", 16),
    (r"linear_num_heads", HEADS),
    (r"linear_num_key_heads", 4),
    (r"mamba_(d_head|head_?dim)|linear_((key|value)_)?head_dim", HEAD),
    (r"mamba_d_ssm", 2 * WIDTH),
    (r"mamba_d_state|ssm_state_size|state_size", 16),
    (r"(mamba_)?chunk_size", 16),
    (r"depth|(num_)?(encoder|decoder)_layers|num_layers_per_stack", 2),
)
"""What becomes of an integer by its key, where the default has more."""
PARTS = r"(?!per_layer)\w+_config"
"""Keys of configurations inside a configuration."""
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers")
"""Keys of the number of layers."""

HYBRID = {"mamba_n_heads": 16, "mamba_d_head": 32, "mamba_expand": 2, "mamba_n_groups": 1}
TWO_ROPES = {
    kind: {"rope_type": "default", "rope_theta": theta}
    for kind, theta in (("sliding_attention", 10000.0), ("full_attention", 50000.0))
}
SHARED_KEYS = {
    "num_hidden_layers": 5,
    "layer_types": [*["sliding_attention", "full_attention"] * 2, "sliding_attention"],
    "num_kv_shared_layers": 2,
}
WIDE_HEADS = {"head_dim": 4 * HEAD, "num_attention_heads": 2, "num_key_value_heads": 1}
"""For three parts of the rotary embedding, with sizes that are constants in the type's own code."""
TWICE = {"attention_hidden_size": 2 * WIDTH, "attention_head_dim": 2 * HEAD}
EXCEPTIONS: dict[str, Settings] = {
    "apertus1p5": {  # tokens of images and sounds are numbered one after the other, inside the vocabulary
        **{"image_token_offset": 100, "vision_config": {"codebook_size": 64}},
        **{"audio_token_offset": 164, "audio_config": {"codebook_size": 64, "codebook_dim": WIDTH}},
    },
    "bamba": HYBRID,
    "cohere_compass_text": {
        "rope_parameters": TWO_ROPES,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 1.0},
        "ffn_config": {"hidden_size": WIDTH, "ffn_hidden_size": 96, "moe_num_experts": 6, "moe_top_k": 2},
    },
    "chameleon": {"vocabulary_map": {"<image>": 3}},
    "cosmos3_edge_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0, "mrope_section": [8, 4, 4]}
    },
    "deepseek_ocr2_text": {
        **{"mlp_layer_types": ["dense", "sparse"], "num_hidden_layers": 2, "num_experts_per_tok": CHOSEN},
        **{"n_group": 1, "topk_group": 1},
    },
    "dory": {  # its own list counts attention and MLP as two layers
        **{"num_hidden_layers": 8, "n_input_layers": 2, "n_recurrent_layers": 4, "n_output_layers": 2},
        "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp"] * 2,
    },
    "dots3_note_audio_encoder": {"adapter_input_size": WIDTH, "adapter_out_dim": WIDTH},
    "dots3_note_text": {"head_dim": HEAD + 16},
    "dots3_note_vision_encoder": {"adapter_in_dim": WIDTH, "adapter_out_dim": WIDTH},
    "emu3": {"vocabulary_map": {"<image>": 3}},
    "ernie4_5_vl_moe_text": {"head_dim": 4 * HEAD},
    "falcon_h1": {"mamba_d_head": HEAD, "mamba_n_groups": 1},
    "glm4v_moe_text": {"head_dim": 4 * HEAD},
    "glm4v_text": {"head_dim": 2 * HEAD, "num_attention_heads": 4, "num_key_value_heads": 2},
    "glm_ocr_text": {"head_dim": 2 * HEAD},
    "deepseek_v2": {"num_experts_per_tok": CHOSEN, "n_routed_experts": EXPERTS, "n_group": 1, "topk_group": 1},
    "dots1": {
        **{"n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": CHOSEN},
        **{"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True},
    },
    "gemma3n_text": {
        **SHARED_KEYS,
        "intermediate_size": 352,
        "activation_sparsity_pattern": [0.95, 0.0, 0.95, 0.0, 0.0],
    },
    "glm5_next_text": {"index_topk": 16},
    "granite4_vision": {
        **{"downsample_rate": "1/2", "deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [0, 1, 0, 1]},
        "image_grid_pinpoints": [[336, 672]],
    },
    "granitemoehybrid": HYBRID,
    "hunyuan_vl_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [HEAD // 8] * 4}
    },
    "hy_v4_vl_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}},
    "inkling2_loop_text": {
        **{"unpadded_vocab_size": VOCABULARY, "num_hidden_layers": 4, "n_layers_per_attn_res_block": 1},
        **{"loop_layer_index_start": 1, "loop_layer_index_end": 3},
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
    },
    "jetmoe": {"pad_token_id": None},  # its embedding would be 0, and all experts as good for it
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "mamba2": {"num_heads": 16, "head_dim": HEAD, "n_groups": 1},
    "molmo2": {"adapter_config": {"vision_feature_layer": [-1, -2]}},
    "nemotron": {"num_key_value_heads": GROUPS},
    "paddleocr_vl_text": {"head_dim": 4 * HEAD},
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text"), WIDE_HEADS),
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"is_decoder": True},
    "step3p5": {"sliding_window": WINDOW},
    "timm_wrapper": {  # its own model needs another library
        **{"model_type": "clip_vision_model", "hidden_size": WIDTH, "num_attention_heads": HEADS},
        **{"num_hidden_layers": 2, "intermediate_size": 352},
        "model_args": {"embed_dim": WIDTH},
    },
    "xmod": {"default_language": "en_XX"},
    "zamba2": {
        **TWICE,
        **{"mamba_headdim": 2 * HEAD, "num_hidden_layers": 4, "hybrid_layer_ids": [1, 3]},
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "zamba": {
        **TWICE,
        "layers_block_type": ["linear_attention", "hybrid"] * 2 + ["linear_attention"],
        "num_hidden_layers": 5,
    },
}
"""Settings of the text part of a type, over what the rules give."""


def settings(kind: str) -> Settings:
    """The keyword arguments of a tiny configuration of the type `kind`."""
    from transformers import CONFIG_MAPPING

    given = CONFIG_MAPPING[kind]().to_dict()
    return {key: value for key, value in cut(given).items() if key != "model_type"}


def cut(given: Mapping[str, Any]) -> Settings:
    """A configuration's dictionary, and those inside it, with small sizes and few layers."""
    parts = {key: value for key, value in given.items() if isinstance(value, dict) and re.fullmatch(PARTS, key)}
    small: Settings = {key: _small(key, value) for key, value in given.items() if key not in parts}
    small |= _few_layers(given)
    if "kv_lora_rank" in small or given.get("num_key_value_heads") == given.get("num_attention_heads"):
        small |= {"num_key_value_heads": small["num_attention_heads"]} if "num_key_value_heads" in small else {}
    if given.get("head_dim") is not None and given.get("head_dim") == given.get("qk_rope_head_dim"):
        small["head_dim"] = small["qk_rope_head_dim"]
    small |= {key: cut(part) if "model_type" in part else part for key, part in parts.items()}
    for key, value in EXCEPTIONS.get(given.get("model_type", ""), {}).items():
        small[key] = small[key] | value if key in parts else value
    return {key: value for key, value in small.items() if key not in ("transformers_version", "architectures")}


def _small(key: str, value: Any) -> Any:
    """The value of one key: sizes by the rules, tokens outside the vocabulary dropped."""
    if re.fullmatch(r"\w+_token_(id|index)", key):
        return _token(key, value)
    if key == "head_dim" and value is None:
        return HEAD
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    for pattern, size in RULES:
        if re.fullmatch(pattern, key):
            return min(value, size)
    return value


def _token(key: str, value: Any) -> Any:
    """A token number inside the vocabulary; of lists, the first."""
    first = value[0] if isinstance(value, list) and value else value
    usual = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return usual.get(key, min(first, VOCABULARY - 1) if isinstance(first, int) else first)


def _few_layers(given: Mapping[str, Any]) -> Settings:
    """The number of layers, and the lists that have an entry for each, of one layer of each kind."""
    key = next((key for key in DEPTHS if isinstance(given.get(key), int)), None)
    if key is None:
        return {}
    depth = given[key]
    lists = {name: value for name, value in given.items() if isinstance(value, list) and len(value) == depth > 1}
    own = {int(layer): str(change) for layer, change in (given.get("per_layer_config") or {}).items()}
    kinds: dict[Any, int] = {}
    for layer in range(depth):
        kinds.setdefault((own.get(layer), *(str(value[layer]) for value in lists.values())), layer)
    kept = sorted(kinds.values())[:MOST_LAYERS]
    kept += [layer for layer in range(depth) if layer not in kept][: max(0, 2 - len(kept))]
    kept = sorted(kept)
    few: Settings = {key: len(kept)} | {
        name: [_small(name, value[layer]) for layer in kept] for name, value in lists.items()
    }
    if given.get("per_layer_config"):
        changes: dict[int, Settings] = {int(layer): change for layer, change in given["per_layer_config"].items()}
        few["per_layer_config"] = {kept.index(layer): cut(changes[layer]) for layer in kept if layer in changes}
    return few
