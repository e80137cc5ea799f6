"""Attention for transformers to run while a model is traced: one qcompile::attention node."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from qcompile import ops
from qcompile.checkpoints.attention_masks import CausalMask
from qcompile.checkpoints.selected_keys import Selected
from qcompile.errors import OwnAttention, UnsupportedError

ATTENTION = "qcompile"

_HARMLESS = {"position_ids", "use_cache", "cache_position", "output_attentions", "return_dict", "is_causal"}
_HARMLESS |= {"logits_to_keep"}  # of the output head: some models hand all of their options on


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [B, H, T, D], key and value [B, Hk, T, D] -> [B, T, H, D]."""
    named = ("sliding_window", "softcap", "s_aux", "scaling", "dropout", "indices")
    window, softcap, sinks, scaling, dropout, selected = (options.pop(key, None) for key in named)
    unknown = [
        name for name, option in options.items() if name not in _HARMLESS and not (option is None or option is False)
    ]
    if selected is not None and not isinstance(selected, Selected):
        unknown.append("indices")
    if unknown or dropout:
        raise UnsupportedError(f"attention option {(unknown or ['dropout'])[0]} is not supported")
    if options.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise UnsupportedError("attention is not causal")
    if not isinstance(attention_mask, CausalMask):
        raise OwnAttention("attention makes its mask in its own way")
    shown = attention_mask.shown
    if shown.window < 0:
        raise UnsupportedError("attention mask hides all tokens")
    if window not in (None, 0, shown.window) and shown.window:
        raise UnsupportedError(f"attention has a window of {window}, its mask one of {shown.window}")
    if selected is not None:
        query = ops.op("within")(query, selected.bound)
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))  # [B, T, H, D]
    scale = q.shape[-1] ** -0.5 if scaling is None else float(scaling)
    more = [None, None, shown.chunk] if shown.chunk else []
    return ops.op("attention")(q, k, v, scale, shown.window, float(softcap or 0.0), sinks, *more), None
