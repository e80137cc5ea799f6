"""Rules for qcompile's operators of recurrent layers, which a trace contains in place of the kernels for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import fx

from qcompile import ops
from qcompile.passes.raising.builder import Builder, feature_sizes
from qcompile.passes.raising.facts import LENGTHS, Constant, Facts, Known
from qcompile.passes.raising.nodes import Arguments, is_call, strip, unsupported
from qcompile.passes.raising.values import ONE, Value, identity


def causal_conv(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """qcompile::causal_conv of x [B, T, F] with a weight [F, W], and a bias [F] or None."""
    width = facts.shape(a.x)[-1]
    x = _by_token(facts, node, "x", a.x, (width,))
    weight = _stored(facts, node, "weight", a.weight, ((width, a.weight.meta["val"].shape[-1]),))
    bias = () if a.bias is None else (_stored(facts, node, "bias", a.bias, ((width,),)),)
    made = build.call("causal_conv", build.emit(x, (width,), node), *(build.weight(w) for w in (weight, *bias)))
    return identity(made, ("B", "T", "F"), (width,))


def padded_conv(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """The first T results of conv1d over x [B, F, T] with zeros on both sides, and a weight [F, 1, W]: causal_conv."""
    conv = strip(a.input_)
    first = facts.shape(node)[2:] == [LENGTHS["T"]] and (a.start or 0) == 0 and a.step in (None, 1)
    if not first or not is_call(conv, "conv1d") or a.dim % node.meta["val"].dim() != 2:
        return None
    return _depthwise(facts, build, conv, Arguments(conv).input, int(conv.args[1].meta["val"].shape[-1]) - 1)


def conv_of_padded(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """conv1d over x [B, F, T] with zeros before it, and a weight [F, 1, W]: causal_conv."""
    pad, width = strip(a.input), int(a.weight.meta["val"].shape[-1])
    if not is_call(pad, "constant_pad_nd", "pad"):
        return None
    given = Arguments(pad)
    zeros = getattr(given, "mode", "constant") == "constant" and not given.value
    return _depthwise(facts, build, node, given.input_, 0) if zeros and list(given.pad) == [width - 1, 0] else None


def _depthwise(facts: Facts, build: Builder, conv: fx.Node, x: fx.Node, padding: int) -> Known:
    """qcompile::causal_conv for the conv1d `conv` of x [B, F, T], or of x with zeros before it; None for others."""
    given, width = Arguments(conv), facts.shape(x)[1]
    settings = [list(getattr(given, name)) for name in ("stride", "padding", "dilation")]
    value, weight = facts.value(x), facts.known.get(given.weight)
    if settings != [[1], [padding], [1]] or given.groups != width or given.weight.meta["val"].shape[:2] != (width, 1):
        return None
    if value is None or value.base is None or value.dims != ("B", "F", "T") or not isinstance(weight, Constant):
        return None
    bias = () if given.bias is None else (build.weight(_stored(facts, conv, "bias", given.bias, ((width,),))),)
    made = build.call("causal_conv", build.emit(value, (width,), conv), build.matrix(given.weight, 0, 2), *bias)
    return identity(made, ("B", "F", "T"), (width,))


def linear_recurrence(facts: Facts, build: Builder, node: fx.Node, a: Arguments) -> Known:
    """qcompile::linear_recurrence. Equal heads of q and k in a row become one, which several heads of v read."""
    (key_heads, size), (heads, width) = facts.shape(a.k)[2:], facts.shape(a.v)[2:]
    if heads % key_heads:
        raise unsupported(node, f"has {heads} heads of values, no multiple of its {key_heads} heads of keys")
    q, k = (_by_token(facts, node, name, item, (key_heads, size)) for name, item in (("q", a.q), ("k", a.k)))
    if (group := math.gcd(_run_length(q), _run_length(k))) > 1:
        q, k = (replace(each, terms=each.terms[:, ::group]) for each in (q, k))
    v = _by_token(facts, node, "v", a.v, (heads, width))
    by_key = a.decay.meta["val"].dim() == 4
    if facts.shape(a.decay)[2:] not in ([heads], [heads, size]):
        either = f"[batch, tokens, {heads}] nor [batch, tokens, {heads}, {size}]"
        raise unsupported(node, f"has a decay that is neither {either}")
    decay = _by_token(facts, node, "decay", a.decay, (heads, size) if by_key else (heads,))
    gain = None if a.gain is None else _by_token(facts, node, "gain", a.gain, (heads,))
    rates = None if a.rates is None else build.weight(_stored(facts, node, "rates", a.rates, ((heads,), (heads, size))))
    source = next((each for each in (v, k, q, decay) if each.base is not None), None)
    if source is None:
        raise unsupported(node, "reads no features")
    x = build.flat(build.emit(source, source.sizes, node))
    emitted = [_emitted(build, value, node, x) for value in (q, k, v, decay)]
    if rates is None and decay.base is not None:
        emitted[-1], rates = _without_weight(build, emitted[-1])
    taken = None if gain is None else _emitted(build, gain, node, x)
    made = build.call("linear_recurrence", *emitted, rates, taken, bool(a.delta))
    return identity(made, ("B", "T", "F", "F"), (heads, width))


def _emitted(build: Builder, value: Value, node: fx.Node, x: fx.Node) -> fx.Node:
    """The raised tensor that holds `value`; of numbers, one computed from the number of tokens of `x` [B, T, F]."""
    if value.base is not None:
        return build.emit(value, value.sizes, node)
    if len(value.terms) != 1 or (value.terms["kind"] != ONE).any():
        raise unsupported(node, "has an operand that depends on the position alone")
    numbers = torch.from_numpy(value.terms["coef"].astype(np.float32).ravel())
    made = build.gather([x], np.full(value.count, -1))  # zeros
    if numbers.any():
        made = build.call("add", made, build.constant("numbers", numbers))
    return build.shaped(made, value.sizes)


def _by_token(facts: Facts, node: fx.Node, name: str, item: fx.Node, sizes: Sequence[int]) -> Value:
    """`item` as a Value [B, T, *sizes]. Raises UnsupportedError naming `node` if its shape differs."""
    value = facts.require(item, f"{name} of {node}")
    if facts.shape(item) != [LENGTHS["B"], LENGTHS["T"], *sizes] or value.dims[:2] != ("B", "T"):
        raise unsupported(node, f"has a {name} that is not [batch, tokens, {', '.join(map(str, sizes))}]")
    return Value(value.base, ("B", "T", *("F" for _ in sizes)), value.terms.reshape(len(value.terms), *sizes))


def _stored(facts: Facts, node: fx.Node, name: str, weight: fx.Node, shapes: Sequence[Sequence[int]]) -> fx.Node:
    """`weight`, which must be computed from parameters, and have one of `shapes`."""
    if not isinstance(facts.known.get(weight), Constant):
        raise unsupported(node, f"has a {name} that is not computed from parameters")
    if tuple(weight.meta["val"].shape) not in shapes:
        raise unsupported(node, f"has a {name} of shape {tuple(weight.meta['val'].shape)}, not {shapes[0]}")
    return weight


def _run_length(value: Value) -> int:
    """The length of the runs of equal heads of a [B, T, H, K] value; 1 without such runs."""
    terms = value.terms
    changes = [h for h in range(1, terms.shape[1]) if not np.array_equal(terms[:, h], terms[:, h - 1])]
    return math.gcd(*(np.diff([0, *changes, terms.shape[1]]).tolist()))


def _without_weight(build: Builder, decay: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """(x, weight) for a decay that is x times a weight with an element for each of its features; else (decay, None)."""
    if ops.name_of(decay.target) == "split_heads":
        heads = ops.operand(decay, "heads")
        x, weight = _without_weight(build, ops.operand(decay, "x"))
        return (
            (decay, None) if weight is None else (build.shaped(x, feature_sizes(decay)), build.rows_of(weight, heads))
        )
    if ops.name_of(decay.target) != "mul" or not build.out.is_weight(ops.operand(decay, "b")):
        return decay, None
    x, weight = ops.operand(decay, "a"), ops.operand(decay, "b")
    flat = feature_sizes(decay) == feature_sizes(x) == tuple(weight.meta["val"].shape)
    return (x, weight) if flat else (decay, None)
