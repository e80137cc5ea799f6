"""Rules for products with weights: linear, addmm, matmul and einsum become qcompile::linear."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import fx

from qcompile.passes.raising import values
from qcompile.passes.raising.builder import Builder, feature_sizes
from qcompile.passes.raising.concatenation import concatenated
from qcompile.passes.raising.facts import LENGTHS, Constant, Facts, Known, Spread
from qcompile.passes.raising.nodes import Arguments, unsupported
from qcompile.passes.raising.values import Value, identity


def linear(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """aten.linear with a weight [N, K]."""
    if not isinstance(facts.known.get(a.weight), Constant):
        return None
    return _linear(facts, build, node, a.input, build.weight(a.weight), a.bias)


def addmm(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """bias + x @ weight [K, N], without factors."""
    if a.alpha not in (None, 1) or a.beta not in (None, 1) or not isinstance(facts.known.get(a.mat2), Constant):
        return None
    return _linear(facts, build, node, a.mat1, build.transposed(a.mat2), a.input_)


def matmul(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """x @ weight [K, N], also where the weight is repeated over the batch."""
    left, right = a.positional[:2]
    if isinstance(facts.known.get(left), Constant):
        return _linear_of_columns(facts, build, node, left, right)
    source, known = facts.known.get(left), facts.known.get(right)
    if not isinstance(source, Value) or source.base is None or not isinstance(known, (Constant, Spread)):
        return None
    matrix = known.weight if isinstance(known, Spread) else right
    if matrix.meta["val"].dim() != 2:
        return _linear_of_heads(facts, build, node, source, matrix)
    return _linear(facts, build, node, left, build.transposed(matrix), None)


def baddbmm(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """bias [H, 1, N] + x [H, .., K] @ weight [H, K, N], without factors: a linear for each head."""
    value = facts.known.get(a.batch1)
    weights = all(isinstance(facts.known.get(item), Constant) for item in (a.input_, a.batch2))
    if a.alpha not in (None, 1) or a.beta not in (None, 1) or not weights or not isinstance(value, Value):
        return None
    shape = a.batch2.meta["val"].shape
    if tuple(a.input_.meta["val"].shape) != (shape[0], 1, shape[2]):
        return None
    return _linear_of_heads(facts, build, node, value, a.batch2, a.input_)


def _linear_of_heads(
    facts: Facts, build: Builder, node: fx.Node, value: Value, weight: fx.Node, bias: fx.Node | None = None
) -> Known:
    """x [.., H, N, K] @ weight [H, K, M], and a bias [H, 1, M] or None: a linear for each head."""
    rank, shape = len(value.dims), weight.meta["val"].shape
    if len(shape) != 3 or rank < 3 or value.base is None or (value.dims[rank - 3] != "F" and shape[0] > 1):
        return None
    products = []
    for head in range(shape[0]):
        one = values.select(value, rank - 3, head)
        if one is None:
            return None
        made = _linear_of(facts, build, node, one, build.head_matrix(weight, head), None)
        if bias is not None:
            made = _with_bias(build, made, build.head_vector(bias, head))
        products.append(values.unsqueeze(made, rank - 3))
    return concatenated(build, products, rank - 3)


def _with_bias(build: Builder, product: Value, bias: fx.Node) -> Value:
    """The linear `product`, with all its features, plus a raised bias."""
    assert product.base is not None
    x, weight, *_ = product.base.args
    return Value(build.call("linear", x, weight, bias), product.dims, product.terms)


def _linear_of_columns(facts: Facts, build: Builder, node: fx.Node, weight: fx.Node, source: fx.Node) -> Known:
    """weight [N, K] @ x [.., K, T]: a linear of the transposed x, transposed back.

    With weights [H, 1, N, K] and x [H, B, K, T], a linear for each head.
    """
    value = facts.known.get(source)
    if not isinstance(value, Value) or value.base is None or len(value.dims) < 2:
        return None
    rank, shape = len(value.dims), weight.meta["val"].shape
    heads = shape[0] if len(shape) == rank == 4 and shape[1] == 1 and value.dims[0] == "F" else 0
    if not heads and len(shape) != 2:
        return None
    swapped = [*range(rank - 2), -1, -2]
    value = values.permute(value, swapped)
    if not heads:
        return values.permute(_linear_of(facts, build, node, value, build.weight(weight)), swapped)
    inputs = [one for head in range(heads) if (one := values.select(value, 0, head)) is not None]
    products = [_linear_of(facts, build, node, one, build.member(weight, head)) for head, one in enumerate(inputs)]
    joined = concatenated(build, [values.unsqueeze(product, 0) for product in products], 0)
    return joined and values.permute(joined, swapped)


def _linear(
    facts: Facts, build: Builder, node: fx.Node, source: fx.Node, weight: fx.Node, bias: fx.Node | None
) -> Value:
    return _linear_of(facts, build, node, facts.require(source, f"linear {node}"), weight, bias)


def _linear_of(
    facts: Facts, build: Builder, node: fx.Node, value: Value, weight: fx.Node, bias: fx.Node | None = None
) -> Value:
    """qcompile::linear of `value` with the raised weight `weight` [N, K] and the constant `bias` [N].

    Raises UnsupportedError naming `node` unless the last dimension of `value` holds all its features.
    """
    if value.base is None or value.dims[-1] != "F" or any("F" in dim for dim in value.dims[:-1]):
        raise unsupported(node, "is a linear over other dimensions than the features of a token")
    if bias is not None and not isinstance(facts.known.get(bias), Constant):
        raise unsupported(node, "has a bias that is not a weight")
    if bias is not None and bias.meta["val"].numel() != weight.meta["val"].shape[0]:
        raise unsupported(node, "has one bias for several features")
    extra = () if bias is None else (build.vector(bias),)
    made = build.call("linear", build.emit(value, value.sizes, node), weight, *extra)
    return identity(made, value.dims, feature_sizes(made))


# ---- einsum --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spelled:
    """An operand of einsum with its subscripts, one letter for each dimension."""

    node: fx.Node
    letters: str


def einsum(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """Products of two tensors: a linear with a weight, or an outer product of functions of the position."""
    inputs, arrow, output = a.equation.replace(" ", "").partition("->")
    spelled = inputs.split(",")
    if not arrow or len(spelled) != 2:
        return None
    first, second = (Spelled(t, _letters(one, t)) for one, t in zip(spelled, a.tensors, strict=True))
    output = _letters(output, node)
    if any(len(set(letters)) < len(letters) for letters in (first.letters, second.letters, output)):
        return None
    for x, weight in ((first, second), (second, first)):
        known = facts.known.get(x.node)
        if isinstance(known, Value) and known.base is not None and isinstance(facts.known.get(weight.node), Constant):
            return _contraction(facts, build, node, x, weight, output)
    left, right = facts.value(first.node), facts.value(second.node)
    if output != first.letters + second.letters or left is None or right is None:
        return None
    for _ in second.letters:
        left = values.unsqueeze(left, len(left.dims))
    return values.multiply(left, right)


def _letters(subscripts: str, tensor: fx.Node) -> str:
    """`subscripts` of `tensor` with `...` replaced by digits, which equations cannot contain."""
    missing = tensor.meta["val"].dim() - len(subscripts.replace("...", ""))
    return subscripts.replace("...", "".join(str(missing - place) for place in range(missing)))


def _contraction(facts: Facts, build: Builder, node: fx.Node, x: Spelled, weight: Spelled, output: str) -> Known:
    """A linear that sums over the letters of both `x` and `weight` that `output` lacks."""
    value = facts.require(x.node, f"einsum {node}")
    summed = [letter for letter in x.letters if letter in weight.letters and letter not in output]
    kept = [letter for letter in x.letters if letter not in summed]
    free = [letter for letter in output if letter not in x.letters]
    if not summed or sorted(weight.letters) != sorted(summed + free) or sorted(output) != sorted(kept + free):
        return None
    sizes = dict(zip(x.letters, facts.shape(x.node), strict=True)) | dict(zip(output, facts.shape(node), strict=True))
    if [sizes[letter] for letter in weight.letters] != facts.shape(weight.node):  # broadcast over a letter
        return None
    value = values.permute(value, [x.letters.index(letter) for letter in kept + summed])
    joined = values.reshape(value, [*(sizes[one] for one in kept), math.prod(sizes[one] for one in summed)], LENGTHS)
    if joined is None:
        return None
    order = [weight.letters.index(letter) for letter in free + summed]
    matrix = build.permuted_matrix(weight.node, order, math.prod(sizes[one] for one in free))
    product = _linear_of(facts, build, node, joined, matrix)
    made = values.reshape(product, [sizes[one] for one in kept + free], LENGTHS)
    return made and values.permute(made, [(kept + free).index(letter) for letter in output])
