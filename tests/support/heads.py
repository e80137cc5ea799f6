"""A small model in which the next token mostly follows from the last one, and a draft head that knows that."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from qcompile.heads.layout import CONFIG, WEIGHTS, HeadShape
from qcompile.heads.model import DraftHead
from qcompile.heads.target import HeadTarget

SAMPLE = Path(__file__).parents[2] / "samples" / "pycode-1m"
VOCABULARY, WIDTH, DEPTH = 8192, 64, 4
SHAPE = HeadShape(WIDTH, 96, 4, 4, 16, VOCABULARY, 1024, (1, 2, 3), 1e-6, 10_000.0, 256)
WHOLE_BLOCKS = HeadShape(128, 128, 2, 2, 64, 128, 16, (0, 1, 2), 1e-6, 10_000.0, 256)
"""Sizes that GPU kernels take, for a model of 2 layers."""


def proposed(shape: HeadShape) -> torch.Tensor:
    """The tokens that a head of that shape proposes, and that its model says most of the time."""
    return torch.arange(shape.drafted) * (shape.vocabulary // shape.drafted) + 3


PROPOSED = proposed(SHAPE)


def save_target(path: Path, shape: HeadShape = SHAPE, depth: int = DEPTH) -> None:
    """A Llama of `depth` layers with random weights, of which blocks add little, and the samples' tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=depth,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads // 2,
        head_dim=shape.head_dim,
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
        seldom = torch.ones(shape.vocabulary, dtype=torch.bool)
        seldom[proposed(shape)] = False
        model.lm_head.weight[seldom] *= 0.5
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SAMPLE / name, path / name)


def save_head(target: Path, path: Path, shape: HeadShape = SHAPE) -> None:
    """A head with an attention that puts the last token's embedding in place of most of the features."""
    torch.manual_seed(1)
    head, width = DraftHead(shape), shape.hidden
    attention = head.midlayer.self_attn
    with torch.no_grad():
        near = torch.randn(width, width) / width**0.5
        for projection, factor in ((attention.q_proj, 3), (attention.k_proj, 3), (attention.v_proj, 1)):
            projection.weight[:, :width] = factor * near
            projection.weight[:, width:] *= 0.1
        attention.v_proj.weight[:, width:] = -near
        attention.o_proj.weight.copy_(torch.linalg.inv(near))
        head.fc.weight *= 2
        head.midlayer.mlp.down_proj.weight *= 0.03
        head.lm_head.weight.copy_(load_file(target / WEIGHTS)["lm_head.weight"][proposed(shape)])
    tensors = {name: value.to(torch.bfloat16).contiguous() for name, value in head.state_dict().items()}
    path.mkdir()
    save_file(tensors | {"d2t": proposed(shape) - torch.arange(shape.drafted)}, path / WEIGHTS)
    (path / CONFIG).write_text(json.dumps(shape.config()))


def in_torch(target: Path, head: Path, shape: HeadShape = SHAPE) -> tuple[HeadTarget, DraftHead]:
    """A model and its head, opened in torch."""
    net, stored = DraftHead(shape), load_file(head / WEIGHTS)
    net.load_state_dict({name: value.float() for name, value in stored.items() if name != "d2t"})
    return HeadTarget.load(target, "cpu"), net


def torch_shortfalls(
    target: Path, head: Path, shape: HeadShape = SHAPE
) -> Callable[[list[int], list[int]], list[float]]:
    """A function of tokens and of drafts after them: how far the logit of each is below the largest, by torch.

    It is 0 for what the head drafts. Logits have a standard deviation of 1 to 2.
    """
    model, net = in_torch(target, head, shape)
    numbers = {token: number for number, token in enumerate(proposed(shape).tolist())}

    def shortfalls(tokens: list[int], drafts: list[int]) -> list[float]:
        features, _ = model.states(torch.tensor([tokens[:-1]]), shape.layers)
        result = []
        for step, draft in enumerate(drafts):
            embedded = model.embed(torch.tensor([[*tokens[1:], *drafts[:step]]]))
            logits = list(net.unroll(features, embedded, step + 1))[-1][0, -1].detach()
            result.append(float(logits.max() - logits[numbers[draft]]))
        return result

    return shortfalls
