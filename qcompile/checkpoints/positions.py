"""Whether a model computes the same with the positions 0, 1, 2, ... as without positions, as others call it.

A model is compiled with positions as an input. Some models number tokens in another way if they are given none: from 2
on, for example. Both calls are made with token ids and positions that have values, on weights that have none. They
compute the same if they call the same operators in the same order, of the same results, numbers and known values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qcompile.errors import UnsupportedError

TOKENS = 7
"""The number of tokens of the calls, of one sequence."""


@dataclass(frozen=True)
class Calls:
    """What one call of a model computes of its weights, and the error that ended it, or an empty text."""

    made: list[tuple[Any, ...]]
    error: str


def record(call: Callable[[], Any]) -> Calls:
    """The operators that `call` calls with tensors without values."""
    recorder = _Recorder()
    try:
        with recorder, torch.no_grad():
            call()
    except MemoryError:
        raise
    except Exception as error:  # a model's code may raise anything
        return Calls(recorder.made, (str(error).strip().splitlines() or [type(error).__name__])[0])
    return Calls(recorder.made, "")


def require_same(name: str, given: Calls, own: Calls) -> None:
    """Raise UnsupportedError unless the model `name` computes the same with positions (`given`) and without (`own`).

    A model that cannot be called without positions is compared up to its error.
    """
    if given.error:
        raise UnsupportedError(f"{name} cannot be compared with and without positions: {given.error}")
    if own.made != (given.made[: len(own.made)] if own.error else given.made):
        raise UnsupportedError(
            f"{name} computes something else with the positions 0, 1, 2, ... than without positions:"
            " it numbers tokens in a way of its own"
        )


class _Recorder(TorchDispatchMode):
    """Records operators with tensors without values, while it is active: their names, and keys of their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Any, ...]] = []
        self._numbers: dict[int, tuple[Any, int]] = {}  # of tensors without values, by id; they are kept alive

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(issubclass(kind, FakeTensor) for kind in types) and func.namespace != "prim":
            self.made.append((func, self._key(args), self._key(kwargs)))
            for leaf in tree_leaves(result):
                self._key(leaf)
        return result

    def _key(self, value: Any) -> Any:
        """What tells whether an argument is the same in another call."""
        if isinstance(value, FakeTensor):
            return self._numbers.setdefault(id(value), (value, len(self._numbers)))[1]
        if isinstance(value, Tensor):
            data = value.detach().contiguous().reshape(-1)
            return (value.dtype, value.shape, hashlib.sha256(data.view(torch.uint8).numpy().tobytes()).digest())
        if isinstance(value, (tuple, list)):
            return tuple(map(self._key, value))
        if isinstance(value, dict):
            return tuple((key, self._key(item)) for key, item in value.items())
        return repr(value)
