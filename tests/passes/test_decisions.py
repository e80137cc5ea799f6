"""What a pass has decided about precision stands, or a note says what became of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from qcompile.codegen.lower import lower
from qcompile.codegen.packing import WeightTable
from qcompile.errors import PassError
from qcompile.graph import Graph
from qcompile.passes.assign_precision import AssignPrecision
from qcompile.passes.base import Pass, PassResult, apply, run_passes
from qcompile.passes.calibration.salience import Salience
from qcompile.passes.latent import Latent
from qcompile.passes.merge import Merge
from qcompile.passes.schedule import configure
from qcompile.passes.split import Split
from qcompile.recipes import get_recipe
from tests.codegen.cpu.test_experts import decoder as mixture
from tests.passes.test_split import fused
from tests.support.graphs import decoder, latent

FOUR = AssignPrecision("w4_asym_g128", "int8", "w8_sym_channel", "int8")
HEADS = 8
DOWN = 6
"""The down projection of layer 0 among the linears of `decoder`."""


@dataclass(frozen=True)
class Decide(Pass):
    """Gives linear `number` a precision; None takes it away."""

    name: ClassVar[str] = "decide"
    weight: str | None = "w8_sym_channel"
    activation: str | None = "int8"
    number: int = DOWN
    says: bool = False
    operator: str = "linear"

    def run(self, graph: Graph) -> PassResult:
        graph = graph.clone()
        node = graph.calls(self.operator)[self.number]
        given = {"weight": self.weight, "activation": self.activation}
        node.meta["precision"] = {part: format for part, format in given.items() if format}
        return PassResult(graph, 1, (f"node {node.name}: so it shall be",) * self.says)


@dataclass(frozen=True)
class Rebuild(Pass):
    """Replaces linear DOWN by one that computes the same."""

    name: ClassVar[str] = "rebuild"

    def run(self, graph: Graph) -> PassResult:
        graph = graph.clone()
        node = graph.calls("linear")[DOWN]
        with graph.fx.inserting_before(node):
            graph.replace(node, graph.call("linear", *node.args))
        return PassResult(graph, 1)


def formats(graph: Graph) -> list[tuple[str, str]]:
    return [tuple(node.meta["precision"].values()) for node in graph.calls("linear")]  # type: ignore[misc]


def test_a_decision_stands_and_a_note_says_so() -> None:
    (_, graph), records = run_passes(decoder(), (Decide(), FOUR))
    expected = [("w4_asym_g128", "int8")] * 14 + [("w8_sym_channel", "int8")]
    expected[DOWN] = ("w8_sym_channel", "int8")
    assert formats(graph) == expected
    name = graph.calls("linear")[DOWN].name
    note = f"node {name}: keeps w8_sym_channel x int8, which an earlier pass decided"
    assert (records[1].fired, records[1].notes) == (14, (note,))


def test_what_is_not_decided_is_added() -> None:
    graph = run_passes(decoder(), (Decide("w8_sym_channel", None), Decide(None, "bf16", 0), FOUR))[0][-1]
    assert formats(graph)[DOWN] == ("w8_sym_channel", "int8") and formats(graph)[0] == ("w4_asym_g128", "bf16")


def test_a_decision_reaches_the_kernels() -> None:
    passes = configure(get_recipe("w4a8").settings(), {})[1:]
    step = run_passes(decoder(), (Decide(), *passes))[0][-1]
    calls = json.loads(lower(step, WeightTable()).to_json())["calls"]
    result = [call["format"] for call in calls if call["kernel"] == "gemm"]
    assert result.count("w8_sym_channel") == 2 < len(result)  # the decided one, and the head


@pytest.mark.parametrize(
    ("decide", "message"),
    [
        (Decide("w3", "int8"), "assign_precision: node linear_6: weight format w3 is unknown; there are f32"),
        (Decide("qoq_g128", "bf16"), "weights in qoq_g128 have no kernel for activations in bf16; there are int8"),
        (Decide("bf16", None), "node linear_6: weights in bf16 have no kernel for activations in int8; there are bf16"),
    ],
)
def test_a_decision_without_kernels_is_refused(decide: Decide, message: str) -> None:
    with pytest.raises(PassError, match=message):
        run_passes(decoder(), (decide, FOUR))


def test_a_pass_that_changes_a_decision_says_so() -> None:
    before = apply(Decide(), decoder()).graph
    silent = apply(Decide("w4_asym_g128"), before)
    change = "an earlier pass decided w8_sym_channel x int8, now w4_asym_g128 x int8"
    assert silent.notes == (f"node linear_6: {change}",)
    assert apply(Decide("w4_asym_g128", says=True), before).notes == ("node linear_6: so it shall be",)
    assert apply(Decide(None, None), before).notes[0].endswith("now undecided")
    assert apply(Decide(), before).notes == ()
    assert apply(Decide("w4_asym_g128", number=0), before).notes == ()


def test_a_pass_that_loses_a_decision_says_so() -> None:
    before = apply(Decide(), decoder()).graph
    notes = apply(Rebuild(), before).notes
    assert notes == ("node linear_6: an earlier pass decided w8_sym_channel x int8, replaced by linears without it",)
    assert apply(Rebuild(), apply(Decide(number=0), decoder()).graph).notes == ()


def test_parts_of_a_linear_inherit_its_decision() -> None:
    graph = fused()
    number = next(n for n, node in enumerate(graph.calls("linear")) if len(node.users) > 1)
    (_, after), records = run_passes(graph, (Decide(number=number), Split()))
    assert len([1 for node in after.calls("linear") if "precision" in node.meta]) == 3
    assert not [note for note in records[1].notes if "earlier pass" in note]


def test_what_absorbs_a_linear_inherits_its_decision() -> None:
    graph = latent(heads=HEADS)
    number = next(n for n, node in enumerate(graph.calls("linear")) if str(node.args[1]) == "v")
    (_, after), records = run_passes(graph, (Decide(number=number), Latent()))
    assert records[1].fired == 1 and not [note for note in records[1].notes if "earlier pass" in note]
    assert [
        node.meta["precision"]["weight"] for node in after.calls("expert_linear") if node.meta.get("precision")
    ] == ["w8_sym_channel"]


def test_experts_keep_a_format_that_they_have_kernels_for() -> None:
    mixed = AssignPrecision("mix_4_8", "int8_g128", "f32", "f32")
    decide = Decide("w8_sym_channel", "int8_g128", 0, operator="expert_linear")
    after, records = run_passes(mixture(), (decide, mixed))
    assert [node.meta["precision"]["weight"] for node in after[-1].calls("expert_linear")][:2] == [
        "w8_sym_channel",
        "w4_asym_g128",
    ]
    assert records[1].notes[0].startswith("experts have no kernel in mix_4_8")
    with pytest.raises(PassError, match="node expert_linear: experts have no kernel in mix_4_8; f32, bf16"):
        run_passes(mixture(), (Decide("mix_4_8", None, 0, operator="expert_linear"), mixed))


def test_marked_rows_stay_marked() -> None:
    mixed = AssignPrecision("mix_4_8", "int8_g128", "f32", "f32")
    graph = run_passes(decoder(), (mixed, Merge()))[0][-1]
    node = graph.calls("linear")[1]
    graph.weights.add_tensor("own", torch.ones(node.meta["val"].shape[-1], dtype=torch.bool))
    node.meta["precision"] = {**node.meta["precision"], "wide": "own"}
    result = apply(Salience(enabled=True), graph)
    after = next(each for each in result.graph.nodes if each.name == node.name)
    assert after.meta["precision"] == node.meta["precision"]
    assert result.notes[0] == f"node {node.name}: keeps rows that an earlier pass marked"
