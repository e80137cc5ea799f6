"""Masks that transformers asks for while a model is traced: proved to be causal, by window or by chunk.

A mask function may depend on tensors that a model makes of its inputs, such as the number of padding tokens. A trace
has no numbers for these, so the model is then rehearsed with numbers first, and the trace takes what was proved there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from qcompile.checkpoints.selected_keys import ranked
from qcompile.errors import OwnAttention, UnsupportedError


class UnknownMask(UnsupportedError):
    """A mask depends on the inputs, of which a trace has no numbers."""


class ShortTable(UnsupportedError):
    """A mask reads a table with a row for each token, and the passes had fewer tokens than the context."""


class Shown(NamedTuple):
    """What a causal mask shows: the last `window` tokens, and those of a query's own `chunk`; 0: all.

    A window below 0 hides all tokens. Models make such a mask for layers that they do not have.
    """

    window: int
    chunk: int


@dataclass
class Rehearsal:
    """What the masks of one forward pass show, in the order in which the model asks for them."""

    masks: list[Shown] = field(default_factory=list)
    tokens: int | None = None  # of the pass, if masks have rows for no more
    known: bool = False
    place: int = 0

    def begin(self) -> None:
        """A forward pass begins."""
        self.place = 0

    def next(self) -> Shown:
        """What the next mask of a pass shows, in a trace after the rehearsal."""
        if self.place == len(self.masks):
            raise UnsupportedError("model asks for other attention masks each time it runs")
        self.place += 1
        return self.masks[self.place - 1]


_rehearsals: list[Rehearsal] = []
"""The rehearsal of the model that is being traced, if there is one, is the last."""


@contextmanager
def rehearsed(passes: Iterable[tuple[int | None, Callable[[], Any]]]) -> Iterator[None]:
    """Traces in the context take masks from `passes`, forward passes with numbers, which must agree in their masks.

    With the number of tokens of a pass, its masks are proved for that number; else for the model's context.
    """
    rehearsal, every = Rehearsal(), []
    _rehearsals.append(rehearsal)
    try:
        for tokens, run in passes:
            rehearsal.masks, rehearsal.tokens = [], tokens
            run()
            every.append(rehearsal.masks)
        if any(masks != every[0] for masks in every):
            raise UnsupportedError("attention mask depends on the number of sequences or tokens")
        rehearsal.known = True
        yield
    finally:
        _rehearsals.pop()


@contextmanager
def shortened(tokens: int) -> Iterator[None]:
    """Masks are proved for `tokens` tokens in the context, which does for runs of so few that only compare calls."""
    _rehearsals.append(Rehearsal(tokens=tokens))
    try:
        yield
    finally:
        _rehearsals.pop()


def begin() -> None:
    """A forward pass of the model that is being traced begins."""
    if _rehearsals:
        _rehearsals[-1].begin()


_OF_ALL_HEADS = (slice(None), 0, slice(None), slice(None))
"""The index of a mask [B, 1, Q, S] that gives a mask [B, Q, S]."""


class CausalMask(Tensor):
    """An empty tensor that stands for a causal mask and says what it shows; nothing can be computed from it."""

    shown: Shown

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return super().__torch_function__(func, types, args, kwargs)
        if name in ("__getitem__", "select") and args[1:] == (_OF_ALL_HEADS,):
            return args[0]
        if name in ("add", "__add__") and len(args) == 2 and not kwargs and not isinstance(args[0], CausalMask):
            return ranked(args[0])
        raise OwnAttention("model computes with its attention mask in its own way")


def causal_mask(
    length_of: Callable[[Any], int], *, mask_function: Callable[..., Tensor], config: Any, **_: Any
) -> Tensor:
    """The mask that transformers passes on: a placeholder that says what it shows.

    `length_of` gives the context length of a configuration. What is shown is read off `mask_function` itself, over
    whole rows of the longest mask; a function that is not causal, or hides anything but tokens before a window or
    before the query's chunk, raises UnsupportedError; one that depends on inputs without numbers UnknownMask.
    """
    rehearsal = _rehearsals[-1] if _rehearsals else Rehearsal()
    if rehearsal.known:
        shown = rehearsal.next()
    else:
        with torch.utils._python_dispatch._disable_current_modes():
            shown = _shown(mask_function, rehearsal.tokens or length_of(config))
        rehearsal.masks.append(shown)
    with torch.utils._python_dispatch._disable_current_modes():
        mask = torch.Tensor._make_subclass(CausalMask, torch.empty(0))
    mask.shown = shown
    return mask


def _shown(mask_function: Callable[..., Tensor], length: int) -> Shown:
    """What a mask function shows, proved over whole rows of `length` keys."""
    keys, zero = torch.arange(length), torch.zeros((), dtype=torch.int64)

    def row(place: int) -> Tensor:
        # One at a time: for contexts of millions of tokens, all rows would take gigabytes.
        try:
            seen = mask_function(zero, zero, torch.tensor([[place]]), keys)
        except IndexError as error:  # it reads a table with a row for each token of a shorter sequence
            raise ShortTable("attention mask depends on tensors that the model makes for each token") from error
        if isinstance(seen, FakeTensor):
            raise UnknownMask("attention mask depends on the inputs")
        return seen.expand(1, length)[0]

    last = row(length - 1)
    window = int(last.sum())
    if not window:
        return Shown(-1, 0)
    chunk = int(row(length - window - 1).sum()) if window < length else length
    rows = {*range(min(8, length)), *(length * i // 16 for i in range(1, 16)), length - 1, *_powers(length)}
    step = chunk * max(1, length // (16 * chunk)) if chunk else length
    edges = {at + d for at in range(0, length, step) for d in (-1, 0, 1)}
    for shown in (Shown(window % length, 0), Shown(0, chunk % length)):
        places = sorted(rows | {at for at in edges if shown.chunk and 0 <= at < length}, reverse=True)
        if all(torch.equal(row(place), _visible(place, keys, shown)) for place in places):
            return shown
    raise UnsupportedError("attention mask is neither causal nor a causal window, sliding or of chunks")


def _visible(place: int, keys: Tensor, shown: Shown) -> Tensor:
    """Which of `keys` a mask shows to the query at `place`."""
    first = max(place - shown.window + 1 if shown.window else 0, place - place % shown.chunk if shown.chunk else 0)
    return (keys <= place) & (keys >= first)


def _powers(limit: int) -> list[int]:
    """Powers of two below `limit` and their neighbours, which are usual ends of windows."""
    near = (2**p + d for p, d in itertools.product(range(limit.bit_length()), (-1, 0, 1)))
    return [n for n in near if 0 <= n < limit]
