"""Loops over the experts that some token chose, traced as what they do for each pair of token and choice.

Such a loop asks which tokens chose an expert, computes them with the expert's weights, and adds the results to the
tokens. Its length depends on values, which no trace can have. While `ExpertLoops` is active, the loop runs once, for
all pairs together: a weight of "the expert" becomes the weights of each pair's expert. This computes the same if
each row of the loop's results depends on the row's token alone, so any operator that might mix rows is refused.

A loop that asks for the number of its expert runs for all of them (numbered_experts.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from qcompile.checkpoints.numbered_experts import ASKS, COMPARISONS, ExpertChoice, NumberedLoop, SomeRows
from qcompile.checkpoints.tensor_memory import Zeros, memory
from qcompile.errors import UnsupportedError

ROWWISE = {
    *("mul", "__mul__", "__rmul__", "multiply", "add", "__add__", "__radd__", "sub", "__sub__", "div", "__truediv__"),
    *("silu", "gelu", "relu", "sigmoid", "tanh", "clamp", "square", "__neg__", "neg"),
    *("to", "type", "float", "type_as", "contiguous", "clone", "detach", "dropout"),
}
"""Functions that compute each row of a pair from that row."""
OVER_FEATURES = {"chunk", "split"}
"""Functions that do so along the last dimension."""
_ATTRIBUTES: Any = Tensor
_TRANSPOSES = (_ATTRIBUTES.T.__get__, _ATTRIBUTES.mT.__get__)
_SHAPE = _ATTRIBUTES.shape.__get__
_FACTS = (_ATTRIBUTES.dtype.__get__, _ATTRIBUTES.device.__get__)
PRODUCTS = {"linear", "matmul", "__matmul__", "mm"}


@dataclass(frozen=True)
class _Known:
    """What a tensor means: `kind` (see ExpertLoops), and the choice behind it.

    Of a weight, `source` has the weights of all experts, and `transposed` says whether the loop has transposed it. Of
    rows, `source` are those of their tokens if they are still the same, times `scale` [P, 1] if that is given.
    """

    kind: str
    choice: ExpertChoice
    source: Tensor | None = None
    transposed: bool = False
    scale: Tensor | None = None


class _Experts:
    """What a loop over experts iterates over: the items of `each`."""

    def __init__(self, each: Iterator[Tensor]) -> None:
        self._each = each

    def __iter__(self) -> Iterator[Tensor]:
        return self._each


class ExpertLoops(TorchFunctionMode):
    """Runs loops over chosen experts once, for all pairs, while it is active.

    The kinds of tensors, in the order of such a loop: `mask` [N, k, E] of the choice, `by expert` [E, k, N], `counts`
    [E], `hits`: which experts were chosen, `expert`: the loop's variable, `own` [k, N]: that expert's mask, `slot` and
    `token` of its pairs, `weight` of the pairs' experts, and `rows`: values of the pairs [P, ...].
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[Tensor, _Known]] = {}
        self._replaced: dict[int, tuple[Tensor, Tensor]] = {}
        self._zeros = Zeros()
        self._loop: NumberedLoop | None = None
        self._ended: NumberedLoop | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._ended is not None:
            ended, self._ended = self._ended, None
            self._add_up(ended)
        if self._replaced:
            args, kwargs = tree_map(self._current, (args, kwargs))
        name, loop = getattr(func, "__name__", ""), self._loop
        if loop is not None and loop.left:
            raise UnsupportedError("a loop over experts ends before it has run for all of them")
        if loop is not None and args and (known := self._of(args[0])) and known.kind == "expert":
            if name in ASKS:
                return loop.ask()
            if name in COMPARISONS and len(args) == 2 and type(args[1]) is int:
                return COMPARISONS[name](loop.ask(), args[1])
            if name == "__getitem__" and args[1] == 0:  # the same tensor for every number, as the loop's variable is
                loop.element = (
                    self._note(args[0].unbind(0)[0], "expert", loop.choice) if loop.element is None else loop.element
                )
                return loop.element
        if loop is not None and loop.asked:
            return loop.step(func, name, args, kwargs, lambda: self._run(func, name, args, kwargs))
        return self._run(func, name, args, kwargs)

    def _run(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """The result of a function."""
        if self._loop is not None and name == "__getitem__" and self._loop.is_number(args[1]):
            number = self._of_number(self._loop.choice, args[0])
            if number is not None:
                return number
        if name == "one_hot" and len(args) + len(kwargs) == 2:
            return self._one_hot(func, args, kwargs)
        given = (
            {known.kind for item in tree_flatten((args, kwargs))[0] if (known := self._of(item))} if self._known else ()
        )
        if given:
            return self._inside(func, name, args, kwargs)
        result = func(*args, **kwargs)
        if name in ("zeros", "zeros_like", "new_zeros"):
            self._zeros.add(result)
        return result

    # ---- what tensors mean ---------------------------------------------------------------------

    def _current(self, item: Any) -> Any:
        while id(item) in self._replaced:  # more than once, if several loops have added to it
            item = self._replaced[id(item)][1]
        if isinstance(item, Tensor) and any(memory(item) == memory(old) for old, _ in self._replaced.values()):
            raise UnsupportedError("a loop over experts adds its results to a tensor that is read through another view")
        return item

    def _of(self, item: Any) -> _Known | None:
        return self._known[id(item)][1] if isinstance(item, Tensor) and id(item) in self._known else None

    def _note(self, result: Tensor, kind: str, choice: ExpertChoice) -> Tensor:
        self._known[id(result)] = result, _Known(kind, choice)
        return result

    def _weights(self, source: Tensor, choice: ExpertChoice, transposed: bool = False) -> Tensor:
        """The weights [P, ...] of the pairs' experts, noted as transposed or not: products do that."""
        index = choice.index.reshape(-1)
        if self._loop is not None and self._loop.asked and source.shape[0] < choice.experts:
            index = index.clamp(max=source.shape[0] - 1)  # pairs of experts without weights: their rows are left out
        made = source[index]
        self._known[id(made)] = made, _Known("weight", choice, source, transposed)
        return made

    # ---- the steps of a loop -------------------------------------------------------------------

    def _one_hot(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        result: Tensor = func(*args, **kwargs)
        index, experts = args[0], kwargs.get("num_classes", args[-1])
        if index.dim() == 2 and isinstance(experts, int) and isinstance(index.shape[1], int):
            self._note(result, "mask", ExpertChoice(index, experts))
        return result

    def _inside(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """A function of tensors of a loop."""
        first = self._of(args[0]) if args else None
        if first is not None and first.kind in ("mask", "by expert", "counts", "over none", "hits"):
            result = self._search(func, name, first, args, kwargs)
            if result is not None:
                return result
        if name == "__getitem__" and (item := self._item(args[0], args[1], first)) is not None:
            return item
        known = first or next(k for item in tree_flatten((args, kwargs))[0] if (k := self._of(item)))
        if known.kind == "own" and name == "squeeze" and args[1:] == (0,) and args[0].shape[0] > 1:
            return args[0]
        if known.kind == "token" and name == "numel":
            return SomeRows()
        if name == "where" and len(args) == 1 and known.kind == "own":
            slots = known.choice.index.shape[1]
            pairs = torch.arange(known.choice.index.numel())
            return self._note(pairs % slots, "slot", known.choice), self._note(pairs // slots, "token", known.choice)
        if known.kind in ("mask", "by expert", "counts", "over none"):  # they may be used in other ways
            return func(*args, **kwargs)
        if (
            first is not None
            and first.kind == "weight"
            and (transposed := self._transposed(func, name, first, args)) is not None
        ):
            return transposed
        if name in PRODUCTS and len(args) == 2 and not kwargs:
            return self._product(name, *args)
        if name == "index_add_" and len(args) == 4 and args[1] == 0 and not kwargs:
            return self._sum(args[0], args[2], args[3])
        return self._rowwise(func, name, args, kwargs)

    def _search(self, func: Any, name: str, known: _Known, args: Any, kwargs: Any) -> Any:
        """The experts that some token chose."""
        kind, choice, more = known.kind, known.choice, (*args[1:], *kwargs.values())
        if (kind, name) == ("mask", "permute") and more in ((2, 1, 0), ((2, 1, 0),), ([2, 1, 0],)):
            return self._note(func(*args, **kwargs), "by expert", choice)
        if (kind, name) == ("by expert", "sum") and [sorted(d % 3 for d in dims) for dims in more] == [[1, 2]]:
            return self._note(func(*args, **kwargs), "counts", choice)
        if (kind, name) == ("counts", "greater") or (kind, name) == ("counts", "gt"):
            return self._note(func(*args, **kwargs), "over none", choice) if more == (0,) else None
        if (kind, name) == ("over none", "nonzero"):
            return self._note(torch.zeros(1, 1, dtype=torch.int64), "hits", choice)
        if kind == "hits" and func == _SHAPE:  # modes that look for other loops ask for it
            return func(*args, **kwargs)
        if (kind, name) == ("hits", "unbind"):
            (hit,) = func(*args, **kwargs)
            return _Experts(self._each(self._note(hit, "expert", choice), choice))
        return None

    def _each(self, expert: Tensor, choice: ExpertChoice) -> Iterator[Tensor]:
        """The loop's variable: once, or for each number if the loop asks for it."""
        self._loop = loop = NumberedLoop(choice)
        for _ in loop.numbers():
            try:
                yield expert
            except GeneratorExit:
                loop.left = True
                raise
        self._loop = None
        self._ended = loop if loop.asked else None

    def _add_up(self, loop: NumberedLoop) -> None:
        """The sums of a loop that differs between experts: of each pair, the rows that its expert has computed."""
        choice = loop.choice
        slots = choice.index.shape[1]
        totals: dict[int, tuple[Tensor, Tensor]] = {}
        for experts, sums in loop.outcomes():
            own = torch.tensor([float(expert in experts) for expert in range(choice.experts)])
            mask = own[choice.index.reshape(-1)][:, None]
            for target, rows in sums:
                known = self._known[id(rows)][1]
                if known.source is not None:
                    scale = mask if known.scale is None else known.scale * mask
                    total = known.source * scale.view(-1, slots).sum(1, keepdim=True)
                else:
                    total = (rows * mask).view(-1, slots, rows.shape[-1]).sum(1)
                before = totals.get(id(target))
                totals[id(target)] = target, total if before is None else before[1] + total
        for name, (target, total) in totals.items():
            self._replaced[name] = target, total if name in self._zeros else target + total

    def _of_number(self, choice: ExpertChoice, source: Any) -> Tensor | None:
        """What has the number of the loop's expert: its mask, or its weights."""
        known = self._of(source)
        if known is not None:
            mine = known.kind == "by expert" and known.choice is choice
            return self._note(source.select(0, 0), "own", choice) if mine else None
        if not isinstance(source, Tensor) or source.dim() < 2 or source.shape[0] > choice.experts:
            return None
        return self._weights(source, choice)

    def _item(self, source: Any, where: Any, known: _Known | None) -> Tensor | None:
        """Parts of the choice, and weights and values of its pairs."""
        places = where if isinstance(where, tuple) else (where,)
        kinds = [of.kind if (of := self._of(place)) else place for place in places]
        choice = next((of.choice for place in places if (of := self._of(place))), None)
        if choice is None:
            return None
        if kinds == ["expert"] and known is not None and known.kind == "by expert" and known.choice is choice:
            return self._note(source.select(0, 0), "own", choice)
        if kinds == ["expert"] and known is None and source.dim() > 1 and source.shape[0] <= choice.experts:
            return self._weights(source, choice)
        if kinds == ["token"] and known is None and source.dim() == 2:
            made = source.repeat_interleave(choice.index.shape[1], 0)
            self._known[id(made)] = made, _Known("rows", choice, source)
            return made
        if kinds in (["token", "slot", None], ["token", "slot"]) and source.dim() == 2:
            flat = source.reshape(-1)
            return self._note(flat[:, None] if len(kinds) == 3 else flat, "rows", choice)
        return None

    def _transposed(self, func: Any, name: str, known: _Known, args: Any) -> Tensor | None:
        """The transposed weights of the pairs: they are transposed where they are multiplied."""
        transposes = name in ("t", "numpy_T") or func in _TRANSPOSES
        if not transposes or args[0].dim() != 3 or known.source is None:
            return None
        return self._weights(known.source, known.choice, not known.transposed)

    def _product(self, name: str, x: Any, weight: Any) -> Tensor:
        """Each pair's values times its expert's weights."""
        rows, known = self._of(x), self._of(weight)
        if rows is None or known is None or (rows.kind, known.kind) != ("rows", "weight") or x.dim() != 2:
            raise UnsupportedError(f"a loop over experts multiplies by {name} something else than rows and weights")
        by_rows = known.transposed != (name == "linear")  # weight [N, K]
        y = torch.bmm(weight, x[:, :, None])[:, :, 0] if by_rows else torch.bmm(x[:, None], weight)[:, 0]
        return self._note(y, "rows", rows.choice)

    def _sum(self, target: Tensor, token: Any, rows: Any) -> Tensor:
        """The results of all pairs added to their tokens; later uses of `target` read the sum."""
        known, values = self._of(token), self._of(rows)
        if known is None or values is None or (known.kind, values.kind) != ("token", "rows") or rows.dim() != 2:
            raise UnsupportedError("a loop over experts adds up something else than rows of its tokens")
        if self._loop is not None:
            self._loop.add(target, rows)
            if self._loop.asked:
                return target
        total = rows.view(-1, known.choice.index.shape[1], rows.shape[-1]).sum(1)
        if id(target) not in self._zeros:
            total = target + total
        self._replaced[id(target)] = target, total
        return total

    def _rowwise(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """A function that computes each row of pairs by itself."""
        flat = tree_flatten((args, kwargs))[0]
        known = [of for item in flat if (of := self._of(item))]
        views = name in ("view", "reshape") and len(args[0].shape) == 2 and args[1:] in ((-1, args[0].shape[1]),)
        last = name in OVER_FEATURES and (kwargs.get("dim", args[-1])) in (-1, args[0].dim() - 1)
        if name == "dim" or func in _FACTS:
            return func(*args, **kwargs)
        if any(of.kind != "rows" for of in known) or not (name in ROWWISE or views or last):
            raise UnsupportedError(f"a loop over experts uses {name}, which is not known to compute rows one by one")
        result = func(*args, **kwargs)
        same = self._same_rows(name, args, result) if isinstance(result, Tensor) else None
        for one in result if isinstance(result, list | tuple) else [result]:
            self._known[id(one)] = one, same or _Known("rows", known[0].choice)
        return result

    def _same_rows(self, name: str, args: Any, result: Tensor) -> _Known | None:
        """What is known of rows that are those of their tokens, copied or times a scale; None if they are not."""
        first = self._of(args[0])
        if first is None or first.source is None or result.dtype != first.source.dtype:
            return None
        if name == "to":
            return first
        other = args[1] if name in ("mul", "__mul__") and len(args) == 2 else None
        scales = isinstance(other, Tensor) and other.dim() == 2 and other.shape[1] == 1 and self._of(other) is not None
        return replace(first, scale=other) if scales and first.scale is None else None
