"""Architectures of GGUF files: how each names tensors and settings, and what its converter changes in weights.

A file names an architecture; llama.cpp's code of that architecture gives its settings a meaning. Each row here states
this meaning as a configuration of transformers. What follows from the file itself (sizes, biases, a tied head) is in no
row: configuration.py takes it from metadata and tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TABLES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""Tensors of the whole model, and the modules that they are of."""
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_OTHER_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}

COMMON = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
"""Settings below the architecture's prefix, and what transformers calls them."""


@dataclass(frozen=True)
class Architecture:
    """One architecture. `block` are the names of a layer's tensors beside the usual ones, and their modules.

    `settings` are those of COMMON that its code reads beside the sizes; others are refused. `fixed` is what its code
    does without a setting. Its converter stores weights of norms plus one (`norms_plus_one`), and the rows of query and
    key heads with the two halves of a rotation alternating (`alternating`). With `fixed_local_base`, layers with a
    window rotate with a base of their own.
    """

    model_type: str
    block: Mapping[str, str] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    norms_plus_one: bool = False
    alternating: bool = False
    fixed_local_base: bool = False

    @property
    def modules(self) -> dict[str, str]:
        """The names of a layer's tensors, and the modules in the layer that they are of."""
        return _BLOCK | dict(self.block)


_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_MIXTURE = ("expert_count", "expert_used_count", "expert_feed_forward_length")
_MULTIPLIERS = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")

ARCHITECTURES = {
    "llama": Architecture("llama", alternating=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe", _EXPERTS, _MIXTURE, {"norm_topk_prob": True}),
    "gemma": Architecture("gemma", norms_plus_one=True),
    "gemma2": Architecture("gemma2", _NORMS_AFTER, (*_CAPS, "attention.sliding_window"), norms_plus_one=True),
    "gemma3": Architecture(
        "gemma3_text", _NORMS_AFTER, ("attention.sliding_window",), norms_plus_one=True, fixed_local_base=True
    ),
    "phi3": Architecture("phi3", {"ffn_up": "mlp.gate_up_proj"}, ("attention.sliding_window",)),
    "granite": Architecture("granite", settings=_MULTIPLIERS, alternating=True),
    "olmo2": Architecture(
        "olmo2",
        {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
    ),
}
"""The architectures that are read, by their names in files."""

MIXTURES = {"llama": Architecture("mixtral", _OTHER_EXPERTS, _MIXTURE[:2], alternating=True)}
"""What an architecture of dense layers is in a file that states experts."""
