"""LoRA adapters for tests, in PEFT's format, and models with them merged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

PLAIN: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": "all-linear"}


def save_llama(path: Path, **sizes: int) -> Any:
    """Save a random Llama of these sizes, and return it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    ends = {"bos_token_id": 0, "eos_token_id": 0, "max_position_embeddings": 512}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{"vocab_size": 257, **ends, **sizes}, initializer_range=0.2))
    model.save_pretrained(path)
    return model


def made(*shape: int, seed: int = 0) -> Tensor:
    """Random numbers of about 0.1."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 10


def save(path: Path, tensors: Mapping[str, Tensor], **config: Any) -> Path:
    """An adapter's folder, its tensors by names after PEFT's prefix."""
    path.mkdir(parents=True)
    (path / "adapter_config.json").write_text(json.dumps(PLAIN | config))
    named = {f"base_model.model.{name}": value.contiguous() for name, value in tensors.items()}
    save_file(named, path / "adapter_model.safetensors")
    return path


def pair(module: str, outputs: int, inputs: int, rank: int = 4, seed: int = 1) -> dict[str, Tensor]:
    """A and B of a module."""
    return {
        f"{module}.lora_A.weight": made(rank, inputs, seed=seed),
        f"{module}.lora_B.weight": made(outputs, rank, seed=seed + 1),
    }


def product(tensors: Mapping[str, Tensor], module: str) -> Tensor:
    """B A in float64."""
    return tensors[f"{module}.lora_B.weight"].double() @ tensors[f"{module}.lora_A.weight"].double()


def linears(model: Any, names: str = "") -> dict[str, tuple[int, int]]:
    """Paths and shapes [N, K] of a transformers model's linears but the head, with names that end in one of `names`
    (by default all)."""
    result = {
        path: tuple(module.weight.shape)
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    wanted = tuple(names.split())
    return {
        path: shape for path, shape in result.items() if path != "lm_head" and (not wanted or path.endswith(wanted))
    }


def adapter_of(model: Any, names: str = "", rank: int = 4, seed: int = 1) -> dict[str, Tensor]:
    """The tensors of an adapter for these linears of a model."""
    tensors: dict[str, Tensor] = {}
    for number, (path, shape) in enumerate(linears(model, names).items()):
        tensors |= pair(path, *shape, rank, seed + 10 * number)
    return tensors


def merged_logits(checkpoint: Path, tensors: Mapping[str, Tensor], tokens: Tensor, scale: float = 1.5) -> Tensor:
    """transformers' logits of a checkpoint after an adapter is added to its weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        for module in {name.partition(".lora_")[0] for name in tensors}:
            model.get_submodule(module).weight += (scale * product(tensors, module)).float()
        logits: Tensor = model(tokens).logits
    return logits
