"""Raise: for every style of writing a decoder, the raised graph has our operators and the same logits."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn

from qcompile import check
from qcompile.checkpoints import frontend
from qcompile.errors import UnsupportedError
from qcompile.passes.base import apply
from qcompile.passes.raising import Raise
from tests.support import modules
from tests.support.cases import first
from tests.support.programs import dynamic_size
from tests.support.raising import LONGEST, inputs, raise_module, used

STYLES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "plain": (modules.Plain, 1),
    "plain, one kv head": (lambda: modules.Plain(kv_heads=1), 1),
    "plain, all kv heads": (lambda: modules.Plain(kv_heads=modules.HEADS), 1),
    "classic": (modules.Classic, 1),
    "modern": (modules.Modern, 2),
    "cached": (modules.Cached, 1),
    "cached, slow turns": (lambda: modules.Cached(size=64, base=1e6), 1),
    "modern, wide window": (lambda: modules.Modern(window=LONGEST), 2),
}


@pytest.mark.parametrize("style", first(("plain", "classic", "modern", "cached"), STYLES))
def test_same_logits(style: str) -> None:
    build, takes = STYLES[style]
    module = modules.randomized(build())
    graph = raise_module(module, takes)
    exact_module = copy.deepcopy(module).double()
    for tokens in (1, 2, 9, 48):
        ids, positions = inputs(tokens=tokens)
        with torch.no_grad():
            expected = module(*(ids, positions)[:takes])
            exact = exact_module(*(ids, positions)[:takes])
        assert check.max_relative_error(graph.run(ids, positions), expected) < 3e-6
        assert check.max_relative_error(graph.run(ids, positions, dtype=torch.float64), exact) < 1e-6


def test_exported_program() -> None:
    module = modules.randomized(modules.Plain())
    sizes = {0: dynamic_size("b"), 1: dynamic_size("t", max=LONGEST)}
    program = torch.export.export(module, inputs()[:1], dynamic_shapes=(sizes,))
    ids, positions = inputs(3, 5)
    graph = frontend.load(program, max_position=LONGEST)
    for source in (graph, frontend.load(program.run_decompositions(), max_position=LONGEST)):
        raised = apply(Raise(), source).graph
        assert check.max_relative_error(raised.run(ids, positions), module(ids)) < 3e-6
    assert check.max_relative_error(graph.run(ids), module(ids)) < 3e-6


def test_operators_and_nothing_else() -> None:
    graph = raise_module(modules.randomized(modules.Plain(layers=1)))
    assert used(graph) == Counter(
        embedding=1, linear=8, rms_norm=3, split_heads=3, rope=2, attention=1, merge_heads=1, unary=1, mul=1, add=2
    )
    attention = graph.calls("attention")[0]
    assert [tuple(n.meta["val"].shape[2:]) for n in attention.args[:3]] == [(6, 8), (2, 8), (2, 8)]
    assert [node.target for node in graph.inputs] == ["token_ids", "positions"]
    assert not any(node.kwargs for node in graph.nodes)


def test_positions_decide_not_places() -> None:
    graph = raise_module(modules.randomized(modules.Classic()))
    ids, positions = inputs()
    table = graph.weights["places.weight"]
    graph.weights.add_tensor("places.weight", table.roll(3, 0))
    assert not torch.equal(graph.run(ids, positions), graph.run(ids, positions + 3))
    graph.weights.add_tensor("places.weight", table)
    moved = graph.run(ids, positions + 3)
    graph.weights.add_tensor("places.weight", table.roll(-3, 0))
    assert torch.equal(graph.run(ids, positions), moved)


def test_fixed_sizes_are_refused() -> None:
    program = torch.export.export(modules.randomized(modules.Plain()), inputs()[:1])
    with pytest.raises(UnsupportedError, match="fixed sizes; export with dynamic"):
        apply(Raise(), frontend.load(program, max_position=LONGEST))


def test_positions_beyond_a_table() -> None:
    graph = frontend.load(modules.randomized(modules.Classic(longest=32)), example_inputs=inputs()[:1], max_position=32)
    raised = apply(Raise(), graph)
    assert raised.fired and check.sample(raised.graph, tokens=40).shape == (32, modules.VOCAB)
    sizes = {0: dynamic_size("b"), 1: dynamic_size("t", max=31)}
    program = torch.export.export(
        modules.randomized(modules.Classic(longest=32)), inputs()[:1], dynamic_shapes=(sizes,)
    )
    with pytest.raises(UnsupportedError, match="takes at most 31 tokens; give a max_position of at most 32"):
        apply(Raise(), frontend.load(program, max_position=40))
