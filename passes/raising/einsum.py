"""Handlers of einsum: products with weights, which are linears, and of positions with frequencies."""

from __future__ import annotations

import math

from torch import fx

from qcompile.passes.raising import values
from qcompile.passes.raising.aten import handles, linear_of
from qcompile.passes.raising.nodes import Arguments
from qcompile.passes.raising.positions import HANDLERS
from qcompile.passes.raising.raiser import LENGTHS, Known, Raiser, Weight
from qcompile.passes.raising.values import Value

__all__ = ["HANDLERS"]


@handles("einsum")
def _einsum(r: Raiser, node: fx.Node, a: Arguments) -> Known:
    """Products of two tensors: letters that the output lacks are summed over."""
    inputs, arrow, output = a.equation.replace(" ", "").partition("->")
    spelled = inputs.split(",")
    if not arrow or len(spelled) != 2:
        return None
    found = [_spelled_out(one, t.meta["val"].dim()) for one, t in zip(spelled, a.tensors, strict=True)]
    output = _spelled_out(output, node.meta["val"].dim())
    if any(len(set(letters)) < len(letters) for letters in (*found, output)):
        return None
    first, second = zip(a.tensors, found, strict=True)
    for (x, own), (weight, others) in ((first, second), (second, first)):
        known = r.known.get(x)
        if isinstance(known, Value) and known.base is not None and isinstance(r.known.get(weight), Weight):
            return _product(r, node, (known, own, r.shape(x)), (weight, others), output)
    return _outer(r, first, second, output)


def _spelled_out(letters: str, rank: int) -> str:
    """Replace `...` in the subscripts of a tensor of `rank` dimensions by digits, which equations cannot contain."""
    missing = rank - len(letters.replace("...", ""))
    return letters.replace("...", "".join(str(missing - place) for place in range(missing)))


def _outer(r: Raiser, first: tuple[fx.Node, str], second: tuple[fx.Node, str], output: str) -> Known:
    """No letter is summed over: many models multiply positions by frequencies this way."""
    left, right = r.value(first[0]), r.value(second[0])
    if output != first[1] + second[1] or left is None or right is None:
        return None
    for _ in second[1]:
        left = values.unsqueeze(left, len(left.dims))
    return values.multiply(left, right)


def _product(
    r: Raiser, node: fx.Node, x: tuple[Value, str, list[int]], weight: tuple[fx.Node, str], output: str
) -> Known:
    """A linear that contracts the letters of both `x` (value, letters, sizes) and `weight` that `output` lacks."""
    value, own, shape = x
    summed = [letter for letter in own if letter in weight[1] and letter not in output]
    kept = [letter for letter in own if letter not in summed]
    free = [letter for letter in output if letter not in own]
    if not summed or sorted(weight[1]) != sorted(summed + free) or sorted(output) != sorted(kept + free):
        return None
    sizes = dict(zip(own, shape, strict=True)) | dict(zip(output, r.shape(node), strict=True))
    if [sizes[letter] for letter in weight[1]] != r.shape(weight[0]):  # broadcast over a letter
        return None
    value = values.permute(value, [own.index(letter) for letter in kept + summed])
    joined = values.reshape(value, [*(sizes[one] for one in kept), math.prod(sizes[one] for one in summed)], LENGTHS)
    if joined is None:
        return None
    order = [weight[1].index(letter) for letter in free + summed]
    matrix = r.product_rows(weight[0], order, math.prod(sizes[one] for one in free))
    made = values.reshape(linear_of(r, node, joined, matrix), [sizes[one] for one in kept + free], LENGTHS)
    return made and values.permute(made, [(kept + free).index(letter) for letter in output])
