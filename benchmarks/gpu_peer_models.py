"""Configurations of gpu_peers.py: published models, those that are too large for one GPU with fewer layers."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_e2e import CONFIG, EXPERTS, SINKS

_LONG = {"max_position_embeddings": 135_168}
_NEXT_LAYERS = 24

QWEN3_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": _NEXT_LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (_NEXT_LAYERS // 4),
    "full_attention_interval": 4,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
} | _LONG
"""Qwen3-Next-80B-A3B with 24 of its 48 layers."""

BAMBA: dict[str, Any] = {
    "architectures": ["BambaForCausalLM"],
    "model_type": "bamba",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "attn_layer_indices": [9, 18, 27],
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attn_rotary_emb": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
} | _LONG
"""Bamba-9B: 29 layers of Mamba-2 and 3 of attention."""

DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 2,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
} | _LONG
"""DeepSeek-V3 with 2 of its 3 dense layers and 2 of its 58 layers of experts."""

MODELS: dict[str, dict[str, Any]] = {
    "llama-3-8b": CONFIG | _LONG,
    "qwen3-30b-a3b": EXPERTS,
    "gpt-oss-20b": SINKS,
    "qwen3-next-24-layers": QWEN3_NEXT,
    "bamba-9b": BAMBA,
    "deepseek-v3-4-layers": DEEPSEEK_V3,
}

VLLM_OPTIONS: dict[str, dict[str, Any]] = {"qwen3-next-24-layers": {"gdn_prefill_backend": "triton"}}
"""Options of vLLM by model. FlashInfer's kernels for recurrences, its default, are compiled at its first start."""
