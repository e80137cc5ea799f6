"""Small checkpoints with a module for multi-token prediction, named as in public ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qcompile.heads.layout import WEIGHTS

VOCABULARY = 320
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
_DEEPSEEK = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    **_EXPERTS,
}
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
_DELTA = {
    "num_experts": 4,
    "shared_expert_intermediate_size": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
    **_EXPERTS,
}


@dataclass(frozen=True)
class Published:
    """How a kind of checkpoint names its module: its layer, the norms of embedding and hidden state, fusion, norm.

    `offset` is what the norms of the model add to their stored weights.
    """

    model_type: str
    settings: dict[str, Any]
    layer: str
    names: tuple[str, str, str, str]
    hidden_first: bool = False
    offset: float = 0.0


_NEXT = tuple(f"model.layers.2.{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))
_MTP = tuple(f"mtp.{name}.weight" for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"))
_MIMO = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
KINDS = {
    "glm": Published("glm4_moe", _DEEPSEEK, "model.layers.2.", _NEXT),  # type: ignore[arg-type]
    "deepseek": Published(
        "deepseek_v3",
        _DEEPSEEK | _LATENT | {"num_key_value_heads": 4, "head_dim": 8},
        "model.layers.2.",
        _NEXT,  # type: ignore[arg-type]
    ),
    "qwen": Published("qwen3_next", _DELTA, "mtp.layers.0.", _MTP, offset=1.0),  # type: ignore[arg-type]
    "whole blocks": Published(  # of sizes that GPU kernels take
        "qwen3_next",
        {
            "vocab_size": 128,
            "hidden_size": 128,
            "intermediate_size": 128,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "num_experts": 0,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 64,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "layer_types": ["linear_attention", "full_attention"],
        },
        "mtp.layers.0.",
        _MTP,  # type: ignore[arg-type]
        offset=1.0,
    ),
    "mimo": Published(
        "qwen2",
        {"hidden_size": 48},  # rotations of this width are not symmetric
        "model.mtp_layers.0.",
        tuple(f"model.mtp_layers.0.{name}.weight" for name in _MIMO),  # type: ignore[arg-type]
        hidden_first=True,
    ),
}
MODEL_LAYER = "model.layers.1."


def save(kind: str, path: Path) -> None:
    """A model of two layers in which the next token mostly follows from the last one, and a module that knows that."""
    from transformers import AutoConfig, AutoModelForCausalLM

    published = KINDS[kind]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(published.model_type, **_SIZES | published.settings))
    with torch.no_grad():
        model.model.embed_tokens.weight *= 5
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
                parameter *= 0.05
            elif name.endswith("out_proj.weight"):  # of recurrent states, which tokens must depend on
                parameter *= 0.5
            elif parameter.dim() == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(path)
    tensors = load_file(path / WEIGHTS)
    layer = {name.removeprefix(MODEL_LAYER): value for name, value in tensors.items() if name.startswith(MODEL_LAYER)}
    near = {published.layer + name: value + 0.02 * value.std() * noise(value) for name, value in layer.items()}
    width = model.config.hidden_size
    own = torch.eye(width) + 0.02 * noise(torch.empty(width, width)), 0.05 * noise(torch.empty(width, width))
    fusion = torch.cat(own[::-1] if published.hidden_first else own, 1)
    norms = [1 - published.offset + 0.1 * noise(torch.empty(width)) for _ in range(3)]
    joining = dict(zip(published.names, (*norms[:2], fusion, norms[2]), strict=True))
    if published.names is _NEXT:
        joining |= {"model.layers.2.shared_head.head.weight": tensors["lm_head.weight"].clone()}
        joining |= {"model.layers.2.embed_tokens.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file({name: value.contiguous() for name, value in (tensors | near | joining).items()}, path / WEIGHTS)


def noise(like: Tensor) -> Tensor:
    """Random numbers in the shape of a tensor; the same each time."""
    return torch.randn(like.shape)


class Reference:
    """The module as transformers computes the layer of the model in place of which the module stands.

    The model's own hidden states are those of another copy.
    """

    def __init__(self, kind: str, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.published = KINDS[kind]
        self.stored = {name: value.float() for name, value in load_file(path / WEIGHTS).items()}
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.module = AutoModelForCausalLM.from_pretrained(_renamed(self.published, path), dtype=torch.float32)
        self.module.model.layers[1].register_forward_pre_hook(self._fused, with_kwargs=True)
        self._inputs: Tensor = torch.empty(0)

    def final_states(self, tokens: Tensor) -> Tensor:
        """What the model's output head reads, [B, T, F]."""
        states: Tensor = self.model.model(tokens).last_hidden_state
        return states

    def logits(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Logits [B, T, V] of the module for `hidden` [B, T, F] and the `tokens` [B, T] after them."""
        embedding, before, fusion, _ = (self.stored[name] for name in self.published.names)
        pair = [
            self._norm(self.model.model.embed_tokens(tokens), embedding),
            self._norm(hidden, before),
        ]
        self._inputs = torch.cat(pair[::-1] if self.published.hidden_first else pair, -1) @ fusion.T
        logits: Tensor = self.module(tokens, use_cache=False).logits
        return logits

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        eps = self.model.config.rms_norm_eps
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight + self.published.offset)

    def _fused(self, layer: Any, args: Any, kwargs: Any) -> Any:
        return ((self._inputs, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": self._inputs})


def _renamed(published: Published, path: Path) -> Path:
    """A copy of the checkpoint in which the last layer and the final norm have the module's weights."""
    tensors = load_file(path / WEIGHTS)
    for name in [name for name in tensors if name.startswith(MODEL_LAYER)]:
        tensors[name] = tensors[published.layer + name.removeprefix(MODEL_LAYER)].clone()
    tensors["model.norm.weight"] = tensors[published.names[3]].clone()
    other = path.parent / f"{path.name}-module"
    other.mkdir(exist_ok=True)
    (other / "config.json").write_text((path / "config.json").read_text())
    save_file(tensors, other / WEIGHTS)
    return other
