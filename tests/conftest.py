"""A tiny checkpoint with random weights, and artifacts built from it once per session."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

SAMPLE = Path(__file__).parents[1] / "samples" / "pycode-1m"


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 2 layers and hidden size 64 with the samples' tokenizer; context of 256 tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("models") / "tiny"
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SAMPLE / name, path / name)
    return path


@pytest.fixture(scope="session")
def tiny_artifact(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The tiny model as an artifact of a recipe; built when first asked for."""
    folder = tmp_path_factory.mktemp("artifacts")

    def build(recipe: str) -> Path:
        import qcompile

        out = folder / recipe
        if not out.exists():
            qcompile.build(str(tiny_checkpoint), out, recipe=recipe)
        return out

    return build
