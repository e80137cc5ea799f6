"""The memory of tensors while a model is traced: what is known to hold zeros, is written to, or is shared."""

from __future__ import annotations

import torch
from torch import Tensor


class Zeros:
    """The ids of tensors of zeros, for as long as nothing is written to them, or to a view of them."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Tensor, int]] = {}

    def add(self, tensor: Tensor) -> None:
        """Note that `tensor` holds zeros now."""
        self._held[id(tensor)] = tensor, version(tensor)

    def __contains__(self, number: object) -> bool:
        held = self._held.get(number) if isinstance(number, int) else None
        return held is not None and version(held[0]) == held[1]


def version(tensor: Tensor) -> int:
    """How often `tensor` and its views have been written to."""
    with torch._C.DisableTorchFunction():  # else a mode would take it for a function that the model calls
        return tensor._version


def memory(tensor: Tensor) -> int:
    """The identity of the memory of `tensor`, which its views share."""
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage()._cdata
