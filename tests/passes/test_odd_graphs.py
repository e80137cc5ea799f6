"""Graphs that share values that are usually separate, or have an unusual order: passes keep their function."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from qcompile import check
from qcompile.calibration import Calibration
from qcompile.graph import Graph
from qcompile.passes.assign_precision import AssignPrecision
from qcompile.passes.base import Pass, apply
from qcompile.passes.cache import Cache
from qcompile.passes.center_keys import CenterKeys
from qcompile.passes.fold_norms import FoldNorms
from qcompile.passes.fuse import Fuse
from qcompile.passes.merge import Merge
from qcompile.passes.plan_memory import PlanMemory
from qcompile.passes.quantize import Quantize
from qcompile.passes.reorder import Reorder
from qcompile.passes.rotate import Rotate
from qcompile.passes.rotate_keys import RotateKeys
from qcompile.passes.smooth import Smooth
from qcompile.passes.smooth_attention import SmoothAttention
from tests.support.graphs import Begun, sequence_inputs

VOCAB, WIDTH = 50, 48


class Block:
    """Builds a graph that starts with an embedding `x`; weights are named by their number."""

    def __init__(self) -> None:
        self.begun = Begun(VOCAB)
        self.graph, self.number = self.begun.graph, 0
        self.x = self.graph.call("embedding", self.begun.ids, self.weight(VOCAB, WIDTH))

    def weight(self, *shape: int) -> fx.Node:
        self.number += 1
        return self.begun.weight(f"w{self.number}", *shape)

    def linear(self, x: fx.Node, n: int) -> fx.Node:
        return self.graph.call("linear", x, self.weight(n, x.meta["val"].shape[-1]))

    def norm(self, x: fx.Node) -> fx.Node:
        return self.graph.call("rms_norm", x, self.weight(x.meta["val"].shape[-1]), 1e-6)

    def heads(self, x: fx.Node, count: int, size: int = 16) -> fx.Node:
        return self.graph.call("split_heads", self.linear(x, count * size), count)

    def qkv(self, x: fx.Node) -> list[fx.Node]:
        return [self.heads(x, count) for count in (4, 2, 2)]

    def turned(self, x: fx.Node, interleaved: bool = False, rotary: int = 16) -> fx.Node:
        self.number += 1
        inv_freq = self.begun.kept(f"w{self.number}", 10000.0 ** -(torch.arange(0, rotary, 2) / rotary))
        return self.graph.call("rope", x, self.begun.positions, inv_freq, 1.0, interleaved)

    def attended(self, q: fx.Node, k: fx.Node, v: fx.Node) -> fx.Node:
        mixed = self.graph.call("merge_heads", self.graph.call("attention", q, k, v, 0.25))
        return self.linear(mixed, WIDTH)

    def add(self, a: fx.Node, b: fx.Node) -> fx.Node:
        return self.graph.call("add", a, b)

    def done(self, x: fx.Node) -> Graph:
        self.graph.fx.output(self.linear(self.norm(x), VOCAB))
        return self.graph


def keys_are_values(size: int) -> Graph:
    one = Block()
    y = one.norm(one.x)
    both = one.heads(y, 2, size)
    return one.done(one.add(one.x, one.attended(one.heads(y, 4, size), both, both)))


def queries_are_values() -> Graph:
    one = Block()
    y = one.norm(one.x)
    both = one.heads(y, 4)
    return one.done(one.add(one.x, one.attended(both, one.heads(y, 4), both)))


def values_normed_alike() -> Graph:
    """All heads of values share one norm weight."""
    one = Block()
    q, k, v = one.qkv(one.norm(one.x))
    return one.done(one.add(one.x, one.attended(q, k, one.norm(v))))


def turned_apart(interleaved: bool = False, keys: int = 16) -> Graph:
    """Queries and keys rotate in different pairs; with `keys` = 0, keys do not rotate."""
    one = Block()
    q, k, v = one.qkv(one.norm(one.x))
    k = one.turned(k, rotary=keys) if keys else k
    return one.done(one.add(one.x, one.attended(one.turned(q, interleaved), k, v)))


def two_attentions(turned: tuple[int, ...]) -> Graph:
    """Two attentions over one value, with both ropes first and in reverse order; `turned` lists the rotated ones."""
    one = Block()
    y = one.norm(one.x)
    result = [one.qkv(y), one.qkv(y)]
    for each in turned:
        result[each][:2] = [one.turned(t) for t in result[each][:2]]
    first, second = (one.attended(*each) for each in result)
    return one.done(one.add(one.add(one.x, first), second))


def squared() -> Graph:
    one = Block()
    x = one.add(one.x, one.attended(*one.qkv(one.norm(one.x))))
    y = one.linear(one.norm(x), 64)
    return one.done(one.add(x, one.linear(one.graph.call("mul", y, y), WIDTH)))


def doubled() -> Graph:
    one = Block()
    y = one.attended(*one.qkv(one.norm(one.x)))
    return one.done(one.add(y, y))


def norms_read_in_turn() -> Graph:
    """The second of two norms is read first."""
    one = Block()
    first, second = one.norm(one.x), one.norm(one.x)
    x = one.add(one.x, one.linear(one.graph.call("unary", one.linear(second, 64), "silu"), WIDTH))
    return one.done(one.add(x, one.attended(*one.qkv(first))))


GRAPHS: dict[str, Callable[[], Graph]] = {
    "keys are values": lambda: keys_are_values(16),
    "wide keys are values": lambda: keys_are_values(48),
    "queries are values": queries_are_values,
    "values with a norm of all heads": values_normed_alike,
    "queries interleaved, keys not": lambda: turned_apart(interleaved=True),
    "queries turned, keys not": lambda: turned_apart(keys=0),
    "queries turned in more pairs": lambda: turned_apart(keys=8),
    "the second attention alone turned": lambda: two_attentions((1,)),
    "two attentions turned, the second first": lambda: two_attentions((1, 0)),
    "a square": squared,
    "twice the same": doubled,
    "norms read in turn": norms_read_in_turn,
}
PASSES: tuple[Pass, ...] = (
    FoldNorms(),
    Rotate(online=True),
    Smooth(),
    CenterKeys(),
    SmoothAttention(),
    RotateKeys(),
    Reorder(),
    Reorder(outliers=True),
)
STEP: tuple[Pass, ...] = (AssignPrecision(), Merge(), Quantize(), Cache("kv32"), Fuse(), PlanMemory())


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("name", GRAPHS)
def test_the_function_stays(name: str, text: bool) -> None:
    before = GRAPHS[name]()
    if text:
        before.calibration = Calibration(sequence_inputs(24, 3)[0])
    for passes in (*((one,) for one in PASSES), PASSES):
        after = before
        for rewrite in passes:
            after = apply(rewrite, after).graph
        assert check.equivalent(after, before, sequence_inputs(9)) < 1e-7, passes  # measured values are float32


@pytest.mark.parametrize("name", GRAPHS)
def test_a_step_does_the_same(name: str) -> None:
    before = after = GRAPHS[name]()
    for rewrite in STEP:
        after = apply(rewrite, after).graph
    assert check.max_relative_error(check.sample(after), check.sample(before)) < 1e-5
