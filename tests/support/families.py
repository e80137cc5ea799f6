"""Settings of small models of transformers' families, and how such a model is saved with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL: dict[str, Any] = {"vocab_size": 97, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
}

LATENT: dict[str, Any] = {
    **{"num_key_value_heads": 4, "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 16},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12},
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32},
        **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.7},
    },
}


def save(kind: str, settings: dict[str, Any], path: Path) -> torch.nn.Module:
    """A random model of `kind` saved at `path`, with random biases, norms and stored buffers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    # Some versions apply soft caps only in their eager attention.
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings), **options).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            flat = parameter.dim() < 2
            parameter.normal_(0.5 if flat else 0.0, 0.3 if flat else parameter.shape[-1] ** -0.5)
        for name, buffer in module.named_buffers():
            if name in module.state_dict() and buffer.dim():  # for example biases of routers
                buffer.normal_(0.0, 0.3)
    module.save_pretrained(path)
    return module
