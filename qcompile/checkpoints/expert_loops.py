"""Loops over the experts that some token chose, traced as what they do for each pair of token and choice.

Such a loop asks which tokens chose an expert, computes them with the expert's weights, and adds the results to the
tokens. Its length depends on values, which no trace can have. While `ExpertLoops` is active, the loop runs once, for
all pairs together: a weight of "the expert" becomes the weights of each pair's expert. This computes the same if
each row of the loop's results depends on the row's token alone, so any operator that might mix rows is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

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
_TURNS = (_ATTRIBUTES.T.__get__, _ATTRIBUTES.mT.__get__)
_FACTS = (_ATTRIBUTES.dtype.__get__, _ATTRIBUTES.device.__get__)
PRODUCTS = {"linear", "matmul", "__matmul__", "mm"}


@dataclass(frozen=True)
class _Choice:
    """The choice `index` [N, k] of an expert of `experts`, from which masks are made."""

    index: Tensor
    experts: int


@dataclass(frozen=True)
class _Known:
    """What a tensor means: `kind` (see ExpertLoops), and the choice behind it.

    Of a weight, `source` has the weights of all experts, and `transposed` says whether the loop has transposed it.
    """

    kind: str
    choice: _Choice
    source: Tensor | None = None
    transposed: bool = False


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
        self._zeros: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._replaced:
            args, kwargs = tree_map(self._current, (args, kwargs))
        name = getattr(func, "__name__", "")
        if name == "one_hot" and len(args) + len(kwargs) == 2:
            return self._one_hot(func, args, kwargs)
        given = (
            {known.kind for item in tree_flatten((args, kwargs))[0] if (known := self._of(item))} if self._known else ()
        )
        if given:
            return self._inside(func, name, args, kwargs)
        if name.endswith("_") and not name.startswith("__") and args:  # it changes its operand
            self._zeros.pop(id(args[0]), None)
        result = func(*args, **kwargs)
        if name in ("zeros", "zeros_like", "new_zeros"):
            self._zeros[id(result)] = result
        return result

    # ---- what tensors mean ---------------------------------------------------------------------

    def _current(self, item: Any) -> Any:
        return self._replaced[id(item)][1] if id(item) in self._replaced else item

    def _of(self, item: Any) -> _Known | None:
        return self._known[id(item)][1] if isinstance(item, Tensor) and id(item) in self._known else None

    def _note(self, result: Tensor, kind: str, choice: _Choice) -> Tensor:
        self._known[id(result)] = result, _Known(kind, choice)
        return result

    def _weights(self, source: Tensor, choice: _Choice, transposed: bool = False) -> Tensor:
        """The weights [P, ...] of the pairs' experts, noted as transposed or not: products do that."""
        made = source[choice.index.reshape(-1)]
        self._known[id(made)] = made, _Known("weight", choice, source, transposed)
        return made

    # ---- the steps of a loop -------------------------------------------------------------------

    def _one_hot(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        result: Tensor = func(*args, **kwargs)
        index, experts = args[0], kwargs.get("num_classes", args[-1])
        if index.dim() == 2 and isinstance(experts, int) and isinstance(index.shape[1], int):
            self._note(result, "mask", _Choice(index, experts))
        return result

    def _inside(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """A function of tensors of a loop."""
        first = self._of(args[0]) if args else None
        if first is not None and first.kind in ("mask", "by expert", "counts", "over none", "hits"):
            found = self._search(func, name, first, args, kwargs)
            if found is not None:
                return found
        if name == "__getitem__" and (item := self._item(args[0], args[1], first)) is not None:
            return item
        known = first or next(k for item in tree_flatten((args, kwargs))[0] if (k := self._of(item)))
        if name == "where" and len(args) == 1 and known.kind == "own":
            slots = known.choice.index.shape[1]
            pairs = torch.arange(known.choice.index.numel())
            return self._note(pairs % slots, "slot", known.choice), self._note(pairs // slots, "token", known.choice)
        if known.kind in ("mask", "by expert", "counts", "over none"):  # they may be used in other ways
            return func(*args, **kwargs)
        if (
            first is not None
            and first.kind == "weight"
            and (turned := self._turned(func, name, first, args)) is not None
        ):
            return turned
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
        if (kind, name) == ("hits", "unbind"):
            return [self._note(one, "expert", choice) for one in func(*args, **kwargs)]
        return None

    def _item(self, source: Any, where: Any, known: _Known | None) -> Tensor | None:
        """Parts of the choice, and weights and values of its pairs."""
        if known is not None and known.kind == "expert" and where == 0:
            return self._note(source.unbind(0)[0], "expert", known.choice)
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
            return self._note(source.repeat_interleave(choice.index.shape[1], 0), "rows", choice)
        if kinds in (["token", "slot", None], ["token", "slot"]) and source.dim() == 2:
            flat = source.reshape(-1)
            return self._note(flat[:, None] if len(kinds) == 3 else flat, "rows", choice)
        return None

    def _turned(self, func: Any, name: str, known: _Known, args: Any) -> Tensor | None:
        """The transposed weights of the pairs: they are transposed where they are multiplied."""
        turns = name in ("t", "numpy_T") or func in _TURNS
        if not turns or args[0].dim() != 3 or known.source is None:
            return None
        return self._weights(known.source, known.choice, not known.transposed)

    def _product(self, name: str, x: Any, weight: Any) -> Tensor:
        """Each pair's values times its expert's weights."""
        rows, known = self._of(x), self._of(weight)
        if rows is None or known is None or (rows.kind, known.kind) != ("rows", "weight") or x.dim() != 2:
            raise UnsupportedError(f"a loop over experts multiplies by {name} what are no rows and weights")
        by_rows = known.transposed != (name == "linear")  # weight [N, K]
        y = torch.bmm(weight, x[:, :, None])[:, :, 0] if by_rows else torch.bmm(x[:, None], weight)[:, 0]
        return self._note(y, "rows", rows.choice)

    def _sum(self, target: Tensor, token: Any, rows: Any) -> Tensor:
        """The results of all pairs added to their tokens; later uses of `target` read the sum."""
        known, values = self._of(token), self._of(rows)
        if known is None or values is None or (known.kind, values.kind) != ("token", "rows") or rows.dim() != 2:
            raise UnsupportedError("a loop over experts adds up what are no rows of its tokens")
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
            raise UnsupportedError(f"a loop over experts uses {name}, of which is not known that it treats rows alike")
        result = func(*args, **kwargs)
        for one in result if isinstance(result, list | tuple) else [result]:
            self._note(one, "rows", known[0].choice)
        return result
