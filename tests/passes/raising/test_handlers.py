"""The table of rules: every rule is in it, every operator exists, and an operator without rules is refused."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from qcompile.checkpoints import frontend
from qcompile.errors import UnsupportedError
from qcompile.passes import raising
from qcompile.passes.raising import HANDLERS
from qcompile.passes.raising.walk import raise_graph
from tests.support import modules
from tests.support.raising import LONGEST, inputs, raise_module, used

SIGNATURE = ["Facts", "Builder", "fx.Node", "Arguments"]
"""The types of a rule's parameters."""

PLAIN_NAMES = {
    "getitem",
    "qcompile::attention",
    "qcompile::within",
    "qcompile::causal_conv",
    "qcompile::linear_recurrence",
    "qcompile::log_decay",
}
"""Operators in the table that are not ATen's."""


class Activated(nn.Module):
    """Logits of silu of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(modules.VOCAB, 8), nn.Linear(8, modules.VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(F.silu(self.embed(ids)))


def rules() -> set[object]:
    """All functions of the package with the signature of a rule."""
    package = [
        importlib.import_module(f"{raising.__name__}.{each.name}") for each in pkgutil.iter_modules(raising.__path__)
    ]
    functions = {each for module in package for _, each in inspect.getmembers(module, inspect.isfunction)}
    return {
        each for each in functions if [p.annotation for p in inspect.signature(each).parameters.values()] == SIGNATURE
    }


def test_every_rule_is_in_the_table_and_is_documented() -> None:
    table = {rule for chain in HANDLERS.values() for rule in chain}
    assert rules() == table and len(table) > 50
    assert all(rule.__doc__ for rule in table)


@pytest.mark.parametrize("operator", HANDLERS)
def test_an_operator_of_the_table(operator: str) -> None:
    chain = HANDLERS[operator]
    assert chain and len(set(chain)) == len(chain)
    assert operator in PLAIN_NAMES or hasattr(torch.ops.aten, operator)


def test_an_operator_without_rules_is_refused_by_name() -> None:
    module = modules.randomized(Activated())
    assert used(raise_module(module))["unary"] == 1
    graph = frontend.load(module, example_inputs=inputs()[:1], max_position=LONGEST)
    for operator in ("embedding", "silu", "linear"):
        fewer = {name: chain for name, chain in HANDLERS.items() if name != operator}
        with pytest.raises(UnsupportedError, match=f"{operator} has no counterpart in qcompile"):
            raise_graph(graph, fewer)


def test_rules_are_tried_in_order_until_one_applies() -> None:
    graph = frontend.load(modules.randomized(Activated()), example_inputs=inputs()[:1], max_position=LONGEST)
    tried: list[str] = []

    def declines(*_: object) -> None:
        tried.append("declines")

    def applies(*given: object) -> object:
        tried.append("applies")
        return HANDLERS["silu"][0](*given)

    raised, notes = raise_graph(graph, dict(HANDLERS) | {"silu": (declines, applies, declines)})
    assert tried == ["declines", "applies"] and not notes
    assert used(raised)["unary"] == 1
