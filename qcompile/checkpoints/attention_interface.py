"""Attention for transformers to run while a model is traced: one qcompile::attention node."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qcompile import ops
from qcompile.errors import UnsupportedError

ATTENTION = "qcompile"


class OwnAttention(UnsupportedError):
    """The model does not let its attention be replaced."""


_HARMLESS = {"position_ids", "use_cache", "cache_position", "output_attentions", "return_dict", "is_causal"}
_HARMLESS |= {"logits_to_keep"}  # of the output head: some models hand all of their options on


class _Mask(Tensor):
    """An empty tensor that stands for a causal mask with a `window`; nothing can be computed from it."""

    window: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__":
            return super().__torch_function__(func, types, args, kwargs)
        raise OwnAttention("model computes with its attention mask in its own way")


def causal_mask(
    length_of: Callable[[Any], int], *, mask_function: Callable[..., Tensor], config: Any, **_: Any
) -> Tensor:
    """The mask that transformers passes on: a placeholder that carries the sliding window, 0 for none.

    `length_of` gives the context length of a configuration. The window is read off `mask_function` itself, over whole
    rows of the longest mask; a function that is not causal, or hides anything but old tokens, raises UnsupportedError.
    """
    length = length_of(config)
    rows = sorted({*range(8), *(length * i // 16 for i in range(1, 16)), length - 1, *_powers(length)})
    with torch.utils._python_dispatch._disable_current_modes():
        keys, zero, window = torch.arange(length), torch.zeros((), dtype=torch.int64), length
        for row in reversed(rows):  # one at a time: for contexts of millions of tokens, all rows would take gigabytes
            seen = mask_function(zero, zero, torch.tensor([[row]]), keys).expand(1, length)[0]
            window = int(seen.sum()) if row == length - 1 else window
            if not torch.equal(seen, (keys <= row) & (keys > row - window)):
                raise UnsupportedError("attention mask is neither causal nor a causal sliding window")
        mask = torch.Tensor._make_subclass(_Mask, torch.empty(0))
    mask.window = 0 if window == length else window
    return mask


def _powers(limit: int) -> list[int]:
    """Powers of two below `limit` and their neighbours, which are usual ends of windows."""
    near = (2**p + d for p, d in itertools.product(range(limit.bit_length()), (-1, 0, 1)))
    return [n for n in near if 0 <= n < limit]


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [B, H, T, D], key and value [B, Hk, T, D] -> [B, T, H, D]."""
    named = ("sliding_window", "softcap", "s_aux", "scaling", "dropout")
    window, softcap, sinks, scaling, dropout = (options.pop(key, None) for key in named)
    unknown = [
        name for name, option in options.items() if name not in _HARMLESS and not (option is None or option is False)
    ]
    if unknown or dropout:
        raise UnsupportedError(f"attention option {(unknown or ['dropout'])[0]} is not supported")
    if options.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise UnsupportedError("attention is not causal")
    if not isinstance(attention_mask, _Mask):
        raise OwnAttention("attention makes its mask in its own way")
    if window not in (None, 0, attention_mask.window) and attention_mask.window:
        raise UnsupportedError(f"attention has a window of {window}, its mask one of {attention_mask.window}")
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))  # [B, T, H, D]
    scale = q.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return ops.op("attention")(q, k, v, scale, attention_mask.window, float(softcap or 0.0), sinks), None
