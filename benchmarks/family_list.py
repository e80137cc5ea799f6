"""Tiny configurations of transformers' decoder families: what `families.py` compiles and compares.

Each is a name, transformers' model type, and the settings that differ from COMMON. Sizes are small enough to
build in seconds and odd enough that a mixed-up axis shows: every count differs where the family allows it.
"""

from __future__ import annotations

from typing import Any

Settings = dict[str, Any]

COMMON: Settings = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 352,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT: Settings = {
    "vocab_size": 320,
    "n_embd": 256,
    "n_layer": 2,
    "n_head": 8,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEAD: Settings = COMMON | {"head_dim": 32}
EXPERTS: Settings = HEAD | {
    "num_experts": 6,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
}
MANY: Settings = {"num_key_value_heads": 8}
WINDOW: Settings = {"sliding_window": 16}


def rope(kind: str, **values: Any) -> Settings:
    """`rope_parameters` of one kind."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


YARN = rope("yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=32.0, beta_slow=1.0)
LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
LONG = rope(
    "longrope",
    factor=4.0,
    original_max_position_embeddings=64,
    short_factor=[1.0 + 0.05 * i for i in range(16)],
    long_factor=[1.5 + 0.5 * i for i in range(16)],
)
LONG |= {"original_max_position_embeddings": 64}
SHORT = LONG | {"max_position_embeddings": 64}
LATENT: Settings = {
    "num_key_value_heads": 8,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
GEMMA4: Settings = HEAD | {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 16,
    "global_head_dim": 64,
    "vocab_size_per_layer_input": 320,
    "hidden_size_per_layer_input": 0,
}
GROUPED: Settings = LATENT | {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "n_group": 3,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
SELECTED: Settings = {"index_topk": 64, "index_n_heads": 4, "index_head_dim": 32}

FAMILIES: tuple[tuple[str, str, Settings], ...] = (
    ("llama, grouped heads", "llama", COMMON),
    ("llama, a head of keys for each of queries", "llama", COMMON | MANY),
    ("llama, one head of keys", "llama", COMMON | {"num_key_value_heads": 1, "num_hidden_layers": 3}),
    (
        "llama, tied head, biases",
        "llama",
        COMMON | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    ("llama, llama3 rope", "llama", COMMON | LLAMA3),
    ("llama, linear rope", "llama", COMMON | rope("linear", factor=2.5)),
    ("llama, yarn rope", "llama", COMMON | YARN),
    ("llama, dynamic rope", "llama", COMMON | rope("dynamic", factor=2.0)),
    (
        "llama, odd vocabulary and widths",
        "llama",
        COMMON | {"vocab_size": 331, "intermediate_size": 333, "head_dim": 22},
    ),
    ("mistral, window", "mistral", COMMON | WINDOW),
    (
        "ministral, windows of some layers",
        "ministral",
        HEAD | WINDOW | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    ("mixtral", "mixtral", EXPERTS),
    ("mixtral, window", "mixtral", EXPERTS | WINDOW),
    ("qwen2", "qwen2", COMMON),
    ("qwen2, windows of late layers", "qwen2", COMMON | WINDOW | {"use_sliding_window": True, "max_window_layers": 1}),
    ("qwen3", "qwen3", HEAD),
    ("qwen2_moe", "qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 160, "decoder_sparse_step": 1}),
    (
        "qwen2_moe, dense layers between",
        "qwen2_moe",
        EXPERTS | {"shared_expert_intermediate_size": 160, "mlp_only_layers": [0], "norm_topk_prob": True},
    ),
    ("qwen3_moe", "qwen3_moe", EXPERTS | {"norm_topk_prob": True}),
    ("olmoe", "olmoe", EXPERTS | {"intermediate_size": 96}),
    (
        "granitemoe",
        "granitemoe",
        EXPERTS
        | {
            "intermediate_size": 96,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
        },
    ),
    ("granitemoeshared", "granitemoeshared", EXPERTS | {"intermediate_size": 96, "shared_intermediate_size": 160}),
    (
        "longcat_flash, experts without weights",
        "longcat_flash",
        LATENT
        | COMMON
        | {"n_routed_experts": 6, "zero_expert_num": 3, "moe_topk": 3, "expert_ffn_hidden_size": 96, "num_layers": 2}
        | {"ffn_hidden_size": 352, "num_key_value_heads": 8, "head_dim": 16},
    ),
    (  # the embedding of a padding token would be 0, and all its experts as good
        "jetmoe",
        "jetmoe",
        EXPERTS
        | {"kv_channels": 32, "num_key_value_heads": 4, "num_attention_heads": 8, "intermediate_size": 96}
        | {"pad_token_id": None},
    ),
    ("aria_text", "aria_text", HEAD | {"moe_num_experts": 6, "moe_topk": 2, "moe_num_shared_experts": 2}),
    ("phimoe", "phimoe", EXPERTS | {"intermediate_size": 96, "router_jitter_noise": 0.2}),
    (
        "phimoe, longrope",
        "phimoe",
        EXPERTS
        | {"intermediate_size": 96, "attention_bias": True, "lm_head_bias": True}
        | {"rope_parameters": LONG["rope_parameters"] | {"short_mscale": 1.25, "long_mscale": 1.25}},
    ),
    ("flex_olmo", "flex_olmo", EXPERTS | {"intermediate_size": 96}),
    ("gpt_oss", "gpt_oss", EXPERTS | WINDOW | {"intermediate_size": 96} | YARN),
    (
        "dots1",
        "dots1",
        EXPERTS
        | {"n_routed_experts": 6, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1},
    ),
    (
        "glm4_moe",
        "glm4_moe",
        EXPERTS | {"n_routed_experts": 6, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    ("ernie4_5_moe", "ernie4_5_moe", EXPERTS | {"moe_num_experts": 6, "moe_k": 2, "moe_layer_start_index": 1}),
    ("hunyuan_v1_moe", "hunyuan_v1_moe", EXPERTS | {"intermediate_size": 96, "moe_topk": 2}),
    ("minimax_m2", "minimax_m2", EXPERTS | {"intermediate_size": 96}),
    ("gemma", "gemma", HEAD),
    (
        "gemma2, soft caps",
        "gemma2",
        HEAD | WINDOW | {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    ),
    (
        "gemma3_text, two ropes",
        "gemma3_text",
        HEAD
        | WINDOW
        | {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 24,
        },
    ),
    ("vaultgemma", "vaultgemma", HEAD | WINDOW | {"query_pre_attn_scalar": 24}),
    ("phi", "phi", COMMON | {"partial_rotary_factor": 0.5}),
    (
        "phi3",
        "phi3",
        COMMON | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}},
    ),
    ("phi3, longrope of the original length", "phi3", COMMON | SHORT),
    ("phi3, longrope beyond it", "phi3", COMMON | LONG),
    ("olmo", "olmo", COMMON | {"clip_qkv": None}),
    ("olmo2", "olmo2", COMMON),
    ("olmo3", "olmo3", COMMON | WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}),
    (
        "granite",
        "granite",
        COMMON
        | {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.0},
    ),
    ("cohere", "cohere", COMMON | {"logit_scale": 0.5, "use_qk_norm": True}),
    (
        "cohere2",
        "cohere2",
        COMMON | WINDOW | {"logit_scale": 0.5, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    ("stablelm", "stablelm", COMMON | {"partial_rotary_factor": 0.25, "use_qkv_bias": True}),
    ("stablelm, parallel, norms in heads", "stablelm", COMMON | {"use_parallel_residual": True, "qk_layernorm": True}),
    ("gpt_neox", "gpt_neox", COMMON | {"rotary_pct": 0.25}),
    ("gpt_neox, in sequence", "gpt_neox", COMMON | {"use_parallel_residual": False, "hidden_act": "gelu_new"}),
    ("gpt2", "gpt2", GPT),
    ("gpt_bigcode, one head of keys", "gpt_bigcode", GPT),
    ("gpt_bigcode", "gpt_bigcode", GPT | {"multi_query": False}),
    (
        "gpt_neo, local layers",
        "gpt_neo",
        {
            "vocab_size": 320,
            "hidden_size": 256,
            "num_layers": 2,
            "attention_types": [[["global", "local"], 1]],
            "num_heads": 8,
            "window_size": 16,
            "max_position_embeddings": 128,
        },
    ),
    ("gptj", "gptj", GPT | {"rotary_dim": 16}),
    ("codegen", "codegen", GPT | {"rotary_dim": 16}),
    ("opt", "opt", COMMON | {"ffn_dim": 352, "word_embed_proj_dim": 256}),
    (
        "opt, narrow embeddings",
        "opt",
        COMMON | {"ffn_dim": 352, "word_embed_proj_dim": 128, "do_layer_norm_before": False},
    ),
    ("biogpt", "biogpt", COMMON),
    ("falcon, 7b style", "falcon", COMMON | {"multi_query": True, "alibi": False}),
    ("falcon, new decoder", "falcon", COMMON | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    ("falcon, alibi", "falcon", COMMON | {"alibi": True, "multi_query": False, "bias": True}),
    ("bloom", "bloom", {"vocab_size": 320, "hidden_size": 256, "n_layer": 2, "n_head": 8}),
    ("bloom, six heads", "bloom", {"vocab_size": 320, "hidden_size": 192, "n_layer": 2, "n_head": 6}),
    (
        "mpt",
        "mpt",
        {"vocab_size": 320, "d_model": 256, "n_layers": 2, "n_heads": 8, "max_seq_len": 128, "expansion_ratio": 2},
    ),
    ("smollm3", "smollm3", COMMON | {"no_rope_layers": [1, 0]}),
    ("glm", "glm", HEAD),
    ("glm4", "glm4", HEAD),
    ("starcoder2", "starcoder2", COMMON | WINDOW),
    ("exaone4", "exaone4", COMMON | WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}),
    ("nemotron", "nemotron", COMMON),
    ("arcee", "arcee", COMMON),
    ("apertus", "apertus", COMMON),
    ("helium", "helium", HEAD),
    ("persimmon", "persimmon", COMMON),
    ("ernie4_5", "ernie4_5", HEAD),
    ("hunyuan_v1_dense", "hunyuan_v1_dense", HEAD),
    ("seed_oss", "seed_oss", HEAD),
    ("bitnet", "bitnet", COMMON),
    ("cwm", "cwm", HEAD | LLAMA3 | WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}),
    ("ministral3", "ministral3", HEAD | {"rope_parameters": YARN["rope_parameters"] | {"llama_4_scaling_beta": 0.1}}),
    ("nanochat", "nanochat", COMMON),
    ("jais2", "jais2", HEAD),
    ("gpt_neox_japanese", "gpt_neox_japanese", COMMON | {"intermediate_multiple_size": 2}),
    (
        "xglm",
        "xglm",
        {
            "vocab_size": 320,
            "d_model": 256,
            "ffn_dim": 352,
            "num_layers": 2,
            "attention_heads": 8,
            "max_position_embeddings": 128,
        },
    ),
    ("openai-gpt", "openai-gpt", GPT),
    ("diffllama", "diffllama", COMMON),
    ("doge, biases of keys", "doge", COMMON | {"num_key_value_heads": 4, "sliding_window": 16}),
    ("minicpm3", "minicpm3", COMMON | LATENT),
    ("deepseek_v2", "deepseek_v2", COMMON | GROUPED | {"topk_method": "group_limited_greedy"}),
    ("deepseek_v2, queries of full rank", "deepseek_v2", COMMON | GROUPED | {"q_lora_rank": None, "v_head_dim": 24}),
    ("deepseek_v3", "deepseek_v3", COMMON | GROUPED | YARN),
    ("deepseek_v32, within its top keys", "deepseek_v32", COMMON | GROUPED | SELECTED),
    ("glm_moe_dsa, within its top keys", "glm_moe_dsa", COMMON | GROUPED | SELECTED),
    (
        "hy_v4, streams, within its top keys",
        "hy_v4",
        COMMON
        | GROUPED
        | SELECTED
        | {"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"], "hc_mult": 3}
        | {"indexer_types": ["full", "full", "shared"], "n_group": 1, "topk_group": 1, "moe_intermediate_size": 96},
    ),
    (
        "gemma3n_text, streams, shared keys, sparse gates",
        "gemma3n_text",
        HEAD
        | {"num_hidden_layers": 5, "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"]}
        | {"num_kv_shared_layers": 2, "sliding_window": 16, "activation_sparsity_pattern": [0.95, 0.0, 0.9, 0.0, 0.0]}
        | {"hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": 320, "laurel_rank": 20}
        | {"altup_num_inputs": 3, "altup_active_idx": 1, "final_logit_softcapping": 30.0},
    ),
    (
        "llama4_text, chunks, and layers without rope",
        "llama4_text",
        HEAD
        | {"num_hidden_layers": 4, "attention_chunk_size": 16, "no_rope_layers": [1, 1, 1, 0], "floor_scale": 8}
        | {"moe_layers": [], "intermediate_size_mlp": 352, "attn_scale": 0.1},
    ),
    (
        "llama4_text, experts of scaled inputs",
        "llama4_text",
        EXPERTS | {"attention_chunk_size": 16, "intermediate_size": 96, "intermediate_size_mlp": 352},
    ),
    (
        "mimo_v2_flash, layers of other heads",
        "mimo_v2_flash",
        HEAD
        | WINDOW
        | {"num_hidden_layers": 4, "v_head_dim": 16, "n_routed_experts": 6, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 96, "layer_types": ["full_attention", "sliding_attention"] * 2}
        | {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"]},
    ),
    ("gemma4_text, layers of other head sizes", "gemma4_text", GEMMA4),
    (
        "gemma4_text, heads of 256 and 512",
        "gemma4_text",
        GEMMA4
        | {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
        # The sizes of heads are those of the model; it is cut in layers and width.
        | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512},
    ),
    (
        "gemma4_text, experts",
        "gemma4_text",
        GEMMA4 | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 96},
    ),
    (
        "gemma4_text, keys are values",
        "gemma4_text",
        GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    (
        "gemma4_text, shared keys, inputs of each layer",
        "gemma4_text",
        GEMMA4 | {"hidden_size_per_layer_input": 32, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    ),
    ("mamba", "mamba", {"vocab_size": 320, "hidden_size": 256, "num_hidden_layers": 2}),
    (
        "zamba",
        "zamba",
        COMMON
        | {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "num_key_value_heads": 8}
        | {"mamba_d_state": 16, "mamba_dt_rank": 24, "n_mamba_heads": 2},
    ),
    (
        "qwen3_next",
        "qwen3_next",
        EXPERTS | {"layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 160},
    ),
    ("lfm2", "lfm2", COMMON | {"layer_types": ["conv", "full_attention"]}),
    (
        "recurrent_gemma",
        "recurrent_gemma",
        COMMON | {"num_hidden_layers": 3, "num_key_value_heads": 1, "lru_width": 64, "attention_window_size": 16},
    ),
    (
        "minimax",
        "minimax",
        EXPERTS | {"layer_types": ["linear_attention", "full_attention"], "block_size": 8},
    ),
    ("bert, both directions", "bert", COMMON | {"is_decoder": False}),
)
