"""Keys that a model ranks and selects for sparse attention: all of them, as long as there are no more than it selects.

A model adds the causal mask to its scores of the keys, and keeps as many as the smaller of two numbers: how many it
selects, and how many there are. Where the second is never larger, sparse attention is dense attention. The placeholders
here stand for the scores and for the selection while a model is traced; nothing else can be computed from them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from qcompile.errors import OwnAttention, UnsupportedError


class AllKeys(int):
    """The number of keys, below `bound`: the smallest number that it was compared with, and found to be below."""

    bound: int | None = None

    def _is_below(self, other: object) -> bool:
        if type(other) is not int:
            raise UnsupportedError("model compares its number of keys with something other than a number")
        self.bound = other if self.bound is None else min(self.bound, other)
        return True

    __lt__ = __le__ = _is_below

    def __gt__(self, other: object) -> bool:
        return not self._is_below(other)

    __ge__ = __gt__
    __eq__ = object.__eq__
    __hash__ = object.__hash__


class Selected:
    """All keys of a query, in some order, as long as there are no more than `bound`."""

    def __init__(self, bound: int) -> None:
        self.bound = bound

    def to(self, *_: Any, **__: Any) -> Selected:
        """The selection itself: its values have no dtype that matters."""
        return self

    long = int = contiguous = to


class Ranked(Tensor):
    """An empty tensor that stands for the scores of all keys that a query sees, minus infinity at all others."""

    lengths: tuple[Any, ...]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        scores, kwargs = args[0], kwargs or {}
        if func == Tensor.shape.__get__:  # type: ignore[attr-defined]
            return scores.lengths
        if getattr(func, "__name__", "") == "topk" and isinstance(scores, Ranked):
            given = dict(zip(("k", "dim", "largest"), args[1:], strict=False)) | kwargs
            count, last = given["k"], given.get("dim", -1) in (-1, len(scores.lengths) - 1)
            if last and given.get("largest", True) and count is scores.lengths[-1] and count.bound is not None:
                return SimpleNamespace(indices=Selected(count.bound))
        raise OwnAttention("model selects keys in another way than the best of all that a query sees")


def ranked(scores: Tensor) -> Ranked:
    """The placeholder for `scores` [..., Q, S] of keys to which a causal mask has been added."""
    with torch.utils._python_dispatch._disable_current_modes():
        made = torch.Tensor._make_subclass(Ranked, torch.empty(0))
    made.lengths = (*scores.shape[:-1], AllKeys(1))
    return made
