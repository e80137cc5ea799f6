"""The rotary embedding of a head, as its configuration states it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from qcompile.errors import UnsupportedError

_ROPE_THETA = 10_000.0
_FIXED = ("default", "linear", "llama3", "yarn")
"""Kinds with frequencies that do not depend on the length of a text."""


@dataclass(frozen=True)
class HeadRotation:
    """`inv_freq` float32 [head_dim / 2], and what multiplies cos and sin."""

    inv_freq: Tensor
    scaling: float


def head_rotation(path: Path, config: Mapping[str, Any], head_dim: int) -> HeadRotation:
    """The rotary embedding of the head in `path`.

    Raises UnsupportedError for a kind that depends on a text's length.
    """
    stated = config.get("rope_parameters") or config.get("rope_scaling") or {}
    given = dict(stated) if isinstance(stated, dict) else {}
    kind = given.pop("type", None) or given.get("rope_type") or "default"
    if kind not in _FIXED:
        raise UnsupportedError(f"draft {path} has rotary embeddings of kind {kind}: of heads, {_FIXED} are compiled")
    given |= {"rope_type": kind, "rope_theta": config.get("rope_theta") or given.get("rope_theta") or _ROPE_THETA}
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    width = head_dim * max(int(config.get("num_attention_heads") or 1), 1)
    settings = LlamaConfig(
        hidden_size=width,
        num_attention_heads=width // head_dim,
        head_dim=head_dim,
        max_position_embeddings=int(config.get("max_position_embeddings") or 2048),
        rope_parameters=given,
    )
    embedding = LlamaRotaryEmbedding(settings)
    return HeadRotation(embedding.inv_freq.float().clone(), float(embedding.attention_scaling))
