"""The rotary embedding of a head, as its configuration states it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from qcompile.errors import UnsupportedError, UsageError
from qcompile.heads.layout import CONFIG
from qcompile.heads.settings import HeadSettings

_ROPE_THETA = 10_000.0
_FIXED = ("default", "linear", "llama3", "yarn")
"""Kinds with frequencies that do not depend on the length of a text."""


@dataclass(frozen=True)
class HeadRotation:
    """`inv_freq` float32 [head_dim / 2], and what multiplies cos and sin."""

    inv_freq: Tensor
    scaling: float


def head_rotation(settings: HeadSettings, head_dim: int) -> HeadRotation:
    """The rotary embedding of a head.

    Raises UnsupportedError for a kind that depends on a text's length, UsageError for settings that are wrong.
    """
    path, config = settings.path, settings.config
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    stated = config.get(name) or {}
    if not isinstance(stated, dict):
        raise settings.wrong(name, stated, "a table of settings")
    given = dict(stated)
    kind = given.pop("type", None) or given.get("rope_type") or "default"
    if kind not in _FIXED:
        raise UnsupportedError(f"draft {path} has rotary embeddings of kind {kind}: of heads, {_FIXED} are compiled")
    theta = HeadSettings(path, given).real("rope_theta", _ROPE_THETA)
    given |= {"rope_type": kind, "rope_theta": settings.real("rope_theta", theta)}
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    try:
        model = LlamaConfig(
            hidden_size=head_dim,
            num_attention_heads=1,
            head_dim=head_dim,
            max_position_embeddings=settings.whole("max_position_embeddings", 2048),
            rope_parameters=given,
        )
        embedding = LlamaRotaryEmbedding(model)
        inv_freq, scaling = embedding.inv_freq.float().clone(), float(embedding.attention_scaling)
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{path / CONFIG}: {name} of kind {kind} lacks a setting or has a wrong one: {error}"
        ) from error
    if not (inv_freq.isfinite().all() and (inv_freq > 0).all() and math.isfinite(scaling)):
        raise settings.wrong(name, stated, "settings that give finite frequencies above 0")
    return HeadRotation(inv_freq, scaling)
