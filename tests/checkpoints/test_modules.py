"""Front end: modules, what must be said of them, and which are refused before anything is built."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.utils._sympy.functions import Min

from qcompile.checkpoints import frontend, state, tracing
from qcompile.errors import UnsupportedError, UsageError
from tests.support import modules


def test_module_needs_to_be_described() -> None:
    module = modules.Plain(layers=1)
    ids = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(UsageError, match="needs max_position"):
        frontend.load(module, example_inputs=(ids,))
    with pytest.raises(UsageError, match="example_inputs is needed"):
        frontend.load(module, max_position=64)
    with pytest.raises(UsageError, match="must be int64"):
        frontend.load(module, example_inputs=(ids.float(),), max_position=64)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_position": 0}, "max_position must be a whole number of at least"),
        ({"max_position": "64"}, "not '64'"),
        ({"max_position": True}, "not True"),
        ({"example_inputs": ()}, "example_inputs must be int64"),
        ({"example_inputs": ([1, 2],)}, "example_inputs must be int64"),
        ({"model": modules.Plain}, "an ExportedProgram, and is Plain"),
        ({"model": {}}, "and is of type dict"),
    ],
)
def test_module_that_is_described_wrongly(wrong: dict[str, Any], message: str) -> None:
    ids = torch.zeros(1, 4, dtype=torch.int64)
    given = {"model": modules.Plain(layers=1), "example_inputs": (ids,), "max_position": 64} | wrong
    with pytest.raises(UsageError, match=message):
        frontend.load(given.pop("model"), **given)


def test_module_facts_and_state() -> None:
    module = modules.randomized(modules.Plain(layers=1)).half()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    graph = frontend.load(module, example_inputs=(torch.zeros(1, 4, dtype=torch.int64),), max_position=64)
    assert graph.info.vocab_size == modules.VOCAB
    assert graph.info.parameters == sum(p.numel() for p in module.parameters())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert graph.weights["embed.weight"].dtype == torch.float32


class Branching(nn.Module):
    def forward(self, ids: Tensor) -> Tensor:
        return ids.float()[..., None] if ids.sum() > 0 else ids.float()[..., None] * 2


class TwoOutputs(nn.Module):
    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return ids.float()[..., None], ids


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Branching(), "Branching cannot be exported: it branches on the values of its inputs"),
        (TwoOutputs(), "must return logits"),
    ],
)
def test_modules_that_are_refused(module: nn.Module, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnsupportedError, match=message):
        frontend.load(module, example_inputs=(torch.zeros(1, 4, dtype=torch.int64),), max_position=64)
    assert not capfd.readouterr().err  # torch would print the graph up to there


def test_module_with_a_nan() -> None:
    module = modules.randomized(modules.Plain(layers=1))
    with torch.no_grad():
        module.embed.weight[3, 4] = float("nan")
    graph = frontend.load(module, example_inputs=(torch.zeros(1, 4, dtype=torch.int64),), max_position=64)
    with pytest.raises(UsageError, match=r"weight embed\.weight holds NaN"):
        graph.weights["embed.weight"]


class Longer(modules.Plain):
    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = super().forward(ids)
        return y * 2 if ids.shape[1] > 5 else y


class Fixed(modules.Plain):
    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = super().forward(ids)
        return y * torch.ones(7, 1)


@pytest.mark.parametrize(("kind", "taken"), [(modules.Plain, True), (Longer, False), (Fixed, False)])
def test_an_export_by_example_sets_no_condition(kind: Callable[..., nn.Module], taken: bool) -> None:
    """What torch needs where it cannot prove that a condition always holds, whichever version is here."""
    module = modules.randomized(kind(layers=1))
    program = tracing._export_by_example(state.Watched(module), [torch.zeros(2, 7, dtype=torch.int64)], 64)
    assert (program is not None) == taken
    if program is not None:
        taken = program.graph_signature.user_inputs
        sizes = next(node.meta["val"].shape for node in program.graph.nodes if node.name in taken)
        assert all(isinstance(size, torch.SymInt) for size in sizes)
    with pytest.raises(UnsupportedError, match="any batch and number of tokens") if not taken else nullcontext():
        frontend.load(module, example_inputs=(torch.zeros(2, 7, dtype=torch.int64),), max_position=64)


def test_conditions_that_always_hold() -> None:
    one, same, other = sympy.symbols("s1 s2 s3", integer=True)
    batch, tokens = sympy.symbols("batch tokens", integer=True, positive=True)
    sizes = {one: tokens, same: tokens, other: batch}
    for condition in (
        sympy.Eq(Min(8 * one, 24 * one), 8 * one),  # as of strides, where a dimension is taken into another
        sympy.Eq(Min(one**2, 4 * one**2), one**2),
        sympy.Eq(one * Min(256, 256 * one), 256 * one),
        sympy.Eq(one, same),
        sympy.Ge(one, 1),
        Min(128, one) <= one,
    ):
        assert tracing.always(condition, sizes), condition
    for condition in (
        sympy.Eq(Min(8 * one, 24 * one), 24 * one),
        sympy.Eq(Min(8 * one, 24 * other), 8 * one),
        sympy.Eq(one, other),
        sympy.Gt(one, 5),
        Min(128, one) <= other,
        Min(128, one) < one,
        sympy.Eq(sympy.Mod(one, 8), 0),
    ):
        assert not tracing.always(condition, sizes), condition
