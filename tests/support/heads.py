"""A small model in which the next token mostly follows from the last one, and a draft head that knows that."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from qcompile.heads.layout import CONFIG, WEIGHTS, HeadShape
from qcompile.heads.model import DraftHead

SAMPLE = Path(__file__).parents[2] / "samples" / "pycode-1m"
VOCABULARY, WIDTH, DEPTH = 8192, 64, 4
SHAPE = HeadShape(WIDTH, 96, 4, 4, 16, VOCABULARY, 1024, (1, 2, 3), 1e-6, 10_000.0, 256)
PROPOSED = torch.arange(SHAPE.drafted) * 8 + 3
"""The tokens that the head proposes, and that the model says most of the time."""


def save_target(path: Path) -> None:
    """A Llama of 4 layers with random weights, of which blocks add little, and the samples' tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=96,
        num_hidden_layers=DEPTH,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight *= 5
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 0.03
            layer.mlp.down_proj.weight *= 0.03
        seldom = torch.ones(VOCABULARY, dtype=torch.bool)
        seldom[PROPOSED] = False
        model.lm_head.weight[seldom] *= 0.5
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SAMPLE / name, path / name)


def save_head(target: Path, path: Path) -> None:
    """A head with an attention that puts the last token's embedding in place of most of the features."""
    torch.manual_seed(1)
    head = DraftHead(SHAPE)
    attention = head.midlayer.self_attn
    with torch.no_grad():
        near = torch.randn(WIDTH, WIDTH) / WIDTH**0.5
        for projection, factor in ((attention.q_proj, 3), (attention.k_proj, 3), (attention.v_proj, 1)):
            projection.weight[:, :WIDTH] = factor * near
            projection.weight[:, WIDTH:] *= 0.1
        attention.v_proj.weight[:, WIDTH:] = -near
        attention.o_proj.weight.copy_(torch.linalg.inv(near))
        head.fc.weight *= 2
        head.midlayer.mlp.down_proj.weight *= 0.03
        head.lm_head.weight.copy_(load_file(target / WEIGHTS)["lm_head.weight"][PROPOSED])
    tensors = {name: value.to(torch.bfloat16).contiguous() for name, value in head.state_dict().items()}
    path.mkdir()
    save_file(tensors | {"d2t": PROPOSED - torch.arange(SHAPE.drafted)}, path / WEIGHTS)
    (path / CONFIG).write_text(json.dumps(SHAPE.config()))
