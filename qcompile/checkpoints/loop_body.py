"""The body of a loop over tokens: what it does for one token, recorded function by function."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from qcompile.checkpoints.loop_numbers import TokenNumber, refused, sized
from qcompile.checkpoints.tensor_memory import memory, version

_IN_PLACE = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__imatmul__", "__ipow__"}


_ASKS = {
    *("__get__", "__len__", "size", "dim", "ndimension", "stride", "numel", "nelement", "element_size"),
    *("is_contiguous", "is_floating_point", "is_complex"),
}
"""Functions of the shape and type of a tensor, which do not read its values."""
_FACTS = (torch.dtype, torch.device, torch.Size)
_ATTRIBUTES: Any = Tensor
_TRANSPOSES = {"t": _ATTRIBUTES.T.__get__, "mT": _ATTRIBUTES.mT.__get__}
"""Attributes that transpose, by the names of functions that do the same."""


@dataclass(frozen=True)
class Ref:
    """A reference to a tensor in a body.

    `kind` "own": result `item` of the step `number` of the same token. "before": the same of the token before.
    "outside": the tensor with the id `number`, which was made outside the loop. In a recorder, `kind` is the number of
    the iteration in place of "own" and "before".
    """

    kind: Any
    number: int
    item: int = 0


@dataclass(frozen=True)
class Step:
    """A call of `func` in a body, with Refs in place of tensors.

    With `token`, the call takes the token's part of an outside tensor, its only argument, along the dimension `token`.
    `shapes` are those of its results.
    """

    func: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    shapes: tuple[tuple[Any, ...], ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    token: int | None = None

    @property
    def reads(self) -> list[Ref]:
        """The tensors that the call reads."""
        return [item for item in tree_leaves((self.args, dict(self.kwargs))) if isinstance(item, Ref)]

    def key(self, rename: Callable[[Ref], Any]) -> tuple[Any, ...]:
        """All of the call as a value to compare, with its Refs renamed."""
        leaves, tree = tree_flatten((self.args, dict(self.kwargs)))
        named = tuple(rename(item) if isinstance(item, Ref) else repr(item) for item in leaves)
        return (self.func, self.name, str(tree), named, repr(self.shapes), self.dtypes, self.token)


@dataclass
class Recorder:
    """Runs functions in a loop over `tokens` tokens of `batch` sequences, and records them.

    `zeros` has the ids of tensors that are known to hold zeros. `block` and `name` are as in Body.
    """

    batch: Any
    tokens: Any
    zeros: Container[int]
    block: int | None = None
    name: str = ""
    outside: dict[int, Tensor] = field(default_factory=dict)
    steps: list[list[Step]] = field(default_factory=list)
    _refs: dict[int, tuple[Tensor, Ref]] = field(default_factory=dict)
    _writes: list[dict[int, tuple[Ref, int]]] = field(default_factory=list)

    def begin(self, iteration: int) -> None:
        """The loop begins its iteration number `iteration`.

        A loop over several iterators (zip) calls this for each of them in every iteration.
        """
        if iteration < len(self.steps) - 1:
            raise refused("takes the next token of an iterator that it did not use for the tokens before")
        if iteration == len(self.steps) - 1:
            return
        self.steps.append([])
        self._writes.append({})

    def made(self, item: Any) -> bool:
        """Whether the loop made the tensor `item`."""
        return isinstance(item, Tensor) and id(item) in self._refs

    def in_order(self, parts: Any) -> Ref | None:
        """The result of one token, if `parts` are this result of all iterations in order; else None."""
        refs = [self._refs[id(part)][1] if self.made(part) else None for part in parts]
        if any(ref is None for ref in refs) or [ref.kind for ref in refs if ref] != list(range(len(self.steps))):
            return None
        numbers = {(ref.number, ref.item) for ref in refs if ref}
        return Ref("own", *numbers.pop()) if len(numbers) == 1 else None

    def writes(self) -> dict[int, tuple[Ref, int]]:
        """(the result, dimension of tokens) that each token writes into its part of an outside tensor, by its id."""
        first = self._writes[0]
        if any(writes != first for writes in self._writes):
            raise refused("writes other results for the first token than for others")
        read = {ref.number for steps in self.steps for step in steps for ref in step.reads if ref.kind == "outside"}
        targets = {memory(self.outside[target]) for target in first}
        if any(memory(self.outside[number]) in targets for number in read):
            raise refused("reads a tensor into which it writes")
        return first

    def call(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """The result of func(*args, **kwargs), recorded if it is a tensor or several."""
        if name == "__getitem__" and (taken := self._take(args[0], args[1])) is not None:
            return taken
        if name == "select" and len(args) == 3 and isinstance(args[2], TokenNumber):
            return self.part(args[0], args[1], args[2])
        if name == "__setitem__":
            if self.block:
                raise refused("writes results of blocks into a tensor: concatenate them")
            return self._write(*args)
        if name == "sym_min" and len(args) == 2:  # the end of a block, in torch's own writing of min
            return args[0] if args[0] < args[1] else args[1]
        leaves, tree = tree_flatten((args, kwargs))
        if any(isinstance(leaf, TokenNumber) for leaf in leaves):
            raise refused(f"gives the number of a token to {name}")
        if name in _IN_PLACE or name == "__set__" or (name.endswith("_") and not name.startswith("__")):
            raise refused(f"changes a tensor in place by {name}: use its form that makes a new one")
        name = next((turn for turn, of in _TRANSPOSES.items() if func == of), name)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        versions = [version(tensor) for tensor in tensors]
        with disable_proxy_modes_tracing():  # results have shapes, and no place in the trace
            known = tree_unflatten([sized(leaf, 1) for leaf in leaves], tree) if self.block else (args, kwargs)
            result = func(*known[0], **known[1])
        if versions != [version(tensor) for tensor in tensors]:
            raise refused(f"changes a tensor in place by {name}: use its form that makes a new one")
        made = [result] if isinstance(result, Tensor) else result
        if isinstance(made, (list, tuple)) and made and all(isinstance(one, Tensor) for one in made):
            named = [self._ref(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            given, more = tree_unflatten(named, tree)
            self._record(func, name, given, more, made)
        elif not isinstance(result, _FACTS) and name not in _ASKS:
            raise refused(f"reads values of a tensor by {name}")
        return result

    def _record(self, func: Any, name: str, args: Any, kwargs: Any, made: Sequence[Tensor], token: Any = None) -> None:
        shapes, number = tuple(tuple(one.shape) for one in made), len(self.steps[-1])
        dtypes = tuple(one.dtype for one in made)
        self.steps[-1].append(Step(func, name, tuple(args), dict(kwargs), shapes, dtypes, token))
        for item, one in enumerate(made):
            self._refs[id(one)] = one, Ref(len(self.steps) - 1, number, item)

    def _ref(self, tensor: Tensor) -> Ref:
        if id(tensor) in self._refs:
            return self._refs[id(tensor)][1]
        self.outside[id(tensor)] = tensor
        return Ref("outside", id(tensor))

    # ---- parts of tokens -----------------------------------------------------------------------

    def _take(self, source: Tensor, where: Any) -> Tensor | None:
        """source[where] with the number of the token in `where`; None if it is not."""
        where = where if isinstance(where, tuple) else (where,)
        if not any(_is_place(item) for item in where):
            return None
        dim, at, where = self._dimension(source, where)
        place, keeps = where[at], isinstance(where[at], slice)
        part = self.part(source, dim, place.start if keeps else place, keeps)
        rest = [*where[:at], *([slice(None)] if keeps else []), *where[at + 1 :]]
        if all(item == slice(None) for item in rest):
            return part
        taken: Tensor = self.call(Tensor.__getitem__, "__getitem__", (part, tuple(rest)), {})
        return taken

    def _dimension(self, source: Tensor, where: tuple[Any, ...]) -> tuple[int, int, tuple[Any, ...]]:
        """(dimension of the tokens in `source`, their place in the new `where`, `where` without Ellipsis).

        The new `where` has an item for each dimension, and None for each dimension that the result gets in addition.
        """
        if any(isinstance(item, (Tensor, list, tuple, bool)) for item in where):
            raise refused("takes its part of a tensor and chooses others of its elements by a list or a tensor at once")
        missing = source.dim() - sum(item is not None and item is not Ellipsis for item in where)
        at = next((place for place, item in enumerate(where) if item is Ellipsis), len(where))
        where = (*where[:at], *[slice(None)] * missing, *where[at + 1 :])
        (place,) = [place for place, item in enumerate(where) if _is_place(item)] or [-1]
        return sum(item is not None for item in where[:place]), place, where

    def part(self, source: Tensor, dim: int, place: TokenNumber, keeps: bool = False) -> Tensor:
        """The part of one token of an outside tensor."""
        dim %= source.dim()
        if self.made(source) or repr(source.shape[dim]) != repr(self.tokens):
            raise refused("takes parts of tensors by token along a dimension that is not that of the tokens")
        if place.offset or (self.block and not keeps):
            raise refused("reads other tokens than its own")
        shape = [1 if at == dim else size for at, size in enumerate(source.shape) if keeps or at != dim]
        with disable_proxy_modes_tracing():
            part = source.new_empty(shape)
        func = Tensor.narrow if keeps else Tensor.select
        self._record(func, "part", (self._ref(source),), {}, [part], dim)
        return part

    def _write(self, target: Tensor, where: Any, value: Any) -> None:
        """target[where] = value, for the part of the token in `target`."""
        where = where if isinstance(where, tuple) else (where,)
        whole = any(isinstance(item, TokenNumber) for item in where) and isinstance(value, Tensor) and self.made(value)
        dim, at, where = self._dimension(target, where) if whole else (-1, -1, where)
        rest = [item for place, item in enumerate(where) if place != at]
        if at < 0 or self.made(target) or any(item != slice(None) for item in rest):
            raise refused("writes something else into a tensor than the result of its token")
        shape = [size for place, size in enumerate(target.shape) if place != dim]
        if repr(target.shape[dim]) != repr(self.tokens) or where[at].offset or repr(shape) != repr([*value.shape]):
            raise refused("writes results of other shapes, or to other tokens, into a tensor")
        ref = self._refs[id(value)][1]
        if ref.kind != len(self.steps) - 1 or target.dtype != value.dtype:
            raise refused("writes results of other tokens, or of another type, into a tensor")
        self.outside[id(target)] = target
        self._writes[-1][id(target)] = Ref("own", ref.number, ref.item), dim


def _is_place(item: Any) -> bool:
    """Whether an index is the number of the token, or the slice of this token alone."""
    if isinstance(item, slice) and any(isinstance(bound, TokenNumber) for bound in (item.start, item.stop, item.step)):
        one = isinstance(item.start, TokenNumber) and isinstance(item.stop, TokenNumber) and item.step in (None, 1)
        if not one or item.stop.offset != item.start.offset + (item.start.loop.block or 1):
            raise refused("takes a part of a tensor that is not its token's alone")
        return True
    return isinstance(item, TokenNumber)


@dataclass(frozen=True)
class Body:
    """What a loop does for one token: its steps, with Refs of the kinds "own", "before" and "outside".

    `carried` are the results that a token leaves to the next; before the first token they are 0. For a loop over
    blocks, `block` is the number of tokens of a block; its body is recorded for blocks of one token. `name` says where
    the loop is.
    """

    steps: tuple[Step, ...]
    carried: frozenset[Ref]
    outside: Mapping[int, Tensor]
    batch: Any
    tokens: Any
    block: int | None = None
    name: str = ""

    def shape(self, ref: Ref) -> tuple[Any, ...]:
        """The shape of a tensor in the body."""
        if ref.kind == "outside":
            return tuple(self.outside[ref.number].shape)
        return self.steps[ref.number].shapes[ref.item]

    @classmethod
    def of(cls, recorder: Recorder) -> Body:
        """The body that was recorded. Raises UnsupportedError if it does not treat all tokens alike."""
        first, second, *later = ([_relative(step, at) for step in steps] for at, steps in enumerate(recorder.steps))
        key = [step.key(lambda ref: ref) for step in second]
        if any([step.key(lambda ref: ref) for step in steps] != key for steps in later):
            raise refused("treats tokens differently")
        if len(first) != len(second):
            raise refused("treats the first token differently: let its state start from torch.zeros")
        carried: dict[Ref, Any] = {}
        for one, two in zip(first, second, strict=True):
            _compare(one, two, carried, recorder.zeros)
        sizes = (recorder.batch, recorder.tokens, recorder.block)
        return cls(_merged(second), frozenset(carried), recorder.outside, *sizes, recorder.name)

    def tables(self) -> list[Tensor]:
        """The floating-point tensors made outside the loop that its steps read whole."""
        refs = [ref for step in self.steps if step.token is None for ref in step.reads if ref.kind == "outside"]
        read = [self.outside[number] for number in dict.fromkeys(ref.number for ref in refs)]
        return [tensor for tensor in read if tensor.is_floating_point()]


def _merged(steps: Sequence[Step]) -> tuple[Step, ...]:
    """`steps` with one Ref for the results of equal steps; their numbers stay."""
    first: dict[Any, int] = {}
    same: dict[int, int] = {}
    made = []
    for number, step in enumerate(steps):
        step = _renamed(step, lambda ref: replace(ref, number=same[ref.number]) if ref.kind == "own" else ref)
        same[number] = first.setdefault(step.key(lambda ref: ref), number)
        made.append(step)
    return tuple(made)


def _renamed(step: Step, rename: Callable[[Ref], Ref]) -> Step:
    """`step` with its Refs renamed."""
    leaves, tree = tree_flatten((step.args, dict(step.kwargs)))
    args, kwargs = tree_unflatten([rename(leaf) if isinstance(leaf, Ref) else leaf for leaf in leaves], tree)
    return replace(step, args=args, kwargs=kwargs)


def _relative(step: Step, iteration: int) -> Step:
    """`step` of an iteration with the kinds "own" and "before" of its Refs."""

    def rename(ref: Ref) -> Ref:
        if ref.kind == "outside":
            return ref
        if iteration - ref.kind > 1:
            raise refused("reads results of other tokens than the one before")
        return replace(ref, kind="own" if ref.kind == iteration else "before")

    return _renamed(step, rename)


def _compare(first: Step, later: Step, carried: dict[Ref, Any], zeros: Container[int]) -> None:
    """Require that the step of the first token is that of later tokens, with zeros in place of carried results."""
    ones, _ = tree_flatten((first.args, dict(first.kwargs)))
    others, _ = tree_flatten((later.args, dict(later.kwargs)))
    if first.name != later.name or len(ones) != len(others):
        raise refused(f"treats the first token differently, by {first.name} where later tokens have {later.name}")
    for one, other in zip(ones, others, strict=True):
        if not isinstance(other, Ref) or other.kind != "before":
            if repr(one) != repr(other):  # their shapes differ where a number is the initial state
                raise refused(f"treats the first token differently in {first.name}")
            continue
        initial = one.number if isinstance(one, Ref) and one.kind == "outside" else None
        if initial not in zeros and not (type(one) in (int, float) and one == 0):
            raise refused(f"has a state that {first.name} reads, and that does not start from torch.zeros")
        if carried.setdefault(other, initial) != initial:
            raise refused("has a state with several initial values")
