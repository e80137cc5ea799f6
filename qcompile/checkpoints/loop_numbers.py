"""Numbers in a loop over tokens that are not known: of the token, of its block, and of tokens in the block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from qcompile.errors import UnsupportedError

INSTEAD = "call torch.ops.qcompile.linear_recurrence instead of the loop"


class LoopError(UnsupportedError):
    """A loop over tokens cannot be compiled; the message lacks the name of the loop."""


def refused(reason: str) -> LoopError:
    """The error that a loop over tokens cannot be compiled for `reason`."""
    return LoopError(f"{reason}; {INSTEAD}")


class Unknown:
    """A number of which nothing may be computed but what a subclass defines. `loop` is the recorder of the loop."""

    def __init__(self, loop: Any) -> None:
        self.loop = loop

    def _refuse(self, *_: Any) -> NoReturn:
        raise refused("computes with the number of a token, or treats tokens differently by it")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __index__ = __int__ = __float__ = _refuse
    __add__ = __radd__ = __sub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = __rsub__ = __neg__ = _refuse
    __truediv__ = _refuse
    __hash__ = object.__hash__


class TokenNumber(Unknown):
    """The number of a token in a loop over all tokens, plus `offset`. It selects the token's part of a tensor.

    In a loop over blocks, it is the first token of a block; with the length of a block as `offset`, the end of the
    block, which is no later than that of all tokens.
    """

    def __init__(self, loop: Any, offset: int = 0) -> None:
        super().__init__(loop)
        self.offset = offset

    def __add__(self, number: Any) -> TokenNumber:  # type: ignore[override]
        return TokenNumber(self.loop, self.offset + number) if type(number) is int else self._refuse()

    __radd__ = __add__  # type: ignore[assignment]

    def __sub__(self, number: Any) -> Any:
        if isinstance(number, TokenNumber) and self.is_end() and number.offset == 0:
            return BlockSize(self.loop)
        return self + -number if type(number) is int else self._refuse()

    def is_end(self) -> bool:
        """Whether this is the end of a block."""
        return self.loop.block is not None and self.offset == self.loop.block

    def __lt__(self, other: Any) -> bool:  # type: ignore[override]
        return True if self.is_end() and repr(other) == repr(self.loop.tokens) else self._refuse()

    def __gt__(self, other: Any) -> bool:  # type: ignore[override]
        return False if self.is_end() and repr(other) == repr(self.loop.tokens) else self._refuse()


class BlockNumber(Unknown):
    """The number of a block. Times the length of blocks, it is the first token of the block."""

    def __mul__(self, number: Any) -> TokenNumber:  # type: ignore[override]
        return TokenNumber(self.loop) if type(number) is int and number == self.loop.block else self._refuse()

    __rmul__ = __mul__  # type: ignore[assignment]


@dataclass(frozen=True)
class BlockSize:
    """The number of tokens in a block, times `sign`. It bounds slices and multiplies tensors."""

    loop: Any
    sign: int = 1

    def __repr__(self) -> str:
        return f"BlockSize({self.sign})"

    def __neg__(self) -> BlockSize:
        return BlockSize(self.loop, -self.sign)

    def __mul__(self, other: Any) -> Any:
        if not isinstance(other, Tensor):
            raise refused("computes with the number of tokens of a block")
        return self.loop.call(torch.mul, "mul", (other, self), {})

    __rmul__ = __mul__


def sized(item: Any, tokens: int) -> Any:
    """`item` with `tokens` for the number of tokens in a block, also within slices."""
    if isinstance(item, slice):
        return slice(*(sized(bound, tokens) for bound in (item.start, item.stop, item.step)))
    return item.sign * tokens if isinstance(item, BlockSize) else item
